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

_DEPTHS = (3, 6, 12, 24, 48)
_LEAST, _MOST = 0.15, 0.30
"""By how much the output of a stack may move in one step, relative to itself."""
_RATE, _SIZE = 0.01, 0.64
"""Learning rate of the step; size of a sublayer's output at the start, about that with BERT's weights."""


def step_moves(layers: int, factor: float) -> float:
    """By how much one step moves the output of a post stack whose sublayers have this factor, relative to the output.

    A sublayer is a random matrix of width 32, there are two in a layer, and the norms have no parameters. The gradient
    of the output is random. The step is Adam's first one: each weight moves by 0.01 against the sign of its gradient.
    """
    numbers = np.random.default_rng(19)
    weights = [numbers.normal(size=(32, 32)) * _SIZE / 32**0.5 for _ in range(2 * layers)]
    x, gradient = numbers.normal(size=(2, 16, 32))
    inputs, sums = [_normalised(x)[0]], list[Array]()
    for weight in weights:
        sums.append(inputs[-1] + factor * inputs[-1] @ weight.T)
        inputs.append(_normalised(sums[-1])[0])
    moved = list[Array]()
    for weight, before, total in zip(weights[::-1], inputs[-2::-1], sums[::-1]):
        gradient = _backward(total, gradient)
        moved.append(weight - _RATE * np.sign(factor * gradient.T @ before))
        gradient = gradient + factor * gradient @ weight
    after = inputs[0]
    for weight in moved[::-1]:
        after = _normalised(after + factor * after @ weight.T)[0]
    return float(np.linalg.norm(after - inputs[-1]) / np.linalg.norm(inputs[-1]))


def draw_branches(answer: Any) -> Figure:
    """Draw by how much a step moves the output with the answer's factors, by depth, and the band of the aim."""
    from labkit.viz.encoders.step_sizes import step_sizes  # matplotlib, which a score does without

    yours = {layers: step_moves(layers, float(answer(layers))) for layers in _DEPTHS}
    return step_sizes(yours, {layers: step_moves(layers, 1.0) for layers in _DEPTHS}, (_LEAST, _MOST))


@exercise("19.branch", "Write branch(layers) -> the factor of each sublayer in a post stack.", draw=draw_branches)
def branch(answer: Any) -> Iterator[Outcome]:
    """Judge five depths: a step moves the output by 15 to 30 % at each."""
    found = dict[int, float]()
    for layers in _DEPTHS:
        yield holds(
            f"{layers} layers",
            f"an output that one step moves by {_LEAST:.0%} to {_MOST:.0%}",
            lambda layers=layers: _judged_branch(answer, layers, found),
        )


def _judged_branch(answer: Any, layers: int, found: dict[int, float]) -> bool | tuple[str, str]:
    """Return True, or the reason and by how much the output moves. found: factors of the depths before this one."""
    factor = float(answer(layers))
    if not np.isfinite(factor) or factor <= 0:
        return "a factor is a positive number", f"{factor:g}: a factor is a positive number"
    moves = step_moves(layers, factor)
    if _LEAST <= moves <= _MOST:
        found[layers] = factor
        return True
    reason = _why_branch(layers, factor, found, grows=moves > _MOST)
    found[layers] = factor
    return reason, f"{moves:.0%} with the factor {factor:.3g}: {reason}"


def _why_branch(layers: int, factor: float, found: dict[int, float], *, grows: bool) -> str:
    shallow = min(found, default=layers)
    power = 0.0 if shallow == layers else np.log(found[shallow] / factor) / np.log(layers / shallow)
    if found and abs(power) < 0.02:
        return "the factor is the same at all depths, and a deeper stack has more sublayers that move"
    if grows and abs(power - 0.5) < 0.1:
        return "a root is right for random vectors, but one step moves all sublayers towards the same end"
    if grows and 0 < power < 0.9:
        return "the factor falls, but not as fast as the number of sublayers grows"
    if not grows and power > 1.1:
        return "the factor falls faster than the number of sublayers grows, so deep stacks hardly learn"
    if grows:
        return "the sublayers move the output too far in one step"
    return "the sublayers hardly count: smaller steps would do the same, and a warm-up is a smaller step"


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
    "In a fresh deep model the last layer's gradient is larger in post than in pre. How much further does Adam's first "
    "step move these weights in post?",
    choices=lambda ratio: {
        "as many times": f"That is SGD: it moves a weight by the rate times the gradient, so {ratio:g} times as far.",
        "the root of it": "Adam does take a root, but of the mean square, and then divides the gradient by it: nothing "
        "of its size is left.",
        "the same": "In the first step Adam divides each gradient by its own size, so each weight moves by the rate.",
    },
)
ask(
    "19.after",
    "Post, 24 layers, no warm-up. After 20 steps, how large is the first layer's gradient, compared with that of the "
    "fresh model?",
    choices={
        "about the same": "At the start nothing vanishes, and then it does: the steps make x + f(x) larger, and f the "
        "same for all words, so nothing makes up for the norms any more.",
        "a tenth to a hundredth": "It falls through that within a few steps, and goes on falling.",
        "under a hundredth": "The norms divide as before. But what the sublayers add is now the same for all words, so "
        "hardly any gradient comes back through them.",
    },
)
