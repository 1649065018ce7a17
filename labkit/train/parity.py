"""The parity microscope: a layout against one process, on loss, gradients and parameters.

A tensor's difference is ||a - b|| / max(||b||, floor) on the whole tensor, 0 if both are exactly 0. The floor is 1e-6
of the global norm for gradients (a key bias has a gradient of pure rounding noise) and lr sqrt(n) for parameters (what
Adam moves in one step). `compare` launches every layout with real processes and says which tensor differs first, in
the order in which a training step makes them: block outputs of the first microbatch, the loss, gradients from the
output back to the input, updated parameters, then the later steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.config import ConfigError, RunConfig
from labkit.config.fields import SPECS
from labkit.train.fault import fault_problems, fault_words
from labkit.train.joining import Whole, assemble
from labkit.train.layout_words import layout_name
from labkit.train.schedule_fit import schedule_problem
from labkit.train.snapshots import Recorder, Snapshot

if TYPE_CHECKING:
    from labkit.train.pretraining import TrainResult

PRECISIONS = {"float64": ("fp64", 1e-10), "float32": ("fp32", 1e-5)}
"""dtype -> (optim.precision, largest difference that is rounding)."""


def tensor_difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """||a - b||_2 / max(||b||_2, floor), in float64; 0 if both are exactly 0, infinite if that has no value."""
    if a.shape != b.shape:
        return math.inf
    distance = (a.double() - b.double()).norm().item()
    if distance == 0.0:
        return 0.0
    scale = max(b.double().norm().item(), floor)
    return distance / scale if scale > 0.0 and math.isfinite(distance) else math.inf


def _relative(a: float, b: float) -> float:
    """The same for a single number."""
    return tensor_difference(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))


@dataclass(frozen=True)
class ParityRow:
    """One layout against one process."""

    layout: dict[str, Any]
    """The override it was launched with."""
    world_size: int
    """Ranks."""
    name: str
    """`tp2 pp2 dp1 sp`: what is not as usual, see `labkit.train.layout_words`."""
    loss_diff: float
    """Largest relative difference of the loss over steps."""
    grad_diff: float
    """Largest difference of a gradient, over tensors and recorded steps."""
    param_diff: float
    """Largest difference of an updated parameter, over tensors and recorded steps."""
    first_difference: str | None
    """The first tensor that differs by more than rounding, such as `layers.1.mlp output`; None if none does."""
    disagreements: tuple[str, ...] = ()
    """Tensors whose replicas are not bit-equal."""
    dropped_calls: int = 0
    """Collectives that the planted fault left out, over all ranks."""

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
    """Largest difference that counts as rounding."""
    reference_losses: list[float]
    """Of the one process, by step."""
    fault: dict[str, str] | None = None
    """What was left out in the layouts on purpose."""

    @property
    def fault_missed(self) -> bool:
        """Whether a fault was asked for and matched no call in any layout, so that nothing was tested."""
        return self.fault is not None and not any(row.dropped_calls for row in self.rows)

    @property
    def ok(self) -> bool:
        """Whether every layout agrees with one process, and a fault that was asked for was really planted."""
        return not self.fault_missed and all(row.first_difference is None for row in self.rows)

    @property
    def sentence(self) -> str:
        """What came out, in one sentence per differing layout or one for all."""
        if self.fault is not None and self.fault_missed:
            return (
                f"The fault {fault_words(self.fault)} matched no call in any layout, so nothing was left out: name a "
                "group of more than one rank, and an operation that runs in it."
            )
        wrong = [row for row in self.rows if row.first_difference is not None]
        if not wrong:
            return (
                f"{len(self.rows)} of {len(self.rows)} layouts agree with one process to {self.tolerance:.0e} "
                f"over {self.steps} optimizer steps in {self.dtype}."
            )
        return " ".join(f"{row.name} differs from one process, first in {row.first_difference}." for row in wrong)

    def table(self) -> str:
        """The rows, aligned."""
        lines = [("layout", "ranks", "loss", "worst gradient", "worst parameter", "first difference")]
        lines += [
            (row.name, str(row.world_size), *(f"{d:.1e}" for d in (row.loss_diff, row.grad_diff, row.param_diff)),
             row.first_difference or "none")
            for row in self.rows
        ]  # fmt: skip
        widths = [max(len(line[i]) for line in lines) for i in range(6)]
        return "\n".join(
            "  ".join(cell.ljust(w) if i in (0, 5) else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
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
    fault: Mapping[str, str] | None = None,
    pretrain: Callable[..., TrainResult] | None = None,
    timeout: float = 600.0,
    device: str = "auto",
    on_row: Callable[[ParityRow], None] | None = None,
) -> ParityReport:
    """Train `config` for `steps` steps in every layout and in one process, and compare.

    layouts: overrides such as `{"tp": 2, "pp": 2}` or `{"parallel.tp": 2, "world_size": 4}`; world_size defaults to the
        least common multiple of tp cp pp and etp ep pp.
    dtype: `float64` (agreement to 1e-10) or `float32` (to 1e-5).
    fault: arguments of `labkit.parallel.collectives.dropped`; the matching communication is left out in the layouts.
        The report is not `ok` where it matches none.
    pretrain: what the ranks of a layout run, called as `pretrain(config, observer=...)`: a training of one's own (with
        another schedule, forward step or model provider), held against labkit's in one process. Default: labkit's.
    device: where tensors live, as in `labkit.launch.run`; backend and time limit of a collective are the config's.
    on_row: called with each row as soon as it is known.

    AdamW runs with an eps of at least 1e-5 and a learning rate of at most 1e-3, so that its division by the root of
    the second moment does not blow rounding up. Learning rates are those of the whole run, however few steps are
    compared. Raises ConfigError for dropout, an unknown dtype, a layout or a schedule that cannot be, or a fault that
    means nothing.
    """
    problems = fault_problems(fault) if fault is not None else []
    if problems:
        raise ConfigError(problems, source="the fault")
    base = _parity_config(config, steps, dtype)
    planned = [_plan(base, layout, dtype) for layout in layouts]
    _, tolerance = PRECISIONS[dtype]
    reference, _ = _observe(_alone(base), 1, None, None, timeout, device)
    rows = []
    for layout, (changed, world_size) in zip(layouts, planned):
        whole, calls = _observe(changed, world_size, fault, pretrain, timeout, device)
        row = _row(dict(layout), changed, world_size, whole, reference, tolerance)
        rows.append(replace(row, dropped_calls=calls))
        if on_row is not None:
            on_row(rows[-1])
    return ParityReport(rows, steps, dtype, tolerance, reference.losses, dict(fault) if fault is not None else None)


def _parity_config(config: RunConfig, steps: int, dtype: str) -> RunConfig:
    """The configuration that every run of a comparison shares."""
    if dtype not in PRECISIONS:
        raise _refusal(f"dtype is {dtype!r}; parity is defined for {' and '.join(PRECISIONS)}")
    if steps < 1:
        raise _refusal(f"steps is {steps}; at least one optimizer step is needed to compare parameters")
    if problem := _incomparable(config, dtype):
        raise _refusal(problem)
    return config.replaced(_common(config, steps, dtype))


def _common(config: RunConfig, steps: int, dtype: str) -> dict[str, Any]:
    """What the comparison decides, whatever configuration and layouts say; with what then has no effect left out."""
    optim = config.optim
    scales = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    reports = ("eval_interval", "eval_steps", "keep_event_steps", "timing_log_level", "output_dir")
    return {
        **_usual(*(f"optim.{name}" for name in scales), *(f"train.{name}" for name in reports)),
        "optim.precision": PRECISIONS[dtype][0],
        "optim.eps": max(optim.eps, 1e-5),
        "optim.lr": min(optim.lr, 1e-3),
        "optim.min_lr": min(optim.min_lr, 1e-3),
        "optim.decay_steps": optim.decay_steps or config.train.steps,
        "train.steps": steps,
        "train.record_events": False,
    }


def _usual(*names: str) -> dict[str, Any]:
    """Fields at their defaults."""
    return {name: SPECS[name].default for name in names}


def _incomparable(config: RunConfig, dtype: str) -> str:
    """Why nothing can be said about `config` in `dtype`, or an empty string."""
    model = config.model
    for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
        if getattr(model, name) > 0:
            return f"model.{name} is {getattr(model, name)}; masks differ between layouts by design, so set it to 0"
    if model.transformer_impl == "transformer_engine" and dtype == "float64":
        return (
            "model.transformer_impl is 'transformer_engine', which has no float64; compare in float32, or set it to "
            "local"
        )
    return ""


def _refusal(problem: str) -> ConfigError:
    return ConfigError([problem], source="the comparison")


def _alone(base: RunConfig) -> RunConfig:
    """The reference: one process, one stage, every activation kept, gradients in the one buffer of the naive twin."""
    kept = ("parallel.distributed_backend", "parallel.distributed_timeout_minutes")
    layout = [n for n, spec in SPECS.items() if spec.section in ("parallel", "schedule") and n not in kept]
    return base.replaced(_usual(*layout, *_PLAIN) | {"optim.data_parallel": "naive"}).validate(1)


_PLAIN = (
    "model.recompute_granularity",
    "model.recompute_method",
    "model.recompute_num_layers",
    "model.recompute_modules",
    "model.num_microbatches_with_partial_activation_checkpoints",
    "optim.bucket_size",
    "optim.overlap_grad_reduce",
    "optim.average_in_collective",
    "optim.distributed_optimizer",
    "optim.overlap_param_gather",
    "optim.num_distributed_optimizer_instances",
)
"""Fields that the reference leaves at their defaults, besides those of layout and schedule."""


def _plan(base: RunConfig, layout: Mapping[str, Any], dtype: str) -> tuple[RunConfig, int]:
    """A layout's configuration and number of ranks, checked before anything is launched."""
    changed = base.override({key: value for key, value in layout.items() if key != "world_size"})
    world_size = int(layout.get("world_size", changed.parallel.smallest_world_size))
    problems = _decided_by_the_comparison(base, changed, dtype) or list(filter(None, [_incomparable(changed, dtype)]))
    problems = problems or changed.problems(world_size) or changed.not_yet_trainable()
    if not problems and (problem := schedule_problem(changed, world_size)):
        problems = [problem]
    if problems:
        raise ConfigError(problems, source=f"layout {dict(layout)}")
    return changed, world_size


def _decided_by_the_comparison(base: RunConfig, changed: RunConfig, dtype: str) -> list[str]:
    """A sentence for each field that a layout changes and must not, because all runs share it."""
    before, after = base.to_dict(), changed.to_dict()
    problems = []
    for name in _common(base, 1, dtype):
        section, _, field = name.partition(".")
        if (given := after[section][field]) != before[section][field]:
            rule = "is the same in every run of a comparison, or they would train differently; leave it out of layouts"
            if name == "optim.precision":
                rule = f"dtype = {dtype} decides the precision of every run of a comparison; leave it out of layouts"
            problems.append(f"{name} = {given!r}: {rule}")
    return problems


def _observe(
    config: RunConfig,
    world_size: int,
    fault: Mapping[str, str] | None,
    own: Callable[..., TrainResult] | None,
    timeout: float,
    device: str,
) -> tuple[Whole, int]:
    """Train in fresh processes and put what the ranks saw together; also how many calls the fault left out."""
    from labkit.launch import run

    seen = run(
        _snapshot, world_size, config, dict(fault) if fault else None, own, timeout=timeout, device=device,
        backend=config.parallel.distributed_backend,
        distributed_timeout_minutes=config.parallel.distributed_timeout_minutes,
    )  # fmt: skip
    whole = assemble([snapshot for snapshot, _ in seen], sequence_parallel=config.parallel.sequence_parallel)
    return whole, sum(calls for _, calls in seen)


def _snapshot(
    config: RunConfig, fault: dict[str, str] | None, own: Callable[..., TrainResult] | None
) -> tuple[Snapshot, int]:
    """What one rank sees, and how many of its calls the fault left out; runs inside it."""
    from labkit.parallel.collectives import dropped
    from labkit.train.pretraining import pretrain

    recorder = Recorder(steps=(0, config.train.steps - 1))
    with dropped(**fault) if fault else nullcontext() as hook:
        result = (own or pretrain)(config, observer=recorder)
    recorder.snapshot.losses = result.losses
    return recorder.snapshot, hook.calls if hook is not None else 0


def _row(
    layout: dict[str, Any], config: RunConfig, world_size: int, run: Whole, reference: Whole, tolerance: float
) -> ParityRow:
    """Every tensor against its reference; the largest differences and the first that is no rounding."""
    largest = {"output": 0.0, "loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    first = None
    for name, kind, difference in differences(run, reference, lr=config.optim.lr):
        largest[kind] = max(largest[kind], difference)
        if first is None and not difference <= tolerance:
            first = name
    if first is None and run.disagreements:
        first = run.disagreements[0]
    name = layout_name(config, world_size)
    return ParityRow(
        layout, world_size, name, largest["loss"], largest["gradient"], largest["parameter"], first,
        tuple(run.disagreements),
    )  # fmt: skip


def differences(run: Whole, reference: Whole, *, lr: float) -> Iterator[tuple[str, str, float]]:
    """(name, kind, difference) of every compared tensor, in the order in which training makes them."""
    for block, output in reference.activations.items():
        yield f"{block} output", "output", _of(run.activations, block, output, 0.0)
    recorded = reference.gradients
    for step, (loss, expected) in enumerate(zip(run.losses, reference.losses)):
        later = f" of step {step}" if step else ""
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
    """The difference, infinite where the layout has no such tensor."""
    return tensor_difference(tensors[name], expected, floor) if name in tensors else math.inf
