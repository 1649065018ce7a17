"""Solutions of chapter 12, Write your own schedule."""

import re

from labkit.check.solution_source import solves


def _most(row, frees):
    """Largest number of forwards whose freeing action has not come."""
    kinds = [action.strip("0123456789") for action in row]
    changes = [(kind == "F") - (kind in frees) for kind in kinds]
    return max(sum(changes[: i + 1]) for i in range(len(row)))


@solves("12.kept")
def kept(row):
    """B or W gives an activation back; I does not."""
    return _most(row, "BW")


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


def _met(rows, travels, kinds="FBI"):
    """Crossed pairs among messages of these kinds; `travels(a, b)`: is one sent?"""
    rank_of = {action: rank for rank, row in enumerate(rows) for action in row}
    reads, sent, received = {}, {}, {}
    for sender, a in rank_of.items():
        stage, kind, i = re.findall(r"(\d+)([FBIW])(\d+)", sender)[0]
        near = int(stage) + (1 if kind == "F" else -1)
        readers = [f"{near}{each}{i}" for each in ("F" if kind == "F" else "BI")]
        reader = next((each for each in readers if kind != "W" and each in rank_of), None)
        if reader and kind in kinds and travels(a, rank_of[reader]):
            reads[sender] = reader
            sent.setdefault((a, rank_of[reader]), []).append(sender)
    for way, senders in sent.items():
        mine = {reads[sender] for sender in senders}
        received[way] = [action for action in rows[way[1]] if action in mine]
    pairs = [pair for way in sent for pair in zip(sent[way], received[way])]
    return [(made, used) for made, used in pairs if reads[made] != used]


@solves("12.crossed")
def crossed(rows):
    """Between two ranks one order pairs all messages; what stays on a rank is none."""
    return _met(rows, lambda a, b: a != b)
