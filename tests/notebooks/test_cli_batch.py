"""`labkit run` over lists of values: what is run, left out, refused, kept, and run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit.check.chapter_copies import CHAPTERS, working_copy

PARAMETERS = """world_size: int = 1  # ranks (1 to 8)
tp: int = 1  # ranks of a layer (a divisor of world_size)
seconds: float = 0.0  # to sleep (0 to 60)
"""


@pytest.fixture
def chapters(tmp_path: Path) -> Path:
    """Two small chapters: one that fails with world_size 2, and one without tp."""
    folder = tmp_path / "chapters"
    folder.mkdir()
    fails = "import time\ntime.sleep(seconds)\nassert world_size != 2, 'two are unlucky'\nprint(world_size, tp)"
    for name, parameters, source in (
        ("50_first", PARAMETERS, fails),
        ("51_second", PARAMETERS.replace("tp: int", "other: int"), "print(world_size)"),
    ):
        notebook: Any = nbformat.v4.new_notebook()
        cell = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
        notebook.cells = [cell, nbformat.v4.new_code_cell(source)]
        nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder


def command(chapters: Path, out: Path, *words: str) -> list[str]:
    fixed = ["--notebooks", str(chapters), "--output", str(out)]
    return [sys.executable, "-m", "labkit.cli", "run", *words, *fixed]


def run(chapters: Path, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(chapters, out, *words), capture_output=True, text=True, timeout=400, check=False)


def record(out: Path) -> dict[str, dict[str, Any]]:
    return {row["folder"]: row for row in json.loads((out / "batch.json").read_text())["settings"]}


def test_every_combination_runs_once_and_what_failed_runs_again(chapters: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out", ["50", "51", "-p", "world_size=1,2", "-p", "tp=1,2"]
    first = run(chapters, out, *words)
    assert first.returncode == 1, first
    assert "left out: 51_second has no tp" in first.stderr
    assert "left out: world_size=1,tp=2: -p tp '2': must be a divisor of world_size (world_size is 1)" in first.stderr
    rows = record(out)
    assert {folder: row["state"] for folder, row in rows.items()} == {
        "50_first/world_size=1,tp=1": "done",
        "50_first/world_size=2,tp=1": "failed",
        "50_first/world_size=2,tp=2": "failed",
        "51_second/world_size=1": "done",
        "51_second/world_size=2": "done",
    }
    assert "two are unlucky" in rows["50_first/world_size=2,tp=1"]["failure"] and "two are unlucky" in first.stdout
    assert (out / "50_first/world_size=1,tp=1/50_first.ipynb").is_file()
    path = chapters / "50_first.ipynb"
    path.write_text(path.read_text().replace("assert world_size != 2", "assert world_size != 9"))
    again = run(chapters, out, *words, "--json")
    assert again.returncode == 0
    assert [line.split(":")[1].strip() for line in again.stderr.splitlines() if " of 5" in line] == [
        "50_first world_size=1,tp=1",  # the chapter has changed
        "50_first world_size=2,tp=1",
        "50_first world_size=2,tp=2",
    ]
    assert [row["state"] for row in json.loads(again.stdout)] == ["done"] * 5
    last = run(chapters, out, *words, "--plot", str(tmp_path / "all.png"))
    assert " of 5" not in last.stderr, "nothing is left"
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["50", "-p", "world_size=2,99"], "must be 1 to 8"),
        (["50", "-p", "world_size=2,x"], "-p world_size 'x': must be"),
        (["50", "51", "-p", "world=1,2"], "has no such parameter"),
        (["50", "51", "-p", "51:tp=1,2"], "-p tp: 51_second has no such parameter"),
        (["50", "-p", "world_size=1", "-p", "tp=2,4"], "must be a divisor of world_size"),
    ],
)
def test_a_value_that_no_setting_can_have_is_refused(
    chapters: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    found = run(chapters, tmp_path / "out", *words)
    assert found.returncode == 2 and said in found.stderr, found
    assert not (tmp_path / "out").exists()


def test_a_second_batch_in_the_folder_is_refused(chapters: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out", ["50", "-p", "world_size=1,4", "-p", "seconds=30"]
    first = subprocess.Popen(command(chapters, out, *words), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _until(lambda: (out / "50_first").exists())
    second = run(chapters, out, *words)
    assert (second.returncode, second.stderr) == (2, f"labkit run: --out {out}: another batch runs in this folder\n")
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130
    assert {row["state"] for row in record(out).values()} == {"interrupted"}
    assert _processes(str(out)) == []


def test_a_batch_that_is_killed_leaves_no_process(chapters: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["50", "-p", "world_size=1,4", "-p", "seconds=60"]
    batch = subprocess.Popen(command(chapters, out, *words), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _until(lambda: len(_processes(str(out))) > 1)
    batch.kill()
    batch.wait()
    _until(lambda: not _processes(str(out)))


def test_a_copy_that_stops_at_a_cell_is_scored_on_its_other_exercises(tmp_path: Path) -> None:
    folder, out = tmp_path / "chapters", tmp_path / "out"
    folder.mkdir()
    notebook = json.loads(working_copy(next(CHAPTERS.glob("02_*.ipynb")), folder))
    parameters, *others = notebook["cells"][1:]
    exercises = [cell for cell in others if "exercise" in cell["metadata"].get("tags", [])]
    stops = exercises[0] | {"metadata": {}, "source": "raise ValueError('here')", "id": "stops"}
    exercises[0]["source"] = "def digits(rank, order, sizes):\n    return {}\ndigits = check('02.digits', digits)"
    notebook["cells"] = [parameters, stops, *exercises]
    (folder / "02_rank_groups.ipynb").write_text(json.dumps(notebook))
    found = run(folder, out, "02", "-p", "world_size=4,8")
    assert found.returncode == 1 and "ValueError: here" in found.stdout
    for row in record(out).values():
        assert row["scores"] == {"02.digits": "attempted", "02.groups": "untouched", "02.place": "untouched"}


@pytest.mark.sweep
def test_twenty_four_settings_cut_by_ctrl_c_and_resumed(chapters: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["50", "51", "-p", "world_size=1,3,4", "-p", "seconds=0,0.1,0.2,0.3"]
    batch = subprocess.Popen(command(chapters, out, *words), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _until(lambda: (out / "batch.json").exists() and len(_done(out)) >= 5)
    batch.send_signal(signal.SIGINT)
    _, said = batch.communicate(timeout=60)
    before = _done(out)
    assert batch.returncode == 130 and f"{24 - len(before)} of 24 settings are left" in said
    again = run(chapters, out, *words)
    assert again.returncode == 0 and len(_done(out)) == 24
    assert sum(" of 24: " in line for line in again.stderr.splitlines()) == 24 - len(before)
    assert all(record(out)[folder] == row for folder, row in before.items())


def _done(out: Path) -> dict[str, Any]:
    return {folder: row for folder, row in record(out).items() if row["state"] == "done"}


def _processes(word: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in text and path.parent.name != str(os.getpid()):
            found.append(text)
    return found


def _until(holds: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
