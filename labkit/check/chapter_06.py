"""Exercises and bets of chapter 06: shapes that a rank keeps, one rank's program of a block, seeds of dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.rank_threads import RankThreads, Stalled
from labkit.check.scoring import (
    ONLY_FIRST,
    Misreadings,
    Outcome,
    exercise,
    explained,
    holds,
    plain,
    raised,
    reason_of,
    shown,
)

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[Any]

# ---- the shapes that a rank keeps ----

_SIZES = ((16, 2, 8, 1), (16, 2, 8, 2), (24, 1, 12, 4))
"""(s, b, h, t)."""
_NAMES = ("norm input", "fc1 input", "gelu input", "fc2 input", "dropout mask")
_BETWEEN = ("norm input", "fc1 input", "dropout mask")
Shapes = dict[str, list[int]]


def _shapes(s: int, b: int, h: int, t: int, *, cut: Sequence[str] = _BETWEEN, inside_too: bool = False) -> Shapes:
    """Return the shapes if the tensors in `cut` have 1/t of the positions."""
    inside = [s // t if inside_too else s, b, 4 * h // t]
    return {name: ([s // t if name in cut else s, b, h] if name in _BETWEEN else list(inside)) for name in _NAMES}


def draw_shapes(answer: Any) -> Figure | None:
    """Draw the answer's shapes over two ranks with sequence parallelism; an answer of another form has no drawing."""
    from labkit.viz.kept_shapes import compare_shapes  # matplotlib, which a score does without

    s, b, h, t = _SIZES[1]
    found, whole = plain(answer(s, b, h, t, True)), _shapes(s, b, h, 1)
    if set(found) != set(whole) or any(len(shape) != 3 for shape in found.values()):
        return None
    what = f"Rank 0 of {t} with sequence parallelism, s {s}, b {b}, h {h}"
    return compare_shapes(found, _shapes(s, b, h, t), whole, what)


@exercise(
    "06.shapes",
    "Write shapes(s, b, h, t, sequence_parallel) -> the shape of each tensor that a rank keeps, by name.",
    draw=draw_shapes,
)
def shapes(answer: Any) -> Iterator[Outcome]:
    """Judge one, two and four ranks, without sequence parallelism and with it."""
    for split in (False, True):
        for s, b, h, t in _SIZES:
            words = "tensor and sequence parallel" if split else "tensor parallel"
            given = f"s {s}, b {b}, h {h} and t {t}, {words}"
            yield explained(
                given, "the shapes that a rank keeps", lambda case=(s, b, h, t, split): _judged(answer, *case)
            )


def _judged(answer: Any, s: int, b: int, h: int, t: int, split: bool) -> bool | str:
    """Return True, or the first shape that differs and the misunderstanding behind it."""
    found, right = plain(answer(s, b, h, t, split)), _shapes(s, b, h, t, cut=_BETWEEN if split else ())
    if found == right:
        return True
    if not isinstance(found, dict) or set(found) != set(right):
        return f"{shown(found)}: this is not a dict with the names {', '.join(right)}"
    name = next(name for name in right if found[name] != right[name])
    reason = next((words for words, other in _misread_shapes(s, b, h, t, split=split).items() if other == found), "")
    reason = reason or "outside of the regions positions can be cut, inside only the width"
    return f"{name} {found[name]} instead of {right[name]}: {reason}"


def _misread_shapes(s: int, b: int, h: int, t: int, *, split: bool) -> Misreadings:
    if not split:
        return {"norm and dropout see whole positions here; only sequence parallelism cuts these": _shapes(s, b, h, t)}
    narrow = {name: [s, b, h // t] if name in _BETWEEN else [s, b, 4 * h // t] for name in _NAMES}
    return {
        "nothing has changed; between the regions a rank holds only s/t positions": _shapes(s, b, h, t, cut=()),
        "fc1 keeps the gathered input; a rank keeps its s/t positions, and gathers again in backward": (
            _shapes(s, b, h, t, cut=("norm input", "dropout mask"))
        ),
        "the mask has as many positions as the tensor that it drops from": (
            _shapes(s, b, h, t, cut=("norm input", "fc1 input"))
        ),
        "only the mask is cut; norms work on s/t positions as well": _shapes(s, b, h, t, cut=("dropout mask",)),
        "the width is cut between the regions; a norm needs whole rows, so positions are cut": narrow,
        "positions and width are cut inside; inside a rank has all positions and 1/t of the width": (
            _shapes(s, b, h, t, inside_too=True)
        ),
    }


# ---- bytes on the wire ----

ask(
    "06.bytes",
    "f and g send an all-reduce each. Megatron's code cuts the sequence from g to the next f, where norm, dropout and "
    "residual are. How many more bytes leave a rank then, in forward and backward together?",
    choices={
        "none": "An all-reduce is a reduce-scatter and then an all-gather. g_s is the first half of it, and the next "
        "f_s the second: the same bytes leave at two moments. That is right for the code of section 4, which keeps the "
        "gathered tensor for backward.",
        "25 %": "Megatron drops the gathered tensor to save its memory, and gathers once more in backward. The two "
        "all-reduces of f and g were four halves, and this code sends five.",
        "100 %": "There are twice as many messages, but each sends N (t - 1)/t bytes, half of an all-reduce.",
    },
)


# ---- what the loss and a checkpoint say of a forgotten sum ----

ask(
    "06.drift",
    "In step 1 a gradient is far off, and nothing ever corrects it. How far is the ranks' loss from one process's "
    "after 60 steps?",
    choices={
        "under 1 %": "What is wrong is the gradient of gain and bias, few numbers among many. And each rank's gain "
        "follows that rank's own positions, so the rank's own loss falls as it should.",
        "1 to 50 %": "It may be off, but it falls all the same: each rank's gain follows that rank's own positions.",
        "over 50 %": "Only beside a loss of nearly nothing can it be that far. Each rank moves a gain of its own, and "
        "its loss is that of its own positions.",
    },
)
ask(
    "06.file",
    "You load rank 0's gain and bias and the joined matrices in one process. How high is the loss, compared with the "
    "last one that the ranks logged?",
    choices={
        "about the same": "Each rank's loss was measured with its own gain. In the file the positions of all ranks "
        "meet that of rank 0, and how much this costs depends on how far the gains have drifted.",
        "up to five times": "The positions of the other ranks meet a gain with which they were never trained. How many "
        "times as high the loss is depends on how small it had become.",
        "over five times": "The positions of the other ranks meet a gain with which they were never trained, and "
        "beside a loss of nearly nothing a small error is many times as high.",
    },
)


# ---- what is kept, if f_s and fc1 are two operations ----

ask(
    "06.kept",
    "f_s gathers, then an ordinary product uses the result. How many values per token and feature does a rank keep? "
    "One decimal will do.",
    misread=lambda t: {
        "That is what f and g keep. The norm's input is cut now.": 2 + 8 / t,
        "Those are the cut shapes of exercise 1. But a product saves its input, which is the gathered tensor here.": (
            2 / t + 8 / t
        ),
        "The norm's input is whole here; cut, it is 1/t.": 1 + 8 / t,
    },
    unit="values per token and feature",
    because="The norm's input is cut, 1/t. The input of fc1 is the gathered tensor, and a product saves its input, so "
    "it is whole: 1. Inside the MLP there are 8/t, as before.",
)


# ---- where independent masks agree ----

ask(
    "06.agree",
    "Two ranks draw masks that have nothing to do with each other. At how many percent of the places do they agree?",
    misread=lambda dropout: {
        "That is how often one of them keeps a value. They also agree where both drop it.": 100 * (1 - dropout),
        "That is how often both keep a value. They also agree where both drop it.": 100 * (1 - dropout) ** 2,
        "Only coins agree half of the time. Dropout keeps far more than it drops.": 50,
        "Independent is not opposite: by chance they agree most of the time.": 0,
    },
    unit="percent",
    because="Both keep with probability (1 - p)(1 - p), both drop with p p, and in the other cases they differ.",
)


# ---- gigabytes that come back ----

ask(
    "06.gigabytes",
    "32 layers, h = 4,096, 4 samples of 8,192 tokens, tp 8, 8 bytes between the regions and 4 after the last layer. "
    "How many GB per GPU does sequence parallelism give back?",
    misread=lambda: {
        "That is all of it. An eighth stays on each rank, so 7/8 come back.": 34.9,
        "That is the eighth which stays. 7/8 come back.": 4.4,
        "That is one layer's. There are 32, and 4 bytes after the last.": 0.94,
        "That is with 10 bytes per layer. Without dropout there are no masks.": 38.1,
    },
    unit="GB per GPU",
    because="32 layers with 8 bytes and 4 after the last are 260 bytes for each of 8,192 x 4 x 4,096 values, 34.9 GB, "
    "and 7/8 of them were copies.",
)


# ---- one rank's program ----

Parts = list[Array]
Case = tuple[Parts, Parts, Array, Parts, Parts]
_RESULTS = ("y", "dx", "dgain", "dA")


class _Communicator:
    """The collectives of one rank, for arrays that are cut along positions."""

    def __init__(self, rank: int, ranks: RankThreads) -> None:
        self.rank, self.size, self._ranks = rank, ranks.size, ranks

    def _of_all(self, name: str, array: Any) -> Parts:
        parts = self._ranks.meet(self.rank, name, np.array(array))
        if len({part.shape for part in parts}) > 1:
            raise ValueError(f"{name} was given arrays of shapes {[list(part.shape) for part in parts]}")
        return parts

    def all_gather(self, array: Any) -> Array:
        """Return the arrays of all ranks, one after another."""
        return np.concatenate(self._of_all("all_gather", array))

    def all_reduce(self, array: Any) -> Array:
        """Return the sum of the arrays of all ranks."""
        return np.sum(self._of_all("all_reduce", array), axis=0)

    def reduce_scatter(self, array: Any) -> Array:
        """Return this rank's part of the sum."""
        total = np.sum(self._of_all("reduce_scatter", array), axis=0)
        if len(total) % self.size:
            raise ValueError(f"reduce_scatter cuts {len(total)} positions over {self.size} ranks")
        return np.split(total, self.size)[self.rank]


def _problem(tp: int) -> Case:
    """Return x and dy [2, 3], gain [3], A [2, 3] and B [3, 2], per rank except for gain. Small integers sum exactly."""
    numbers = np.random.default_rng(40 + tp)
    x, dy, a, b = ([numbers.integers(-3, 4, shape) for _ in range(tp)] for shape in ((2, 3), (2, 3), (2, 3), (3, 2)))
    return x, dy, numbers.integers(1, 4, (3,)), a, b


def _hidden(case: Case) -> tuple[Array, Parts, Parts, Parts]:
    """Return x of all positions, and what each rank's part of the width makes of x and dy.

    That is inner, its gradient before the relu, and the gradient of x gain.
    """
    x, dy = np.concatenate(case[0]), np.concatenate(case[1])
    inner = [np.maximum((x * case[2]) @ a.T, 0) for a in case[3]]
    d_inner = [(dy @ b) * (part > 0) for part, b in zip(inner, case[4])]
    return x, inner, d_inner, [d @ a for d, a in zip(d_inner, case[3])]


def _right(case: Case) -> dict[str, Parts]:
    tp, gain = len(case[0]), case[2]
    x, inner, d_inner, d_scaled = _hidden(case)
    y = np.sum([part @ b.T for part, b in zip(inner, case[4])], axis=0)
    total = np.sum(d_scaled, axis=0)
    of_matrix = [d.T @ (x * gain) for d in d_inner]
    return {
        "y": np.split(y, tp), "dx": np.split(total * gain, tp), "dgain": [(total * x).sum(0)] * tp, "dA": of_matrix,
    }  # fmt: skip


def _misread_results(case: Case) -> dict[str, dict[str, Parts]]:
    """Return result -> words for a misunderstanding -> the arrays that it gives."""
    xs, _, gain, _, columns = case
    tp, right = len(xs), _right(case)
    x, inner, d_inner, d_scaled = _hidden(case)
    d_right = [dx // gain for dx in right["dx"]]
    own_gain = [(d * own).sum(0) for d, own in zip(d_right, xs)]
    own_rows = [np.split(d, tp)[rank].T @ (xs[rank] * gain) for rank, d in enumerate(d_inner)]
    return {
        "y": {
            "this is one term of a sum: a rank's positions met only that rank's part of the width; gather before A, "
            "and add up after B": [
                np.split(part @ b.T, tp)[rank] for rank, (part, b) in enumerate(zip(inner, columns))
            ],
        },
        "dx": {
            "this is one term of a sum: a rank's dy met only that rank's part of the width; gather dy before B, and "
            "add up after A": [np.split(part, tp)[rank] * gain for rank, part in enumerate(d_scaled)],
            "the gain is left out: dx is the gradient of x gain, times gain": d_right,
        },
        "dgain": {
            "each rank knows only its own positions; without a sum over the ranks the gains drift apart": own_gain,
            "too small by the number of ranks: these are parts of a sum, not replicas, so add them and take no mean": [
                right["dgain"][0] / tp
            ]
            * tp,
            "too large by the number of ranks: the sum over ranks is taken twice": [right["dgain"][0] * tp] * tp,
        },
        "dA": {
            "this is the sum over one rank's positions; A has met all of them, as they were gathered": own_rows,
            "the input of A is x gain, not x": [d.T @ x for d in d_inner],
        },
    }


@exercise(
    "06.sequence", "Write block(x, dy, gain, A, B, tp) -> (y, dx, dgain, dA) of one rank; all ranks run it at once."
)
def sequence_parallel(answer: Any) -> Iterator[Outcome]:
    """Judge each result of every rank at tp 1, 2 and 4, and the number of calls; at tp 1 no call is counted."""
    for tp in (1, 2, 4):
        case, ranks = _problem(tp), RankThreads(tp)
        found, error = _tried(answer, case, ranks)
        right, misread, before = _right(case), _misread_results(case), ""
        for place, name in enumerate(_RESULTS):
            said = error or _difference(name, [each[place] for each in found], right[name], misread[name])
            reason = reason_of(said)
            of_dx = before if name == "dgain" else ""  # dgain is made from dx
            yield holds(
                f"tp {tp}, {name} on every rank", "that of one process", lambda s=said, r=of_dx or reason: (r, s)
            )
            before = reason
        if tp > 1:
            for name, allowed in (("all_gather", (2, 3)), ("reduce_scatter", (2,)), ("all_reduce", (1,))):
                count = ranks.calls[name]
                said = error or ("" if count in allowed else f"{count}")
                wanted = " or ".join(map(str, allowed))
                yield holds(f"tp {tp}, calls of {name}", wanted, lambda s=said: (ONLY_FIRST, s))


def _tried(answer: Any, case: Case, ranks: RankThreads) -> tuple[list[Any], str]:
    """Return the four arrays of each rank, or words for the error."""
    x, dy, gain, a, b = case

    def program(rank: int) -> tuple[Array, ...]:
        mine = (x[rank].copy(), dy[rank].copy(), gain.copy(), a[rank].copy(), b[rank].copy())
        found = answer(*mine, _Communicator(rank, ranks))
        if not isinstance(found, tuple | list) or len(found) != 4:
            raise ValueError(f"rank {rank} returns {type(found).__name__}, not the four arrays y, dx, dgain and dA")
        return tuple(np.asarray(plain(part), dtype=float) for part in found)

    try:
        return ranks.run(program), ""
    except Stalled as stalled:
        return [], str(stalled)
    except (Exception, SystemExit) as error:
        return [], raised(error)


def _difference(name: str, found: Parts, right: Parts, misread: dict[str, Parts]) -> str:
    """Name the first rank and position that differ, and the misunderstanding; empty if nothing differs."""
    if _equal(found, right):
        return ""
    rank = next(r for r, (mine, theirs) in enumerate(zip(found, right)) if not _equal([mine], [theirs]))
    mine, theirs = found[rank], right[rank]
    if mine.shape != theirs.shape:
        return f"rank {rank} returns {list(mine.shape)}, not {list(theirs.shape)}: the shape of {name} is wrong"
    place = tuple(int(index[0]) for index in np.nonzero(mine != theirs))
    reason = next((words for words, parts in misread.items() if _equal(found, parts)), f"{name} is wrong")
    return f"on rank {rank} {mine[place]:g} instead of {theirs[place]:g} at {list(place)}: {reason}"


def _equal(found: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a.shape == np.shape(b) and np.allclose(a, b) for a, b in zip(found, others, strict=True))


# ---- seeds of dropout ----

_TP, _PP = 4, 3


@exercise(
    "06.seeds", "Write seed(place, tp_rank, pp_rank, sequence_parallel) -> the seed from which dropout there draws."
)
def seeds(answer: Any) -> Iterator[Outcome]:
    """Judge four tensor-parallel ranks times three stages: which must share a seed, and which must not."""
    for split in (False, True):
        words = "tensor and sequence parallel" if split else "tensor parallel"
        for place in ("between", "inside"):
            alike = place == "between" and not split
            for kind, claim, test in (
                ("ranks of a group", "one seed for all" if alike else "a seed for each", _in_a_group),
                ("stages", "no seed of another stage", _between_stages),
            ):
                yield explained(
                    f"{words}, {place} the regions, {kind}",
                    claim,
                    lambda t=test, p=place, s=split, a=alike: t(_seeds(answer, p, split=s), alike=a),
                )
    yield explained(
        "tensor parallel, inside and between the regions",
        "two states",
        lambda: _apart(_seeds(answer, "inside", split=False), _seeds(answer, "between", split=False)),
    )


def _seeds(answer: Any, place: str, *, split: bool) -> dict[tuple[int, int], Any]:
    found = {(t, p): plain(answer(place, t, p, split)) for p in range(_PP) for t in range(_TP)}
    for (t, p), seed in found.items():
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise TypeError(f"the seed of tp_rank {t}, pp_rank {p} is {seed!r}, not a whole number")
    return found


def _in_a_group(found: dict[tuple[int, int], Any], *, alike: bool) -> bool | str:
    for p in range(_PP):
        for a, b in combinations(range(_TP), 2):
            pair = f"tp ranks {a} and {b} of stage {p}"
            if alike and found[a, p] != found[b, p]:
                return (
                    f"{pair} draw from {found[a, p]} and {found[b, p]}: they hold the same values, which then diverge"
                )
            if not alike and found[a, p] == found[b, p]:
                return f"{pair} draw from {found[a, p]}: they hold different values, which are then dropped together"
    return True


def _apart(own: dict[tuple[int, int], Any], common: dict[tuple[int, int], Any]) -> bool | str:
    for (t, p), seed in own.items():
        if seed in common.values():
            return f"tp rank {t} of stage {p} draws from {seed} inside as well: a rank's own state repeats a common one"
    return True


def _between_stages(found: dict[tuple[int, int], Any], *, alike: bool) -> bool | str:
    for (one, seed), (other, second) in combinations(found.items(), 2):
        if one[1] != other[1] and seed == second:
            where = f"tp rank {one[0]} of stage {one[1]} and tp rank {other[0]} of stage {other[1]} draw from {seed}"
            if one[0] == other[0]:
                return f"{where}: other layers drop the same places; let the seed depend on the stage"
            return f"{where}: the sum of two ranks is not unique; give stages a larger stride"
    return True
