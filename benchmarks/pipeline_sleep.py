"""Pipelines whose stages sleep: schedules on 4 and 8 real ranks, against their bound and torch's pipelining (row C5).

    python benchmarks/pipeline_sleep.py            # writes results/pipeline_sleep.json

A stage sleeps F = 10 ms forward, I = 10 ms for its input gradient and W = 10 ms for its weight gradient (B = I + W;
with v stages a rank each takes 1/v of that), so eight ranks share two cores undisturbed, and what a step takes beyond
its bound is machinery: messages between processes, waking up, the Python around each action. Both sides run the same
stages (`labkit.models.SleepingStage`) in the same ranks, interleaved.

- `1F1B` and `interleaved` beside torch's Schedule1F1B and ScheduleInterleaved1F1B; bound m(F+B) + (p-1)(F+B)/v.
- `1F1B` also beside a loop written by hand on bare process groups: what no runtime can go below on this machine.
- `zero_bubble_h1`, `zbv` and `dualpipe_v` beside our own 1F1B; with F = I = W their bounds are (3m + p-1) F for the
  first and (6m + p-1) F/2 for the two V-shaped ones.

A pass takes its sleep, and what autograd and the loss take around it, in every alternative alike. So the loop by hand
times its passes, in turn with the others (`pass_ms`: the mean pass of a step; of that the median over steps), and the
bound is that of these F, B, I and W: what the simulator says of free messages, for passes of 10 ms the formulas above.

The bubble is measured apart, by the Events of recorded steps: 1 - busy / (ranks x makespan).

A machine whose neighbours are busy cannot tell 5% from 8%: a row counts only if a bare message between two processes
that have slept takes at most `--max-hop`, before it and after it. `--patience` waits for such a time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from harness import RESULTS, Comparison, interleave, report, store, until_quiet
from provenance import same_code
from sleep_by_hand import Passes, hop_seconds, one_f_one_b_by_hand
from torch import Tensor

from labkit.config import ParallelConfig
from labkit.events import Event, recording
from labkit.launch import run
from labkit.models import SleepingStage
from labkit.parallel import ParallelGroups, initialize_model_parallel
from labkit.schedules import (
    Costs,
    PipelineRuntime,
    Schedule,
    dualpipe_v,
    interleaved,
    one_f_one_b,
    simulate,
    zbv,
    zero_bubble_h1,
)

UNIT = 0.010
"""Seconds of F, I and W of a whole rank."""
SIZES = [4, 8]
"""Numbers of ranks."""
SHAPE = (1, 1, 4)
"""(S, B, H) of a message: small, so that it costs its latency."""
RECORDED = 9
"""Steps whose Events give the bubble: its median over them."""
TORCH = "torch.distributed.pipelining"
BY_HAND = "a loop by hand"
BUILDERS: dict[str, Callable[[int, int], Schedule]] = {
    "1F1B": one_f_one_b,
    "interleaved": lambda pp, microbatches: interleaved(pp, 2, microbatches),
    "zero_bubble_h1": zero_bubble_h1,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}
BESIDE_TORCH = {"1F1B": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
TITLE = "Pipelines of sleeping stages"
NOTES = [
    "F = I = W = 10 ms per rank, B = I + W; the two stages of interleaved, zbv and dualpipe_v take half each.",
    "pass_ms: the mean action of a hand-written loop in a typical step, with autograd and the loss. The bounds use it:",
    "1F1B and interleaved m(F+B) + (p-1)(F+B)/v, zero_bubble_h1 (3m + p-1) F, V shapes (6m + p-1) F/2.",
    "Aims: never above torch; at most 5% over the bound at pp4, 9% at pp8; bubble within 0.03 of theory.",
]
ACTIONS = ("forward", "backward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Case:
    """What is measured at once."""

    name: str
    pp: int
    microbatches: int
    unit: float = UNIT

    def __str__(self) -> str:
        return f"{self.name}, pp{self.pp}, M{self.microbatches}"

    @property
    def schedule(self) -> Schedule:
        """Ours."""
        return BUILDERS[self.name](self.pp, self.microbatches)


def costs(schedule: Schedule, unit: float) -> Costs:
    """Every rank's F, I and W are one unit, shared by its stages."""
    each = unit * schedule.pp / schedule.num_stages
    return Costs(forward=each, input_grad=each, weight_grad=each)


def bound(name: str, pp: int, microbatches: int, unit: float) -> float:
    """Seconds of a step without machinery, messages free.

    1F1B and interleaving idle for one pass of the pipeline, (p-1)(F+B)/v; zero_bubble_h1 fills two thirds of it with
    weight gradients; of the V-shaped ones a rank idles for p-1 actions, half a unit each.
    """
    idle = {"1F1B": 3.0, "interleaved": 1.5, "zero_bubble_h1": 1.0, "zbv": 0.5, "dualpipe_v": 0.5}[name]
    return unit * (3 * microbatches + (pp - 1) * idle)


# ---- both sides, inside a rank ----


def sleep_exactly() -> None:
    """Ask Linux to wake this thread on time: by default it may be 50 us late at every sleep (PR_SET_TIMERSLACK)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)


def stages(schedule: Schedule, rank: int, unit: float) -> list[SleepingStage]:
    """This rank's stages."""
    each = costs(schedule, unit).forward
    assert isinstance(each, float)
    return [SleepingStage((each, each, each)) for _ in schedule.stages_of(rank)]


def our_step(schedule: Schedule, groups: ParallelGroups, unit: float) -> Callable[[], Any]:
    """One step of our runtime."""
    chunks = stages(schedule, groups.pp.rank, unit)
    data = torch.zeros(schedule.num_microbatches, *SHAPE).unbind()  # once, as the loop by hand has it

    def forward_step(iterator: Iterator[Tensor], stage: Any) -> Any:
        return stage(next(iterator)), lambda output: (output.mean(), {})

    runtime = PipelineRuntime(schedule, chunks, groups, forward_step_func=forward_step, tensor_shape=SHAPE)
    return lambda: runtime.run([iter(data) for _ in chunks])


def torch_step(name: str, schedule: Schedule, rank: int, unit: float) -> Callable[[], Any]:
    """One step of torch's runtime on the same stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed import pipelining

    modules = stages(schedule, rank, unit)
    parts = [
        pipelining.PipelineStage(module, stage, schedule.num_stages, torch.device("cpu"))
        for stage, module in zip(schedule.stages_of(rank), modules, strict=True)
    ]
    count, last = schedule.num_microbatches, rank == schedule.pp - 1
    made = getattr(pipelining, BESIDE_TORCH[name])(
        parts[0] if len(parts) == 1 else parts, count, loss_fn=lambda output, target: output.mean()
    )
    x = torch.zeros(count * SHAPE[0], *SHAPE[1:])
    arguments = (x,) if rank == 0 else ()
    options: dict[str, Any] = {"target": x, "losses": []} if last else {}
    return lambda: made.step(*arguments, **options)


def recorded(step: Callable[[], Any], rank: int) -> list[list[Event]]:
    """The actions of some steps on this rank. Garbage is collected before and after, as around timed steps."""
    recorders = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(RECORDED):
            dist.barrier()
            with recording(rank) as recorder:
                step()
            recorders.append(recorder)
    finally:
        gc.enable()
    return [[event for event in recorder.events if event.kind in ACTIONS] for recorder in recorders]


MAX_HOP = 300
"""Most that a bare message between two ranks that have slept may take, in us (median). A step of 1F1B on 4 ranks waits
for 16 of them with 8 microbatches (`simulate` with such a latency): at this limit a third of what 5% allows."""


@dataclass(frozen=True)
class Measured:
    """What one rank brings back."""

    comparison: Comparison
    events: list[list[Event]]
    """Of our recorded steps."""
    passes: Passes
    """Of the loop by hand."""


def measure(case: Case, repetitions: int, max_hop: float) -> Measured:
    """On each rank: ours, its peer and the loop by hand in turn, then our steps with Events."""
    sleep_exactly()
    groups = initialize_model_parallel(ParallelConfig(pp=case.pp))
    schedule, rank, unit = case.schedule, groups.pp.rank, case.unit
    ours = our_step(schedule, groups, unit)
    if case.name in BESIDE_TORCH:
        steps = {"labkit": ours, TORCH: torch_step(case.name, schedule, rank, unit)}
    else:
        plain = one_f_one_b(case.pp, case.microbatches)
        steps = {f"labkit {case.name}": ours, "labkit 1F1B": our_step(plain, groups, unit)}
    passes: Passes = defaultdict(list)
    stage, split = stages(schedule, rank, unit)[0], case.name not in BESIDE_TORCH
    steps[BY_HAND] = one_f_one_b_by_hand(groups, stage, case.microbatches, SHAPE, passes=passes, split=split)
    hop = hop_seconds(groups)
    found = interleave(str(case), steps, repetitions=repetitions, warmup=1, across_ranks=True)
    if case.name != "1F1B":
        del found.seconds[BY_HAND]  # another schedule: it was there for its passes
    events = recorded(ours, rank)
    hop = max(hop, hop_seconds(groups))
    unfit = f"bare message {1e6 * hop:.0f} us, limit {1e6 * max_hop:.0f}" if hop > max_hop else ""
    return Measured(replace(found, facts={"bare_message_us": round(1e6 * hop)}, unfit=unfit), events, passes)


# ---- what it means ----


def measured_bubble(by_rank: list[list[list[Event]]]) -> float:
    """Idle share of ranks x makespan, median over the recorded steps. All ranks read one clock."""
    shares = []
    for of_step in zip(*by_rank, strict=True):
        start = min(events[0].start for events in of_step)
        makespan = max(events[-1].end for events in of_step) - start
        busy = sum(event.duration for events in of_step for event in events)
        shares.append(1 - busy / (len(of_step) * makespan))
    return statistics.median(shares)


def measured_costs(schedule: Schedule, by_rank: list[Passes]) -> Costs:
    """The passes of a typical step, as seconds of each stage. The last rank's loop has the loss, and so has the last
    stage."""
    count = schedule.num_microbatches

    def typical(ranks: list[Passes]) -> dict[str, float]:
        """Median over steps of the mean pass. (Not the median pass: a step is their sum, late ones included.)"""
        steps = {kind: [row[kind][i : i + count] for row in ranks for i in range(0, len(row[kind]), count)]
                 for kind in ranks[0]}  # fmt: skip
        return {kind: statistics.median(map(statistics.fmean, passes)) for kind, passes in steps.items()}

    usual, last = typical(by_rank[:-1]), typical(by_rank[-1:])
    return Costs(**{kind: [usual[kind]] * (schedule.num_stages - 1) + [last[kind]] for kind in usual})


def judged(case: Case, ranks: list[Measured]) -> Comparison:
    """The comparison with the bound, how far each side is above it, and the bubble beside its theory."""
    found, schedule = ranks[0].comparison, case.schedule
    passes = measured_costs(schedule, [rank.passes for rank in ranks])
    free = simulate(schedule, passes)
    facts: dict[str, Any] = {
        "bound_ms": round(1e3 * free.makespan, 3),
        "pass_ms": {kind: round(1e3 * row[0], 3) for kind, row in vars(passes).items() if isinstance(row, list)},
    }
    if not found.rejected:
        own = {peer: found.median(peer) / free.makespan - 1 for peer in found.seconds if peer != "labkit 1F1B"}
        facts["over_bound"] = {peer: round(above, 4) for peer, above in own.items()}
        if "labkit 1F1B" in found.seconds:
            formulas = [bound(name, case.pp, case.microbatches, case.unit) for name in (case.name, "1F1B")]
            facts["ratio_by_formula"] = round(formulas[0] / formulas[1], 4)
        facts["bubble"] = round(measured_bubble([rank.events for rank in ranks]), 4)
    facts["bubble_in_theory"] = round(free.bubble_fraction, 4)
    return replace(found, facts=found.facts | facts)


def run_case(case: Case, repetitions: int, max_hop: float) -> Comparison:
    """Measure a case on its ranks."""
    return judged(case, run(measure, case.pp, case, repetitions, max_hop, timeout=900))


def bare_message() -> float:
    """On each of two ranks: seconds of a message between them."""
    return hop_seconds(initialize_model_parallel(ParallelConfig(pp=2)))


def wait_until_quiet(max_hop: float, patience: float) -> None:
    """Return when a bare message is quick enough, or after `patience` seconds."""
    until = time.monotonic() + patience
    while run(bare_message, 2)[0] > max_hop and time.monotonic() < until:
        time.sleep(20)


def cases(sizes: list[int], names: list[str]) -> list[Case]:
    """All of them: M 8 and 16. The V-shaped ones reach their bound with two microbatches a rank or more."""
    found = [Case(name, pp, count) for pp in sizes for name in names for count in (8, 16)]
    return [case for case in found if case.name not in ("zbv", "dualpipe_v") or case.microbatches >= 2 * case.pp]


def quotable_rows() -> dict[str, dict[str, Any]]:
    """Stored rows that count, by case, if this checkout holds the code that they measured; else none."""
    path = RESULTS / "pipeline_sleep.json"
    stored = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return {row["case"]: row for row in stored["rows"] if "rejected" not in row} if same_code(stored) else {}


def main() -> None:
    """Measure all cases and store the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pp", nargs="+", type=int, choices=SIZES, default=SIZES, help="numbers of ranks")
    parser.add_argument("--schedules", nargs="+", choices=list(BUILDERS), default=list(BUILDERS))
    parser.add_argument("--repetitions", type=int, default=15, help="interleaved repetitions; 15 or more to be quoted")
    parser.add_argument("--max-hop", type=float, default=MAX_HOP, help="limit of a bare message, us")
    parser.add_argument("--patience", type=float, default=0, help="minutes to wait, a row, for such a time")
    parser.add_argument("--attempts", type=int, default=4, help="how often a row is measured until it counts")
    parser.add_argument("--keep", action="store_true", help="keep rows that this code gave before; else begin anew")
    parser.add_argument("--dry-run", action="store_true", help="print only, store nothing")
    args = parser.parse_args()
    max_hop = 1e-6 * args.max_hop

    def attempt(case: Case) -> Comparison:
        wait_until_quiet(max_hop, 60 * args.patience)
        found = run_case(case, args.repetitions, max_hop)
        print(f"{case}: {found.rejected or found.facts['over_bound']}", flush=True)
        return found

    wanted = cases(args.pp, args.schedules)
    kept = quotable_rows() if args.keep else {}
    attempts = 1 if args.dry_run else args.attempts

    def rows() -> list[dict[str, Any]]:
        return [kept[str(case)] for case in cases(SIZES, list(BUILDERS)) if str(case) in kept]

    for case in wanted:
        if str(case) not in kept:
            kept[str(case)] = until_quiet(lambda case=case: attempt(case), attempts=attempts).row()
            if not args.dry_run:
                store("pipeline_sleep", rows(), title=TITLE, notes=NOTES)
    report("pipeline_sleep", rows=rows(), title=TITLE, notes=NOTES, write=not args.dry_run)


if __name__ == "__main__":
    main()
