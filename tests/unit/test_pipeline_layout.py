"""The text of `parallel.pipeline_layout`: its forms, and what is refused with the place where it is."""

from __future__ import annotations

import re

import pytest

from labkit.config import presets
from labkit.config.pipeline_layout import MOST_SIGNS, LayoutError, parse_layout
from labkit.models import stage_contents
from labkit.plan.activations import Share, layers_activation_bytes, recomputed_at_once_bytes
from labkit.plan.parameters import rank_parameters
from labkit.plan.stages import StageContents


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ["EttL"]),
        ("E tttt | ttt | tttt | ttt L", ["Etttt", "ttt", "tttt", "tttL"]),
        ("Et*3|(tt|)*2,L", ["Ettt", "tt", "tt", "L"]),
        ("E|(t|)*2(t|t)*2|L", ["E", "t", "t", "t", "tt", "t", "L"]),
        ("E(t*2|)*2tL", ["Ett", "tt", "tL"]),
        ("Et|*1tL", ["Et", "tL"]),
        ("E t * 2 L", ["EttL"]),
        ("Et||tt|L", ["Et", "", "tt", "L"]),
        ("Ett|*3L", ["Ett", "", "", "L"]),
        ("Et(|)*2 , |t L", ["Et", "", "", "tL"]),
    ],
)
def test_forms(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|txt|L", "'x' at position 5 is not a part of a stage"),
        ("Ett|mL", "'m' at position 4"),
        ("|EttL", "stage 0 of 2 is empty: the first stage embeds the tokens"),
        ("Ett|L|*2", "stage 3 of 4 is empty: the last stage has the loss"),
        ("Ett|", "has no L"),
        ("", "has no E"),
        ("tt|L", "has no E"),
        ("Ett|t", "has no L"),
        ("tE|tL", "the E at position 1 is out of place"),
        ("Et|EtL", "the E at position 3 is out of place"),
        ("EtL|tL", "the L at position 2 is out of place"),
        ("EtL|t", "the L at position 2 is out of place"),
        ("E(tt|L", "bracket at position 1 is not closed"),
        ("Ett)|L", "')' at position 3"),
        ("E((t)|)*2L", "bracket at position 2 is not closed"),
        ("Et*0L", "repeated 0 times at position 2"),
        ("Et*999999999L", f"longer than {MOST_SIGNS:,} signs at position 2"),
        ("E*2tL", "the E at position 0 is out of place"),
        ("Et*L", "'*' at position 2"),
        ("E²L", "'²' at position 1"),
    ],
)
def test_refusals_name_the_position(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        parse_layout(text)


def test_a_long_text_is_refused_and_not_unrolled() -> None:
    with pytest.raises(LayoutError, match="longer than"):
        parse_layout("E" + "(t*9999)*9" * 10 + "L")


def test_stages_hold_consecutive_layers_and_may_hold_none() -> None:
    config = presets.tiny().override({"layers": 5, "pp": 4, "pipeline_layout": "E|ttt|tt|L"})
    contents = stage_contents(config, 4)
    assert [stage.layers for stage in contents] == [range(0), range(3), range(3, 5), range(5, 5)]
    assert [stage.embedding for stage in contents] == [True, False, False, False]
    assert [stage.loss for stage in contents] == [False, False, False, True]


def test_empty_stages_hold_nothing() -> None:
    config = presets.tiny().override({"layers": 3, "pp": 4, "pipeline_layout": "Et||tt|L"})
    assert stage_contents(config, 4)[1] == StageContents(range(1, 1), embedding=False, loss=False)
    assert [rank_parameters(config, pp_rank=rank) > 0 for rank in range(4)] == [True, False, True, True]
    full = config.override({"recompute_granularity": "full"}).model
    assert layers_activation_bytes(full, Share(), range(1, 1)) == 0
    assert recomputed_at_once_bytes(full, Share(), range(1, 1)) == 0


def test_equal_shares_go_by_the_number_of_the_stage() -> None:
    config = presets.tiny().override({"layers": 8})
    assert [stage.layers for stage in stage_contents(config, 4)] == [range(s, s + 2) for s in (0, 2, 4, 6)]
    alone = config.override({"standalone_embedding_stage": True, "layers": 6})
    assert [len(stage.layers) for stage in stage_contents(alone, 4)] == [0, 2, 2, 2]


def test_a_text_for_another_model_or_pipeline_is_refused() -> None:
    config = presets.tiny().override({"pipeline_layout": "Ett|ttL"})
    with pytest.raises(ValueError, match="has 2 stages and 4 layers; the schedule has 2 stages and the model 8 layers"):
        stage_contents(config, 2)
