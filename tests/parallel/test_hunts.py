"""Each planted fault of a hunt is found by its own evidence and by no other, on real ranks; a clean run is clean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from re import search
from statistics import median
from typing import Any

import pytest
import torch

from labkit import schedules, viz
from labkit.check.hunts.hunting import Planted, hunt_of
from labkit.comm import collectives
from labkit.comm.ledger import CommLedger
from labkit.config import RunConfig, presets
from labkit.events import EventRecorder, recording, span, watching
from labkit.launch import RankError, Ranks
from labkit.models import GPTModel, SavedTensors, sleep_through
from labkit.parallel import DistributedDataParallel, initialize_model_parallel, model_parallel_seed
from labkit.parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from labkit.schedules import Costs, simulate
from labkit.train import build_optimizer, compare, follows, pretrain

CLEAN = "clean"
SMALL = presets.tiny().override(
    {"model.hidden": 32, "model.seq_length": 16, "global_batch_size": 4, "train.eval_steps": 0}
)
SPLIT = {"parallel.tp": 2, "parallel.pp": 1, "parallel.sequence_parallel": True}
SHARDED = {
    "parallel.pp": 1, "optim.distributed_optimizer": True, "optim.overlap_param_gather": True,
    "optim.bucket_size": 5000,
}  # fmt: skip
PIPELINE = {"parallel.pp": 2}
GRAPHS = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 2, "train.steps": 3}
GRAPHS |= {"train.micro_batch_size": 1}
MARK = 30
"""Minutes of the timeout of the first run of a comparison; later runs have one minute more each, by which ranks know
their fault."""


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, device="cpu", backend="gloo") as started:
        yield started


ENDLESS = "gradients last"
"""A fault with which a run does not end; it is the last one of its hunt."""


def names(chapter: str) -> list[str]:
    return [CLEAN, *(fault.name for fault in hunt_of(chapter).faults if fault.name != ENDLESS)]


def with_each_fault(ranks: Ranks, chapter: str, function: Callable[..., Any]) -> dict[str, list[Any]]:
    """What the ranks return, by fault; a clean run comes last, on ranks that have had all faults."""
    wrapped = {name: Planted(chapter, i, function) for i, name in enumerate(names(chapter)[1:])}
    return {name: ranks.run(each) for name, each in (wrapped | {CLEAN: function}).items()}


def loud_and_silent(chapter: str) -> tuple[list[int], list[int]]:
    """Numbers of the faults that spoil a tensor, and of those that spoil none, without the endless one."""
    numbers = [i for i, fault in enumerate(hunt_of(chapter).faults) if fault.name != ENDLESS]
    silent = [i for i in numbers if hunt_of(chapter).faults[i].answers["first"] == "none"]
    return [i for i in numbers if i not in silent], silent


def train_marked(chapter: str, config: RunConfig, schedule: Any, observer: Any) -> Any:
    """Train with the loud fault that the timeout of the layout names, or with all silent ones at once."""
    (loud, silent), run = loud_and_silent(chapter), pretrain
    marked = round(config.parallel.distributed_timeout_minutes) - MARK
    for number in [loud[marked]] if marked < len(loud) else silent:
        run = Planted(chapter, number, run)
    return run(config, schedule=schedule, observer=observer)


def of_00(config: RunConfig, observer: Any) -> Any:
    return train_marked("00", config, None, observer)


def of_06(config: RunConfig, observer: Any) -> Any:
    return train_marked("06", config, None, observer)


def of_09(config: RunConfig, observer: Any) -> Any:
    return train_marked("09", config, None, observer)


def of_12(config: RunConfig, observer: Any) -> Any:
    return train_marked("12", config, schedules.zbv(2, 4), observer)


def of_17(config: RunConfig, observer: Any) -> Any:
    return train_marked("17", config, None, observer)


@pytest.mark.parametrize(
    ("chapter", "config", "layout", "steps", "train"),
    [
        ("00", SMALL.override({"model.layers": 4}), {"parallel.tp": 2, "parallel.pp": 2}, 1, of_00),
        ("06", SMALL.override({"model.layers": 2}), SPLIT, 1, of_06),
        ("09", SMALL.override({"model.layers": 2}), SHARDED | {"world_size": 2}, 2, of_09),
        ("12", SMALL.override({"model.layers": 8}), PIPELINE, 1, of_12),
        ("17", SMALL.override({"model.layers": 4, **GRAPHS}), PIPELINE, 3, of_17),
    ],
)
def test_the_microscope_names_the_tensor_of_the_verdict_or_none(chapter, config, layout, steps, train) -> None:
    faults, (loud, _) = hunt_of(chapter).faults, loud_and_silent(chapter)
    marked = [layout | {"parallel.distributed_timeout_minutes": MARK + i} for i in range(len(loud) + 1)]
    *spoilt, silent = compare(config, marked, steps=steps, device="cpu", pretrain=train).rows
    assert silent.verdict == "equal", silent
    for fault, row in zip([faults[number] for number in loud], spoilt, strict=True):
        assert row.verdict == "fault" and search(fault.answers["first"], str(row.first_difference)), (fault.name, row)
        changes = fault.name in ("positions", "forward sum") or (chapter == "09" and steps > 1)
        assert (row.loss_diff > 0) == changes, "only outputs change the loss of the first step"


# ---- 00 ----


def test_00_the_silent_fault_shows_in_the_forwards_of_the_last_stage(ranks) -> None:
    found = with_each_fault(ranks, "00", train_two_stages)
    forwards = {name: [median(seconds) for seconds in runs] for name, runs in found.items()}
    ratios = {name: last / first for name, (first, last) in forwards.items()}
    assert {name for name, ratio in ratios.items() if ratio > 2.5 * ratios[CLEAN]} == {"slow forward"}, ratios


def train_two_stages() -> list[float]:
    """Seconds of this stage's forwards."""
    result = pretrain(SMALL.override({"model.layers": 4, "train.steps": 6, **PIPELINE}))
    return [event.duration for event in result.events if event.kind == "forward"]


# ---- 01 ----


def descended() -> tuple[torch.Tensor, torch.Tensor, dict[str, int], float]:
    """Weights of this rank after one and after 40 steps, bytes given to each operation, seconds in collectives."""
    group = initialize_model_parallel(presets.tiny().override({"parallel.pp": 1}).parallel).world
    inputs, targets = samples(group.rank)
    weight, first, recorder = torch.zeros(8), None, EventRecorder(group.rank)
    with CommLedger() as ledger, watching(recorder):
        for _ in range(40):
            gradient = 2 * inputs.T @ (inputs @ weight - targets) / len(inputs) / group.size
            mine = weight.chunk(group.size)[group.rank] - 0.05 * collectives.reduce_scatter(gradient, group)
            weight = collectives.all_gather(mine, group)
            first = weight if first is None else first
    given: Counter[str] = Counter()
    for record in ledger.records:
        given[record.operation] += record.bytes
    assert first is not None
    return first, weight, given, sum(event.duration for event in recorder.events if event.kind == "collective")


def samples(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 8, generator=made)
    return inputs, inputs @ torch.linspace(-1, 1, 8)


def first_step(*ranks: int) -> torch.Tensor:
    """The first step of one process with the samples of these ranks, as two ranks divide it."""
    return 0.05 * sum((2 * x.T @ y / len(x) / 2 for x, y in map(samples, ranks)), torch.zeros(8))


def test_01_each_fault_has_its_own_evidence(ranks) -> None:
    found = with_each_fault(ranks, "01", descended)
    firsts, last, given = ({name: runs[0][i] for name, runs in found.items()} for i in range(3))
    both = first_step(0, 1)
    right = {name for name, first in firsts.items() if torch.allclose(first, both, atol=1e-6)}
    assert right == {CLEAN, "padded sum", "straggler"}
    torch.testing.assert_close(firsts["mean"], both / 2)
    torch.testing.assert_close(firsts["sent too early"], first_step(0), msg="rank 1 is missing")
    torch.testing.assert_close(firsts["no sum"], torch.cat([first_step(0)[:4], first_step(1)[4:]]))
    whole = {"reduce_scatter": 40 * 32, "all_gather": 40 * 16}
    assert {name: dict(each) for name, each in given.items() if each != whole} == {
        "no sum": {"all_gather": 40 * 16},
        "padded sum": {"reduce_scatter": 40 * 32, "all_reduce": 40 * 32},
    }
    assert (last["sent too early"] - last[CLEAN]).norm() < 0.1 * last[CLEAN].norm(), "hardly to be seen at the end"
    waited = [run[3] for run in found["straggler"]]
    assert waited[0] > 40 * 0.015 and waited[0] > waited[1] + 0.3, "who comes late does not wait"


# ---- 06 ----


def bytes_and_masks() -> tuple[Counter[str], int, bool]:
    """Bytes by operation of a forward of a layer, bytes that it keeps, and whether ranks 0 and 1 draw one mask."""
    config = SMALL.override(SPLIT | {"model.layers": 1})
    groups = initialize_model_parallel(config.parallel)
    stage = GPTModel(config.model, groups, layers=range(1), seed=0, pre_process=False, post_process=False)
    stage.set_input_tensor(torch.ones(8, 2, 32, requires_grad=True))
    with CommLedger() as ledger, SavedTensors(stage) as saved:
        _result = stage(None)
        kept = saved.bytes
    tracker = model_parallel_seed(0, groups, device="cpu")
    with tracker.fork():
        drawn = torch.rand(8)
    others = [torch.empty(8), torch.empty(8)]
    torch.distributed.all_gather(others, drawn)
    sent: Counter[str] = Counter()
    for record in ledger.records:
        sent[record.operation] += record.bytes
    return sent, kept, torch.equal(*others)


def test_06_each_silent_fault_shows_in_the_ledger_in_memory_or_in_the_masks(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "06", bytes_and_masks).items()}
    sent, kept, one_mask = found[CLEAN]
    assert set(sent) == {"all_gather", "reduce_scatter"} and not one_mask
    other_bytes = {name for name in found if found[name][0] != sent}
    more_kept = {name for name in found if found[name][1] > kept}
    same_masks = {name for name in found if found[name][2]}
    assert (other_bytes, more_kept, same_masks) == ({"sum, then cut"}, {"gathered input kept"}, {"one state"})
    assert found["sum, then cut"][0]["all_reduce"] == sent["reduce_scatter"]
    assert found["gathered input kept"][1] - kept == 2 * 16 * 2 * 32 * 4, "qkv and fc1, [s, b, h] in float32"


# ---- 09 ----


def sharded() -> tuple[dict[str, int], int, float]:
    """Bytes given to each operation, gathers that start inside of a forward, and what masters have beyond weights."""
    config = SMALL.override(SHARDED | {"model.layers": 2})
    groups = initialize_model_parallel(config.parallel)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).bfloat16()
    ddp = DistributedDataParallel(model, groups, distributed_optimizer=True, overlap_param_gather=True, bucket_size=1)
    optimizer = build_optimizer([ddp], config.optim, layout=groups)
    with CommLedger() as ledger, recording(groups.rank) as recorder:
        for _ in range(2):
            ddp.zero_grad_buffer()
            for last in (False, True):
                with span("forward", "forward"):
                    loss = ddp(torch.ones(2, 64).bfloat16()).square().mean()
                with nullcontext() if last else ddp.no_sync():
                    loss.backward()
            ddp.finish_grad_sync()
            optimizer.step(config.optim.lr)
        ddp.finish_param_sync()
    given: Counter[str] = Counter()
    for record in ledger.records:
        given[record.operation] += record.bytes
    forwards = [event for event in recorder.events if event.kind == "forward"]
    starts = [event.start for event in recorder.events if event.name.startswith("all_gather")]
    inside = sum(any(f.start < start < f.end for f in forwards) for start in starts)
    assert isinstance(optimizer, DistributedOptimizer)
    beyond = [
        float((own.master - own.parameter.flatten()[first : first + own.piece.numel].float()).abs().max())
        for pieces in optimizer.pieces
        for own in pieces
        for first in [own.piece.offset_in_parameter]
    ]
    return dict(given), inside, max(beyond)


def test_09_each_silent_fault_shows_in_the_ledger_in_the_time_line_or_in_the_masters(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "09", sharded).items()}
    given, inside, beyond = found[CLEAN]
    buckets = 8  # a weight or a bias each, of which the optimizer starts one
    assert inside == buckets - 1 and beyond > 0
    more = {name for name, (sent, _, _) in found.items() if sent["all_gather"] > given["all_gather"]}
    assert more == {"gathered again"} and len({sent["reduce_scatter"] for sent, _, _ in found.values()}) == 1
    assert {name for name, (_, starts, _) in found.items() if not starts} == {"waits at once"}
    assert {name for name, (*_, rest) in found.items() if rest == 0} == {"masters made anew"}


# ---- 12 ----

COSTS = Costs(forward=0.02, input_grad=0.02, weight_grad=0.02, activation=0.5)


def asleep() -> list[Any]:
    groups = initialize_model_parallel(SMALL.override(PIPELINE).parallel)
    return sleep_through(groups, schedules.zbv(2, 4), COSTS)


def test_12_each_silent_fault_shows_in_the_timeline_of_its_rank(ranks) -> None:
    table = schedules.zbv(2, 4)
    seen = {
        name: [event for events in runs for event in events if event.name[:1].isdigit()]
        for name, runs in with_each_fault(ranks, "12", asleep).items()
    }
    other_order = {name for name, events in seen.items() if not follows(events, table)}
    assert other_order == {"weights at once", "weights last"}
    overlays = {
        name: viz.gantt_overlay(simulate(table, COSTS), events, memory=True).sentence for name, events in seen.items()
    }
    of_rank = {name: said.split("rank ")[1][0] for name, said in overlays.items() if "did not run its row" in said}
    assert of_rank == {"weights at once": "1", "weights last": "0"}
    peaks = {name: int(said.split("peak ")[1].split()[0]) for name, said in overlays.items()}
    assert {name for name, peak in peaks.items() if peak > peaks[CLEAN]} == {"weights last"}

    def shortest(events: list[Any], stage: int) -> float:
        return min(event.duration for event in events if event.name.startswith(f"{stage}F"))

    slow = {(name, stage) for name, events in seen.items() for stage in range(4) if shortest(events, stage) > 0.035}
    assert slow == {("slow forward", 0)}, "the earlier stage of rank 0"


def test_12_a_run_with_late_gradients_hangs_and_every_rank_waits_in_a_receive() -> None:
    number = [fault.name for fault in hunt_of("12").faults].index(ENDLESS)
    with Ranks(2, device="cpu", backend="gloo", timeout=8) as own, pytest.raises(RankError) as report:
        own.run(Planted("12", number, asleep))
    for rank in (0, 1):
        assert f"rank {rank}: waiting in recv pp" in str(report.value)


# ---- 17 ----


def graphed() -> tuple[int, dict[str, Any]]:
    """Replays of this rank in the third step, and the line of metrics about the graphs."""
    result = pretrain(SMALL.override({"model.layers": 4, **GRAPHS, **PIPELINE}))
    replays = sum(event.kind == "graph_replay" for event in result.events)
    return replays, next(line["graphs"] for line in result.metrics if "graphs" in line)


def test_17_each_silent_fault_shows_in_the_pool_or_in_the_replays(ranks) -> None:
    found = with_each_fault(ranks, "17", graphed)
    replays = {name: [count for count, _ in runs] for name, runs in found.items()}
    whole = [2 * 2 * 4] * 2  # 2 L m on each rank
    assert {name: counts for name, counts in replays.items() if counts != whole} == {"layer left eager": [16, 8]}
    pools = {name: runs[0][1]["pool_peak_bytes"][1] for name, runs in found.items()}
    assert {name for name, peak in pools.items() if peak > pools[CLEAN]} == {"nothing given back"}
    static = {name: runs[0][1]["static_input_bytes"][1] for name, runs in found.items()}
    assert {name for name, size in static.items() if size < static[CLEAN]} == {"input given away"}
