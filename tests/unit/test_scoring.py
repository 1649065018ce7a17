"""score() never raises on a wrong answer and says in one sentence what was given, expected and got."""

import re
from pathlib import Path

import numpy as np
import pytest

from labkit.check import exercises, score
from labkit.check.scoring import MAX_SHOWN, ONLY_FIRST, Outcome, Score, compare, holds, shown, without_grid


def test_score_of_a_right_answer_and_its_repr() -> None:
    def answer(rank: int, order: str, sizes: dict[str, int]) -> dict[str, int]:
        digits: dict[str, int] = {}
        for axis in order.split("-"):
            rank, digits[axis] = divmod(rank, sizes[axis])
        return digits

    found = score("02.digits", answer)
    assert bool(found) and repr(found) == "02.digits: 5/5"


def test_failed_cases_are_sentences() -> None:
    lines = repr(score("02.groups", lambda order, sizes, token: [[0]])).splitlines()
    assert lines[0] == "02.groups: 0/8"
    given = "order 'tp-dp', sizes {'tp': 2, 'dp': 2} and token 'tp'"
    assert lines[1] == f"  - Given {given}, expected [[0, 1], [2, 3]], got [[0]]."


@pytest.mark.parametrize("answer", [None, 3, "tp", lambda: None, [], exit, lambda *a: 1 / 0, lambda *a: exit(3)])
@pytest.mark.parametrize("name", ["02.groups", "02.place"])
def test_nonsense_scores_zero_and_never_raises(name: str, answer: object) -> None:
    found = score(name, answer)
    assert not found.ok and found.passed == 0
    assert "\n" not in str(found.outcomes[0])


def test_an_exception_of_the_learner_is_shown() -> None:
    def answer(order: str, sizes: dict, token: str) -> list:
        raise KeyError("stride of dp")

    assert "got KeyError: 'stride of dp'." in repr(score("02.groups", answer))


def test_an_answer_may_change_its_arguments_without_spoiling_later_cases() -> None:
    def answer(order: str, sizes: dict, token: str) -> list:
        sizes.clear()
        return []

    assert score("02.groups", answer).passed == score("02.groups", answer).passed == 0


def test_unknown_exercises_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"there is no exercise '02.group'; did you mean '02.groups'\?"):
        score("02.group", None)
    with pytest.raises(ValueError, match="there are 0"):
        score("zzz", None)


def test_values_compare_as_a_learner_means_them() -> None:
    assert compare("x", [[0, 1]], lambda: np.array([[0, 1]])).passed
    assert compare("x", [[0, 1]], lambda: [(0, 1)]).passed
    assert compare("x", [0, 1], lambda: range(2)).passed
    assert not compare("x", [0, 1], lambda: [1, 0]).passed
    assert compare("x", 0.3, lambda: 0.1 + 0.2, equal=lambda a, b: abs(a - b) < 1e-12).passed


def test_claims_pass_only_on_true() -> None:
    assert holds("x", "no deadlock", lambda: True).passed
    failed = holds("x", "no deadlock", lambda: "rank 1 waits for rank 0")
    assert str(failed) == "Given x, expected no deadlock, got rank 1 waits for rank 0."
    assert not holds("x", "no deadlock", lambda: "").passed
    assert not holds("x", "no deadlock", lambda: 1 / 0).passed


def test_a_pair_is_a_reason_and_a_sentence() -> None:
    failed = holds("x", "no deadlock", lambda: ("too early", "rank 1 waits"))
    assert (failed.reason, failed.got, failed.passed) == ("too early", "rank 1 waits", False)
    assert holds("x", "no deadlock", lambda: ("", "")).passed


def test_each_reason_is_told_once_and_what_follows_from_a_failure_not_at_all() -> None:
    def failed(given: str, reason: str) -> Outcome:
        return Outcome(given, "1", "2", False, reason)

    cases = [failed("a", "late"), failed("b", ""), failed("c", "late"), failed("d", ""), failed("e", ONLY_FIRST)]
    assert [outcome.given for outcome in Score("00.none", tuple(cases)).told] == ["a", "b", "d"]
    passed = Outcome("f", "1", "1", True, "late")
    assert [outcome.given for outcome in Score("00.none", (passed, *cases[4:], *cases)).told] == ["e", "a", "b", "d"]


def test_long_values_are_cut_in_the_middle() -> None:
    text = shown(list(range(1000)))
    assert len(text) <= MAX_SHOWN and text.startswith("[0, 1") and text.endswith("999]")
    found = re.fullmatch(r"\[(.*), \.\.\. (\d+) more \.\.\., (.*)\]", text)
    assert found is not None
    head, more, tail = found.groups()
    kept = [int(number) for part in (head, tail) for number in part.split(", ")]
    assert set(kept) <= set(range(1000)) and len(kept) + int(more) == 1000


def test_a_refusal_keeps_its_sentences_and_loses_its_rows() -> None:
    drawn = "mine stops: rank 0 -> rank 0\nrank 0 | 0F0 [0B0]\nrank 10 | 1F0\nrank 0, position 1: 0B0 waits"
    assert without_grid(drawn) == "mine stops: rank 0 -> rank 0; rank 0, position 1: 0B0 waits"
    many = without_grid("mine cannot run:\n" + "\n".join(f"0F{m} is missing" for m in range(30)))
    assert many.startswith("mine cannot run: 0F0 is missing; 0F1 is missing") and many.endswith(" and 22 more")
    assert without_grid("") == ""


def test_a_score_without_cases_is_no_pass() -> None:
    assert not Score("00.none", ()).ok


def test_exercises_of_one_chapter() -> None:
    assert set(exercises("02")) == {"02.digits", "02.groups", "02.place"}


def test_each_module_holds_the_exercises_of_the_chapter_whose_number_it_bears() -> None:
    held: dict[str, set[str]] = {}
    for name, known in exercises().items():
        held.setdefault(known.judge.__module__.removeprefix("labkit.check."), set()).add(name.split(".")[0])
    chapters = [path.name[:2] for path in (Path(__file__).parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb")]
    assert held == {f"chapter_{chapter}": {chapter} for chapter in chapters}
