"""Exercises and bets of chapter 26: rounding to eight bits, the guess of a delayed scale, a product of blocks, padding.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.scoring import Finding, Misreadings, Outcome, asked, close, exercise, holds

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[np.float64]

# ---- rounding ----

_FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}
"""Bits of the mantissa, exponent of the smallest normal number, largest number."""
_VALUES = {
    "ordinary numbers": (1.3, -5.7, 0.11, 100.0, 0.0),
    "numbers in the middle between two": (1.0625, 1.1875, 1.125, 1.375, -2.125, 2.75),
    "numbers that round up to the next power of two": (1.97, 3.95, -0.99),
    "numbers below the smallest normal one": tuple(n * 2.0**-6 for n in (0.3, 0.06, -0.9, 0.31, 2**-8, 2**-11)),
    "numbers above the largest": (500.0, -1e4, 1e5),
}


def _rounded(
    x: float, mantissa: int, lowest: int, largest: float, *, to_step: Callable[[float], float] = round,
    subnormal: bool = True, clamp: bool = True,
) -> float:  # fmt: skip
    if x == 0:
        return 0.0
    exponent = math.frexp(abs(x))[1] - 1
    if exponent < lowest and not subnormal:
        return 0.0
    step = 2.0 ** (max(exponent, lowest) - mantissa)
    found = to_step(x / step) * step
    return max(-largest, min(largest, found)) if clamp else found


@exercise("26.rounded", "Write rounded(x, mantissa, lowest, largest) -> the nearest number of a format of eight bits.")
def rounded(answer: Any) -> Iterator[Outcome]:
    """Judge both formats, on numbers of five kinds; the right numbers are those of torch's cast."""
    cases = [(name, kind) for name in _FORMATS for kind in _VALUES]
    return asked(
        cases,
        given=lambda name, kind: f"{name}, {kind} {list(_scaled(name, kind))}",
        right=lambda name, kind: _by_torch(name, _scaled(name, kind)),
        tried=lambda name, kind: [float(answer(x, *_FORMATS[name])) for x in _scaled(name, kind)],
        misread=lambda name, kind: _misread_rounded(name, _scaled(name, kind)),
    )


def _scaled(name: str, kind: str) -> tuple[float, ...]:
    """Return the values of a kind; those at the ends of e4m3 are moved to the ends of the format."""
    if name == "e4m3":
        return _VALUES[kind]
    if "below" in kind:
        return tuple(x * 2.0**-8 for x in _VALUES[kind])
    return tuple(x * 128 for x in _VALUES[kind]) if "above" in kind else _VALUES[kind]


def _by_torch(name: str, values: Sequence[float]) -> list[float]:
    import torch

    kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    largest = torch.finfo(kind).max
    found: list[float] = torch.tensor(values).clamp(-largest, largest).to(kind).double().tolist()
    return found


def _misread_rounded(name: str, values: Sequence[float]) -> Misreadings:
    mantissa, lowest, largest = _FORMATS[name]

    def all_of(**changes: Any) -> list[float]:
        return [_rounded(x, mantissa, lowest, largest, **changes) for x in values]

    def up(x: float) -> float:
        return math.floor(x + 0.5)

    def away(x: float) -> float:
        return math.copysign(math.floor(abs(x) + 0.5), x)

    endless = [_rounded(x, mantissa, -99, largest) for x in values]
    return {
        "a middle goes up; it goes to the neighbour whose last bit is 0, so that errors don't add up": (
            all_of(to_step=up)
        ),
        "a middle goes away from 0; it goes to the neighbour whose last bit is 0": all_of(to_step=away),
        "it is cut off and not rounded": all_of(to_step=math.trunc),
        "too large a number isn't held at the largest one": all_of(clamp=False),
        "below the smallest normal number steps don't get smaller any more; all of them are as wide as the last ones": (
            endless
        ),
        "all below the smallest normal number become 0; a few steps are left there, the subnormal numbers": all_of(
            subnormal=False
        ),
        "the format has a bit more than you give it; `mantissa` counts the bits after the leading one": [
            _rounded(x, mantissa - 1, lowest, largest) for x in values
        ],
        "the format has a bit less; the leading bit isn't among the bits of `mantissa`": [
            _rounded(x, mantissa + 1, lowest, largest) for x in values
        ],
    }


# ---- the guess of a delayed scale ----

HISTORY = 16
"""Steps that a history has."""
_STEPS, _SPIKE = 60, 30
_MEAN, _WORST = 0.03, 0.05
"""Errors allowed on average and in the worst step. A scale from the tensor itself gives 0.026."""
Guess = Callable[[list[float]], float]


def _episodes() -> Mapping[str, tuple[Array, float]]:
    """Return the size of the tensor in each step, and how much larger one value is in step 30."""
    numbers = np.random.default_rng(26)
    calm = 1.7 ** numbers.uniform(-1, 1, _STEPS)
    growing = 1.25 ** np.arange(_STEPS) * 1.2 ** numbers.uniform(-1, 1, _STEPS)
    return {
        "sizes that go up and down": (calm, 1.0),
        f"one outlier in step {_SPIKE}": (calm[::-1], 2.0**15),
        "sizes that grow by a quarter per step": (growing, 1.0),
    }


def followed(guess: Guess, sizes: Array, outlier: float) -> tuple[list[float], list[float], list[float]]:
    """Return the largest magnitude, the guess and the error of the cast in each step but the first.

    The error is that of all values but the outlier, relative to their size. Values beyond 448 are held there.
    """
    import torch

    from labkit.fp8.casting import E4M3, cast

    history: list[float] = []
    peaks, guesses, errors = [], [], []
    for step, size in enumerate(sizes):
        x = torch.from_numpy(np.random.default_rng(step).normal(size=1024) * size)
        amax = float(x.abs().max()) * (outlier if step == _SPIKE else 1.0)
        if history:
            guessed = float(guess(list(history)))
            if not 0 < guessed < math.inf:
                raise ValueError(f"the guess is {guessed}; it is divided by, so it must be above 0 and finite")
            scale = torch.tensor(448 / guessed, dtype=torch.float64)
            back = cast(x, scale, E4M3).double() / scale
            peaks.append(amax)
            guesses.append(guessed)
            errors.append(float((back - x).norm() / x.norm()))
        history = [amax, *history][:HISTORY]
    return peaks, guesses, errors


def draw_guess(answer: Any) -> Figure:
    """Draw the answer's guesses through the episode with the outlier, with those of two rules that are in use."""
    from labkit.viz.text_scores import named_curves  # matplotlib, which a score does without

    sizes, outlier = _episodes()[f"one outlier in step {_SPIKE}"]
    rules: dict[str, Guess] = {"yours": answer, "largest of 16": max, "most recent": lambda history: history[0]}
    curves = {name: list(enumerate(followed(rule, sizes, outlier)[1], 1)) for name, rule in rules.items()}
    peaks = list(enumerate(followed(max, sizes, outlier)[0], 1))
    return named_curves({"the tensor": peaks} | curves, x="step", y="largest magnitude, or its guess", log=True)


@exercise(
    "26.guess", "Write guess(history) -> the largest magnitude that you expect, from those of up to 16 steps.",
    draw=draw_guess,
)  # fmt: skip
def guess(answer: Any) -> Iterator[Outcome]:
    """Judge three episodes by the errors of their casts."""
    for given, (sizes, outlier) in _episodes().items():
        claim = f"errors of {_MEAN:.0%} or less on average, and of {_WORST:.0%} in any step"
        yield holds(given, claim, lambda case=(sizes, outlier): _judged_guess(answer, *case))


def _judged_guess(answer: Any, sizes: Array, outlier: float) -> Finding:
    peaks, guesses, errors = followed(answer, sizes, outlier)
    mean, worst = sum(errors) / len(errors), max(errors)
    if mean <= _MEAN and worst <= _WORST:
        return True
    at = errors.index(worst)
    said = f"{mean:.1%} on average, {worst:.0%} in step {at + 1}"
    ordinary = 4 * sizes[at + 1]
    if guesses[at] < peaks[at] and guesses[at] < ordinary:
        reason = "there the guess is too small, so values are held at the largest number; where is your reserve?"
    elif outlier > 1 and worst > _WORST:
        reason = "the guess still remembers the outlier, and small values become 0; who says that the largest counts?"
    else:
        reason = "the guess is so large that small values become 0"
    return reason, f"{said}: {reason}"


# ---- a product of blocks ----

_SHAPES = ((2, 3, 8, 4), (1, 2, 6, 2), (3, 1, 4, 4))
"""(M, N, K, block)."""
Operands = tuple[Array, Array, Array, Array, int]


def _operands(m: int, n: int, k: int, block: int) -> Operands:
    """Return integers that stand for cast values, and a scale of each row and block, powers of two."""
    numbers = np.random.default_rng(m + n + k)
    a, b = (numbers.integers(-9, 10, size=(rows, k)).astype(float) for rows in (m, n))
    a_scale, b_scale = (2.0 ** numbers.integers(-3, 4, size=(rows, k // block)) for rows in (m, n))
    return a, a_scale.astype(np.float64), b, b_scale.astype(np.float64), block


def _of_blocks(a: Array, a_scale: Array, b: Array, b_scale: Array, block: int) -> Array:
    return (a / a_scale.repeat(block, 1)) @ (b / b_scale.repeat(block, 1)).T


@exercise("26.blocks", "Write product(a, a_scale, b, b_scale, block) -> a b^T of operands with a scale for each block.")
def blocks(answer: Any) -> Iterator[Outcome]:
    """Judge two blocks, three, and one."""
    return asked(
        _SHAPES,
        given=lambda m, n, k, block: f"a [{m}, {k}], b [{n}, {k}], blocks of {block}",
        right=lambda *shape: _of_blocks(*_operands(*shape)).tolist(),
        tried=lambda *shape: answer(*_operands(*shape)),
        misread=lambda *shape: _misread_blocks(*_operands(*shape)),
        equal=close(rtol=1e-9, atol=1e-9),
    )


def _misread_blocks(a: Array, a_scale: Array, b: Array, b_scale: Array, block: int) -> Misreadings:
    ones = np.ones_like
    wrong = {
        "the scales of the first block are taken for all blocks": a @ b.T / np.outer(a_scale[:, 0], b_scale[:, 0]),
        "the sum over all blocks is taken first, and then divided by a mean of the scales; each block has its own": (
            a @ b.T / np.outer(a_scale.mean(1), b_scale.mean(1))
        ),
        "it is multiplied by the scales; the cast has multiplied, so the product divides": _of_blocks(
            a, 1 / a_scale, b, 1 / b_scale, block
        ),
        "b's scales are missing": _of_blocks(a, a_scale, b, ones(b_scale), block),
        "a's scales are missing": _of_blocks(a, ones(a_scale), b, b_scale, block),
        "no scale is taken away": a @ b.T,
        "only the last block is in it; the blocks' parts are added up": _of_blocks(
            a[:, -block:], a_scale[:, -1:], b[:, -block:], b_scale[:, -1:], block
        ),
        "all rows of a have the scale of its first row": _of_blocks(
            a, a_scale[:1].repeat(len(a), 0), b, b_scale, block
        ),
    }
    return {words: value.tolist() for words, value in wrong.items()}


# ---- rows that are filled up ----

_COUNTS = ((3, 5), (16, 1, 0, 17), (0, 0, 4), (2, 2, 2), (32,))
ALIGNED = 16


@exercise(
    "26.places", "Write places(counts, alignment) -> (the new place of each row, how many rows there are with padding)."
)
def places(answer: Any) -> Iterator[Outcome]:
    """Judge experts with few rows, with none, and with a multiple of the alignment."""
    return asked(
        [(counts, alignment) for counts in _COUNTS for alignment in (4, ALIGNED)],
        given="counts {}, alignment {}".format,
        right=lambda counts, alignment: _placed(counts, _up(counts, alignment)),
        tried=lambda counts, alignment: answer(list(counts), alignment),
        misread=_misread_places,
    )


def _up(counts: Sequence[int], alignment: int) -> list[int]:
    return [-(-count // alignment) * alignment for count in counts]


def _placed(counts: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """Return [places, total] if expert e has room for sizes[e] rows."""
    starts = accumulate(sizes[:-1], initial=0)
    return [[start + i for start, count in zip(starts, counts) for i in range(count)], sum(sizes)]


def _misread_places(counts: Sequence[int], alignment: int) -> Misreadings:
    total = sum(counts)
    return {
        "no expert is filled up": _placed(counts, counts),
        "padding comes once, at the end of all rows; the product wants multiples for each expert": [
            list(range(total)), _up([total], alignment)[0],
        ],
        "an expert without rows gets a block of padding; it needs none": _placed(
            counts, [max(alignment, size) for size in _up(counts, alignment)]
        ),
        "every expert gets as many rows as the largest; that is a capacity, and each needs its own multiple only": (
            _placed(counts, [max(_up(counts, alignment))] * len(counts))
        ),
        "an expert that has a multiple already gets another block": _placed(
            counts, [(count // alignment + 1) * alignment for count in counts]
        ),
        "the padding comes before an expert's rows; then its rows don't begin where its group does": [
            [start + size - count + i
             for start, size, count in zip(accumulate(_up(counts, alignment)[:-1], initial=0), _up(counts, alignment),
                                           counts)
             for i in range(count)],
            sum(_up(counts, alignment)),
        ],
    }  # fmt: skip


# ---- bets ----

ask(
    "26.falls",
    "Before each product of two hidden layers, both operands are cast to e4m3, as they are. The output layer stays in "
    "32 bits. What does the loss do?",
    choices={
        "NaN": "A number that is too large may become NaN or infinite in such a cast, by format and version. But here "
        "none is; look at the other end of the range.",
        "it stays up": "The output layer isn't cast. It trains on features that never change, and that helps.",
        "it falls but ends too high": "Forward is nearly right, and the output layer trains. What do the hidden layers "
        "get to learn from?",
        "it falls as in 32 bits": "Forward is nearly right, yes. But a gradient is much smaller than an activation.",
    },
)
ask(
    "26.power",
    "You round each scale down to a power of two, so that a tensor's largest magnitude comes anywhere between 224 and "
    "448. How much does the error of e4m3 grow?",
    choices={
        "hardly at all": "A number of four significant bits has the same relative error in each power of two, so it "
        "doesn't matter where in the range the tensor lies, until one of its ends falls out.",
        "by a quarter": "That would be so if the steps had one width, as those of integers. The steps of e4m3 get "
        "narrower with the numbers.",
        "it doubles": "With integers it can: half of the range is then half of the steps. The steps of e4m3 get "
        "narrower with the numbers.",
    },
)
ask(
    "26.flips",
    "A router gives each token to 8 of 64 experts. Now its two operands are cast to e4m3, with good scales. How many "
    "of the tokens get at least one other expert?",
    choices={
        "about one in fifty": "That is about what bf16 does. e4m3 has four significant bits where bf16 has eight.",
        "about one in four": "The logits are wrong by a few percent of their spread, and of 64 logits the eighth and "
        "the ninth are often closer together than that.",
        "more than half": "Only tokens whose eighth and ninth logit are close can change. Often they are, but not that "
        "often.",
    },
)
ask(
    "26.same",
    "Two processes share the experts of a model (ep 2), and you compare them with a single process. Under which "
    "recipes do both compute the same numbers?",
    choices={
        "current": "A scale from the rows that a rank got depends on which rows these are.",
        "delayed": "All ranks scale by one history, the maximum over all of them. Which rank holds which rows no "
        "longer matters.",
        "both": "With `current` a rank scales the rows that it got, and those are other rows than one process has.",
        "neither": "Eight bits are coarse, but not random: the same scale gives the same bytes.",
    },
)
ask(
    "26.memory",
    "Llama 3 8B on 512 H100s, by the plan: linear layers in fp8 against bf16, same layout. What about the memory of a "
    "GPU?",
    choices={
        "less": "What layers keep for backward is less. What else has to be somewhere in eight bits, and in how many "
        "copies?",
        "as much": "Activations get smaller and something else grows, but not by the same amount.",
        "more": "Weights are there in 16 bits and, for the products, in eight: once as they are and once transposed. "
        "What is saved on kept activations is less than that.",
    },
)
