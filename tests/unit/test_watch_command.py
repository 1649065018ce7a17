"""`labkit watch`: its plots dot by dot, frames that fit, a live run on a terminal, and bad requests."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_files import append, begun, finished

from labkit.cli import main
from labkit.cli.watch_command import NARROWEST, Watched, frame, plot
from labkit.train.reporting.run_records import RunRecords, pause

AXIS = 10
NAN = float("nan")


def record(step: int, loss: float) -> dict[str, float]:
    return {"step": step, "loss": loss, "grad_norm": 1.2, "learning_rate": 1e-3, "step_time": 2.0, "skipped_steps": 1}


def records(*losses: float) -> list[dict[str, float]]:
    return [record(step, loss) for step, loss in enumerate(losses, start=1)]


def read(*folders: Path) -> list[RunRecords]:
    runs = [RunRecords(folder) for folder in folders]
    for run in runs:
        run.refresh()
    return runs


# ---- plots ----


def dots(rows: list[str]) -> set[tuple[int, int]]:
    """(column, row) of each dot, by Unicode's names: BRAILLE PATTERN DOTS-1237 has 1, 2, 3, 7 on the left, top down."""
    found = set()
    for row, text in enumerate(rows):
        for column, character in enumerate(text[AXIS:]):
            if character != " ":
                for number in unicodedata.name(character).partition("DOTS-")[2]:
                    place = "12374568".index(number)
                    found.add((2 * column + place // 4, 4 * row + place % 4))
    return found


def drawn(points: list[tuple[float, float]], width: int = 4, height: int = 2, **ends: tuple[float, float]) -> list[str]:
    axes = {"x": (0.0, 7.0), "y": (0.0, 7.0)} | ends
    return plot(points, width + AXIS, height, axes["x"], axes["y"])


def test_every_dot_of_a_plot_can_be_drawn() -> None:
    for column in range(8):
        for row in range(8):
            assert dots(drawn([(column, 7 - row)])[:2]) == {(column, row)}


def test_a_line_joins_its_points_and_has_gaps_where_a_number_is_missing() -> None:
    assert dots(drawn([(0, 0), (7, 7)])[:2]) == {(i, 7 - i) for i in range(8)}
    assert dots(drawn([(0, 0), (0, 7)])[:2]) == {(0, i) for i in range(8)}, "steep: no hole"
    assert dots(drawn([(0, 7), (2, NAN), (3, 0), (4, float("inf")), (7, 0)])[:2]) == {(0, 0), (3, 7), (7, 7)}


def test_ends_of_the_axes_are_named_and_a_flat_line_is_in_the_middle() -> None:
    top, bottom, steps = drawn([(1, 2.5), (90, 12.25)], x=(1, 90), y=(2.5, 12.25))
    assert top.startswith("     12.2│") and bottom.startswith("      2.5│") and steps.split() == ["1", "90"]
    assert len(steps) == 4 + AXIS
    flat = drawn([(0, 3.0), (7, 3.0)], y=(3.0, 3.0))
    assert {row for _, row in dots(flat[:2])} <= {3, 4} and len(dots(flat[:2])) == 8


def test_a_terminal_without_unicode_gets_stars(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Ascii)
    rows = drawn([(0, 0), (7, 7)])
    assert [row[AXIS - 1 :] for row in rows[:2]] == ["|  **", "|**  "] and "\n".join(rows).isascii()


# ---- frames ----


@pytest.mark.parametrize("size", [(160, 50), (100, 24), (80, 24), (60, 12), (NARROWEST, 8), (80, 3), (80, 1)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_frame_fits_its_terminal_and_names_every_run_that_does(
    tmp_path: Path, size: tuple[int, int], count: int
) -> None:
    folders = [tmp_path / f"{'a long name ' * 4}{number}" for number in range(count)]
    for number, folder in enumerate(folders):
        finished(folder, *records(9.0 - number, 5.0, 4.0))
    lines = frame(read(*folders), *size)
    assert len(lines) <= size[1] and all(len(line) <= size[0] for line in lines)
    heads = [line for line in lines if " finished" in line]
    assert len(heads) == (count if count < size[1] else max(0, size[1] - 1))
    plots = sum(line.rstrip().endswith("3") and "1  " in line and "loss" not in line for line in lines)
    assert plots >= 1 or size[1] < 12, "where there is room, there is a plot"


def test_runs_stand_side_by_side_on_the_same_axes(tmp_path: Path) -> None:
    finished(tmp_path / "first", *records(9.0, 3.0), tp=2)
    finished(tmp_path / "second", *records(5.0, 4.0, NAN, 2.0), tp=2)
    finished(tmp_path / "third", *records(NAN))
    lines = frame(read(*(tmp_path / name for name in ("first", "second", "third"))), 100, 30)
    assert lines[0].startswith("first   finished    step 2 of 2: loss 3.0000  skipped 1  2.00 s/step")
    assert lines[1].startswith("second  finished    step 4 of 4: loss 2.0000")
    assert lines[2].startswith("third   finished    step 1 of 1: loss nan")
    (titles,) = (line for line in lines if "loss by step" in line)
    assert re.split(r"  +", titles) == ["first: loss by step, 2 ranks, tp 2", "second: loss by step, 2 ranks, tp 2"]
    assert next(line for line in lines if "│" in line).count("9│") == 2 and lines[-1].split() == ["1", "4"] * 2


def test_a_single_run_shows_all_its_values(tmp_path: Path) -> None:
    finished(tmp_path / "run", *records(9.0, 3.0))
    text = "\n".join(frame(read(tmp_path / "run"), 80, 24))
    assert text.startswith("run  finished\nstep 2 of 2: loss 3.0000  skipped 1  2.00 s/step")
    assert "lr 1.00e-03" in text and "grad norm 1.20" in text


# ---- the command ----


def test_a_pipe_gets_the_runs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "a", *records(9.0, 3.0))
    run = begun(tmp_path / "b", *records(9.0, 8.0))
    for words in ([str(tmp_path)], ["--once", str(tmp_path / "a"), str(tmp_path / "b")]):
        assert main(["watch", *words]) == 0
        out, err = capsys.readouterr()
        assert err == "" and "\x1b" not in out
        assert re.search(r"^a  finished    step 2 of 2: .* grad norm 1.20$", out, re.M)
        assert re.search(r"^b  running     step 2 of 9: .* ETA 0:14 ", out, re.M)
    run.release()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_once_fits_its_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    finished(tmp_path / "a", *records(9.0, 3.0))
    monkeypatch.setattr("labkit.cli.watch_command.columns", lambda _: columns)
    assert main(["watch", "--once", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns and "grad norm 1.20" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "DIR: nothing to watch; give the train.output_dir of one or more runs"),
        (["gone"], "gone: no such folder; give the train.output_dir of a run"),
        (["."], ".: holds no metrics.jsonl, nor does a folder in it"),
        (["--interval", "0", "gone"], "--interval 0.0: must be at least 0.1"),
        (["--interval", "x", "gone"], "--interval 'x': must be a number"),
        (["--onse", "gone"], 'unknown option; did you mean "--once"?'),
    ],
)
def test_bad_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


@contextmanager
def on_terminal(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[str], str]]]:
    """`labkit watch` on a terminal of 100 x 24, and a function that waits for a text and returns all that was shown."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "labkit", "watch", *words]
    environment = os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment)
    os.close(writer)
    shown = b""

    def until(text: str) -> str:
        nonlocal shown
        while text.encode() not in shown:
            try:
                shown += os.read(reader, 65536)
            except OSError:  # EIO: the command has ended
                break
        return shown.decode()

    try:
        yield process, until
    finally:
        process.kill()
        process.wait()
        os.close(reader)


def test_a_live_run_is_drawn_anew_until_it_is_finished(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", steps=2, tp=2)
    with on_terminal("--interval", "0.1", str(tmp_path / "run")) as (process, until):
        assert "run  starting" in until(" s ago")
        append(tmp_path / "run", record(1, 9.0))
        assert "step 1 of 2: loss 9.0000  skipped 1  2.00 s/step  ETA 0:02" in until("loss by step, 2 ranks, tp 2")
        append(tmp_path / "run", record(2, 8.0))
        run.finish()
        text = until("nothing that is ever shown")
        assert process.wait(60) == 0
    last = text.rpartition("\x1b[J")[0].rpartition("F")[2]
    assert "run  finished" in last and "step 2 of 2: loss 8.0000" in last and "ETA" not in last
    assert "\x1b[2J" not in text, "the screen above the picture stays"


def test_runs_that_begin_later_join_in_the_order_of_their_folders(tmp_path: Path) -> None:
    watched = Watched([str(tmp_path)])
    for names in ("b", "ab", "abc"):
        finished(tmp_path / names[-1] if names != "ab" else tmp_path / "a", record(1, 9.0))
        assert watched.refresh() == []
        assert [run.folder.name for run in watched.runs] == list(names)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert watched.refresh() == [] and [run.folder.name for run in watched.runs] == ["b", "c", "a"], "gone, or replaced"
    assert "a  finished    no step yet" in frame(watched.runs, 80, 24)


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", record(1, 9.0))
    with on_terminal("--interval", "600", str(tmp_path / "run")) as (process, until):
        until("step 1 of 9")
        process.send_signal(signal.SIGINT)
        text = until("nothing that is ever shown")
        assert process.wait(60) == 130
    assert "Traceback" not in text and "interrupt" not in text
    run.release()


def test_ctrl_c_just_before_a_sleep_waits_for_no_more_than_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: list[float] = []

    def served_after(seconds: float) -> None:
        sleeps.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", served_after)
    with pytest.raises(KeyboardInterrupt):
        pause(600.0)
    assert sleeps and max(sleeps) <= 0.5


def test_neither_torch_nor_matplotlib_is_needed(tmp_path: Path) -> None:
    finished(tmp_path / "run", *records(9.0, 8.0))
    code = (
        f"import sys; from labkit.cli import main; assert main(['watch', {str(tmp_path)!r}]) == 0;"
        "assert not {'torch', 'matplotlib', 'tqdm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
