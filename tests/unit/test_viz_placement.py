"""The picture of which rank holds which layers: sentences counted by hand, for looped and V placement."""

import pytest

from labkit.config import presets
from labkit.models import stage_contents
from labkit.schedules import Schedule, one_f_one_b
from labkit.viz import layer_placement

TINY = presets.tiny()  # 8 layers
V = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", "V")  # rank 0 holds stages 0 and 3


def test_one_stage_a_rank() -> None:
    figure = layer_placement(one_f_one_b(4, 4), stage_contents(TINY, 4))
    assert figure.sentence == "8 layers on 4 ranks, 1 chunk a rank: rank 0 holds the embedding with layers 0-1"
    assert figure.png.startswith(b"\x89PNG")


def test_a_v_has_embedding_and_loss_on_one_rank() -> None:
    figure = layer_placement(V, stage_contents(TINY, 4))
    assert figure.sentence == (
        "8 layers on 2 ranks, 2 chunks a rank: rank 0 holds the embedding with layers 0-1 and layers 6-7 with the loss"
    )


def test_standalone_ends_hold_no_layer() -> None:
    config = TINY.override({"parallel.pipeline_layout": "E|tttttt|tt|L"})
    figure = layer_placement(V, stage_contents(config, 4))
    assert figure.sentence.endswith("rank 0 holds the embedding and the loss")


def test_other_numbers_of_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="8 stages are described, 1F1B has 4"):
        layer_placement(one_f_one_b(4, 4), stage_contents(TINY, 8))
