"""Data parallelism with gradient buckets: a full bucket is reduced while the rest of the backward runs.

This is Megatron's `DistributedDataParallel`; the idea is in arXiv 2006.15704.

*When is a gradient complete?* A hook on every parameter reports arrivals outside `no_sync`. The first step reduces
everything at its end, and learns the number of arrivals that complete each gradient. Most parameters have one arrival.
Parameters that recomputed segments share have several. A parameter has none if its last gradient comes inside
`no_sync`, as a norm's does if a split backward ends with W. A fused layer adds its gradient to `main_grad` itself, and
autograd still calls the hook. No autograd engine runs in W, so `weight_grad_store` calls the hook there. A gradient
that comes after its bucket was sent raises an error.

*In which order do ranks reduce?* Always in the order of the buckets, because collectives of one communicator pair up by
order. A complete bucket waits for the buckets before it. That is torch's rule; Megatron starts a bucket as soon as it
is complete, and relies on every rank completing its buckets in the same order (chapter 08). If a rank has several
chunks, hooks start nothing: the pipeline calls `start_grad_sync` at fixed places of the schedule.

*Who owns a shared parameter?* The first wrapper of the rank that holds it. On a V placement one rank can hold both
stages of a tied weight. Its gradient is complete only after the backwards of both, so its bucket waits for
`finish_grad_sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.config import OptimConfig
from labkit.parallel.data_parallel.bucket_layout import default_bucket_size
from labkit.parallel.data_parallel.grad_buffers import GradBucket, GradBuffer, build_buffers, in_backward_order
from labkit.parallel.data_parallel.naive import NaiveDataParallel
from labkit.parallel.data_parallel.param_gather import ParamGather
from labkit.parallel.data_parallel.wrapper import ChunkWrapper
from labkit.parallel.parameters.parameter_record import add_gradient, call_on_gradient, name_of


class DistributedDataParallel(ChunkWrapper):
    """Gives each parameter of `module` a `main_grad` in a buffer, and reduces the buffers bucket by bucket.

    A step is: `zero_grad_buffer`, backwards (all but the last inside `no_sync`), `finish_grad_sync`. Hooks start
    reductions in between; `start_grad_sync` starts the rest.
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

        grad_dtype: type of the buffers, but at least as wide as the parameters; None is at least fp32.
        bucket_size: a bucket closes at this number of elements; None is `default_bucket_size`. There is one bucket
            without overlap, on later pipeline ranks and in later chunks: earlier backwards hide its reduction.
        overlap_grad_reduce: start a bucket's reduction when its last gradient arrives; else in `finish_grad_sync`.
        average_in_collective: let the collective average, instead of scaling first and summing.
        calculate_per_token_loss: do not average. The loss is a sum over tokens, and `finalize_model_grads` divides.
        distributed_optimizer: reduce-scatter; each rank keeps its part of every bucket.
        overlap_param_gather: gather parameters during the next forward (distributed optimizer).
        num_distributed_optimizer_instances: parts into which the replicas are cut; see `grad_buffers`.
        check_for_nan_in_grad: before each reduction, note if this rank's own gradients are finite.
        earlier_chunks: the wrappers of this rank's earlier chunks, which keep their parameters.

        Raises ValueError for options that exclude each other, and instances that do not divide a group.
        """
        super().__init__(module)
        if average_in_collective and calculate_per_token_loss:
            raise ValueError("average_in_collective excludes calculate_per_token_loss, which divides once by tokens")
        if overlap_param_gather and not distributed_optimizer:
            raise ValueError("overlap_param_gather needs distributed_optimizer, which updates parameters in parts")
        self.groups = groups
        self.distributed_optimizer = distributed_optimizer
        one_bucket = not overlap_grad_reduce or groups.pp.rank > 0 or bool(earlier_chunks)
        held = {id(p) for chunk in earlier_chunks for buffer in chunk.buffers for p in buffer.parameters}
        size = None if one_bucket else bucket_size or default_bucket_size(groups.dp_cp.size)
        buffers = build_buffers(
            module, groups, grad_dtype=grad_dtype, bucket_size=size, average_in_collective=average_in_collective,
            per_token=calculate_per_token_loss, scatter=distributed_optimizer,
            instances=num_distributed_optimizer_instances, check_finite=check_for_nan_in_grad, held_elsewhere=held,
        )  # fmt: skip
        self.buffers: list[GradBuffer] = buffers  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient buffers, under Megatron's name. `.module.buffers()` gives torch's buffers."""
        self.buckets = in_backward_order(module, buffers)
        """The buckets of all buffers, in the order of their reductions."""
        if distributed_optimizer:
            self.param_gather = ParamGather(module, self.buckets, overlap=overlap_param_gather)
        self._hooks_start = overlap_grad_reduce and not earlier_chunks
        for earlier in earlier_chunks:
            earlier._share(module)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                call_on_gradient(parameter, partial(self._arrived, bucket))

    # ---- gradients ----

    def zero_grad_buffer(self) -> None:
        """Start a step. Nothing is zeroed yet: a parameter's first gradient is written over its old `main_grad`."""
        for bucket in self.buckets:
            bucket.reset()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient by `factor`. With the distributed optimizer, only this rank's reduced parts."""
        for bucket in self.buckets:
            bucket.reduced.mul_(factor)

    def spoiled_before_reduction(self) -> list[nn.Parameter] | None:
        """Return the parameters that may have had a bad gradient on this rank before the last reduction.

        They are those of buckets with a bad gradient, and of buckets that nobody reduces (experts without replicas).
        The host waits for the device. None if `check_for_nan_in_grad` is off.
        """
        if all(bucket.not_finite is None for bucket in self.buckets):
            return None
        spoiled = [b for b in self.buckets if b.not_finite is None or b.not_finite.item()]
        return [parameter for bucket in spoiled for parameter in bucket.parameters]

    def start_grad_sync(self, *parameters: nn.Parameter) -> None:
        """Start the reduction of every bucket that has not started; all gradients are complete.

        `finish_grad_sync` reduces buckets that share a parameter with another chunk. `parameters` are ignored; the
        runtime passes the chunk's parameters.
        """
        self._check_may_sync("start_grad_sync")
        for bucket in self.buckets:
            if not bucket.started and not bucket.waits_for_other_chunk:
                bucket.start()

    def finish_grad_sync(self) -> None:
        """Start the remaining reductions and wait for all. `main_grad` then belongs to all replicas.

        With the distributed optimizer only this rank's part of each bucket is defined.
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
        """Hook: add `.grad` to `main_grad` and drop `.grad`, then start the buckets that are complete now."""
        if bucket.started:
            raise RuntimeError(
                f"a gradient of {name_of(parameter)} arrived after bucket {bucket.index} "
                "was sent: this backward took another path than the first step's, or ran after it without "
                "zero_grad_buffer. Run backwards that only accumulate inside no_sync(), or without overlap_grad_reduce"
            )
        if parameter.grad is not None:
            add_gradient(parameter, parameter.grad)
            parameter.grad = None
        if self._may_sync and self._hooks_start and bucket.note(parameter):
            self._start_complete()

    def _start_complete(self) -> None:
        """Start the complete buckets, up to the first incomplete one."""
        for bucket in self.buckets:
            if not bucket.is_complete:
                return
            if not bucket.started:
                bucket.start()

    def _share(self, later: nn.Module) -> None:
        """Note another chunk of this rank, wrapped later, which may share parameters of this chunk."""
        self._hooks_start = False
        theirs = {id(p) for p in later.parameters()}
        for bucket in self.buckets:
            bucket.waits_for_other_chunk |= any(id(p) in theirs for p in bucket.parameters)


DataParallel = NaiveDataParallel | DistributedDataParallel
"""Either wrapper; both have the methods that a training step calls."""


OPTIONS = (
    *("bucket_size", "overlap_grad_reduce", "average_in_collective", "calculate_per_token_loss"),
    *("distributed_optimizer", "overlap_param_gather", "num_distributed_optimizer_instances", "check_for_nan_in_grad"),
)
"""Arguments of `DistributedDataParallel` that `OptimConfig` has under the same names."""


def wrap_model_chunks(
    chunks: Sequence[nn.Module], groups: ParallelGroups, optim: OptimConfig
) -> list[NaiveDataParallel] | list[DistributedDataParallel]:
    """Wrap the model chunks of this rank, in the order of its schedule, as `optim` says."""
    grad_dtype = torch.float64 if optim.precision == "fp64" else torch.float32
    grad_dtype = torch.bfloat16 if optim.grad_reduce_in_bf16 else grad_dtype
    if optim.data_parallel == "naive":
        average = not optim.calculate_per_token_loss
        return [NaiveDataParallel(c, groups.dp_cp, groups.edp, grad_dtype=grad_dtype, average=average) for c in chunks]
    options = {name: getattr(optim, name) for name in OPTIONS}
    wrapped: list[DistributedDataParallel] = []
    for chunk in chunks:
        wrapped.append(
            DistributedDataParallel(chunk, groups, grad_dtype=grad_dtype, earlier_chunks=tuple(wrapped), **options)
        )
    return wrapped
