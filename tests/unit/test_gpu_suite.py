"""The GPU suite loses nothing: parts that crash, hang and fail, kills at any time, runs again, code that changes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HUNG = (
    "import subprocess, sys, time; print('hanging', flush=True); subprocess.Popen([sys.executable, '-c', 'import time; \
time.sleep(600)'], start_new_session=True); time.sleep(600)"
)


@pytest.fixture
def script(load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("gpu_suite")


def part(name: str, code: str, phase: int = 1, seconds: float = 60, **more: Any) -> dict[str, Any]:
    """A part that runs a line of Python."""
    return {"name": name, "phase": phase, "seconds": seconds, "command": ["python", "-c", code], **more}


TORCH = """
import os
__version__ = "2.11.0"
class version: cuda = "13.0"
class cuda:
    is_available = lambda: "STUB_GPU" in os.environ
    get_device_name = lambda: os.environ["STUB_GPU"]
    device_count = lambda: 1
"""
"""Stands in for torch where the suite asks for versions: torch itself takes seconds to import."""


class Suite:
    """The suite on a table of its own, with its memory and results in `folder`."""

    def __init__(self, folder: Path, parts: list[dict[str, Any]]) -> None:
        self.folder, self.memory, self.out = folder, folder / "memory", folder / "out"
        self.gpu = False
        (folder / "parts.json").write_text(json.dumps(parts))
        (folder / "torch.py").write_text(TORCH)

    def words(self, phase: str = "1", *more: str) -> list[str]:
        table, memory = str(self.folder / "parts.json"), str(self.memory)
        return [str(ROOT / "scripts" / "gpu_suite.sh"), phase, "--parts", table, "--memory", memory, *more]

    def environment(self) -> dict[str, str]:
        own = {"PYTHON": sys.executable, "OUT": str(self.out), "PYTHONPATH": str(self.folder)}
        return os.environ | own | ({"STUB_GPU": "NVIDIA Stub"} if self.gpu else {})

    def run(self, phase: str = "1", *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(phase, *more),
            env=self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, phase: str = "1") -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(phase), env=self.environment(), stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )

    def summary(self, phase: int = 1) -> str:
        return (self.out / f"phase{phase}.txt").read_text()

    def outcomes(self, phase: int = 1) -> dict[str, str]:
        """By part, from the JUnit report."""
        found = {}
        for suite in ElementTree.parse(self.out / f"phase{phase}.xml").getroot():
            bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = suite.get("skipped") == suite.get("tests")
            found[suite.get("name", "")] = "failed" if bad else "skipped" if skipped else "passed"
        return found


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def alive(mark: str) -> list[str]:
    """Command lines of processes whose text holds the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in text and "gpu_suite" not in text:
            found.append(text)
    return found


def test_one_crashes_one_hangs_one_raises_without_text_and_all_others_are_there(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "def test_yaml(): raise ModuleNotFoundError('no', name='yaml')\n"
        "def test_own(): pytest.skip('needs papermill: not here')\n"
    )
    suite = Suite(
        tmp_path,
        [
            part("crash", "import os; print('about to'); os.kill(os.getpid(), 11)"),
            part("hang", HUNG + f"  # {tmp_path}", seconds=1.5),
            part("textless", "raise RuntimeError"),
            {"name": "no program", "phase": 1, "seconds": 60, "command": ["there-is-no-such-program"]},
            part("cannot", "print('needs a GPU: none here'); raise SystemExit(77)"),
            {"name": "tests", "phase": 1, "seconds": 60, "test": str(tmp_path / "test_some.py")},
            {"name": "half", "phase": 1, "seconds": 60, "benchmark": "fake:rows"},
            {"name": "useless", "phase": 1, "seconds": 60, "benchmark": "fake:useless"},
            {"name": "good", "phase": 1, "seconds": 60, "benchmark": "fake:good"},
            part("last", "print('fine')"),
            part("elsewhere", "print('fine')", phase=2),
        ],
    )
    (tmp_path / "fake.py").write_text(
        "def rows():\n    yield {'case': 'first'}\n    raise RuntimeError\n"
        "def useless():\n    yield {'case': 'G9: noisy', 'rejected': 'noisy (load 9)'}\n"
        "def good():\n    yield {'case': 'G8', 'median_ms': {'labkit': 2.5, 'peer': 5.0}, 'ratio_to': {'peer': 0.5}}\n"
        "    yield {'case': 'G8: torch', 'could_not_run': 'OSError'}\n"
    )
    done = suite.run()
    assert done.returncode == 1
    failed = dict.fromkeys(["crash", "hang", "textless", "no program", "tests", "half", "useless"], "failed")
    assert suite.outcomes() == failed | {"cannot": "skipped", "good": "passed", "last": "passed"}
    text = suite.summary()
    assert text in done.stdout
    for told in (
        "== crash: crashed, killed by SIGSEGV", "   about to", "== hang: too long, ended after 2 s", "   hanging",
        "== textless: failed, exit code 1, RuntimeError", "No GPU: nothing that needs one was measured",
        "tests (1 passed, 1 failed, 2 skipped)", "   1  needs papermill", "   1  needs PyYAML", "   1  needs a GPU\n",
        "half (1 failed, 1 rows)", "Phase 1: 1 crashed, 1 too long, 5 failed, 1 skipped, 2 passed",
        "useless (1 failed, 1 rows, 1 of them without a number)", "== useless: failed, it measured nothing that counts",
        "  G8: labkit 2.5 ms, 0.50 of peer\n", "  G8: torch: could not run, OSError\n",
        "Failed parts run again by scripts/gpu_suite.sh 1.\nNext: scripts/gpu_suite.sh 2.\n",
    ):  # fmt: skip
        assert told in text, told
    assert "assert 1 == 2" in text, "the last lines of a failed test"
    row, *others = map(json.loads, (suite.out / "rows.jsonl").read_text().splitlines())
    assert len(others) == 3 and row["row"] == {"case": "first"} and row["part"] == "fake:rows", (
        "measured before the error"
    )
    assert "== last: passed\nfine" in (suite.out / "phase1.log").read_text()
    assert len(list(suite.out.iterdir())) <= 8 and all(path.is_file() for path in suite.out.iterdir())
    assert not alive(str(tmp_path)) and not alive("time.sleep(600)"), (
        "a child in a session of its own outlived its part"
    )
    assert not (tmp_path / "memory-running").exists()


def test_what_passed_is_not_run_again_and_is_found_in_a_new_folder(tmp_path: Path) -> None:
    counted = "open(r'{}', 'a').write('x'); {}"
    good, bad = tmp_path / "good", tmp_path / "bad"
    suite = Suite(
        tmp_path,
        [
            part("good", counted.format(good, "")),
            part(
                "bad",
                counted.format(bad, f"raise SystemExit(not __import__('os').path.exists(r'{tmp_path / 'mended'}'))"),
            ),
        ],
    )
    assert suite.run().returncode == 1
    suite.out = tmp_path / "another"
    assert suite.run().returncode == 1
    assert (good.read_text(), bad.read_text()) == ("x", "xx")
    assert suite.outcomes() == {"good": "passed", "bad": "failed"}, "the new folder tells what the old one told"
    assert "good (1 passed; earlier, not run again)" in suite.summary()
    assert suite.run("3").returncode == 1 and list(suite.outcomes(3)) == ["bad"], "phase 3 repeats what phase 1 broke"
    (tmp_path / "mended").touch()
    assert suite.run("3").returncode == 3, "all that ran has passed, but there is no GPU"
    assert (good.read_text(), bad.read_text()) == ("x", "xxxx")
    assert suite.run().returncode == 3 and "bad (1 passed; earlier" in suite.summary()
    suite.gpu = True
    assert suite.run().returncode == 0 and "gpu: NVIDIA Stub" in suite.summary()
    assert (good.read_text(), bad.read_text()) == ("xx", "xxxxx"), "what passed on another machine counts for nothing"


def test_code_that_changed_is_run_again(tmp_path: Path) -> None:
    read = tmp_path / "read.py"
    read.write_text("one")
    suite = Suite(tmp_path, [part("a", "print(1)", files=[str(read)]), part("b", "print(1)")])
    suite.run()
    read.write_text("two")
    suite.run()
    assert "a (1 passed)" in suite.summary() and "b (1 passed; earlier" in suite.summary()
    suite.run("1", "--only", "b")
    assert "b (1 passed)" in suite.summary() and "a (1 passed; earlier" in suite.summary(), "asked for by name"


def test_rows_outlive_code_that_changed_another_table_and_a_kill(tmp_path: Path) -> None:
    (tmp_path / "fake.py").write_text(
        "import os, time\ndef rows():\n    yield {'case': 'one'}\n"
        f"    time.sleep(0 if os.path.exists(r'{tmp_path / 'quick'}') else 600)\n    yield {{'case': 'two'}}\n"
    )
    benchmark = {"name": "slow", "phase": 1, "seconds": 600, "benchmark": "fake:rows"}
    suite = Suite(tmp_path, [benchmark])
    process = suite.start()
    until(lambda: (suite.memory / "rows.jsonl").exists())
    process.kill()
    process.wait()
    (tmp_path / "quick").touch()
    assert suite.run().returncode == 3
    suite = Suite(tmp_path, [part("other", "print(1)")])
    suite.run()
    cases = [json.loads(text)["row"]["case"] for text in (suite.out / "rows.jsonl").read_text().splitlines()]
    assert cases == ["one", "one", "two"]


def test_leftovers_of_a_killed_suite_are_ended_by_the_next(tmp_path: Path) -> None:
    orphan = f"{sys.executable} -c import time; time.sleep(600)"
    suite = Suite(tmp_path, [part("a", HUNG + f"  # {tmp_path}")])
    process = suite.start()
    until(lambda: len(alive(str(tmp_path))) == 1 and alive(orphan))
    process.kill()
    process.wait()
    assert alive(orphan), "in a session of its own"
    Suite(tmp_path, [part("b", "print(1)")]).run()
    assert not alive(orphan)


def test_without_torch_nothing_starts(tmp_path: Path) -> None:
    suite = Suite(tmp_path, [part("a", "print(1)")])
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    done = suite.run()
    assert done.returncode == 2 and "cannot import torch: ImportError: broken; choose another: PYTHON=" in done.stderr
    (tmp_path / "file").touch()
    suite.out = tmp_path / "file"
    done = suite.run()
    assert done.returncode == 2 and "cannot write results: " in done.stderr


def test_time_is_bounded(tmp_path: Path) -> None:
    """No part starts late, one that started in time is cut when the phase is over, and the next run begins with what
    never ran."""
    slow = f"import time, os; time.sleep(0 if os.path.exists(r'{tmp_path / 'quick'}') else 600)"
    parts = [part("bad", "raise SystemExit(1)"), part("cut", slow), part("late", "print(1)")]
    suite = Suite(tmp_path, parts)
    began = time.monotonic()
    done = suite.run("1", "--start-within", "6", "--end-within", "7")
    assert time.monotonic() - began < 60
    cut = re.search(r"  cut off +[\d.]+ s  cut ", suite.summary())
    assert done.returncode == 1 and cut is not None and "not started            late" in suite.summary()
    assert suite.outcomes() == {"bad": "failed", "cut": "skipped"}
    assert "Next: scripts/gpu_suite.sh 1 again; 2 parts have not run to their end." in suite.summary()
    (tmp_path / "quick").touch()
    started = re.findall(r"^start, at most \d+ s: (\w+)$", suite.run().stdout, re.MULTILINE)
    assert started == ["late", "cut", "bad"]
    suite = Suite(tmp_path, [part("never", "print(1)")])
    assert suite.run("1", "--start-within", "0").returncode == 3, "nothing failed, and not all was done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_suite_ends_its_part_and_keeps_what_ended(tmp_path: Path, number: signal.Signals) -> None:
    suite = Suite(
        tmp_path, [part("first", "print(1)"), part("second", HUNG + f"  # {tmp_path}"), part("third", "print(1)")]
    )
    process = suite.start()
    until(lambda: alive(str(tmp_path)))
    time.sleep(0.5)  # a part that has begun this moment is not yet in the suite's books
    process.send_signal(number)
    assert process.wait(30) == 130
    assert suite.outcomes() == {"first": "passed", "second": "failed"} and not alive(str(tmp_path))
    assert "not started            third" in suite.summary()


def test_a_suite_that_is_killed_loses_nothing_that_ended(tmp_path: Path) -> None:
    good = tmp_path / "good"
    parts = [
        part("first", f"open(r'{good}', 'a').write('x')"),
        part("second", f"import time; time.sleep(600)  # {tmp_path}"),
    ]
    suite = Suite(tmp_path, parts)
    process = suite.start()
    until(lambda: alive(str(tmp_path)) and suite.out.exists() and "first" in suite.outcomes())
    process.kill()
    process.wait()
    until(lambda: not alive(str(tmp_path)), 10)  # its part ends with it
    assert suite.outcomes() == {"first": "passed"}
    with (suite.memory / "memory.jsonl").open("a") as file:
        file.write('{"part": "second", "pha')  # as if it had been killed while it wrote
    Suite(tmp_path, [parts[0], part("second", "print(1)")])
    assert suite.run().returncode == 3
    assert suite.outcomes() == {"first": "passed", "second": "passed"} and good.read_text() == "x"
    assert suite.run().returncode == 3 and "second (1 passed; earlier" in suite.summary()


def test_a_report_that_a_kill_cut_off_counts_for_nothing(script: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "junit"
    assert script.whole_report(report) == ""
    for text, expected in (("", ""), ("<testsuites><testsuite tests='1'", ""), ("<testsuites/>", "<testsuites/>")):
        report.write_text(text)
        assert script.whole_report(report) == expected


def test_neighbours_run_together_and_others_alone(tmp_path: Path) -> None:
    stamp = f"import time, pathlib; p = pathlib.Path(r'{tmp_path}') / 'NAME'; p.touch(); time.sleep(1.5); p.unlink(); "
    alone = f"import pathlib; assert not list(pathlib.Path(r'{tmp_path}').glob('t?'))"
    met = f"assert list(pathlib.Path(r'{tmp_path}').glob('t?')), 'no neighbour'"
    first = stamp.replace("NAME", "t1").replace("time.sleep(1.5); ", f"time.sleep(1.5); {met}; ")
    parts = [part("t1", first, together=True), part("t2", stamp.replace("NAME", "t2") + "time.sleep(1)", together=True)]
    suite = Suite(tmp_path, [*parts, part("alone", alone)])
    assert suite.run("1", "--jobs", "2").returncode == 3, suite.summary()


def test_a_second_suite_beside_the_first_and_a_wrong_table_are_refused(tmp_path: Path) -> None:
    suite = Suite(tmp_path, [part("slow", f"import time; time.sleep(600)  # {tmp_path}")])
    process = suite.start()
    until(lambda: alive(str(tmp_path)))
    done = suite.run()
    process.terminate()
    process.wait(30)
    assert done.returncode == 2 and "another suite is at work" in done.stderr
    for entry, told in (
        ({"name": "a", "phase": 1, "seconds": 1}, "give one of test, benchmark, command"),
        ({"name": "a", "phase": 4, "seconds": 1, "test": "x"}, "phase is 1, 2 or 3"),
        ({"name": "a", "phase": 1, "seconds": 1, "tset": "x"}, "tset"),
        ({"name": "a", "phase": 1, "seconds": "5", "test": "x"}, "seconds are a number"),
    ):
        done = Suite(tmp_path, [entry]).run()
        assert done.returncode == 2 and told in done.stderr, done.stderr
    done = Suite(tmp_path, [part("a", "1"), part("a", "2")]).run()
    assert done.returncode == 2 and "'a' is given twice" in done.stderr


def test_a_missing_package_is_found_in_an_error_of_this_process_and_of_a_rank(script: ModuleType) -> None:
    from gpu_missing_packages import missing

    assert missing("E   ModuleNotFoundError: No module named 'yaml'") == "PyYAML"
    assert (
        missing("rank 0 of 4 raised ModuleNotFoundError: YAML needs PyYAML (pip install PyYAML); or\nothers")
        == "PyYAML"
    )
    assert missing("ModuleNotFoundError: No module named 'labkit.typo'") is None, "our own mistake stays one"
    assert missing("ImportError: cannot import name 'x' from 'yaml'") is None


# ---- the real table ----


@pytest.fixture
def table(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gpu_parts")


def test_the_table_holds_every_gpu_test_and_every_benchmark_part(table: ModuleType) -> None:
    parts = table.read_parts(ROOT / "scripts" / "gpu_parts.json")
    assert {one.benchmark for one in parts if one.benchmark} == set(table.benchmark_table()), "gpu.py --list"
    by_file: dict[str, list[str]] = {}
    for one in parts:
        if one.test.startswith("tests/gpu/") and "::" not in one.test:
            by_file.setdefault(one.test, []).append(one.select)
    present = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    smoke = "tests/gpu/test_smoke_gpu.py"
    assert set(by_file) == present - {smoke}
    for file, selected in by_file.items():
        chosen = sorted(selected)
        assert chosen == [""] or (len(chosen) == 2 and f"not ({chosen[1]})" == chosen[0]), f"{file}: a test is left out"
    tests = [
        line.split("(")[0].removeprefix("def ")
        for line in (ROOT / smoke).read_text().splitlines()
        if line[:8] == "def test"
    ]
    assert {one.test.partition("::")[2] for one in parts if one.test.startswith(smoke)} == set(tests)
    assert all((ROOT / one.test.split("::")[0]).is_file() for one in parts if one.test)


def test_a_key_follows_what_a_part_imports_and_the_versions(table: ModuleType, tmp_path: Path, monkeypatch) -> None:
    files = table.sources([ROOT / "tests" / "gpu" / "test_graph_rules_gpu.py"])
    assert {ROOT / "tests" / "graph_rules.py", ROOT / "tests" / "graph_rules_numbers.py"} <= files
    files = table.sources([ROOT / "benchmarks" / "gpu_precision.py"])
    assert {ROOT / "benchmarks" / f"{name}.py" for name in ("gpu_steps", "harness")} <= files
    assert ROOT / "benchmarks" / "pipeline.py" not in files, "labkit.train.pipeline is another"
    one = table.Part("a", 1, 60, test="tests/gpu/test_random_gpu.py")
    before = one.key("torch 2.11")
    assert before == table.Part("b", 2, 90, test="tests/gpu/test_random_gpu.py").key("torch 2.11")
    assert before != one.key("torch 2.13")
    assert before != table.Part("a", 1, 60, test="tests/gpu/test_moe_gpu.py").key("torch 2.11")
    monkeypatch.setattr(table, "package_digest", lambda: "labkit changed")
    assert before != one.key("torch 2.11")
