"""The scores of a board, in one SQLite file: what was acknowledged survives kill -9 and a restart."""

from __future__ import annotations

import hashlib
import hmac
import sqlite3
import time
import unicodedata
from pathlib import Path
from typing import Any

MOST_LEARNERS = 1000
LONGEST_NAME = 40
_HEX = frozenset("0123456789abcdef")

_TABLES = """
create table if not exists learners (id text primary key, secret text not null, name text not null);
create table if not exists scores (
    learner text not null, exercise text not null, passed int not null, total int not null, tries int not null,
    at real not null, primary key (learner, exercise)
);
"""


class RefusedError(Exception):
    """A post that is not taken, with the HTTP status that says so."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Store:
    """Learners and the best score of each in each exercise."""

    def __init__(self, path: Path, exercises: set[str]) -> None:
        """exercises: their names. Raises sqlite3.DatabaseError if the file is something else."""
        self.exercises = exercises
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.execute("pragma journal_mode = wal")
        self._base.execute("pragma synchronous = normal")
        self._base.executescript(_TABLES)

    def close(self) -> None:
        self._base.close()

    def take(self, post: Any) -> dict[str, Any]:
        """Keep a score and return its row. Raises RefusedError for one that cannot be, or that is somebody else's."""
        learner, secret, name = self._who(post)
        exercise, passed, total = self._what(post)
        with self._base:
            self._base.execute("begin immediate")
            self._admit(learner, secret, name)
            self._base.execute(
                "insert into scores values (?, ?, ?, ?, 1, ?) on conflict do update set tries = tries + 1,"
                " at = case when excluded.passed > passed then excluded.at else at end,"
                " passed = max(passed, excluded.passed), total = excluded.total",
                (learner, exercise, passed, total, time.time()),
            )
        return next(row for row in self.rows(learner) if row["exercise"] == exercise)

    def _who(self, post: Any) -> tuple[str, str, str]:
        found = [post.get(key) for key in ("learner", "secret", "name")] if isinstance(post, dict) else []
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) != 3:
            raise RefusedError(400, "a score is an object with learner, secret, name, exercise, passed, total")
        learner, secret, name = texts
        if not all(8 <= len(text) <= 64 and _HEX.issuperset(text) for text in (learner, secret)):
            raise RefusedError(400, "learner and secret must be 8 to 64 hexadecimal digits")
        shown = "".join(c for c in name if unicodedata.category(c)[0] not in "CZ" or c == " ")
        return learner, secret, " ".join(shown.split())[:LONGEST_NAME] or learner[:6]

    def _what(self, post: dict[str, Any]) -> tuple[str, int, int]:
        exercise, passed, total = (post.get(key) for key in ("exercise", "passed", "total"))
        if not isinstance(exercise, str) or exercise not in self.exercises:
            raise RefusedError(400, "there is no such exercise")
        if type(passed) is not int or type(total) is not int or not 0 <= passed <= total <= 1000:
            raise RefusedError(400, "passed and total must be integers with 0 <= passed <= total <= 1000")
        return exercise, passed, total

    def _admit(self, learner: str, secret: str, name: str) -> None:
        """Add a new learner, or check that this is the one it says."""
        hashed = hashlib.sha256(secret.encode()).hexdigest()
        known = self._base.execute("select secret from learners where id = ?", (learner,)).fetchone()
        if known is None:
            if self._base.execute("select count(*) from learners").fetchone()[0] >= MOST_LEARNERS:
                raise RefusedError(403, f"this board has {MOST_LEARNERS} learners already")
        elif not hmac.compare_digest(known[0], hashed):
            raise RefusedError(403, "this learner posts with another secret")
        self._base.execute("insert into learners values (?, ?, ?) on conflict do update set name = excluded.name",
                           (learner, hashed, name))  # fmt: skip

    def rows(self, learner: str | None = None) -> list[dict[str, Any]]:
        """Return a row for each score, of all learners or of one, in the order of names and exercises."""
        heads = ("learner", "name", "exercise", "passed", "total", "tries", "at")
        found = self._base.execute(
            "select learner, name, exercise, passed, total, tries, at from scores join learners on learner = id"
            " where ?1 is null or learner = ?1 order by name, learner, exercise",
            (learner,),
        )
        return [dict(zip(heads, row)) for row in found]
