"""Which communication a parity run may be asked to leave out. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.config.errors import nearest, shown
from labkit.parallel.group_plan import GROUP_KINDS

KNOWN: dict[str, tuple[str, ...] | None] = {
    "operation": ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    "group": (*GROUP_KINDS, "world"),
    "phase": (
        *("start", "forward", "backward", "recompute", "gradients", "parameters", "amax", "expert bias", "report"),
        "capture",
    ),
    "layer": None,
}
"""What a fault may name, and the words for it; None where any name may be one."""


def fault_problems(fault: Mapping[str, str]) -> list[str]:
    """One sentence for each name in `fault` (arguments of `labkit.parallel.collectives.dropped`) that means nothing."""
    if not fault:
        return ["a fault must name an operation, group, phase or layer"]
    problems = []
    for key, value in fault.items():
        if key not in KNOWN:
            problems.append(f"a fault has no {shown(key)}; it names {', '.join(KNOWN)}{nearest(key, KNOWN)}")
        elif (known := KNOWN[key]) is not None and value not in known:
            problems.append(f"{key} {shown(value)} is not known; choose from {', '.join(known)}{nearest(value, known)}")
    return problems


def fault_words(fault: Mapping[str, str]) -> str:
    """`operation=all_reduce,group=tp`."""
    return ",".join(f"{key}={value}" for key, value in fault.items())
