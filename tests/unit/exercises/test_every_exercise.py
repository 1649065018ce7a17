"""What holds for every exercise: each wrong answer is named once, and an answer of any kind gets a score.

`test_chapter_NN.py` has the wrong answers of chapter NN: `TABLES`, {exercise: {key: (answer, words of its score)}}. A
comment says what the answer believes. `RIGHT`, {exercise: answer}, has right answers from which wrong ones are made.
"""

import re
import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from labkit.check import Score, exercises, score

CHAPTERS = [runpy.run_path(str(path)) for path in sorted(Path(__file__).parent.glob("test_chapter_[0-9][0-9].py"))]
TABLES: dict[str, dict[str, tuple[Callable[..., Any], str]]] = {}
RIGHT: dict[str, Callable[..., Any]] = {}
for chapter in CHAPTERS:
    TABLES |= chapter["TABLES"]
    RIGHT |= chapter.get("RIGHT", {})
ROWS = [(name, key) for name, table in TABLES.items() for key in table]
NONE_IS_RIGHT = {"11.early": 4, "16.clipped": 1, "17.unsafe": 4}
"""Exercise -> cases that `lambda *case: None` answers rightly."""


@cache
def score_of(name: str, key: str) -> Score:
    return score(name, TABLES[name][key][0])


@cache
def scores_of_another_kind(name: str) -> list[Score]:
    return [score(name, answer) for answer in (None, lambda *case: None, lambda *case: "x")]


def test_every_exercise_has_three_wrong_answers() -> None:
    assert set(TABLES) == set(exercises())
    assert all(len(table) >= 3 for table in TABLES.values())


@pytest.mark.parametrize(("name", "key"), ROWS, ids=map(" ".join, ROWS))
def test_a_misunderstanding_is_named_once(name: str, key: str) -> None:
    found, words = score_of(name, key), TABLES[name][key][1]
    assert not found.ok and repr(found).count(words) == 1, repr(found)
    head, *failed = repr(found).splitlines()
    assert head == f"{name}: {found.passed}/{found.total}"
    assert all(re.fullmatch(r"  - Given .+, expected .+, got .+\.", line) for line in failed), failed


@pytest.mark.parametrize("name", TABLES)
def test_an_answer_of_another_kind_gets_a_score(name: str) -> None:
    scores = scores_of_another_kind(name)
    assert [found.passed for found in scores] == [0, NONE_IS_RIGHT.get(name, 0), 0]
    assert "\n" not in "".join(str(outcome) for found in scores for outcome in found.outcomes)


@pytest.mark.parametrize("name", TABLES)
def test_a_score_has_one_denominator(name: str) -> None:
    scores = [score_of(name, key) for key in TABLES[name]] + scores_of_another_kind(name)
    assert len({found.total for found in scores}) == 1


@pytest.mark.parametrize("name", TABLES)
def test_the_solution_passes(name: str) -> None:
    found = score(name, exercises()[name].solution)
    assert found.ok, repr(found)


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass(name: str) -> None:
    found = score(name, RIGHT[name])
    assert found.ok, repr(found)
