"""The chapters that labkit carries: `labkit lab`, `labkit exercises`, `labkit run` from any folder; and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.check.chapter_copies import CHAPTERS, chapters_in, write_copies
from labkit.cli import main
from labkit.cli.run_command import find_chapters, notebook_folder

ROOT = Path(__file__).resolve().parents[2]


def solutions(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [cell.source for cell in cells if "solution" in cell.metadata.get("tags", [])]


def outputs(path: Path) -> int:
    return sum(len(cell.get("outputs", [])) for cell in nbformat.read(path, as_version=4).cells)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line that would become JupyterLab, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    started: list[str] = []
    monkeypatch.setattr(os, "execve", lambda _, words, environment: started.extend(words))
    return started


def test_the_package_carries_the_chapters_of_the_checkout() -> None:
    assert CHAPTERS == ROOT / "notebooks" and len(chapters_in(CHAPTERS)) >= 21
    assert (ROOT / "labkit" / "notebooks").is_symlink(), "the wheel takes the chapters through this link"


def test_run_finds_chapters_beside_a_folder_that_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    assert notebook_folder(None) == CHAPTERS
    assert "'99': no such chapter; chapters in" in (said := find_chapters(["99"], CHAPTERS)[1][0])
    assert all(path.stem in said for path in chapters_in(CHAPTERS))
    (tmp_path / "notebooks" / "30_mine.ipynb").write_text("{}")
    assert notebook_folder(None) == Path("notebooks") and notebook_folder("other") == Path("other")


def test_lab_opens_copies_in_this_folder_and_a_second_call_keeps_the_work(lab, tmp_path, capsys) -> None:
    main(["lab", "--browser", "false", "--port", "8899"])
    folder = tmp_path / "chapters"
    root = ["--allow-root"] if os.geteuid() == 0 else []
    where = [f"--notebook-dir={folder}", "--LabApp.default_url=/lab/tree/00_tour.ipynb"]
    assert lab == [sys.executable, "-m", "jupyterlab", *where, "--port=8899", "--no-browser", *root]
    copy = folder / "08_data_parallel.ipynb"
    assert (
        solutions(copy) == solutions(CHAPTERS / copy.name) != [] and outputs(copy) == outputs(CHAPTERS / copy.name) > 0
    )
    copy.write_text("my work")
    main(["lab"])
    assert copy.read_text() == "my work"
    assert f"{len(chapters_in(CHAPTERS))} of them kept as they were" in capsys.readouterr().out


def test_exercises_have_no_solutions_and_no_outputs(lab, tmp_path, capsys) -> None:
    assert main(["exercises", "course"]) == 0 and lab == []
    assert capsys.readouterr().out.endswith("\nopen them with: labkit lab course --exercises\n")
    assert not any(solutions(path) or outputs(path) for path in chapters_in(tmp_path / "course"))
    main(["lab", "--exercises"])
    assert lab[3] == f"--notebook-dir={tmp_path / 'exercises'}"


def test_links_to_the_docs_work_inside_the_checkout_and_are_text_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "installed" / "notebooks"
    source.mkdir(parents=True)
    text = nbformat.v4.new_markdown_cell("See [data](../docs/data.md) and [08](08_data_parallel.ipynb).")
    nbformat.write(nbformat.v4.new_notebook(cells=[text]), source / "20_small.ipynb")

    def copied(folder: Path) -> str:
        write_copies(folder, source, exercises=False, overwrite=True)
        return nbformat.read(folder / "20_small.ipynb", as_version=4).cells[0].source

    inside, outside = source.parent / "build" / "exercises", tmp_path / "mine"
    as_text = "See data (docs/data.md in labkit's repository) and [08](08_data_parallel.ipynb)."
    assert copied(inside) == copied(outside) == as_text
    (source.parent / "docs").mkdir()
    assert copied(inside) == "See [data](../../docs/data.md) and [08](08_data_parallel.ipynb)."
    assert copied(outside) == as_text


def test_lab_serves_the_checkout_whose_docs_its_chapters_link_to(lab) -> None:
    main(["lab", str(CHAPTERS)])
    assert lab[3:5] == [f"--notebook-dir={ROOT}", "--LabApp.default_url=/lab/tree/notebooks/00_tour.ipynb"]
    lab.clear()
    assert main(["lab", str(CHAPTERS), "--exercises"]) == 2 and lab == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lab", "file"], "file: is a file; name a folder"),
        (["exercises", str(CHAPTERS)], "holds the original chapters; name another folder"),
        (["exercises", "a", "b"], "'b': one folder is enough; leave this out"),
        (["lab", "--port", "0"], "--port 0: must be at least 1"),
        (["completion"], "give one of bash, zsh, fish, as in labkit completion bash"),
        (["completion", "csh"], "give one of bash, zsh, fish, as in labkit completion bash"),
    ],
)
def test_what_cannot_be_is_refused(lab, tmp_path, capsys, words: list[str], said: str) -> None:
    (tmp_path / "file").write_text("")
    assert main(words) == 2 and lab == []
    assert said in capsys.readouterr().err


def test_without_jupyter_a_missing_package_is_one_line(lab, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "nbformat", None)
    assert main(["lab"]) == 1 and lab == []
    assert capsys.readouterr().err == "labkit lab: the package nbformat is not installed; pip install nbformat\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("labkit comp", ["completion"]),
        ("labkit train --preset llama", ["llama_tiny"]),
        ("labkit train --parallel.t", ["--parallel.tp"]),
        ("labkit train --num-l", ["--num-layers", "--num-layers-per-virtual-pipeline-stage"]),
        ("labkit train --position-embedding-type ro", ["rope"]),
        ("labkit run 0", [f"0{number}" for number in range(10)]),
        ("labkit train --schedule.name zb", ["zbv"]),
        ("labkit data pre", ["prepare"]),
        ("labkit completion f", ["fish"]),
        ("labkit train runs/mine.y", []),
        ("labkit exercises ", []),
    ],
)
def test_bash_completes_commands_options_and_values(capsys, words: str, completed: list[str]) -> None:
    assert main(["completion", "bash"]) == 0
    given = "COMP_WORDS=({}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _labkit; echo ${{COMPREPLY[*]}}"
    last = "" if not words.endswith(" ") else " ''"
    script = capsys.readouterr().out + given.format(words + last)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=20)
    shown = [word.partition("_")[0] if words.startswith("labkit run") else word for word in done.stdout.split()]
    assert shown == completed and done.stderr == ""
