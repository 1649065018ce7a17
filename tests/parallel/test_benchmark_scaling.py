"""The scaling benchmark: what it would run on nodes of GPUs, a tiny run on two CPU ranks, and bad input."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import scaling
from scaling_series import AXES, TRANSPORTS, points

from labkit.plan.fitting import RESERVE
from labkit.plan.machine import load_machine

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "p2p")


@pytest.mark.parametrize(("name", "ranks"), [("h100", 8), ("a100_40gb", 8), ("h200", 16)])
def test_every_point_of_a_node_is_legal_fits_and_has_a_prediction(name: str, ranks: int) -> None:
    machine = load_machine(name)
    found = points([*AXES, "transports"], ranks, "cuda", machine.memory_bytes)
    assert len(found) == 2 * len(AXES) * ranks.bit_length() + len(TRANSPORTS)
    for point in found:
        assert not point.forbidden(), point.case
        assert point.peak_bytes() <= machine.memory_bytes - RESERVE, point.case
        assert point.predicted(machine).seconds > 0, point.case


def test_strong_scaling_shares_out_one_step_and_weak_scaling_keeps_a_ranks_work() -> None:
    found = points(AXES, 8, "cuda", 80e9)
    for (axis, kind), series in itertools.groupby(found, key=lambda point: point.series):
        alone, *others = series
        for point in others:
            if kind == "strong":
                assert point.flops * point.ranks == pytest.approx(alone.flops)
                assert point.config.train.global_batch_size == alone.config.train.global_batch_size
            else:  # the vocabulary doesn't grow with the layers, and attention grows faster than the sequence
                assert 0.75 < point.flops / alone.flops < 1.7, (axis, point.ranks)


def test_two_cpu_ranks_write_a_row_for_each_point_and_collective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "scaling.json"
    given = "--device cpu --nproc 2 --only pp,transports,collectives --steps 1 --largest 16384 --machine h100"
    assert scaling.main([*given.split(), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    rows = {row["case"]: row for row in result["rows"]}
    weak = ["pp 1, weak", "pp 2, weak"]
    assert list(rows) == [
        "pp 1, strong", "pp 2, strong", *weak, *(f"pp 2, transport {name}" for name in TRANSPORTS),
        *(f"{kind}, 2 ranks" for kind in KINDS),
    ]  # fmt: skip
    assert [rows[case]["layers"] for case in weak] == [4, 8]
    assert rows["pp 1, weak"]["efficiency"] == 1.0 and rows["pp 2, weak"]["efficiency"] > 0
    for case in weak:
        measured, plan = rows[case]["median_ms"]["labkit"], rows[case]["median_ms"]["plan"]
        assert len(rows[case]["raw_seconds"]) == 1
        assert rows[case]["plan_error"] == pytest.approx(plan / measured - 1)
    reduced = rows["all-reduce, 2 ranks"]
    assert list(reduced["us"]) == list(reduced["plan_us"]) == ["4 KiB", "16 KiB"]
    assert reduced["bus_gb_per_s"]["4 KiB"] == pytest.approx(4096 / reduced["us"]["4 KiB"] / 1e3)
    assert {"commit", "date"} <= set(result) and result["machine"]["processor"]
    assert "2 ranks on 1 node; predictions for H100 DGX" in result["notes"][-1]
    printed = capsys.readouterr().out
    assert all(case in printed for case in rows)


BAD = {
    "--nproc 1": "at least 2 ranks, but here is 1; benchmarks/gpu.py measures one GPU",
    "--nproc 6": "6 ranks are no power of two; give --nproc 4, or start 4 with torchrun",
    "": "torch sees no GPU here; rehearse on the CPU with --device cpu --nproc 2",
    "--nproc 2 --only tp,fsdp": "no part 'fsdp'; parts: tp,pp,dp,cp,ep,transports,collectives",
    "--nproc 2 --machine h900": "h900",
    "--nproc 2 --steps 0": "--steps 0: give at least 1",
    "--nproc 2 --largest 100": "the smallest transfer has 4096 bytes",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_one_error(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scaling.main(["--device", "cpu", *given.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert BAD[given] in error and error.count("error:") == 1


def test_a_gpu_that_is_too_small_for_every_model_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"tp: even hidden 512 needs more than the 3.0 GB of a GPU"):
        points(["tp"], 8, "cuda", 3e9)
