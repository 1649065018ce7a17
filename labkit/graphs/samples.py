"""Static inputs, the memory that calls are copied into: the sample that serves each call, and refusals to share one.

A static input must belong to one argument of one callable at a time. A call copies its tensors in one after the other,
so two arguments in one place end up with the value of the second; and what a backward is to read must lie there until
it has run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.graphs.buffers import BufferPlan, Use
from labkit.graphs.call_arguments import Arguments, Place, Work
from labkit.parallel.communication.capturing import GraphCaptureError


def owners(places: Sequence[Place], plan: BufferPlan | None) -> list[int]:
    """For each place, whose sample its calls are copied into: that of the first that its buffer was planned for.

    Raises:
        ValueError: a plan of another order.
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
    """The tensors that calls copy into. They alias the samples, as leaves of their own, so that no `.grad` or hook of
    the samples is touched.

    Raises:
        ValueError: samples of unlike shapes are to share one.
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
        GraphCaptureError: several elements of a sample at one address (an expanded tensor), or two arguments of one
            callable that lie on each other.
    """
    seen: set[tuple[int, ...]] = set()
    for one in arguments:
        if (key := tuple(map(id, one.tensors))) in seen:
            continue
        seen.add(key)
        for name, x in zip(one.names, one.tensors, strict=True):
            if x.layout is torch.strided and any(s == 0 and n > 1 for n, s in zip(x.size(), x.stride(), strict=True)):
                raise GraphCaptureError(
                    f"{one.place}: {name} is expanded: several of its elements lie at one address, where a call could "
                    "not bring different ones. Give .contiguous() as the sample"
                )
        for i, x in enumerate(one.tensors):
            for j in range(i):
                if share_memory(x, one.tensors[j]):
                    raise GraphCaptureError(
                        f"{one.place}: {one.names[j]} and {one.names[i]} of the sample share memory, and a call would "
                        "bring the second to where the first lies. Give each a tensor of its own"
                    )


def check_samples_apart(work: Sequence[Work], arguments: Sequence[Arguments], owner: Sequence[int]) -> None:
    """Refuse samples in one place while two callables need it for different values.

    owner: for each place, whose sample serves it.

    Raises:
        GraphCaptureError: between forward and backward of one, the forward of the other would write its input over it.
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
                        "sample, and it would be the static input of both: the second would write over what the "
                        "backward of the first reads. Give each a tensor of its own; what is the same for all belongs "
                        "into the callable (a buffer, functools.partial)"
                    )
            there.setdefault(me, []).append(x)


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one lies where one of the other does."""
    if not (a.numel() and b.numel()) or torch.strided != a.layout or torch.strided != b.layout:
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.dtype != b.dtype:
        return True  # nobody needs that: not worth a closer look
    if a.data_ptr() == b.data_ptr():
        return True
    taken = torch.zeros(max(_end(a), _end(b)), dtype=torch.bool)
    taken.as_strided(a.size(), a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.size(), b.stride(), b.storage_offset()).any())


def _end(x: Tensor) -> int:
    """Elements from the start of its storage to behind its last."""
    return 1 + int(x.storage_offset()) + sum((n - 1) * s for n, s in zip(x.size(), x.stride(), strict=True))


def lie_together(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are the same elements in the same memory."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.stride() == b.stride()
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def copy_in(static: Tensor, given: Tensor) -> None:
    """Bring a value to its fixed address, unless it lies there already."""
    if not lie_together(static, given):
        overlaps = static.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
        static.copy_(given.clone() if overlaps else given)
