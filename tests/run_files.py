"""Folders of runs as tests write them: locked by this process, with lines of any kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from labkit.config import presets
from labkit.events import Event
from labkit.train.reporting.metrics import strict
from labkit.train.run_folder.claim import RunFolder
from labkit.train.run_folder.contents import METRICS


def append(folder: Path, *records: Mapping[str, Any]) -> None:
    """Write lines behind those that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS).open("a") as file:
        file.writelines(json.dumps(strict(record), allow_nan=False) + "\n" for record in records)


def write_events(events: Iterable[Event], path: Path) -> None:
    """Write Events as a run does."""
    path.write_text("".join(json.dumps(event.record()) + "\n" for event in events))


def read_events(path: Path) -> list[Event]:
    """The Events that a run has written."""
    return [Event(**json.loads(line)) for line in path.read_text().splitlines()]


def begun(folder: Path, *records: Mapping[str, Any], steps: int = 9, tp: int = 1) -> RunFolder:
    """A run that goes on, with these lines; `finish` or `release` ends it."""
    run = RunFolder(presets.tiny().override({"output_dir": str(folder), "steps": steps, "tp": tp}), tp)
    run.claim()
    run.begin()
    append(folder, *records)
    return run


def finished(folder: Path, *records: Mapping[str, Any], tp: int = 1) -> None:
    """A run that is over, of as many steps as the last line says."""
    begun(folder, *records, steps=records[-1]["step"], tp=tp).finish()
