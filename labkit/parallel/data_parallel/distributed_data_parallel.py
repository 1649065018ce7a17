"""Data parallelism with gradient buckets: each is reduced as soon as the backward has filled it, behind what is left of
the backward (Megatron's `DistributedDataParallel`; arXiv 2006.15704 for the idea).

Three questions decide whether that is right.

*When is a gradient complete?* A hook on every parameter reports arrivals while synchronisation is allowed, that is
outside `no_sync`. How many arrivals make a gradient complete is learned in the first step, which reduces everything at
its end: one for most parameters, several where the backward comes by several times (recomputed segments share a
parameter), none where a split backward brought the last gradient earlier, or where there is none at all. A fused layer
adds its gradient to `main_grad` itself; autograd calls the hook all the same, and in W, where no engine runs,
`weight_grad_store` does. A gradient that comes after its bucket was sent is an error, never a wrong number.

*In which order do ranks reduce?* Always in one order, whatever arrived first, because collectives of one communicator
pair up by order. That is the order of the buckets; a complete bucket waits for those before it. Where a rank has
several chunks hooks start nothing: the pipeline calls `start_grad_sync` at fixed places of the schedule.

*Who owns a shared parameter?* The first wrapper of the rank that holds it. A tied weight whose two stages are on one
rank (a V placement) is complete only after the backwards of both, so its bucket waits for `finish_grad_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from labkit.config import OptimConfig
from labkit.parallel.data_parallel.bucket_layout import default_bucket_size
from labkit.parallel.data_parallel.grad_buffers import GradBucket, GradBuffer, Reduction
from labkit.parallel.data_parallel.naive import NaiveDataParallel
from labkit.parallel.data_parallel.param_gather import ParamGather
from labkit.parallel.data_parallel.wrapper import ChunkWrapper
from labkit.parallel.groups import ParallelGroups, cut_group
from labkit.parallel.parameter_record import add_gradient, adopt_marks, name_of, record_of


class DistributedDataParallel(ChunkWrapper):
    """Gives each parameter of `module` a `main_grad` in a buffer, and reduces the buffers bucket by bucket.

    A step is: `zero_grad_buffer`, backwards (all but the last inside `no_sync`), `finish_grad_sync`. Hooks start the
    reductions in between; `start_grad_sync` starts those that are left.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ParallelGroups,
        *,
        grad_dtype: torch.dtype | None = None,
        bucket_size: int | None = None,
        overlap_grad_reduce: bool = True,
        average_in_collective: bool = False,
        calculate_per_token_loss: bool = False,
        distributed_optimizer: bool = False,
        overlap_param_gather: bool = False,
        num_distributed_optimizer_instances: int = 1,
        check_for_nan_in_grad: bool = False,
        earlier_chunks: Sequence[DistributedDataParallel] = (),
    ) -> None:
        """Wrap `module`; every rank of dp x cp does the same.

        groups: dense gradients are reduced over `dp_cp`, those of experts (`parameter.allreduce = False`) over `edp`.
        grad_dtype: of the buffers; None is fp32 for 16-bit parameters, else the parameters' own.
        bucket_size: elements from which on a bucket is closed; None is `default_bucket_size`. Where nothing would be
            gained all is one bucket: without overlap, on later pipeline ranks and in later chunks, whose reduction
            hides behind the backwards of those before.
        overlap_grad_reduce: start a bucket's reduction when its last gradient arrives; else in `finish_grad_sync`.
        average_in_collective: let the collective average, instead of scaling first and summing.
        calculate_per_token_loss: neither; the loss is a sum over tokens, and `finalize_model_grads` divides.
        distributed_optimizer: reduce-scatter; each rank keeps its part of every bucket.
        overlap_param_gather: gather parameters behind the next forward (distributed optimizer).
        num_distributed_optimizer_instances: parts into which the replicas are cut; see `grad_buffers`.
        check_for_nan_in_grad: note before each reduction whether this rank's own gradients are finite, for
            `spoiled_before_reduction`; while scaling this costs nothing more, else it reads the gradients once.
        earlier_chunks: the wrappers of this rank's chunks so far; what they hold already stays with them.

        Raises ValueError for options that exclude each other, and instances that do not divide a group.
        """
        super().__init__(module)
        if average_in_collective and calculate_per_token_loss:
            raise ValueError("average_in_collective excludes calculate_per_token_loss, which divides once by tokens")
        if overlap_param_gather and not distributed_optimizer:
            raise ValueError("overlap_param_gather needs distributed_optimizer; without it every rank has them all")
        self.groups = groups
        self.overlap_grad_reduce, self.overlap_param_gather = overlap_grad_reduce, overlap_param_gather
        self.distributed_optimizer = distributed_optimizer
        one_bucket = not overlap_grad_reduce or groups.pp.rank > 0 or bool(earlier_chunks)
        size = bucket_size or default_bucket_size(groups.dp_cp.size)
        buffers: list[GradBuffer] = []
        kinds = _by_kind(module, grad_dtype, _held_by(earlier_chunks))
        for (_, main_dtype, is_expert), named in kinds.items():
            factor, op = _averaging(groups, is_expert, average_in_collective, calculate_per_token_loss)
            within, across = cut_group(
                groups, groups.edp if is_expert else groups.dp_cp, num_distributed_optimizer_instances
            )
            reduction = Reduction(within, across, factor, op, distributed_optimizer, check_for_nan_in_grad)
            buffers.append(
                GradBuffer(named, main_dtype, reduction, bucket_size=None if one_bucket else size, is_expert=is_expert)
            )
        self.buffers: list[GradBuffer] = buffers  # pyright: ignore[reportIncompatibleMethodOverride]
        """Megatron's name; nn.Module's `buffers()` is that of `.module`."""
        self.buckets = _in_order(module, buffers)
        """The buckets of all buffers, in the order in which they are reduced."""
        self.param_gather = (
            ParamGather(module, self.buckets, overlap=overlap_param_gather) if distributed_optimizer else None
        )
        """Brings updated parameters home; None without the distributed optimizer."""
        self._hooks_start = overlap_grad_reduce and not earlier_chunks
        for earlier in earlier_chunks:
            earlier._share(module)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                _on_gradient(parameter, partial(self._arrived, bucket))

    # ---- gradients ----

    def zero_grad_buffer(self) -> None:
        """Start a step: gradients begin anew. Nothing is zeroed; the first to come for a parameter replaces what its
        `main_grad` held, and what got none by the time of its reduction is zeroed then."""
        for bucket in self.buckets:
            bucket.reset()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient by `factor`; with the distributed optimizer those that this rank has the sum of."""
        for bucket in self.buckets:
            bucket.reduced.mul_(factor)

    def spoiled_before_reduction(self) -> list[nn.Parameter] | None:
        """Parameters of the buckets in which a gradient of this rank may have been bad before the last reduction: that
        was seen, or nothing is reduced (experts without replicas). None if nobody looked. Waits for the device."""
        if all(bucket.not_finite is None for bucket in self.buckets):
            return None
        spoiled = [b for b in self.buckets if b.not_finite is None or b.not_finite.item()]
        return [parameter for bucket in spoiled for parameter in bucket.parameters]

    def start_grad_sync(self, *parameters: nn.Parameter) -> None:
        """The gradients are complete: start the reduction of every bucket that has not been started.

        `parameters` are ignored; the pipeline runtime passes those of the chunk. Buckets that share a parameter with
        another chunk are left to `finish_grad_sync`.
        """
        self._check_may_sync("start_grad_sync")
        for bucket in self.buckets:
            if not bucket.started and not bucket.waits_for_other_chunk:
                bucket.start()

    def finish_grad_sync(self) -> None:
        """Start what has not been started and wait for everything; then `main_grad` is that of all replicas.

        With the distributed optimizer that holds for this rank's part of each bucket; the rest is undefined.
        """
        self._check_may_sync("finish_grad_sync")
        under_way = self.buckets
        for bucket in under_way:
            bucket.learn()
            if not bucket.started:
                bucket.start()
        while under_way:
            under_way = [bucket for bucket in under_way if bucket.proceed()]

    def _arrived(self, bucket: GradBucket, parameter: Tensor) -> None:
        """Hook: add `.grad` to `main_grad` and drop it, then start what has become complete."""
        if bucket.started:
            raise RuntimeError(
                f"a gradient of {name_of(parameter)} arrived after bucket {bucket.index} "
                "was sent: this backward took another path than that of the first step, or follows it without "
                "zero_grad_buffer. Run backwards that only accumulate inside no_sync(), or without overlap_grad_reduce"
            )
        if parameter.grad is not None:
            add_gradient(parameter, parameter.grad)
            parameter.grad = None
        if self._may_sync and self._hooks_start and bucket.note(parameter):
            self._start_complete()

    def _start_complete(self) -> None:
        """Start the buckets whose turn has come: complete ones, up to the first that is not."""
        for bucket in self.buckets:
            if not bucket.is_complete:
                return
            if not bucket.started:
                bucket.start()

    def _share(self, later: nn.Module) -> None:
        """Another chunk of this rank, wrapped later: it may hold parameters of this one."""
        self._hooks_start = False
        theirs = {id(p) for p in later.parameters()}
        for bucket in self.buckets:
            bucket.waits_for_other_chunk |= any(id(p) in theirs for p in bucket.parameters)

    # ---- parameters ----

    def start_param_sync(self, *parameters: nn.Parameter) -> None:
        """Start gathering what the distributed optimizer has updated, as far as that has not been started; without it
        there is nothing to do. `parameters` are ignored; the pipeline runtime passes those of the chunk."""
        if self.param_gather is not None:
            self.param_gather.start()

    def finish_param_sync(self) -> None:
        """Wait until every parameter may be read; forwards wait by themselves, all other readers call this."""
        if self.param_gather is not None:
            self.param_gather.finish()

    def disable_forward_pre_hook(self) -> None:
        """Gather all parameters and take the hooks that wait for them off the modules (Megatron's name)."""
        if self.param_gather is not None:
            self.param_gather.disable_hooks()

    def enable_forward_pre_hook(self) -> None:
        """Put them back."""
        if self.param_gather is not None:
            self.param_gather.enable_hooks()


def _on_gradient(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Have `hook` called for every gradient; an earlier wrapper of the same parameter is forgotten."""
    record = record_of(parameter)
    if record.hook_handle is not None:
        record.hook_handle.remove()
    record.hook_handle, record.on_gradient = parameter.register_post_accumulate_grad_hook(hook), hook


def _in_order(module: nn.Module, buffers: Sequence[GradBuffer]) -> list[GradBucket]:
    """The buckets of all buffers, those first whose parameters were registered last."""
    place = {id(p): i for i, p in enumerate(module.parameters())}
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return sorted(buckets, key=lambda bucket: -min(place[id(p)] for p in bucket.parameters))


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters in the order of registration, by the name they have in every layout, else their path."""
    taken: set[str] = set()
    for path, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = name_of(parameter, path)
            name = f"{name} ({path})" if name in taken else name
            taken.add(name)
            yield name, parameter


def _held_by(chunks: Sequence[DistributedDataParallel]) -> set[int]:
    return {id(p) for chunk in chunks for buffer in chunk.buffers for p in buffer.parameters}


Kind = tuple[torch.dtype, torch.dtype, bool]
"""Type of the parameters, type of their gradients, whether they are experts'."""


def _by_kind(
    module: nn.Module, grad_dtype: torch.dtype | None, elsewhere: set[int]
) -> dict[Kind, list[tuple[str, nn.Parameter]]]:
    """The parameters of each buffer, dense ones first."""
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in _named_parameters(module):
        if id(parameter) not in elsewhere:
            adopt_marks(parameter)
            own = torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype
            kind = (parameter.dtype, grad_dtype or own, not record_of(parameter).allreduce)
            kinds.setdefault(kind, []).append((name, parameter))
    return dict(sorted(kinds.items(), key=lambda item: item[0][2]))


def _averaging(groups: ParallelGroups, is_expert: bool, in_collective: bool, per_token: bool) -> tuple[float, str]:
    """(factor ahead of the collective, its operation): the table of facts in `grad_buffers`."""
    replicas = groups.dp_cp.size
    if per_token:
        return 1.0, "sum"
    if in_collective:
        return (groups.edp.size / replicas if is_expert else 1.0), "avg"
    return 1.0 / replicas, "sum"


DataParallel = NaiveDataParallel | DistributedDataParallel
"""Either wrapper; both have the methods that a training step calls."""


def wrap_model_chunks(
    chunks: Sequence[nn.Module], groups: ParallelGroups, optim: OptimConfig
) -> list[NaiveDataParallel] | list[DistributedDataParallel]:
    """The model chunks of this rank, in the order of its schedule, wrapped as `optim` says."""
    grad_dtype = torch.float64 if optim.precision == "fp64" else torch.float32
    if optim.data_parallel == "naive":
        average = not optim.calculate_per_token_loss
        return [NaiveDataParallel(c, groups.dp_cp, groups.edp, grad_dtype=grad_dtype, average=average) for c in chunks]
    wrapped: list[DistributedDataParallel] = []
    for chunk in chunks:
        wrapped.append(
            DistributedDataParallel(
                chunk,
                groups,
                grad_dtype=grad_dtype,
                bucket_size=optim.bucket_size,
                overlap_grad_reduce=optim.overlap_grad_reduce,
                average_in_collective=optim.average_in_collective,
                calculate_per_token_loss=optim.calculate_per_token_loss,
                distributed_optimizer=optim.distributed_optimizer,
                overlap_param_gather=optim.overlap_param_gather,
                num_distributed_optimizer_instances=optim.num_distributed_optimizer_instances,
                check_for_nan_in_grad=optim.check_for_nan_in_grad,
                earlier_chunks=list(wrapped),
            )
        )
    return wrapped
