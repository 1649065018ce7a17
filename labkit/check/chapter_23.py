"""Exercises and bets of chapter 23: a save that survives, boxes of a checkpoint, samples after a resume.

A save is tried on a disk of its own (`Disk`), which can be killed or lose its power at each operation. Other wrong
answers are compared with those of known misunderstandings, and the score names the one that gives the same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from labkit.check.bets import ask
from labkit.check.scoring import (
    ONLY_FIRST,
    Diagnosis,
    Finding,
    Misreadings,
    Outcome,
    as_list,
    asked,
    exercise,
    holds,
    plain,
)
from labkit.check.stopping_disk import Cut, Disk, View
from labkit.train.checkpoint.boxes import Box, boxes_of_run

# ---- bets ----

ask(
    "23.held",
    "The run that was killed came back with a training loss that is lower than that of the run that nobody killed. "
    "What about the verses that neither has read: where is their loss at the end, compared with the run that nobody "
    "killed?",
    choices={
        "lower": "If the model were better, this would be lower, too. The lower training loss has another reason here.",
        "the same": "That would be so if the resume had only changed the order of what is read.",
        "higher": "The samples that follow the resume are easy, because the model has read them before. What it should "
        "have read instead, it never reads.",
    },
)

ask(
    "23.forgotten",
    "A resume forgets one of these. With which of them does the run end best on text that the model hasn't read?",
    choices={
        "Adam's state": "Moments that begin at 0 make the next steps worse, and the gap doesn't quite close.",
        "the random state": "Dropout then removes other activations. It's a different run, and about as good.",
        "the samples read": "Its training loss is the best of all, since it reads what it has read before. What it "
        "never reads it doesn't learn.",
        "the schedule's count": "The learning rate warms up again and stays higher than planned, while the text still "
        "brings new links. So a fault can even help, and a better loss doesn't prove a right resume.",
    },
)
ask(
    "23.equal",
    "A run goes on under another layout. What is equal, bit for bit, to the run that was never cut: the weights with "
    "which it begins, the samples of its first step, the loss of its first step?",
    choices={
        "all three": "Weights and samples, yes. But a loss is a sum, and other ranks add in another order.",
        "weights and samples": "Both are only moved. The loss is computed anew, by ranks that add the same numbers in "
        "another order, so it's equal up to rounding.",
        "weights only": "Samples follow from how many were read, and not from the ranks that read them.",
        "nothing": "Weights are copied, box by box, and no copy rounds anything.",
    },
)
ask(
    "23.seconds",
    "GPT-3's 175 billion parameters on 512 GPUs: 16-bit weights aren't stored, main weights and both moments are, 12 "
    "bytes per parameter. All ranks write at once, at the rate of Llama 3's storage per GPU. How long?",
    choices={
        "under a second": "2.1 TB in a second would be 4 GB/s from every GPU, which is what a good local disk does. "
        "Llama 3's storage did an eighth of a GB/s for each GPU.",
        "about half a minute": "2.1 TB are 4.1 GB for each of 512 GPUs, at 0.12 GB/s.",
        "hours": "Everything through one GPU's share of the storage would take that long. But 512 shares are written "
        "at once.",
    },
)

# ---- a save that survives ----

_FILES = {name: 4 * name.encode() for name in ("rank_0", "rank_1", "rank_2")}
_OLD = dict.fromkeys(_FILES, b"old")


def _saved(answer: Any, cut_at: int = 0) -> Disk:
    """Return a disk with a whole step_1 on which the answer has saved step_2, up to an operation."""
    disk = Disk()
    disk.make("step_1")
    for file, data in _OLD.items():
        disk.write(f"step_1/{file}", data)
        disk.sync(f"step_1/{file}")
    disk.sync("step_1")
    disk.sync(".")
    disk.operations = disk.syncs = 0
    disk.cut_at = cut_at
    with contextlib.suppress(Cut):
        answer(disk, "step_2", dict(_FILES))
    return disk


def _found(view: View) -> tuple[str, bool]:
    """Return what a restart takes, the newest `step_N`, and whether it's whole."""
    newest = max((name for name in view if name.startswith("step_")), default="nothing")
    return newest, view.get(newest) == (_FILES if newest == "step_2" else _OLD)


_WHOLE = "the new checkpoint has all files under the name that it's given"
_HIDDEN = "step_2 has its name before it has its files; write them under a name that no restart looks at"
_BYTES = "the name is on the disk before the bytes are; sync each file before the rename"
_NAMES = "the folder is there and the names in it aren't; a folder is synced as well, before it's renamed"
_RENAME = "the rename itself is lost; sync the folder that has the name"
_FRUGAL = "a sync waits for the disk: one for each file, one for their folder and one for the name are enough"


def _returns(answer: Any, look: Callable[[Disk], View], why: str) -> Finding:
    """Save without a cut, and let a restart look."""
    newest, whole = _found(look(_saved(answer)))
    if newest == "step_2" and whole:
        return True
    why = _NAMES if newest == "step_2" and look is Disk.synced_only else why
    return why, f"the restart takes {newest}, {'whole' if whole else 'not whole'}: {why}"


def _survives(answer: Any, look: Callable[[Disk], View], why: str) -> Finding:
    """Cut at every operation, and let a restart look. Whoever saves nothing survives nothing."""
    saves = _returns(answer, Disk.after_kill, _WHOLE)
    if saves is not True:
        return saves
    for cut_at in range(1, _saved(answer).operations + 1):
        newest, whole = _found(look(_saved(answer, cut_at)))
        if not whole:
            return why, f"cut at operation {cut_at}, the restart takes {newest}, which is not whole: {why}"
    return True


def _frugal(answer: Any) -> Finding:
    saves, syncs = _returns(answer, Disk.after_kill, _WHOLE), _saved(answer).syncs
    if saves is not True:
        return saves
    return (_FRUGAL, f"{syncs}: {_FRUGAL}") if syncs > len(_FILES) + 2 else True


@exercise("23.save", "Write save(disk, name, files): whenever it is cut off, the newest step_* is whole.")
def save(answer: Any) -> Iterator[Outcome]:
    """Judge a save by what a restart finds after it, and after a cut at each of its operations."""
    there, newest = "step_2 is there and whole", "the newest is whole"
    yield holds("a save that nobody interrupts", there, lambda: _returns(answer, Disk.after_kill, _WHOLE))
    for given, look, why in (
        ("kill -9 at each operation", Disk.after_kill, _HIDDEN),
        ("a power cut at each operation, when names reached the disk before bytes", Disk.names_first, _BYTES),
        ("a power cut at each operation, when only what was synced reached the disk", Disk.synced_only, _NAMES),
    ):
        yield holds(given, newest, lambda look=look, why=why: _survives(answer, look, why))
    yield holds("a power cut after it has returned", there, lambda: _returns(answer, Disk.synced_only, _RENAME))
    yield holds("3 files", "at most 5 syncs", lambda: _frugal(answer))


# ---- the boxes that a rank reads ----


def _same_in_any_order(value: Any, other: Any) -> bool:
    return sorted(plain(value)) == sorted(plain(other))


Placed = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(key, offset, shape) of a stored box; the key names the file and the box in it."""
Read = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(key, start inside the stored box, start inside the reader's box, shape)."""
Rule = Callable[[Box, Box, Box], tuple[Any, Any, Any]]
"""(stored box, reader's box, overlap) -> (start inside the stored box, start inside the reader's box, shape)."""


def _minus(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b))


def _right_read(stored: Box, mine: Box, common: Box) -> tuple[Any, Any, Any]:
    return _minus(common.offset, stored.offset), _minus(common.offset, mine.offset), common.shape


def _reads(stored: Sequence[Placed], mine: Box, rule: Rule = _right_read, *, touching: bool = False) -> list[Read]:
    """Return the reads in the order of the stored boxes. touching: add empty reads of boxes next to the reader's."""
    found = []
    for key, offset, shape in stored:
        first = tuple(map(max, offset, mine.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(offset, shape, mine.offset, mine.shape))
        common = Box(first, _minus(ends, first))
        if all(size > 0 or (touching and size == 0) for size in common.shape):
            found.append((key, *rule(Box(offset, shape), mine, common)))
    return found


def _cut(shape: tuple[int, ...], dim: int, ranks: int) -> list[Placed]:
    """Store the tensor as tensor parallelism does: cut along one dimension."""
    size, found = shape[dim] // ranks, []
    for rank in range(ranks):
        offset, part = [0] * len(shape), list(shape)
        offset[dim], part[dim] = rank * size, size
        found.append((_key(rank, offset), tuple(offset), tuple(part)))
    return found


def _sharded(shape: tuple[int, ...], ranks: int) -> list[Placed]:
    """Store the tensor as a distributed optimizer does: a run of elements for each rank, as boxes."""
    numel, found = math.prod(shape), []
    for rank in range(ranks):
        run = boxes_of_run(shape, rank * numel // ranks, (rank + 1) * numel // ranks)
        found += [(_key(rank, box.offset), box.offset, box.shape) for box, _ in run]
    return found


def _key(rank: int, offset: Iterable[int]) -> str:
    return f"rank {rank} @{','.join(map(str, offset))}"


_RESTORES = (
    ("a vector of 8 cut in two", _cut((8,), 0, 2), Box((2,), (4,))),
    ("rows 0 to 3 and rows 4 to 7 of an [8, 6]", _cut((8, 6), 0, 2), Box((0, 3), (8, 3))),
    ("rows of an [8, 6], two per rank", _cut((8, 6), 0, 4), Box((2, 0), (2, 6))),
    ("runs of 10 elements of a [4, 5]", _sharded((4, 5), 2), Box((1, 1), (2, 3))),
    ("runs of elements of a [5, 7] over 3 ranks", _sharded((5, 7), 3), Box((0, 2), (5, 4))),
    ("two experts of [4, 6] cut along the last dimension", _cut((2, 4, 6), 2, 2), Box((1, 0, 2), (1, 4, 3))),
)
"""(words, stored boxes, the reader's box)."""
_RELAYOUTS = (
    ("4 shards", (6, 5), _sharded((6, 5), 4), _cut((6, 5), 0, 3)),
    ("columns of 4 ranks", (6, 4), _cut((6, 4), 1, 4), _sharded((6, 4), 5)),
)
"""(words, shape, stored boxes, boxes of the readers)."""


@exercise(
    "23.reads",
    "Write reads(stored, offset, shape) -> (key, start inside the stored box, start inside my box, shape) by read.",
)
def reads(answer: Any) -> Iterator[Outcome]:
    """Judge six cases read by read, then all readers of two layouts: each element must come once, from its place."""
    diagnosis = Diagnosis(_same_in_any_order)
    for words, stored, mine in _RESTORES:
        yield diagnosis.outcome(
            f"{words}, my box at {list(mine.offset)} of shape {list(mine.shape)}",
            _reads(stored, mine),
            lambda stored=stored, mine=mine: as_list(answer([*stored], mine.offset, mine.shape)),
            _misread_boxes(stored, mine),
        )
    for name, shape, old, new in _RELAYOUTS:
        outcome = holds(
            f"a {list(shape)} stored as {name} and read under another layout, as {len(new)} boxes",
            "each element once, from its place",
            lambda shape=shape, old=old, new=new: _filled(answer, shape, old, new),
        )
        yield replace(outcome, reason=ONLY_FIRST)  # after a failed case these would fail for the same reason


def _misread_boxes(stored: Sequence[Placed], mine: Box) -> Misreadings:
    def ends(box: Box, own: Box, common: Box) -> tuple[Any, Any, Any]:
        return (*_right_read(box, own, common)[:2], tuple(map(sum, zip(common.offset, common.shape))))

    misread: dict[str, Rule] = {
        "the start inside the stored box counts from the whole tensor; subtract the stored box's offset": (
            lambda box, own, common: (common.offset, _minus(common.offset, own.offset), common.shape)
        ),
        "the start inside my box counts from the whole tensor; subtract my offset": (
            lambda box, own, common: (_minus(common.offset, box.offset), common.offset, common.shape)
        ),
        "both starts count from the whole tensor; subtract from each the offset of its own box": (
            lambda box, own, common: (common.offset, common.offset, common.shape)
        ),
        "the dimensions are in reverse order": lambda *boxes: tuple(part[::-1] for part in _right_read(*boxes)),
        "the last entry is where the overlap ends; give how many elements it has": ends,
    }  # pyright: ignore[reportAssignmentType]
    answers: dict[str, Any] = {reason: _reads(stored, mine, rule) for reason, rule in misread.items()}
    start = (0,) * len(mine.offset)
    answers["every stored box is read from its start, as if it held all of my box; read the overlaps alone"] = [
        (key, start, start, mine.shape) for key, _, _ in stored
    ]
    answers["boxes that only touch mine are read as well; an overlap has an element in every dimension"] = _reads(
        stored, mine, touching=True
    )
    return answers


def _filled(answer: Any, shape: tuple[int, ...], old: Sequence[Placed], new: Sequence[Placed]) -> bool | str:
    """Let every reader copy what the answer says. Return True, or the first element that is wrong, in words."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    boxes = {key: whole[_slices(at, size)] for key, at, size in old}
    for _, offset, size in new:
        held, times = np.full(size, -1), np.zeros(size, int)
        for key, start, own, part in answer([*old], offset, size):
            held[_slices(own, part)] = boxes[key][_slices(start, part)]
            times[_slices(own, part)] += 1
        for place in np.ndindex(*size):
            element = tuple(a + b for a, b in zip(place, offset))
            if times[place] != 1:
                return f"element {list(element)} read {'never' if times[place] == 0 else f'{times[place]} times'}"
            if held[place] != whole[element]:
                return f"element {list(element)} from another place"
    return True


def _slices(start: Iterable[int], shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape))


# ---- the samples after a resume ----

_RESUMES = (
    (0, 8, 2, 2, 0),
    (0, 8, 2, 2, 1),
    (160, 8, 2, 2, 1),
    (160, 16, 2, 4, 3),
    (48, 12, 3, 1, 0),
    (1000, 24, 2, 3, 2),
)
"""(samples read, global batch, micro batch, dp, rank)."""


def _rows(consumed: int, batch: int, micro: int, dp: int, rank: int) -> list[list[int]]:
    """Return the sample numbers of each microbatch that a rank reads in the next step."""
    each = batch // (micro * dp)
    return [[consumed + (j * dp + rank) * micro + b for b in range(micro)] for j in range(each)]


@exercise(
    "23.next",
    "Write next_samples(consumed, batch, micro, dp, rank) -> for each microbatch of the next step, its sample numbers.",
)
def next_samples(answer: Any) -> Iterator[Outcome]:
    """Judge six resumes, by the samples of one rank."""
    return asked(
        _RESUMES,
        given="{} samples read, global batch {}, micro batch {}, dp {}, rank {}".format,
        right=_rows,
        tried=lambda *case: as_list(answer(*case)),
        misread=_misread_rows,
    )


def _misread_rows(consumed: int, batch: int, micro: int, dp: int, rank: int) -> Misreadings:
    each = batch // (micro * dp)
    steps = consumed // batch
    return {
        "this begins with sample 0 again, whatever has been read": _rows(0, batch, micro, dp, rank),
        "this counts steps instead of samples; with another batch size that's another place": _rows(
            steps, batch, micro, dp, rank
        ),
        "every replica reads the same; each has samples of its own": _rows(consumed, batch, micro, 1, 0),
        "each rank reads its own run of samples, so a microbatch has other samples under another dp": [
            [consumed + rank * each * micro + j * micro + b for b in range(micro)] for j in range(each)
        ],
        "samples are dealt out one by one, so a microbatch has other samples under another dp": [
            [consumed + (j * micro + b) * dp + rank for b in range(micro)] for j in range(each)
        ],
        "these are the samples in one list; give one for each microbatch": [
            sample for row in _rows(consumed, batch, micro, dp, rank) for sample in row
        ],
    }
