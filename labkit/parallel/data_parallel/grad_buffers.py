"""Contiguous gradient buffers, their buckets, and the collectives that reduce a bucket.

A `GradBuffer` holds the gradients of parameters with one type, one type of gradients and one set of ranks that reduce
them. Each parameter's `main_grad` is a view of the buffer. Collectives of a bucket, for d ranks and P bytes:

    one group                     all-reduce                                                 2 (d-1)/d P
    distributed optimizer         reduce-scatter; rank r keeps the r-th part of the bucket     (d-1)/d P
    i instances of w = d/i ranks  reduce-scatter within, all-reduce of the part across       (w-1)/w P + 2 (i-1)/i P/w
                                  and, without the distributed optimizer, all-gather within    + (w-1)/w P

The last form sends 1/w of the gradients between instances. If an instance is a node, these links are the slow ones
(arXiv 1807.11205). Megatron has this form for the distributed optimizer, as its optimizer instances.

There are two ways to take the mean over replicas: scale by 1/(dp x cp) and sum, which cannot overflow, or let the
collective average. Fewer ranks (edp) hold an expert, but its tokens come from all replicas, so its gradients are
divided by the same number. They are scaled by 1/(dp x cp), or by edp/(dp x cp) before an average over edp. Nothing
scales the gradients of a loss that is summed over tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.comm.collectives import all_gather_async, all_reduce_async, reduce_scatter_async
from labkit.comm.groups import Group, ParallelGroups, cut_group
from labkit.comm.ledger import comm_scope
from labkit.comm.pending import Pending
from labkit.parallel.data_parallel.bucket_layout import Bucket, BucketLayout, ParameterSpec, plan_buckets
from labkit.parallel.data_parallel.finite import scale_and_check_finite
from labkit.parallel.parameters.parameter_record import adopt_marks, main_grad_of, name_of, record_of


@dataclass(frozen=True)
class Reduction:
    """The way to reduce the gradients of a buffer over all replicas."""

    within: Group
    """The ranks of this instance: all replicas, or one part of them."""
    across: Group
    """The ranks with the same place in the other instances; of size 1 with one instance."""
    factor: float
    """Factor of the gradients before the reduction."""
    op: str
    """`sum` or `avg`."""
    scatter: bool
    """Each rank keeps its part of every bucket (distributed optimizer)."""
    check_finite: bool = False
    """Before the reduction, note if this rank's own gradients are finite."""

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self.within.size * self.across.size

    def prepare(self, data: Tensor) -> Tensor | None:
        """Scale for the mean. With `check_finite` and several replicas, also check that the values are finite."""
        if self.check_finite and self.size > 1:
            return scale_and_check_finite(data, self.factor)
        if self.factor != 1.0:
            data.mul_(self.factor)
        return None

    def run(self, data: Tensor) -> Generator[Pending, Tensor, None]:
        """Yield the collectives of a prepared bucket one after another, each under way.

        The caller sends in the result of a collective, and the next one starts. The result is in `data`; with `scatter`
        only this rank's part of `data` is valid.
        """
        if not self.scatter and self.across.size == 1:
            yield all_reduce_async(data, self.within, self.op)
            return
        part = own_part(data, self.within)
        yield reduce_scatter_async(data, self.within, op=self.op, out=part)
        if self.across.size > 1:
            yield all_reduce_async(part, self.across, self.op)
        if not self.scatter:
            yield all_gather_async(part, self.within, out=data)


def own_part(data: Tensor, group: Group) -> Tensor:
    """Return this rank's part of a flat tensor, which the group cuts into equal parts: a view."""
    return data.view(group.size, -1)[group.rank]


class GradBucket:
    """A range of a buffer: the arrivals of its gradients, and its reduction."""

    def __init__(self, buffer: GradBuffer, index: int) -> None:
        """Bucket `index` of the plan of `buffer`."""
        self.plan: Bucket = buffer.plan.buckets[index]
        self.index, self.reduction = index, buffer.reduction
        self.grad_data = buffer.grad_data[self.plan.start : self.plan.end]
        """View of the buffer's gradients, padding included."""
        self.param_data = None if buffer.param_data is None else buffer.param_data[self.plan.start : self.plan.end]
        """View of the buffer's parameters, padding included; None if parameters keep their own memory."""
        own = set(self.plan.names)
        self.parameters = tuple(p for name, p in zip(buffer.names, buffer.parameters) if name in own)
        """Its parameters, in the order of registration."""
        self._recorded = tuple((p, record_of(p)) for p in self.parameters)
        self.waits_for_other_chunk = False
        """A parameter also takes gradients from another chunk of this rank."""
        self.started = False
        """The reduction was started in this step."""
        self.not_finite: Tensor | None = None
        """[1], above 0 if a gradient of this rank was not finite before the last reduction; None without a check."""
        self._collectives: Generator[Pending, Tensor, None] | None = None
        self._pending: Pending | None = None
        self._seen: dict[int, int] = {}
        self._expected: dict[int, int] | None = None
        self._complete = 0
        self._streams: set[torch.cuda.Stream] = set()
        """CUDA streams on which gradients arrived."""

    @property
    def reduced(self) -> Tensor:
        """Result of the reduction: the whole bucket, or this rank's part with the distributed optimizer."""
        return own_part(self.grad_data, self.reduction.within) if self.reduction.scatter else self.grad_data

    def note(self, parameter: Tensor) -> bool:
        """Count the arrival of a gradient, made on the current stream; True if it made the bucket complete."""
        if self.grad_data.is_cuda:
            self._streams.add(torch.cuda.current_stream(self.grad_data.device))
        key = id(parameter)
        count = self._seen[key] = self._seen.get(key, 0) + 1
        if self._expected is None or count != self._expected.get(key):
            return False
        self._complete += 1
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """All gradients that `learn` saw have arrived; False before the first `learn`."""
        return self._expected is not None and self._complete == len(self._expected)

    def learn(self) -> None:
        """At the end of the first step, expect the same arrivals in later steps. Later calls change nothing."""
        if self._expected is None:
            self._expected = dict(self._seen)

    def reset(self) -> None:
        """Start a step: the first gradient of each parameter will overwrite its old `main_grad`."""
        while self.proceed():  # a reduction is left over if a step was broken off
            pass
        for parameter, record in self._recorded:
            record.has_gradient = record.added_elsewhere
            if record.added_elsewhere:
                main_grad_of(parameter).zero_()
        self.started = False
        self._seen.clear()
        self._streams.clear()
        self._complete = 0

    def start(self) -> None:
        """Start the reduction; gradients that arrive later would be lost."""
        assert not self.started, f"bucket {self.index} was started twice in one step"
        self.started = True
        self._wait_for_gradients()
        for parameter, record in self._recorded:
            if not record.has_gradient:
                main_grad_of(parameter).zero_()
                record.has_gradient = True
        self.not_finite = self.reduction.prepare(self.grad_data)
        self._collectives = self.reduction.run(self.grad_data)
        with self._scope():
            self._pending = next(self._collectives)

    def _wait_for_gradients(self) -> None:
        """Make the current stream wait for every stream on which a gradient arrived.

        Autograd runs each backward on the stream of its forward, and joins the streams only after the whole backward.
        Shared experts with overlap have a stream of their own.
        """
        if self._streams:
            current = torch.cuda.current_stream(self.grad_data.device)
            for stream in self._streams - {current}:
                current.wait_stream(stream)

    def proceed(self) -> bool:
        """Wait for the collective under way and start the next; False if none is left."""
        if self._collectives is None or self._pending is None:
            return False
        with self._scope():
            try:
                self._pending = self._collectives.send(self._pending.wait())
            except StopIteration:
                self._pending = self._collectives = None
        return self._pending is not None

    def _scope(self) -> comm_scope:
        return comm_scope(layer=f"buckets.{self.index}", phase="gradients")


class GradBuffer:
    """The gradients of some parameters in one piece of memory.

    With `reduction.scatter` the parameters also move into one piece of memory with the same layout, so that ranks can
    gather their updates bucket by bucket.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        grad_dtype: torch.dtype,
        reduction: Reduction,
        *,
        bucket_size: int | None,
        is_expert: bool = False,
        pad: int = 1,
    ) -> None:
        """Lay out the parameters and give each a `main_grad` of zeros.

        named: parameters of one type, in the order of registration. bucket_size, pad: see `plan_buckets`.
        """
        self.names = tuple(name for name, _ in named)
        """Their names, in the order of registration."""
        self._by_name = dict(named)
        self.parameters = tuple(self._by_name.values())
        """The parameters, in the same order."""
        self.param_dtype, self.grad_dtype = self.parameters[0].dtype, grad_dtype
        self.is_expert, self.reduction = is_expert, reduction
        cuts = reduction.scatter or reduction.across.size > 1
        self.plan: BucketLayout = plan_buckets(
            [ParameterSpec(n, p.numel(), record_of(p).has_copies) for n, p in named],
            dp=reduction.within.size,
            bucket_size=bucket_size,
            distributed_optimizer=cuts,
            pad=pad,
        )
        device = self.parameters[0].device
        self.grad_data = torch.zeros(self.plan.numel, dtype=grad_dtype, device=device)
        """All gradients, padding included; the padding stays zero."""
        self.param_data = self._move_parameters(device) if reduction.scatter else None
        """All parameters, padding included; None without the distributed optimizer."""
        for name, parameter in named:
            parameter.main_grad = self.view(self.grad_data, name)  # pyright: ignore[reportAttributeAccessIssue]
        self.buckets = [GradBucket(self, index) for index in range(len(self.plan.buckets))]
        """The buckets, in the order in which a backward fills them."""
        for bucket in self.buckets if reduction.scatter else ():
            if any(record_of(parameter).has_copies for parameter in bucket.parameters):
                (tied,) = bucket.parameters  # alone in its bucket
                record_of(tied).main_grad_shard = bucket.reduced

    @property
    def group(self) -> Group:
        """The ranks of one instance, which reduce the buckets; the distributed optimizer cuts buckets over them."""
        return self.reduction.within

    def view(self, data: Tensor, name: str) -> Tensor:
        """Return the range of parameter `name` in a tensor with the buffer's layout, in the parameter's shape."""
        start, end = self.plan.ranges[name]
        return data[start:end].view(self._by_name[name].shape)

    def _move_parameters(self, device: torch.device) -> Tensor:
        data = torch.zeros(self.plan.numel, dtype=self.param_dtype, device=device)
        with torch.no_grad():
            for name, parameter in zip(self.names, self.parameters):
                parameter.data = self.view(data, name).copy_(parameter)
        return data


def build_buffers(
    module: nn.Module,
    groups: ParallelGroups,
    *,
    grad_dtype: torch.dtype | None,
    bucket_size: int | None,
    average_in_collective: bool,
    per_token: bool,
    scatter: bool,
    instances: int,
    check_finite: bool,
    held_elsewhere: set[int],
) -> list[GradBuffer]:
    """Return the buffers of a module, dense ones first; the options are those of `DistributedDataParallel`.

    held_elsewhere: ids of parameters that another wrapper of this rank has in its buffers.
    """
    buffers = []
    for (_, main_dtype, is_expert), named in _by_kind(module, grad_dtype, held_elsewhere).items():
        factor, op = _averaging(groups, is_expert, average_in_collective, per_token)
        within, across = cut_group(groups, groups.edp if is_expert else groups.dp_cp, instances)
        reduction = Reduction(within, across, factor, op, scatter, check_finite)
        buffers.append(GradBuffer(named, main_dtype, reduction, bucket_size=bucket_size, is_expert=is_expert))
    return buffers


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield trainable parameters in the order of registration, by their name in every layout, else by their path."""
    taken: set[str] = set()
    for path, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = name_of(parameter, path)
            name = f"{name} ({path})" if name in taken else name
            taken.add(name)
            yield name, parameter


Kind = tuple[torch.dtype, torch.dtype, bool]
"""(type of the parameters, type of their gradients, they belong to experts)."""


def _by_kind(
    module: nn.Module, grad_dtype: torch.dtype | None, elsewhere: set[int]
) -> dict[Kind, list[tuple[str, nn.Parameter]]]:
    """Return the parameters of each buffer, dense ones first."""
    kinds: dict[Kind, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in _named_parameters(module):
        if id(parameter) not in elsewhere:
            adopt_marks(parameter)
            main_dtype = torch.promote_types(grad_dtype or torch.float32, parameter.dtype)
            kind = (parameter.dtype, main_dtype, not record_of(parameter).allreduce)
            kinds.setdefault(kind, []).append((name, parameter))
    return dict(sorted(kinds.items(), key=lambda item: item[0][2]))


def _averaging(groups: ParallelGroups, is_expert: bool, in_collective: bool, per_token: bool) -> tuple[float, str]:
    """Return the factor before the collective and the collective's operation, as the module's docstring explains."""
    replicas = groups.dp_cp.size
    if per_token:
        return 1.0, "sum"
    if in_collective:
        return (groups.edp.size / replicas if is_expert else 1.0), "avg"
    return 1.0 / replicas, "sum"


def in_backward_order(module: nn.Module, buffers: Sequence[GradBuffer]) -> list[GradBucket]:
    """Return the buckets of all buffers; buckets of the parameters registered last come first."""
    place = {id(p): i for i, p in enumerate(module.parameters())}
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return sorted(buckets, key=lambda bucket: -min(place[id(p)] for p in bucket.parameters))
