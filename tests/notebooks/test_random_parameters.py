"""Values that a chapter's rules allow, drawn by chance: no cell fails.

`test_parameters` goes to both ends of the rules. What breaks between the ends, an odd number where a cell needs a
multiple, shows only here.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from labkit.check.parameters import Parameter, broken_rules, declared
from labkit.cli.chapter_parameters import parameter_cell

CHAPTERS = sorted((Path(__file__).parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def drawn(known: Mapping[str, Parameter], draw: random.Random) -> dict[str, Any]:
    """Numbers up to three times the defaults, as far as the rules allow; words stay as they are."""
    while True:
        values = {name: number(parameter.default, draw) for name, parameter in known.items()}
        if not broken_rules(known.values(), values):
            return values


def number(default: Any, draw: random.Random) -> Any:
    if isinstance(default, str | bool):
        return default
    return draw.randint(0, 3 * default) if isinstance(default, int) else round(draw.uniform(0, 3 * default), 3)


@pytest.mark.sweep
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_what_the_rules_allow_works(chapter, seed, tmp_path):
    known = declared(parameter_cell(chapter))
    values = drawn(known, random.Random(f"{chapter.stem} {seed}"))
    words = [word for name, value in values.items() for word in ("-p", name, str(value))]
    command = [sys.executable, "-m", "labkit.cli", "run", str(chapter), "--out", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{json.dumps(values)}\n{done.stderr[-2000:]}"
