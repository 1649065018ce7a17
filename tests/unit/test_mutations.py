"""`scripts/mutations.py`: what is drawn and judged, and what the page says of it; all mutants are in the sweep."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="needs cosmic-ray")
ROOT = Path(__file__).parents[2]
SOURCE = """
from __future__ import annotations

from dataclasses import dataclass

@dataclass(frozen=True)
class Pair:
    first: int | None
    second: int = 3

def area(pair: Pair | None, *, scale: int = 1) -> int | None:
    if pair is None:
        raise ValueError(f"{1 + 1} is " + "no pair")
    return pair.first * pair.second * scale

def twice(x):
    return x + x
"""


@pytest.fixture
def scripts(load_script, tmp_path, monkeypatch):
    """The two scripts, in a tree of one package with one module and one test."""
    mutants, mutations = load_script("mutants"), load_script("mutations")
    (tmp_path / "labkit" / "data").mkdir(parents=True)
    (tmp_path / "labkit" / "data" / "pairs.py").write_text(SOURCE)
    (tmp_path / "test_pairs.py").write_text(
        "import sys; sys.path.insert(0, 'labkit/data'); from pairs import Pair, area\n"
        "def test_area():\n    assert area(Pair(2)) == 6\n"
        "def test_scale():\n    assert area(Pair(2), scale=5) == 30\n"
    )
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PACKAGES", ("data",))
    monkeypatch.setattr(mutants, "SIZE", 1000)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "STATE", tmp_path / "state")
    monkeypatch.setattr(mutations, "tests", lambda: ["test_pairs.py"])
    monkeypatch.setattr("sweep.commit", lambda: "one")
    preloading = "multiprocessing.context.BaseContext.set_forkserver_preload"
    monkeypatch.setattr(preloading, lambda context, modules: None)  # torch and transformers: these tests use neither
    return mutants, mutations


def test_places_are_drawn_once_and_without_what_is_left_out(scripts):
    mutants, _ = scripts
    drawn = mutants.sample()
    changed = Counter(mutant.name.split("`")[1] for mutant in drawn)
    assert changed == {
        "second: int = 3": 1,
        "def area(pair: Pair | None, *, scale: int = 1) -> int | None:": 1,
        "if pair is None:": 2,
        "return pair.first * pair.second * scale": 2,
        "return x + x": 1,
    }
    assert [mutant.lines for mutant in drawn if "second: int" in mutant.name] == [range(9, 10)]
    assert mutants.sample() == drawn and all(compile(mutant.text, "", "exec") for mutant in drawn)


def test_the_tests_of_the_packages_exist(load_script):
    mutations = load_script("mutations")
    assert [file for file in mutations.tests() if not (ROOT / file).is_file()] == []


def test_mutants_are_judged_and_a_cut_run_goes_on(scripts, monkeypatch):
    mutants, mutations = scripts
    sample = mutants.sample()
    results = mutations.run(sample, 1)
    assert [row["mutant"] for row in results] == [mutant.name for mutant in sample]
    [survivor] = [row for row in results if not row["killed"]]
    assert "twice: `return x + x`" in survivor["mutant"] and survivor["by"] == ""
    assert {row["by"] for row in results if row["killed"]} == {
        f"test_pairs.py::test_{name}" for name in ("area", "scale")
    }
    assert (mutations.STATE / "tree0" / "labkit" / "data" / "pairs.py").read_text() == SOURCE
    log = mutations.STATE / "results.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    judged = []
    again = {"killed": True, "by": "again"}
    monkeypatch.setattr(
        mutations, "judge", lambda runner, mutant, base: judged.append(mutant) or {"mutant": mutant.name, **again}
    )
    missing = mutations.run(sample, 1)
    assert [row["by"] == "again" for row in missing].count(True) == len(judged) == 1
    assert mutations.run(sample, 1) == missing and len(judged) == 1
    monkeypatch.setattr("sweep.commit", lambda: "two")
    mutations.run(sample, 1)
    assert len(judged) == 1 + len(sample), "another commit starts anew"


def test_the_page_counts_and_gives_reasons(scripts, monkeypatch):
    _, mutations = scripts
    monkeypatch.setattr(mutations, "EQUIVALENT", {"a: `x | y` -> `y | x`": "a union has no order"})
    names = {"a: `x | y` -> `y | x`": False, "labkit/data/b.py: ": True, "c": False}
    page = mutations.page([{"mutant": name, "killed": killed} for name, killed in names.items()])
    assert "below are the results of 3, in\n`data`.\n" in page
    assert "1 of 2 mutants are killed (50%). In another 1, " in page
    assert "| a: `x \\| y` -> `y \\| x` | a union has no order |\n" in page and page.endswith("|---|\n| c |\n")


def test_the_committed_page_gives_the_reasons_of_today(load_script):
    mutations = load_script("mutations")
    part = mutations.PAGE.read_text(encoding="utf-8").partition(mutations.HEAD)[2]
    assert part
    for name, reason in mutations.EQUIVALENT.items():
        assert f"| {mutations.cell(name)} | {reason} |\n" in part
        path, old = name.split(": ")[0], name.split("`")[1]
        assert old in " ".join((ROOT / path).read_text().split()), f"{name}: the line is another now"


@pytest.mark.sweep
@pytest.mark.timeout(4 * 3600)
def test_nine_of_ten_mutants_are_killed(capfd):
    with capfd.disabled():
        assert subprocess.run([sys.executable, "scripts/mutations.py"], cwd=ROOT).returncode == 0
