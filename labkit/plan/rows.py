"""A row of a table of runs: what it asks to plan, on which machine, and what was measured. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.plan.workload import Workload


@dataclass(frozen=True)
class PlannedRow:
    """One run of a table of published or recorded runs."""

    id: str
    source: str
    """The paper or page, as the table names it."""
    model: str
    workload: Workload | None
    """None if the row is not expressible."""
    machine: str | None
    """Name of a machine (`labkit.plan.machine.known_machines`)."""
    not_expressible: str = ""
    """Why labkit cannot plan the row; empty if it can."""
    measured_seconds: float | None = None
    """Measured step; None if the row states none and none follows from what it states."""
    filled: tuple[str, ...] = ()
    """Names of the rules that filled in what the row leaves out."""
    specified: bool = True
    """False if its source leaves out so much that an error says little about the model of time."""
