"""Snapshots that the parity microscope takes on each rank.

A rank keeps the outputs of its blocks for the first microbatch, and its gradients and parameters after chosen steps.
It keeps its own parts and does not communicate; `labkit.train.parity.assemble` makes whole tensors from the parts.

With experts a rank also keeps the output of each router, so that the report names a wrong routing before the block
whose output it changes. The biases that move the choice of experts are buffers; the snapshot keeps them among the
parameters.

Shapes: S sequence, B micro batch, T tokens (S x B), E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from labkit.comm.groups import ParallelGroups
from labkit.config import RunConfig
from labkit.parallel.data_parallel.bucket_layout import pieces_of_rank
from labkit.parallel.data_parallel.distributed_data_parallel import DistributedDataParallel
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.parallel.data_parallel.param_gather import ParamGather
from labkit.parallel.parameters.parameter_record import Replicated, main_grad_of, record_of
from labkit.schedules.ir import Schedule
from labkit.train.parity.routing_trace import Routings, record_routings, replay_routings

Ranges = tuple[tuple[int, int], ...]
"""Parts of a flat tensor, each from its first element up to its end, which is excluded."""
_LAYER = r"layers\.\d+(\.(cross_)?attention|\.mamba|\.mlp(\.router)?)?"
BOUNDARIES = re.compile(rf"embedding|((en|de)coder\.)?({_LAYER}|final_norm)|lm_head")
"""Modules whose output is recorded."""
EXPERT_BIAS = "expert_bias"
"""Name of the buffer that a router adds to its scores for the choice, and moves after each step."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of a parameter or of its gradient."""

    tensor: Tensor
    """The local values."""
    partition_dim: int | None
    """Dim along which the ranks of tp (of etp, for an expert) hold different parts; None if all hold the same."""
    partition_stride: int
    """Number of stacked blocks, each split by itself (2 for SwiGLU's [gate; up])."""
    full_rows: int
    """Rows of the whole tensor without vocabulary padding."""
    shared: bool
    """A later stage's copy, such as the last stage's of the tied word embedding (a V schedule has no copy)."""
    owned: Ranges | None = None
    """Elements that are valid on this rank: after a reduce-scatter only those of its own shard. None means all."""
    expert: bool = False
    """Belongs to an expert, so it is cut over etp with replicas on the ranks of edp, not over tp and dp x cp."""
    expert_parallel: bool = False
    """Dim 0 counts experts, and the ranks of ep hold different ones."""
    replicated: Replicated | None = None
    """Rows that neighbouring ranks of tp hold alike."""


@dataclass
class Snapshot:
    """The tensors that one rank saw in a run."""

    tp: int = 0
    """Tensor-parallel rank."""
    cp: int = 0
    """Context-parallel rank."""
    dp: int = 0
    """Data-parallel rank."""
    pp: int = 0
    """Pipeline rank."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step."""
    activations: dict[str, Tensor] = field(default_factory=dict)
    """Block outputs of the first microbatch of the first step, in order of execution."""
    gradients: dict[int, dict[str, Shard]] = field(default_factory=dict)
    """Step -> parameter -> gradient after finalisation, before clipping."""
    parameters: dict[int, dict[str, Shard]] = field(default_factory=dict)
    """Step -> parameter -> values after the update."""
    order: list[str] = field(default_factory=list)
    """Parameters in the order in which the first forward pass uses them."""
    routings: dict[str, list[Tensor]] = field(default_factory=dict)
    """Every choice of experts, if the recorder keeps them."""
    ep: int = 0
    """Expert-parallel rank."""
    etp: int = 0
    """Tensor-parallel rank inside an expert."""
    edp: int = 0
    """Data-parallel rank of the experts."""


class Recorder:
    """Observes a training run (see `labkit.train.pretraining.Observer`) and fills a `Snapshot`."""

    def __init__(
        self, steps: Sequence[int], config: RunConfig, *, replay: Routings | None = None, records_routing: bool = False
    ) -> None:
        """steps: steps after which the recorder keeps gradients and parameters.
        config: config of the run.
        replay: choices of experts that the routers follow instead of making their own.
        records_routing: keep all choices of experts (in one process).
        """
        self.snapshot = Snapshot()
        self._handles: list[RemovableHandle] = []
        self._steps = frozenset(steps)
        self._config, self._replay, self._records_routing = config, replay, records_routing

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """Hook the outputs of all blocks for microbatch 0, and the first use of all parameters."""
        here = self.snapshot
        for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "edp"):
            setattr(here, axis, getattr(groups, axis).rank)
        if self._records_routing:
            here.routings = record_routings(chunks)
        if self._replay is not None:
            replay_routings(self._replay, self._config, groups, chunks, schedule)
        names = {param: name for name, param in named_parameters(chunks).items()}
        forwards = [action for action in schedule.actions(groups.pp.rank) if action.kind == "F"]
        for chunk, stage in zip(chunks, schedule.stages_of(groups.pp.rank), strict=True):
            before = [action.microbatch for action in forwards if action.stage == stage].index(0)
            model = getattr(chunk, "module", chunk)
            forward = _count_forwards(model)
            for name, module in model.named_modules():
                if BOUNDARIES.fullmatch(name):
                    self._keep_output(name, module, lambda forward=forward, before=before: forward() == before)
                self._note_use([names[param] for param in module.parameters(recurse=False)], module, before=True)
                self._note_use([names[param] for param in module.parameters()], module, before=False)

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Keep a copy of every `main_grad`, with the elements that are valid on this rank."""
        self._take_hooks_off()
        if step in self._steps:
            own = _own_ranges(chunks)
            kept = {name: _shard(p, main_grad_of(p), own) for name, p in named_parameters(chunks).items()}
            self.snapshot.gradients[step] = kept

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Keep a copy of every parameter. Before an overlapped gather, only this rank's own elements are valid."""
        if step in self._steps:
            own = _own_ranges([chunk for chunk in chunks if not _is_ready(chunk)])
            kept = {name: _shard(p, p, own) for name, p in named_parameters(chunks).items()}
            self.snapshot.parameters[step] = kept | _expert_biases(chunks)

    def _keep_output(self, name: str, module: nn.Module, is_due: Callable[[], bool]) -> None:
        """Keep the module's output of the first call for which `is_due` is true."""

        def keep(_: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            if not is_due():
                return
            tensor = output[0] if isinstance(output, tuple) else output
            if name.endswith(".router"):  # [T, E], of the input's S and B
                tensor = tensor.view(*inputs[0].shape[:2], -1)
            self.snapshot.activations[name] = tensor.detach().cpu().clone()
            handle.remove()

        handle = module.register_forward_hook(keep)
        self._handles.append(handle)

    def _note_use(self, names: list[str], module: nn.Module, *, before: bool) -> None:
        """Append parameters to the order at the first call of the module, before its forward or after it.

        Another module may use a child's weights without calling the child. Such parameters get their place after the
        forward of the module around the child.
        """

        def note(*_: object) -> None:
            known = set(self.snapshot.order)
            self.snapshot.order.extend(name for name in names if name not in known)
            handle.remove()

        if names:
            handle = module.register_forward_pre_hook(note) if before else module.register_forward_hook(note)
            self._handles.append(handle)

    def _take_hooks_off(self) -> None:
        """Remove hooks that never ran, after the first step, because modules with hooks cannot become CUDA graphs."""
        while self._handles:
            self._handles.pop().remove()


def _count_forwards(model: nn.Module) -> Callable[[], int]:
    """Return a function that gives the number of the model's forward pass, from 0.

    Recomputation runs blocks, not the model, so it does not count. Merged pairs take the model's parts instead of
    calling it, and finish one forward before they begin the next."""
    numbers, in_parts = count(), getattr(model, "in_parts", None)
    now = -1

    def begin(*_: object) -> None:
        nonlocal now
        now = next(numbers)

    def begin_in_parts(*args: Any, **kwargs: Any) -> Any:
        begin()
        assert in_parts is not None
        return in_parts(*args, **kwargs)

    model.register_forward_pre_hook(begin)
    if in_parts is not None:
        vars(model)["in_parts"] = begin_in_parts
    return lambda: now


def _own_ranges(chunks: Sequence[nn.Module]) -> dict[int, Ranges]:
    """Return id of a parameter that the distributed optimizer cuts -> ranges that this rank owns, maybe none."""
    owned: dict[int, Ranges] = {}
    for chunk in chunks:
        if getattr(chunk, "param_gather", None) is None:
            continue
        for buffer in cast(DistributedDataParallel, chunk).buffers:
            pieces = pieces_of_rank(buffer.plan, buffer.group.size, buffer.group.rank)
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                here = [(p.offset_in_parameter, p.offset_in_parameter + p.numel) for p in pieces if p.name == name]
                owned[id(parameter)] = tuple(here)
    return owned


def _is_ready(chunk: nn.Module) -> bool:
    gather: ParamGather | None = getattr(chunk, "param_gather", None)
    return gather is None or gather.is_ready


def _expert_biases(chunks: Sequence[nn.Module]) -> dict[str, Shard]:
    """Return the routers' biases, equal on all ranks that hold the layer, by their names in the whole model."""
    buffers = (item for chunk in chunks for item in getattr(chunk, "module", chunk).named_buffers())
    return {
        name: Shard(bias.detach().cpu().clone(), None, 1, len(bias), False)
        for name, bias in buffers
        if name.rpartition(".")[2] == EXPERT_BIAS
    }


def _shard(param: nn.Parameter, values: Tensor, own: Mapping[int, Ranges]) -> Shard:
    record = record_of(param)
    return Shard(
        values.detach().cpu().clone(),
        record.partition_dim if record.tensor_model_parallel else None,
        record.partition_stride,
        (record.full_shape or param.shape)[0],
        record.shared,
        own.get(id(param)),
        not record.allreduce,
        record.expert_parallel,
        record.replicated,
    )
