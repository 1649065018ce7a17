"""`check` shows a score, says what went wrong in the reader's own code, and returns what later cells use."""

import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from labkit.check import check, exercises, score, solution
from labkit.check import progress as kept
from labkit.check.checking import untouched
from labkit.check.rank_threads import RankThreads
from labkit.check.rounding import rounding
from labkit.check.score_page import ScorePage
from labkit.check.scoring import Outcome, holds
from labkit.check.watched import Watch

MEAN = exercises("08")["08.tokens"].solution
assert MEAN is not None


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(path))
    return path


def test_a_right_answer_is_what_later_cells_use(capsys, file) -> None:
    def mine(gradients, tokens):
        return MEAN(gradients, tokens)

    assert check("08.tokens", mine) is mine
    assert capsys.readouterr().out == "08.tokens: 5/5. Right. From here on the chapter uses your function.\n"
    assert kept.read(file)["check"] == {"08.tokens": "solved"}


def test_instead_of_a_wrong_answer_later_cells_use_the_solution(capsys, file) -> None:
    assert check("08.tokens", lambda gradients, tokens: []) is MEAN
    said = capsys.readouterr().out
    assert said.startswith("08.tokens: 0/5. 5 to go.\n") and "the next cells use labkit's solution." in said
    assert kept.read(file)["check"] == {"08.tokens": "tried"}


def test_lines_are_at_most_90_columns_wide(capsys) -> None:
    for name in exercises():
        check(name, lambda *case: 1)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 90


def inner(counts):
    return counts[9]


def test_an_error_is_shown_where_it_arose_in_the_readers_code(capsys) -> None:
    def mine(gradients, tokens):
        return inner(gradients)

    check("08.tokens", mine)
    *_, first, code, second, last, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("    test_check.py, line ") and first.endswith(", in mine")
    assert (
        code == "        return inner(gradients)"
        and second.endswith(", in inner")
        and last.strip() == "return counts[9]"
    )


def test_an_error_of_a_rank_is_shown_where_it_arose(capsys) -> None:
    def mine(x, dy, gain, first, second, tp):
        tp.all_gather(x)
        return 1 / 0

    check("06.sequence", mine)
    assert "test_check.py" in (said := capsys.readouterr().out) and "    return 1 / 0" in said


def test_an_error_that_the_reader_catches_is_not_shown() -> None:
    def mine(counts, rank):
        try:
            return counts["x"]
        except TypeError:
            return [], []

    assert score("08.tokens", mine).frames == ()


def test_a_forgotten_return_is_named() -> None:
    found = score("08.tokens", lambda gradients, tokens: None)
    assert found.advice == "Your function returned None each time. Did you forget `return`?"
    assert len(ScorePage(found, attempted=True, solved_for_you=True).cases) == 1
    found = score("08.tokens", lambda gradients, tokens: None if len(tokens) > 2 else MEAN(gradients, tokens))
    assert found.advice == "Your function returned None in 3 of 5 calls. Does a branch lack its `return`?"
    assert score("17.unsafe", lambda order, buffers: None if buffers[0] else (9, 9)).advice == ""


@pytest.mark.parametrize("name", exercises())
def test_the_start_of_an_exercise_is_not_an_attempt(name: str) -> None:
    """And neither is the solution mistaken for the start."""
    assert not untouched(name, exercises()[name].solution)


def stub(name: str, change: str = "") -> dict:
    """Names after the cells of an exercise, as Jupyter would run them."""
    import linecache

    from labkit.check.chapter_copies import CHAPTERS
    from labkit.check.untouched import _exercise_cells, json

    (path,) = CHAPTERS.glob(f"{name[:2]}_*.ipynb")
    cells = _exercise_cells(json.loads(path.read_text()))
    (source,) = [cell for cell in cells if f'check("{name}"' in cell]
    source = source.replace("    return", f"{change}    return", 1) if change else source
    linecache.cache["<cell>"] = (len(source), None, [f"{line}\n" for line in source.splitlines()], "<cell>")
    names: dict = {"check": check}
    exec(compile(source, "<cell>", "exec"), names)
    return names


def test_an_untouched_stub_is_said_to_be_one(capsys, file) -> None:
    assert stub("08.tokens")["mean_gradient"] is MEAN
    assert capsys.readouterr().out.startswith("08.tokens: Not attempted yet: this is the body that you start from.")
    stub("08.tokens", "    # a comment\n\n")
    assert "Not attempted" in capsys.readouterr().out and kept.read(file)["check"] == {}
    stub("08.tokens", "    tokens += []\n")
    assert "Not attempted" not in capsys.readouterr().out and kept.read(file)["check"] == {"08.tokens": "tried"}


# ---- a case that does not end ----


def outcomes(answer, seconds: float = 0.3) -> list[Outcome]:
    watch = Watch(answer, seconds)

    def judge():
        for case in (1, 2, 3):
            yield holds(f"case {case}", "an end", lambda case=case: watch.answer(case))

    return list(watch.limited(judge()))


def endless(case: int) -> bool:
    while case == 2:
        pass
    return True


def test_an_endless_loop_ends_and_its_case_is_named() -> None:
    found = outcomes(endless)
    assert [outcome.passed for outcome in found] == [True, False, False]
    assert str(found[1]) == "Given case 2, expected an end, got no end after 0.3 seconds."
    assert found[2].got == "not tried, because an earlier case did not end"


def test_cases_that_were_not_tried_are_not_told(monkeypatch) -> None:
    monkeypatch.setattr(Watch.__init__, "__defaults__", (0.3,))
    page = ScorePage(score("17.held", lambda order: max(endless(2), 0)), attempted=True, solved_for_you=True)
    assert [case.got for case in page.cases] == ["no end after 0.3 seconds"] and page.score.total == 8
    assert "while case == 2:" in repr(page) or "pass" in repr(page)


def test_a_loop_that_catches_every_exception_ends_too() -> None:
    def stubborn(case: int) -> bool:
        while case == 2:
            with suppress(Exception):
                time.sleep(0.01)
        return True

    assert [outcome.passed for outcome in outcomes(stubborn)] == [True, False, False]


def test_a_rank_that_loops_ends_with_its_threads() -> None:
    def program(rank: int) -> None:
        while rank:
            pass

    before = threading.active_count()
    assert "no end" in outcomes(lambda case: RankThreads(3).run(program))[0].got
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


# ---- rounding ----


def test_rounding_is_told_from_a_wrong_result() -> None:
    right = np.array([0.1, 2.5, 1e-3])
    assert "rounding of float32" in rounding(right.astype(np.float32), right)
    assert rounding(right * (1 + 1e-4), right) == rounding(right, right) == rounding([1.0], right) == ""
    assert rounding(10_000_001, 10_000_000) == "", "whole numbers are counts"
    assert rounding("text", 1.0) == rounding(None, 1.0) == rounding([[1.5], [1, 2]], 1.0) == rounding(np.nan, 1.0) == ""


def test_a_score_names_rounding_once_and_no_misunderstanding() -> None:
    """The solution in float32 is not a wrong idea."""
    found = score("08.tokens", lambda *case: np.asarray(MEAN(*case), dtype=np.float32).astype(float))
    assert len(found.told) == 1 and "the rounding of float32; compute in float64" in found.told[0].got, found


# ---- solutions, drawings, pages ----


def test_a_solution_is_shown_with_its_helpers_and_without_its_decorator() -> None:
    source = solution("17.buffers")
    assert source.startswith("def _walk(order, queue_of):") and "\ndef buffers(order):" in source
    assert "@" not in source and source._repr_markdown_() == f"```python\n{source}\n```"
    names: dict = {}
    exec(f"from collections import deque\n{source}", names)
    assert score("17.buffers", names["buffers"]).ok
    with pytest.raises(ValueError, match="no solution of '99\\.none'"):
        solution("99.none")


def test_a_page_shows_what_the_reader_wrote_as_text() -> None:
    page = ScorePage(score("02.groups", lambda *case: "<b>"), attempted=True, solved_for_you=True)
    assert "&lt;b&gt;" in page._repr_html_() and "<b>" not in page._repr_html_()


def deadlocked(pp: int, count: int) -> list[list[str]]:
    rows = []
    for rank in range(pp):
        program = "F" * rank + "FB" * (count - rank) + "B" * rank
        rows.append([f"{rank}{kind}{program[:i].count(kind)}" for i, kind in enumerate(program)])
    return rows


def one_f_one_b_rows(pp: int, count: int) -> list[list[str]]:
    """In the end rank 0 gets a gradient every three steps, and B takes two."""
    return [[f"{rank}{text[1:]}" for text in row] for rank, row in enumerate(reversed(deadlocked(pp, count)))]


@pytest.mark.parametrize(
    ("name", "answer", "sentence"),
    [
        (
            "12.schedule",
            one_f_one_b_rows,
            "33 steps; its longest wait after a first gradient: rank 0 idles 1 step before",
        ),
        ("12.schedule", deadlocked, "Your table stops after 4 actions: rank 0 at 0B0, which needs 1B0; rank 1 at 1F1"),
        ("12.schedule", None, "Your table takes 25.5 steps, and no rank waits once it has begun."),
        (
            "17.buffers",
            lambda order: [0 for step in order if step > 0],
            "held twice in 2 places, first buffer 0",
        ),
        (
            "17.buffers",
            lambda order: [i % 2 for i in range(sum(s > 0 for s in order))],
            "3 inputs; held twice in 1 place",
        ),
        ("17.buffers", None, "Your plan: 3 buffers for 4 inputs, at most 3 held at once, no buffer held twice."),
        ("06.shapes", None, "all shapes are right."),
    ],
)
def test_what_the_reader_made_is_drawn(name, answer, sentence) -> None:
    known = exercises(name[:2])[name]
    assert known.draw is not None
    figure = known.draw(answer or known.solution)
    assert figure is not None and sentence in figure.sentence and len(figure.png) > 5000


def test_of_a_ladder_the_readers_answer_is_used_from_its_first_target_on(capsys) -> None:
    assert check("12.schedule", one_f_one_b_rows) is one_f_one_b_rows
    assert "the next cells use labkit's" not in capsys.readouterr().out
    assert check("12.schedule", deadlocked) is exercises("12")["12.schedule"].solution
    assert "the next cells use labkit's solution" in capsys.readouterr().out


@pytest.mark.parametrize("answer", [None, lambda *case: 3, lambda *case: [["1F"]], lambda *case: 1 / 0])
@pytest.mark.parametrize("name", ["06.shapes", "12.schedule", "17.buffers"])
def test_an_answer_that_cannot_be_drawn_is_still_scored(name, answer, capsys) -> None:
    check(name, answer)
    assert capsys.readouterr().out.startswith(f"{name}: ")
