"""`make chapters` stores outputs without what differs from run to run, and never half a chapter."""

from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

TWO_PIECES = "import time\nprint(6 * 7, flush=True)\ntime.sleep(0.5)\nprint(8)"
"""The kernel sends two outputs."""


@pytest.fixture
def script(load_script):
    return load_script("run_chapters")


def write(path: Path, *sources: str) -> Path:
    cells = [nbformat.v4.new_code_cell(source, id=f"cell{place}") for place, source in enumerate(sources)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["widgets"] = {"state": {"a": 1}}
    nbformat.write(notebook, path)
    return path


def test_same_chapter_twice_is_the_same_file(script, tmp_path):
    chapter = write(tmp_path / "00_small.ipynb", "import ipywidgets\nipywidgets.IntSlider(3).value", TWO_PIECES)
    script.execute(chapter)
    first = chapter.read_bytes()
    script.execute(chapter)
    assert chapter.read_bytes() == first
    notebook = nbformat.read(chapter, as_version=4)
    assert "widgets" not in notebook.metadata
    assert [cell.metadata for cell in notebook.cells] == [{}, {}]
    assert [output.text for output in notebook.cells[1].outputs] == ["42\n8\n"]
    assert [cell.execution_count for cell in notebook.cells] == [1, 2]


def test_chapter_that_fails_keeps_its_old_file(script, tmp_path):
    chapter = write(tmp_path / "00_small.ipynb", "print(1)", "1 / 0")
    before = chapter.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        script.execute(chapter)
    assert chapter.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["00_small.ipynb"]
