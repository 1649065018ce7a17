"""Bets on what a cell will show, and the file that keeps them with the rest of a reader's progress."""

import json
import multiprocessing
from inspect import signature
from pathlib import Path

import pytest

from labkit.check import predict, predictions
from labkit.check import progress as kept
from labkit.check.bet_control import bet_control
from labkit.check.bets import Bet
from labkit.cli import main


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("LABKIT_PROGRESS", str(path))
    return path


def said(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_without_an_answer_nothing_is_bet_and_the_chapter_goes_on(capsys, file) -> None:
    bet = predict("06.bytes")
    assert "Place your bet: none, 25 % or 100 %." in said(capsys)
    bet.settle("none")
    assert said(capsys).startswith("06.bytes: No bet was placed; it is none. An all-reduce is a reduce-scatter")
    assert not file.exists()


def test_a_wrong_choice_is_told_its_reasoning_and_the_right_one(capsys, file) -> None:
    predict("06.bytes", "100 %").settle("none")
    words = said(capsys)
    assert "Not this time: you bet 100 %, and it is none. 100 %? There are twice as many messages" in words
    assert "g_s is the first half of it" in words and kept.read(file)["predict"] == {"06.bytes": "wrong"}


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        (96, "right", "Right: it is 96 steps."),
        (95, "near", "Near: you bet 95 steps, and it is 96 steps."),
        (33, "wrong", "33 steps? That is 1F1B's time"),
        (24, "wrong", "24 steps? That is the work of one rank."),
        (7, "wrong", "you bet 7 steps, and it is 96 steps. A rank cannot take the next microbatch"),
    ],
)
def test_a_number_is_right_near_or_wrong(answer, state, words, capsys, file) -> None:
    predict("12.one", answer, p=4, m=8).settle(96.0)
    assert words in said(capsys) and kept.read(file)["predict"] == {"12.one": state}


def test_a_choice_that_depends_on_the_number_of_ranks_may_be_the_only_one(capsys) -> None:
    predict("12.waits", "ranks 0 and 1", p=2).settle("ranks 0 and 1")
    assert "Right: it is ranks 0 and 1." in said(capsys)
    predict("12.waits", p=2)
    assert said(capsys).endswith("Place your bet: ranks 0 and 1.")


def test_the_first_bet_counts(file) -> None:
    for answer in ("25 %", "none"):
        predict("06.bytes", answer).settle("none")
    assert kept.read(file)["predict"] == {"06.bytes": "wrong"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: predict("06.byte"), r"no prediction '06.byte'; did you mean '06.bytes'\?"),
        (lambda: predict("06.bytes", "50 %"), "'50 %' is not a choice; choose none, 25 % or 100 %"),
        (lambda: predict("12.one", "many", p=4, m=8), "'many' is not a number"),
        (lambda: predict("06.bytes").settle("50 %"), "'50 %' came out, which is not among the choices"),
    ],
)
def test_what_cannot_be_bet_is_said(call, words) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_every_prediction_has_an_answer_and_a_reason_for_each_choice() -> None:
    for name, prediction in predictions().items():
        made = prediction.misread or prediction.choices
        bet = Bet(prediction, dict.fromkeys(signature(made).parameters if callable(made) else (), 4))
        assert bool(bet.choices) != bool(prediction.because), name
        assert all(bet.choices.values()) and (bet.choices or bet.misread), name


def test_the_control_commits_once_and_says_what_is_missing() -> None:
    bet = Bet(predictions("12")["12.one"], {"p": 4, "m": 8})
    _, row, below = bet_control(bet.name, "How long?", [], "steps", bet.place).children
    field, (button, words) = row.children[0], below.children
    for value, problem in (("", "Choose an answer first."), ("many", "many is not a number.")):
        field.value = value
        button.click()
        assert words.value == problem and bet.answer is None
    field.value = "1,000"
    button.click()
    assert bet.answer == 1000 and field.disabled and "Your bet: 1,000 steps." in words.value


# ---- progress ----


def test_what_is_solved_stays_solved(file) -> None:
    for state in ("tried", "solved", "tried"):
        kept.record("check", "06.shapes", state)
    assert kept.read(file)["check"] == {"06.shapes": "solved"}


def test_nothing_is_kept_where_nobody_sits(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_PROGRESS")
    kept.record("check", "06.shapes", "solved")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("JPY_SESSION_NAME", "06.ipynb")
    kept.record("check", "06.shapes", "solved")
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def _many(which: int) -> None:
    for number in range(40):
        kept.record("check", f"{which:02}.{number}", "solved")


def test_two_notebooks_at_once_lose_nothing(file) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_many, args=(which,)) for which in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(kept.read(file)["check"]) == 80


@pytest.mark.parametrize("text", ["{", "[]", '{"check": 3}'])
def test_a_broken_file_is_named_and_left_alone(text, file, capsys) -> None:
    file.write_text(text)
    predict("06.bytes", "none").settle("none")
    assert f"Progress was not kept: {file} is not" in said(capsys)
    assert main(["progress"]) == main(["progress", "--reset"]) == 2
    assert str(file) in capsys.readouterr().err and file.read_text() == text


def test_a_folder_that_cannot_be_written_is_said_and_the_score_stays(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "missing" / "progress.json"))
    assert "Progress was not kept: [Errno 2]" in kept.kept("check", "06.shapes", "solved")


def test_the_command_counts_by_chapter(file, capsys) -> None:
    kept.record("check", "06.shapes", "solved")
    kept.record("check", "06.seeds", "tried")
    kept.record("predict", "06.bytes", "right")
    kept.record("hunt", "06", ["one", "two (shown)"])
    assert main(["progress", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row.pop("chapter"): [*row.values()] for row in found["chapters"]}
    assert found["file"] == str(file) and rows.pop("06 sequence parallel") == [3, 2, 1, 1, 1, 0, 1]
    assert len(rows) >= 20 and all(sum(row[1:]) == 0 and row[0] >= 3 for row in rows.values())
    assert main(["progress"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[7].split() == ["06", "sequence", "parallel", "3", "2", "1", "1", "1", "-", "1"]
    assert main(["progress", "--reset"]) == 0 and not file.exists()
    assert main(["progress"]) == 0 and "nothing yet" in capsys.readouterr().out
