"""What autograd keeps of one call of a function: which storages, of how many bytes, and for which line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """Return a number of the memory that holds a tensor. Views of one tensor share it, also on the meta device."""
    return tensor.untyped_storage()._cdata


def kept_tensors(
    function: Callable[..., Any], *inputs: Any, label: Callable[[], str] = lambda: ""
) -> tuple[dict[int, tuple[str, int]], Any]:
    """Call `function(*inputs)` and return what autograd saves of it for backward, and the result.

    label: is called when a storage is saved for the first time, and gives it a name.

    What is saved is a dict from the number of a storage (`storage_of`) to its label and its bytes. A storage counts
    once and whole, and in the order in which it was saved.
    """
    found: dict[int, tuple[str, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (label(), storage.nbytes()))
        return tensor.detach()  # a result that held itself would never be freed

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)
    return found, result


def running_line(*names: str) -> str:
    """Return name and line, without its comment, of the innermost running function that has one of these names.

    Raises ValueError if none of them runs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in names:
        frame = frame.f_back
    if frame is None:
        raise ValueError(f"none of {', '.join(names)} is running")
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return f"{frame.f_code.co_name:9}  {line.partition('  #')[0].strip()}"
