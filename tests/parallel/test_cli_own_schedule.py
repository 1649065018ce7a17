"""`labkit train --schedule.path mine.csv` with a reader's own table: two stages a rank, backwards split by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_files import read_events

from labkit.cli import main
from labkit.schedules import Schedule
from labkit.train.reporting.measured import follows, pipeline_events

SIZES = ["--preset", "tiny", "--hidden", "32", "--heads", "4", "--seq-length", "16",
         "--global-batch-size", "4", "--steps", "2", "--precision", "fp64", "--pp", "2"]  # fmt: skip
SMALL = [*SIZES, "--layers", "4"]
MINE = """\
0F0,0F1,2F0,2F1,0F2,2I0,0F3,0I0,2I1,2F2,0I1,2W0,2I2,2F3,0I2,0W0,2I3,2W1,0I3,0W1,2W2,0W2,2W3,0W3
1F0,1F1,3F0,3I0,3F1,1I0,3I1,1F2,1I1,3F2,3I2,1F3,1I2,3F3,3I3,3W0,1I3,1W0,3W1,1W1,3W2,1W2,3W3,1W3
"""
"""Stages 0 and 2 on rank 0, 1 and 3 on rank 1; weight gradients where there is time for them."""
UPSIDE_DOWN = "1F0,1F1,1B0,1B1,1F2,1B2,1F3,1B3\n0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n"
"""The first stage on rank 1: the embedding's two copies are summed over ranks that the schedule says."""


def final_losses(words: list[str], capfd: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["train", *SMALL, *words]) == 0
    return re.findall(r"loss (\d+\.\d+)", capfd.readouterr().out)


@pytest.mark.parametrize("text", [MINE, UPSIDE_DOWN], ids=["split", "upside-down"])
def test_a_table_of_ones_own_trains_in_its_order(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "mine.csv", tmp_path / "run"
    path.write_text(text)
    written = ["--output-dir", str(output), "--write-events"]
    own = final_losses(["--schedule.path", str(path), "--eval-steps", "1", *written], capfd)
    usual = final_losses(["--eval-steps", "1"], capfd)
    assert own == usual and len(own) == 3
    events = read_events(output / "events.jsonl")
    by_rank = [[event for event in events if event.rank == rank] for rank in (0, 1)]
    assert follows(pipeline_events(by_rank), Schedule.from_csv(text))


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (MINE, ["--layers", "6"], "6 layers cannot be shared evenly by 4 stages"),
        (MINE, ["--vpp", "4", "--layers", "8"], "mine has 2 stages per rank, but parallel.vpp is 4"),
        (MINE, ["--pipeline-layout", "Ett|ttL"], "has 2 stages and 4 layers; the schedule has 4 stages"),
        (MINE, ["--microbatch-group-size", "2"], "has no effect"),
        (MINE.replace(",2W3,", ","), [], "2W3 is missing"),
        (MINE.replace("2I0,0F3", "0F3,2I0").replace("3F0,3I0,3F1", "3F1,3I0,3F0"), [], "3I0"),
        ("0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3\n", [], "has no backward"),
    ],
    ids=["layers", "vpp", "layout", "group", "no-w", "circle", "forward"],
)
def test_what_cannot_train_is_refused_before_any_process_starts(
    text: str, changes: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "mine.csv"
    path.write_text(text)
    monkeypatch.setattr("labkit.launch.run", lambda *_, **__: pytest.fail("ranks were started"))
    words = [*SIZES, *changes] if "--layers" in changes else [*SMALL, *changes]
    assert main(["train", *words, "--schedule.path", str(path)]) == 2
    assert message in capfd.readouterr().err
