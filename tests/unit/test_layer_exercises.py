"""Exercises of chapters 05 and 06: each misunderstanding gets a sentence of its own, and gets it once."""

import numpy as np
import pytest

from labkit.check import check

# ---- 05.kept ----

KEEPS = {"linear": 0, "norm": 0, "gelu": 0, "relu": 1, "softmax": 1, "dropout": "mask", "scale": None}


def kept(*, once=True, number=2, mask=1, **other):
    """An answer; an argument that is not its default is a misunderstanding."""

    def answer(width, chain):
        keeps = KEEPS | other
        widths = [width, *(result for _, result in chain)]
        tensors = [i + keeps[name] for i, (name, _) in enumerate(chain) if keeps[name] in (0, 1)]
        masks = sum(result for name, result in chain if keeps[name] == "mask")
        return number * sum(widths[t] for t in (set(tensors) if once else tensors)) + mask * masks

    return answer


KEPT = {
    "twice": (kept(once=False), "keeps the same tensor as input: count it once"),
    "inputs": (kept(once=False, **dict.fromkeys(KEEPS, 0)), "each operation is counted with its input"),
    "relu": (kept(relu=0, softmax=0), "keeps the same tensor as input: count it once"),
    "gelu": (kept(gelu=1), "gelu's derivative needs its input"),
    "dropout": (kept(dropout=0), "dropout keeps its mask alone"),
    "no mask": (kept(dropout=None), "the mask of dropout is missing"),
    "wide mask": (kept(mask=2), "a mask has one byte"),
    "scale": (kept(scale=0), "constant factor needs no tensor"),
    "results": (lambda width, chain: 2 * sum(n for _, n in chain), "every result is counted"),
    "tensors": (lambda width, chain: 2 * (width + sum(n for _, n in chain)), "every tensor is counted"),
    "numbers": (kept(number=1), "a number has two bytes"),
}

# ---- 05.replay ----


def replayed(*, at=lambda states, place: states[place], back=True, free=True, read_late=False):
    """An answer; `at(states, place)` is the state ahead of a second forward, None for the current one."""

    def answer(blocks, x, dy, rng):
        inputs, states = [], []
        for block in blocks:
            inputs.append(x)
            ahead = rng.state
            x = block.forward(x, rng)
            states.append(rng.state if read_late else ahead)
            if free:
                block.free()
        end = rng.state
        for place in reversed(range(len(blocks))):
            state = at(states, place)
            rng.state = rng.state if state is None else state
            blocks[place].forward(inputs[place], rng)
            dy = blocks[place].backward(dy)
        rng.state = end if back else rng.state
        return dy

    return answer


def from_the_start(blocks, x, dy, rng):
    """Keeps one input, and runs all blocks before again for each."""
    start = rng.state
    for place in reversed(range(len(blocks))):
        rng.state, y = start, x
        for block in blocks[: place + 1]:
            y = block.forward(y, rng)
            if block is not blocks[place]:
                block.free()
        dy = blocks[place].backward(dy)
    rng.state = start + len(blocks)
    return dy


def upside_down(blocks, x, dy, rng):
    """Gives the gradient to the blocks in the order of the forward."""
    return replayed()(blocks, x, dy, rng)[::-1]


REPLAY = {
    "new numbers": (replayed(at=lambda states, place: None), "the second forward draws new numbers"),
    "first state": (replayed(at=lambda states, place: states[0]), "at the state ahead of block 0; each block needs"),
    "set once": (
        replayed(at=lambda states, place: states[0] if place == len(states) - 1 else None),
        "the state is set once",
    ),
    "behind": (replayed(read_late=True), "read it ahead of the first forward"),
    "not back": (replayed(back=False), "draws masks that this one has drawn"),
    "moved": (replayed(at=lambda states, place: None, back=False), "a run without recomputation draws other"),
    "not freed": (replayed(free=False), "free a block after its first forward"),
    "quadratic": (from_the_start, "keep the input of each block"),
    "dy": (upside_down, "although the masks agree"),
    "no second": (lambda blocks, x, dy, rng: dy, "by block: a forward, then a second one"),
}

# ---- 05.groups ----


def group(n, i, a):
    sizes = [size for size in range(1, n + 1) if n % size == 0]
    return min(sizes, key=lambda size: n // size * i + size * a)


GROUPS = {
    "one": (lambda n, i, a: 1, "the input of every layer is kept"),
    "all": (lambda n, i, a: n, "all layers run again at once"),
    "root": (lambda n, i, a: round(n**0.5), "the root of the layers is right where"),
    "divisor": (
        lambda n, i, a: min((k for k in range(1, n + 1) if n % k == 0), key=lambda k: abs(k - n**0.5)),
        "nearest divisor",
    ),
    "balance": (lambda n, i, a: round((n * i / a) ** 0.5), "must divide the layers"),
    "peak": (lambda n, i, a: n // group(n, i, a) * i + group(n, i, a) * a - i, "this is the peak"),
    "count": (lambda n, i, a: n // group(n, i, a), "this is the number of groups"),
    "larger": (
        lambda n, i, a: min((k for k in range(n, 0, -1) if n % k == 0), key=lambda k: n // k * i + k * a),
        "return the smaller",
    ),
}

# ---- 06.shapes ----


def shapes(s, b, h, t, split):
    between, inside = [s // t if split else s, b, h], [s, b, 4 * h // t]
    names = {"norm input": between, "fc1 input": between, "dropout mask": between}
    return names | {"gelu input": inside, "fc2 input": inside}


def cut(*names, change=lambda s, b, h, t: {}):
    """An answer that cuts the positions of these tensors alone, with a change under sequence parallelism."""

    def answer(s, b, h, t, split):
        found = shapes(s, b, h, t, False)
        return found | {name: [s // t, b, h] for name in names} | change(s, b, h, t) if split else found

    return answer


BETWEEN = ("norm input", "fc1 input", "dropout mask")
SHAPES = {
    "always": (lambda s, b, h, t, split: shapes(s, b, h, t, True), "only sequence parallelism cuts these"),
    "nothing": (cut(), "nothing has changed"),
    "fc1": (cut("norm input", "dropout mask"), "fc1 keeps the gathered input"),
    "mask": (cut("norm input", "fc1 input"), "the mask has as many positions"),
    "only mask": (cut("dropout mask"), "only the mask is cut"),
    "width": (
        cut(change=lambda s, b, h, t: {name: [s, b, h // t] for name in BETWEEN}),
        "a norm needs whole rows",
    ),
    "twice": (
        cut(*BETWEEN, change=lambda s, b, h, t: {n: [s // t, b, 4 * h // t] for n in ("gelu input", "fc2 input")}),
        "positions and width are cut inside",
    ),
}

# ---- 06.sequence ----


def block(*, enter=True, leave="scatter", dy_whole=True, d="scatter", dgain="sum", dx="gain"):
    """One rank's program; an argument that is not its default is a misunderstanding."""

    def answer(x, dy, gain, A, B, tp):
        def own(a):
            return np.split(a, tp.size)[tp.rank]

        reduce = {"scatter": tp.reduce_scatter, "own": own, "none": lambda a: a}
        inner = np.maximum((tp.all_gather(x * gain) if enter else x * gain) @ A.T, 0)
        y = reduce[leave](inner @ B.T)
        d_scaled = reduce[d]((((tp.all_gather(dy) if dy_whole else dy) @ B) * (inner > 0)) @ A)
        found = (d_scaled * x).sum(0)
        found = found if dgain == "own" else tp.all_reduce(found)
        found = tp.all_reduce(found) if dgain == "twice" else found / tp.size if dgain == "mean" else found
        return y, d_scaled * (gain if dx == "gain" else 1), found

    return answer


def uneven(x, dy, gain, A, B, tp):
    """Rank 0 alone calls a collective."""
    return tp.all_gather(x) if tp.rank == 0 else x, x, gain


SEQUENCE = {
    "no gather": (block(enter=False, leave="none", dy_whole=False, d="none"), "gather ahead of A, and add up behind B"),
    "backward of it": (block(enter=False, leave="none", dy_whole=False, d="none"), "gather dy ahead of B"),
    "own part of y": (block(leave="own"), "gather ahead of A, and add up behind B"),
    "own part of dx": (block(d="own"), "gather dy ahead of B, and add up behind A"),
    "no gain": (block(dx="none"), "the gain is left out"),
    "own gain": (block(dgain="own"), "the gains drift apart"),
    "mean": (block(dgain="mean"), "too small by the number of ranks"),
    "twice": (block(dgain="twice"), "too large by the number of ranks"),
    "whole y": (block(leave="none"), "the shape of y is wrong"),
    "stall": (uneven, "rank 0 is in all_gather and rank 1 in return: both wait for ever"),
}

# ---- 06.seeds ----


def seed(*, common=lambda place, split: place == "between" and not split, tp=1, pp=100, own=2718):
    return lambda place, t, p, split: 1234 + pp * p + (0 if common(place, split) else own + tp * t)


SEEDS = {
    "own": (seed(common=lambda place, split: False), "they hold the same values, which then part"),
    "common": (seed(common=lambda place, split: True), "which are then dropped together"),
    "sp": (seed(common=lambda place, split: place == "between"), "which are then dropped together"),
    "stages": (seed(pp=0), "let the seed depend on the stage"),
    "sum": (seed(pp=1), "the sum of two ranks is not unique"),
    "rank 0": (seed(own=0), "a rank's own state repeats a common one"),
}

TABLES = {"05.kept": KEPT, "05.replay": REPLAY, "05.groups": GROUPS}
TABLES |= {"06.shapes": SHAPES, "06.sequence": SEQUENCE, "06.seeds": SEEDS}


def test_a_misunderstanding_is_named_once(misread):
    score, words = misread
    assert not score.ok and repr(score).count(words) == 1, repr(score)


@pytest.mark.parametrize(("name", "total"), zip(TABLES, (6, 12, 7, 6, 15, 9)))
def test_a_score_has_one_denominator_and_survives_any_answer(name, total):
    for answer in (None, lambda *case: None, lambda *case: "x"):
        score = check(name, answer)
        assert (score.passed, score.total) == (0, total)
