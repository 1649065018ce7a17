"""Row F22: a long run with a fault every few seconds has the losses of an undisturbed one, and its memory is flat."""

import json
import os
import statistics
import time
from pathlib import Path

import pytest
from chaos import Chaos, Usage, noted, usage_of
from survival_runs import TINY, differing_files

from labkit.config import RunConfig, presets
from labkit.launch import RankError, forkserver, run

LIMIT = 5.0
"""Seconds that a rank may wait for others: a standstill is reported after them."""


def losses_of(folder: Path) -> dict[int, float]:
    """Loss of each step, as metrics.jsonl has it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, len(steps) + 1)), "each step once, in order"
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def until_the_end(config: RunConfig, ranks: int, chaos: Chaos, pause: float) -> tuple[int, list[Usage]]:
    """Start the run again until it ends. Return the restarts, and the launcher's and its server's use after each."""
    restarts, uses = 0, []
    chaos.start()
    try:
        while True:
            try:
                run(noted, ranks, config, str(chaos.told), pause, timeout=LIMIT)
                return restarts, uses
            except RankError as error:
                assert error.kind in ("died", "timeout"), error
                restarts += 1
            finally:
                found = [usage_of(pid) for pid in (os.getpid(), forkserver._server._forkserver_pid)]
                uses.append(Usage(sum(u.memory for u in found if u), sum(u.files for u in found if u)))
    finally:
        chaos.stop()


def soak(
    tally, tmp_path: Path, config: RunConfig, ranks: int, *, period: float, pause: float, most: int = 1000
) -> None:
    """The run once alone and once with faults."""
    folders = {name: tmp_path / name for name in ("alone", "disturbed")}
    chaos = {}
    for name, folder in folders.items():
        (folder / "told").mkdir(parents=True)
        chaos[name] = Chaos(folder / "told", folder / "saved", period=period, most=most if name == "disturbed" else 0)
        given = config.override({"train.output_dir": str(folder / "out"), "checkpoint.dir": str(folder / "saved")})
        start = time.monotonic()
        restarts, uses = until_the_end(given, ranks, chaos[name], pause)
        tally.saw(f"minutes of the run, {name}", (time.monotonic() - start) / 60)
    faults, seen = chaos["disturbed"].faults, chaos["alone"].seen
    for kind, number in faults.items():
        tally.counts[kind] = number
    tally.counts["restarts"] = restarts
    for number in range(restarts):
        with tally.attempt(f"restart {number}"):
            pass
    with tally.attempt("losses, weights, moments, random states"):
        assert faults.total() - 1 <= restarts <= faults.total(), "each fault cut the run, but for one at its very end"
        assert len(faults) == 5, faults
        assert losses_of(folders["disturbed"] / "out") == losses_of(folders["alone"] / "out")
        last = f"step_{config.train.steps:08d}"
        assert differing_files(*(folder / "saved" / last for folder in folders.values())) == []
    with tally.attempt("memory and descriptors of the launcher over its launches"):
        tally.saw(
            "MB that the launcher grew by from its second launch to its last",
            uses[-1].memory - uses[min(1, len(uses) - 1)].memory,
        )
        assert uses[-1].files <= uses[0].files
        assert uses[-1].memory <= uses[min(1, len(uses) - 1)].memory + 8
    with tally.attempt("memory and descriptors of the ranks over the steps"):
        third = len(seen) // 3
        early, late = seen[third : 2 * third], seen[2 * third :]
        growth = statistics.median(u.memory for u in late) - statistics.median(u.memory for u in early)
        tally.saw("MB that a rank grew by from the second third of the steps to the last", growth)
        assert statistics.median(u.files for u in late) <= max(u.files for u in early), "a look may meet an open file"
        assert growth <= 2


@pytest.mark.sweep
def test_a_few_faults(tally, tmp_path):
    config = TINY.override(
        {"tp": 2, "steps": 20, "decay_steps": 20, "checkpoint.dir": "later", "interval": 3, "keep": 3}
    )
    counts = tally("F22", "20 small steps, each kind of fault once")
    soak(counts, tmp_path, config, 2, period=0.4, pause=0.2, most=5)


@pytest.mark.sweep
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fault_every_twenty_seconds(tally, tmp_path, asynchronous):
    """A checkpoint comes several times between two faults. A run whose saves are further apart never ends."""
    config = presets.tiny().override(
        {"tp": 2, "pp": 2, "steps": 300, "decay_steps": 300, "hidden_dropout": 0.1, "record_events": False}
        | {"checkpoint.dir": "later", "interval": 4, "keep": 3, "checkpoint.asynchronous": asynchronous}
    )
    manner = "asynchronous" if asynchronous else "synchronous"
    soak(
        tally("F22", f"300 steps of tiny, a fault every 20 s, {manner} saves"),
        tmp_path,
        config,
        4,
        period=20.0,
        pause=0.5,
    )
