"""Wrong answers to the exercises of chapter 19, with what each believes and words of its score."""

import numpy as np

from labkit.check.chapter_19 import direct_path

# ---- 19.norms ----


def stack(pre, post):
    """An answer from (x, halves, norms) -> output for each layout."""
    return lambda x, halves, norms, placement: (pre if placement == "pre" else post)(x, halves, norms)


def right_pre(x, halves, norms):
    for half, norm in zip(halves, norms):
        x = x + half(norm(x))
    return norms[-1](x)


def right_post(x, halves, norms):
    x = norms[0](x)
    for half, norm in zip(halves, norms[1:]):
        x = norm(x + half(x))
    return x


def loop(step, *, first=False, last=False, shift=0):
    """x = step(x, half, norm) for each half, between an outer norm or none."""

    def answer(x, halves, norms):
        x = norms[0](x) if first else x
        for half, norm in zip(halves, norms[shift:]):
            x = step(x, half, norm)
        return norms[-1](x) if last else x

    return answer


def on_branch(x, half, norm):
    return x + half(norm(x))


def on_stream(x, half, norm):
    return norm(x + half(x))


def through(x, half, norm):
    x = norm(x)
    return x + half(x)


NORMS = {
    "post for both": (stack(right_post, right_post), "this is post"),
    "pre for both": (stack(right_pre, right_pre), "this is pre"),
    # Knows where a layer has its norms, and forgets the one outside of all layers.
    "no final norm": (stack(loop(on_branch), right_post), "the final norm is missing"),
    "no first norm": (stack(right_pre, loop(on_stream, shift=1)), "the embeddings are not normalised"),
    # Normalises the stream before each half in pre, so that the half adds to normalised numbers: that is post.
    "stream": (stack(loop(through, last=True), right_post), "this is post"),
    # Takes post as `normalise what the half makes`, and leaves the sum as it is; pre is right.
    "branch": (stack(right_pre, loop(lambda x, f, n: x + n(f(x)), first=True, shift=1)), "only the branch is"),
    "early": (stack(right_pre, loop(on_stream)), "the norms are one too early"),
    "late": (
        stack(lambda x, halves, norms: right_pre(x, halves, [*norms[1:], norms[0]]), right_post),
        "the norms are one too late",
    ),
    "no residual": (stack(loop(lambda x, f, n: f(n(x)), last=True), right_post), "no residual stream"),
}

# ---- 19.backward ----


def backward(kept, *, times=lambda std: 1 / std):
    """An answer from (dy, y, x) -> what is left of dy, with the factor of the standard deviation."""

    def answer(x, dy):
        std = x.std(-1, keepdims=True)
        return kept(dy, (x - x.mean(-1, keepdims=True)) / std, x) * times(std)

    return answer


def mean(values):
    return values.mean(-1, keepdims=True)


def right_left(dy, y, x):
    return dy - mean(dy) - y * mean(dy * y)


BACKWARD = {
    # Differentiates y = (x - m) / s as if m and s were numbers.
    "constants": (backward(lambda dy, y, x: dy), "taken as constants"),
    "std constant": (backward(lambda dy, y, x: dy - mean(dy)), "the standard deviation is taken as a constant"),
    "mean constant": (backward(lambda dy, y, x: dy - y * mean(dy * y)), "the mean is taken as a constant"),
    "multiplied": (backward(right_left, times=lambda std: std), "multiplied by the standard deviation"),
    "not divided": (backward(right_left, times=lambda std: 1), "division by the standard deviation is missing"),
    "x for y": (backward(lambda dy, y, x: dy - mean(dy) - x * mean(dy * x)), "has x where y belongs"),
    # Forgets that each position has a mean and a deviation of its own.
    "all positions": (backward(lambda dy, y, x: dy - dy.mean() - y * (dy * y).mean()), "means are over all positions"),
}

# ---- 19.branch ----

BRANCH = {
    "none": (lambda layers: 1.0, "the norms divide by too much"),
    # Found one that is right for six layers, and keeps it.
    "tuned once": (lambda layers: 0.4, "the factor is the same at all depths"),
    "fourth root": (lambda layers: (2 * layers) ** -0.25, "too slowly for the number of norms"),
    # Vectors that point the same way add up to their number; those of fresh sublayers are independent.
    "one over": (lambda layers: 3 / (2 * layers), "as if all sublayers added the same vector"),
    "too careful": (lambda layers: 0.01, "the sublayers hardly count"),
    "negative": (lambda layers: -1 / layers, "a factor is a positive number"),
}

TABLES = {"19.norms": NORMS, "19.backward": BACKWARD, "19.branch": BRANCH}
RIGHT = {
    "19.norms": stack(right_pre, right_post),
    "19.backward": backward(right_left),
    "19.branch": lambda layers: layers**-0.5,
}


def test_the_formula_of_a_norm_is_the_slope_of_its_output():
    numbers = np.random.default_rng(0)
    x, dy, shift = numbers.normal(size=(3, 4, 6))

    def loss(x):
        return float((dy * (x - mean(x)) / x.std(-1, keepdims=True)).sum())

    slope = (loss(x + 1e-6 * shift) - loss(x - 1e-6 * shift)) / 2e-6
    assert np.isclose((backward(right_left)(x, dy) * shift).sum(), slope, rtol=1e-6)


def test_the_path_of_a_fresh_stack_is_the_product_of_independent_deviations():
    for layers, factor in ((6, 1.0), (24, 0.5), (48, 96**-0.5)):
        expected = (1 + (0.35 * factor) ** 2) ** -layers
        assert np.isclose(direct_path(layers, factor), expected, rtol=0.25)
