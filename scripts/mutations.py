"""Run the tests of some packages on a sample of mutants; with --page docs/faults.md tells what survives.

python scripts/mutations.py                       an hour on two cores
python scripts/mutations.py --page                the same, and its part of the page
python scripts/mutations.py data/cleaning ...     only mutants of modules with such a word
python scripts/mutations.py --list                the sample, without running it

A mutant is one small change of the source by an operator of the package cosmic-ray, such as `<` to `<=` or 1 to 2.
Each worker has a copy of the tree, since ranks of the tests read the changed file. First every test runs once without a
mutant, under coverage. Then a mutant meets the tests that execute its statement, the quickest first, and after them
those near by (`order_for`). Results are in `build/mutations` as they come; the same commit goes on where it was cut.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutants import PACKAGES, SIZE, Mutant, sample

ROOT = Path(__file__).resolve().parent.parent
STATE, PAGE = ROOT / "build" / "mutations", ROOT / "docs" / "faults.md"
HEAD = "\n## Mutants\n"
"""Begin of this script's part of the page."""
EQUIVALENT: dict[str, str] = json.loads((ROOT / "tests" / "equivalent_mutants.json").read_text(encoding="utf-8"))
"""Mutants that change nothing that a user could see, each with the reason."""
GOAL = 0.9
"""Share of mutants that must be killed, those called equivalent left out."""
TESTS = """
tests/unit: data_cleaning data_indexed data_masking data_preparation data_samples gpt_data corpus tokenizer
    tokenizer_files sentence_samples evaluate finetune bert t5 mamba checkpoint_command checkpoint_exchange
    partial_checkpoints checkpoint_boxes hostile_files models_counts activation_bytes memory_bytes weights viz_boxes te
tests/oracles: data_oracle evaluate_oracle finetune_oracle bert_oracle t5_oracle mamba_oracle models_oracle
    checkpoint_oracle
tests/parallel: checkpoint_resume bert_parity t5_parity mamba_parity finetune_parity indexed_training
"""
NO_END, CRASHED = ({"code": -1, "failed": [why], "seconds": {}, "lines": {}} for why in ("no end", "pytest crashed"))
MOST = 120.0
"""Seconds of the tests of one group that a mutant meets, see `order_for`; of a quiet machine."""


def tests() -> list[str]:
    """The files of `TESTS`."""
    rows = [row.split(":") for row in TESTS.replace("\n    ", " ").strip().splitlines()]
    return [f"{folder}/test_{name}.py" for folder, names in rows for name in names.split()]


# ---- in a process of its own, started from one that has torch imported ----


class Watch:
    """A pytest plugin: the chosen tests in their order, what each costs, and the first that fails."""

    def __init__(self, order: Sequence[str] | None, coverage: Any = None) -> None:
        self.order = None if order is None else {name: place for place, name in enumerate(order)}
        self.coverage, self.now = coverage, ""
        self.seconds: dict[str, float] = {}
        self.launches: set[str] = set()
        if coverage is not None:
            sys.addaudithook(self._process)
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if (order := self.order) is not None:
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, self.now = time.monotonic(), item.nodeid
        self._context(self.now)
        result = yield
        self.seconds[item.nodeid] = round(time.monotonic() - start, 3)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a wider fixture executes serves all tests of the file."""
        if fixturedef.scope != "function":
            self._context(self.now.split("::")[0])
        result = yield
        self._context(self.now)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def _process(self, event: str, _: object) -> None:
        """Tests that start processes, or ask the one from which ranks are forked."""
        if event in ("subprocess.Popen", "os.fork", "socket.connect"):
            self.launches.add(self.now)

    def _context(self, name: str) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(name)


def run_tests(tree: str, files: Sequence[str], order: Sequence[str] | None, out: str) -> None:
    """pytest in `tree`; its exit code, the costs and the first failure go to `out`, without `order` also who executes
    which line."""
    os.setsid()
    os.chdir(tree)
    for kind, most in ((resource.RLIMIT_FSIZE, 2**34), (resource.RLIMIT_DATA, 2**33)):  # for loops without an end
        resource.setrlimit(kind, (most, most))
    sys.path.insert(0, tree)
    os.environ |= {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CI": "1"}
    sys.dont_write_bytecode = True
    with open(f"{out}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    measured = None
    if order is None:
        from coverage import Coverage

        packages = [f"{tree}/labkit/{package}" for package in PACKAGES]
        measured = Coverage(data_file=None, source=packages, config_file=False, messages=False)
        measured.start()
    watch = Watch(order, measured)
    options = [
        "--timeout=100",
        *("-p", "no:cacheprovider"),
        *("-p", "no:nbval"),  # whose imports take two seconds
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # some are imported already
    ]
    code = pytest.main([*options, *(["-x"] if order else []), *files], plugins=[watch])
    lines: dict[str, dict[int, list[str]]] = {}
    if measured is not None:
        measured.stop()
        data = measured.get_data()
        lines = {os.path.relpath(path, tree): data.contexts_by_lineno(path) for path in data.measured_files()}
    found = {"code": int(code), "failed": watch.failed, "seconds": watch.seconds, "lines": lines}
    found["launches"] = sorted(watch.launches)
    Path(out).write_text(json.dumps(found))
    os._exit(0)


class Runner:
    """Runs pytest in copies of the tree, as many at a time as there are copies."""

    def __init__(self, workers: int) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "transformers", "tokenizers"])
        self.trees: queue.Queue[Path] = queue.Queue()
        for number in range(workers):
            shutil.rmtree(tree := STATE / f"tree{number}", ignore_errors=True)
            copy_tree(tree)
            self.trees.put(tree)

    def __call__(
        self, files: Sequence[str], order: Sequence[str] | None = None, mutant: Mutant | None = None, limit: float = 1e4
    ) -> dict[str, Any]:
        """What `run_tests` finds with the mutant; `NO_END` after `limit` seconds."""
        tree = self.trees.get()
        out, source = STATE / f"{tree.name}.json", tree / mutant.path if mutant else None
        original = source.read_text() if source else ""
        out.unlink(missing_ok=True)
        process = self.context.Process(target=run_tests, args=(str(tree), files, order, str(out)))
        try:
            if source and mutant:
                source.write_text(mutant.text)
            process.start()
            process.join(limit)
            if process.is_alive() or not out.is_file():
                return NO_END if process.is_alive() else CRASHED
            return json.loads(out.read_text())
        finally:
            with suppress(OSError, TypeError):
                os.killpg(process.pid, signal.SIGKILL)  # pyright: ignore[reportArgumentType]
            process.join()
            if source:
                source.write_text(original)
            self.trees.put(tree)


def copy_tree(target: Path) -> None:
    """What git tracks, as it is on disk."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


# ---- which tests a mutant meets ----


def baseline(runner: Runner) -> dict[str, Any]:
    """Every test once without a mutant: {"seconds": {test: s}, "lines": {file: {line: tests}}, "launches": tests
    that start processes}. A test that fails is left out: some measure memory, and coverage takes some."""
    path = STATE / "baseline.json"
    kept = json.loads(path.read_text()) if path.is_file() else {}
    with ThreadPoolExecutor(runner.trees.qsize()) as pool:
        started = {pool.submit(runner, [file]): file for file in tests() if file not in kept}
        for ended in as_completed(started):
            found = kept[started[ended]] = ended.result()
            path.write_text(json.dumps(kept))
            fails = f", without {', '.join(found['failed'])}" if found["failed"] else ""
            print(f"no mutant: {started[ended]}, {sum(found['seconds'].values()):.0f} s{fails}", flush=True)
    seconds = {
        test: cost for found in kept.values() for test, cost in found["seconds"].items() if test not in found["failed"]
    }
    lines: dict[str, Any] = defaultdict(lambda: defaultdict(set))
    for found in kept.values():
        for file, contexts in found["lines"].items():
            for line, names in contexts.items():
                wide = {test for test in seconds if test.split("::")[0] in names}
                lines[file][int(line)] |= wide | (set(names) & set(seconds))
    launches = {test for found in kept.values() for test in found["launches"] if test in seconds}
    return {"seconds": seconds, "lines": lines, "launches": launches}


def order_for(mutant: Mutant, base: dict[str, Any]) -> list[str]:
    """Tests that execute the mutant's statement; others that execute its module; and, since no coverage sees the
    processes that a test starts, tests that start some, of files that execute its package. The quickest file of each
    group is first, and no group takes more than `MOST` seconds."""
    seconds, lines, folder = base["seconds"], base["lines"], str(Path(mutant.path).parent)
    near = set().union(*(lines[mutant.path][line] for line in mutant.lines))
    module = set().union(*lines[mutant.path].values())
    package = set().union(*(s for path in lines if str(Path(path).parent) == folder for s in lines[path].values()))
    files = {test.split("::")[0] for test in package}
    far = {test for test in base["launches"] if test.split("::")[0] in files}
    chosen: list[str] = []
    for group in (near, module - near, far - module):
        left, cheap = MOST, list[str]()
        for test in sorted(group, key=lambda test: seconds[test]):
            left -= seconds[test]
            if left > 0 or not cheap:
                cheap.append(test)
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in cheap:
            by_file[test.split("::")[0]].append(test)
        chosen += [test for tests_of_file in by_file.values() for test in tests_of_file]
    return chosen


# ---- the run and the page ----


def judge(runner: Runner, mutant: Mutant, base: dict[str, Any]) -> dict[str, Any]:
    """One line of the results."""
    order = order_for(mutant, base)
    if not order:
        return {"mutant": mutant.name, "killed": False, "by": "no test executes it"}
    files = list(dict.fromkeys(test.split("::")[0] for test in order))
    found = runner(files, order, mutant, limit=120 + 20 * sum(base["seconds"][test] for test in order))
    return {"mutant": mutant.name, "killed": found["code"] != 0, "by": " ".join(found["failed"])}


def page(results: Sequence[dict[str, Any]]) -> str:
    """The part of docs/faults.md."""
    survived = [row["mutant"] for row in results if not row["killed"]]
    equal, others = ([name for name in survived if (name in EQUIVALENT) is wanted] for wanted in (True, False))
    killed, counted = len(results) - len(survived), len(results) - len(equal)
    paths = [row["mutant"].split(": ")[0] for row in results]
    ran = ", ".join(f"`{package}`" for package in PACKAGES if any(f"/{package}/" in path for path in paths))
    text = f"""{HEAD}
`scripts/mutations.py` changes the source with the operators of cosmic-ray: it replaces comparisons, numbers, operators
and exceptions, negates conditions, empties loops and removes decorators. It draws {SIZE} places with a fixed seed, from
each module in proportion to its number of places. It leaves out annotations, error messages, strings, `TYPE_CHECKING`
and decorators of classes. `make sweep PART=mutations` runs all mutants; below are the results of {len(results)}, in
{ran}.

{killed} of {counted} mutants are killed ({killed / max(1, counted):.0%}). In another {len(equal)}, nothing
changes that a user could see:

| mutant that changes nothing | reason |
|---|---|
"""
    text += "".join(f"| {cell(name)} | {EQUIVALENT[name]} |\n" for name in sorted(equal))
    return text + "\n| mutant that no test kills |\n|---|\n" + "".join(f"| {cell(name)} |\n" for name in sorted(others))


def cell(name: str) -> str:
    """A mutant's name in a table."""
    return name.replace("|", r"\|")


def main() -> int:
    """Exit code 1 if fewer than `GOAL` are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only modules with one of them in their path")
    parser.add_argument("--list", action="store_true", help="print the sample")
    parser.add_argument("--page", action="store_true", help="write the results into docs/faults.md")
    parser.add_argument("--workers", type=int, default=2, help="copies of the tree (2)")
    given = parser.parse_args()
    chosen = [m for m in sample() if not given.words or any(word in m.path for word in given.words)]
    if given.list:
        print(*(mutant.name for mutant in chosen), sep="\n")
        return 0
    results = run(chosen, given.workers)
    counted = [row for row in results if row["killed"] or row["mutant"] not in EQUIVALENT]
    share = sum(row["killed"] for row in counted) / max(1, len(counted))
    print(f"{sum(row['killed'] for row in counted)} of {len(counted)} mutants are killed ({share:.0%})")
    if given.page:
        PAGE.write_text(PAGE.read_text().split(HEAD)[0] + page(results))
    return 0 if share >= GOAL else 1


def run(chosen: Sequence[Mutant], workers: int) -> list[dict[str, Any]]:
    """The results of these mutants, in their order; those that this commit has already are read."""
    from sweep import commit

    STATE.mkdir(parents=True, exist_ok=True)
    log, at = STATE / "results.jsonl", commit()
    if not log.is_file() or log.read_text().split("\n", 1)[0] != at:
        log.write_text(f"{at}\n")
        (STATE / "baseline.json").unlink(missing_ok=True)
    done = {row["mutant"]: row for row in map(json.loads, log.read_text().splitlines()[1:])}
    left = [mutant for mutant in chosen if mutant.name not in done]
    if left:
        runner = Runner(workers)
        base = baseline(runner)
        with ThreadPoolExecutor(workers) as pool:
            for ended in as_completed([pool.submit(judge, runner, mutant, base) for mutant in left]):
                row = ended.result()
                done[row["mutant"]] = row
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                word = "killed  " if row["killed"] else "SURVIVED"
                print(f"{len(done):4} {word} {row['mutant']} {row['by']}", flush=True)
    return [done[mutant.name] for mutant in chosen]


if __name__ == "__main__":
    sys.exit(main())
