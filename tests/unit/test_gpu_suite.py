"""The GPU suite loses nothing: parts that crash, hang and fail, kills at any time, runs again, code that changes."""

from __future__ import annotations

import ast
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


def part(name: str, code: str, estimate: float = 1, **more: Any) -> dict[str, Any]:
    """A part that runs a line of Python."""
    return {"name": name, "estimate": estimate, "command": ["python", "-c", code], **more}


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
    """The suite with a plan of its own, in `folder`: results in `results`, copied to `out`."""

    def __init__(self, folder: Path, parts: list[dict[str, Any]]) -> None:
        self.folder, self.results, self.out = folder, folder / "results", folder / "out"
        self.gpu = False
        (folder / "plan.json").write_text(json.dumps(parts))
        (folder / "torch.py").write_text(TORCH)

    def words(self, *more: str) -> list[str]:
        plan = str(self.folder / "plan.json")
        return [
            str(ROOT / "scripts" / "gpu_suite.sh"),
            "--plan",
            plan,
            "--out",
            str(self.results),
            "--without-gpu",
            *more,
        ]

    def environment(self) -> dict[str, str]:
        own = {"PYTHON": sys.executable, "OUT": str(self.out), "PYTHONPATH": str(self.folder)}
        own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a bare machine has none, and importing those here takes seconds
        return os.environ | own | ({"STUB_GPU": "NVIDIA Stub"} if self.gpu else {})

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*more), env=self.environment(), cwd=self.folder, capture_output=True, text=True, timeout=120
        )

    def started(self, *more: str) -> list[str]:
        """Names of the parts that a run starts, in order."""
        return re.findall(r"^start, at most \d+ s: (.+)$", self.run(*more).stdout, re.MULTILINE)

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(), env=self.environment(), stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )

    def summary(self) -> str:
        return (self.out / "summary.txt").read_text()

    def cases(self, name: str) -> dict[str, str]:
        """Outcomes of a part's tests, from the JUnit report."""
        [suite] = [one for one in ElementTree.parse(self.out / "junit.xml").getroot() if one.get("name") == name]
        kinds = {"failure": "failed", "skipped": "skipped"}
        return {case.get("name", ""): next((kinds[one.tag] for one in case), "passed") for case in suite}

    def outcomes(self) -> dict[str, str]:
        """By part, from the JUnit report."""
        found = {}
        for suite in ElementTree.parse(self.out / "junit.xml").getroot():
            skipped = suite.get("skipped") == suite.get("tests")
            bad = int(suite.get("failures", 0))
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
        "def test_pytest():\n    import subprocess, sys\n"
        "    words = [sys.executable, '-m', 'pytest', __file__, '-k', 'yaml', '-p', 'gpu_outcomes']\n"
        "    assert subprocess.run(words).returncode == 1\n"
    )
    (tmp_path / "test_broken.py").write_text("import labkit.there_is_no_such_module\n")
    suite = Suite(
        tmp_path,
        [
            part("crash", "import os; print('about to'); os.kill(os.getpid(), 11)"),
            part("hang", HUNG + f"  # {tmp_path}", limit=1.5),
            part("textless", "raise RuntimeError"),
            {"name": "no program", "estimate": 1, "command": ["there-is-no-such-program"]},
            part("cannot", "print('needs a GPU: none here'); raise SystemExit(77)"),
            {"name": "tests", "estimate": 5, "tests": [str(tmp_path / "test_some.py")]},
            {"name": "no tests", "estimate": 5, "tests": [str(tmp_path / "test_broken.py")]},
            {"name": "half", "estimate": 5, "benchmark": "fake:rows"},
            {"name": "useless", "estimate": 5, "benchmark": "fake:useless"},
            {"name": "good", "estimate": 5, "benchmark": "fake:good"},
            part("last", "import os; print(os.environ['SAID'])", env={"SAID": "fine"}),
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
    failed = dict.fromkeys(
        ["crash", "hang", "textless", "no program", "tests", "no tests", "half", "useless"], "failed"
    )
    assert suite.outcomes() == failed | {"cannot": "skipped", "good": "passed", "last": "passed"}
    tests = {name.split("::")[-1]: outcome for name, outcome in suite.cases("tests").items()}
    assert tests == {
        "test_good": "passed", "test_bad": "failed", "test_yaml": "skipped", "test_own": "skipped",
        "test_pytest": "passed",  # whose own pytest, where test_yaml fails, writes no outcome
    }  # fmt: skip
    text = suite.summary()
    assert text in done.stdout
    for told in (
        "== crash: crashed, killed by SIGSEGV", "   about to", "== hang: too long, ended after 2 s", "   hanging",
        "== textless: failed, exit code 1, RuntimeError", "No GPU: nothing that needs one was measured",
        "tests (2 passed, 1 failed, 2 skipped)", "   1  needs papermill", "   1  needs PyYAML", "   1  needs a GPU\n",
        "half (1 failed, 1 rows)", "1 crashed, 1 too long, 6 failed, 1 skipped, 2 passed",
        "useless (1 failed, 1 rows, 1 of them without a number)", "== useless: failed, it measured nothing that counts",
        "  G8: labkit 2.5 ms, 0.50 of peer\n", "  G8: torch: could not run, OSError\n",
        f"Failed parts run again by: scripts/gpu_suite.sh --out {suite.results} --plan {tmp_path / 'plan.json'}\n",
    ):  # fmt: skip
        assert told in text, told
    assert "assert 1 == 2" in text, "the last lines of a failed test"
    row, *others = map(json.loads, (suite.out / "rows.jsonl").read_text().splitlines())
    assert len(others) == 3 and row["row"] == {"case": "first"} and row["part"] == "fake:rows", (
        "measured before the error"
    )
    assert "== last: passed\nfine" in (suite.out / "log.txt").read_text()
    names = {"summary.txt", "junit.xml", "log.txt", "rows.jsonl", "memory.jsonl"}
    assert {path.name for path in suite.out.iterdir()} == {path.name for path in suite.results.iterdir()} == names
    assert not alive(str(tmp_path)) and not alive("time.sleep(600)"), (
        "a child in a session of its own outlived its part"
    )
    assert not (tmp_path / "results-running").exists()


KILLED = """
import os, pytest
def test_good(): pass
@pytest.fixture
def broken(): raise RuntimeError("in a fixture")
def test_fixture(broken): pass
def test_ends_it(): os._exit(3)
def test_never(): pass
"""


def test_a_part_that_ends_in_the_middle_leaves_its_tests_and_the_name_of_the_one_that_ran(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(KILLED)
    suite = Suite(tmp_path, [{"name": "a", "estimate": 60, "tests": [str(tmp_path / "test_some.py")]}])
    assert suite.run().returncode == 1 and "== a: failed, exit code 3" in suite.summary()
    assert {name.split("::")[-1]: outcome for name, outcome in suite.cases("a").items()} == {
        "test_good": "passed", "test_fixture": "failed", "test_ends_it": "failed",
    }  # fmt: skip
    text = (suite.out / "junit.xml").read_text()
    assert "was running: " in text and "RuntimeError: in a fixture" in text


def test_what_passed_is_not_run_again_and_goes_along_to_a_new_folder(tmp_path: Path) -> None:
    counted = "open(r'{}', 'a').write('x'); {}"
    good, bad = tmp_path / "good", tmp_path / "bad"
    mended = f"raise SystemExit(not __import__('os').path.exists(r'{tmp_path / 'mended'}'))"
    (tmp_path / "fake.py").write_text("def rows():\n    yield {'case': 'one'}\n")
    suite = Suite(
        tmp_path,
        [
            part("good", counted.format(good, "")),
            part("bad", counted.format(bad, mended)),
            {"name": "rows", "estimate": 5, "benchmark": "fake:rows"},
        ],
    )
    assert suite.run().returncode == 1
    first, suite.results, suite.out = suite.out, tmp_path / "another", tmp_path / "another out"
    for _ in range(2):
        assert suite.run("--after", str(first)).returncode == 1
    assert (good.read_text(), bad.read_text()) == ("x", "xxx")
    assert suite.outcomes() == {"good": "passed", "bad": "failed", "rows": "passed"}
    assert "\nMeasured:\n  one: \n" in suite.summary() and not (suite.out / "rows.jsonl").exists(), "they stay there"
    assert "good (1 passed; earlier, not run again)" in suite.summary()
    (tmp_path / "mended").touch()
    assert suite.run().returncode == 3, "all that ran has passed, but there is no GPU"
    assert (good.read_text(), bad.read_text()) == ("x", "xxxx")
    assert suite.run().returncode == 3 and "bad (1 passed; earlier" in suite.summary()
    suite.gpu = True
    assert suite.run().returncode == 0 and "gpu: NVIDIA Stub" in suite.summary()
    assert (good.read_text(), bad.read_text()) == ("xx", "xxxxx"), "what passed on another machine counts for nothing"
    done = suite.run("--after", str(tmp_path / "nowhere"))
    assert done.returncode == 0 and "nowhere holds no memory.jsonl of an earlier command" in done.stdout


def test_code_that_changed_is_run_again_after_what_never_ran(tmp_path: Path) -> None:
    read = tmp_path / "read.py"
    read.write_text("one")
    parts = [part("a", "print(1)", files=[str(read)]), part("b", "print(1)"), part("bad", "raise SystemExit(1)")]
    suite = Suite(tmp_path, parts)
    assert suite.started() == ["a", "b", "bad"]
    read.write_text("two")
    Suite(tmp_path, [*parts, part("new", "print(1)")])
    assert suite.started() == ["new", "a", "bad"]
    assert "a (1 passed)" in suite.summary() and "b (1 passed; earlier" in suite.summary()
    assert suite.started("--only", "b") == ["b"], "asked for by name"
    assert "a (1 passed; earlier" in suite.summary()
    assert suite.started("--only", "ba") == ["bad"], "and by a piece of it"
    done = suite.run("--only", "nosuch")
    assert done.returncode == 2 and "'nosuch': no part's name holds this; --list prints names" in done.stderr


def test_a_gate_in_which_nothing_passes_ends_the_command(tmp_path: Path) -> None:
    file = tmp_path / "test_gate.py"
    file.write_text("def test_one(): assert False\ndef test_two(): assert False\n")
    suite = Suite(tmp_path, [{"name": "gate", "estimate": 5, "tests": [str(file)], "gate": True}, part("other", "")])
    suite.gpu = True
    done = suite.run()
    assert done.returncode == 1 and "nothing passes in gate, so nothing else runs" in done.stdout
    assert suite.outcomes() == {"gate": "failed"} and re.search("not started +1  other", suite.summary())
    assert suite.started("--only", "other") == ["other"]
    file.write_text("def test_one(): assert False\ndef test_two(): pass\n")
    Suite(tmp_path, [{"name": "gate", "estimate": 5, "tests": [str(file)], "gate": True}, part("more", "")])
    assert suite.started() == ["gate", "more"], "half of a machine is worth its minutes"


def test_without_a_gpu_no_part_starts_unless_asked(tmp_path: Path) -> None:
    suite = Suite(tmp_path, [part("a", "print(1)")])
    words = [word for word in suite.words() if word != "--without-gpu"]
    done = subprocess.run(words, env=suite.environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "torch sees no GPU" in done.stdout and "start, at most" not in done.stdout


def test_minutes_bound_a_command_and_all_of_them(tmp_path: Path) -> None:
    """No part starts that does not fit, a shorter one takes its place, one that takes longer is cut when the time is
    over, and the next command begins with what never ran."""
    quick = tmp_path / "quick"
    slow = f"import time, os; time.sleep(0 if os.path.exists(r'{quick}') else 600)"
    parts = [part("bad", "raise SystemExit(1)"), part("long", "print(1)", 100), part("cut", slow), part("late", "")]
    suite = Suite(tmp_path, parts)
    began = time.monotonic()
    done = suite.run("--minutes", "2.5", "--per-command", "0.4")
    assert time.monotonic() - began < 60
    assert done.returncode == 1 and suite.outcomes() == {"bad": "failed", "cut": "skipped"}
    assert re.search(r"  cut off +[\d.]+ +1  cut ", suite.summary())
    assert re.search(r"  not started +100  long\n  cut off .*\n  not started +1  late\n", suite.summary())
    assert re.search(
        r"Commands have taken 0\.\d of 2\.5 minutes\.\nNext: .*--minutes 2\.5 --per-command 0\.4 ", done.stdout
    )
    quick.touch()
    assert suite.started("--minutes", "2.5") == ["long", "late", "cut", "bad"]
    done = suite.run("--minutes", "0.3")
    assert done.returncode == 2 and "of --minutes 0.3, and --per-command is 10; give more" in done.stderr
    assert suite.started("--per-command", "0.2") == [], "not even the margin"


def test_the_list_tells_what_fits_and_what_has_passed(tmp_path: Path) -> None:
    tests = [{"name": f"t{i}", "estimate": 30, "tests": ["x.py"]} for i in range(3)]
    suite = Suite(tmp_path, [part("done", "print(1)"), *tests, part("alone", "", 20), part("never", "", 500)])
    text = suite.run("--list", "--minutes", "3", "--per-command", "2", "--jobs", "2").stdout
    assert [line.split() for line in text.splitlines() if line.startswith("  ")] == [
        ["15", "1", "done"], ["16", "30", "t0"], ["16", "30", "t1"], ["46", "30", "t2"], ["76", "20", "alone"],
    ]  # fmt: skip
    assert text.startswith("Command 1, about 96 s") and text.endswith("Left out: never\n")
    assert not suite.results.exists()
    suite.run("--only", "done")
    assert " done\n" not in suite.run("--list").stdout


def test_an_interrupted_suite_ends_its_part_and_keeps_what_ended(tmp_path: Path) -> None:
    """By the end of its connection, say."""
    suite = Suite(
        tmp_path, [part("first", "print(1)"), part("second", HUNG + f"  # {tmp_path}"), part("third", "print(1)")]
    )
    process = suite.start()
    until(lambda: alive(str(tmp_path)))
    beside = suite.run()  # meanwhile the part that has begun gets into the books of the first
    assert beside.returncode == 2 and "another suite is at work" in beside.stderr
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 130
    assert suite.outcomes() == {"first": "passed", "second": "failed"} and not alive(str(tmp_path))
    assert re.search("not started +1  third", suite.summary())


def test_a_suite_that_is_killed_loses_nothing_that_ended(tmp_path: Path) -> None:
    good, begun = tmp_path / "good", tmp_path / "begun"
    (tmp_path / "test_some.py").write_text(
        f"import time\ndef test_one(): pass\ndef test_two(): open(r'{begun}', 'w').close(); time.sleep(600)\n"
    )
    parts = [
        part("first", f"open(r'{good}', 'a').write('x')"),
        {"name": "second", "estimate": 5, "tests": [str(tmp_path / "test_some.py")]},
    ]
    suite = Suite(tmp_path, parts)
    process = suite.start()
    until(lambda: begun.exists() and "second" in suite.outcomes() and len(suite.cases("second")) == 2)
    process.kill()
    process.wait()
    until(lambda: not alive(str(tmp_path)), 10)  # its part ends with it
    assert suite.outcomes()["first"] == "passed"
    assert list(suite.cases("second").values()) == ["passed", "skipped"], "written while it was under way"
    ends = [json.loads(line)["ended"] for line in (suite.results / "memory.jsonl").read_text().splitlines()]
    assert len(ends) > 2 and ends == sorted(ends), "the minutes of a command count although it was killed"
    with (suite.results / "memory.jsonl").open("a") as file:
        file.write('{"part": "second", "ke')  # as if it had been killed while it wrote
    Suite(tmp_path, [parts[0], part("second", "print(1)")])
    assert suite.run().returncode == 3
    assert suite.outcomes() == {"first": "passed", "second": "passed"} and good.read_text() == "x"
    assert suite.run().returncode == 3 and "second (1 passed; earlier" in suite.summary()


def test_tests_run_together_and_others_alone(tmp_path: Path) -> None:
    """Two at a time: the first part waits for the second, and nothing else may be there with the last."""
    for name, other in (("t1", "t2"), ("t2", "t1")):
        (tmp_path / f"test_{name}.py").write_text(
            f"import pathlib, time\ndef test_it():\n    here = pathlib.Path(r'{tmp_path}')\n"
            f"    (here / '{name}').touch()\n    end = time.monotonic() + 30\n"
            f"    while not (here / '{other}').exists():\n        assert time.monotonic() < end\n"
            f"        time.sleep(0.05)\n"
        )
    parts = [{"name": name, "estimate": 5, "tests": [str(tmp_path / f"test_{name}.py")]} for name in ("t1", "t2")]
    suite = Suite(tmp_path, [*parts, part("alone", f"import pathlib; pathlib.Path(r'{tmp_path}', 'alone').touch()")])
    assert suite.run("--jobs", "2").returncode == 3, suite.summary()
    assert (tmp_path / "alone").stat().st_mtime > max((tmp_path / name).stat().st_mtime for name in ("t1", "t2"))


def test_a_missing_package_is_found_in_an_error_of_this_process_and_of_a_rank(load_script) -> None:
    missing = load_script("gpu_missing_packages").missing
    assert missing("E   ModuleNotFoundError: No module named 'yaml'") == "PyYAML"
    assert (
        missing("rank 0 of 4 raised ModuleNotFoundError: YAML needs PyYAML (pip install PyYAML); or\nothers")
        == "PyYAML"
    )
    assert missing("ModuleNotFoundError: No module named 'labkit.typo'") is None, "our own mistake stays one"
    assert missing("ImportError: cannot import name 'x' from 'yaml'") is None


# ---- the real plan ----


@pytest.fixture
def plan(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("gpu_plan")


def test_the_plan_holds_every_gpu_test_and_every_benchmark_part(plan: ModuleType) -> None:
    parts = plan.read_plan(ROOT / "scripts" / "gpu_plan.json")
    benchmarks = next(
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "benchmarks" / "gpu.py").read_text()).body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "PARTS" and node.value
    )
    assert sorted(one.benchmark for one in parts if one.benchmark) == sorted(benchmarks), "gpu.py --list"
    selected = {(test, one.select) for one in parts for test in one.tests}
    halves = [(file, select) for file, select in selected if (file, f"not ({select})") in selected]
    files = {file for file, select in selected if not select} | {file for file, _ in halves}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")} <= files
    assert all((ROOT / test.split("::")[0]).is_file() for one in parts for test in one.tests)
    assert all((ROOT / file).is_file() for one in parts for file in one.files)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([{"name": "a", "estimate": 1}], "part 0: give one of tests, benchmark, command"),
        ([{"name": "a", "estimate": 1, "tests": "x"}], "part 0: tests must be a list"),
        ([{"name": "a", "estimate": 1, "benchmark": "x", "tset": "x"}], "tset"),
        ([{"name": "a", "estimate": "5", "tests": ["x"]}], "part 0: estimate '5' must be seconds above 0"),
        (["a"], "part 0: 'str' object"),
        ([part("a", "1"), part("a", "2")], "'a' is given twice"),
    ],
)
def test_a_wrong_plan_is_refused(plan: ModuleType, tmp_path: Path, entries: list[Any], told: str) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=re.escape(told)):
        plan.read_plan(tmp_path / "plan.json")


def test_ten_minutes_and_the_five_after_them_take_the_plan_in_its_order(plan: ModuleType) -> None:
    """On 16 cores: smoke, all correctness, the eight benchmarks that readers ask for first; then the next ones."""
    parts = plan.read_plan(ROOT / "scripts" / "gpu_plan.json")
    asked = ["gemm", "layer", "gpt2", "attention", "graphs", "graph_peers", "fp8_layer", "fp8_cast"]
    then = ["graphs_equal_eager", "graph_pool", "graph_memory", "grouped_gemm", "stack", "precisions"]
    assert [part.benchmark for part in parts if part.benchmark][: len(asked + then)] == asked + then
    first = [part for _, part in plan.foreseen(parts, 585, 8)]
    assert first == parts[: len(first)] and first[0].name == "smoke"
    assert set(asked) <= {part.benchmark for part in first}
    later = [part for part in parts[len(first) :] if part.on_gpu]
    assert [part.name for part in later] == ["one-rank collectives"]
    second = [part for _, part in plan.foreseen(parts[len(first) :], 300, 8)]
    assert set(then) <= {part.benchmark for part in (*first, *second)} and later[0] in second


def test_a_key_follows_what_a_part_reads_and_the_versions(plan: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "ROOT", tmp_path)

    def key(part: Any, versions: str = "torch 2.11") -> str:
        plan.digest.cache_clear()
        return part.key(versions, None)

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    for name in ("labkit/a/b.py", "tests/helper.py", "tests/gpu/test_a.py", "tests/gpu/test_b.py", "benchmarks/c.py"):
        write(name, "1")
    test = plan.Part("a", 20, 60, tests=("tests/gpu/test_a.py::test_one",))
    benchmark = plan.Part("c", 20, 60, benchmark="c")
    before = key(test), key(benchmark)
    assert key(plan.Part("b", 30, 90, tests=test.tests)) == before[0] != key(test, "torch 2.13")
    for changed, follows in (
        ("tests/gpu/test_b.py", (False, False)), ("labkit/a/__pycache__/b.pyc", (False, False)),
        ("tests/gpu/test_a.py", (True, False)), ("tests/helper.py", (True, False)),
        ("benchmarks/c.py", (False, True)), ("labkit/a/b.py", (True, True)), ("labkit/new", (True, True)),
    ):  # fmt: skip
        write(changed, "2")
        after = key(test), key(benchmark)
        assert tuple(one != other for one, other in zip(before, after)) == follows, changed
        before = after
