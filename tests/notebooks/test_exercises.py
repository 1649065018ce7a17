"""Every exercise ships a solution that passes and three wrong answers, each of which fails for its stated reason.

`notebooks/solutions/NN_name.py` belongs to exercise `NN.name` and holds `solution`, `wrong_1`, `wrong_2`, `wrong_3`.
"""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from labkit.check import check, exercises

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
FILES = sorted((NOTEBOOKS / "solutions").glob("[0-9][0-9]_*.py"))
WRONG = ("wrong_1", "wrong_2", "wrong_3")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"solutions_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exercise_of(path: Path) -> str:
    return path.stem.replace("_", ".", 1)


@pytest.mark.parametrize("path", FILES, ids=exercise_of)
def test_solution_passes_every_case(path: Path) -> None:
    score = check(exercise_of(path), load(path).solution)
    assert score.ok, repr(score)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("path", FILES, ids=exercise_of)
def test_wrong_answer_fails_and_says_what_it_believes(path: Path, wrong: str) -> None:
    answer = getattr(load(path), wrong)
    assert answer.__doc__ and len(answer.__doc__.split()) > 4, "the docstring names the misunderstanding"
    score = check(exercise_of(path), answer)
    assert not score.ok, f"{wrong} passes {score.total} of {score.total} cases"
    failed = [str(outcome) for outcome in score.outcomes if not outcome.passed]
    assert all(sentence.startswith("Given ") and "expected" in sentence and "got" in sentence for sentence in failed)
    assert "\n" not in "".join(failed)


def test_a_norm_exactly_on_the_limit_is_within_it() -> None:
    """`x, if its norm is at most limit`: who counts it as clipped is told so."""

    def counts_the_limit(x, limit, count):
        finite = x.isfinite().all()
        kept = x.where(finite, 0.0)
        norm = kept.norm()
        count.add_((~finite | (norm >= limit)).to(count.dtype))
        return kept.where(norm <= limit, kept * (limit / norm))

    score = check("16.clipped", counts_the_limit)
    assert score.total - score.passed == 1 and "count 4, got count 5" in repr(score)


def test_buffers_may_be_yielded() -> None:
    right = load(NOTEBOOKS / "solutions" / "17_buffers.py").solution
    score = check("17.buffers", lambda order: (buffer for buffer in right(order)))
    assert score.ok, repr(score)
    wrong = check("17.buffers", lambda order: (0 for step in order if step > 0))
    assert "expected [0, 1, 0], got [0, 0, 0]" in repr(wrong), "numbers, not the address of a generator"


def test_wrong_answers_differ_from_each_other() -> None:
    for path in FILES:
        module = load(path)
        assert len({getattr(module, name).__doc__ for name in WRONG}) == 3, path.name


def test_every_exercise_has_a_solution_and_every_solution_an_exercise() -> None:
    assert sorted(exercises()) == sorted(map(exercise_of, FILES))


def test_every_exercise_that_a_chapter_asks_for_exists() -> None:
    asked = set()
    for notebook in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        for cell in json.loads(notebook.read_text())["cells"]:
            if cell["cell_type"] == "code":
                asked |= set(re.findall(r"""check\(\s*["'](\d\d\.\w+)["']""", "".join(cell["source"])))
    assert asked <= set(exercises()), f"unknown: {sorted(asked - set(exercises()))}"
    never = set(exercises()) - asked
    assert not never, f"no chapter asks for {sorted(never)}"


def test_failed_groups_name_order_sizes_and_token() -> None:
    score = check("02.groups", lambda order, sizes, token: None)
    assert "Given order 'pp-dp-tp', sizes {'tp': 3, 'dp': 2, 'pp': 2} and token 'tp', expected" in repr(score)


def test_all_reduces_are_not_counted_in_a_group_of_one() -> None:
    solution = load(NOTEBOOKS / "solutions" / "03_f_and_g.py").solution
    score = check("03.f_and_g", lambda *case: solution(*case[:-1], list))  # never talks, which is right for one rank
    assert all(outcome.passed == outcome.given.startswith("tp 1,") for outcome in score.outcomes)
