"""SIGTERM in one process: who listens, who passes it on, and what a run leaves."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.cli.train_command import saved_words
from labkit.config import RunConfig, presets
from labkit.launch import launcher
from labkit.train import RunInterrupted, interruption, pretrain
from labkit.train.interruption import listening, passing_on, stop_requested


def small(**changes: object) -> RunConfig:
    shape = {"layers": 1, "hidden": 16, "heads": 2, "seq_length": 8, "global_batch_size": 2, "steps": 5}
    return presets.tiny().override(shape | {"record_events": False} | changes)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def outside() -> Iterator[list[int]]:
    """Signals that reached the handler of outside the blocks."""
    reached: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: reached.append(number))
    yield reached
    signal.signal(signal.SIGTERM, before)


class Asks:
    """An observer that gets SIGTERM in one step."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def on_model(self, groups, chunks, schedule) -> None:
        """Nothing to do."""

    def on_gradients(self, step: int, chunks) -> None:
        if step == self.step:
            terminate()

    def on_update(self, step: int, chunks) -> None:
        self.seen = step + 1


def test_inside_the_block_sigterm_is_noted_and_afterwards_all_is_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listening():
        assert not stop_requested()
        terminate()
        terminate()
        assert stop_requested(), "noted, however often it comes"
        with listening():
            assert stop_requested(), "a block inside forgets nothing"
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before and not stop_requested()


def test_another_thread_listens_to_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with listening(), passing_on():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_run_ends_after_the_step_in_which_it_was_asked(tmp_path: Path) -> None:
    asks = Asks(2)
    with pytest.raises(RunInterrupted, match=r"^stopped by SIGTERM after step 3 of 5; nothing was saved$") as stopped:
        pretrain(small(output_dir=str(tmp_path)), observer=asks)
    assert (stopped.value.step, stopped.value.steps, asks.seen) == (3, 5, 3)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "unfinished"


def test_a_run_that_is_asked_in_its_last_step_is_done(tmp_path: Path) -> None:
    result = pretrain(small(eval_steps=1, output_dir=str(tmp_path)), observer=Asks(4))
    assert len(result.losses) == 5 and result.series("test_loss")
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "finished"


def test_a_validation_that_runs_when_the_signal_comes_is_finished(tmp_path: Path) -> None:
    config = small(eval_interval=2, eval_steps=1, output_dir=str(tmp_path))
    with pytest.raises(RunInterrupted, match="after step 3 of 5"):
        pretrain(config, process_non_loss_data=lambda *_: terminate())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation_loss" in line] == [2]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


def test_sigterms_of_one_request_may_come_after_the_end(outside: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunInterrupted), listening():
        raise RunInterrupted(1, 2)  # another rank was asked, and this one's signal is still on its way
    terminate()
    with passing_on():
        pass
    terminate()
    assert outside == []
    monkeypatch.setattr(interruption, "_SAME_REQUEST", 0.0)
    terminate()
    with listening():
        pass  # no request: what comes now is one of its own
    terminate()
    assert outside == [signal.SIGTERM] * 2


def test_the_words_of_an_interrupted_run() -> None:
    said = "stopped by SIGTERM after step 3 of 9; checkpoint: runs/step-3"
    assert str(RunInterrupted(3, 9, "runs/step-3")) == said


def test_ctrl_c_says_where_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def said(**checkpoint: object) -> str:
        config = small().override({f"checkpoint.{name}": value for name, value in checkpoint.items()})
        (tmp_path / "run.yaml").write_text(config.to_yaml())
        assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 130
        return capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setattr("labkit.launch.run", interrupt)
    folder = str(tmp_path / "runs")
    assert said() == "interrupted"
    assert said(dir=folder) == "interrupted; nothing was saved"
    with pytest.raises(RunInterrupted):
        pretrain(small().override({"checkpoint.dir": folder}), observer=Asks(2))
    assert said(dir=folder) == f"interrupted; the same command continues from {folder}/step_00000003"
    anew = small().override({"checkpoint.dir": folder, "checkpoint.load": "none"})  # would be rejected now
    assert saved_words(anew) == f"; checkpoints: {folder}"


def test_the_launching_process_asks_once_and_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(launcher, "ask_to_stop", lambda wish=True: asked.append(wish))
    with passing_on():
        terminate()
        terminate()  # at once: the same request, which reached this process twice
    assert asked == [True, False]


def test_a_second_sigterm_and_a_long_wait_interrupt(outside: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interruption, "_SAME_REQUEST", 0.0)
    with pytest.raises(KeyboardInterrupt, match="the ranks were killed 0 s after SIGTERM"), passing_on():
        terminate()
        terminate()
    with pytest.raises(KeyboardInterrupt), passing_on(patience=0.2):
        terminate()
        threading.Event().wait(20)
    assert outside == []
    terminate()
    assert outside == [signal.SIGTERM]


def test_ranks_of_torchrun_are_not_asked_by_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    before = signal.getsignal(signal.SIGTERM)
    with passing_on():
        assert signal.getsignal(signal.SIGTERM) is before
