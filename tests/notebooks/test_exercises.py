"""The stub of each exercise, cells of a chapter, fails, and its solution passes."""

import re
import sys
from pathlib import Path
from unittest.mock import Mock

import nbformat
import pytest

from labkit.check import exercises

ROOT = Path(__file__).parents[2]

import make_exercises  # noqa: E402

NOTEBOOKS = ROOT / "notebooks"
CHAPTERS = [nbformat.read(path, as_version=4) for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))]
EXERCISES = {name: each for chapter in CHAPTERS for name, each in make_exercises.exercises_of(chapter).items()}


@pytest.mark.parametrize("name", EXERCISES)
def test_the_stub_fails_and_the_solution_passes(name: str) -> None:
    assert make_exercises.problem(name, make_exercises.run(EXERCISES[name])) == ""


def test_every_exercise_is_in_a_chapter() -> None:
    assert sorted(exercises()) == sorted(EXERCISES)


def test_every_exercise_is_asked_for() -> None:
    code = [cell.source for chapter in CHAPTERS for cell in chapter.cells if cell.cell_type == "code"]
    asked = {name for source in code for name in re.findall(r"""check\(\s*["'](\d\d\.\w+)["']""", source)}
    assert asked == set(exercises())


# ---- copies for students ----

STUB = 'def kept(probabilities, p):\n    return 1.0\n\n\ncheck("20.top_p", kept)'
RIGHT = """\
def kept(probabilities, p):
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    return [i for n, i in enumerate(order) if math.fsum(probabilities[j] for j in order[:n]) < p]


check("20.top_p", kept)"""


def small_chapter(folder: Path, stub: str = STUB) -> None:
    """The chapters of a checkout at `folder`: one, with an exercise."""
    text = nbformat.v4.new_markdown_cell("See [data](../docs/data.md).")
    cells = [nbformat.v4.new_code_cell(source) for source in ("import math\n\n3", stub, 'solution("20.top_p")')]
    cells[1].metadata.tags, cells[2].metadata.tags = ["exercise"], ["solution"]
    cells[0].outputs = [nbformat.v4.new_output("stream", text="3")]
    for name in ("notebooks", "docs"):
        (folder / name).mkdir(exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[text, *cells]), folder / "notebooks" / "20_small.ipynb")


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the script on the small chapter with these arguments; its exit code and the copy."""

    def run(*arguments: str) -> tuple[int, nbformat.NotebookNode]:
        monkeypatch.setattr(sys, "argv", ["make_exercises.py", str(tmp_path / "course"), *arguments])
        code = make_exercises.main()
        return code, nbformat.read(tmp_path / "course" / "20_small.ipynb", as_version=4)

    monkeypatch.setattr(make_exercises, "ROOT", tmp_path)
    small_chapter(tmp_path)
    return run


def test_a_copy_has_the_stub_and_neither_solution_nor_outputs(copies, capsys) -> None:
    code, copy = copies()
    assert code == 0 and "20.top_p" in capsys.readouterr().out
    assert [cell.source for cell in copy.cells[1:]] == ["import math\n\n3", STUB]
    assert copy.cells[0].source == "See [data](../docs/data.md)." and copy.cells[1].outputs == []


def test_a_place_that_cannot_be_written_is_named_at_once(copies, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "course").write_text("")
    with pytest.raises(SystemExit, match="2"):
        copies()
    assert capsys.readouterr() == ("", f"make_exercises: {tmp_path / 'course'}: is a file; name a folder\n")
    (tmp_path / "course").unlink()
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SystemExit, match="2"):
        copies()
    assert capsys.readouterr().err == f"make_exercises: {tmp_path / 'course'}: cannot be written; name another folder\n"
    monkeypatch.setattr("os.access", lambda *_: True)
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SystemExit, match="1"):
        copies()
    assert str(tmp_path / "course" / "20_small.ipynb") in capsys.readouterr().err
    assert list((tmp_path / "course").iterdir()) == []


def test_work_in_a_copy_is_kept(copies, tmp_path, capsys) -> None:
    _, copy = copies()
    copy.cells[2].source = RIGHT
    nbformat.write(copy, tmp_path / "course" / "20_small.ipynb")
    assert copies()[1].cells[2].source == RIGHT and "1 with your work" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        (RIGHT, "the stub of 20.top_p passes"),
        (STUB.replace("1.0", "elsewhere"), "the stub of 20.top_p needs another cell"),
    ],
)
def test_what_is_no_exercise_is_said(copies, tmp_path, capsys, stub, said) -> None:
    small_chapter(tmp_path, stub)
    assert copies()[0] == 1 and said in capsys.readouterr().err
