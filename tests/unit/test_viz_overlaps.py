"""No text of a figure touches another text or a curve, or leaves the picture, at both ends of the chapters' parameters.

`DRAWN` has every function of labkit.viz that draws, with made-up data at both ends of what the chapters allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import matplotlib.text
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure as Canvas
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from labkit import viz
from labkit.check import chapter_18
from labkit.comm.ledger import CommRecord
from labkit.comm.motion import Held, Moment, Motion, Move
from labkit.config import presets
from labkit.events import Event
from labkit.graphs import plan_buffers, play_back
from labkit.graphs.study.call_trace import Call
from labkit.graphs.study.free_ranges import Held as HeldBytes
from labkit.graphs.study.launches import predict_launches
from labkit.graphs.study.operation_log import Memory, Operation, OperationLog
from labkit.models import stage_contents
from labkit.parallel import ParameterSpec, plan_buckets
from labkit.plan import BackwardPiece, Link, layer_timeline, predict_step
from labkit.plan.overlap import BucketSize, exposed_seconds
from labkit.plan.terms import KINDS
from labkit.schedules import Costs, Schedule, gpipe, interleaved, one_f_one_b, simulate, zbv
from labkit.viz.experts.router_lab import replay_policies, standard_policies
from labkit.viz.number_formats import PLACES

TINY = viz.TransformerTraffic(layers=2, hidden=64, seq_length=64)
LARGE = viz.TransformerTraffic(layers=72, hidden=3072, seq_length=8192)
SLACK = 1.0
"""Pixels that two boxes of text may share: letters do not fill their box."""


def whole(ranks: int) -> list[np.ndarray]:
    """Chunks of tensors before a collective: chunk c of rank r has its one at [r, c]."""
    return list(np.eye(ranks**2).reshape(ranks, ranks, ranks, ranks))


def passed_on(ranks: int) -> list[Motion]:
    """A ring in which every chunk of a rank goes to the next rank."""
    motions = [Motion() for _ in range(ranks)]
    slots = {f"chunk {chunk}": Held("+".join(map(str, range(ranks))), range(ranks)) for chunk in range(ranks)}
    for rank, motion in enumerate(motions):
        to, source = (
            Move(sent, "message", "world", (rank + way) % ranks, 4, tuple(slots))
            for sent, way in ((True, 1), (False, -1))
        )
        motion.entries = [Moment(slots, "before the ring"), *[to, source, Moment(slots, "")] * 4]
    return motions


def placement(layers: int, pp: int, chunks: int) -> Any:
    schedule = one_f_one_b(pp, pp) if chunks == 1 else interleaved(pp, chunks, pp)
    return viz.layer_placement(schedule, stage_contents(presets.tiny().override({"model.layers": layers}), pp * chunks))


def tp_block(size: int, bytes_: int) -> Any:
    parts = (
        ("attention.proj", "forward"),
        ("mlp.fc2", "forward"),
        ("mlp.fc1", "backward"),
        ("attention.qkv", "backward"),
    )
    return viz.tensor_parallel_block(
        [CommRecord("all_reduce", "tp", size, bytes_, "float64", f"layers.0.{part}", phase) for part, phase in parts]
    )


def curves(steps: int, names: int, far: float) -> Any:
    """Losses that fall; the second run is equal to the bit, the others are `far` apart."""
    first = [7 - 1.5 * step / steps for step in range(steps)]
    runs = {f"run {n}, tp4 pp2 dp1": [x * (1 + (n > 1) * far) for x in first] for n in range(names)}
    return viz.loss_curves(runs, tolerance=1e-9)


def tour(steps: int, world: int) -> Any:
    """Curves that end at the level."""
    falls = [6.2 + 0.8 * (1 - (step + 1) / steps) for step in range(steps)]
    names = ("one process", f"tp2 pp1 dp{world // 2}")
    return viz.loss_curves(dict.fromkeys(names, falls), levels={"unigram entropy": 6.2}, tolerance=1e-5)


def buckets(layers: int, bucket_size: int, link_mb: float) -> Any:
    plan = plan_buckets([ParameterSpec(f"layer {i}", 30_000) for i in range(layers)], dp=2, bucket_size=bucket_size)
    pieces = [BackwardPiece(0.02, (f"layer {i}",)) for i in reversed(range(layers))]
    ways = {name: predict_step(plan, pieces, link=Link(latency=0.005, bandwidth=link_mb * 1e6), forward=0.06, overlap=o)
            for name, o in (("one bucket, after the backward", False), ("buckets, behind it", True))}  # fmt: skip
    return viz.overlap_gantt(ways, numbers=True)


def meetings(buckets: int, each: int) -> Any:
    """Two ranks whose gradients arrive in opposite orders, each bucket started when full, and all at the end."""
    names = [f"bucket {number}" for number in range(buckets)]
    full = [[(what, name) for name in order for what in [*["arrives"] * each, "starts"]]
            for order in (names, names[::-1])]  # fmt: skip
    late = [[*(pair for pair in step if pair[0] == "arrives"), *(("starts", name) for name in names)] for step in full]
    return viz.bucket_meetings({"when full": full, "all at the end": late})


def gathered(layers: int) -> Any:
    events = [Event(0, f"all_gather {i}", "collective", 0.01 * i, 0.01 * (i + 1)) for i in range(layers)]
    events += [Event(0, f"forward {i}", "forward", 0.01 * (i + 1), 0.01 * (i + 2)) for i in range(layers)]
    events += [Event(0, f"reduce_scatter {i}", "collective", 1.0, 1.01) for i in range(layers - 1)]
    events += [Event(0, f"layer {i}", "data", 0.01 * i, 0.5) for i in range(layers)]
    return viz.layer_gathers({"a hook before each layer": events, "when due": events[:-layers]})


def swept(links: int) -> Any:
    layers = [ParameterSpec(f"layer {i}", 30_000) for i in range(6)]
    pieces = [BackwardPiece(0.02, (f"layer {i}",)) for i in reversed(range(6))]
    points: dict[str, list[BucketSize]] = {}
    for link in (Link(latency=0.001 * 5**number, bandwidth=1e7) for number in range(links)):
        points[f"{link.latency * 1e3:g} ms a message"] = found = []
        for size in (10_000 * 2**i for i in range(6)):
            plan = plan_buckets(layers, dp=8, bucket_size=size)
            exposed = exposed_seconds(predict_step(plan, pieces, link=link))
            found.append(BucketSize(size, len(plan.buckets), exposed))
    return viz.bucket_size_curve(points)


def bucket_map(dp: int, count: int, bucket_size: int) -> Any:
    specs = [ParameterSpec(f"layers.{i}.attention.qkv.weight", 64 * (1 + i % 5)) for i in range(count)]
    return viz.bucket_map(plan_buckets(specs, dp=dp, bucket_size=bucket_size, distributed_optimizer=True), dp)


def lives(pp: int, microbatches: int) -> Any:
    order = one_f_one_b(pp, microbatches).order(0)
    return viz.buffer_lives(plan_buffers(order, 1), order, what=f"1F1B, {pp} stages, rank 0")


def pool(pp: int, microbatches: int) -> Any:
    """A pool in which each forward holds one block until its backward."""
    steps, owner, free, count = [], {}, [], {1: 0, -1: 0}
    for time, sign in enumerate(one_f_one_b(pp, microbatches).order(0)):
        m = count[sign]
        count[sign] += 1
        name = f"chunk 0 layer 0 microbatch {m} {'forward' if sign > 0 else 'backward'}"
        place = owner.pop(m) if sign < 0 else free.pop(0) if free else len(owner)
        steps.append((time, "free" if sign < 0 else "alloc", place * 1024, 1024, name))
        if sign > 0:
            owner[m] = place
        else:
            free.append(place)
    return play_back(steps)


def operations(count: int) -> Any:
    log = OperationLog()
    made = [Memory(1000 * (i % 3), 1000) for i in range(count)]
    log.operations = [Operation(f"operation_{i}", (made[i - 1],) if i else (), (made[i],)) for i in range(count)]
    return viz.graph_memory({"forward": log}, {})


def calls(count: int) -> Any:
    names = ["wrapper", "graph", "MoE layer", "router", "dispatcher", "experts", "store"]
    path = [
        Call("caller" if i == 0 else names[(i - 1) % 7], names[i % 7], "dispatch_postprocess") for i in range(count)
    ]
    return viz.sequence_diagram({"capture": path, "replay": path}, names)


def paddings(experts: int) -> Any:
    made = [viz.PaddingCost(f"padded, factor {f:g}", int(1e6 * f), int(1e5 * f),
                            int(1e4 * f), 0.1 / f)
            for f in sorted({1, min(2, experts / 2), experts / 2})]  # fmt: skip
    return viz.padding_costs(made)


def kept_areas(ash: float) -> Any:
    tensors = [viz.TensorArea("mask of proj dropped", 1, 1), viz.TensorArea("probs", ash, 2, True)]
    tensors += [viz.TensorArea(f"normed {i}", 1 + i % 4, 2) for i in range(18)]
    return viz.layer_areas(tensors, ["probs", "normed 3"], ["normed 3", "normed 4"])


def kept_over_time(names: list[str], room: float) -> Any:
    line = [(0.0, 0.0), (1.0, 7e10), (2.0, 3.5e10), (4.0, 0.0)]
    return viz.memory_over_time(dict.fromkeys(names, line), room, 1.0, {names[0]: line})


def policies(ranks: int, experts: int, top_k: int) -> list[Any]:
    logits = torch.randn(3, ranks, 16, experts, generator=torch.Generator().manual_seed(0))
    return replay_policies(logits, standard_policies(experts, top_k, groups=ranks, bias_rate=0.02))


def ring_events(cp: int) -> Any:
    events = [Event(r, f"kv {s}", "forward", 0.1 * s, 0.1 * s + 0.09) for r in range(cp) for s in range(cp)]
    return viz.measured_ring({"plain cut": events, "yours": events}, cp, {"plain cut": 0.1 * cp, "yours": 0.05 * cp})


def ring_of(cp: int, length: int) -> Any:
    plain = [range(rank * length, (rank + 1) * length) for rank in range(cp)]
    return viz.ring_timeline({"plain cut": plain, "yours": [range(rank, cp * length, cp) for rank in range(cp)]})


def slept(schedule: Any) -> Any:
    timeline = simulate(schedule, Costs(forward=0.01, input_grad=0.01, weight_grad=0.01))
    return viz.gantt_overlay(timeline, list(timeline.events), memory=True)


LAYER = layer_timeline(
    presets.get("llama3_8b").override({"parallel.tp": 8, "parallel.pp": 1, "parallel.sequence_parallel": True}), 8
)
PARAMETERS = [
    f"{sublayer}.{module}.{kind}"
    for sublayer, modules in (("attention", ("norm", "qkv", "proj")), ("mlp", ("fc1", "fc2", "norm")))
    for module in modules
    for kind in ("weight", "bias")
]
RECORDED = [
    Event(0, "layers.0.mlp.fc1 input_grad", "input_grad", 1.0, 1.03),
    Event(0, "all_reduce tp", "collective", 1.03, 1.06),
    Event(0, "wait all_reduce tp", "wait", 1.05, 1.06),
    Event(0, "dA", "weight_grad", 1.04, 1.05),
]


def placed() -> list[dict[str, int]]:
    return [{"tp": i % 4, "dp": i // 4 % 2, "pp": i // 8} for i in range(16)]


DRAWN: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "added_rows": (
        lambda: viz.added_rows([[0, -1], [-1, 4]], [0, 4], 4),
        lambda: viz.added_rows([[0, 0, -1, 1000]] * 3, [0, 5, 1111, 4], 1000),
    ),
    "band_agreement": (
        lambda: viz.band_agreement({"a": [[True]]}),
        lambda: viz.band_agreement({f"two notices, similarity 0.{n}": np.ones((25, 5)) for n in range(3)}),
    ),
    "band_curves": (
        lambda: viz.band_curves({"a": (1, 1)}, threshold=0.3),
        lambda: viz.band_curves(
            {"the least work": (25, 5), "yours": (125, 1)}, threshold=0.9, measured=[(n / 10, 0.5) for n in range(11)]
        ),
    ),
    "before_and_after": (
        lambda: viz.before_and_after({"all-reduce": (whole(2), [sum(whole(2))] * 2)}),
        lambda: viz.before_and_after(dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather"), (whole(8),) * 2)),
    ),
    "buffer_lives": (lambda: lives(2, 2), lambda: lives(4, 64)),
    "bandwidth_by_size": (
        lambda: viz.bandwidth_by_size({"a": ([1e3, 1e9], [1e3, 1e9])}),
        lambda: viz.bandwidth_by_size(
            {f"{8**i} GPUs, InfiniBand": ([2**k for k in range(10, 36)], [1e6 * k for k in range(10, 36)])
             for i in range(4)},
            {"8 GPUs, InfiniBand": ([1e6, 1e9], [1e7, 3e7])}, links={"one adapter, InfiniBand": 1.2e7}),
    ),
    "bucket_map": (lambda: bucket_map(2, 1, 64), lambda: bucket_map(8, 60, 1024)),
    "bucket_meetings": (lambda: meetings(2, 1), lambda: meetings(4, 3)),
    "bucket_size_curve": (lambda: swept(1), lambda: swept(4)),
    "by_call": (
        lambda: viz.by_call({"eager": [1.0] * 8, "replay": [0.1] * 8}, "Factor"),
        lambda: viz.by_call({"by Python": range(121), "in a tensor": [0] * 121}, "Runs counted", captured=21),
    ),
    "compare_orders": (
        lambda: viz.compare_orders(TINY, {"tp": 2}, world_size=4, gpus_per_node=1),
        lambda: viz.compare_orders(LARGE, {"tp": 4, "cp": 4, "pp": 2}, world_size=64, gpus_per_node=8),
    ),
    "compare_policies": (
        lambda: viz.compare_policies(policies(2, 2, 2), hidden=32, element_size=8),
        lambda: viz.compare_policies(policies(8, 16, 4), hidden=32, element_size=8),
    ),
    "compare_timelines": (
        lambda: viz.compare_timelines([simulate(one_f_one_b(2, 1))]),
        lambda: viz.compare_timelines([simulate(interleaved(4, 4, 64))] * 2),
    ),
    "context_mask": (lambda: viz.context_mask(16, 2), lambda: viz.context_mask(64, 8)),
    "cut_matrices": (
        lambda: viz.cut_matrices("attention", 32, 8, 8),
        lambda: viz.cut_matrices("mlp", 32, 512, 8),
    ),
    "cut_matrices of backward": (
        lambda: viz.cut_matrices("mlp", 32, 8, 2, backward=True),
        lambda: viz.cut_matrices("mlp", 32, 512, 8, backward=True),
    ),
    "fold_arcs": (
        lambda: viz.fold_arcs({"two GPUs": {"world_size": 2, "cp": 2, "ep": 2}}),
        lambda: viz.fold_arcs({
            "eight": {"world_size": 8, "tp": 2, "cp": 2, "ep": 8, "etp": 1},
            "sixteen": {"world_size": 16, "cp": 16, "ep": 16},
        }),
    ),
    "fold_grid": (
        lambda: viz.fold_grid({"cp": 4, "ep": 4}, world_size=4, gpus_per_node=1),
        lambda: viz.fold_grid({"cp": 22, "ep": 22}, world_size=484, gpus_per_node=64, folded=False),
    ),
    "gantt": (
        lambda: viz.gantt(simulate(one_f_one_b(2, 1)), memory=True, unit="forwards"),
        lambda: viz.gantt(simulate(gpipe(8, 64)), memory=True, unit="forwards"),
    ),
    "gantt_overlay": (lambda: slept(one_f_one_b(2, 1)), lambda: slept(zbv(4, 64))),
    "graph_memory": (lambda: operations(1), lambda: operations(24)),
    "layer_gathers": (lambda: gathered(1), lambda: gathered(8)),
    "in_motion": (lambda: viz.in_motion(passed_on(2)), lambda: viz.in_motion(passed_on(8))),
    "launch_timeline": (
        lambda: viz.launch_timeline({"graph": predict_launches([3.0], 8.0, graph=True)}),
        lambda: viz.launch_timeline({"one by one": predict_launches([12.0] * 10, 8.0)}),
    ),
    "layer_areas": (lambda: kept_areas(0.5), lambda: kept_areas(32)),
    "layer_placement": (lambda: placement(8, 2, 1), lambda: placement(32, 4, 4)),
    "load_and_scores": (
        lambda: viz.load_and_scores([2, 0], np.full((2, 2), 0.5)),
        lambda: viz.load_and_scores([6] * 16, np.full((96, 16), 1 / 16)),
    ),
    "load_over_training": (
        lambda: viz.load_over_training({"nothing": np.ones((1, 2))}),
        lambda: viz.load_over_training({name: np.ones((100, 16)) for name in ("nothing", "aux loss", "expert bias")}),
    ),
    "loss_beside_load": (
        lambda: viz.loss_beside_load({"loss": [1.0]}, {"loss": [[1, 1]]}),
        lambda: viz.loss_beside_load({name: [4.0, 1.0] * 150 for name in ("sigmoids", "repaired")},
                                     {name: np.ones((300, 16)) for name in ("nobody", "sigmoids", "repaired")}),
    ),
    "loss_curves": (lambda: curves(2, 2, 0.0), lambda: curves(100, 4, 1e-6)),
    "loss_curves with levels": (lambda: tour(3, 1), lambda: tour(100, 8)),
    "mass_tables": (
        lambda: viz.mass_tables({"0 rounds": [[1.0, 2.0], [1.0, 1.0]]}),
        lambda: viz.mass_tables({f"{n} rounds": np.full((12, 12), 10.5) for n in range(2)}),
    ),
    "measured_ring": (lambda: ring_events(2), lambda: ring_events(8)),
    "memory_of_losses": (
        lambda: viz.memory_of_losses({"parallel": [0, 1, 0.5]}, {"parallel": 1}, "tensors [n, V]"),
        lambda: viz.memory_of_losses({name: [0, 0.1, 16.72, 3] for name in ("gathered", "parallel", "chunk by chunk")},
                                     dict.fromkeys(("gathered", "parallel", "chunk by chunk"), 16.7), "tensors [n, V]"),
    ),
    "memory_over_time": (
        lambda: kept_over_time(["keep"], 1e9),
        lambda: kept_over_time(["keep", "selective", "full", "a best plan"], 6.9e10),
    ),
    "batch_results": (
        lambda: viz.batch_results(["defaults"], {"seconds": [12.3]}),
        lambda: viz.batch_results(
            [f"10_p2p_and_1f1b world_size={n} microbatches={n}" for n in range(24)],
            {what: [*map(float, range(23)), None] for what in ("seconds", "largest_difference", "ratio", "x", "y")},
        ),
    ),
    "moved_values": (
        lambda: viz.moved_values({"a": [(0.1, 0.2)]}, ("before", "after"), "x"),
        lambda: viz.moved_values({f"a long name {n}": [(0.1, 0.9)] * 5 for n in range(6)}, ("before", "after"), "x"),
    ),
    "named_curves": (
        lambda: viz.named_curves({"width 16": [(4, 1.4)]}, x="optimizer step", y="validation perplexity"),
        lambda: viz.named_curves({f"width {w}": [(i, 30.0 / w / i) for i in range(1, 400)] for w in (16, 32, 64)},
                                 x="optimizer step", y="validation perplexity", log=True),
    ),
    "named_curves of many": (
        lambda: viz.named_curves({f"{n} layers, post": [(1, n)] for n in range(4)}, x="optimizer step", y="loss"),
        lambda: viz.named_curves({f"{n} layers, post": [(1, 9), (9, 9)] for n in range(4)}, x="optimizer step", y="%"),
    ),
    "overlap_gantt": (lambda: buckets(6, 1, 1000.0), lambda: buckets(6, 10**6, 1.0)),
    "placed_ranks": (
        lambda: viz.placed_ranks({"one": placed()[:4]}, [2, 2], ring=(0, 0)),
        lambda: viz.placed_ranks(dict.fromkeys(("order tp-dp-pp, 2,848.4 GB", "yours, 770.5 GB"), placed()), [6, 6, 4]),
    ),
    "play_table": (
        lambda: viz.play_table(Schedule("stuck", 2, 2, [["0F0", "0B0"], ["1F0", "1F1"]]), {"1F1B": 9}),
        lambda: viz.play_table(zbv(4, 64), {"bound, two stages per rank ": 193.5, "1F1B": 201}),
    ),
    "graph_outputs": (
        lambda: viz.graph_outputs({"a": {"x": 1.0}}, "B"),
        lambda: viz.graph_outputs(
            {f"preprocess {n}": {f"token_of_row{k}": 1e5 * k for k in range(1, 8)} for n in range(6)}, "MB per layer"
        ),
    ),
    "padding_costs": (lambda: paddings(2), lambda: paddings(64)),
    "values_at_the_end": (
        lambda: viz.values_at_the_end([("double", ["x"], ["y"])], 1, [], ["y"]),
        lambda: viz.values_at_the_end(chapter_18.LAYER, 5, ["map", "counts", "x"], ["x", "shared", "counts"]),
    ),
    "times_by_duration": (
        lambda: viz.times_by_duration({"no graphs": [2.0, 3.0], "partial": [1.0, 3.0]}, [1, 2], launch=8),
        lambda: viz.times_by_duration(
            {name: [i * f for i in range(1, 41)] for name, f in
             (("no graphs", 1), ("partial graphs", 0.9), ("padded, factor 1", 0.5), ("padded, factor 1.5", 32.0))},
            list(range(1, 41)), launch=8,
        ),
    ),
    "gradient_table": (
        lambda: viz.gradient_table({"0.mlp.fc1.weight": 0.0}),
        lambda: viz.gradient_table({"x": 1.0} | {f"{layer}.{name}": 7.0 for layer in range(16) for name in PARAMETERS}),
    ),
    "gradient_errors": (
        lambda: viz.gradient_errors({"layers.0.w": 1e-3}, {"loss": 1e-5}, stressed="w"),
        lambda: viz.gradient_errors({f"layers.{n // 12}.attention.norm.weight": 1e-3 * (n % 90) for n in range(192)},
                                    {"loss": 1e-6, "gradient norm": 1e-4}, stressed="norm.weight"),
    ),
    "pool_blocks": (lambda: viz.pool_blocks(pool(2, 2)), lambda: viz.pool_blocks(pool(4, 64))),
    "pool_collisions": (
        lambda: viz.pool_collisions(pool(2, 2), {"again": pool(2, 2)}),
        lambda: viz.pool_collisions(pool(4, 64), {f"rule {i} broken": pool(4, 64) for i in (1, 2, 3)}),
    ),
    "pool_choices": (
        lambda: viz.pool_choices({"yours": [HeldBytes(0, 1, 0, 1)]}),
        lambda: viz.pool_choices(
            {name: [HeldBytes(8192 * i, 8192, i, 14) for i in range(14)] for name in ("yours", "as small as it can be")}
        ),
    ),
    "pool_frame": (lambda: viz.pool_frame(pool(2, 2), 0), lambda: viz.pool_frame(pool(4, 64), 60)),
    "pool_frames": (lambda: viz.pool_frames(pool(2, 2)), lambda: viz.pool_frames(pool(4, 64))),
    "price_of_balance": (
        lambda: viz.price_of_balance({"nobody": ([4.0], [2.5])}),
        lambda: viz.price_of_balance({f"rule {n}": ([1 + n / 3] * 8, [2.4 + n / 50] * 8) for n in range(7)}),
    ),
    "rank_grid": (
        lambda: viz.rank_grid({"tp": 1}, ["tp", "dp"], world_size=4, gpus_per_node=1),
        lambda: viz.rank_grid({"tp": 4, "pp": 4}, ["tp", "dp", "pp"], world_size=16, gpus_per_node=64),
    ),
    "rank_matrices": (
        lambda: viz.rank_matrices({"all-to-all": np.eye(4)}, 2),
        lambda: viz.rank_matrices({"all-gather": np.ones((4, 2)), "reduce-scatter": np.ones((2, 4)),
                                   "all-reduce": np.ones((4, 4))}, 2),
    ),
    "rank_neighbours": (
        lambda: viz.rank_neighbours(0, {"tp": 2}, ["tp", "dp"], world_size=4, gpus_per_node=1),
        lambda: viz.rank_neighbours(0, {"tp": 8}, ["tp", "dp"], world_size=512, gpus_per_node=8),
    ),
    "ring_timeline": (lambda: ring_of(2, 8), lambda: ring_of(8, 8)),
    "saved_waterfall": (
        lambda: viz.saved_waterfall([viz.Kept("everything", {"norms": 1.0}, 1.0)]),
        lambda: viz.saved_waterfall([viz.Kept(f"+ step {i}, recomputed", {"norms": 40.0, "MLP": 1e9 / 9**i}, 1e9 / 9**i)
                                     for i in range(6)]),
    ),
    "scoring_windows": (
        lambda: viz.scoring_windows([(0, 1, 3)], 3, 64),
        lambda: viz.scoring_windows([(s, s + 1, s + 65) for s in range(0, 2109, 64)], 2173, 64),
    ),
    "sequence_diagram": (lambda: calls(1), lambda: calls(14)),
    "skew_curve": (
        lambda: viz.skew_curve({0.0: [1, 1], 1.0: [2, 0]}, 1.0, measured={0.0: 1.0}),
        lambda: viz.skew_curve({s / 4: [4096 + 100 * s] + [4096 - s] * 7 for s in range(13)}, 1.0,
                               measured=dict.fromkeys((0.0, 1.0, 2.0), 4500.0)),
    ),
    "split_softmax": (
        lambda: viz.split_softmax([0.1 * i for i in range(16)], 2, 7),
        lambda: viz.split_softmax([(-1) ** i * 3.0 for i in range(16)], 8, 7),
    ),
    "mask_agreement": (
        lambda: viz.mask_agreement({"one seed": np.eye(8, dtype=bool)}, 2),
        lambda: viz.mask_agreement(dict.fromkeys(("one seed on every rank", "own"), np.eye(256, dtype=bool)), 8),
    ),
    "replica_drift": (
        lambda: viz.replica_drift({"one process": [1.0, 0.5]}, {"one process": [0.0, 0.0]}, "gains"),
        lambda: viz.replica_drift(
            {name: [100.0 / n for n in range(1, 101)] for name in ("one process", "ranks", "ranks, summed")},
            {"ranks": [0.01 * n for n in range(100)], "ranks, summed": [0.0] * 100},
            "gains",
        ),
    ),
    "split_sequence": (
        lambda: viz.split_sequence(8, 2, 64, 256, 2, sequence_parallel=False),
        lambda: viz.split_sequence(256, 2, 512, 2048, 8, sequence_parallel=True),
    ),
    "layer_timelines": (
        lambda: viz.layer_timelines({"f and g": LAYER[:2]}),
        lambda: viz.layer_timelines({"f and g": LAYER, "f_s and g_s": LAYER}),
    ),
    "layer_timelines of recorded events": (
        lambda: viz.layer_timelines({"healthy": RECORDED[:3]}),
        lambda: viz.layer_timelines({"g, then the norm": RECORDED, "f starts, dA, f ends": RECORDED}),
    ),
    "tensor_lifetimes": (
        lambda: viz.tensor_lifetimes({"a product": [("mm", ("x",))] * 2}, ["fc1", "fc1"], 1, "tensors"),
        lambda: viz.tensor_lifetimes(
            dict.fromkeys(("f_s, then a product", "GatheredLinear"), [("mm", ("input of fc1", "gradient"))] * 10),
            ["norm", "fc1", "GeLU", "fc2", "fc2", "fc2", "GeLU", "fc1", "fc1", "norm"], 4, "gathered tensors",
        ),
    ),
    "tensor_parallel_block": (lambda: tp_block(2, 2048), lambda: tp_block(8, 16 * 2 * 512 * 8)),
    "ring_and_tree": (lambda: viz.ring_and_tree(4), lambda: viz.ring_and_tree(16)),
    "term_bars": (
        lambda: viz.term_bars([16], {"latency": [1e-3]}, [2e-3], of="a ring"),
        lambda: viz.term_bars([10**9] * 4, {"latency": [1.0] * 4, "bytes / bandwidth": [0.1, 1, 3, 9]}, [2, 3, 5, 20],
                              of="an all-reduce"),
    ),
    "token_choices": (
        lambda: viz.token_choices([" c"], {"T = 1": [1.0]}),
        lambda: viz.token_choices([" tells"] * 8, {f"top-p 0.{n}": [0.5] + [0.0] * 7 for n in range(4)}),
    ),
    "token_prices": (
        lambda: viz.token_prices({"words": [("a", 2.6)]}),
        lambda: viz.token_prices({f"width {n}": [(letter, 2.6) for letter in "Cleo tells of the rat. " * 4]
                                  for n in (16, 32, 64)}),
    ),
    "vocabulary_shards": (
        lambda: viz.vocabulary_shards(600, 304, 2, [3]),
        lambda: viz.vocabulary_shards(8192, 1024, 8, list(range(0, 8192, 683))[:12]),
    ),
    "masked_words": (
        lambda: viz.masked_words(["a"], ["[MASK]"], [[0]], "[MASK]"),
        lambda: viz.masked_words(["word", "##s"] * 40, ["word", "[MASK]"] * 40, [[n] for n in range(80)], "[MASK]"),
    ),
    "norm_layouts": (lambda: viz.norm_layouts(1), lambda: viz.norm_layouts(24)),
    "precision_flow": (
        lambda: viz.precision_flow(dict.fromkeys(PLACES, "fp32")),
        lambda: viz.precision_flow({name: ("bf16", "fp32")[n % 2] for n, name in enumerate(PLACES)}, title="A step"),
    ),
    "gradient_range": (
        lambda: viz.gradient_range({"scale 1": [1e-3]}, {"scale 1": []}),
        lambda: viz.gradient_range(
            {f"logits, scale 2^{n}": [2.0**-k for k in range(60)] for n in range(4)},
            {f"logits, scale 2^{n}": [50] for n in range(4)},
        ),
    ),
    "number_rulers": (
        lambda: viz.number_rulers({"x": [0.3]}, {"e4m3": [1.0, 2.0]}),
        lambda: viz.number_rulers(
            {kind: [2.0 ** (n - k) for k in range(40)] for n, kind in enumerate(("input", "weight", "grad"))},
            {"e4m3": [2.0**n for n in range(-9, 9)], "e5m2": [2.0**n for n in range(-16, 16)]},
        ),
    ),
    "path_widths": (
        lambda: viz.path_widths({3: 0.2}, {3: 0.4}, (0.15, 0.3)),
        lambda: viz.path_widths(dict.fromkeys((3, 6, 12, 24, 48), 1.9), dict.fromkeys((3, 6, 12, 24, 48), 1.9), (0, 1)),
    ),
    "split_stages": (
        lambda: viz.split_stages([1], [1], {"words": [0, 1], "positions": [0, 1]}),
        lambda: viz.split_stages(
            [1] * 4,
            [1] * 4,
            {"words": [0, 4, 7], "positions": [0, 4], "encoder's biases": range(4), "decoder's biases": range(4, 8)},
        ),
    ),
    "stage_work": (
        lambda: viz.stage_work({"1": [("encoder", 1.0, 0.0)]}, unit="GFLOP"),
        lambda: viz.stage_work(
            {f"{n} and {12 - n}": [("encoder", 84.0, 0.0)] * n + [("decoder", 41.0, 7.5)] * 6 for n in (4, 6, 8)},
            unit="GFLOP in forward of one sample",
        ),
    ),
    "distance_buckets": (
        lambda: viz.distance_buckets({"one": [[0]]}),
        lambda: viz.distance_buckets({"encoder": np.full((16, 16), 31), "decoder": np.full((16, 16), 31)}),
    ),
    "read_positions": (
        lambda: viz.read_positions({"one": [[True]]}, "reads", "is read"),
        lambda: viz.read_positions(
            {"decoder reads the encoder" + "." * n: np.eye(8, 12) for n in range(3)}, "position that reads", "is read"
        ),
    ),
    "weight_parts": (
        lambda: viz.weight_parts(lambda fc1, fc2, rank, t: (fc1[:0], fc2), 1),
        lambda: viz.weight_parts(lambda fc1, fc2, rank, t: (fc1[rank::t], fc2[:, :rank]), 8),
    ),
    "zero_stages": (
        lambda: viz.zero_stages(param_dtype="fp32", grad_dtype="fp32", dp=1, parameters=1e5),
        lambda: viz.zero_stages(param_dtype="bf16", grad_dtype="fp32", dp=1024, parameters=7e11),
    ),
    "roofline": (
        lambda: viz.roofline({1: 1e9}, {1: 2e9}, label="rows", peak=2e9),
        lambda: viz.roofline(
            {2**n: 14e9 * 2**n for n in range(10)}, {2**n: 15e9 * 2**n for n in range(10)}, label="rows of x", peak=8e12
        ),
    ),
    "step_parts": (
        lambda: viz.step_parts({"one": {"gemm": 1e-4}}),
        lambda: viz.step_parts(
            {f"layout {n}": dict.fromkeys(KINDS, 0.1) for n in range(10)}, measured={"layout 3": 2.0}
        ),
    ),
    "published_rates": (
        lambda: viz.published_rates({"a": [viz.Rate("1", 1, 1, 1, 1)]}, unit="TFLOP/s", below="GPUs", sentence="."),
        lambda: viz.published_rates(
            {f"{b} billion": [viz.Rate(str(n), 39, 37, 33, 42) for n in (1, 64, 512)] for b in (1.2, 2.5, 4.2, 8.3)},
            unit="TFLOP/s per GPU", below="GPUs", sentence=".",
        ),
    ),
}  # fmt: skip
"""Function -> its figure at the smallest and at the largest parameters."""


def shown_texts(fig: Canvas) -> list[tuple[str, Bbox]]:
    """Text and box, in pixels, of everything that is written; what a panel cuts off is left out."""
    hidden = {text for axes in fig.axes for text in outside_ticks(axes)}
    found = []
    for text in fig.findobj(matplotlib.text.Text):
        if text.get_visible() and text.get_text().strip() and text not in hidden:
            box = text.get_window_extent()
            panel = text.get_clip_box() if text.get_clip_on() else None
            if panel is None or panel.contains(*box.get_points().mean(axis=0)):
                found.append((text.get_text(), box))
    return found


def outside_ticks(axes: Any) -> Iterator[matplotlib.text.Text]:
    """Labels of ticks beyond the limits, which matplotlib keeps and does not draw; all where the axis is off."""
    for axis in (axes.xaxis, axes.yaxis):
        drawn = set() if not axes.axison else {id(tick) for tick in axis._update_ticks()}
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if id(tick) not in drawn:
                yield from (tick.label1, tick.label2)
        if not axes.axison:
            yield axis.label


class Curve(NamedTuple):
    """A line of more than two points, or with marks; straight guides are neither."""

    places: np.ndarray
    """Its points in pixels."""
    reach: float
    """Half of the size of its marks; 0 without marks."""
    drawn: bool
    """True where a line connects the points."""
    panel: Bbox
    """What is outside of it isn't drawn."""

    def touches(self, box: Bbox) -> bool:
        if self.reach and any(box.padded(self.reach).contains(x, y) for x, y in self.places):
            return True
        seen = Bbox.intersection(box, self.panel)
        return self.drawn and seen is not None and Path(self.places).intersects_bbox(seen, filled=False)


def curves_of(fig: Canvas) -> list[Curve]:
    found = []
    for line in (line for axes in fig.axes for line in axes.lines):
        reach = 0.0 if line.get_marker() in ("", "None", None) else line.get_markersize() / 2 * fig.dpi / 72
        drawn = line.get_linestyle() != "None" and len(line.get_xdata()) > 2
        if reach or drawn:
            panel = line.axes.bbox if line.get_clip_on() else fig.bbox
            found.append(Curve(line.get_transform().transform(line.get_xydata()), reach, drawn, panel))
    return found


def touching(fig: Canvas, texts: list[tuple[str, Bbox]]) -> list[str]:
    """What touches: two texts, or a text and a curve."""
    curves = curves_of(fig)
    boxes = np.array([box.extents for _, box in texts]).reshape(-1, 4)
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    common = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - low
    pairs = np.argwhere(np.triu((common > SLACK).all(-1), 1))
    found = {f"{texts[a][0]!r} and {texts[b][0]!r}" for a, b in pairs}
    return sorted(found | {f"{text!r} and a curve" for text, box in texts if any(c.touches(box) for c in curves)})


def cut_off(fig: Canvas, texts: list[tuple[str, Bbox]]) -> list[str]:
    """Texts that reach beyond the picture."""
    whole = fig.bbox.padded(SLACK)
    return sorted(text for text, box in texts if not (whole.contains(*box.min) and whole.contains(*box.max)))


def mistakes(fig: Canvas) -> tuple[list[str], list[str]]:
    """What touches, and what is cut off, after one layout of the picture, which takes most of the time."""
    fig.draw_without_rendering()
    texts = shown_texts(fig)
    return touching(fig, texts), cut_off(fig, texts)


@pytest.mark.parametrize("end", [0, 1], ids=["smallest", "largest"])
@pytest.mark.parametrize("name", DRAWN)
def test_no_text_touches_another_or_leaves_the_picture(name: str, end: int) -> None:
    fig = DRAWN[name][end]().fig
    assert mistakes(fig) == ([], [])


@pytest.mark.parametrize("gpus", range(2, 9))
def test_titles_of_narrow_grids_fit(gpus: int) -> None:
    """Side by side, the two panels are narrow; above eight GPUs a node they stand one above the other."""
    for sizes, ranks in (({"tp": 2, "cp": 2, "pp": 2, "etp": 2, "ep": 4}, 16), ({"cp": 4, "ep": 4}, 4)):
        fig = viz.fold_grid(sizes, world_size=ranks, gpus_per_node=gpus).fig
        assert mistakes(fig) == ([], [])


def test_every_function_that_draws_is_here() -> None:
    """But for the two that read files of a run or a checkpoint."""
    made = {name for name in viz.__all__ if getattr(viz, name).__annotations__.get("return") == "Figure"}
    assert made - {name.split()[0] for name in DRAWN} == {"stored_boxes", "training_curves"}


def test_texts_and_curves_that_touch_are_noticed() -> None:
    fig = Canvas(figsize=(3, 2), layout="constrained")
    axes = fig.subplots()
    axes.plot([0, 1, 2], [0, 1, 2])
    axes.text(1, 1, "on the curve")
    axes.text(0, 2, "here", clip_on=True)
    axes.text(0, 2, "there")
    axes.text(0, 9, "cut off", clip_on=True)
    axes.set(xlim=(0, 2), ylim=(0, 2.5))
    axes.text(1.5, 0.2, "far too long for this picture").set_in_layout(False)
    assert mistakes(fig) == (["'here' and 'there'", "'on the curve' and a curve"], ["far too long for this picture"])
