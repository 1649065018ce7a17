"""What cannot be drawn is refused, with a sentence that says why."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from labkit import viz
from labkit.config import presets
from labkit.events import Event
from labkit.graphs import play_back
from labkit.graphs.study.operation_log import OperationLog
from labkit.models import stage_contents
from labkit.parallel import ParameterSpec, plan_buckets
from labkit.schedules import one_f_one_b, simulate

UNEVEN = plan_buckets([ParameterSpec("a", 450)], dp=4)
TIMELINE = simulate(one_f_one_b(2, 2))
CLASH = {"tp": 2, "pp": 2, "etp": 1, "ep": 2, "order": "tp-pp-cp-ep-dp"}

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: viz.bandwidth_by_size({"a": ([1], [1])}, {"b": ([1], [1])}), "measured points belong to a line"),
    (lambda: viz.rank_matrices({"a": np.ones((3, 2))}, 2), "2 ranks share equally"),
    (lambda: viz.ring_and_tree(6), "4, 8 or 16 make a tree"),
    (lambda: viz.term_bars([1, 2], {"latency": [1.0, 2.0]}, [1.0], of="a ring"), "as many times as sizes"),
    (lambda: viz.before_and_after({}), "at least one operation"),
    (lambda: viz.bucket_map(UNEVEN, 4), "450 elements cannot be cut into 4 equal parts"),
    (lambda: viz.bucket_map(plan_buckets([], dp=4), 4), "no parameter to draw"),
    (
        lambda: viz.before_and_after({"a": ([np.eye(3)] * 3, [])}),
        r"rank 0 holds an array \[3, 3\]; a state of 3 ranks has \[cells, 3, chunks\]",
    ),
    (lambda: viz.band_agreement({}), "at least one pair"),
    (lambda: viz.context_mask(30, 4), "choose a multiple of 8"),
    (lambda: viz.distance_buckets({}), "at least one map"),
    (lambda: viz.distance_buckets({"a": [[0]], "b": [[0, 1]]}), "all of one shape"),
    (lambda: viz.read_positions({}, "reads", "is read"), "at least one map"),
    (lambda: viz.explore_pool(play_back([])), "the pool has no history to draw"),
    (lambda: viz.fold_grid(CLASH, world_size=8), "disagree on the pipelines"),
    (lambda: viz.fold_grid({"cp": 8, "ep": 8}, world_size=8, folded=False), "ep 8 does not divide dp 1"),
    (lambda: viz.fold_grid({"tp": 2, "ep": 2, "etp": 1}, world_size=8, folded=False), "etp is 1, tp 2"),
    (lambda: viz.fold_grid({}, world_size=1024), "1024 ranks make cells too small"),
    (lambda: viz.fold_arcs({"wide": {"world_size": 17}}), r"at most 16 GPUs; got \[17\]"),
    (lambda: viz.fold_arcs({}), "give 1 layout or more"),
    (lambda: viz.gantt([]), "nothing to draw"),
    (lambda: viz.gantt(simulate(one_f_one_b(64, 816))), r"104,448 actions are more than a picture can show"),
    (
        lambda: viz.gantt_overlay(TIMELINE, simulate(one_f_one_b(4, 2)).events),
        "4 ranks were measured, 2 predicted",
    ),
    (lambda: viz.pool_choices({"yours": []}), "at least one block"),
    (lambda: viz.graph_memory({"forward": OperationLog()}, {}), "at least one operation"),
    (
        lambda: viz.layer_placement(one_f_one_b(4, 4), stage_contents(presets.tiny(), 8)),
        "8 stages are described, 1F1B has 4",
    ),
    (lambda: viz.masked_words(["a"], [], [], "m"), "1 tokens of the text and 0"),
    (lambda: viz.masked_words(["a"], ["b"], [], "m"), "token 0 differs and is in no n-gram"),
    (lambda: viz.measured_ring({"zigzag": [Event(0, "wait", "wait", 0.0, 1.0)]}, 2), "nothing was measured for z"),
    (lambda: viz.named_curves({}, x="a", y="b"), "at least one curve"),
    (lambda: viz.mass_tables({}), "at least one"),
    (lambda: viz.mass_tables({"a": np.ones((13, 2))}), "at most 12 tokens"),
    (lambda: viz.named_curves({"c": []}, x="a", y="b"), "at least one point"),
    (lambda: viz.norm_layouts(0), "one or more"),
    (lambda: viz.pool_blocks(play_back([])), "the pool has no history to draw"),
    (lambda: viz.pool_frames(play_back([])), "the pool has no history to draw"),
    (lambda: viz.scoring_windows([], 10, 4), "at least one window"),
    (lambda: viz.split_softmax([0.0] * 6, 4, 0), "6 columns cannot be cut over 4 ranks"),
    (lambda: viz.split_softmax([0.0] * 8, 4, 8), "label 8 is outside the columns 0..7"),
    (lambda: viz.split_stages([], [1], {}), "at least one stage in each half"),
    (lambda: viz.split_stages([1], [1], {"biases": [0]}), "no table 'biases'"),
    (lambda: viz.split_stages([1], [1], {"words": [2]}), "stage 2 is not one of the 2 stages"),
    (lambda: viz.stage_work({}, unit="GFLOP"), "at least one cut"),
    (lambda: viz.stage_work({"none": []}, unit="GFLOP"), "a stage in each"),
    (lambda: viz.token_choices(["a"], {}), "at least one panel"),
    (lambda: viz.token_choices(["a"], {"x": [0.5, 0.5]}), "1 probabilities in each"),
    (lambda: viz.token_prices({}), "the same text in all rows"),
    (lambda: viz.vocabulary_shards(10, 4, 2, [1]), "2 parts of 4 rows are fewer than 10 words"),
    (lambda: viz.vocabulary_shards(10, 6, 2, [10]), "id 10 is outside the vocabulary 0..9"),
    (lambda: viz.zero_stages(grad_dtype="fp8"), "grad_dtype is 'fp8'"),
]


@pytest.mark.parametrize(("draw", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()
