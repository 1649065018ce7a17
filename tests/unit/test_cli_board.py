"""`labkit board`: what a room posts is kept and shown; what should not count is refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from labkit.check import check
from labkit.check.board_post import new_identity, send
from labkit.cli import main

TOKEN = "room-token"


@dataclass
class Board:
    """A board in a process of its own."""

    file: Path
    process: subprocess.Popen[str] | None = None
    port: int = 0

    def start(self) -> Board:
        words = ["board", "--port", str(self.port), "--file", str(self.file), "--token", TOKEN]
        self.process = subprocess.Popen([sys.executable, "-m", "labkit.cli", *words], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.fullmatch(rf"board: http://127\.0\.0\.1:(\d+)/\?token={TOKEN}\n", said)
        assert found, said
        self.port = int(found[1])
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(number)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code

    @property
    def address(self) -> str:
        """What learners have in LABKIT_BOARD."""
        return f"http://{TOKEN}@127.0.0.1:{self.port}"

    def rows(self) -> list[dict[str, Any]]:
        """Return what the page is told first."""
        found: list[dict[str, Any]] = []
        with suppress(TimeoutError), urlopen(f"{self.url('events')}", timeout=1.0) as answer:
            found.extend(json.loads(line[6:]) for line in answer if line.startswith(b"data: "))
        return found

    def url(self, path: str = "", token: str = TOKEN) -> str:
        return f"http://127.0.0.1:{self.port}/{path}?token={token}"


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    found = Board(tmp_path / "board.sqlite").start()
    yield found
    if found.process is not None and found.process.poll() is None:
        found.stop()


def body(**changes: Any) -> dict[str, Any]:
    return {**new_identity(), "exercise": "02.digits", "passed": 3, "total": 5, "attempted": True, **changes}


def refusal(address: str, post: Any) -> tuple[int, str]:
    with pytest.raises(HTTPError) as error:
        send(address, post)
    with error.value as answer:
        return answer.code, answer.read().decode()


def test_thirty_learners_at_once_and_a_restart_lose_nothing(board: Board) -> None:
    learners = [new_identity() for _ in range(30)]

    def work(me: dict[str, str]) -> None:
        for passed in (0, 3, 5, 2):
            send(board.address, me | {"exercise": "02.groups", "passed": passed, "total": 5, "attempted": True})

    with ThreadPoolExecutor(30) as room:
        list(room.map(work, learners))
    rows = {row["learner"]: row for row in board.rows()}
    assert set(rows) == {me["learner"] for me in learners}
    assert all((row["passed"], row["total"], row["tries"]) == (5, 5, 4) for row in rows.values())
    assert board.stop() == 0
    again = {row["learner"]: row for row in board.start().rows()}
    assert again == rows


def test_kill_9_in_the_middle_loses_nothing_that_was_answered(board: Board) -> None:
    me, answered = new_identity(), 0
    killer = threading.Timer(0.3, lambda: board.stop(signal.SIGKILL))
    killer.start()
    for passed in range(100_000):
        try:
            send(board.address, me | {"exercise": "02.place", "passed": min(passed, 900), "total": 1000})
        except (OSError, HTTPError):
            break
        answered = passed + 1
    killer.join()
    assert answered > 3, "some posts came before"
    row = board.start().rows()[0]
    assert row["tries"] in (answered, answered + 1), "the last one may have been kept and not answered"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"exercise": "99.mine"}, 400, "no such exercise"),
        ({"passed": 6}, 400, "0 <= passed <= total"),
        ({"passed": True}, 400, "must be integers"),
        ({"passed": -1}, 400, "0 <= passed"),
        ({"total": 10**9}, 400, "total <= 1000"),
        ({"learner": "x"}, 400, "hexadecimal"),
        ({"name": 3}, 400, "an object with"),
        ({"name": "a" * 70_000}, 400, ""),
    ],
)
def test_a_score_that_cannot_be_is_refused(board: Board, changes: dict[str, Any], code: int, words: str) -> None:
    if "a" * 70_000 in changes.values():
        with pytest.raises((HTTPError, OSError)):  # tornado closes the connection of a body that is too large
            send(board.address, body(**changes))
    else:
        found = refusal(board.address, body(**changes))
        assert found[0] == code and words in found[1]
    assert board.rows() == []


def test_a_wrong_token_and_a_score_in_somebody_elses_name_are_refused(board: Board) -> None:
    mine = body()
    send(board.address, mine)
    assert refusal(board.address, mine | {"secret": "0" * 32, "passed": 5}) == (
        403,
        "this learner posts with another secret",
    )
    wrong = board.address.replace(TOKEN, "other-token")
    assert refusal(wrong, mine | {"passed": 5}) == (401, "wrong or missing token")
    for path in ("", "events", "scores.csv"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(board.url(path, "other-token"), timeout=5)
    assert [row["passed"] for row in board.rows()] == [3]


def test_names_are_words_and_the_table_computes_nothing(board: Board) -> None:
    send(board.address, body(name="<b>=1+1\u202e\n</b>" + "x" * 100))
    send(board.address, body(name="=1+1", exercise="03.plan"))
    names = [row["name"] for row in board.rows()]
    assert names == ["<b>=1+1</b>" + "x" * 29, "=1+1"]
    with urlopen(board.url("scores.csv"), timeout=5) as answer:
        assert answer.read().decode().splitlines()[2] == "'=1+1,03.plan,3,5,1"


def test_check_posts_where_a_board_is_named_and_nowhere_else(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    check("14.splits", lambda counts, rank: None)
    assert board.rows() == []
    monkeypatch.setenv("LABKIT_BOARD", board.address)
    check("14.splits", lambda counts, rank: None)
    check("14.splits", lambda counts, rank: None)
    row = board.rows()[0]
    assert (row["exercise"], row["passed"], row["tries"]) == ("14.splits", 0, 2) and len(row["name"].split()) == 2
    kept = json.loads((tmp_path / "progress.json").read_text())
    assert kept["board"]["learner"] == row["learner"] and kept["check"] == {"14.splits": "tried"}
    monkeypatch.setenv("LABKIT_BOARD_NAME", "table 4")
    check("14.splits", lambda counts, rank: None)
    assert board.rows()[0]["name"] == "table 4"
    capsys.readouterr()
    for address, words in {
        board.address.replace(TOKEN, "other-token"): "The board did not take the score: wrong or missing token.",
        "http://127.0.0.1:1": "LABKIT_BOARD must be http://TOKEN@HOST:PORT",
        f"http://{TOKEN}@127.0.0.1:1": "The board at 127.0.0.1 was not reached",
    }.items():
        monkeypatch.setenv("LABKIT_BOARD", address)
        check("14.splits", lambda counts, rank: None)
        assert words in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_served_is_refused(board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").write_text("not a database, " * 100)
    for words, said in {
        ("--port", str(board.port)): "Address already in use",
        ("--token", "ä"): "--token: must have 8 to 64 letters",
        ("--file", str(tmp_path / "other")): "cannot be used as a board",
        ("--file", "/proc/x/board.sqlite"): "--file",
        ("--host", "203.0.113.1"): "--host 203.0.113.1",
    }.items():
        assert main(["board", *words, *([] if "--file" in words else ["--file", str(tmp_path / "new.sqlite")])]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.sweep
def test_fifty_posts_a_second_for_a_minute(board: Board) -> None:
    """Thirty learners; each answer within 200 ms but for one in a hundred, and every post is kept."""
    learners = [new_identity() for _ in range(30)]
    seconds: list[float] = []

    def post(number: int) -> None:
        time.sleep(max(0.0, start + number / 50 - time.monotonic()))
        begun = time.monotonic()
        send(board.address, learners[number % 30] | {"exercise": "02.groups", "passed": number % 6, "total": 5})
        seconds.append(time.monotonic() - begun)

    start = time.monotonic()
    with ThreadPoolExecutor(30) as room:
        list(room.map(post, range(3000)))
    rows = board.rows()
    assert len(rows) == 30 and sum(row["tries"] for row in rows) == 3000
    assert np.quantile(seconds, 0.99) < 0.2, np.quantile(seconds, [0.5, 0.9, 0.99, 1.0])
