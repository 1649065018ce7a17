"""Exercises of chapter 05: the bytes of a chain, a second forward for each block, layers in groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from labkit.check.scoring import Misreadings, Outcome, asked, exercise, holds, raised

# ---- the bytes of a chain ----

Chain = tuple[tuple[str, int], ...]

_CHAINS: tuple[tuple[int, Chain], ...] = (
    (4, (("linear", 8),)),
    (4, (("linear", 16), ("gelu", 16), ("linear", 4))),
    (4, (("linear", 8), ("relu", 8), ("linear", 4))),
    (6, (("norm", 6), ("linear", 18))),
    (6, (("scale", 6), ("softmax", 6), ("dropout", 6), ("linear", 3))),
    (8, (("norm", 8), ("linear", 32), ("gelu", 32), ("linear", 8), ("dropout", 8))),
)
"""(width of the input, (operation, width of its result) in order)."""

_INPUT, _RESULT, _MASK = "input", "result", "mask"
_KEEPS: Mapping[str, str | None] = {
    "linear": _INPUT, "norm": _INPUT, "gelu": _INPUT, "relu": _RESULT, "softmax": _RESULT, "dropout": _MASK,
    "scale": None,
}  # fmt: skip


def _kept(
    width: int,
    chain: Chain,
    keeps: Mapping[str, str | None] = _KEEPS,
    *,
    once: bool = True,
    number: int = 2,
    mask: int = 1,
) -> int:
    """Return the bytes that autograd keeps; arguments after `chain` that are not the default are misunderstandings."""
    widths = [width, *(result for _, result in chain)]
    kept = [
        place + (keeps[name] == _RESULT) for place, (name, _) in enumerate(chain) if keeps[name] in (_INPUT, _RESULT)
    ]
    masks = sum(result for name, result in chain if keeps[name] == _MASK)
    return number * sum(widths[tensor] for tensor in (set(kept) if once else kept)) + mask * masks


@exercise(
    "05.kept", "Write kept_bytes(width, chain) -> the bytes that autograd keeps for a token that runs through it."
)
def kept(answer: Any) -> Iterator[Outcome]:
    """Judge chains in which operations keep their input, their result, a mask or nothing, and share tensors."""
    return asked(
        _CHAINS,
        given=lambda width, chain: f"width {width}: {', '.join(f'{name} to {result}' for name, result in chain)}",
        right=_kept,
        tried=lambda width, chain: answer(width, list(chain)),
        misread=_misread_chains,
    )


def _misread_chains(width: int, chain: Chain) -> Misreadings:
    every_input = dict.fromkeys(_KEEPS, _INPUT)
    results = sum(2 * result for _, result in chain)
    return {
        "relu and softmax keep their result, and the next operation keeps the same tensor as input: count it once": (
            _kept(width, chain, once=False)  # as if relu kept its input, which is as wide
        ),
        "each operation is counted with its input; relu and softmax keep their result, dropout a mask, scale nothing": (
            _kept(width, chain, every_input, once=False)
        ),
        "gelu's derivative needs its input, not its result": _kept(width, chain, {**_KEEPS, "gelu": _RESULT}),
        "dropout keeps its mask alone, not its input": _kept(width, chain, {**_KEEPS, "dropout": _INPUT}),
        "the mask of dropout is missing": _kept(width, chain, {**_KEEPS, "dropout": None}),
        "a mask has one byte per number, not two": _kept(width, chain, mask=2),
        "the derivative of a constant factor needs no tensor": _kept(width, chain, {**_KEEPS, "scale": _INPUT}),
        "every result is counted; a result that no derivative names is freed": results,
        "every tensor is counted; a tensor that no derivative names is freed": results + 2 * width,
        "these are numbers; a number has two bytes": _kept(width, chain, number=1),
    }


# ---- a second forward for each block ----


@dataclass
class _Rng:
    """A generator of random masks, which depend on a number that each draw increases."""

    state: int = 7

    def draw(self, size: int) -> np.ndarray:
        mask = np.random.default_rng(self.state).integers(0, 2, size)
        self.state += 1
        return mask


@dataclass
class _Trace:
    """What the judge sees: the draws of each block, and the blocks that keep activations."""

    drawn: dict[int, list[int]] = field(default_factory=dict)
    holding: set[int] = field(default_factory=set)
    most: int = 0


class _Block:
    """y = mask * (x + place), whose backward needs the mask."""

    def __init__(self, place: int, trace: _Trace) -> None:
        self.place, self._trace = place, trace
        self._mask: np.ndarray | None = None

    def forward(self, x: Any, rng: _Rng) -> np.ndarray:
        x = np.asarray(x)
        self._trace.drawn.setdefault(self.place, []).append(rng.state)
        self._mask = rng.draw(x.size)
        self._trace.holding.add(self.place)
        self._trace.most = max(self._trace.most, len(self._trace.holding))
        return self._mask * (x + self.place)

    def backward(self, dy: Any) -> np.ndarray:
        assert self._mask is not None, f"block {self.place} holds no activations: run its forward again first"
        dx = self._mask * np.asarray(dy)
        self.free()
        return dx

    def free(self) -> None:
        self._mask = None
        self._trace.holding.discard(self.place)


@dataclass
class _Replayed:
    """What one call of the answer did."""

    count: int
    trace: _Trace
    rng: _Rng
    dx: Any = None
    error: str = ""

    @property
    def start(self) -> int:
        return _Rng().state


def _replayed(answer: Any, count: int) -> _Replayed:
    trace, rng = _Trace(), _Rng()
    run = _Replayed(count, trace, rng)
    blocks = [_Block(place, trace) for place in range(count)]
    try:
        run.dx = answer(blocks, np.arange(1, 7), np.arange(10, 16), rng)
    except (Exception, SystemExit) as error:
        run.error = raised(error)
    return run


def _right_gradient(count: int) -> list[int]:
    rng, dx = _Rng(), np.arange(10, 16)
    for _ in range(count):
        dx = rng.draw(dx.size) * dx
    return dx.tolist()


@exercise(
    "05.replay", "Write input_gradient(blocks, x, dy, rng) -> the gradient of x, with one block's activations at once."
)
def replay(answer: Any) -> Iterator[Outcome]:
    """Judge one, two and five blocks: the gradient, the masks, the memory, the work, and the generator's end."""
    for count in (1, 2, 5):
        run = _replayed(answer, count)
        claims: tuple[tuple[str, str, Callable[[_Replayed], bool | str]], ...] = (
            ("the gradient of x", "the gradient that the masks of the first forward give", _gradient),
            ("the state at the end", f"{run.start + count}, as after one forward", _state_at_end),
            ("blocks that hold activations", "at most 1 at any time", _memory),
            ("forwards", "2 of each block", _work),
        )
        for what, claim, test in claims:
            outcome = holds(f"{count} block{'s' * (count > 1)}, {what}", claim, lambda r=run, t=test: r.error or t(r))
            yield replace(outcome, reason=run.error or f"{what}: {_kind(outcome.got)}")


def _kind(words: str) -> str:
    """Return a finding without its numbers, which may differ from case to case."""
    return re.sub(r"\[.*?\]|\d+", "", words)


def _gradient(run: _Replayed) -> bool | str:
    """Find the first block in the order of backward whose second mask is not its first one."""
    for place in reversed(range(run.count)):
        draws = run.trace.drawn.get(place, [])
        if len(draws) < 2:
            continue
        first, again = draws[0], draws[-1]
        if first != again:
            return f"{_why(run, place)}: block {place} drew from state {first} first, and from state {again} again"
    try:
        found = np.asarray(run.dx).tolist()
    except (TypeError, ValueError):
        found = None
    if not run.trace.drawn:
        return f"{found}, and no block ran"
    return (
        found == _right_gradient(run.count)
        or f"{found}, although the masks agree: pass dy from the last block to the first"
    )


def _why(run: _Replayed, place: int) -> str:
    """Name the state from which a block drew in its second forward."""
    again = {p: draws[-1] for p, draws in run.trace.drawn.items() if len(draws) > 1}
    order = [again[p] for p in sorted(again, reverse=True)]
    if set(order) == {run.start} and run.count > 1:
        return "every second forward begins at the state before block 0; each block needs its own"
    if order == list(range(run.start, run.start + len(order))):
        return "the state is set once, but blocks run again from last to first"
    if set(order) == {run.start + run.count} and run.count > 1:
        return "every second forward begins at the state after the forward"
    if min(order) >= run.start + run.count:
        return "the second forward draws new numbers, so it drops other values than the first"
    if all(again[p] == run.trace.drawn[p][0] + 1 for p in again):
        return "the state is read after the draw; read it before the first forward"
    return "the second forward draws other numbers than the first"


def _state_at_end(run: _Replayed) -> bool | str:
    end = run.rng.state
    if end == run.start + run.count:
        return True
    if end < run.start + run.count:
        return f"{end}: the next microbatch draws masks that this one has drawn"
    return f"{end}: the second forwards have moved it, so a run without recomputation draws other numbers"


def _memory(run: _Replayed) -> bool | str:
    if not run.trace.drawn:
        return "none, since no block ran"
    return run.trace.most <= 1 or f"{run.trace.most} at once: free a block after its first forward"


def _work(run: _Replayed) -> bool | str:
    counts = [len(run.trace.drawn.get(place, [])) for place in range(run.count)]
    if counts == [2] * run.count:
        return True
    most = max(counts)
    if most < 2:
        return f"{counts} by block: a forward, then a second one just before backward"
    return f"{counts} by block: keep the input of each block, then each runs again only once"


# ---- layers in groups ----

_GROUPS = ((64, 1, 1), (24, 2, 34), (96, 2, 34), (100, 4, 36), (60, 8, 32), (7, 10, 10), (1, 2, 34))
"""(layers, bytes of an input, bytes that a layer keeps, its input included)."""


def _peak(layers: int, size: int, input_bytes: int, layer_bytes: int) -> int:
    return layers // size * input_bytes + size * layer_bytes - input_bytes


@exercise("05.groups", "Write best_group(layers, input_bytes, layer_bytes) -> the group size with the smallest peak.")
def groups(answer: Any) -> Iterator[Outcome]:
    """Judge layers that keep as much as their input, or many times as much; two n with one peak; one layer."""
    return asked(
        _GROUPS,
        given="{} layers, {} bytes per input and {} per layer".format,
        right=lambda layers, *each: min(_sizes(layers), key=lambda n: _peak(layers, n, *each)),
        tried=answer,
        misread=_misread_groups,
    )


def _sizes(layers: int) -> list[int]:
    return [n for n in range(1, layers + 1) if layers % n == 0]


def _misread_groups(layers: int, input_bytes: int, layer_bytes: int) -> Misreadings:
    sizes = _sizes(layers)
    root = math.sqrt(layers)
    balanced = math.sqrt(layers * input_bytes / layer_bytes)
    best = min(_peak(layers, n, input_bytes, layer_bytes) for n in sizes)
    return {
        "two n have the smallest peak; return the smaller": (
            max(n for n in sizes if _peak(layers, n, input_bytes, layer_bytes) == best)
        ),
        "one layer at a time runs again, but the input of every layer is kept": 1,
        "one input is kept, but all layers run again at once": layers,
        "the root of the layers is right where a layer keeps no more than its input": round(root),
        "the root of the layers is right where a layer keeps no more than its input (nearest divisor)": (
            min(sizes, key=lambda n: abs(n - root))
        ),
        "this balances inputs and group, but the groups must divide the layers": round(balanced),
        "this has the largest peak, not the smallest": (
            max(sizes, key=lambda n: _peak(layers, n, input_bytes, layer_bytes))
        ),
        "this is the peak; the exercise asks for the group size": best,
        "this is the number of groups; the exercise asks for the number of layers in one": (
            layers // min(sizes, key=lambda n: _peak(layers, n, input_bytes, layer_bytes))
        ),
    }
