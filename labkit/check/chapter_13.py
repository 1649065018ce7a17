"""Exercises and bets of chapter 13: 16 bits for a main weight, gradients that fp16 loses, a loss scale that moves.

Wrong answers are compared with those of known misunderstandings, and the score names the one that gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import Finding, Misreadings, Outcome, asked, exercise, holds, shown

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- bets ----

ask(
    "13.bytes",
    "Mixed precision as Megatron does it (not torch.autocast), with Adam: how many bytes does a single process keep "
    "per parameter, all copies, gradient and moments counted, compared with training everything in 32 bits?",
    choices={
        "half": "That's what model.bfloat16() alone would do: 8 instead of 16. Section 1 has shown what comes of it.",
        "a little less": "The weight shrinks from 4 bytes to 2. But what is added beside it?",
        "as many": "That's right for torch.autocast, whose weights are fp32 alone. Here 16-bit weights are kept as "
        "well.",
        "more": "The weight of 2 bytes comes on top: 18 instead of 16, in a single process. What mixed precision "
        "halves is what travels between layers.",
    },
)
ask(
    "13.moves",
    "Late in the run an fp32 main weight takes every update, and the bf16 weight is its rounding. What share of the "
    "bf16 weights is another number after one step?",
    choices={
        "nearly all": "Nearly all main weights move in every step. The rounding only shows it when a main weight "
        "crosses the middle between two bf16 numbers.",
        "about half": "It would be, if an update were about half as large as the distance of bf16 numbers.",
        "under a tenth": "The rate has fallen to a twentieth, and an update is a small part of the distance between "
        "two bf16 numbers. So a weight has to collect many of them before it crosses the middle. It does collect them, "
        "and that's the whole trick.",
    },
)
ask(
    "13.rate",
    "The first three tries overflow and are skipped. The warm-up is 0, half of the peak, the peak. Which rate does the "
    "fourth try, the first that updates, get?",
    choices={
        "0": "The schedule counts updates, as in Megatron, and there has been none.",
        "half of the peak": "That would count one of the skipped tries.",
        "about the peak": "That would count tries. Then a run whose scale begins too high would lose its warm-up.",
    },
)
ask(
    "13.faster",
    "Llama 3 8B on 512 H100s. A step in bf16 takes about a second. How long would one in fp32 take, by the plan?",
    choices={
        "1.5 times": "Half the bytes for a start, but the arithmetic is what most of a step is.",
        "twice": "Twice as many bytes, yes. But the matrix products run on other units altogether.",
        "over five times": "The tensor cores that do 989 * 10^12 operations a second want 16 bits. In fp32, without "
        "TF32, an H100 does 67.",
    },
)

# ---- 16 bits for a main weight ----

_MAINS = (
    ("numbers that bf16 has", [1.0, -2.0, 0.15625, 0.0]),
    ("a little more than a bf16 number", [1.001, -0.1001, 3e-5]),
    ("nearly the next bf16 number", [1.0077, -0.30077, 2.99]),
    ("many", "many"),
    ("in the middle of two bf16 numbers", [1.00390625, 1.01171875, -1.00390625, -1.01171875]),
)
"""(tested idea, main weights)."""


def _mains(values: Any) -> Any:
    import torch

    if values == "many":
        return torch.randn(5000, generator=torch.Generator().manual_seed(13)) * 0.1
    return torch.tensor(values)


@exercise(
    "13.pack",
    "Write pack(main) -> (weight, rest): a nearest bf16 number, and 16 bits with which unpack gives main to the bit.",
)
def pack(answer: Any) -> Iterator[Outcome]:
    """Judge five lists of main weights: types, nearest numbers, and what comes back."""
    for words, values in _MAINS:
        main = _mains(values)
        yield holds(words, "main comes back to the bit", lambda main=main: _judged(answer(main.clone()), main))


def _judged(given: Any, main: Any) -> Finding:
    reason, sentence = _packed(given, main)
    return (reason, f"{sentence}: {reason}") if reason else True


def _packed(given: Any, main: Any) -> tuple[str, str]:
    """Return what is wrong with a pair, and where it shows; two empty strings for a right one."""
    import torch

    if not (isinstance(given, tuple) and len(given) == 2):
        return "give a pair of tensors", shown(given)
    weight, rest = given
    if getattr(weight, "dtype", None) != torch.bfloat16 or weight.shape != main.shape:
        return "the weight has to be bf16, as many as there are mains", f"the first is {_kind(weight)}"
    if getattr(rest, "dtype", None) not in (torch.int16, torch.uint16, torch.bfloat16, torch.float16):
        return "the rest may have 16 bits, or nothing is gained", f"the second is {_kind(rest)}"
    if rest.dtype != torch.int16:
        return (
            "unpack adds integers: give the rest as int16. A difference of numbers would be rounded itself",
            f"the second is {_kind(rest)}",
        )
    off = (weight.float() - main).abs()
    least = (main.bfloat16().float() - main).abs()
    if (off > least).any():
        at = int((off > least).nonzero()[0])
        return (
            "the weight is not the nearest bf16 number: cutting off the low 16 bits rounds every weight towards 0",
            f"{main[at]:.9g} got the weight {weight[at]:.9g}",
        )
    back = _unpack(weight, rest)
    if torch.equal(back, main):
        return "", ""
    at = int((back != main).nonzero()[0])
    sentence = f"{main[at]:.9g} came back as {back[at]:.9g}"
    low = main.view(torch.int32) & 0xFFFF
    signed = torch.where(low >= 0x8000, low - 0x10000, low)
    if (back == main)[signed != -0x8000].all():
        return (
            "only numbers in the middle are wrong: bfloat16() rounds them to even, so the rest would need 65537 values",
            sentence,
        )
    if (rest.int() == 0).all():
        return "nothing is kept of what rounding takes away", sentence
    return "the rest is counted from another number than the weight that you return", sentence


def _kind(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if hasattr(value, "dtype") else shown(value)


def _unpack(weight: Any, rest: Any) -> Any:
    import torch

    return ((weight.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


# ---- the gradients that fp16 loses ----

LARGEST, SMALLEST_NORMAL, SMALLEST = 65504.0, 2.0**-14, 2.0**-24
"""fp16's largest number, its smallest number with all 11 bits, and its smallest number above 0."""

_GRADIENTS = (
    ([1e-3, 1e-6, 1e-8, 1e-9], 1.0),
    ([1e-8, 1e-9, 1e-13], 2.0**16),
    ([0.5, 1.5, -3.0, 1e-7], 2.0**16),
    ([2e-5, 4e-8, -1e-5], 1.0),
    ([0.0, 5e-9, 0.0], 1.0),
    ([-1e-12, 7e4, -7e4, 1.0], 1.0),
)
"""(gradients, loss scale)."""


def _lost(
    gradients: Sequence[float], scale: float, *, smallest: float = SMALLEST / 2, largest: float = 65520.0
) -> list[int]:
    """Return the positions whose gradient times the scale rounds to 0 or to infinity; a gradient of 0 is not lost.

    Half of the smallest number still rounds to 0, and 65520 is the first number that rounds to infinity.
    """
    scaled = [abs(gradient * scale) for gradient in gradients]
    return [place for place, size in enumerate(scaled) if 0 < size <= smallest or size >= largest]


@exercise(
    "13.lost", "Write lost(gradients, scale) -> the positions of the gradients that fp16 turns into 0 or infinity."
)
def lost(answer: Any) -> Iterator[Outcome]:
    """Judge six lists of gradients, each at one loss scale."""
    return asked(
        _GRADIENTS,
        given="gradients {} and scale {:g}".format,
        right=_lost,
        tried=lambda gradients, scale: answer(list(gradients), scale),
        misread=_misread_gradients,
    )


def _misread_gradients(gradients: Sequence[float], scale: float) -> Misreadings:
    right = _lost(gradients, scale)
    zeros = [place for place, gradient in enumerate(gradients) if gradient == 0]
    normal = _lost(gradients, scale, smallest=math.nextafter(SMALLEST_NORMAL, 0.0))
    rounded_up = _lost(gradients, scale, smallest=math.nextafter(SMALLEST, 0.0))
    without_sign = [p for p in right if gradients[p] > 0 or abs(gradients[p] * scale) < 1]
    return {
        "this takes 6.1e-05 as the smallest number, but subnormal numbers reach down to 6e-08": normal,
        "this loses all below 6e-08, but a number above half of 6e-08 rounds up to it": rounded_up,
        "this forgets the other end: a scaled gradient beyond 65504 becomes infinite": _lost(
            gradients, scale, largest=math.inf
        ),
        "this leaves the scale out, or multiplies after fp16 has rounded; the backward runs on scaled numbers": _lost(
            gradients, 1.0
        ),
        "this counts gradients that were 0 from the start; nothing of them is lost": sorted([*right, *zeros]),
        "this compares without the sign's absolute value, so a large negative gradient passes": without_sign,
    }


# ---- a loss scale that moves ----

State = tuple[float, int]
Move = Callable[[float, int, bool, int], State]
"""(scale, good steps so far, overflow, window) -> (scale of the next step, good steps so far)."""

_HISTORIES = (
    ("three good steps", "...", 8.0, 3),
    ("an overflow", "x...", 8.0, 4),
    ("a second growth", "......", 2.0, 3),
    ("an overflow among good steps", "..x...", 8.0, 3),
    ("a scale of 1", "xxx", 2.0, 2),
    ("a run", "xx....x.........x..", 64.0, 4),
)
"""(tested idea, a dot for each good step and an x for each overflow, first scale, window)."""


def _move(
    scale: float, good: int, overflow: bool, window: int,
    *, forgets: bool = True, restarts: bool = True, more: int = 0, least: float = 1.0, every: bool = False,
) -> State:  # fmt: skip
    """Return the state after a step; the other arguments are rules that differ in one point."""
    if overflow:
        return max(least, scale / 2), 0 if forgets else good
    good += 1
    full = good >= window + more if every or not restarts else good == window + more
    return (2 * scale, 0 if restarts and not every else good) if full else (scale, good)


def played(move: Move, history: str, first: float, window: int) -> list[float]:
    """Return the scale of each step and of the one after the last."""
    scale, good, found = first, 0, [first]
    for mark in history:
        scale, good = move(scale, good, mark == "x", window)
        found.append(scale)
    return found


def draw_scale(answer: Any) -> Figure | None:
    """Draw the scales of the last history, the reader's over what they should be."""
    from labkit.viz.text_scores import named_curves

    _, history, first, window = _HISTORIES[-1]
    curves = {"right": played(_move, history, first, window), "yours": played(answer, history, first, window)}
    logs = {name: [(step, math.log2(scale)) for step, scale in enumerate(found, 1)] for name, found in curves.items()}
    return named_curves(logs, x="step", y="log2 of the scale")


@exercise(
    "13.scale",
    "Write next_scale(scale, good, overflow, window) -> the scale of the next step, and the good steps in a row.",
    draw=draw_scale,
)
def next_scale(answer: Any) -> Iterator[Outcome]:
    """Judge six histories by the scale of each step."""
    return asked(
        [(words, history, first, window) for words, history, first, window in _HISTORIES],
        given=lambda words, history, first, window: f"{words} ({history}), first scale {first:g}, window {window}",
        right=lambda _, *case: played(_move, *case),
        tried=lambda _, *case: played(answer, *case),
        misread=lambda _, *case: {words: played(move, *case) for words, move in _MISREAD_MOVES.items()},
    )


def _rule(**how: Any) -> Move:
    return lambda scale, good, overflow, window: _move(scale, good, overflow, window, **how)


_MISREAD_MOVES: dict[str, Move] = {
    "an overflow leaves the count of good steps as it was; only good steps in a row count": _rule(forgets=False),
    "the count doesn't begin anew after the scale has grown, so it grows in every good step": _rule(restarts=False),
    "the scale grows one step too late: the window-th good step in a row doubles it": _rule(more=1),
    "the scale grows one step too early": _rule(more=-1),
    "the scale falls below 1: a scale below 1 makes gradients smaller, and underflow is what it is against": _rule(
        least=0.0
    ),
    "nothing happens: an overflow has to halve the scale, and a window of good steps to double it": (
        lambda scale, good, overflow, window: (scale, good)
    ),
    "the scale never grows again": lambda scale, good, overflow, window: (
        (max(1.0, scale / 2), 0) if overflow else (scale, good + 1)
    ),
    "the scale never falls": lambda scale, good, overflow, window: (
        (scale, 0) if overflow else _move(scale, good, False, window)
    ),
}
