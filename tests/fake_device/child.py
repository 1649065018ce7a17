"""The process of its own in which the fake device lives: `python tests/fake_device/child.py GROUP [NAME ...]`.

GROUP is `steps`, `plants` or `parts`. Each NAME selects the case of that name. If one of them is not the name of a
case, each selects every case whose name contains it. Without names all cases run. Each case prints its findings as one
line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fake_device.library import load

LIBRARY = load()  # before torch


def verdict_of(run: Any, *, races: bool = True) -> dict[str, Any]:
    """Run something on a new device, `run(audit)`: what the audit found, and what went wrong."""
    from fake_device.audit import audited
    from fake_device.streams import torch_cuda

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


def void(plant: Any, audit: Any) -> None:
    """Run a plant and drop what it returns."""
    plant(audit)


def runs_of(group: str) -> dict[str, Any]:
    """The cases of a group: functions of an audit."""
    if group == "steps":
        from fake_device.cases import CASES
        from fake_device.steps import train

        return {name: partial(train, case) for name, case in CASES.items()}
    if group == "parts":
        from fake_device.parts import names, run_part

        return {name: partial(run_part, name) for name in names()}
    if group == "plants":
        from fake_device.plants import PLANTS

        return {name: partial(void, plant) for name, plant in PLANTS.items()}
    raise SystemExit(f"no group {group!r}; groups: steps, plants, parts")


def main(group: str, *words: str) -> None:
    """Run the chosen cases, one after the other."""
    warnings.simplefilter("ignore")
    runs = runs_of(group)
    exact = all(word in runs for word in words)
    for name, run in runs.items():
        if not words or name in words or (not exact and any(word in name for word in words)):
            print(json.dumps({"name": name} | verdict_of(run, races=group != "parts")), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
