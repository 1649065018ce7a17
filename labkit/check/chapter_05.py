"""Exercises and bets of chapter 05: what a program keeps, a second forward for each block, a plan for each layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.check.bets import ask
from labkit.check.scoring import Outcome, exercise, explained, holds, plain, raised, shown

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- what a program keeps ----

Program = tuple[tuple[str, str, tuple[str, ...]], ...]

_LAYER: Program = (
    ("normed", "norm", ("x",)), ("qkv", "linear", ("normed",)), ("scores", "matmul", ("qkv",)),
    ("scaled", "scale", ("scores",)), ("masked", "add", ("scaled",)), ("probs", "softmax", ("masked",)),
    ("dropped", "dropout", ("probs",)), ("mixed", "matmul", ("dropped", "qkv")), ("proj", "linear", ("mixed",)),
    ("proj dropped", "dropout", ("proj",)), ("middle", "add", ("x", "proj dropped")),
    ("normed 2", "norm", ("middle",)), ("fc1", "linear", ("normed 2",)), ("gelu", "gelu", ("fc1",)),
    ("fc2", "linear", ("gelu",)), ("fc2 dropped", "dropout", ("fc2",)), ("y", "add", ("middle", "fc2 dropped")),
)  # fmt: skip
_WIDTHS = {"qkv": 3, "fc1": 4, "gelu": 4} | dict.fromkeys(("scores", "scaled", "masked", "probs", "dropped"), 16)
_PROGRAMS: tuple[Program, ...] = (
    (("a", "linear", ("x",)), ("b", "gelu", ("a",)), ("c", "linear", ("b",))),
    (("a", "linear", ("x",)), ("b", "relu", ("a",)), ("c", "linear", ("b",))),
    (("a", "scale", ("x",)), ("b", "softmax", ("a",)), ("c", "dropout", ("b",)), ("d", "add", ("x", "c"))),
    (("a", "norm", ("x",)), ("b", "linear", ("a",)), ("c", "matmul", ("a", "b"))),
    _LAYER,
)
_INPUTS, _FIRST, _RESULT, _MASK = "inputs", "first input", "result", "mask"
_KEEPS: Mapping[str, str | None] = {
    "linear": _INPUTS, "matmul": _INPUTS, "norm": _INPUTS, "gelu": _INPUTS, "relu": _RESULT, "softmax": _RESULT,
    "dropout": _MASK, "scale": None, "add": None,
}  # fmt: skip


def _kept(program: Program, **other: str | None) -> set[str]:
    """Return the names of what autograd keeps; `other` are operations that somebody takes for different ones."""
    keeps, found = {**_KEEPS, **other}, set[str]()
    for result, operation, inputs in program:
        if keeps[operation] == _INPUTS:
            found |= set(inputs)
        elif keeps[operation] == _FIRST:
            found.add(inputs[0])
        elif keeps[operation] == _RESULT:
            found.add(result)
        elif keeps[operation] == _MASK:
            found.add(f"mask of {result}")
    return found


def draw_kept(answer: Any) -> Figure | None:
    """Draw the layer's tensors as areas, those of the answer filled; an answer of another form has no drawing."""
    from labkit.viz.layer_memory import TensorArea, layer_areas  # matplotlib, which a score does without

    names = ["x"]
    for result, operation, _ in _LAYER[:-1]:
        names += [f"mask of {result}", result] if operation == "dropout" else [result]
    core = {"scores", "scaled", "masked", "probs", "dropped", "mask of dropped"}
    areas = [
        TensorArea(name, _WIDTHS.get(name.removeprefix("mask of "), 1), 1 + (not name.startswith("mask")), name in core)
        for name in names
    ]
    return layer_areas(areas, set(answer([*_LAYER])) & set(names), _kept(_LAYER))


@exercise("05.kept", "Write kept(program) -> the set of names of the tensors that autograd keeps.", draw=draw_kept)
def kept(answer: Any) -> Iterator[Outcome]:
    """Judge chains whose operations keep inputs, results, masks or nothing, and share tensors; then a whole layer."""
    for program in _PROGRAMS:
        given = "the layer" if program is _LAYER else "; ".join(f"{r} = {o}({', '.join(i)})" for r, o, i in program)
        yield explained(given, f"{len(_kept(program))} tensors", lambda each=program: _judged(answer, each))


def _judged(answer: Any, program: Program) -> bool | str:
    """Return True, or what is missing and too much, and the misunderstanding behind it."""
    found, right = answer([*program]), _kept(program)
    if not isinstance(found, set | frozenset | list | tuple):
        return f"{shown(plain(found))}: this is not a set of names"
    found = set(found)
    if found == right:
        return True
    apart = [f"{name} is missing" for name in sorted(right - found)[:2]]
    apart += [f"{name} is not kept" for name in sorted(found - right)[:2]]
    return f"{', '.join(apart)}: {_why_kept(program, found)}"


def _why_kept(program: Program, found: set[str]) -> str:
    """Name the misunderstanding behind a set of names."""
    results, inputs = {r for r, _, _ in program}, {name for _, _, names in program for name in names}
    masks = {f"mask of {result}" for result, operation, _ in program if operation == "dropout"}
    reasons: dict[str, tuple[set[str], ...]] = {
        "that is every result; one that no derivative names is freed as soon as it has been used": (
            results, results | {"x"}, results | masks, results | masks | {"x"},
        ),
        "that is every input; the derivative of a sum or of a constant factor needs none": (inputs, inputs | masks),
        "the derivatives of relu and softmax are written with their results": (
            _kept(program, relu=_INPUTS, softmax=_INPUTS), _kept(program, relu=_INPUTS),
            _kept(program, softmax=_INPUTS),
        ),
        "gelu's derivative needs its input": (_kept(program, gelu=_RESULT),),
        "dropout keeps its mask alone, neither what it reads nor what it returns": (
            _kept(program, dropout=_INPUTS), _kept(program, dropout=_RESULT),
        ),
        "dropout keeps a mask, which is a tensor as well": (_kept(program, dropout=None),),
        "a sum passes the gradient on as it is, to every term": (_kept(program, add=_INPUTS),),
        "the derivative of a constant factor is the factor": (_kept(program, scale=_INPUTS),),
        "the gradient of a weight needs what the weight was multiplied with": (_kept(program, linear=None),),
        "both factors of this product are activations, and each is in the other's gradient": (
            _kept(program, matmul=None), _kept(program, matmul=_FIRST),
        ),
        "a norm's derivative needs the input": (_kept(program, norm=_RESULT), _kept(program, norm=None)),
    }  # fmt: skip
    general = "ask of each operation what its derivative is written with, and count a tensor once"
    return next((words for words, others in reasons.items() if found in others), general)


ask(
    "05.relu",
    "A colleague replaces GeLU by ReLU in the MLP. Of the layer's 34 bytes per token and feature outside of core "
    "attention, how many does autograd no longer keep?",
    choices={
        "0": "ReLU is as wide as GeLU, and both keep one tensor. But which one? GeLU keeps its input, ReLU its result.",
        "8": "GeLU keeps its input, and fc2 keeps GeLU's result as its own input: two tensors of 8 bytes. ReLU keeps "
        "its result, which is the tensor that fc2 keeps anyway, and a storage counts once.",
        "16": "fc2 still needs its input for the gradient of its weight, so one of the two tensors stays.",
    },
)

# ---- a second forward for each block ----

ask(
    "05.masks",
    "The second forward draws new numbers. For how many percent of the values is the gradient that of another mask, "
    "because only one of the two forwards has dropped them?",
    misread=lambda dropout: {
        "That is the share that one forward drops. The other one drops values as well, mostly different ones.": (
            100 * dropout
        ),
        "That counts the values that both have dropped twice over: on these the two agree.": 200 * dropout,
        "That is the share that both drop, on which they agree.": 100 * dropout**2,
    },
    unit="percent",
    because="A value is dropped by the first forward and not by the second with probability p (1 - p), and the other "
    "way round as often: 2 p (1 - p).",
)


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


# ---- a plan for each layer ----

ask(
    "05.peak",
    "Twelve layers, each recomputed in full: forward keeps an input of 2 s b h for each of them. How many s b h are "
    "kept at the worst moment of the step? (The table above has what a layer keeps in full.)",
    misread=lambda whole: {
        "That is what is there when forward ends. But then backward begins, and it needs a layer in full.": 24,
        "Backward needs one layer at a time in full, not all of them.": 12 * whole,
        "That is one layer in full. The inputs of the others are there, too.": whole,
        "The input of the last layer is part of what it keeps in full: count it once.": 24 + whole,
    },
    unit="s b h",
    because="The worst moment is the beginning of backward: all twelve inputs are there, and the last layer has just "
    "been computed again in full, of which its input is a part. From then on one input less is there for each layer.",
)

Ways = Mapping[str, tuple[float, float, float]]
"""Way -> (kept after forward, kept during backward, forwards of the layer that it costs)."""
_GPT2: Ways = {"keep": (114, 114, 0.0), "selective": (34, 90, 0.18), "full": (2, 114, 1.0)}
_SHORT: Ways = {"keep": (44, 44, 0.0), "selective": (34, 34, 0.03), "full": (2, 44, 1.0)}
_LONG: Ways = {"keep": (354, 354, 0.0), "selective": (34, 330, 0.4), "full": (2, 354, 1.0)}
_CASES: tuple[tuple[int, float, Ways], ...] = (
    (12, 457, _GPT2), (12, 1400, _GPT2), (12, 470, _GPT2), (12, 150, _GPT2), (8, 300, _SHORT), (8, 200, _SHORT),
    (6, 480, _LONG), (6, 1000, _LONG), (1, 114, _GPT2),
)  # fmt: skip
_FORWARD = 1.0


def _steps(plan: Sequence[str], ways: Ways) -> list[tuple[float, float]]:
    """Return (forwards of a layer done, kept) from moment to moment."""
    done, kept, found = 0.0, 0.0, [(0.0, 0.0)]
    for name in plan:
        done, kept = done + _FORWARD, kept + ways[name][0]
        found.append((done, kept))
    for name in reversed(plan):
        found.append((done, kept - ways[name][0] + ways[name][1]))
        done, kept = done + 2 * _FORWARD + ways[name][2], kept - ways[name][0]
        found += [(done, found[-1][1]), (done, kept)]
    return found


def _peak(plan: Sequence[str], ways: Ways) -> float:
    return max(kept for _, kept in _steps(plan, ways))


def _cost(plan: Sequence[str], ways: Ways) -> float:
    return sum(ways[name][2] for name in plan)


def _best(layers: int, room: float, ways: Ways) -> list[str]:
    """Return the cheapest plan that fits; what backward adds weighs least in front, so full comes before selective."""
    fitting = [
        plan
        for full in range(layers + 1)
        for some in range(layers - full + 1)
        if _peak(plan := ["full"] * full + ["selective"] * some + ["keep"] * (layers - full - some), ways) <= room
    ]
    return min(fitting, key=lambda plan: _cost(plan, ways))


def draw_plan(answer: Any) -> Figure | None:
    """Draw what the answer's plan keeps over time, next to a best one; an answer of another form has no drawing."""
    from labkit.viz.layer_memory import memory_over_time  # matplotlib, which a score does without

    layers, room, ways = _CASES[0]
    found = plain(answer(layers, room, dict(ways)))
    if not isinstance(found, list) or len(found) != layers or not set(found) <= set(ways):
        return None
    unit = 64 * 1024 * 768  # s b h of GPT-2
    plans = {"your plan": found, "a best plan": _best(layers, room, ways)}
    runs = {name: [(done, kept * unit) for done, kept in _steps(plan, ways)] for name, plan in plans.items()}
    return memory_over_time(runs, room * unit, layers * _FORWARD)


@exercise("05.plan", "Write plan(layers, room, ways) -> the name of a way for each layer, in order.", draw=draw_plan)
def plan(answer: Any) -> Iterator[Outcome]:
    """Judge layers of short, usual and long sequences, with much and little room: does it fit, and is it cheapest?"""
    for layers, room, ways in _CASES:
        what = f"{layers} layer{'s' * (layers > 1)}, room {room:g}, a whole layer keeps {ways['keep'][0]:g}"
        least = _cost(_best(layers, room, ways), ways)
        yield explained(
            what, f"fits, for {least:.2f} forwards of a layer", lambda c=(layers, room, ways): _planned(answer, *c)
        )


def _planned(answer: Any, layers: int, room: float, ways: Ways) -> bool | str:
    found = plain(answer(layers, room, dict(ways)))
    if not isinstance(found, list) or len(found) != layers or not set(map(str, found)) <= set(ways):
        return f"{shown(found)}: this is not a list with one of the words {', '.join(ways)} for each layer"
    peak, kept = _peak(found, ways), sum(ways[name][0] for name in found)
    if kept > room:
        return f"{kept:g} are kept when forward ends: forward alone does not fit; recompute more"
    if peak > room:
        return f"peak {peak:g}: forward fits, but backward makes a layer's tensors again while the earlier ones wait"
    more = _cost(found, ways) - _cost(_best(layers, room, ways), ways)
    return more < 1e-9 or f"fits, and costs {more:.2f} forwards more than needed: {_dear(found, room, ways)}"


def _dear(found: list[str], room: float, ways: Ways) -> str:
    """Say how a plan that fits could be cheaper."""
    if set(found) == {"full"}:
        return "not every layer needs full recomputation"
    if found[:-1] != sorted(found[:-1], key=["full", "selective", "keep"].index):
        return "what is recomputed at the end meets all that waits; begin with the layers that keep least"
    for name in ("keep", "selective"):
        if ways[name][2] < ways[found[-1]][2] and _peak([*found[:-1], name], ways) <= room:
            return "the last layer is needed again at once, so keep of it what there is room for"
    return "with one full layer more, several others may keep more: try every number of full and selective ones"


# ---- a paper's number ----

ask(
    "05.paper",
    "Selective recomputation computes the core of attention twice. For GPT-3 (h = 12,288, s = 2,048), by how much do "
    "the operations of a step grow? The paper says 2.7 %.",
    choices={
        "by a third of that": "Backward of a product is two products, so of the core's three shares of a step only "
        "one, its forward, is computed again. 2.7 % is the share of all three.",
        "by what it says": "2.7 % is the share that the core's products have in a step, forward and backward "
        "together. But backward isn't done twice: only the core's forward is.",
        "by three times that": "That would be so if everything of the core ran three times more. Only its forward runs "
        "once more.",
    },
)
