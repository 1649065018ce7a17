"""Rounding or a fault: the verdict on a layout's differences from its reference.

In float64 a difference beyond the tolerance, 1e-10, is a fault. In float32 rounding alone can exceed the tolerance of
1e-5: Adam divides a gradient by the root of its square, so an element of 1e-5 that rounding moves by 1e-9 moves its
parameter by 1e-4 of a step. How far rounding moves a tensor depends on seed, model and steps, so it is measured. The
reference runs again with its sums in other orders (`labkit.train.summation`), and the largest difference of a tensor
from its own value in the first run is the *spread* of this tensor at this step.

| difference of a tensor                       | verdict  |
|----------------------------------------------|----------|
| within the tolerance                         | equal    |
| beyond it, up to `MULTIPLE` times its spread | rounding |
| beyond that, or beyond its kind's `WIDEST`   | fault    |

Each tensor is held against its own spread at its own step, and no spread excuses more than `WIDEST`. So a bias that
rounding moves far hides nothing in its weight or gradient, and a chaotic run hides nothing at all. A fault smaller than
that, in a tensor that rounding moves, is seen in float64 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

Verdict = Literal["equal", "rounding", "fault"]
Spread = Mapping[str, float]
"""By name of a compared tensor, which has the step in it: the largest difference between orders of summation."""
MULTIPLE = 10.0
"""So many times its spread may a tensor of a layout differ. The spread is the largest of few samples."""
WIDEST = {"output": 1e-4, "loss": 1e-4, "gradient": 1e-3, "parameter": 1e-2}
"""By kind of tensor: no difference beyond this is rounding, however wide the spread. Parameters have the largest,
since Adam's division acts on them alone; a gradient feels it only through the parameters, from the second step on."""
ORDERS = (1, 2, 3, 4)
"""Orders of summation that the spread is taken over: parts into which `reordered_sums` cuts products."""


def judge(
    found: Iterable[tuple[str, str, float]], tolerance: float, spread: Callable[[], Spread] | None
) -> tuple[Verdict, str | None]:
    """The verdict on a layout, and the tensor to look at: the first that rounding does not explain, else the first
    beyond the tolerance, else None.

    found: name, kind and difference of every compared tensor, in the order of training.
    tolerance: largest difference that is equal whatever the spread.
    spread: called where the verdict depends on it; None where every difference beyond the tolerance is a fault.
    """
    first = None
    for name, kind, difference in found:
        if difference <= tolerance:
            continue
        if spread is None or difference > WIDEST[kind] or difference > MULTIPLE * spread().get(name, 0.0):
            return "fault", name
        first = first or name
    return ("equal", None) if first is None else ("rounding", first)


def widest(runs: Iterable[Iterable[tuple[str, str, float]]]) -> Spread:
    """The spread over runs of the reference, each given by its differences from the first one."""
    spread: dict[str, float] = {}
    for found in runs:
        for name, _, difference in found:
            spread[name] = max(spread.get(name, 0.0), difference)
    return spread
