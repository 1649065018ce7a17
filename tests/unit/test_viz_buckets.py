"""Pictures of buckets, owners and ZeRO stages: their sentences counted by hand, and what is drawn."""

from matplotlib.patches import Rectangle

from labkit.parallel import ParameterSpec, plan_buckets
from labkit.viz import bucket_map, zero_stages

THREE = [ParameterSpec("p0", 100), ParameterSpec("p1", 300), ParameterSpec("p2", 50)]


def test_megatrons_three_parameters_over_four_ranks() -> None:
    figure = bucket_map(plan_buckets(THREE, dp=4, distributed_optimizer=True), 4)
    assert figure.sentence == (
        "3 parameters of 450 elements in 1 bucket of 512; 62 of padding (13.8%); each of 4 ranks owns 128; "
        "p1 alone has several owners: 3."
    )
    assert figure.png.startswith(b"\x89PNG")


def test_every_rank_is_drawn_where_it_owns() -> None:
    plan = plan_buckets(THREE, dp=4, bucket_size=256, distributed_optimizer=True)
    axes = bucket_map(plan, 4).fig.axes[0]
    drawn = [(p.get_x(), p.get_width(), p.get_y()) for p in axes.patches if isinstance(p, Rectangle)]
    for row, quarter in ((0, 96), (1, 32)):  # buckets of 384 and 128
        assert [x for x, width, y in drawn if y == row + 0.5 and width == quarter] == [quarter * r for r in range(4)]
    assert (64, 300, 0.08) in drawn, "p1, from the start of bucket 0"
    assert (0, 100, 1.08) in drawn, "p0, from the start of bucket 1"


def test_gaps_and_the_padding_at_the_end_are_told_apart() -> None:
    """p2 ends at 50 and p1 starts at 64; p1 ends at 364 and its bucket at 384; p0 fills 100 of the last 128."""
    figure = bucket_map(plan_buckets(THREE, dp=4, bucket_size=256, distributed_optimizer=True), 4)
    axes, (legend,) = figure.fig.axes[0], figure.fig.legends
    hatched = {
        hatch: [(p.get_x(), p.get_width(), int(p.get_y())) for p in axes.patches
                if isinstance(p, Rectangle) and p.get_hatch() == hatch and p.get_width()]
        for hatch in ("....", "////")
    }  # fmt: skip
    assert hatched["...."] == [(0, 364, 0), (0, 100, 1)], "under the parameters, seen where none lies"
    assert hatched["////"] == [(364, 20, 0), (100, 28, 1)]
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels[1:3] == ["gap to a multiple of 64", "padding at the end"]
    assert "62 of padding (13.8%)" in figure.sentence
    aligned = bucket_map(plan_buckets([ParameterSpec("a", 128)], dp=2, distributed_optimizer=True), 2)
    (legend,) = aligned.fig.legends
    assert not any(word in text.get_text() for text in legend.get_texts() for word in ("gap", "padding"))
    assert "no padding" in aligned.sentence


def test_a_little_padding_does_not_read_as_none() -> None:
    figure = bucket_map(plan_buckets([ParameterSpec("a", 250_000)], dp=2, distributed_optimizer=True), 2)
    assert "112 of padding (0.04%)" in figure.sentence  # 1954 x 128 = 250,112


def test_without_owners_every_element_is_everybodys() -> None:
    figure = bucket_map(plan_buckets(THREE, dp=4, bucket_size=200))
    assert figure.sentence == ("3 parameters of 450 elements in 2 buckets of 100 to 350; no padding.")


def test_of_many_buckets_the_first_and_the_last_are_drawn() -> None:
    plan = plan_buckets([ParameterSpec(f"p{i}", 128) for i in range(20)], dp=2, bucket_size=1)
    axes = bucket_map(plan, 2).fig.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"bucket {number}" for number in (0, 1, 2, 3, 16, 17, 18, 19)
    ]
    assert "12 buckets not drawn" in [text.get_text() for text in axes.texts]


def test_bytes_by_stage_of_the_papers_model() -> None:
    figure = zero_stages(dp=8, parameters=7.5e9)
    assert figure.sentence == (
        "bf16 weights with fp32 gradients on d = 8 ranks: 18 bytes per parameter replicated; stage 1: 7.5 (6 + 12/d); "
        "stage 2: 4 (2 + 16/d); stage 3: 2.25 (18/d); 7.5 billion parameters: 135.0, 56.2, 30.0, 16.9 GB."
    )
    axes = figure.fig.axes[0]
    ends = [max(p.get_x() + p.get_width() for p in axes.patches if round(p.get_y() + 0.35) == y) for y in range(4)]
    assert ends == [18, 7.5, 4, 2.25]
