"""A term of a predicted time: what runs, how long, and by which formula from which inputs. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

KINDS = {
    "gemm": "GEMM",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "launch": "kernel launches",
    "tp": "communication of tp",
    "cp": "communication of cp",
    "ep": "communication of ep",
    "dp": "communication of dp",
    "pp": "communication of pp",
    "bubble": "bubble",
    "recompute": "recomputation",
    "optimizer": "optimizer",
    "host": "host",
}
"""Kind of a term -> its name in tables. The parts of a step have these names, too."""


class Term(NamedTuple):
    """One kernel, one collective, or several of the same kind."""

    name: str
    """What runs, such as `fc1`."""
    kind: str
    """A key of `KINDS`."""
    seconds: float
    """Its time on the critical path of a rank: exposed seconds of a collective."""
    formula: str
    """The formula in words and symbols."""
    inputs: tuple[tuple[str, float], ...] = ()
    """Symbol -> number, in the units of the formula."""
    part: str = ""
    """The part of the layer that recomputation can name, such as `core_attn`."""
    launches: int = 1
    """Kernels that it launches."""

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} = {value:,.6g}" for name, value in self.inputs)
        return f"{self.name}: {self.seconds * 1e3:,.3f} ms = {self.formula}" + (f"; {numbers}" if numbers else "")


def seconds_by_kind(terms: Iterable[Term]) -> dict[str, float]:
    """Return the seconds of each kind of these terms."""
    totals: dict[str, float] = {}
    for term in terms:
        totals[term.kind] = totals.get(term.kind, 0.0) + term.seconds
    return totals
