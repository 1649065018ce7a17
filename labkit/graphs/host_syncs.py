"""What makes the host wait for the device, and so cannot be captured: how an emulated capture notices each.

On a GPU CUDA refuses these itself. On the host nothing waits, so they would go unnoticed, and their result would be
frozen into the graph without a word.

| done in captured code                                        | noticed by                                        |
|--------------------------------------------------------------|---------------------------------------------------|
| `.item()`, `float(x)`, `if x:`, `torch.equal`                | the operation's tag `data_dependent_output`       |
| `nonzero`, one-argument `where`, `masked_select`, `unique`,  | the operation's tag `dynamic_output_shape`        |
| `bincount`, `repeat_interleave` by a tensor                  | (not with `output_size=`, which needs no wait)    |
| `x[mask]`, `x[mask] = tensor`                                | the type of the index (`x[mask] = number` is fine)|
| `.cpu()`, `.to("cpu")`, `.tolist()`, `.numpy()`              | the method, replaced while a capture is under way |
| raw calls to `torch.distributed`                             | the operation's name space                        |

The methods are replaced because tensors on the host answer them without any operation; replacing works in backward as
well, where function modes are off. `.to(device)` is refused for the word "cpu" alone: a `torch.device` may have come
from `x.device`, and stands here for the device of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from labkit.parallel.capturing import GraphCaptureError, active_capture, call_site

__all__ = ["refuse_uncapturable", "watched_methods"]

_METHODS = ("cpu", "tolist", "numpy", "to")
_SYNC = "makes the host wait for the device, and while a graph is captured nothing has been computed yet"
_SHAPE = (
    "makes a tensor whose shape depends on values, and a graph has fixed shapes; compute with torch.where or a mask"
)
_SPOKEN = {
    "_local_scalar_dense": "reading a number of a tensor (.item(), float(), int(), or asking in an `if`)",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
}
"""Operations that the user wrote in other words."""
_DISTRIBUTED = "is not recorded: communicate through labkit.parallel.collectives, which replays inside a graph"


def _refuse(what: str, why: str) -> None:
    raise GraphCaptureError(f"{call_site()}: {what} {why}")


@cache
def _reason(func: Any) -> str | None:
    """Why an operation may be impossible to capture; None for the many that are harmless."""
    if torch.Tag.data_dependent_output in func.tags:
        return _SYNC
    if torch.Tag.dynamic_output_shape in func.tags or "index_put" in func.name():
        return _SHAPE
    return _DISTRIBUTED if func.namespace in ("c10d", "_c10d_functional") else None


def refuse_uncapturable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise GraphCaptureError, naming the user's line, for an operation that no CUDA graph can hold."""
    reason = _reason(func)
    if reason is None:
        return
    name: str = func.name().removeprefix("aten::")
    if name.startswith(("index", "_unsafe_index", "_index")):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        writes_number = "put" in name and len(masks) == 1 and args[2].numel() == 1
        if not masks or writes_number:
            return
        _refuse("indexing by a boolean mask", reason)
    if name.startswith("repeat_interleave") and kwargs.get("output_size") is not None:
        return
    _refuse(_SPOKEN.get(name, name), reason)


@contextmanager
def watched_methods() -> Iterator[None]:
    """Inside the block, `Tensor.cpu`, `.tolist`, `.numpy` and `.to("cpu")` are refused where a capture records."""
    before = {name: vars(Tensor).get(name) for name in _METHODS}  # None: torch defines it in the base class
    for name in _METHODS:
        setattr(Tensor, name, _watched(name, getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


def _watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if active_capture() is not None and (name != "to" or "cpu" in (*_words(args[:1]), *_words(kwargs.values()))):
            _refuse('.to("cpu")' if name == "to" else f".{name}()", _SYNC)
        return method(self, *args, **kwargs)

    return watched


def _words(values: Any) -> list[str]:
    return [value.split(":")[0] for value in values if isinstance(value, str)]
