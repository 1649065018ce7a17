"""The mutants of `scripts/mutations.py`: what is drawn, what is judged, and what the page says; all of them in the sweep."""

import json
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
    }
    assert [mutant.lines for mutant in drawn if "second: int" in mutant.name] == [range(9, 10)]
    assert mutants.sample() == drawn and all(compile(mutant.text, "", "exec") for mutant in drawn)


def test_mutants_are_judged_and_a_cut_run_goes_on(scripts, capfd):
    mutants, mutations = scripts
    sample = mutants.sample()
    results = mutations.run(sample, 1)
    assert [row["mutant"] for row in results] == [mutant.name for mutant in sample]
    killed = {row["mutant"].split("`")[3]: row["killed"] for row in results}
    assert killed.pop("if not pair is None:") and not all(killed.values()) or all(killed.values())
