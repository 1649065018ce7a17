"""Hunt of chapter 21: one wrong constant in a planner's file of a machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.plan import step_time
from labkit.plan.machine import Machine
from labkit.plan.what_if import CONSTANTS, scaled
from labkit.plan.workload import Workload

# ---- the faults ----


def _wrong(constant: str, factor: float) -> AbstractContextManager[Any]:
    """The plan of a step reads a machine with one wrong constant."""
    honest: Callable[..., Any] = step_time._plan

    def plan(workload: Workload, machine: Machine) -> Any:
        return honest(workload, _machine(machine, constant, factor))

    return patch.object(step_time, "_plan", plan)


_machine = cache(scaled)
"""One wrong machine for each, because the plan remembers times by machine."""

# ---- what a verdict says ----

_ALL_ROWS = "It would change all eight rows. Which rows are exactly as they were before?"
_FACTOR = {
    "": "Repair it: predict_step(row.workload, scaled(v100, constant, factor)) under suspect.around(...), until every "
    "row is what it was. What you multiplied by is the inverse of the mistake."
}

HUNT = Hunt(
    chapter="21",
    scene=(
        "predict_step reads a machine with one wrong constant. Compare the residuals of Figure 5 with the honest ones, "
        "and try repairs with scaled(v100, constant, factor)."
    ),
    questions={
        "constant": "Which constant is wrong?",
        "factor": "What was it multiplied by, such as 1/3 or 3?",
    },
    choices={"constant": tuple(CONSTANTS)},
    faults=(
        Fault(
            "network",
            partial(_wrong, "network", 1 / 8),
            {"constant": "network", "factor": r"^(1 ?/ ?8|0?\.125)$"},
            {
                "constant": {
                    "node": "With a slow NVLink, 8.3B on eight GPUs would be slower, too. It needs no network.",
                    "": _ALL_ROWS,
                },
                "factor": _FACTOR,
            },
            "Gb/s were divided by 8 twice, so InfiniBand had an eighth of its bandwidth. The four rows without "
            "replicas were exactly right, which rules out everything that a single node uses. Among the others the "
            "larger models suffered most: with tp 8 only two of a node's sixteen GPUs are in the same ring of "
            "replicas, so a ring has the share of two GPUs in the node's adapters, where tp 1 has all of them.",
        ),
        Fault(
            "node",
            partial(_wrong, "node", 1 / 4),
            {"constant": "node", "factor": r"^(1 ?/ ?4|0?\.25)$"},
            {
                "constant": {
                    "network": "One node alone was slower, too, and it never uses its network.",
                    "": "One GPU alone was exactly right. It computes, and it reads its memory.",
                },
                "factor": _FACTOR,
            },
            "NVLink had a quarter of its bandwidth. One GPU alone was exactly right, and the error grew with tp: all "
            "tensor-parallel traffic uses NVLink. A repair by 3 leaves the smaller mean error, and is wrong all the "
            "same, because it makes up for what else the plan misses in these rows.",
        ),
        Fault(
            "memory",
            partial(_wrong, "memory", 2.0),
            {"constant": "memory", "factor": r"^2(\.0)?$"},
            {
                "constant": {
                    "peak": "No factor of the peak brings all eight rows back: try some.",
                    "node|network": "One GPU alone became faster, and it talks to nobody.",
                    "": "A constant number of seconds would be the same in all rows. Look at the seconds, not only at "
                    "the percentages.",
                },
                "factor": _FACTOR,
            },
            "HBM had twice its bandwidth, as if reading and writing could each have all of it. Every row became too "
            "fast, one GPU's most: its sixteen heads are all its own, and softmax and dropout of unfused attention "
            "only move bytes. Twice the host's time leaves the same mean error, but not the same rows.",
        ),
        Fault(
            "peak",
            partial(_wrong, "peak", 2.0),
            {"constant": "peak", "factor": r"^2(\.0)?$"},
            {
                "constant": {
                    "memory": "Half the memory's bandwidth gives a good mean error. But does it bring each row back?",
                    "node|network": "One GPU alone became faster, and it talks to nobody.",
                    "": "A constant number of seconds would be the same in all rows. Look at the seconds, not only at "
                    "the percentages.",
                },
                "factor": _FACTOR,
            },
            "The peak was twice too high, as a data sheet's number with sparsity is. Every row became too fast, by 23 "
            "to 29 %, because GEMMs are the largest part of every step.",
        ),
    ),
)
