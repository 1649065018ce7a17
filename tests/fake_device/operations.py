"""What an operation of torch does with its tensors, told by its schema; and whether a GEMM's operands are aligned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import arg_tree_leaves, tree_leaves

WITHOUT_ACCESS = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Give memory or a view of it, and touch no element; operations that the schema calls views join them."""
GEMMS = {
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
}  # fmt: skip
ALIGNED = {torch.bfloat16: 8, torch.float16: 8, torch.float8_e4m3fn: 16, torch.float8_e5m2: 16}
"""Elements in 16 bytes, which tensor cores load at once; other operands take slower kernels, or in fp8 none."""


COPIES = {"_to_copy", "copy_", "_foreach_copy_"}


@dataclass(frozen=True)
class Kind:
    """What the schema says about an operation."""

    name: str
    """Without namespace and overload: `mm`."""
    touches: bool
    """Reads or writes elements."""
    reads: bool
    """Reads its arguments; `zeros_like` and `new_zeros` take only their shape and type."""
    copies: bool
    """Is itself a copy; others copy only an argument of the host, such as an index, to the device."""
    non_blocking: int | None
    """Place of the argument of that name."""
    written: tuple[tuple[int, str], ...]
    """Place and name of the arguments that it writes."""


@cache
def kind_of(func: Any) -> Kind:
    """The kind of an operation."""
    schema = func._schema
    name = schema.name.rpartition("::")[2]
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    touches = (
        not is_view and name not in WITHOUT_ACCESS and func.namespace != "prim"
    )  # prim::device asks for no element
    reads = not name.endswith("_like") and not name.startswith("new_")
    names = [argument.name for argument in schema.arguments]
    non_blocking = names.index("non_blocking") if "non_blocking" in names else None
    return Kind(name, touches, reads, name in COPIES, non_blocking, written)


def tensors_of(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments, those in lists as well."""
    return [leaf for leaf in arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]


def accesses(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[Tensor, bool]]:
    """Each tensor that the operation touches, and whether it writes it."""
    kind, written = kind_of(func), set[int]()
    for place, name in kind.written:
        given = args[place] if place < len(args) else kwargs.get(name)
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor):
                written.add(id(leaf))
                yield leaf, True
    for tensor in tensors_of(args, kwargs) if kind.reads else ():
        if id(tensor) not in written:
            yield tensor, False
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and id(leaf) not in written:
            yield leaf, True


def transfers(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Source, target and whether the host goes on, of each copy between host and device that the operation makes.

    An operation of the device copies a tensor of the host to it first, and blocks. It takes one of no dimension as a
    number, without a copy."""
    kind, given = kind_of(func), tensors_of(args, kwargs)
    if kind.copies:
        sources, targets = (args[0], out) if kind.name == "_to_copy" else (args[1], args[0])
        place = kind.non_blocking
        asked = args[place] if place is not None and place < len(args) else kwargs.get("non_blocking")
        pairs = zip(tree_leaves(sources), tree_leaves(targets), strict=True)
        yield from ((source, target, bool(asked)) for source, target in pairs if source.is_cuda != target.is_cuda)
        return
    on_device = [x for x in given if x.is_cuda]
    yield from ((x, on_device[0], False) for x in given if on_device and not x.is_cuda and x.dim() > 0)


def span(x: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last of a tensor in its storage; (0, 0) of an empty one."""
    if x.numel() == 0:
        return 0, 0
    low = x.storage_offset()
    high = low + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return low * x.element_size(), high * x.element_size()


def misaligned(x: Tensor) -> bool:
    """Whether a matrix, or a stack of them, does not begin each row (or column) at a multiple of 16 bytes.

    A stride counts where something lies a stride further on; the innermost, of 1 element, does not. Nor does a matrix
    with less than 16 bytes a row, such as the scores of two classes: padding would cost more than it saves."""
    unit = ALIGNED.get(x.dtype)
    if unit is None or x.dim() < 2:
        return False
    if 1 not in x.stride()[-2:]:
        return True  # torch copies such a matrix before each product
    if all(n < unit for n, stride in zip(x.shape, x.stride(), strict=True) if stride == 1):
        return False
    steps = [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1 and stride != 1]
    return x.storage_offset() % unit != 0 or any(step % unit for step in steps)
