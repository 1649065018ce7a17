"""The picture of which rank holds which layers: sentences counted by hand, for looped and V placement."""

import pytest

from labkit.config import presets
from labkit.models import stage_contents
from labkit.schedules import Schedule, interleaved, one_f_one_b
from labkit.viz import layer_placement

TINY = presets.tiny()  # 8 layers
V = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", "V")  # rank 0 holds stages 0 and 3


def test_one_stage_a_rank() -> None:
    figure = layer_placement(one_f_one_b(4, 4), stage_contents(TINY, 4))
    assert figure.sentence == "8 layers on 4 ranks, 1 chunk per rank: rank 0 holds the embedding with layers 0-1"
    assert figure.png.startswith(b"\x89PNG")


def test_a_v_has_embedding_and_loss_on_one_rank() -> None:
    figure = layer_placement(V, stage_contents(TINY, 4))
    assert figure.sentence == (
        "8 layers on 2 ranks, 2 chunks per rank: rank 0 holds the embedding with layers 0-1 and "
        "layers 6-7 with the loss"
    )


def test_standalone_ends_hold_no_layer() -> None:
    config = TINY.override({"parallel.pipeline_layout": "E|tttttt|tt|L"})
    figure = layer_placement(V, stage_contents(config, 4))
    assert figure.sentence.endswith("rank 0 holds the embedding and the loss")


@pytest.mark.parametrize(
    ("schedule", "text", "holds", "labels"),
    [
        (one_f_one_b(4, 4), "Ettt||ttttt|L", "the embedding with layers 0-2; stage 1 is empty", ["stage 1: empty"]),
        (V, "Ettttt|||tttL", "the embedding with layers 0-4 and layers 5-7 with the loss; stages 1 and 2 are empty",
         ["stages 1 and 2: empty"]),
        (interleaved(2, 2, 2), "E|t*8||L", "the embedding and an empty stage; stage 2 is empty", ["stage 2: empty"]),
    ],
)  # fmt: skip
def test_an_empty_stage_is_a_label_on_its_rank(schedule: Schedule, text: str, holds: str, labels: list[str]) -> None:
    config = TINY.override({"parallel.pipeline_layout": text})
    contents = stage_contents(config, 4)
    figure = layer_placement(schedule, contents)
    assert figure.sentence.partition("rank 0 holds ")[2] == holds
    (axes,) = figure.fig.axes
    assert [label.get_text() for label in axes.texts if "empty" in label.get_text()] == labels
    assert len(axes.patches) == sum(bool(stage.layers) or stage.embedding or stage.loss for stage in contents)
