"""`check`: score an answer, show the score, and give back what the rest of the chapter works with."""

from __future__ import annotations

from typing import Any

from labkit.check.board_post import post
from labkit.check.notebook_output import show
from labkit.check.progress import kept
from labkit.check.score_page import ScorePage
from labkit.check.scoring import Drawing, named, score
from labkit.check.untouched import untouched
from labkit.check.watched import Watch


def check(name: str, answer: Any) -> Any:
    """Show the score of an answer; return the answer if it is right, otherwise labkit's solution.

    So the reader's own function is the one that later cells call: `splits = check("14.splits", splits)`. Of an exercise
    with a ladder of targets the answer is given back as soon as it meets the first one. Where the exercise has a
    drawing, what a reader's answer makes is drawn below. Progress is kept for `labkit progress`; if LABKIT_BOARD names
    a board (`labkit board`), the score is posted there. Raises ValueError only if there is no such exercise.
    """
    exercise, found = named(name), score(name, answer)
    attempted = found.ok or not untouched(name, answer)
    is_used = found.outcomes[0].passed if exercise.ladder else found.ok
    solution = None if is_used else exercise.solution
    problem = kept("check", name, "solved" if found.ok else "tried") if attempted else ""
    remark = " ".join(filter(None, [problem, post(found, attempted=attempted)]))
    show(ScorePage(found, attempted=attempted, solved_for_you=solution is not None, remark=remark))
    if exercise.draw and attempted:
        _show_drawing(exercise.draw, answer)
    return solution or answer


def _show_drawing(draw: Drawing, answer: Any) -> None:
    """Show the drawing of an answer; an answer that raises or does not end has none."""
    watch = Watch(answer)
    try:
        with watch.alarm():
            figure = draw(watch.answer)
    except (Exception, SystemExit):
        return
    if figure is not None:
        show(figure)
