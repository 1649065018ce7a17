"""The chapters that labkit carries: `labkit lab`, `labkit exercises`, `labkit run` from any folder; and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from labkit.check.chapter_copies import CHAPTERS, RECORD, chapters_in, write_copies
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


def test_lab_opens_copies_without_solutions_and_outputs(lab, tmp_path, capsys) -> None:
    main(["lab", "--browser", "false", "--port", "8899"])
    folder = tmp_path / "chapters"
    root = ["--allow-root"] if os.geteuid() == 0 else []
    where = [f"--notebook-dir={folder}", "--LabApp.default_url=/lab/tree/00_tour.ipynb"]
    assert lab == [sys.executable, "-m", "jupyterlab", *where, "--port=8899", "--no-browser", *root]
    assert [path.name for path in chapters_in(folder)] == [path.name for path in chapters_in(CHAPTERS)]
    assert not any(solutions(path) or outputs(path) for path in chapters_in(folder))
    assert all(solutions(path) and outputs(path) for path in chapters_in(CHAPTERS))
    nbformat.validate(nbformat.read(folder / "08_data_parallel.ipynb", as_version=4))
    assert main(["exercises"]) == 0
    said = f"{len(chapters_in(CHAPTERS))} chapters in {folder}\nopen them with: labkit lab\n"
    assert capsys.readouterr().out.endswith(said)


def small(source: Path, *texts: str) -> None:
    """Write the chapters 20, 21 ... of these texts into `source`."""
    source.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts, start=20):
        cell = nbformat.v4.new_markdown_cell(text, id=f"cell-{number}")
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), source / f"{number}_small.ipynb")


def text_of(path: Path) -> str:
    return nbformat.read(path, as_version=4).cells[0].source


@pytest.fixture
def chapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small chapters in place of those that labkit carries."""
    source = tmp_path / "installed" / "notebooks"
    small(source, "first", "second")
    for command in ("exercises", "lab"):
        monkeypatch.setattr(f"labkit.cli.{command}_command.CHAPTERS", source)
    return source


def test_a_changed_copy_is_kept_and_an_unchanged_one_is_renewed(chapters, tmp_path, monkeypatch, capsys) -> None:
    folder = tmp_path / "my course"
    words = ["exercises", "--dir", str(folder)]
    assert main(words) == 0
    mine = (folder / "20_small.ipynb").read_text().replace("first", "my work")
    (folder / "20_small.ipynb").write_text(mine)
    assert main(words) == 0
    assert f"2 chapters in {folder}, 1 with your work, which stay as they are\nopen" in capsys.readouterr().out
    with monkeypatch.context() as other:
        other.setattr("sys.version", "3.99.0 (another environment)")
        main(words)
    said = capsys.readouterr().out
    assert "newer" not in said and "renewed" not in said and '"3.99.0"' in (folder / "21_small.ipynb").read_text()

    small(chapters, "first, revised", "second, revised")
    beside = f"to get one next to yours: labkit exercises --dir '{folder}' --beside 20\n"
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "1 with your work, which stay as they are, 1 renewed\n" in said
    assert f"labkit has newer versions of 20, which you have changed; {beside}" in said
    assert (folder / "20_small.ipynb").read_text() == mine and text_of(folder / "21_small.ipynb") == "second, revised"

    assert main([*words, "--beside", "20"]) == 0
    assert capsys.readouterr().out == f"written: {folder / '20_small_2.ipynb'}\n"
    assert text_of(folder / "20_small_2.ipynb") == "first, revised" and (folder / "20_small.ipynb").read_text() == mine
    main(words)
    assert "newer" not in capsys.readouterr().out, "it was said, and the reader has both"
    assert main([*words, "--beside", "20"]) == 0 and text_of(folder / "20_small_3.ipynb") == "first, revised"


def test_files_of_unknown_origin_are_kept(chapters, tmp_path) -> None:
    small(tmp_path, "of an older labkit")
    (tmp_path / RECORD).write_text("{damaged")
    assert write_copies(tmp_path, chapters).changed == ["20_small.ipynb"]
    assert text_of(tmp_path / "20_small.ipynb") == "of an older labkit"


def test_links_to_the_docs_work_inside_the_checkout_and_are_text_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "installed" / "notebooks"
    small(source, "See [data](../docs/data.md) and [08](08_data_parallel.ipynb).")

    def copied(folder: Path) -> str:
        write_copies(folder, source)
        return text_of(folder / "20_small.ipynb")

    inside, outside = source.parent / "my" / "copies", tmp_path / "mine"
    as_text = "See data (docs/data.md in labkit's repository) and [08](08_data_parallel.ipynb)."
    assert copied(inside) == copied(outside) == as_text
    (source.parent / "docs").mkdir()
    assert copied(inside) == "See [data](../../docs/data.md) and [08](08_data_parallel.ipynb)."
    assert copied(outside) == as_text


def test_lab_serves_the_checkout_whose_docs_its_chapters_link_to(lab, chapters) -> None:
    (chapters.parent / "docs").mkdir()
    main(["lab", "--dir", str(chapters.parent / "mine")])
    assert lab[3:5] == [f"--notebook-dir={chapters.parent}", "--LabApp.default_url=/lab/tree/mine/20_small.ipynb"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lab", "--dir", "file"], "--dir 'file': is a file; name a folder"),
        (
            ["lab", "--dir", "file/below"],
            "--dir 'file/below': cannot be written (Not a directory); name",
        ),
        (["lab", "--dir", "/proc/mine"], "--dir '/proc/mine': cannot be written (No such file or directory)"),
        (["lab", "--dir", str(CHAPTERS)], "holds the original chapters; name another folder"),
        (["lab", "--dir", "build/mine"], "is inside build, which `make clean` removes, so your work would be lost"),
        (["lab", "--dir", str(ROOT / "build")], "is inside build, which `make clean` removes"),
        (["exercises", "course"], "'course': labkit exercises takes only options"),
        (["exercises", "--beside", "99"], "--beside '99': no such chapter; choose one of 00, 01"),
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
    monkeypatch.delitem(sys.modules, "ipykernel.kernelspec", raising=False)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    assert main(["lab"]) == 1 and lab == []
    assert capsys.readouterr().err == "labkit lab: the package ipykernel is not installed; pip install ipykernel\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("labkit comp", ["completion"]),
        ("labkit train --preset llama", ["llama_tiny", "llama3_8b", "llama3_70b", "llama3_405b"]),
        ("labkit train --parallel.t", ["--parallel.tp"]),
        ("labkit train --num-l", ["--num-layers", "--num-layers-per-virtual-pipeline-stage"]),
        ("labkit train --position-embedding-type ro", ["rope"]),
        ("labkit run 0", [f"0{number}" for number in range(10)]),
        ("labkit train --schedule.name zb", ["zbv"]),
        ("labkit data pre", ["prepare"]),
        ("labkit completion f", ["fish"]),
        ("labkit train runs/mine.y", []),
        ("labkit exercises --d", ["--dir"]),
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
