"""What the parity microscope records on each rank, and how the ranks' pieces become whole tensors again.

A rank keeps the outputs of its blocks for the first microbatch, and its gradients and parameters after chosen steps.
The pieces are put together by the process that compares, not by collectives, so that a fault planted in the
communication cannot hide itself.

Shapes: S sequence, B micro batch, H hidden.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from labkit.parallel.groups import ParallelGroups
from labkit.schedules.ir import Schedule
from labkit.train.optimizer import named_parameters

BOUNDARIES = re.compile(r"embedding|layers\.\d+(\.attention|\.mlp)?|final_norm")
"""Modules whose output is recorded."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter or of its gradient."""

    tensor: Tensor
    """The local values."""
    partition_dim: int | None
    """Dim along which tensor-parallel ranks hold different parts; None where all hold the same."""
    partition_stride: int
    """Stacked blocks that are each split (2 for SwiGLU's [gate; up])."""
    full_rows: int
    """Rows of the whole tensor without vocabulary padding."""
    shared: bool
    """Whether this is the last stage's copy of the tied word embedding (a V has none)."""


@dataclass
class Snapshot:
    """What one rank saw of a run."""

    tp: int = 0
    """Tensor-parallel rank."""
    dp: int = 0
    """Data-parallel rank."""
    pp: int = 0
    """Pipeline rank."""
    losses: list[float] = field(default_factory=list)
    """By step."""
    activations: dict[str, Tensor] = field(default_factory=dict)
    """Block outputs of the first microbatch of step 0, in order of execution."""
    gradients: dict[int, dict[str, Shard]] = field(default_factory=dict)
    """By step, then by parameter: after finalisation, before clipping."""
    parameters: dict[int, dict[str, Shard]] = field(default_factory=dict)
    """By step, then by parameter: after the update."""
    order: list[str] = field(default_factory=list)
    """Parameters in the order in which the first forward pass uses them."""


class Recorder:
    """Observes a training run (see `labkit.train.pretraining.Observer`) and fills a `Snapshot`."""

    def __init__(self, steps: Sequence[int]) -> None:
        """steps: those after which gradients and parameters are kept."""
        self.snapshot = Snapshot()
        self._steps = frozenset(steps)

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """Hook the outputs of all blocks for microbatch 0, and the first use of all parameters."""
        self.snapshot.tp, self.snapshot.dp, self.snapshot.pp = groups.tp.rank, groups.dp_cp.rank, groups.pp.rank
        names = {param: name for name, param in named_parameters(chunks).items()}
        forwards = [action for action in schedule.actions(groups.pp.rank) if action.kind == "F"]
        for chunk, stage in zip(chunks, schedule.stages_of(groups.pp.rank), strict=True):
            before = [action.microbatch for action in forwards if action.stage == stage].index(0)
            for name, module in getattr(chunk, "module", chunk).named_modules():
                if BOUNDARIES.fullmatch(name):
                    self._keep_output(name, module, before)
                used = [names[param] for param in module.parameters(recurse=False)]
                if used:
                    self._keep_first_use(used, module)

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Keep a copy of every `main_grad`."""
        if step in self._steps:
            params = named_parameters(chunks)
            self.snapshot.gradients[step] = {name: _shard(p, _main_grad(p)) for name, p in params.items()}

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Keep a copy of every parameter."""
        if step in self._steps:
            self.snapshot.parameters[step] = {name: _shard(p, p) for name, p in named_parameters(chunks).items()}

    def _keep_output(self, name: str, module: nn.Module, skipped: int) -> None:
        """Keep what the module returns after `skipped` calls."""
        calls = count()

        def keep(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if next(calls) < skipped:
                return
            tensor = output[0] if isinstance(output, tuple) else output
            self.snapshot.activations[name] = tensor.detach().cpu().clone()
            handle.remove()

        handle = module.register_forward_hook(keep)

    def _keep_first_use(self, names: list[str], module: nn.Module) -> None:
        def keep(_: nn.Module, __: object) -> None:
            self.snapshot.order.extend(names)
            handle.remove()

        handle = module.register_forward_pre_hook(keep)


def _main_grad(param: nn.Parameter) -> Tensor:
    grad = getattr(param, "main_grad", None)
    assert grad is not None, "a parameter has no main_grad: wrap the model first"
    return grad


def _shard(param: nn.Parameter, values: Tensor) -> Shard:
    split = getattr(param, "tensor_model_parallel", False)
    return Shard(
        values.detach().cpu().clone(),
        getattr(param, "partition_dim", 0) if split else None,
        getattr(param, "partition_stride", 1),
        getattr(param, "full_shape", param.shape)[0],
        getattr(param, "shared", False),
    )


@dataclass
class Whole:
    """A run with all ranks' pieces put together."""

    losses: list[float]
    """By step."""
    activations: dict[str, Tensor]
    """By block, in order of execution, shape (S, B, H)."""
    gradients: dict[int, dict[str, Tensor]]
    """By step, then by parameter in order of first use."""
    parameters: dict[int, dict[str, Tensor]]
    """By step, then by parameter in order of first use."""
    disagreements: list[str]
    """Tensors that should be the same on several ranks, bit for bit, and are not."""


def join_shards(shards: Sequence[Tensor], dim: int, stride: int = 1) -> Tensor:
    """The full tensor from the parts of all tensor-parallel ranks, the inverse of slicing each of `stride` blocks."""
    blocks = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([part[block] for block in range(stride) for part in blocks], dim)


def assemble(snapshots: Sequence[Snapshot], *, sequence_parallel: bool = False) -> Whole:
    """Put the snapshots of all ranks of one run together; stages are joined by name, shards along their dim."""
    ranks = sorted(snapshots, key=lambda s: (s.pp, s.dp, s.tp))
    disagreements: list[str] = []
    activations: dict[str, Tensor] = {}
    for pp in sorted({s.pp for s in ranks}):
        stage = [s for s in ranks if s.pp == pp and s.dp == 0]
        activations |= _join_activations(stage, sequence_parallel, disagreements)
    gradients, parameters = (
        {step: _join_parameters(ranks, what, step, disagreements) for step in getattr(ranks[0], what)}
        for what in ("gradients", "parameters")
    )
    order = {name: place for place, name in enumerate(name for s in ranks for name in s.order)}
    for steps in (*gradients.values(), *parameters.values()):
        unused = len(order)
        ordered = sorted(steps.items(), key=lambda item: order.get(item[0], unused))
        steps.clear()
        steps.update(ordered)
    if any(s.losses != ranks[0].losses for s in ranks):
        disagreements.append("loss")
    return Whole(ranks[0].losses, activations, gradients, parameters, disagreements)


def _join_activations(stage: list[Snapshot], split: bool, disagreements: list[str]) -> dict[str, Tensor]:
    """Outputs of one stage: along the sequence under sequence parallelism, else the first rank's."""
    joined = {}
    for name, first in stage[0].activations.items():
        copies = [s.activations[name] for s in stage]
        joined[name] = torch.cat(copies) if split else first
        if not split and not all(torch.equal(first, copy) for copy in copies):
            disagreements.append(f"{name} output (tp ranks)")
    return joined


def _join_parameters(ranks: list[Snapshot], what: str, step: int, disagreements: list[str]) -> dict[str, Tensor]:
    """Full tensors of one step; the last stage's tied copy must equal the first stage's and is then dropped."""
    label = {"gradients": "gradient", "parameters": "parameter"}[what]
    whole: dict[str, Tensor] = {}
    tied: dict[str, Tensor] = {}
    for pp in sorted({s.pp for s in ranks}):
        stage = [s for s in ranks if s.pp == pp]
        for name, first in getattr(stage[0], what)[step].items():
            shards: list[Shard] = [getattr(s, what)[step][name] for s in stage]
            by_tp = [[sh for sh, s in zip(shards, stage) if s.tp == tp] for tp in range(1 + max(s.tp for s in stage))]
            if not all(torch.equal(replicas[0].tensor, r.tensor) for replicas in by_tp for r in replicas):
                disagreements.append(f"{name} {label} (dp replicas)")
            parts = [replicas[0].tensor for replicas in by_tp]
            if first.partition_dim is not None:
                full = join_shards(parts, first.partition_dim, first.partition_stride)
            else:
                full = parts[0]
                if not all(torch.equal(full, part) for part in parts):
                    disagreements.append(f"{name} {label} (tp replicas)")
            (tied if first.shared else whole)[name] = full[: first.full_rows]
    for name, copy in tied.items():
        if not torch.equal(copy, whole["embedding.word.weight"]):
            disagreements.append(f"{name} {label} (tied copies)")
    return whole
