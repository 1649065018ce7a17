"""The process of its own in which the fake device lives: `python child.py GROUP [WORD ...]` prints a line of JSON a case.

GROUP is `steps`, `plants` or `parts`; with words only cases whose names contain one of them run. A run by hand shows
the same as the tests see.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
from library import load

LIBRARY = load()  # before torch


def verdict_of(run: Any, *, races: bool = True) -> dict[str, Any]:
    """Run something on a new device, `run(audit)`: what the audit found, and what went wrong."""
    from audit import audited
    from streams import torch_cuda

    began, error, found = time.process_time(), None, {}
    with torch_cuda(LIBRARY) as machine, audited(machine, races=races) as audit:
        try:
            found = run(audit) or {}
        except Exception:
            error = traceback.format_exc(limit=-8)
    return found | {
        "error": error, "races": audit.races, "waits": dict(audit.waits), "copies": dict(audit.copies),
        "gemms": dict(audit.gemms), "seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def void(_: Any) -> None:
    """A plant returns nothing to report."""


def runs_of(group: str) -> dict[str, Any]:
    """The cases of a group: functions of an audit."""
    if group == "steps":
        from steps import CASES, two_steps

        return {name: lambda audit, case=case: two_steps(case, audit) for name, case in CASES.items()}
    if group == "plants":
        from plants import PLANTS

        return {name: lambda audit, plant=plant: void(plant(audit)) for name, plant in PLANTS.items()}
    raise SystemExit(f"no group {group!r}; groups: steps, plants, parts")


def main(group: str, *words: str) -> None:
    """Run the chosen cases, one after the other."""
    warnings.simplefilter("ignore")
    for name, run in runs_of(group).items():
        if not words or any(word in name for word in words):
            print(json.dumps({"name": name} | verdict_of(run)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
