"""Exercises and bets of chapter 24: cross-attention, buckets of distances, the copies of two tables.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.scoring import Misreadings, Outcome, asked, close, exercise

Array = NDArray[np.float64]
Groups = list[list[int]]

# ---- cross-attention ----

_LENGTHS = ((3, 5, 0), (2, 4, 1), (4, 6, 3))
"""(positions of the decoder, positions of the encoder, of which padding)."""
_WIDTH, _HEAD = 6, 4
Sample = tuple[Array, Array, Array, Array, Array, NDArray[np.bool_]]


def _sample(decoder: int, encoder: int, padding: int) -> Sample:
    """Return x, the encoder's output, three weights, and where the encoder's input is padding."""
    numbers = np.random.default_rng(24 + encoder)
    x, encoded = numbers.normal(size=(decoder, _WIDTH)), numbers.normal(size=(encoder, _WIDTH))
    wq, wk, wv = numbers.normal(size=(3, _HEAD, _WIDTH))
    return x, encoded, wq, wk, wv, np.arange(encoder) >= encoder - padding


def _softmax(scores: Array, axis: int = -1) -> Array:
    powers = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def _attend(q: Array, k: Array, v: Array, hidden: Array | None = None, *, scale: float = 0.5) -> Array:
    """Attention with weights of 1 / sqrt(4); `hidden` is added to the scores."""
    scores = scale * q @ k.T
    return _softmax(scores if hidden is None else scores + hidden) @ v


def _cross(x: Array, encoded: Array, wq: Array, wk: Array, wv: Array, padding: NDArray[np.bool_]) -> Array:
    return _attend(x @ wq.T, encoded @ wk.T, encoded @ wv.T, np.where(padding, -np.inf, 0.0))


@exercise(
    "24.cross",
    "Write cross(x, encoded, wq, wk, wv, padding) -> what one head of cross-attention makes of each position of x.",
)
def cross(answer: Any) -> Iterator[Outcome]:
    """Judge samples without padding and with it, shorter than the encoder's text."""
    return asked(
        _LENGTHS,
        given=lambda t, s, padding: f"x of {t} positions, an encoder's text of {s}, {padding} of them padding",
        right=lambda *case: _two_digits(_cross(*_sample(*case))),
        tried=lambda *case: _two_digits(answer(*_sample(*case))),
        misread=lambda *case: _misread_cross(*_sample(*case)),
        equal=close(atol=0.015),
    )


def _two_digits(values: Any) -> list[Any]:
    found: list[Any] = (np.round(np.asarray(values, dtype=float), 2) + 0.0).tolist()
    return found


def _misread_cross(
    x: Array, encoded: Array, wq: Array, wk: Array, wv: Array, padding: NDArray[np.bool_]
) -> Misreadings:
    q, k, v, hidden = x @ wq.T, encoded @ wk.T, encoded @ wv.T, np.where(padding, -np.inf, 0.0)
    later = np.triu(np.full((len(x), len(encoded)), -np.inf), 1)
    with np.errstate(invalid="ignore"):
        inverted = _attend(q, k, v, np.where(padding, 0.0, -np.inf)) if padding.any() else _attend(q, k, v)
    wrong = {
        "this is attention of x to itself; keys and values come from the encoder's output": _attend(
            q, x @ wk.T, x @ wv.T
        ),
        "queries come from the encoder and keys from x: it is the decoder that asks": _attend(
            encoded @ wq.T, x @ wk.T, x @ wv.T
        ),
        "only the keys come from the encoder, so a score and its value belong to different texts": (
            _softmax(0.5 * q @ k.T + hidden)[:, : len(x)] @ (x @ wv.T)
        ),
        "padding is read; a sample's result then depends on how long its neighbours are": _attend(q, k, v),
        "padding is read and the text is hidden": inverted,
        "a causal mask is in it; the whole text of the encoder is there from the start, so nothing has to be hidden": (
            _attend(q, k, v, hidden + later)
        ),
        "the scores aren't divided by the root of the head's width": _attend(q, k, v, hidden, scale=1.0),
        "the weights of a key add up to 1 over the queries; a query's weights have to, over the keys": (
            _softmax(0.5 * q @ k.T + np.where(padding, -1e9, 0.0), axis=0) @ v
        ),
    }
    return {words: _two_digits(value) for words, value in wrong.items()}


# ---- buckets of distances ----

_MAPS = ((True, 8, 16), (False, 8, 16), (True, 12, 40), (False, 6, 20))
"""(both ways, buckets, far)."""
_REACH = 24


def _bucket(
    ahead: int, both_ways: bool, buckets: int, far: float, *, share: Callable[[float], float] = math.log
) -> int:
    """Return the bucket of a key that is `ahead` positions after the query; `share` makes a step of a ratio."""
    first = buckets // 2 if both_ways and ahead > 0 else 0
    buckets = buckets // 2 if both_ways else buckets
    distance = abs(ahead) if both_ways else max(0, -ahead)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    part = share(distance / exact) / share(far / exact)
    return first + min(buckets - 1, exact + int(part * (buckets - exact)))


def _row(bucket: Callable[[int], int]) -> list[int]:
    return [bucket(ahead) for ahead in range(-_REACH, _REACH + 1)]


@exercise("24.bucket", "Write bucket(ahead, both_ways, buckets, far) -> the bucket of a distance, from 0.")
def bucket(answer: Any) -> Iterator[Outcome]:
    """Judge an encoder's and a decoder's buckets, for keys up to 24 positions before and after the query."""
    return asked(
        _MAPS,
        given=lambda both, buckets, far: (
            f"{buckets} buckets up to {far}, {'both ways' if both else 'keys before'}, ahead from -24 to 24"
        ),
        right=lambda *case: _row(lambda ahead: _bucket(ahead, *case)),
        tried=lambda *case: _row(lambda ahead: answer(ahead, *case)),
        misread=_misread_buckets,
    )


def _misread_buckets(both: bool, buckets: int, far: int) -> Misreadings:
    def unclamped(ahead: int) -> int:
        own = buckets // 2 if both else buckets
        first, distance = (own if both and ahead > 0 else 0), abs(ahead) if both else max(0, -ahead)
        exact = own // 2
        if distance < exact:
            return first + distance
        return first + exact + int(math.log(distance / exact) / math.log(far / exact) * (own - exact))

    wrong = {
        "the sign is turned round: ahead is the key's position less the query's, negative for a key before it": (
            lambda ahead: _bucket(-ahead, both, buckets, far)
        ),
        "each distance has a bucket of its own until they run out; only half of them are for that": (
            lambda ahead: _clipped(ahead, both, buckets)
        ),
        "distances beyond `far` get buckets that do not exist; the last one has all of them": unclamped,
        "the far buckets are equally wide; each is to be wider than the one before by the same factor": (
            lambda ahead: _bucket(ahead, both, buckets, far, share=lambda ratio: ratio - 1 or 1e-9)
        ),
        "a key after the query gets a bucket although the decoder never sees it; call that distance 0": (
            lambda ahead: _bucket(ahead if both else -abs(ahead), both, buckets, far)
        ),
        "both ways share all buckets, so before and after are the same; half of the buckets are for keys after": (
            lambda ahead: _bucket(-abs(ahead), False, buckets, far)
        ),
        "keys before the query have the second half of the buckets; the first is theirs": (
            lambda ahead: (
                _bucket(ahead, both, buckets, far)
                if not both
                else (_bucket(ahead, both, buckets, far) + buckets // 2) % buckets
            )
        ),
    }
    return {words: _row(function) for words, function in wrong.items()}


def _clipped(ahead: int, both: bool, buckets: int) -> int:
    own = buckets // 2 if both else buckets
    distance = abs(ahead) if both else max(0, -ahead)
    return (own if both and ahead > 0 else 0) + min(distance, own - 1)


# ---- copies in a cut encoder-decoder ----

_CUT = ((1, 2, 1, 1), (1, 4, 1, 2), (1, 4, 1, 3), (2, 4, 1, 1), (1, 4, 2, 2), (2, 3, 2, 1))
"""(tp, pp, dp, split)."""


def _groups(tp: int, pp: int, dp: int, stages: Sequence[int]) -> Groups:
    """Return the ranks of these stages for each place in dp and tp; ranks count tp first, then dp, then pp."""
    return [[(stage * dp + d) * tp + t for stage in stages] for d in range(dp) for t in range(tp)]


@exercise(
    "24.copies",
    "Write copies(tp, pp, dp, split) -> (groups that add up the words' gradients, groups of the positions').",
)
def copies(answer: Any) -> Iterator[Outcome]:
    """Judge two stages, a decoder of two and of one, and several pipelines over tp and dp."""
    return asked(
        _CUT,
        given="tp {}, pp {}, dp {}, split rank {}".format,
        right=lambda tp, pp, dp, split: _both(tp, pp, dp, [0, split, pp - 1], [0, split]),
        tried=lambda *sizes: [sorted(map(list, part)) for part in answer(*sizes)],
        misread=_misread_copies,
    )


def _both(tp: int, pp: int, dp: int, words: Sequence[int], positions: Sequence[int]) -> list[Groups]:
    """Return the groups of both tables; each stage counts once, however often it is named."""
    return [sorted(_groups(tp, pp, dp, sorted(set(stages)))) for stages in (words, positions)]


def _misread_copies(tp: int, pp: int, dp: int, split: int) -> Misreadings:
    words, positions = [0, split, pp - 1], [0, split]
    doubled = [sorted(_groups(tp, pp, dp, stages)) for stages in (words, positions)]
    together = [[sorted(rank for group in part for rank in group)] for part in _both(tp, pp, dp, words, positions)]
    over_tp = [sorted(rank * tp + t for rank in group for t in range(tp)) for group in _groups(1, pp, dp, positions)]
    return {
        "these are a GPT's: the decoder's first stage has copies of both tables, which would drift away": _both(
            tp, pp, dp, [0, pp - 1], [0]
        ),
        "the last stage scores words and has no positions; it would wait in the group for a sum that it lacks": _both(
            tp, pp, dp, words, words
        ),
        "the last stage is missing from the words' group, though its output layer is the words' table": _both(
            tp, pp, dp, positions, positions
        ),
        "every stage is in the group; most stages hold neither table": _both(tp, pp, dp, range(pp), range(pp)),
        "stage split - 1 ends the encoder; the decoder begins at stage split": _both(
            tp, pp, dp, [0, split - 1, pp - 1], [0, split - 1]
        ),
        "ranks of several pipelines are in one group; tp ranks hold other rows, and dp is summed already": together,
        "the tp ranks of a stage have equal gradients of the positions; a sum over tp would count them tp times": [
            _both(tp, pp, dp, words, positions)[0],
            sorted(over_tp),
        ],
        "a stage is taken for a rank; stage p begins at rank p x tp x dp": [
            [sorted(set(stages))] for stages in (words, positions)
        ],
        "the last stage is listed twice where the decoder has one stage; each rank belongs to a group once": doubled,
    }


# ---- bets ----

ask(
    "24.used",
    "An encoder has 8 buckets and `far` 16. In a map of 16 queries by 16 keys, how many different buckets occur?",
    misread=lambda: {
        "All 8 would, if there were a key after the query at distance 0.": 8,
        "That is how many each direction has. There are two.": 4,
        "Distances go up to 15, but far ones share buckets.": 15,
    },
    unit="buckets",
    because="Buckets 0 to 3 are for keys before the query, with distance 0 in bucket 0. 5 to 7 are for keys after it. "
    "Bucket 4 would be for a key after the query at distance 0, and there is none.",
)
ask(
    "24.reduces",
    "A decoder layer over tensor-parallel ranks, without sequence parallelism. How many all-reduces does it make in "
    "forward, and how many in backward?",
    choices={
        "2 and 2": "That is a layer of a GPT. Cross-attention is a third sublayer.",
        "3 and 3": "Forward is right: one g for each sublayer. But in backward cross-attention has two inputs.",
        "3 and 4": "One g for each sublayer in forward. In backward one f for each input of a cut product, and "
        "cross-attention has two inputs: x for the queries, the encoder's output for keys and values.",
        "4 and 4": "Backward is right. In forward the two inputs of cross-attention are read, not added up: there is "
        "one sum, after proj.",
    },
)
ask(
    "24.bytes",
    "The encoder reads S tokens and the decoder T. How many times as many bytes as the hidden states alone does a "
    "stage of the decoder send to the next one, in forward?",
    misread=lambda s, t: {
        "That is the encoder's output alone. The hidden states go, too.": s / t,
        "That would be two tensors of one length. The encoder's output has S positions.": 2,
        "The next stage has cross-attention in each of its layers. Where would it get the encoder's output from?": 1,
        "That is the other way round: the hidden states have T positions, the encoder's output S.": (s + t) / s,
    },
    unit="times",
    because="The hidden states have T positions and the encoder's output S, so (S + T) / T times.",
)
ask(
    "24.biases",
    "A T5 with relative positions. How many stages hold a copy of the decoder's biases?",
    misread=lambda own, stages: {
        "That would do if they were added to x, as positions are. They're added to the scores of every layer.": 1,
        "Stages of the encoder have the encoder's biases, which are others.": stages,
    },
    unit="stages",
    because="All layers of the decoder add the same numbers to their scores, so every stage with such a layer needs "
    "them.",
)
ask(
    "24.split",
    "24 encoder and 24 decoder layers of width 1,024, 512 tokens in and 114 out, 12 stages. How many stages does the "
    "encoder get, so that the slowest stage is as fast as possible?",
    choices={
        "4": "The decoder has cross-attention on top, but it works on 114 positions where the encoder works on 512.",
        "6": "Equal numbers of layers are not equal work: the encoder works on 512 positions, the decoder on 114.",
        "8": "A layer of the encoder works on 512 positions. One of the decoder works on 114 and makes keys and values "
        "of 512; the whole layer has 41 % of the operations of one of the encoder's.",
    },
)
