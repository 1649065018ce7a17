"""Static inputs, the memory that calls copy their tensors into, and refusals of samples that share memory.

A static input must belong to one argument of one callable at a time. A call copies its tensors in one after the other:
two arguments in one place would both get the value of the second. A backward reads the input again, so the input must
stay until then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.buffers import BufferPlan, Use
from labkit.graphs.call_arguments import Arguments, Place, Work


def owners(places: Sequence[Place], plan: BufferPlan | None) -> list[int]:
    """For each place, the index of the place into whose sample its calls are copied: the first user of its buffer.

    Raises:
        ValueError: the plan is of another order.
    """
    if plan is None:
        return list(range(len(places)))
    at = {Use(place.chunk, place.layer, place.microbatch): i for i, place in enumerate(places)}
    if plan.assignment.keys() != at.keys():
        found = next(iter(at.keys() ^ plan.assignment.keys()))
        side = "the order has, and the plan has not" if found in at else "the plan has, and the order has not"
        raise ValueError(
            f"this plan is of another order: chunk {found[0]} layer {found[1]} microbatch {found[2]} {side}; "
            "make it by plan_buffers(order, num_layers_per_chunk) of the same order"
        )
    first: dict[int, int] = {}
    for use in sorted(plan.assignment, key=plan.acquired_at.__getitem__):
        first.setdefault(plan.assignment[use], at[use])
    return [first[plan.assignment[use]] for use in at]


def static_inputs(arguments: Sequence[Arguments], owner: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The tensors that calls copy into: new leaves that alias the samples, so that the samples keep `.grad` and hooks.

    Raises:
        ValueError: samples of unequal shapes would share an input.
    """
    for one, index in zip(arguments, owner, strict=True):
        if one.signature != arguments[index].signature:
            raise ValueError(
                f"the plan gives {one.place} the static input of {arguments[index].place}, and their samples differ in "
                "shape, type or requires_grad: tell plan_buffers their signatures"
            )
    made = {
        index: tuple(x.detach().requires_grad_(x.requires_grad) for x in arguments[index].tensors)
        for index in dict.fromkeys(owner)
    }
    return [made[index] for index in owner]


def check_samples(arguments: Sequence[Arguments]) -> None:
    """Refuse samples that cannot hold what a call brings.

    Raises:
        GraphCaptureError: several elements of a sample have one address (an expanded tensor), or two arguments of one
            callable share memory.
    """
    seen: set[tuple[int, ...]] = set()
    for one in arguments:
        if (key := tuple(map(id, one.tensors))) in seen:
            continue
        seen.add(key)
        for name, x in zip(one.names, one.tensors, strict=True):
            if x.layout is torch.strided and any(s == 0 and n > 1 for n, s in zip(x.size(), x.stride(), strict=True)):
                raise GraphCaptureError(
                    f"{one.place}: {name} is expanded: several of its elements lie at one address, so a call could not "
                    "bring different values. Give .contiguous() as the sample"
                )
        for i, x in enumerate(one.tensors):
            for j in range(i):
                if share_memory(x, one.tensors[j]):
                    raise GraphCaptureError(
                        f"{one.place}: {one.names[j]} and {one.names[i]} of the sample share memory, and a call would "
                        "copy the second over the first. Give each a tensor of its own"
                    )


def check_samples_apart(work: Sequence[Work], arguments: Sequence[Arguments], owner: Sequence[int]) -> None:
    """Refuse samples that share memory while two callables need it for different values.

    owner: as `owners` returns it.

    Raises:
        GraphCaptureError: between forward and backward of one callable, the forward of another would overwrite its
            input.
    """
    held: dict[int, dict[int, list[Tensor]]] = {}  # by storage: owner -> its tensors
    for one in work:
        me = owner[one.place]
        for x in arguments[me].tensors:
            if not x.numel() or x.layout is not torch.strided:
                continue
            there = held.setdefault(x.untyped_storage().data_ptr(), {})
            if one.kind != "F":
                there.pop(me, None)
                continue
            for other, tensors in there.items():
                if other != me and any(share_memory(x, y) for y in tensors):
                    raise GraphCaptureError(
                        f"{arguments[other].place} and {arguments[one.place].place} were given one tensor as their "
                        "sample: the second call would overwrite the input that the backward of the first reads. Give "
                        "each a tensor of its own, and put a value that never changes into the callable (a buffer, "
                        "functools.partial)"
                    )
            there.setdefault(me, []).append(x)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """True where an element of `a` and an element of `b` lie at one address."""
    if not (a.numel() and b.numel()) or torch.strided != a.layout or torch.strided != b.layout:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True  # rare, so the elements are not compared
    if a.data_ptr() == b.data_ptr():
        return True
    taken = torch.zeros(max(_end(a), _end(b)), dtype=torch.bool)
    taken.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.size(), b.stride(), b.storage_offset()).any())


def _end(x: Tensor) -> int:
    """Number of elements from the start of the storage to the end of the tensor."""
    return 1 + int(x.storage_offset()) + sum((n - 1) * s for n, s in zip(x.size(), x.stride(), strict=True))


def lie_together(a: Tensor, b: Tensor) -> bool:
    """True where two tensors of one shape have the same elements in the same memory."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def copy_in(static: Tensor, given: Tensor) -> None:
    """Copy a value to its fixed address, unless it lies there already."""
    if not lie_together(static, given):
        overlaps = static.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        static.copy_(given.clone() if overlaps else given)
