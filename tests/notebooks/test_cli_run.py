"""`labkit run` with real kernels: parameters, results, a failed cell, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

LABKIT = str(Path(sys.executable).with_name("labkit"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A notebook folder whose one chapter writes what it was given, and fails or waits when asked to."""
    parameters = nbformat.v4.new_code_cell("steps: int = 3\nmode: str = 'good'\noutput_dir: str = '.'")
    parameters.metadata.tags = ["parameters"]
    work = nbformat.v4.new_code_cell(
        "import json, os, time\n"
        "report = {'summary': ['final loss 1.5', 'largest difference 2e-16'], 'pid': os.getpid(), 'steps': steps}\n"
        "open(os.path.join(output_dir, 'report.json'), 'w').write(json.dumps(report))"
    )
    end = nbformat.v4.new_code_cell(
        "assert mode != 'bad', 'asked to fail'\nfor _ in range(600 * (mode == 'slow')):\n    time.sleep(0.1)"
    )
    notebook = nbformat.v4.new_notebook(cells=[parameters, work, end])
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
    assert "07_toy: 100%" in done.stderr and "<html" in (out / "07_toy.html").read_text()


def test_a_failed_cell_is_one_message_and_code_1(folder: Path) -> None:
    done = subprocess.run(_command(folder, "-p", "mode", "bad"), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "07_toy failed in the cell that begins `assert mode != 'bad', 'asked to fail'`" in done.stderr
    assert "AssertionError: asked to fail" in done.stderr and (folder / "out" / "07_toy.ipynb").exists()


def test_interrupt_ends_the_kernel_too(folder: Path) -> None:
    report = folder / "out" / "report.json"
    with subprocess.Popen(_command(folder, "-p", "mode", "slow"), stderr=subprocess.PIPE, text=True) as running:
        try:
            _wait(lambda: report.exists() and report.stat().st_size > 0, 60)
            kernel = json.loads(report.read_text())["pid"]
            running.send_signal(signal.SIGINT)
            _, err = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 130 and err.endswith("interrupted\n")
    _wait(lambda: not os.path.exists(f"/proc/{kernel}"), 5)


def _wait(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
