"""`labkit train` and `labkit parity` with real ranks: what is printed, what is written, which exit code."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from labkit.cli import main, train_command
from labkit.config import RunConfig
from labkit.launch import waiting
from labkit.train.run_folder.claim import folder_problems

SMALL = ["--preset", "tiny", "--layers", "2", "--hidden", "16", "--heads", "2", "--seq-length", "16",
         "--global-batch-size", "4"]  # fmt: skip


def test_train_prints_the_final_losses_and_writes_metrics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--tensor-model-parallel-size", "2", "--steps", "2", "--eval-steps", "1", "--output-dir", str(tmp_path)]
    board = tmp_path / "board"
    assert main(["train", *SMALL, *words, "--tensorboard-dir", str(board)]) == 0  # two ranks: the fewest of the layout
    out, err = capfd.readouterr()
    assert len(list(board.iterdir())) == 1, "rank 0 alone writes for TensorBoard"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    final = [line["loss"] for line in lines if "loss" in line][-1]
    assert out.startswith("2 ranks: tp 2 x cp 1 x dp 1 x pp 1, 2 steps of 4 samples")
    assert f"step 2 of 2: training loss {final:.4f}\n" in out
    assert re.search(r"^validation loss \d", out, re.M) and re.search(r"^test loss \d", out, re.M)
    assert f"metrics: {tmp_path}\n" in out
    last = [line for line in lines if "loss" in line][-1]
    assert f"step 2 of 2: loss {final:.4f}  " in err and f"lr {last['learning_rate']:.2e}" in err and " tokens/s" in err
    assert re.search(r"^step 2 of 2: validation loss \d", err, re.M) and "\r" not in err
    names = [".lock", "board", "config.yaml", "metrics.jsonl", "run.json", "scalars.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_trace_holds_the_last_steps_of_all_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    words = ["--pp", "2", "--steps", "3", "--keep-event-steps", "2", "--eval-steps", "1", "--trace", str(path)]
    assert main(["train", *SMALL, *words]) == 0
    assert f"trace of steps 2 to 3 for ui.perfetto.dev: {path}\n" in capfd.readouterr().out
    rows = json.loads(path.read_text())["traceEvents"]
    assert {row["ph"] for row in rows} == {"M", "X", "s", "f"}
    slices = [row for row in rows if row["ph"] == "X"]
    assert {row["args"]["step"] for row in slices} == {2, 3} and {row["pid"] for row in slices} == {0, 1}
    spans = {(row["pid"], row["name"]): (row["ts"], row["ts"] + row["dur"]) for row in slices if "step " in row["name"]}
    assert set(spans) == {(rank, f"step {step}") for rank in (0, 1) for step in (2, 3)}
    for row in (row for row in slices if row["cat"] == "backward"):
        start, end = spans[row["pid"], f"step {row['args']['step']}"]
        assert start <= row["ts"] <= row["ts"] + row["dur"] <= end
    assert not (tmp_path / "events.jsonl").exists()


def test_a_terminal_of_80_columns_and_one_of_none_show_the_run() -> None:
    """Standard error on a terminal: a line drawn anew, or whole lines where the terminal tells no width."""
    command = [sys.executable, "-m", "labkit.cli", "train", *SMALL, "--nproc", "1", "--steps", "2"]
    for width, shown in ((80, "\r"), (0, "memory ")):
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        done = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer)
        os.close(writer)
        text = b""
        while True:
            try:
                text += os.read(reader, 65536)
            except OSError:  # EIO: the command has ended
                break
        os.close(reader)
        assert done.wait() == 0
        lines = text.decode().replace("\r\n", "\n")
        assert re.search(r"step 2 of 2: loss \d\.\d{4}  [\d.]+ s/step", lines) and shown in lines, (width, lines)


def test_a_tokenizer_that_does_not_fit_is_the_users_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--nproc", "2", "--vocab-size", "512"]) == 2
    err = capfd.readouterr().err
    assert "tokenizer mismatch" in err and "1024" in err and "512" in err and "Traceback" not in err


def hang(config: RunConfig) -> None:
    if dist.get_rank() == 0:
        with waiting("all_reduce tp #1"):
            dist.barrier()
    time.sleep(60)


def test_a_run_that_hangs_is_code_1(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_command, "train_on_rank", hang)
    assert main(["train", *SMALL, "--nproc", "2", "--timeout", "1.5"]) == 1
    err = capfd.readouterr().err
    assert "labkit train: rank 0 of 2 waited for rank 1 longer than 1.5 s" in err
    assert "waiting in all_reduce tp #1 for" in err and "`labkit train --timeout`" in err


def test_parity_agrees_and_names_what_a_missing_all_reduce_changes(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["parity", *SMALL, "--steps", "1", "--layouts", "tp=2", "--warmup-steps", "10"]
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert "1 of 1 layouts agree with one process to 1e-10" in out
    begun = [line for line in err.splitlines() if not line.startswith("step ")]
    assert begun == [
        "comparing 1 layout with one process, 1 step in float64",
        "running one process (1 rank)",
        "running tp2 pp1 dp1 (2 ranks)",
    ]
    assert main([*words, "--drop", "operation=all_reduce,group=tp,phase=forward,layer=layers.1.mlp"]) == 1
    assert "differs from one process, first in layers.1.mlp output" in capfd.readouterr().out
    assert main([*words, "--drop", "operation=all_to_all,group=tp"]) == 1
    assert "matched no call in any layout" in capfd.readouterr().out


@pytest.mark.parametrize("reader", [pytest.param("2>/dev/null | head -1", marks=pytest.mark.sweep), "2>&1 | true"])
def test_a_run_whose_reader_leaves_is_finished(reader: str, tmp_path: Path) -> None:
    words = shlex.join([sys.executable, "-m", "labkit", "train", *SMALL, "--tp", "2", "--steps", "2", "--output-dir"])
    line = f"{words} {shlex.quote(str(tmp_path / 'out'))} {reader}; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines()[-1], done.stderr) == ("0", "")
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.sweep
def test_parity_keeps_its_verdict_when_its_reader_leaves() -> None:
    words = shlex.join([sys.executable, "-m", "labkit", "parity", *SMALL, "--steps", "1", "--layouts", "tp=2"])
    drop = "operation=all_reduce,group=tp,phase=forward,layer=layers.1.mlp"
    for fault, status in (("", "0"), (f"--warmup-steps 10 --drop {drop}", "1")):
        line = f"{words} {fault} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert done.stdout == f"{status}\n"
        assert {line.split()[0] for line in done.stderr.splitlines()} <= {"comparing", "running", "step"}


@pytest.mark.sweep
def test_parity_in_float32_tells_rounding_from_a_fault(capfd: pytest.CaptureFixture[str]) -> None:
    """Unclipped gradients of large weights: rounding moves a key's bias, whose gradient is zero, by 1e-4 of a step."""
    words = ["parity", *SMALL, "--steps", "4", "--layouts", "tp=2", "--dtype", "float32"]
    words += ["--clip-grad", "0", "--init-std", "0.2"]
    assert main(words) == 0
    out = capfd.readouterr().out
    assert "compared tp2 pp1 dp1 (2 ranks): rounding" in out and "attention.qkv.bias parameter" in out
    assert main([*words, "--drop", "operation=all_reduce,group=tp,phase=backward,layer=layers.0.mlp"]) == 1
    assert "(2 ranks): fault" in capfd.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(6))
def test_parity_of_the_tiny_preset_in_float32_at_any_seed(seed: int) -> None:
    words = ["--preset", "tiny", "--layouts", "tp=2", "--dtype", "float32", "--steps", "10"]
    assert main(["parity", *words, "--train.seed", str(seed)]) == 0


def test_torchrun_uses_its_ranks_and_speaks_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "labkit.cli", "train"]
    words = [*SMALL, "--tp", "2", "--steps", "1", "--trace", str(tmp_path / "run.json")]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 1 of 1: loss") == 1 and done.stdout.count("trace of steps 1 to 1") == 1
    slices = [row for row in json.loads((tmp_path / "run.json").read_text())["traceEvents"] if row["ph"] == "X"]
    assert {row["pid"] for row in slices} == {0, 1}
    assert done.stdout.count("2 ranks: tp 2") == 1 and done.stdout.count("step 1 of 1: training loss") == 1


def test_two_runs_into_one_folder_and_one_that_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second is refused while the first writes, and the first does not notice. After kill -9 the folder says that
    its run did not finish, and only --overwrite replaces it."""
    words = ["train", *SMALL, "--output-dir", str(tmp_path), "--steps"]
    command = [sys.executable, "-m", "labkit.cli", *words, "100000", "--nproc", "2"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert first.poll() is None
            time.sleep(0.05)
        for more in ([], ["--overwrite"]):
            assert main([*words, "1", *more]) == 2
            assert f"process {first.pid} on " in capfd.readouterr().err
        assert main(["watch", str(tmp_path)]) == 0
        assert re.match(r"\S+  running     step [\d,]+ of 100,000: loss \d.*  ETA \d", capfd.readouterr().out)
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    written = [json.loads(line)["step"] for line in metrics.read_text().rpartition("\n")[0].splitlines()]
    assert written == list(range(written[0], written[0] + len(written))), "every step of the first run, and once"
    while (said := folder_problems(RunConfig().override({"output_dir": str(tmp_path)}))[0]).endswith("has ended"):
        time.sleep(0.05)  # its ranks are being killed
    assert "holds a run that did not finish" in said
    assert main(["watch", str(tmp_path)]) == 0
    assert re.match(r"\S+  unfinished  step [\d,]+ of 100,000: loss ", capfd.readouterr().out)
    assert main([*words, "1"]) == 2 and "did not finish" in capfd.readouterr().err
    assert main([*words, "1", "--overwrite"]) == 0
    assert len(metrics.read_text().splitlines()) == 1
    assert main(["train", "--config", str(tmp_path / "config.yaml")]) == 2
    assert "holds a finished run" in capfd.readouterr().err
    assert main(["train", "--config", str(tmp_path / "config.yaml"), "--output-dir", str(tmp_path / "again")]) == 0
    losses = [json.loads((tmp_path / name).read_text())["loss"] for name in ("metrics.jsonl", "again/metrics.jsonl")]
    assert losses[0] == losses[1], "the stored configuration is the whole run"


@pytest.mark.sweep
def test_under_torchrun_the_ranks_refuse_together(tmp_path: Path) -> None:
    """One message, for a folder that cannot be written and for memory, although no process launched them."""
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "labkit.cli", "train"]
    sizes = ["--seq-length", "4096", "--micro-batch-size", "4096", "--global-batch-size", "4096"]
    words = ["--preset", "tiny", "--tp", "2", *sizes]
    more = ["--output-dir", str(tmp_path / "file" / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words, *more], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "pretraining.py" not in done.stderr, "a message, no stack of ours"
    assert len(re.findall(r"rank \d: labkit train: 2 problems", done.stderr)) == 1
    assert "cannot be written (Not a directory)" in done.stderr and "2 ranks need " in done.stderr


SCRIPT = """
import os, sys, time
import labkit.cli.train_command as train
from labkit.config import ConfigError
from labkit.parallel.vocab.token_ids import TokenIdError

def on_rank(config):
    if os.environ["RANK"] in sys.argv[1]:
        raise {"a": ValueError, "b": TokenIdError}[sys.argv[2]](f"wrong on {os.environ['RANK']}")
    time.sleep(60)

train.train_on_rank = on_rank
from labkit.cli import main
sys.exit(main(["train", *sys.argv[3:]]))
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "kind"), [("1", "a"), ("0", "a"), ("1", "b"), ("01", "b")])
def test_under_torchrun_every_ranks_own_error_is_said(ranks: str, kind: str, tmp_path: Path) -> None:
    """An unexpected ValueError with its traceback, a user's error as one message; the same on all ranks only once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), ranks, kind]
    done = subprocess.run([*command, *SMALL, "--tp", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.findall(r"rank \d: labkit train: ", done.stderr) == [f"rank {ranks[0]}: labkit train: "]
    assert f"wrong on {ranks[0]}" in done.stderr
    assert ("in on_rank" in done.stderr) == (kind == "a")
