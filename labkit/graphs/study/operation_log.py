"""The operations of a block of code, as a graph would hold them, and the memory that they read and write.

A CUDA graph does not show its operations. This log does, inside a capture or around eager code:

    with backend.capturing(pool, "forward") as graph, OperationLog() as log:
        y = model(x)
    log.operations[0]        # addmm: reads three places, writes one

The log leaves out views and tensors made without values, since they compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = ("aten::empty", "aten::new_empty", "aten::_empty")


class Memory(NamedTuple):
    """The memory of a tensor, views of it included."""

    address: int
    """Address of the first byte."""
    nbytes: int
    """Size in bytes."""

    def overlaps(self, other: Memory) -> bool:
        """True where a byte belongs to both."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


def memory_of(tensor: Tensor) -> Memory:
    """The memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    return Memory(storage.data_ptr(), storage.nbytes())


@dataclass(frozen=True)
class Operation:
    """One entry of the list."""

    name: str
    """torch's name, such as `addmm`."""
    reads: tuple[Memory, ...]
    """Memory of its arguments."""
    writes: tuple[Memory, ...]
    """Memory of its results."""


class OperationLog(TorchDispatchMode):
    """Lists the operations inside the block, forward and backward, and keeps none of their tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = dict.fromkeys(memory_of(x) for x in _tensors((*args, *kwargs.values())))
        written = dict.fromkeys(memory_of(x) for x in _tensors(_written(func, args, kwargs)))
        made = {place: None for place in map(memory_of, _tensors((result,))) if place not in given and place.nbytes}
        if (made or written) and not func.name().startswith(_EMPTY):
            name = func.name().removeprefix("aten::").split(".")[0]
            self.operations.append(Operation(name, tuple(given), tuple(written | made)))
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the operation writes to, by its schema."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return found
