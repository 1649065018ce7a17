"""The parity microscope: a layout against one process, on loss, gradients and parameters.

A tensor's difference is ||a - b|| / max(||b||, floor) on the whole tensor, 0 if both are exactly 0. For gradients the
floor is 1e-6 of the global norm, because the gradient of a key bias is pure rounding noise. For parameters the floor is
lr sqrt(n), the size of one step of Adam. `compare` launches every layout with real processes and names the first tensor
that differs, in the order of a training step. This order is: block outputs of the first microbatch, the loss, gradients
from the output back to the input, updated parameters, then the later steps.

Rounding can exceed the tolerance, so `labkit.train.parity.rounding` tells rounding from a fault. If a layout exceeds
the tolerance, the reference runs four more times with its sums in other orders.

In float64 layouts with experts choose experts themselves. In float32 they repeat the choices of the reference
(`labkit.train.parity.routing_trace`), because rounding that changes one choice would change everything after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.config import ConfigError, RunConfig
from labkit.config.errors import counted
from labkit.train.parity.assemble import FullRun, assemble
from labkit.train.parity.comparison_plan import (
    PRECISIONS,
    alone,
    fault_problems,
    fault_words,
    placement,
    plan_layout,
    shared_config,
)
from labkit.train.parity.layout_words import layout_name
from labkit.train.parity.rounding import ORDERS, Spread, Verdict, judge, reordered_sums, widest
from labkit.train.parity.routing_trace import Routings
from labkit.train.parity.snapshots import Recorder, Snapshot
from labkit.train.preflight import memory_problem

if TYPE_CHECKING:
    from labkit.train.pretraining import TrainResult

Progress = Callable[[dict[str, Any]], None]
"""Takes the reports of rank 0 of a run."""


def tensor_difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return ||a - b||_2 / max(||b||_2, floor), in float64; 0 if both are exactly 0, infinite if it is undefined."""
    if a.shape != b.shape:
        return math.inf
    distance = (a.double() - b.double()).norm().item()
    if distance == 0.0:
        return 0.0
    scale = max(b.double().norm().item(), floor)
    return distance / scale if scale > 0.0 and math.isfinite(distance) else math.inf


def _relative(a: float, b: float) -> float:
    """Return the `tensor_difference` of two numbers."""
    return tensor_difference(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))


@dataclass(frozen=True)
class ParityRow:
    """One layout against one process."""

    layout: dict[str, Any]
    """The override it was launched with."""
    world_size: int
    """Ranks."""
    name: str
    """`tp2 pp2 dp1 sp`: everything that is not at its default, see `labkit.train.parity.layout_words`."""
    loss_diff: float
    """Largest relative difference of the loss over steps."""
    grad_diff: float
    """Largest difference of a gradient, over tensors and recorded steps."""
    param_diff: float
    """Largest difference of an updated parameter, over tensors and recorded steps."""
    first_difference: str | None
    """The first tensor beyond the tolerance, such as `layers.1.mlp output`. With the verdict `fault`, the first tensor
    that rounding does not explain. None if no tensor is beyond the tolerance."""
    verdict: Verdict
    """`equal` (within the tolerance), `rounding` (beyond it, within the spread of the reference) or `fault`."""
    disagreements: tuple[str, ...] = ()
    """Tensors whose replicas are not bit-equal."""
    dropped_calls: int = 0
    """Collectives that the planted fault left out, over all ranks."""
    differing: tuple[str, ...] = ()
    """Every tensor and loss beyond the tolerance, in the order of a training step."""

    @property
    def largest(self) -> float:
        """The largest of the three differences."""
        return max(self.loss_diff, self.grad_diff, self.param_diff)


@dataclass(frozen=True)
class ParityReport:
    """All layouts of one comparison; prints as a table with a sentence."""

    rows: list[ParityRow]
    """One per layout, in the order given."""
    steps: int
    """Optimizer steps of every run."""
    dtype: str
    """`float64` or `float32`."""
    tolerance: float
    """Largest difference that is `equal`."""
    reference_losses: list[float]
    """Losses of the reference, by step."""
    fault: dict[str, str] | None = None
    """The communication that the layouts left out on purpose."""
    reference: str = "one process"
    """The run that the layouts are compared with."""

    @property
    def fault_missed(self) -> bool:
        """The planted fault matched no call in any layout, so the comparison tested nothing."""
        return self.fault is not None and not any(row.dropped_calls for row in self.rows)

    @property
    def ok(self) -> bool:
        """No layout has the verdict `fault`, and a planted fault matched a call."""
        return not self.fault_missed and all(row.verdict != "fault" for row in self.rows)

    @property
    def sentence(self) -> str:
        """The result: one sentence for each layout that differs, or one sentence for all."""
        if self.fault is not None and self.fault_missed:
            return (
                f"The fault {fault_words(self.fault)} matched no call in any layout, so nothing was left out: name a "
                "group of more than one rank, and an operation that runs in it."
            )
        named = " ".join(map(self._about, (row for row in self.rows if row.verdict != "equal")))
        if not self.ok:
            return named
        equal = sum(row.verdict == "equal" for row in self.rows)
        said = (
            f"agree with {self.reference} to {self.tolerance:.0e}" if equal else f"within rounding of {self.reference}"
        )
        return (
            f"{equal or len(self.rows)} of {len(self.rows)} layouts {said} over "
            f"{counted(self.steps, 'optimizer step')} in {self.dtype}. {named}"
        ).rstrip()

    def _about(self, row: ParityRow) -> str:
        """Return a sentence on a layout that is not equal."""
        if row.verdict == "fault":
            return f"{row.name} differs from {self.reference}, first in {row.first_difference}."
        return (
            f"{row.name} differs from {self.reference} by up to {row.largest:.1e}, first in {row.first_difference}: "
            f"this is rounding, because reordering the sums of {self.reference} changes it as much."
        )

    def cells(self) -> list[tuple[str, ...]]:
        """Return the table as rows of cells, its header first."""
        lines = [("layout", "ranks", "loss", "worst gradient", "worst parameter", "verdict", "first difference")]
        lines += [
            (row.name, str(row.world_size), *(f"{d:.1e}" for d in (row.loss_diff, row.grad_diff, row.param_diff)),
             row.verdict, row.first_difference or "none")
            for row in self.rows
        ]  # fmt: skip
        return lines

    def table(self) -> str:
        """Return the rows as aligned text."""
        lines = self.cells()
        widths = [max(len(line[i]) for line in lines) for i in range(7)]
        return "\n".join(
            "  ".join(cell.rjust(w) if 1 <= i <= 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths)))
            .rstrip() for line in lines
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.table()}\n{self.sentence}"

    __repr__ = __str__


def compare(
    config: RunConfig,
    layouts: Sequence[Mapping[str, Any]],
    steps: int = 3,
    dtype: str = "float64",
    *,
    reference: Mapping[str, Any] | None = None,
    fault: Mapping[str, str] | None = None,
    pretrain: Callable[..., TrainResult] | None = None,
    timeout: float | None = None,
    device: str = "auto",
    on_row: Callable[[ParityRow], None] | None = None,
    on_run: Callable[[str, int], Progress] | None = None,
) -> ParityReport:
    """Train `config` for `steps` steps in every layout and in one process (or `reference`), and compare.

    layouts: overrides such as `{"tp": 2, "pp": 2}` or `{"parallel.tp": 2, "world_size": 4}`; world_size defaults to the
        least common multiple of tp cp pp and etp ep pp.
    dtype: `float64` (agreement to 1e-10) or `float32` (to 1e-5). Beyond that a layout may differ by ten times the
        spread of one process with its sums in other orders. Routers in float32 repeat the choices of the one process.
    reference: a layout that the others are compared with, instead of one process. Experts with a capacity drop tokens
        by the number of tokens on a rank, so compare layouts in which ranks hold equal numbers.
    fault: arguments of `labkit.comm.fault_injection.dropped`; the layouts leave out the matching communication. The
        report is not `ok` if no call matches.
    pretrain: function that the ranks of a layout run, as `pretrain(config, observer=...)`: your own training, with
        another schedule, forward step or model provider. The reference runs labkit's. Default: labkit's.
    timeout: seconds that a rank may wait in one collective; default: `parallel.distributed_timeout_minutes`.
    device: device of the tensors, as in `labkit.launch.run`; the config names the backend.
    on_row: called with each row as soon as it is known.
    on_run: called with the name and ranks of each run before it starts; returns the function for the run's reports, as
        `progress` of `labkit.launch.run`.

    AdamW runs with an eps of at least 1e-5 and a learning rate of at most 1e-3. Otherwise its division by the root of
    the second moment would amplify rounding. CUDA graphs are captured after the first step or later, but before the
    last. Learning rates are those of the whole run, even if the comparison has fewer steps.

    Raises:
        ConfigError: dropout, an unknown dtype, an impossible layout or schedule, a layout that does not fit the memory
            of this machine, or a fault that names nothing.
    """
    problems = fault_problems(fault) if fault is not None else []
    if problems:
        raise ConfigError(problems, source="the fault")
    if timeout is not None:
        config = config.override({"parallel.distributed_timeout_minutes": timeout / 60})
    base = shared_config(config, steps, dtype)
    (first, first_size), *planned = runs = _runs(base, reference, layouts, dtype)
    _check_memory(runs[:1] if pretrain else runs, device)
    name = "one process" if reference is None else layout_name(first, first_size)
    _, tolerance = PRECISIONS[dtype]
    replays = dtype == "float32" and base.moe.num_experts > 0
    begun = on_run or (lambda *_: None)
    recording = _Observation(records_routing=replays)
    expected, _ = _observe(first, first_size, recording, device, begun(name, first_size))
    watched = _Observation(dict(fault) if fault is not None else None, pretrain, expected.routings if replays else None)

    @cache
    def spread() -> Spread:
        orders = (_Observation(replay=watched.replay, parts=parts) for parts in ORDERS)
        words = f"{name}, sums in another order"
        runs = (_observe(first, first_size, order, device, begun(words, first_size))[0] for order in orders)
        return widest(differences(run, expected, lr=first.optim.lr) for run in runs)

    rows = []
    for layout, (changed, world_size) in zip(layouts, planned):
        progress = begun(layout_name(changed, world_size), world_size)
        whole, calls = _observe(changed, world_size, watched, device, progress)
        row = _row(dict(layout), changed, world_size, whole, expected, tolerance, spread)
        rows.append(replace(row, dropped_calls=calls))
        if on_row is not None:
            on_row(rows[-1])
    return ParityReport(rows, steps, dtype, tolerance, expected.losses, watched.fault, name)


def _runs(
    base: RunConfig, reference: Mapping[str, Any] | None, layouts: Sequence[Mapping[str, Any]], dtype: str
) -> list[tuple[RunConfig, int]]:
    """Return the configuration and ranks of the reference (None is one process), and of each layout."""
    if reference is not None and dtype == "float32" and base.moe.num_experts:
        problem = "in float32 layouts replay the choice of experts of one process; leave it out, or compare in float64"
        raise ConfigError([problem], source=f"reference {dict(reference)}")
    first, size = (alone(base), 1) if reference is None else plan_layout(base, reference, dtype, None)
    return [(first, size), *(plan_layout(base, layout, dtype, placement(first, size)) for layout in layouts)]


def _check_memory(runs: Sequence[tuple[RunConfig, int]], device: str) -> None:
    """Raise ConfigError for the first run that does not fit the memory of this machine."""
    for config, world_size in runs:
        if problem := memory_problem(config, world_size, device):
            name = f"layout {layout_name(config, world_size)}" if world_size > 1 else "one process"
            raise ConfigError([problem], source=name)


@dataclass(frozen=True)
class _Observation:
    """How the ranks of one run are observed, and the fault that is planted there."""

    fault: dict[str, str] | None = None
    """Communication to leave out."""
    pretrain: Callable[..., TrainResult] | None = None
    """Function that the ranks run; None is labkit's."""
    replay: Routings | None = None
    """Choices of experts to follow."""
    records_routing: bool = False
    """Keep the choices of experts."""
    parts: int = 0
    """Order of summation, see `labkit.train.parity.rounding.reordered_sums`; 0 is the usual order."""


def _observe(
    config: RunConfig, world_size: int, watched: _Observation, device: str, progress: Progress | None
) -> tuple[FullRun, int]:
    """Train in fresh processes. Return the assembled run, and the number of calls that the fault left out."""
    from labkit.launch import run

    seen = run(
        _snapshot, world_size, config, watched, device=device,
        backend=config.parallel.distributed_backend,
        distributed_timeout_minutes=config.parallel.distributed_timeout_minutes, progress=progress,
    )  # fmt: skip
    whole = assemble([snapshot for snapshot, _ in seen], sequence_parallel=config.parallel.sequence_parallel)
    return whole, sum(calls for _, calls in seen)


def _snapshot(config: RunConfig, watched: _Observation) -> tuple[Snapshot, int]:
    """Train on one rank. Return its snapshot, and the number of calls that the fault left out."""
    from labkit.comm.fault_injection import dropped
    from labkit.train.pretraining import pretrain

    steps = (0, config.train.steps - 1)
    recorder = Recorder(steps, config, replay=watched.replay, records_routing=watched.records_routing)
    orders = reordered_sums(watched.parts) if watched.parts else nullcontext()
    with orders, dropped(**watched.fault) if watched.fault else nullcontext() as hook:
        result = (watched.pretrain or pretrain)(config, observer=recorder)
    recorder.snapshot.losses = result.losses
    return recorder.snapshot, hook.calls if hook is not None else 0


def _row(
    layout: dict[str, Any],
    config: RunConfig,
    world_size: int,
    run: FullRun,
    reference: FullRun,
    tolerance: float,
    spread: Callable[[], Spread],
) -> ParityRow:
    """Compare every tensor with its reference: the largest differences, and the verdict."""
    if config.schedule.overlap_moe_expert_parallel_comm:  # runs parts of layers, so nobody sees a whole layer's output
        seen = {block: output for block, output in reference.activations.items() if block in run.activations}
        reference = replace(reference, activations=seen)
    found = list(differences(run, reference, lr=config.optim.lr))
    verdict, first = judge(found, tolerance, spread)
    if verdict != "fault" and run.disagreements:
        verdict, first = "fault", run.disagreements[0]
    loss, gradient, parameter = (
        max((difference for _, of, difference in found if of == kind), default=0.0)
        for kind in ("loss", "gradient", "parameter")
    )
    name = layout_name(config, world_size)
    differing = tuple(tensor for tensor, _, difference in found if difference > tolerance)
    return ParityRow(
        layout, world_size, name, loss, gradient, parameter, first, verdict, tuple(run.disagreements),
        differing=differing,
    )  # fmt: skip


def differences(run: FullRun, reference: FullRun, *, lr: float) -> Iterator[tuple[str, str, float]]:
    """Yield (name, kind, difference) of every compared tensor, in the order in which training makes them."""
    for block, output in reference.activations.items():
        yield f"{block} output", "output", _of(run.activations, block, output, 0.0)
    recorded = reference.gradients
    for step, (loss, expected) in enumerate(zip(run.losses, reference.losses)):
        later = f" of step {step + 1}" if step else ""  # names of the first step have no number
        yield f"loss{later}", "loss", _relative(loss, expected)
        if step not in recorded:
            continue
        floor = 1e-6 * math.sqrt(sum(g.double().square().sum().item() for g in recorded[step].values()))
        for name, gradient in reversed(recorded[step].items()):
            yield f"{name} gradient{later}", "gradient", _of(run.gradients[step], name, gradient, floor)
        for name, parameter in reference.parameters[step].items():
            floor = lr * math.sqrt(parameter.numel())
            yield f"{name} parameter{later}", "parameter", _of(run.parameters[step], name, parameter, floor)


def _of(tensors: Mapping[str, Tensor], name: str, expected: Tensor, floor: float) -> float:
    """Return the difference, infinite if the layout has no such tensor."""
    return tensor_difference(tensors[name], expected, floor) if name in tensors else math.inf
