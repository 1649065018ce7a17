"""The arguments of a call, and the static inputs into which a call copies them.

A graph reads its inputs at fixed addresses. The samples of a capture become these static inputs, and `Arguments` holds
every later call to the order, shapes and types of its sample. A static input belongs to one argument of one callable at
a time: a call copies its tensors in one after the other, and a backward reads the input again. Callables that never
need their inputs at the same time can share them (`BufferPlan`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.buffers import BufferPlan, Use
from labkit.graphs.planned_captures import Place


class Arguments:
    """The tensors of a call, in a fixed order, with fixed shapes and types: positional ones, then keywords by name."""

    def __init__(self, place: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Learn order, shapes and types from a sample call.

        Raises:
            TypeError: an argument is not a tensor, or `args` is not a tuple.
        """
        if not isinstance(args, tuple | list):
            raise TypeError(
                f"{place}: sample_args must be a tuple of tensors, got a {type(args).__name__}; "
                "write (x,) for one argument"
            )
        self.place = place
        self.keywords = tuple(kwargs)
        self._positional = len(args)
        leaves, self.spec = tree_flatten_with_path(self._tree(args, kwargs))
        self.tensors = [leaf for _, leaf in leaves]
        self.names = tuple(self._name(path) for path, _ in leaves)
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor is None:
                raise TypeError(f"{place}: {name} is None; a graph takes only tensors: leave it out of the sample")
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{place}: {name} is a {type(tensor).__name__}; a graph takes only tensors. Put a constant into "
                    "the callable (functools.partial), and a value that changes into a tensor"
                )
        self._known = [(x.shape, x.dtype, x.device) for x in self.tensors]
        self._flat = all(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        shapes = tuple((tuple(x.shape), x.dtype, x.layout, x.requires_grad) for x in self.tensors)
        self.signature: Hashable = (shapes, self.keywords)
        """Two calls can share static inputs only if their signatures are equal."""

    def forget_samples(self) -> None:
        """Keep only shapes and structure: where calls share static inputs, most samples are not needed any more."""
        self.tensors = []

    def _name(self, path: Any) -> str:
        which, index = path[0].idx, path[1].idx
        return (f"keyword argument {self.keywords[index]}" if which else f"argument {index}") + keystr(path[2:])

    def _tree(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        return list(args), [kwargs[key] for key in self.keywords]

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
        """The tensors of a later call, checked against the sample.

        Raises:
            TypeError: the sample had other arguments.
            GraphCaptureError: a shape, type or device differs from the sample's.
        """
        if len(args) != self._positional or kwargs.keys() != set(self.keywords):
            raise TypeError(
                f"{self.place} was captured with {self._positional} positional argument(s) and the keywords "
                f"{list(self.keywords)}, and is called with {len(args)} and {list(kwargs)}: pass all of the sample call"
            )
        if self._flat:
            tensors: Sequence[Tensor] = [*args, *(kwargs[key] for key in self.keywords)] if kwargs else args
        else:
            tensors, spec = tree_flatten(self._tree(args, kwargs))
            if spec != self.spec:
                raise TypeError(f"{self.place} is called with arguments nested in another way than at capture")
        for i, (tensor, (shape, dtype, device)) in enumerate(zip(tensors, self._known, strict=True)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.place}: {self.names[i]} is a {type(tensor).__name__}, at capture it was a tensor"
                )
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
                raise GraphCaptureError(
                    f"{self.place}: {self.names[i]} is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, and "
                    f"the graph was captured with {tuple(shape)} of {dtype} on {device}: shapes of a graph are fixed; "
                    "pad to that shape, or capture again"
                )
        return tensors

    def rebuilt(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) of the sample call with `tensors` in place of its own."""
        args, values = self.spec.unflatten(tensors)
        return tuple(args), dict(zip(self.keywords, values, strict=True))


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
        side = "is only in the order" if found in at else "is only in the plan"
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
