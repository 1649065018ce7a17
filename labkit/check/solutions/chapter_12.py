"""Solutions of chapter 12, Write your own schedule."""

import re

from labkit.check.solution_source import solves


@solves("12.kept")
def kept(row):
    """F keeps an activation, B or W gives it back; I does not, because W still reads it."""
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    now = most = 0
    for action in row:
        now += change[action.strip("0123456789")]
        most = max(most, now)
    return most


def _row(program, here, back=-1):
    return [
        f"{here if kind.isupper() else back}{kind.upper()}{program[:i].count(kind)}" for i, kind in enumerate(program)
    ]


@solves("12.schedule")
def schedule(pp, microbatches):
    """ZB-V: rank r holds stages r and 2p - 1 - r, each with half of its layers.

    Fill the V with forwards; then a forward, an I and a W, one stage after the other; on
    the way out every I as soon as it can be, W where nothing else is ready. The program is
    for 2p - 1 microbatches or more; those that are not there are left out.
    """
    planned = max(microbatches, 2 * pp - 1)
    rows = []
    for rank in range(pp):
        left = pp - rank
        fill = "F" * (2 * left - 1) + "fF" * rank + "fiw" * left
        steady = "FIWfiw" * (planned - 2 * pp + rank + 1)
        drain = "IWfiw" * (left - 1) + "Ii" * rank + "IW" * left + "w" * rank + "W" * rank
        row = _row(fill + steady + drain, rank, 2 * pp - 1 - rank)
        rows.append([action for action in row if int(action.lstrip("0123456789")[1:]) < microbatches])
    return rows


@solves("12.few")
def few():
    """As many microbatches as ranks: everything may be kept, so no W has to be early.

    A rank hands a gradient on as soon as it can, and fills every other half step with what
    is left: first f, then the other stage's I, then w. All W of the way down come last.
    """
    programs = [
        "FFFFfifififiIwIwIwIwWWWW",
        "FFFFffififiIiIwIwIwwWWWW",
        "FFFfFffifiIiIiIwIwwwWWWW",
        "FfFfFfFfiIiIiIiIwwwwWWWW",
    ]
    return [_row(program, rank, 7 - rank) for rank, program in enumerate(programs)]


@solves("12.crossed")
def crossed(rows):
    """Between two ranks one order pairs all messages; what stays on a rank is not sent."""
    rank_of = {action: rank for rank, row in enumerate(rows) for action in row}

    def reader(action):
        stage, kind, i = re.findall(r"(\d+)([FBIW])(\d+)", action)[0]
        near = int(stage) + (1 if kind == "F" else -1)
        kinds = {"F": "F", "B": "BI", "I": "BI", "W": ""}[kind]
        return next((name for each in kinds if (name := f"{near}{each}{i}") in rank_of), None)

    sent = {}  # (from, to) -> the actions that send, in the order of their row
    for action, rank in rank_of.items():
        target = rank_of.get(reader(action), rank)
        if target != rank:
            sent.setdefault((rank, target), []).append(action)
    pairs = []
    for (_, target), senders in sent.items():
        wanted = {reader(action) for action in senders}
        receivers = [action for action in rows[target] if action in wanted]
        pairs += [pair for pair in zip(senders, receivers) if reader(pair[0]) != pair[1]]
    return pairs
