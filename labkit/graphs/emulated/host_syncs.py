"""Operations that make the host wait for the device; an emulated capture notices and rejects each of them.

On a GPU CUDA rejects these itself. On the host nothing waits. Without a check the graph would silently keep their
result from the capture.

| done in captured code                                        | noticed by                                        |
|--------------------------------------------------------------|---------------------------------------------------|
| `.item()`, `float(x)`, `if x:`, `torch.equal`                | the operation's tag `data_dependent_output`       |
| `nonzero`, one-argument `where`, `masked_select`, `unique`,  | the operation's tag `dynamic_output_shape`        |
| `bincount`, `repeat_interleave` by a tensor                  | (not with `output_size=`, which needs no wait)    |
| `x[mask]`, `x[mask] = tensor`                                | the type of the index (`x[mask] = number` is fine)|
| `.cpu()`, `.to("cpu")`, `.tolist()`, `.numpy()`,             | the method, replaced while a capture is under way |
| `.type("torch.FloatTensor")`, `from_dlpack(x)`               |                                                   |
| `torch.tensor([..])`, `x[[0, 1]]`: copies from the host      | the operation `lift_fresh`, which they begin with |
| `linalg.inv`, `solve`, `cholesky`, `eigh`, `svd`             | the operation that reads their error code         |
| `prod` and `cumprod` with gradients: backward counts zeros   | `requires_grad` of their argument, in forward     |
| drawing from a generator that graphs do not know             | the operation's argument                          |
| raw calls to `torch.distributed`                             | the operation's name space                        |

The methods are replaced because tensors on the host answer them without an operation. A replaced method also works in
backward, where function modes are off. `.to(device)` is rejected only for the word "cpu": a `torch.device` may come
from `x.device`, which here is the device of the graph. A tensor of one number passes. It stays on the host in a run on
a GPU too, and operations take it as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from labkit.comm.capturing import GraphCaptureError, active_capture, call_site

__all__ = ["refuse_uncapturable", "watched_methods"]

_METHODS = ("cpu", "tolist", "numpy", "to", "type", "__dlpack__")
_SYNC = "makes the host wait for the device, and while a graph is captured nothing has been computed yet"
_SHAPE = (
    "makes a tensor whose shape depends on values, and a graph has fixed shapes; compute with torch.where or a mask"
)
_SPOKEN = {
    "_local_scalar_dense": "reading a number of a tensor (.item(), float(), int(), or asking in an `if`)",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "lift_fresh": "a tensor of numbers that Python holds (torch.tensor([..]), a list as index)",
    "_linalg_check_errors": "the check whether a matrix can be inverted or factored",
    "_linalg_eigh": "linalg.eigh",
    "_linalg_svd": "linalg.svd",
    "prod": "prod of what requires grad",
    "cumprod": "cumprod of what requires grad",
}
"""Operation -> the words that a user wrote."""
_HOST_COPY = "is copied from the host, which a graph cannot wait for: make it before the capture, or by arange"
_CHECK = f"{_SYNC}; take the form that leaves the check to you (torch.linalg.inv_ex, cholesky_ex, solve_ex), if any"
_ZEROS = "has a backward that counts zeros on the host; compute it by multiplications, or from logarithms"
_REASONS = {
    "lift_fresh": _HOST_COPY,
    **dict.fromkeys(("_linalg_check_errors", "linalg_eig", "_linalg_eigh", "_linalg_svd"), _CHECK),
    **dict.fromkeys(("prod", "cumprod"), _ZEROS),
}
"""Reasons for operations without a tag."""
_DISTRIBUTED = "is not recorded: communicate through labkit.comm.collectives, which replays inside a graph"


def _refuse(what: str, why: str) -> None:
    raise GraphCaptureError(f"{call_site()}: {what} {why}")


@cache
def _reason(func: Any) -> str | None:
    """The reason that an operation may be impossible to capture; None for most operations."""
    if torch.Tag.data_dependent_output in func.tags:
        return _SYNC
    if torch.Tag.dynamic_output_shape in func.tags or "index_put" in func.name():
        return _SHAPE
    if func.namespace in ("c10d", "_c10d_functional"):
        return _DISTRIBUTED
    return _REASONS.get(_name(func))


def _name(func: Any) -> str:
    return func.name().removeprefix("aten::").split(".")[0]


def refuse_uncapturable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise GraphCaptureError, naming the user's line, for an operation that no CUDA graph can hold."""
    given = kwargs.get("generator")  # torch passes a new object for the same generator
    if given is not None and given._cdata != torch.default_generator._cdata:  # pyright: ignore[reportAttributeAccessIssue]
        _refuse("drawing from a generator of its own", "is unknown to the graph: use torch's default or an RngTracker")
    reason = _reason(func)
    if reason is None:
        return
    name = _name(func)
    if name == "lift_fresh" and args[0].dim() == 0:
        return
    if reason is _ZEROS and not (torch.is_grad_enabled() and args[0].requires_grad):
        return
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
    """Inside the block the methods of the table are rejected where a capture records."""
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
        if active_capture() is not None and (said := _leaves_device(name, args, kwargs)):
            _refuse(said, _SYNC)
        return method(self, *args, **kwargs)

    return watched


def _leaves_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """A call of a watched method in the words of a message; empty where the tensor stays on the device."""
    if name == "to":
        words = [value.split(":")[0] for value in (*args[:1], *kwargs.values()) if isinstance(value, str)]
        return '.to("cpu")' if "cpu" in words else ""
    if name == "type":  # a `torch.dtype` keeps the device, a type of tensors names a device
        wanted = args[0] if args else kwargs.get("dtype")
        lies = wanted if isinstance(wanted, str) else torch.typename(wanted) if isinstance(wanted, type) else "cuda"
        return "" if "cuda" in lies else f".type({lies!r})"
    return f".{name}()"
