"""A recomputed part of a CUDA graph must not draw random numbers.

Backward computes such a part again, and the second run must draw what the first drew. So the generators are set back in
between. But while a GPU captures, their states can be neither read nor set, so the second run would draw other numbers
and give gradients of a forward that never ran. An emulated capture could set them back, but keeps the rule of a GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.comm.capturing import GraphCaptureError, call_site


class RefusesDraws(TorchDispatchMode):
    """Inside `with RefusesDraws():` an operation that draws raises GraphCaptureError with the line that called it.

    It sees the operations that torch itself marks as random, not what a library draws by kernels of its own.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first operation, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise GraphCaptureError(
                f"{call_site(__file__)}: {func.name()} draws random numbers in a recomputed part of a CUDA graph, and "
                "backward could not draw them again: states of generators cannot be set back while a graph is "
                "captured. Keep this part (no recomputation), draw outside it, or leave it out of the graph"
            )
        return func(*args, **kwargs)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return False if the arguments turn the drawing off: torch also marks attention that drops nothing as random, and
    dropout outside training."""
    for name, off in (("dropout_p", 0), ("train", False)):
        if (place := _place(func, name)) is not None:
            given = args[place] if place < len(args) else kwargs.get(name, func._schema.arguments[place].default_value)
            if given is not None and given == off:
                return False
    return True


@cache
def _place(func: Any, name: str) -> int | None:
    """Return the place of the argument with this name among the arguments of `func`, or None."""
    return next((i for i, argument in enumerate(func._schema.arguments) if argument.name == name), None)
