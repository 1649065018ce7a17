"""Plant every fault of tests/faults.py, see what finds it, and write the table docs/faults.md.

.venv/bin/python scripts/planted_faults.py               # twenty minutes on two cores
.venv/bin/python scripts/planted_faults.py "ring" "norm" # only faults with such a word in their names; writes no file
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faults import FAULTS  # pyright: ignore[reportMissingImports]
from planting import ROOT, find  # pyright: ignore[reportMissingImports]

if TYPE_CHECKING:
    from planting import Fault  # pyright: ignore[reportMissingImports]

TARGET = ROOT / "docs" / "faults.md"
MUTANTS = "\n## Mutants\n"
"""Head of the last part, which stays as it is."""

INTRODUCTION = """# Planted faults

Would the tests notice a mistake? Each row of this page is one change of the source, a mistake that a person could have
typed (`tests/faults.py`), and says what must find it:

- *Microscope*: ranks train with the fault under the given layout. The parity microscope compares them with one process,
  and must name the first tensor that the fault spoils.
- A test file: a test in it must fail on a copy of the source tree with the fault.

The last column names the command that runs the tests. `make sweep` also plants every fault of this page again.
`scripts/planted_faults.py` writes the tables, and `scripts/mutations.py` the [last part](#mutants). To plant a fault of
your own, add it to `tests/*_faults.py`.

"""


def how(fault: Fault) -> str:
    """What must find it, in one cell: the microscope under a layout, or the tests."""
    if isinstance(fault.found_by, str):
        return f"`{fault.found_by}`"
    layout = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in fault.found_by.layout.items())
    return f"microscope, {layout}: {fault.found_by.names}"


def row(fault: Fault, found: bool, what: str) -> str:
    """One line of the table."""
    outcome = "yes" if found else f"no: {what}"
    return f"| {fault.name} | `{fault.at}` | {how(fault)} | {outcome} | `{fault.planted_by}` |\n"


def main(chosen: Sequence[str] = ()) -> int:
    """Plant them all, or those whose names contain one of `chosen`; exit code 1 if fewer than 95% are found."""
    tables, results = "", []
    for title, faults in FAULTS.items():
        rows = ""
        for fault in faults:
            if chosen and not any(word in fault.name for word in chosen):
                continue
            with tempfile.TemporaryDirectory() as folder:
                found, what = find(fault, Path(folder) / "tree")
            print(f"{'found ' if found else 'MISSED'} {fault.name}: {what}", flush=True)
            results.append(found)
            rows += row(fault, found, what)
        tables += f"\n## {title}\n\n| fault | in | must be found by | found | command |\n|---|---|---|---|---|\n{rows}"
    if not results:
        sys.exit(f"no fault has a name with {' or '.join(map(repr, chosen))}")
    share = sum(results) / len(results)
    sentence = f"{sum(results)} of {len(results)} planted faults are found ({share:.0%}).\n"
    print(sentence, end="")
    if not chosen:
        _, head, mutants = TARGET.read_text(encoding="utf-8").partition(MUTANTS)
        TARGET.write_text(INTRODUCTION + sentence + tables + head + mutants, encoding="utf-8")
    return 0 if share >= 0.95 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="plant only faults whose names contain one of them")
    sys.exit(main(parser.parse_args().words))
