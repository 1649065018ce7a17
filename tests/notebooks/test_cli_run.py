"""`labkit run` with real kernels: parameters, results, a failed cell, two at once, Ctrl-C, kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from labkit.cli.run_command import as_page

LABKIT = str(Path(sys.executable).with_name("labkit"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A notebook folder whose one chapter writes what it was given, and fails or waits when asked to."""
    parameters = nbformat.v4.new_code_cell("steps: int = 3\nmode: str = 'good'\noutput_dir: str = '.'")
    parameters.metadata.tags = ["parameters"]
    work = nbformat.v4.new_code_cell(
        "import json, os, time\n"
        "from labkit.launch import Ranks\n"
        "ranks = Ranks(2) if mode in ('slow', 'ranks') else None\n"
        "pids = [os.getpid(), *(ranks.run(os.getpid) if ranks else [])]\n"
        "report = {'summary': ['final loss 1.5', 'largest difference 2e-16'], 'pids': pids, 'steps': steps}\n"
        "report['here'] = os.listdir()\n"
        "open(os.path.join(output_dir, 'fresh.json'), 'w').write(json.dumps(report))\n"
        "os.replace(os.path.join(output_dir, 'fresh.json'), os.path.join(output_dir, 'report.json'))"
    )
    end = nbformat.v4.new_code_cell(
        "assert mode != 'bad', 'asked to fail'\n"
        "if mode == 'dead':\n    os.write(2, b'out of everything\\n') and time.sleep(0.5)\n    os._exit(1)\n"
        "if mode == 'still':\n    time.sleep(2.5)\n"
        "if mode == 'slow':\n    ranks.run(lambda: time.sleep(60))"
    )
    heading = nbformat.v4.new_markdown_cell("## 2 Work for two\nand a long story")
    notebook = nbformat.v4.new_notebook(cells=[parameters, heading, work, end])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "07_toy.ipynb")
    return tmp_path


def _command(folder: Path, *words: str) -> list[str]:
    return [LABKIT, "run", "07", "--notebooks", str(folder), "--out", str(folder / "out"), *words]


def test_run_sets_parameters_and_says_where_the_results_are(folder: Path) -> None:
    done = subprocess.run(_command(folder, "-p", "steps", "5", "--html"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = folder / "out"
    assert json.loads((out / "report.json").read_text())["steps"] == 5
    for name in ("07_toy.ipynb", "07_toy.html", "report.json"):
        assert str(out / name) in done.stdout
    assert done.stdout.endswith("final loss 1.5\nlargest difference 2e-16\n")
    assert "<html" in (out / "07_toy.html").read_text()
    first, *cells, last = done.stderr.splitlines()  # whole lines
    assert first == "07_toy: running" and last.startswith("07_toy: done in ")
    assert cells == [
        f"07_toy: cell {number} of 5, {name}"
        for number, name in ((1, "steps: int = 3"), (2, "# Parameters"), (4, "2 Work for two"))
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_shows_the_running_cell_and_its_seconds(folder: Path, columns: int) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    running = subprocess.Popen(_command(folder, "-p", "mode", "still"), stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 65536):
            shown += part
    os.close(ours)
    assert running.wait(timeout=60) == 0
    pictures = [picture for picture in re.split(r"[\r\n]", shown.decode()) if picture.strip()]
    assert max(map(len, pictures)) <= columns
    last = [picture for picture in pictures if "2 Work for two: assert mode != 'bad'" in picture]
    assert len(last) >= 2 and all(picture.startswith("  4/5 |") for picture in last), "drawn anew while the cell runs"
    assert len({re.search(r"\d\d:\d\d", picture).group() for picture in last}) >= 2
    assert pictures[0] == "07_toy: running" and pictures[-1].startswith("07_toy: done in ")


def test_a_failed_cell_is_one_message_and_code_1(folder: Path) -> None:
    done = subprocess.run(_command(folder, "-p", "mode", "bad"), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "07_toy failed in the cell that begins `assert mode != 'bad', 'asked to fail'`" in done.stderr
    assert "AssertionError: asked to fail" in done.stderr and (folder / "out" / "07_toy.ipynb").exists()


def test_a_page_says_what_its_figures_say_and_shows_no_solution(tmp_path: Path) -> None:
    data = {"image/png": "iVBORw0KGgo=", "text/plain": 'bubble 27.3% of "1F1B"'}
    cells = [nbformat.v4.new_code_cell(source) for source in ("figure()", "secret()")]
    cells[0].outputs = [nbformat.v4.new_output("display_data", data)]
    cells[1].metadata.tags = ["solution"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    page = as_page(tmp_path / "a.ipynb").read_text()
    assert 'alt="bubble 27.3% of &quot;1F1B&quot;"' in page or "alt='bubble 27.3% of \"1F1B\"'" in page
    assert "secret" not in page and "No description" not in page


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder with a short path, as sockets need, to see what is left in it."""
    with tempfile.TemporaryDirectory(prefix="lk", dir="/tmp") as made:
        yield Path(made)


def _start(folder: Path, out: str, temporary: Path, mode: str, here: Path) -> subprocess.Popen[str]:
    """One `labkit run` in the working directory `here`, in a process group of its own, as a terminal starts it."""
    words = [LABKIT, "run", "07", "--notebooks", str(folder), "--out", str(folder / out), "-p", "mode", mode]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen(words, cwd=here, env=environment, start_new_session=True, **pipes)


def _pids(report: Path) -> list[int]:
    """Kernel and ranks, once the chapter has them."""
    _wait(report.exists, 60)
    return json.loads(report.read_text())["pids"]


def _left(temporary: Path) -> list[Path]:
    return [path for path in temporary.iterdir() if path.name.startswith(("labkit", "pymp"))]


def _gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_two_at_once_in_one_folder_that_cannot_be_written(folder: Path, temporary: Path) -> None:
    here, long = folder / "here", temporary / ("a" * 120)
    here.mkdir(mode=0o555)
    long.mkdir()
    both = [_start(folder, f"out{i}", where, "ranks", here) for i, where in enumerate((temporary, long))]
    for i, running in enumerate(both):
        _, err = running.communicate(timeout=120)
        assert running.returncode == 0, err
        assert json.loads((folder / f"out{i}" / "report.json").read_text())["here"] == [], "a file while it ran"
    assert list(here.iterdir()) == []
    assert _left(temporary) == _left(long) == []


@pytest.mark.parametrize("moment", ["kernel starts", "cell runs"])
def test_interrupt_is_one_line_and_ends_kernel_and_ranks(folder: Path, temporary: Path, moment: str) -> None:
    running = _start(folder, "out", temporary, "slow", folder)
    try:
        if moment == "cell runs":
            pids = _pids(folder / "out" / "report.json")
        else:
            _wait(lambda: list(temporary.glob("labkit-run-*/kernel.json")), 60)
            pids = [int(pid) for pid in _children(running.pid)]
        os.killpg(running.pid, signal.SIGINT)
        _wait(lambda: _gone(pids), 5)  # 2 seconds on a quiet machine
        out, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130 and out == ""
    kept = folder / "out" / "07_toy.ipynb"
    last = f"interrupted; what 07_toy showed so far is in {kept}"
    assert [line for line in err.splitlines() if ": cell " not in line] == ["07_toy: running", last]
    ran = [cell.get("execution_count") is not None for cell in json.loads(kept.read_text())["cells"]]
    assert any(ran) == (moment == "cell runs")
    assert _left(temporary) == []


def test_a_kernel_that_dies_is_one_message_with_its_last_words(folder: Path) -> None:
    done = subprocess.run(_command(folder, "-p", "mode", "dead"), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.endswith(
        f"labkit run: 07_toy failed: Kernel died\n  out of everything\n  see {folder / 'out' / '07_toy.ipynb'}\n"
    )


def test_after_kill_9_nothing_runs_and_no_folder_stays(folder: Path, temporary: Path) -> None:
    running = _start(folder, "out", temporary, "slow", folder)
    try:
        pids = _pids(folder / "out" / "report.json")
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    _wait(lambda: _gone(pids), 5)
    _wait(lambda: not _left(temporary), 5)


def _children(pid: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return found.stdout.split()


def _wait(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
