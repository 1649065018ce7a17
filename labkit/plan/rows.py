"""A row of a table of runs: what it asks to plan, on which machine, and what was measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.config import RunConfig
from labkit.plan.workload import Workload

MOST_LAYERS = 10_000
"""Layers of the largest model that is planned."""
MOST_TOKENS = 1 << 24
"""Tokens of the longest sequence that is planned."""
MOST_ACTIONS = 2_000_000
"""Forwards and backwards of the largest schedule that is simulated."""


def too_many_layers(layers: int) -> str:
    """Return why a number of layers is that of no model that is planned; empty if it is not."""
    return f"{layers:,} layers; labkit plans at most {MOST_LAYERS:,}" if layers > MOST_LAYERS else ""


def too_large(config: RunConfig, world_size: int) -> str:
    """Return why a row is too large to plan, such as one with a number in the wrong column; empty if it is not."""
    parallel, length = config.parallel, config.model.seq_length
    if length > MOST_TOKENS:
        return f"a sequence of {length:,} tokens; labkit plans at most {MOST_TOKENS:,}"
    if many := too_many_layers(config.model.layers):
        return many
    count = world_size // parallel.smallest_world_size and config.num_microbatches(world_size)
    actions = 2 * count * parallel.pp * parallel.vpp
    if actions > MOST_ACTIONS:
        stages = parallel.pp * parallel.vpp
        return f"{count:,} microbatches on {stages} stages; labkit simulates at most {MOST_ACTIONS:,} actions"
    return ""


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


def measured(row: Mapping[str, str], name: str) -> float | None:
    """Return a measurement of a row; None for a cell that is empty or has no positive number."""
    try:
        value = float(row.get(name) or 0)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
