"""What a training run shows of itself: words, widths, and streams that are no terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from labkit.config import presets
from labkit.plan.flops import step_flops
from labkit.train import pretrain
from labkit.train.reporting import progress_bar
from labkit.train.reporting.progress_bar import ProgressBar
from labkit.train.reporting.progress_line import FIELDS, all_lines, digits, duration, one_line, step_words
from labkit.train.reporting.report import Throughput, peak_memory_bytes

VALUES = {
    "step": 12, "steps": 100, "loss": 5.80543, "grad_norm": 1.2345, "learning_rate": 3e-4, "loss_scale": 1.0,
    "skipped_steps": 0, "step_time": 0.42, "tokens_per_second": 1234.4, "tflops_per_rank": 0.01234,
    "hardware_tflops_per_rank": 0.0164, "peak_memory_bytes": 440_234_147, "eta": 36.96,
}  # fmt: skip
WORDS = ["step 12 of 100:", "loss 5.8054", "0.420 s/step", "ETA 0:37", "1,234 tokens/s", "model 12.3 GFLOP/s/rank",
         "hardware 16.4 GFLOP/s/rank", "lr 3.00e-04", "grad norm 1.23", "memory 0.41 GiB"]  # fmt: skip


def test_the_words_of_a_step_in_order_of_importance() -> None:
    assert step_words(VALUES) == WORDS
    assert step_words({"step": 3, "steps": 9, "test_loss": 2.0, "test_perplexity": 7.389}) == [
        "step 3 of 9:", "test loss 2.0000", "perplexity 7.39",
    ]  # fmt: skip
    assert step_words({"step": 3, "tflops_per_rank": 0.5, "hardware_tflops_per_rank": 0.5, "mfu": 0.1, "hfu": 0.1}) == [
        "step 3:", "model 0.500 TFLOP/s/rank", "MFU 10.0%",
    ]  # fmt: skip
    assert step_words({"step": 3, "loss": 2.0, "skipped_steps": 2, "grad_norm": None}) == [
        "step 3:", "loss 2.0000", "skipped 2",
    ]  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (725, "12:05"), (90_061, "25:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.00"), (0.26, "0.260"), (99.96, "100"), (999.6, "1,000"), (1.5e6, "1,500,000")]
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize("width", [200, 120, 100, 80, 60])
def test_one_line_keeps_the_most_important_that_fit(width: int) -> None:
    line = one_line(VALUES, width)
    shown = [word for word in WORDS if word in line]
    assert len(line) <= width and shown == WORDS[: len(shown)]
    assert len(shown) == len(WORDS) or len(line) + 2 + len(WORDS[len(shown)]) > width, "room was left unused"
    assert len(shown) >= 3


@pytest.mark.parametrize("width", [None, 200, 100, 40, 20])
def test_whole_lines_lose_nothing_at_any_width(width: int | None) -> None:
    lines = all_lines(VALUES, width)
    assert re.sub(r"\s+", " ", " ".join(lines)) == " ".join(WORDS)
    assert all(len(line) <= max(width or 1000, 2 + max(map(len, WORDS))) for line in lines)
    assert (len(lines) == 1) == (width in (None, 200))


@contextmanager
def terminal(width: int) -> Iterator[tuple[TextIO, Any]]:
    """A stream into a terminal of `width` columns, and a function that closes it and gives what was written."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    stream = os.fdopen(writer, "w")

    def written() -> str:
        stream.close()
        text = b""
        while True:
            try:
                text += os.read(reader, 65536)
            except OSError:  # EIO: nobody writes any more
                return text.decode()

    try:
        yield stream, written
    finally:
        stream.close()
        os.close(reader)


def run(stream: TextIO, steps: int = 3) -> None:
    with ProgressBar(steps, stream) as bar:
        for step in range(1, steps + 1):
            bar.update(VALUES | {"step": step, "steps": steps})
        bar.update({"step": steps, "validation_loss": 5.5, "validation_perplexity": 244.7})


@pytest.mark.parametrize("width", [200, 100, 60])
def test_a_wide_terminal_has_one_line_drawn_anew(width: int) -> None:
    with terminal(width) as (stream, written):
        run(stream)
        text = written()
    drawn = re.split(r"[\r\n]+", text)
    assert all(len(line) <= width for line in drawn)
    assert sum("step 3 of 3: loss 5.8054" in line for line in drawn) >= 1 and "step 3 of 3: validation loss" in text
    assert text.count("\n") == 2, "one line for the validation, one that stays"
    assert ("memory 0.41 GiB" in text) == (width == 200)
    full = [line for line in drawn if "100%|" in line]
    assert all(line.rstrip().endswith("█|") and len(line) == width - 1 for line in full)
    assert bool(full) == (width > 60), "the bar takes what the values leave"


@pytest.mark.parametrize("width", [40, 20, 0])
def test_a_narrow_terminal_and_one_without_a_width_lose_nothing(width: int) -> None:
    with terminal(width) as (stream, written):
        run(stream)
        text = written()
    words = re.sub(r"\s+", " ", text)
    for step in (1, 3):
        assert " ".join([f"step {step} of 3:", *WORDS[1:]]) in words, "first and last step"
    assert "step 3 of 3: validation loss 5.5000 perplexity 245" in words
    assert "\r" not in text.replace("\r\n", "")
    if width == 0:
        assert len(text.splitlines()) == 3


def test_a_file_has_whole_lines_and_no_carriage_return(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        run(stream)
    first, last, validation = (tmp_path / "log").read_text().splitlines()
    assert first == "step 1 of 3: " + "  ".join(WORDS[1:]) and last == first.replace("1 of 3", "3 of 3")
    assert validation == "step 3 of 3: validation loss 5.5000  perplexity 245"


def test_lines_come_every_second_and_later_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
    stream, steps = io.StringIO(), 20_000
    with ProgressBar(steps, stream) as bar:
        for step in range(1, steps + 1):
            now += 0.5
            bar.update({"step": step, "loss": 1.0})
    shown = [int(number.replace(",", "")) for number in re.findall(r"^step ([\d,]+) of", stream.getvalue(), re.M)]
    assert shown[:4] == [1, 3, 5, 7] and shown[-1] == steps, "half a second a step: every second step"
    assert shown[-2] - shown[-3] == 120, "a line a minute after 10,000 s"
    assert 300 < len(shown) < 600


def test_the_last_step_before_a_failure_is_shown() -> None:
    stream = io.StringIO()
    with pytest.raises(KeyError), ProgressBar(9, stream) as bar:
        for step in (1, 2, 3):
            bar.update({"step": step, "loss": 1.0})
        raise KeyError
    assert stream.getvalue() == "step 1 of 9: loss 1.0000\nstep 3 of 9: loss 1.0000\n"


@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_notice_is_broken_at_blanks(width: int) -> None:
    notice = "resumed from runs/a/step_00000020: train.steps 20 -> 100; random states are derived from seed, step, rank"
    with terminal(width) as (stream, written):
        with ProgressBar(3, stream) as bar:
            bar.update({"message": notice})
        lines = [line for line in re.split(r"[\r\n]+", written()) if "starting ranks" not in line]
    assert all(len(line) <= width for line in lines) and " ".join(" ".join(lines).split()) == notice


def test_a_run_without_a_step_to_do_leaves_no_line_of_one() -> None:
    with terminal(80) as (stream, written):
        with ProgressBar(20, stream) as bar:
            bar.update({"stage": "first step"})
        text = written()
    assert "step 0" not in text and "\n" not in text and text.endswith("\r"), text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_start_shows_its_stage_and_seconds_until_the_first_step(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """On a terminal each second; in a file a line for a stage that takes long, and none after the first step."""
    monkeypatch.setattr(progress_bar, "LONG_STAGE", 1)
    monkeypatch.setattr(progress_bar, "columns", lambda _: 100 if is_terminal else None)
    stream = io.StringIO()
    with ProgressBar(3, stream) as bar:
        for stage in ("starting ranks", "reading the data"):
            if stage != "starting ranks":
                bar.update({"stage": stage})
            until = time.monotonic() + 60
            while f"{stage}, 2 s" not in stream.getvalue() and time.monotonic() < until:
                time.sleep(0.05)
                if not is_terminal and f"{stage}, " in stream.getvalue():
                    break
        bar.update({"step": 1, "loss": 1.0})
        shown = len(stream.getvalue())
        time.sleep(1.3)
        assert "reading" not in stream.getvalue()[shown:]
    text = stream.getvalue()
    assert "starting ranks, " in text and "reading the data, " in text
    assert is_terminal or [line.partition(",")[0] for line in text.splitlines()] == [
        "starting ranks", "reading the data", "step 1 of 3: loss 1.0000",
    ]  # fmt: skip


def test_rates_are_those_of_the_configuration() -> None:
    config = presets.tiny_moe().override({"train.steps": 10})
    throughput = Throughput(config, world_size=4)
    rates = throughput.rates(0.5)
    batch = config.train.global_batch_size
    assert rates["step_time"] == 0.5 and rates["tokens_per_second"] == batch * config.model.seq_length / 0.5
    flops = step_flops(config.model, samples=batch, moe=config.moe).total
    assert rates["tflops_per_rank"] == rates["hardware_tflops_per_rank"] == pytest.approx(flops / 4 / 0.5 / 1e12)


def test_the_time_left_is_by_the_steps_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("labkit.train.reporting.report.time.perf_counter", lambda: now)
    throughput = Throughput(presets.tiny().override({"train.steps": 10}), 1)
    assert throughput.time_left(1, 7.0) == 9 * 7.0
    now += 6.0  # three steps and a validation
    assert throughput.time_left(4, 1.0) == pytest.approx(6 * 2.0)
    assert throughput.time_left(10, 1.0) == 0.0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells its own peak in /proc")
def test_peak_memory_is_in_bytes_and_what_the_kernel_says() -> None:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(1024 * int(found[1]), rel=0.02)


def test_every_shown_field_is_in_the_metrics() -> None:
    shape = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "global_batch_size": 2, "steps": 3}
    result = pretrain(presets.tiny().override(shape | {"eval_steps": 1}))
    of_bert = pretrain(presets.bert_tiny().override(shape | {"eval_steps": 1}))
    named = {name for line in [*result.metrics, *of_bert.metrics] for name in line}
    assert set(FIELDS) - named == {"eta", "mfu", "hfu", "slow_ranks"}, "a CPU has no known peak, and no rank is slow"
    line = result.metrics[1]
    assert line["step"] == 2 and line["step_time"] == line["timers"]["step"][1]
    assert line["tokens_per_second"] == pytest.approx(2 * 8 / line["step_time"])
    words = " ".join(step_words(line))
    assert words.startswith(f"step 2: loss {line['loss']:.4f} ") and "GiB" in words
