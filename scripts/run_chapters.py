"""Execute chapters and store them with their outputs; what differs from run to run is not stored.

    python scripts/run_chapters.py [02 10 ...]     all chapters, or only those named

A chapter that fails keeps its old file, and the others still run; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode
from tqdm.auto import tqdm

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 120
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def clean(notebook: NotebookNode) -> NotebookNode:
    """Drop widget state, timings and the Python version, and join what a stream printed in pieces, so that only a
    changed result changes the file."""
    notebook.metadata = NotebookNode({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        kept = {key: value for key, value in cell.metadata.items() if key in ("tags", "slideshow", "jupyter")}
        cell.metadata = NotebookNode(kept)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs of a cell, with neighbouring pieces of one stream as one: a busy machine sends more of them."""
    result: list[NotebookNode] = []
    for output in outputs:
        last = result[-1] if result else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            result.append(output)
    return result


def execute(path: Path) -> None:
    """Run every cell in the chapter's folder, then replace the file at once."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT, kernel_name=KERNEL["name"], resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    fresh = path.with_suffix(".ipynb.new")
    nbformat.write(clean(notebook), fresh)
    os.replace(fresh, path)


def main() -> int:
    """Exit code 0 where every chapter ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="*", help="two digits each; none means all")
    numbers = parser.parse_args().number
    every = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
    if unknown := [number for number in numbers if number not in every]:
        parser.error(f"no chapter {unknown[0]!r}; chapters: {', '.join(every)}")

    failed = []
    for path in tqdm([every[number] for number in numbers or every], unit="chapter"):
        start = time.monotonic()
        try:
            execute(path)
        except (CellExecutionError, CellTimeoutError) as error:
            failed.append(path.name)
            tqdm.write(f"{path.name}: {error}", file=sys.stderr)
        else:
            tqdm.write(f"{path.name}: {time.monotonic() - start:.1f} s, {path.stat().st_size / 1000:.0f} kB")
    if failed:
        print(f"not stored: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
