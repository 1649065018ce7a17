"""The server of a board: takes scores, shows the page, and tells every open page of a new score at once."""

from __future__ import annotations

import asyncio
import csv
import hmac
import io
import json
from typing import Any

from tornado.iostream import StreamClosedError
from tornado.web import Application, HTTPError, RequestHandler

from labkit.cli.board.page import PAGE
from labkit.cli.board.store import RefusedError, Store

LARGEST = 64 * 1024
"""Bytes of a body; a score has about 200."""
BEAT = 15.0
"""Seconds after which an open page hears a sign of life, so that one that has gone is noticed."""


class Room:
    """The store, the token, and the queues of the pages that are open."""

    def __init__(self, store: Store, token: str) -> None:
        self.store, self._token = store, token.encode()
        self.pages: set[asyncio.Queue[dict[str, Any]]] = set()

    def knows(self, token: str) -> bool:
        """Return True for the token of this board."""
        return hmac.compare_digest(token.encode(), self._token)


class _Handler(RequestHandler):
    def initialize(self, room: Room) -> None:
        self.room = room

    def set_default_headers(self) -> None:
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "no-referrer")

    def prepare(self) -> None:
        words = self.request.headers.get("Authorization", "").split()
        given = words[1] if words[:1] == ["Bearer"] and len(words) == 2 else self.get_query_argument("token", "")
        if not self.room.knows(given):
            raise HTTPError(401, "wrong or missing token")

    def write_error(self, status_code: int, **details: Any) -> None:
        error = details["exc_info"][1]
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish((isinstance(error, HTTPError) and error.log_message) or "the board failed")


class _Score(_Handler):
    def post(self) -> None:
        try:
            row = self.room.store.take(json.loads(self.request.body))
        except RefusedError as refusal:
            raise HTTPError(refusal.status, str(refusal)) from None
        except (ValueError, RecursionError):
            raise HTTPError(400, "the body must be JSON") from None
        for page in self.room.pages:
            page.put_nowait(row)
        self.finish({"passed": row["passed"], "total": row["total"]})


class _Page(_Handler):
    def get(self) -> None:
        self.set_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; "
                        "script-src 'unsafe-inline'; connect-src 'self'")  # fmt: skip
        self.finish(PAGE)


class _Events(_Handler):
    async def get(self) -> None:
        """Send all rows, then each new one (server-sent events)."""
        self.set_header("Content-Type", "text/event-stream")
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.room.pages.add(queue)
        try:
            for row in self.room.store.rows():
                queue.put_nowait(row)
            while True:
                try:
                    self.write(f"data: {json.dumps(await asyncio.wait_for(queue.get(), BEAT))}\n\n")
                except TimeoutError:
                    self.write(": still here\n\n")
                if queue.empty():
                    await self.flush()
        except StreamClosedError:
            pass
        finally:
            self.room.pages.discard(queue)


class _Table(_Handler):
    def get(self) -> None:
        text = io.StringIO()
        heads = ("name", "exercise", "passed", "total", "tries")
        writer = csv.writer(text)
        writer.writerow(heads)
        for row in self.room.store.rows():
            writer.writerow(
                [f"'{row[head]}" if str(row[head])[:1] in ("=", "+", "-", "@") else row[head] for head in heads]
            )
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.finish(text.getvalue())


def application(store: Store, token: str) -> Application:
    """Return the application of a board."""
    room = {"room": Room(store, token)}
    paths = {"/": _Page, "/score": _Score, "/events": _Events, "/scores.csv": _Table}
    return Application([(path, handler, room) for path, handler in paths.items()], log_function=lambda _: None)
