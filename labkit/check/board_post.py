"""A learner's side of `labkit board`: what `check` found is posted there, if LABKIT_BOARD names one.

    LABKIT_BOARD=http://TOKEN@192.168.1.7:8765

No name is needed: a learner gets two words at random, or those of LABKIT_BOARD_NAME. Who posts for a learner must know
a secret, which is kept with the learner's progress. Without the variable nothing is sent anywhere.
"""

from __future__ import annotations

import json
import os
import random
import secrets
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from labkit.check.progress import identity, is_kept
from labkit.check.scoring import Score

SECONDS = 2.0
"""A board that is not reached by then costs the reader no more."""
_COLOURS = ("amber", "azure", "copper", "coral", "cyan", "gold", "green", "indigo", "ivory", "jade", "lilac",
            "lime", "olive", "opal", "pearl", "plum", "ruby", "sepia", "silver", "teal", "umber", "white")  # fmt: skip
_ANIMALS = ("badger", "beaver", "crane", "deer", "eagle", "falcon", "finch", "fox", "hare", "heron", "ibex",
            "jay", "lynx", "marten", "moose", "newt", "otter", "owl", "raven", "seal", "stork", "swan")  # fmt: skip


def new_identity() -> dict[str, str]:
    """Return a learner: an id that is public, a secret, and two words to be called by."""
    words = f"{random.SystemRandom().choice(_COLOURS)} {random.SystemRandom().choice(_ANIMALS)}"
    return {"learner": secrets.token_hex(8), "secret": secrets.token_hex(16), "name": words}


def post(found: Score, *, attempted: bool) -> str:
    """Post a score to the board, if there is one; return why it was not taken, or an empty text."""
    address = os.environ.get("LABKIT_BOARD", "")
    if not address or not is_kept():
        return ""
    try:
        me = identity(new_identity)
        body: dict[str, Any] = me | {"exercise": found.exercise, "passed": found.passed, "total": found.total}
        body |= {"attempted": attempted, "name": os.environ.get("LABKIT_BOARD_NAME") or me["name"]}
        send(address, body)
    except HTTPError as refusal:
        return f"The board did not take the score: {refusal.read(500).decode(errors='replace').strip()}."
    except (OSError, HTTPException, URLError, ValueError) as problem:
        return f"The board at {urlsplit(address).hostname} was not reached ({problem}); the next check tries again."
    return ""


def send(address: str, body: dict[str, Any]) -> None:
    """Send a score. Raises HTTPError with the board's words for one that it refuses, and OSError."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or not parts.username:
        raise ValueError("LABKIT_BOARD must be http://TOKEN@HOST:PORT, as `labkit board` prints it")
    base = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    heads = {"Authorization": f"Bearer {parts.username}", "Content-Type": "application/json"}
    request = Request(f"{base}/score", json.dumps(body).encode(), heads)
    opener = build_opener(ProxyHandler({}))  # the room's own network
    with opener.open(request, timeout=SECONDS) as answer:
        answer.read()
