"""The benchmarks' rule of honesty: order, ratios, rejection, what is written and what the document says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import harness
import other_work
import provenance
import pytest
import table

from labkit.launch import run

THREE = {"ours": [1.0, 1.1, 1.0], "peer": [2.0, 2.2, 2.5]}
QUIET = {name: seconds * 5 for name, seconds in THREE.items()}


def test_alternatives_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(other_work, "UNCERTAIN", 0.0)
    found = harness.interleave(
        "x", {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repetitions=15, warmup=2
    )
    assert "".join(calls) == "ab" * 17
    assert {name: len(seconds) for name, seconds in found.seconds.items()} == {"a": 15, "b": 15}


def test_the_ratio_is_the_median_of_neighbours() -> None:
    # 1/2, 1.1/2.2, 1/2.5: the median of ratios, not the ratio of medians 1.0/2.2
    assert harness.Comparison("x", THREE).ratio("peer") == 0.5


@pytest.mark.parametrize(
    ("seconds", "others", "reason"),
    [
        (QUIET, 0.03, None),
        (QUIET, None, None),  # no Linux: the noise alone must tell
        ({"ours": [1.0, 1.4, 1.5], "peer": [2.0, 2.0, 2.0]}, 0.03, "ours median/min 1.40"),
        ({"ours": [1.0, 1.0, 1.0], "peer": [2.0, 3.0, 3.0]}, 0.03, "peer median/min 1.50"),
        (QUIET, 0.2, None),
        (QUIET, 0.21, "others kept 0.21 cores busy"),
    ],
)
def test_a_noisy_run_is_rejected_and_stored_without_times(
    seconds: dict, others: float | None, reason: str | None
) -> None:
    found = harness.Comparison("x", seconds, others=others, facts={"bytes": 7})
    row = found.row()
    assert row["bytes"] == 7
    if reason is None:
        assert found.rejected is None
        assert row["median_ms"]["ours"] == 1000.0
    else:
        assert row["rejected"].startswith("rejected: noisy") and reason in row["rejected"]
        assert "median_ms" not in row and "ratio_to" not in row


def test_a_benchmark_may_find_the_machine_unfit_itself() -> None:
    row = harness.Comparison("x", QUIET, unfit="bare message 400 us, limit 200").row()
    assert row["rejected"] == "rejected: noisy (bare message 400 us, limit 200)" and "median_ms" not in row


def test_few_repetitions_are_not_quoted() -> None:
    few = {name: seconds[:14] for name, seconds in QUIET.items()}
    row = harness.Comparison("x", few).row()
    assert row["rejected"] == "rejected: 14 repetitions, at least 15 needed"
    assert "median_ms" not in row and "ratio_to" not in row


def test_a_rejected_measurement_is_repeated_until_one_is_quiet() -> None:
    found = [harness.Comparison("x", QUIET, others) for others in (1.9, 0.8, 0.1, 0.2)]
    assert harness.until_quiet(iter(found).__next__, pause=0.0) is found[2]
    assert harness.until_quiet(iter(found).__next__, attempts=2, pause=0.0) is found[1], "still rejected, and said so"


def others_of_ranks_that_work() -> float | None:
    others, until = other_work.OtherWork(), time.monotonic() + 1.0
    while time.monotonic() < until:
        pass
    with_all = others.cores(across_ranks=True)
    alone = others.cores()
    assert with_all is not None and alone is not None
    return alone - with_all


def test_a_rank_is_no_other_process() -> None:
    """Each of two ranks that work counts the other as a stranger, unless it asks across ranks."""
    assert min(run(others_of_ranks_that_work, 2)) > 0.02


def slow_on_rank_one() -> dict[str, list[float]]:
    from labkit.launch import rank_info

    pause = 0.02 * rank_info().rank
    return harness.interleave("x", {"a": lambda: time.sleep(pause)}, repetitions=3, warmup=0, across_ranks=True).seconds


def test_across_ranks_the_slowest_counts() -> None:
    zero, one = run(slow_on_rank_one, 2)
    assert zero == one
    assert min(zero["a"]) >= 0.02


def test_report_and_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(table, "main", lambda: print("document rewritten"))
    (tmp_path / "benchmarks").mkdir()
    good = harness.Comparison("good", QUIET, others=0.012)
    busy = harness.Comparison("busy", QUIET, others=2.4, max_others=3.0)
    bad = harness.Comparison("bad", QUIET, others=9.0)
    harness.report(
        "demo", [good, busy, bad], title="Demo", rows=[{"case": "counted", "bytes": 12345}], notes=["A note."]
    )
    printed = capsys.readouterr().out
    assert "not to be quoted" in printed and "document rewritten" in printed
    stored = json.loads((harness.RESULTS / "demo.json").read_text())
    assert [row["case"] for row in stored["rows"]] == ["good", "busy", "bad", "counted"]
    assert stored["machine"].keys() <= {"processor", "cores", "memory_gib", "python", "torch", "gpu", "gpus", "cuda"}
    assert stored["commit"] == provenance.code(provenance.ROOT)[0] and isinstance(stored["changed"], list)
    text = table.document(harness.RESULTS)
    assert "| good | ours 1,000, peer 2,200 | 0.50 of peer |  |" in text
    assert "| bad | rejected: noisy (others kept 9.00 cores busy) |" in text
    assert "- Other processes kept at most 2.4 cores busy, limit 0.2 or 3." in text, "of what is quoted, as stored"
    assert "bytes 12,345" in text and "- A note.\n" in text
    assert "Never run on a GPU" in text  # no gpu.json


def write_proc(folder: Path, idle: tuple[int, int], work: dict[str, int]) -> None:
    """A /proc with two cores, and processes by "number parent" with their ticks of work."""
    cores = "".join(f"cpu{core} 7 0 7 {ticks} 5 0 0 0 0 0\n" for core, ticks in enumerate(idle))
    (folder / "stat").write_text(f"cpu 0 0 0 0 0\n{cores}intr 1 2\n")
    for words, ticks in work.items():
        number, parent = words.split()
        (folder / number).mkdir(exist_ok=True)
        (folder / number / "stat").write_text(f"{number} (a (b) c) S {parent} {'0 ' * 9}{ticks} 1 2 3 20 0\n")


def test_others_are_who_is_neither_this_process_nor_its_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # in 10 s the two cores are idle for 4 + 3 s, so busy for 13; this process and its grandchild work 5 + 6 of them
    clock = iter([0.0, 10.0, 10.0])
    monkeypatch.setattr(other_work, "PROC", tmp_path)
    monkeypatch.setattr(other_work.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(other_work.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(other_work.os, "sysconf", lambda _: 100)
    monkeypatch.setattr(other_work.os, "getpid", lambda: 20)
    write_proc(tmp_path, (1000, 1000), {"1 0": 5, "20 1": 40, "21 20": 0, "30 21": 70, "40 1": 10})
    others = other_work.OtherWork()
    write_proc(tmp_path, (1400, 1300), {"1 0": 5, "20 1": 540, "21 20": 0, "30 21": 670, "40 1": 190})
    assert others.cores() == pytest.approx((13 - 11) / 10)


def test_where_there_is_no_proc_nobody_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(other_work, "PROC", tmp_path)
    assert other_work.OtherWork().cores() is None


def test_the_committed_document_is_what_the_results_say() -> None:
    assert table.DOCUMENT.read_text() == table.document(), "run python benchmarks/table.py"


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"title": "Half"')
    with pytest.raises(ValueError, match=r"half\.json is not a benchmark result"):
        table.document(tmp_path)
