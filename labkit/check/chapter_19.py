"""Exercises and bets of chapter 19: where norms go, what a norm does to a gradient, how large a branch may be.

Wrong answers are compared with those of known misunderstandings, and the score names the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.scoring import Misreadings, Outcome, asked, close, exercise, holds

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[np.float64]


# ---- the place of the norms ----

Function = Callable[[Array], Array]
_STACKS = (("pre", 2), ("post", 2), ("pre", 4), ("post", 4), ("pre", 0), ("post", 0))
"""(placement, sublayers)."""


def _stack(count: int) -> tuple[Array, list[Function], list[Function]]:
    """Return an input of two positions, `count` sublayers, and one more norm; each norm has another gain."""
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


@exercise("19.norms", "Write stack(x, sublayers, norms, placement) -> the output of all layers, an array like x.")
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
        wrong["the norms are one too late: the first is the first sublayer's, and the last is the final norm"] = _run(
            x, halves, [*norms[1:], norms[0]], "pre"
        )
    if post:
        wrong["this is pre: the norms are on the branch; in post they come after the sum"] = _run(
            x, halves, norms, "pre"
        )
        wrong["the embeddings are not normalised; in post the first norm comes before all sublayers"] = without_first
        wrong["only the branch is normalised; in post the norm comes after the sum of branch and stream"] = branch
        wrong["the norms are one too early: the first belongs to the embeddings, and the last is never used"] = first
    wrong["there is no residual stream: x must be added to what a sublayer makes"] = norms[-1](bare) if pre else bare
    return {words: _rounded(value) for words, value in wrong.items()}


# ---- a norm in backward ----

_SHAPES = ((1, 4, 1.0), (2, 5, 3.0), (3, 8, 0.2))
"""(positions, width, size of x)."""


def _normalised(x: Array) -> tuple[Array, Array]:
    """Return x with mean 0 and standard deviation 1 at each position, and the standard deviations."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True))
    return centred / deviation, deviation


def _backward(x: Array, dy: Array) -> Array:
    y, deviation = _normalised(x)
    inner = dy - dy.mean(axis=-1, keepdims=True) - y * (dy * y).mean(axis=-1, keepdims=True)
    return inner / deviation


def _norm_case(positions: int, width: int, size: float) -> tuple[Array, Array]:
    numbers = np.random.default_rng(positions)
    return size * numbers.normal(size=(positions, width)) + 1, numbers.normal(size=(positions, width))


@exercise("19.backward", "Write norm_backward(x, dy) -> dx, where y = (x - mean(x)) / std(x) at each position.")
def backward(answer: Any) -> Iterator[Outcome]:
    """Judge one position and several, with large and small inputs."""
    return asked(
        _SHAPES,
        given=lambda positions, width, size: f"x of {positions} x {width} numbers, standard deviation about {size:g}",
        right=lambda *case: _rounded(_backward(*_norm_case(*case))),
        tried=lambda *case: _rounded(answer(*_norm_case(*case))),
        misread=lambda *case: _misread_backward(*_norm_case(*case)),
        equal=close(atol=0.015),
    )


def _misread_backward(x: Array, dy: Array) -> Misreadings:
    (y, deviation), right = _normalised(x), _backward(x, dy)
    along = y * (dy * y).mean(axis=-1, keepdims=True)
    centred = dy - dy.mean(axis=-1, keepdims=True)
    wrong = {
        "mean and standard deviation are taken as constants; both depend on x, and take two terms away": (
            dy / deviation
        ),
        "the standard deviation is taken as a constant; it depends on x, and takes away what points along y": (
            centred / deviation
        ),
        "the mean is taken as a constant; adding one number to all of x changes nothing, so dx adds up to 0": (
            (dy - along) / deviation
        ),
        "the gradient is multiplied by the standard deviation; y = x / std, so dx is divided by it": (
            right * deviation**2
        ),
        "the division by the standard deviation is missing": right * deviation,
        "the last term has x where y belongs: what the norm removes is measured on its output": (
            (centred - x * (dy * x).mean(axis=-1, keepdims=True)) / deviation
        ),
        "the means are over all positions; each position is normalised by itself": (
            (dy - dy.mean() - y * (dy * y).mean()) / deviation
        ),
    }
    return {words: _rounded(value) for words, value in wrong.items()}


# ---- how large a branch may be ----

_DEPTHS = (3, 6, 12, 24, 48, 96)
_LEAST, _MOST = 0.80, 0.96
"""How much of the input arrives at the output of a fresh stack on the direct path."""
_SIZE = 0.35
"""Standard deviation of what a sublayer makes of normalised numbers at the start, about that with BERT's weights."""


def direct_path(layers: int, factor: float) -> float:
    """How much of the input arrives at the output of a fresh post stack, past all sublayers.

    A sublayer is a random matrix of width 32, there are two in a layer, and the norms have no parameters. Each norm
    divides the input's share by the standard deviation of x + factor f(x).
    """
    numbers = np.random.default_rng(19)
    x, _ = _normalised(numbers.normal(size=(16, 32)))
    left = np.ones((16, 1))
    for _ in range(2 * layers):
        weight = numbers.normal(size=(32, 32)) * _SIZE / 32**0.5
        x, deviation = _normalised(x + factor * x @ weight.T)
        left = left / deviation
    return float(left.mean())


def draw_branches(answer: Any) -> Figure:
    """Draw how much of the input arrives with the answer's factors, by depth, and the band of the aim."""
    from labkit.viz.encoders.path_widths import path_widths  # matplotlib, which a score does without

    yours = {layers: direct_path(layers, float(answer(layers))) for layers in _DEPTHS}
    return path_widths(yours, {layers: direct_path(layers, 1.0) for layers in _DEPTHS}, (_LEAST, _MOST))


@exercise("19.branch", "Write branch(layers) -> the factor of each sublayer in a post stack.", draw=draw_branches)
def branch(answer: Any) -> Iterator[Outcome]:
    """Judge six depths: 80 to 96 % of the input arrive at each."""
    found = dict[int, float]()
    for layers in _DEPTHS:
        yield holds(
            f"{layers} layers",
            f"a fresh stack in which {_LEAST:.0%} to {_MOST:.0%} of the input arrive on the direct path",
            lambda layers=layers: _judged_branch(answer, layers, found),
        )


def _judged_branch(answer: Any, layers: int, found: dict[int, float]) -> bool | tuple[str, str]:
    """Return True, or the reason and how much of the input arrives. found: factors of the depths before this one."""
    factor = float(answer(layers))
    if not np.isfinite(factor) or factor <= 0:
        return "a factor is a positive number", f"{factor:g}: a factor is a positive number"
    arrives = direct_path(layers, factor)
    if _LEAST <= arrives <= _MOST:
        found[layers] = factor
        return True
    reason = _why_branch(layers, factor, found, narrow=arrives < _LEAST)
    found[layers] = factor
    return reason, f"{arrives:.1%} with the factor {factor:.3g}: {reason}"


def _why_branch(layers: int, factor: float, found: dict[int, float], *, narrow: bool) -> str:
    shallow = min(found, default=layers)
    power = 0.0 if shallow == layers else np.log(found[shallow] / factor) / np.log(layers / shallow)
    if found and abs(power) < 0.02:
        return "the factor is the same at all depths, and a deeper stack has more norms that divide"
    if narrow and 0 < power < 0.45:
        return "the factor falls, but too slowly for the number of norms"
    if not narrow and power > 0.9:
        return (
            "the factor falls as if all sublayers added the same vector; those of a fresh stack add independent ones, "
            "so only their squares add up"
        )
    if narrow:
        return "the norms divide by too much"
    return "the sublayers hardly count: the path would stay open with larger ones"


# ---- bets ----

ask(
    "19.first",
    "In a fresh post model of 24 layers: how large is the gradient of the first layer's fc2, compared with the last's?",
    choices={
        "under a tenth": "49 norms are on the way, but a norm only divides by the standard deviation of its input. "
        "That is a little above 1 here, and the sublayers give back about as much.",
        "about the same": "Each norm divides by the standard deviation of x + f(x), which is a little above 1. But the "
        "gradient also comes back through f, and that makes up for it.",
        "over ten times": "That would need sublayers that enlarge a gradient more than the norms divide it by. With "
        "BERT's small weights the two nearly cancel.",
    },
)
ask(
    "19.last",
    "In which order does the gradient of the last layer's fc2 shrink as the model gets deeper?",
    choices={
        "post": "The last layer of post has one norm between it and the loss at any depth, and this norm divides by a "
        "little more than 1.",
        "pre": "The last layer of pre adds to a stream that is the larger the deeper the model is, and the final norm "
        "divides by its size.",
        "both": "In post the last norm divides by a little more than 1 at any depth, so nothing shrinks there.",
        "neither": "In pre the stream grows with depth, and the final norm divides the last layer's gradient by its "
        "size.",
    },
)
ask(
    "19.adam",
    "In a fresh deep model the last layer's gradient is larger in post than in pre. How far does Adam's first step "
    "move these weights in post, compared with pre?",
    choices=lambda ratio: {
        f"{ratio:g} times as far": "That is SGD: it moves a weight by the rate times the gradient.",
        f"{ratio**0.5:.1f} times as far (the root)": "Adam does take a root, but of the mean square, and then divides "
        "the gradient by it: nothing of its size is left.",
        "just as far": "In the first step Adam divides each gradient by its own size, so each weight moves by the "
        "rate.",
    },
)
ask(
    "19.after",
    "Post, 24 layers, no warm-up. After 20 steps, how large is the first layer's gradient, compared with that of the "
    "fresh model?",
    choices={
        "about the same": "At the start nothing vanishes, and then it does: the steps make x + f(x) larger, so each "
        "norm divides by more, and what comes back through f no longer makes up for it.",
        "a tenth to a hundredth": "It falls through that within a few steps, and goes on falling.",
        "under a hundredth": "The steps make x + f(x) larger, so each norm divides by more than before, and what comes "
        "back through f no longer makes up for it.",
    },
)
ask(
    "19.rescue",
    "Post at the full rate, without a warm-up: with c = 1/2, with your c, and with your c on the initial weights "
    "alone. How many of the three learn to use the text?",
    choices={
        "none": "That would be the model as it was, whatever c is.",
        "one": "Only one of them did. Which one is in the table below.",
        "two": "Two of them did. Which ones is in the table below.",
        "all three": "At this depth 1/2 is small enough, and so are initial weights that are smaller: the steps that "
        "follow are as large as in the run that failed.",
    },
)
