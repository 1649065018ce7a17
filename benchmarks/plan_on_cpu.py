"""The plan against this machine: predicted and measured steps, after `labkit calibrate` (never a timed test).

    labkit calibrate --out this_machine.yaml
    python benchmarks/plan_on_cpu.py --machine this_machine.yaml
    python benchmarks/plan_on_cpu.py --machine this_machine.yaml --sleeping

The first form trains real models on one and two ranks, each layout for some steps, and compares the median step with
`predict_step`. Aims: a median error below 15 %, and of the layouts of one model the predicted winner at most 10 %
slower than the fastest.

With `--sleeping`, stages of pipelines of 2, 4 and 8 ranks sleep instead of computing. How long comes from actions that
are measured singly, on one rank: forward, input gradient and weight gradient of each kind of stage. The plan is never
asked. What is measured is the pipeline of one replica, real messages included; it is compared with the simulated one.
Aim: a Kendall tau of at least 0.7 between the two rankings.

Both need a quiet machine: run nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from harness import report
from torch import Tensor

from labkit.config import ParallelConfig, RunConfig
from labkit.launch import Ranks, run
from labkit.models import GPTModel, sleep_through
from labkit.parallel import WeightGradStore, initialize_model_parallel, single_process_groups
from labkit.plan.machine import Machine, load_machine
from labkit.plan.stages import StageContents, stage_contents
from labkit.plan.step_time import StepPrediction, predict_step
from labkit.plan.workload import Workload
from labkit.schedules import Costs, Schedule, build_schedule
from labkit.train import pretrain
from labkit.train.calibration.timing import spread_of

STEPS, WARM_UP = 14, 4
"""Steps of each layout, and those of them that do not count."""
MODELS = {
    "small": {"model.layers": 8, "model.hidden": 128, "model.heads": 4, "model.seq_length": 128},
    "middle": {"model.layers": 4, "model.hidden": 256, "model.heads": 4, "model.seq_length": 256},
    "wide": {"model.layers": 4, "model.hidden": 512, "model.heads": 8, "model.seq_length": 256},
    "llama": {
        "model.layers": 4, "model.hidden": 256, "model.heads": 4, "model.seq_length": 256, "model.position": "rope",
        "model.norm": "rmsnorm", "model.activation": "swiglu", "model.bias": False, "model.ffn_hidden": 768,
    },
}  # fmt: skip
COMMON = {"model.vocab_size": 1024, "train.global_batch_size": 8, "train.micro_batch_size": 1, "train.steps": STEPS,
          "train.record_events": False}  # fmt: skip
RECOMPUTED = {"model.recompute_granularity": "full"}
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("small", 1, {}),
    ("small", 2, {"parallel.tp": 2}),
    ("small", 2, {"parallel.pp": 2}),
    ("small", 2, {"parallel.pp": 2, "schedule.name": "zero_bubble_h1"}),
    ("small", 2, {"train.micro_batch_size": 4}),
    ("middle", 1, {"train.micro_batch_size": 2}),
    ("middle", 2, {"parallel.tp": 2}),
    ("middle", 2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    ("middle", 2, {"parallel.tp": 2, "train.micro_batch_size": 4}),
    ("middle", 2, {"parallel.pp": 2}),
    ("middle", 2, {"parallel.pp": 2, "parallel.vpp": 2}),
    ("middle", 2, {"parallel.pp": 2, "train.micro_batch_size": 2} | RECOMPUTED),
    ("middle", 2, {}),
    ("middle", 2, {"optim.distributed_optimizer": True}),
    ("middle", 2, {"parallel.cp": 2}),
    ("middle", 2, RECOMPUTED),
    ("wide", 2, {"parallel.tp": 2}),
    ("wide", 2, {"parallel.pp": 2}),
    ("wide", 2, {}),
    ("wide", 2, {"train.micro_batch_size": 2, "optim.distributed_optimizer": True}),
    ("llama", 2, {"parallel.tp": 2}),
    ("llama", 2, {"parallel.pp": 2}),
    ("llama", 2, {}),
]
"""(model, ranks, changes): layouts of real compute; nothing named is data parallelism."""


class Row(NamedTuple):
    """A layout, predicted and measured."""

    model: str
    layout: str
    predicted: StepPrediction
    steps: list[float]
    """Seconds of the measured steps."""

    @property
    def measured(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted.seconds / self.measured - 1


def words(world: int, changes: dict[str, Any]) -> str:
    """The changes of a layout in short."""
    said = [f"{name.rpartition('.')[2]}={value}" for name, value in changes.items()]
    return f"{world} rank{'s' * (world > 1)} {' '.join(said) or 'dp'}"


def workload(model: str, world: int, changes: dict[str, Any], machine: Machine) -> Workload:
    """The run of a layout."""
    config = RunConfig().replaced(COMMON | MODELS[model] | changes)
    return Workload(config, world, software=machine.default_software)


def show(name: str, predicted: float, steps: Sequence[float]) -> None:
    """Print a line of the table: predicted and measured, their error, and how noisy the measured steps are."""
    measured = statistics.median(steps)
    error, noise = predicted / measured - 1, measured / min(steps)
    print(f"{name:<64} {predicted * 1e3:8.1f} {measured * 1e3:8.1f} ms {error:+7.1%}   {noise:.2f}", flush=True)


# ---- real compute ----


def measured_steps(config: RunConfig, world: int) -> list[float]:
    """Seconds of steps of `pretrain` on this machine's cores."""
    result = run(pretrain, world, config, device="cpu")[0]
    return [line["step_time"] for line in result.metrics[WARM_UP:]]


def real_rows(machine: Machine, only: str) -> Iterator[Row]:
    """Train every layout whose words contain `only`, and predict it."""
    for model, world, changes in LAYOUTS:
        name = words(world, changes)
        if only not in f"{model} {name}":
            continue
        work = workload(model, world, changes, machine)
        predicted = predict_step(work, machine)
        row = Row(model, name, predicted, measured_steps(work.config, world))
        show(f"{model} {name}", predicted.seconds, row.steps)
        yield row


def summary_real(rows: Sequence[Row]) -> list[str]:
    """Return the errors, the coverage of the intervals, and what the predicted winners lose, in words."""
    errors = [abs(row.error) for row in rows]
    inside = sum(row.predicted.low <= row.measured <= row.predicted.high for row in rows)
    median, mean = statistics.median(errors), statistics.fmean(errors)
    error = f"median error {median:.1%} (aim 15 %), mean {mean:.1%}, worst {max(errors):.1%}"
    said = [f"{len(rows)} layouts: {error}; {inside} inside their interval."]
    for model in MODELS:
        of_model = [row for row in rows if row.model == model]
        if len(of_model) > 1:
            winner = min(of_model, key=lambda row: row.predicted.seconds)
            fastest = min(of_model, key=lambda row: row.measured)
            lost = winner.measured / fastest.measured - 1
            said.append(f"{model}: the predicted winner, {winner.layout}, is {lost:.1%} slower than the fastest, "
                        f"{fastest.layout} (aim: at most 10 %).")  # fmt: skip
    return said


# ---- sleeping ranks ----

SLEEPERS = {"model.layers": 8, "model.hidden": 256, "model.heads": 4, "model.seq_length": 256,
            "train.global_batch_size": 16}  # fmt: skip
NAMES = {"1f1b": {}, "interleaved": {"parallel.vpp": 2}, "zero_bubble_h1": {"schedule.name": "zero_bubble_h1"},
         "zbv": {"schedule.name": "zbv"}}  # fmt: skip
SINGLE, SLEPT = 9, 3
"""Repetitions of an action that is measured singly, the first two of which do not count, and of a sleeping step."""


@dataclass(frozen=True)
class Sleeper:
    """A pipeline of sleeping stages."""

    name: str
    config: RunConfig

    @property
    def pp(self) -> int:
        """Ranks."""
        return self.config.parallel.pp

    @property
    def schedule(self) -> Schedule:
        """Its order table."""
        parallel, config = self.config.parallel, self.config
        return build_schedule(config.schedule, pp=parallel.pp, vpp=parallel.vpp,
                              microbatches=config.num_microbatches(parallel.pp))  # fmt: skip


def sleepers() -> list[Sleeper]:
    """Every pipeline of 2, 4 and 8 ranks that eight layers have; two stages on a rank need eight stages or fewer."""
    found = []
    for pp, name, micro_batch, again in itertools.product((2, 4, 8), NAMES, (1, 2), (False, True)):
        if pp == 8 and name in ("interleaved", "zbv"):
            continue
        changes = SLEEPERS | {"parallel.pp": pp, "train.micro_batch_size": micro_batch} | NAMES[name]
        changes |= RECOMPUTED if again else {}
        said = f"pp {pp} {name} micro batch {micro_batch}{' recomputed' if again else ''}"
        found.append(Sleeper(said, RunConfig().replaced(COMMON | changes)))
    return found


Kind = tuple[int, bool, bool, int, str]
"""A kind of stage: its layers, whether it embeds and has the loss, micro batch, recomputation."""
Times = dict[Kind, tuple[float, float, float]]
"""Seconds of F, I and W."""


def kind_of(config: RunConfig, held: StageContents) -> Kind:
    """The kind of a stage; all layers are alike."""
    batch, again = config.train.micro_batch_size, config.model.recompute_granularity
    return len(held.layers), held.embedding, held.loss, batch, again


def single_actions(stages: Sequence[tuple[RunConfig, StageContents]]) -> Times:
    """Measure F, I and W of each kind of stage on this one rank."""
    found: Times = {}
    for config, held in stages:
        key = kind_of(config, held)
        if key not in found:
            samples = [_action_seconds(*made) for made in [_stage(config, held)] * SINGLE]
            forward, input_grad, weight_grad = (spread_of(seconds).value for seconds in zip(*samples[2:], strict=True))
            found[key] = forward, input_grad, weight_grad
    return found


def _stage(config: RunConfig, held: StageContents) -> tuple[GPTModel, Tensor, Tensor]:
    model, batch = config.model, config.train.micro_batch_size
    chunk = GPTModel(model, single_process_groups(device="cpu"), layers=held.layers, pre_process=held.embedding,
                     post_process=held.loss, seed=1)  # fmt: skip
    ids = torch.randint(0, model.vocab_size, (batch, model.seq_length))
    return chunk, torch.randn(model.seq_length, batch, model.hidden), ids


def _action_seconds(chunk: GPTModel, x: Tensor, ids: Tensor) -> tuple[float, float, float]:
    """Seconds of one F, I and W."""
    store, clock = WeightGradStore(), time.perf_counter
    x = x.detach().requires_grad_()
    start = clock()
    chunk.set_input_tensor(x)
    out = chunk(ids, labels_BS=ids)
    forward = clock()
    with store.collecting(0):
        out.mean().backward()
    input_grad = clock()
    store.run(0)
    return forward - start, input_grad - forward, clock() - input_grad


def costs_of(sleeper: Sleeper, times: Times) -> Costs:
    """The measured actions as the costs of each stage."""
    config, schedule = sleeper.config, sleeper.schedule
    rows = [times[kind_of(config, held)] for held in stage_contents(config, schedule.num_stages)]
    forward, input_grad, weight_grad = (list(column) for column in zip(*rows, strict=True))
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)


def slept(schedule: Schedule, costs: Costs) -> list[tuple[float, float]]:
    """On each rank: (start, end) of its actions in each repetition, by the clock that all ranks read."""
    ends = []
    with initialize_model_parallel(ParallelConfig(pp=schedule.pp)) as groups:
        for _ in range(SLEPT):
            events = sleep_through(groups, schedule, costs)
            ends.append((min(event.start for event in events), max(event.end for event in events)))
    return ends


def sleeping_rows(machine: Machine, only: str) -> Iterator[tuple[str, float, list[float]]]:
    """Yield (name, predicted seconds, measured seconds) of the pipeline of each layout."""
    chosen = [sleeper for sleeper in sleepers() if only in sleeper.name]
    kinds = [(each.config, held) for each in chosen for held in stage_contents(each.config, each.schedule.num_stages)]
    (times,) = run(single_actions, 1, kinds, device="cpu")
    for pp, group in itertools.groupby(chosen, key=lambda each: each.pp):
        with Ranks(pp, device="cpu") as ranks:
            for each in group:
                by_rank = ranks.run(slept, each.schedule, costs_of(each, times))
                spans = [max(e for _, e in step) - min(s for s, _ in step) for step in zip(*by_rank, strict=True)]
                work = Workload(each.config, pp, software=machine.default_software)
                predicted = predict_step(work, machine).timeline.makespan
                show(each.name, predicted, spans)
                yield each.name, predicted, spans


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """(concordant - discordant) / all pairs of pairs."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def summary_sleeping(rows: Sequence[tuple[str, float, list[float]]]) -> list[str]:
    """Return the agreement of the two rankings, and what the predicted winner loses, in words."""
    medians = [(name, predicted, statistics.median(steps)) for name, predicted, steps in rows]
    tau = kendall_tau([row[1:] for row in medians])
    errors = [abs(predicted / measured - 1) for _, predicted, measured in medians]
    said = [f"{len(rows)} layouts: Kendall tau {tau:.3f} (aim 0.7), median error {statistics.median(errors):.1%}."]
    for ranks in ("pp 2", "pp 4", "pp 8"):  # more ranks are faster anyway, so the order among as many tells more
        pairs = [row[1:] for row in medians if row[0].startswith(ranks)]
        if len(pairs) > 1:
            said.append(f"{ranks}: {len(pairs)} layouts, Kendall tau {kendall_tau(pairs):.3f}.")
    winner, fastest = min(medians, key=lambda row: row[1]), min(medians, key=lambda row: row[2])
    lost = winner[2] / fastest[2] - 1
    said.append(f"The predicted winner, {winner[0]}, is {lost:.1%} slower than the fastest, {fastest[0]} (aim: 10 %).")
    return said


def stored(case: str, predicted: float, steps: Sequence[float]) -> dict[str, Any]:
    """Return a row of the stored table."""
    measured = statistics.median(steps)
    return {"case": case, "predicted_ms": round(predicted * 1e3, 2), "measured_ms": round(measured * 1e3, 2),
            "error": round(predicted / measured - 1, 3), "noise": round(measured / min(steps), 3)}  # fmt: skip


def main() -> None:
    """Predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--machine", required=True, help="file that labkit calibrate has written")
    parser.add_argument("--sleeping", action="store_true", help="pipelines of sleeping ranks")
    parser.add_argument("--only", default="", help="layouts whose line contains this; nothing is stored then")
    args = parser.parse_args()
    machine = load_machine(args.machine)
    names = [s.name for s in sleepers()] if args.sleeping else [f"{m} {words(n, changes)}" for m, n, changes in LAYOUTS]
    if not any(args.only in name for name in names):
        parser.error(f"--only {args.only!r}: no layout contains it; the layouts are\n  " + "\n  ".join(names))
    print(f"{machine.name}: load average {os.getloadavg()[0]:.2f} before")
    print("layout, predicted, measured, error, median / fastest step", flush=True)
    if args.sleeping:
        slept_rows = list(sleeping_rows(machine, args.only))
        rows, notes = [stored(*row) for row in slept_rows], summary_sleeping(slept_rows)
    else:
        real = list(real_rows(machine, args.only))
        rows = [stored(f"{row.model} {row.layout}", row.predicted.seconds, row.steps) for row in real]
        notes = summary_real(real)
    report(
        f"plan_on_cpu{'_sleeping' * args.sleeping}",
        rows=rows,
        title=f"The plan against this machine{', on sleeping ranks' * args.sleeping}",
        notes=[*notes, "Predicted after `labkit calibrate`; noise is the median step over the fastest."],
        write=not args.only,
    )


if __name__ == "__main__":
    sys.exit(main())
