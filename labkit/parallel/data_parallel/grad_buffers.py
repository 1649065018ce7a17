"""Contiguous gradient buffers, the buckets they are cut into, and the collectives that reduce a bucket.

A `GradBuffer` holds the gradients of parameters that share their type, their gradient's type and the ranks they are
reduced over; each parameter's `main_grad` is a view of it. What a bucket goes through, for d ranks and P bytes:

    one group                     all-reduce                                                 2 (d-1)/d P
    distributed optimizer         reduce-scatter; rank r keeps the r-th part of the bucket     (d-1)/d P
    i instances of w = d/i ranks  reduce-scatter within, all-reduce of the part across       (w-1)/w P + 2 (i-1)/i P/w
                                  and, without the distributed optimizer, all-gather within    + (w-1)/w P

The hierarchical form sends 1/w of the gradients between instances, which is where the slow links are when an instance
is a node (arXiv 1807.11205). Megatron has it for the distributed optimizer, as its optimizer instances.

The mean over replicas is taken in one of two ways: scale by 1/(dp x cp) first and sum, which cannot overflow, or let
the collective average. An expert is held by fewer ranks (edp), but its tokens came from all replicas, so its gradients
are divided by the same number: pre-scaled by 1/(dp x cp), or by edp/(dp x cp) ahead of an average over edp. A loss
summed over tokens is not scaled here at all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.parallel.collectives import Pending, all_gather_async, all_reduce_async, comm_scope, reduce_scatter_async
from labkit.parallel.data_parallel.bucket_layout import Bucket, BucketLayout, ParameterSpec, plan_buckets
from labkit.parallel.groups import Group, ParallelGroups, cut_group
from labkit.parallel.parameters.parameter_record import adopt_marks, main_grad_of, name_of, record_of


@dataclass(frozen=True)
class Reduction:
    """How the gradients of a buffer become those of all replicas."""

    within: Group
    """The ranks of this instance: all replicas, or one of the parts they are cut into."""
    across: Group
    """The ranks that have the same place in the other instances; of size 1 where there is one instance."""
    factor: float
    """Multiplies the gradients first."""
    op: str
    """`sum` or `avg`."""
    scatter: bool
    """Each rank keeps its part of every bucket (distributed optimizer)."""
    check_finite: bool = False
    """Note before the reduction whether this rank's own gradients are finite."""

    @property
    def size(self) -> int:
        """Replicas."""
        return self.within.size * self.across.size

    def prepare(self, data: Tensor) -> Tensor | None:
        """Scale for the mean. With `check_finite` and several replicas, also check that the values are finite."""
        if self.check_finite and self.size > 1:
            return scale_and_check_finite(data, self.factor)
        if self.factor != 1.0:
            data.mul_(self.factor)
        return None

    def run(self, data: Tensor) -> Generator[Pending, Tensor, None]:
        """The collectives of a prepared bucket, each yielded under way; what it brought is sent in, the next starts.

        The result is in `data`: all of it, or with `scatter` this rank's part alone.
        """
        if not self.scatter and self.across.size == 1:
            yield all_reduce_async(data, self.within, self.op)
            return
        part = own_part(data, self.within)
        yield reduce_scatter_async(data, self.within, op=self.op, out=part)
        yield all_reduce_async(part, self.across, self.op)
        if not self.scatter:
            yield all_gather_async(part, self.within, out=data)


def own_part(data: Tensor, group: Group) -> Tensor:
    """This rank's part of a flat tensor that the group cuts into equal parts: a view."""
    return data.view(group.size, -1)[group.rank]


class GradBucket:
    """A stretch of a buffer: which of its gradients are in, and its reduction."""

    def __init__(self, buffer: GradBuffer, index: int) -> None:
        """Bucket `index` of the plan of `buffer`."""
        self.plan: Bucket = buffer.plan.buckets[index]
        self.index, self.reduction = index, buffer.reduction
        self.grad_data = buffer.grad_data[self.plan.start : self.plan.end]
        """View of the buffer's gradients, padding included."""
        self.param_data = None if buffer.param_data is None else buffer.param_data[self.plan.start : self.plan.end]
        """View of the buffer's parameters, padding included; None where parameters keep their own memory."""
        own = set(self.plan.names)
        self.parameters = tuple(p for name, p in zip(buffer.names, buffer.parameters) if name in own)
        """Its parameters, in the order of registration."""
        self._recorded = tuple((p, record_of(p)) for p in self.parameters)
        self.waits_for_other_chunk = False
        """Whether a parameter also takes gradients from another chunk of this rank."""
        self.started = False
        """Whether its reduction was started in this step."""
        self.not_finite: Tensor | None = None
        """[1], above 0 where a gradient of this rank was not finite before the last reduction; None if not looked."""
        self._collectives: Generator[Pending, Tensor, None] | None = None
        self._pending: Pending | None = None
        self._seen: dict[int, int] = {}
        self._expected: dict[int, int] | None = None
        self._complete = 0

    @property
    def reduced(self) -> Tensor:
        """Where the reduction leaves its result: the whole bucket, or with the distributed optimizer the own part."""
        return own_part(self.grad_data, self.reduction.within) if self.reduction.scatter else self.grad_data

    def note(self, parameter: Tensor) -> bool:
        """Count the arrival of a gradient; whether it made the bucket complete."""
        key = id(parameter)
        count = self._seen[key] = self._seen.get(key, 0) + 1
        if self._expected is None or count != self._expected.get(key):
            return False
        self._complete += 1
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether every gradient is in that was learned to arrive; False until something was learned."""
        return self._expected is not None and self._complete == len(self._expected)

    def learn(self) -> None:
        """At the end of a step: what arrived in it is what will arrive. Later calls change nothing."""
        if self._expected is None:
            self._expected = dict(self._seen)

    def reset(self) -> None:
        """At the start of a step: what the gradients are is forgotten, and the first to come replaces it."""
        while self.proceed():  # left over from a step that was broken off
            pass
        for parameter, record in self._recorded:
            record.has_gradient = record.added_elsewhere
            if record.added_elsewhere:
                main_grad_of(parameter).zero_()
        self.started = False
        self._seen.clear()
        self._complete = 0

    def start(self) -> None:
        """Start the reduction; gradients that arrive later would be lost."""
        assert not self.started, f"bucket {self.index} was started twice in one step"
        self.started = True
        for parameter, record in self._recorded:
            if not record.has_gradient:
                main_grad_of(parameter).zero_()
                record.has_gradient = True
        self.not_finite = self.reduction.prepare(self.grad_data)
        self._collectives = self.reduction.run(self.grad_data)
        with self._scope():
            self._pending = next(self._collectives)

    def proceed(self) -> bool:
        """Wait for the collective under way and start the next; False where none is left."""
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

    With `reduction.scatter` the parameters themselves move into one piece too, laid out alike, so that what the ranks
    have updated can be gathered bucket by bucket.
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
        """Lay the parameters out and give each its `main_grad`, zero.

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
            [ParameterSpec(n, p.numel(), record_of(p).shared_embedding) for n, p in named],
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
        """In the order in which a backward fills them."""
        for bucket in self.buckets if reduction.scatter else ():
            if any(record_of(parameter).shared_embedding for parameter in bucket.parameters):
                (tied,) = bucket.parameters  # alone in its bucket
                record_of(tied).main_grad_shard = bucket.reduced

    @property
    def group(self) -> Group:
        """The ranks over which buckets are reduced, and cut by the distributed optimizer (of one instance)."""
        return self.reduction.within

    def view(self, data: Tensor, name: str) -> Tensor:
        """The stretch of parameter `name` in a tensor laid out like the buffer, in the parameter's shape."""
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
    """The buffers of a module, dense ones first; the options are those of `DistributedDataParallel`.

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
    """Trainable parameters in the order of registration, by the name they have in every layout, else their path."""
    taken: set[str] = set()
    for path, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = name_of(parameter, path)
            name = f"{name} ({path})" if name in taken else name
            taken.add(name)
            yield name, parameter


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


def in_backward_order(module: nn.Module, buffers: Sequence[GradBuffer]) -> list[GradBucket]:
    """The buckets of all buffers, those first whose parameters were registered last."""
    place = {id(p): i for i, p in enumerate(module.parameters())}
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    return sorted(buckets, key=lambda bucket: -min(place[id(p)] for p in bucket.parameters))


def scale_and_check_finite(x: Tensor, factor: float) -> Tensor:
    """Multiply x by `factor` in place; returns [1] on x's device, above 0 where some value of x was not finite.

    A reduction makes one rank's NaN everybody's, and nobody who looks afterwards can say where the NaN came from. So
    the wrappers look before, in the pass over memory that scales a buffer for its mean. The answer stays on the device,
    and nobody reads the answer in a good step (`labkit.train.not_finite`). With a factor of 1, x is only read.
    """
    if factor == 1.0:
        return (~torch.linalg.vector_norm(x).isfinite()).float().view(1)
    found = torch.zeros(1, device=x.device)
    by = torch.full((1,), factor, device=x.device)
    if x.dtype == torch.float64:  # the fused operation takes its factor in fp32 only
        found += ~torch.linalg.vector_norm(x).isfinite()
        x.mul_(factor)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_([x], found, by)  # pyright: ignore[reportPrivateImportUsage]
    return found
