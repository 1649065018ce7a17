"""Rank grids and traffic: sentences with numbers that were counted by hand, refusals."""

import pytest

from labkit.config import ParallelConfig
from labkit.viz import (
    TransformerTraffic,
    bytes_between_nodes,
    compare_orders,
    explore_layout,
    order_traffic,
    placed_ranks,
    rank_grid,
    rank_neighbours,
)

SMALL = TransformerTraffic(layers=2, hidden=8, seq_length=4, micro_batch_size=1, global_batch_size=4)
ACTIVATION = 4 * 8 * 2  # s b h in bf16


def test_grid_sentence_counts_groups_and_crossings() -> None:
    figure = rank_grid({"tp": 4, "pp": 2}, ("tp", "dp", "pp"), world_size=16)
    assert figure.sentence == (
        "16 ranks on 2 nodes of 8: tp 4 groups of 4, all inside a node; dp 8 groups of 2, all inside a node; "
        "pp 8 groups of 2, all across nodes."
    )
    assert figure.png.startswith(b"\x89PNG")


def test_grid_of_a_part_of_the_ranks_and_of_uneven_crossings() -> None:
    # Two nodes of 3: pairs (4, 5), (6, 7), (8, 9) lie on nodes 0, (0, 1), 1.
    figure = rank_grid(ParallelConfig(tp=2, rank_offset=4), "tp", world_size=6, gpus_per_node=3)
    assert figure.sentence == "6 ranks on 2 nodes of 3: tp 3 groups of 2, 1 of them across nodes."


def test_the_papers_512_ranks() -> None:
    figure = rank_neighbours(0, {"tp": 8}, ("tp", "dp"), world_size=512)
    assert figure.sentence == (
        "512 ranks on 64 nodes of 8, rank 0: tp [0, 1, 2, 3, 4, 5, 6, 7] on 1 node; "
        "dp [0, 8, 16, ..., 504] on 64 nodes."
    )
    assert len(figure.png) < 100_000


def test_unknown_kind_and_node_size_are_refused() -> None:
    with pytest.raises(ValueError, match="'xp' is not a kind of group"):
        rank_grid({"tp": 2}, "xp", world_size=4)
    with pytest.raises(ValueError, match="gpus_per_node is 0"):
        rank_grid({"tp": 2}, "tp", world_size=4, gpus_per_node=0)


def test_bytes_of_each_kind_counted_by_hand() -> None:
    def crossing(**layout) -> dict[str, float]:
        found = bytes_between_nodes(SMALL, layout, world_size=4, gpus_per_node=2)
        return {kind: amount for kind, amount in found.items() if amount}

    # dp 4 over two nodes: ring 0-1-2-3 has 2 links between nodes, each 2 * 3/4 of 12 L h^2 gradients of 4 bytes.
    assert crossing() == {"dp": 2 * 1.5 * 12 * 2 * 64 * 4}
    # tp 2 inside nodes, dp 2 across: 2 groups of 2 links, each 2 * 1/2 of half the gradients.
    assert crossing(tp=2) == {"dp": 4 * 1.0 * 12 * 2 * 64 * 4 / 2}
    # tp 2 across nodes: 2 groups of 2 links; 4 all-reduces, 2 layers, 4 / 2 microbatches.
    assert crossing(tp=2, order="dp-tp-pp") == {"tp": 4 * 4 * 2 * 2 * 1.0 * ACTIVATION}
    # pp 2: 2 pipelines of one link, 4 / 2 microbatches there and back.
    assert crossing(pp=2) == {"pp": 2 * 2 * 2 * ACTIVATION}
    # cp 2 across nodes: 2 rings of 2 links; 2 microbatches, 2 layers, 3 hops of keys and values of half a sequence.
    assert crossing(cp=2, order="dp-cp-pp")["cp"] == 4 * 2 * 2 * 3 * 2 * ACTIVATION / 2


def test_bytes_of_experts_counted_by_hand() -> None:
    model = TransformerTraffic(layers=2, hidden=8, seq_length=4, global_batch_size=4, num_experts=4, top_k=2)
    found = bytes_between_nodes(model, {"ep": 4}, world_size=4, gpus_per_node=2)
    # Each rank sends half of its tokens' two copies to the other node: 4 ranks, 4 all-to-alls, 2 layers, 1 microbatch.
    assert found["ep"] == 4 * (2 * ACTIVATION / 2) * 4 * 2
    assert found["edp"] == 0
    assert found["dp"] == 2 * 1.5 * 4 * 2 * 64 * 4


def test_the_usual_order_is_as_good_as_any_for_the_papers_model() -> None:
    rows = order_traffic(TransformerTraffic(), {"tp": 4, "pp": 2}, world_size=16)
    assert len(rows) == 6
    assert next(iter(rows)) == "tp-dp-pp"
    assert rows["tp-dp-pp"]["tp"] == rows["tp-dp-pp"]["dp"] == 0 < rows["tp-dp-pp"]["pp"]
    assert sum(rows["pp-dp-tp"].values()) > 100 * sum(rows["tp-dp-pp"].values())
    sentence = compare_orders(TransformerTraffic(), {"tp": 4, "pp": 2}, world_size=16).sentence
    assert sentence.startswith("16 ranks on nodes of 8, tp 4 pp 2: tp-dp-pp sends 25.8 GB between nodes in a step")


def test_ties_and_units_of_the_sentence() -> None:
    # One node: nothing crosses, so all six orders tie and there is no factor.
    silent = compare_orders(TransformerTraffic(), {"tp": 4, "pp": 2}, world_size=16, gpus_per_node=16).sentence
    assert silent.endswith(
        "tp-dp-pp sends 0.0 GB between nodes in a step, the least of 6 orders (5 others tie); pp-dp-tp sends 0.0 GB."
    )
    # pp-dp-tp: 4 rings such as 0-4-8-12 with 2 links between nodes, 4 all-reduces x 36 layers x 256 microbatches,
    # each 2 x 3/4 x 6,291,456 bytes: 2.783e12; tp-dp-pp: 512 samples x 4 tp ranks x 2 x 6,291,456 = 25.77e9.
    sentence = compare_orders(TransformerTraffic(), {"tp": 4, "pp": 2}, world_size=16).sentence
    assert "the least of 6 orders (1 other ties); pp-dp-tp sends 2.78 TB, 108 times as much." in sentence


def test_short_bars_are_drawn_a_second_time_only_if_there_are_some() -> None:
    drawn = {
        gpus: compare_orders(TransformerTraffic(), {"tp": 4, "pp": 2}, world_size=16, gpus_per_node=gpus)
        for gpus in (1, 8, 16)
    }
    assert {gpus: len(figure.fig.axes) for gpus, figure in drawn.items()} == {1: 1, 8: 2, 16: 1}
    # The longest of the short bars has 65.2 GB.
    assert 65.2 < drawn[8].fig.axes[1].get_xlim()[1] < 100


def test_a_ring_leaves_a_node_twice_if_its_digits_are_cut_once() -> None:
    cut_once = [{"tp": t, "dp": 0, "pp": 0} for t in range(4)]
    alternating = [cut_once[t] for t in (0, 2, 1, 3)]
    said = placed_ranks({"once": cut_once, "in turn": alternating}, [2, 2], ring=(0, 0)).sentence
    assert "once, 1 of 1 tp groups on more than one node, the ring of dp 0 pp 0 leaves a node 2 times" in said
    assert "in turn, 1 of 1 tp groups on more than one node, the ring of dp 0 pp 0 leaves a node 4 times" in said


def test_a_dense_model_refuses_no_order() -> None:
    # The experts of a model that has none cannot disagree: tp-cp-pp-dp was left out once.
    rows = order_traffic(SMALL, {"tp": 2, "cp": 2, "pp": 2}, world_size=16, gpus_per_node=4)
    assert len(rows) == 24 and "tp-cp-pp-dp" in rows
    # pp at stride 4 spans two nodes of 4: 8 chains of one link, 4 / 2 microbatches there and back, half a sequence.
    assert rows["tp-cp-pp-dp"]["pp"] == 8 * 2 * 2 * ACTIVATION / 2
    with pytest.raises(ValueError, match="ep 2 for a model without experts"):
        order_traffic(SMALL, {"ep": 2}, world_size=4)


def test_orders_that_the_experts_refuse_are_left_out_and_other_errors_are_not() -> None:
    mixture = TransformerTraffic(layers=2, hidden=8, seq_length=4, global_batch_size=4, num_experts=4)
    sizes = {"tp": 2, "pp": 2, "ep": 2, "etp": 1}
    rows = order_traffic(mixture, sizes, world_size=8, gpus_per_node=4)
    assert "tp-pp-ep-dp" not in rows and "tp-ep-dp-pp" in rows
    said = compare_orders(mixture, sizes, world_size=8, gpus_per_node=4).sentence
    assert f"{24 - len(rows)} more are rejected: the experts' pipelines would differ" in said
    with pytest.raises(ValueError, match="leaves out tp"):
        order_traffic(SMALL, {"tp": 2}, ["dp-pp"], world_size=4)
    with pytest.raises(ValueError, match="global_batch_size 4 is not a multiple of dp 8"):
        bytes_between_nodes(SMALL, {}, world_size=8)


def test_explorer_is_a_figure_where_nobody_sits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert explore_layout(tp=2, pp=4).sentence.startswith("16 ranks on 2 nodes of 8: tp 8 groups of 2")


def test_live_explorer_redraws_and_shows_why_a_layout_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter.ipynb")
    box = explore_layout(tp=4, pp=2)
    *rows, picture, words = box.children
    inputs = {control.description: control for row in rows for control in row.children}
    before = picture.value
    assert "16 ranks on 2 nodes of 8: tp 4 groups of 4" in words.value
    inputs["tp"].value = 3
    assert "world size 16 is not a multiple of tp 3" in words.value and "last settings that fit" in words.value
    inputs["tp"].value = 8
    assert "16 ranks on 2 nodes of 8: tp 2 groups of 8" in words.value and picture.value != before
    assert "last settings that fit" not in words.value
    inputs["kinds"].value = "edp"
    assert "edp" in words.value
