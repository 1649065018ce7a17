"""`labkit progress`: what a reader has tried, solved, predicted and found, chapter by chapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.check import exercises, predictions
from labkit.check.chapter_copies import CHAPTERS, chapters_in
from labkit.check.progress import FILE, BrokenProgress, Progress, progress_file, read
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.exercises_command import DIR
from labkit.cli.output import room, show, table

HEADS = ("chapter", "exercises", "tried", "solved", "bets", "right", "near", "faults found")


def execute(arguments: Arguments) -> int:
    """Print the table or JSON, or forget everything."""
    path = _file(arguments.options["dir"])
    try:
        known = read(path)
    except BrokenProgress as problem:
        arguments.refuse([str(problem)])
        raise
    if arguments.options["reset"]:
        path.unlink(missing_ok=True)
        show(f"{path} is removed: progress starts anew")
        return 0
    chapters = [_counts(known, chapter) for chapter in chapters_in(CHAPTERS)]
    if arguments.options["json"]:
        print(json.dumps({"file": str(path), "chapters": chapters}))
        return 0
    total = {head: sum(row[head] for row in chapters) for head in HEADS[1:]}
    cells = [[str(row[head] or "-") for head in HEADS] for row in [*chapters, {"chapter": "all", **total}]]
    show("\n".join(table([HEADS, *cells], range(1, len(HEADS)), room())))
    show(f"kept in {path}" if path.exists() else f"nothing yet; {path} appears with the first `check` in JupyterLab")
    return 0


def _file(folder: str) -> Path:
    """Return the file of the folder, or the one here for somebody who is in the folder already."""
    here = progress_file().resolve()
    return here if here.exists() else progress_file(Path(folder)).resolve()


def _counts(known: Progress, chapter: Path) -> dict[str, Any]:
    """Return the row of a chapter."""
    number, _, words = chapter.stem.partition("_")
    names, asked = exercises(number), predictions(number)
    tried = [state for name, state in known["check"].items() if name in names]
    bets = [state for name, state in known["predict"].items() if name in asked]
    found = [fault for fault in known["hunt"].get(number, []) if "(" not in fault]  # `name (shown)` was not found
    numbers = (len(names), len(tried), tried.count("solved"), len(bets), bets.count("right"), bets.count("near"))
    return dict(zip(HEADS, (f"{number} {words.replace('_', ' ')}", *numbers, len(found))))


COMMAND = Command(
    name="progress",
    summary="Show what you have tried, solved, predicted and found in the chapters. Notebooks that you work in keep it "
    f"in {FILE} next to them, or in the file that LABKIT_PROGRESS names.",
    options=(
        DIR,
        Option("json", "bool", "print JSON", False),
        Option("reset", "bool", "remove the file, so that progress starts anew", False),
    ),
    execute=execute,
    example="labkit progress --dir course",
)
