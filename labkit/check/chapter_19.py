"""Exercises of chapter 19: whole words, the place of the norms, the copies of two tables in a cut encoder-decoder.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.scoring import Misreadings, Outcome, asked, close, exercise

Array = NDArray[np.float64]
Groups = list[list[int]]


# ---- whole words ----

_SAMPLES = (
    "[CLS] a cat [SEP]",
    "[CLS] two hack ##ers [SEP]",
    "[CLS] un ##real ##istic [SEP] it is [SEP]",
    "[CLS] ##ting is a word [SEP]",
    "[CLS] key ##board [SEP] re ##boot [SEP]",
    "[CLS] [SEP]",
)


def _words(tokens: Sequence[str]) -> list[list[int]]:
    found: list[list[int]] = []
    for position, token in enumerate(tokens):
        if _special(token):
            continue
        if token.startswith("##") and found:
            found[-1].append(position)
        else:
            found.append([position])
    return found


def _special(token: str) -> bool:
    return token in ("[CLS]", "[SEP]")


@exercise("19.words", "Write words(tokens) -> the positions of each word of a sample, a list of lists.")
def words(answer: Any) -> Iterator[Outcome]:
    """Judge words of one piece and of several, two segments, a piece without a beginning, and no word at all."""
    return asked(
        [(text.split(),) for text in _SAMPLES],
        given=lambda tokens: f"the tokens {' '.join(tokens)}",
        right=_words,
        tried=lambda tokens: [each if isinstance(each, int) else list(each) for each in answer(list(tokens))],
        misread=_misread_words,
    )


def _misread_words(tokens: Sequence[str]) -> Misreadings:
    right, own = _words(tokens), [place for place, token in enumerate(tokens) if not _special(token)]
    joined: list[list[int]] = []
    for place in range(len(tokens)):
        if tokens[place].startswith("##") and place:
            joined[-1].append(place)
        else:
            joined.append([place])
    return {
        "each piece is taken as a word; a model that sees `hack` guesses `##ers` from the spelling": [[p] for p in own],
        "[CLS] and [SEP] count as words, and would be masked": joined,
        "positions are counted without [CLS] and [SEP]; the mask is then laid on the wrong tokens": [
            [own.index(place) for place in word] for word in right
        ],
        "a word is cut to its first piece, so the other pieces stay visible next to the mask": [w[:1] for w in right],
        "a word has one number here; it is the list of the positions of its pieces": [w[0] for w in right],
        "a piece at the beginning of a segment is lost; a cut text may begin inside a word": [
            word for word in right if not tokens[word[0]].startswith("##")
        ],
        "these are the pieces themselves; the mask needs their positions": [[tokens[p] for p in w] for w in right],
    }


# ---- the place of the norms ----

Function = Callable[[Array], Array]
_STACKS = (("pre", 2), ("post", 2), ("pre", 4), ("post", 4), ("pre", 0), ("post", 0))
"""(placement, halves)."""


def _stack(count: int) -> tuple[Array, list[Function], list[Function]]:
    """Return an input of two positions, `count` halves, and one more norm; each norm has another gain."""
    numbers = np.random.default_rng(19)
    weights = numbers.normal(size=(count, 3, 3))

    def half(weight: Array) -> Function:
        return lambda x: np.tanh(x @ weight)

    def norm(gain: float) -> Function:
        def normalised(x: Array) -> Array:
            centred = x - x.mean(axis=-1, keepdims=True)
            return gain * centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)

        return normalised

    return numbers.normal(size=(2, 3)), [half(w) for w in weights], [norm(1 + 0.5 * i) for i in range(count + 1)]


def _run(x: Array, halves: Sequence[Function], norms: Sequence[Function], placement: str) -> Array:
    if placement == "pre":
        for half, norm in zip(halves, norms):
            x = x + half(norm(x))
        return norms[-1](x)
    x = norms[0](x)
    for half, norm in zip(halves, norms[1:]):
        x = norm(x + half(x))
    return x


@exercise("19.norms", "Write stack(x, halves, norms, placement) -> the output of a stack of halves, an array like x.")
def norms(answer: Any) -> Iterator[Outcome]:
    """Judge both layouts with one layer, with two, and with none."""
    return asked(
        _STACKS,
        given=lambda placement, count: f"{placement}, {count // 2} layer{'s' * (count != 2)}",
        right=lambda placement, count: _rounded(_run(*_stack(count), placement)),
        tried=lambda placement, count: _rounded(answer(*_stack(count), placement)),
        misread=lambda placement, count: _misread_stacks(*_stack(count), placement),
        equal=_close,
    )


def _rounded(values: Any) -> list[Any]:
    found = np.round(np.asarray(values, dtype=float), 2) + 0.0
    return found.tolist()


_close = close(atol=0.015)


def _misread_stacks(x: Array, halves: Sequence[Function], norms: Sequence[Function], placement: str) -> Misreadings:
    pre, post = placement == "pre", placement == "post"
    start = norms[0](x) if post else x
    branch, bare, first = start, start, x
    for half, before, behind in zip(halves, norms, norms[1:]):
        branch = branch + behind(half(branch))
        bare = half(before(bare)) if pre else behind(half(bare))
        first = before(first + half(first))
    without_final = _run(x, halves, [*norms[:-1], lambda y: y], "pre")
    without_first = _run(x, halves, [lambda y: y, *norms[1:]], "post")
    wrong: dict[str, Any] = {}
    if pre:
        wrong["this is post: the stream itself is normalised; in pre a norm is on each branch alone"] = _run(
            x, halves, norms, "post"
        )
        wrong["the final norm is missing; the sum of all branches grows from layer to layer"] = without_final
        wrong["the norms are one too late: the first belongs to the first half, and the last is the final norm"] = _run(
            x, halves, [*norms[1:], norms[0]], "pre"
        )
    if post:
        wrong["this is pre: the norms are on the branch; in post they come after the sum"] = _run(
            x, halves, norms, "pre"
        )
        wrong["the embeddings are not normalised; in post the first norm comes before the first half"] = without_first
        wrong["only the branch is normalised; in post the norm comes after the sum of branch and stream"] = branch
        wrong["the norms are one too early: the first belongs to the embeddings, and the last is never used"] = first
    wrong["there is no residual stream: x must be added to what a half makes"] = norms[-1](bare) if pre else bare
    return {words: _rounded(value) for words, value in wrong.items()}


# ---- copies in a cut encoder-decoder ----

_CUT = ((1, 2, 1, 1), (1, 4, 1, 2), (1, 4, 1, 3), (2, 4, 1, 1), (1, 4, 2, 2), (2, 3, 2, 1))
"""(tp, pp, dp, split)."""


def _groups(tp: int, pp: int, dp: int, stages: Sequence[int]) -> Groups:
    """Return the ranks of these stages for each place in dp and tp; ranks count tp first, then dp, then pp."""
    return [[(stage * dp + d) * tp + t for stage in stages] for d in range(dp) for t in range(tp)]


@exercise(
    "19.copies",
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
