"""Exercises of chapter 18: steps that Python computes at each call, hooks that a replay needs, the end of a graph.

Wrong answers are compared with those of known misunderstandings. The score names the one that gives the same, and what
follows from the first step, module or name that is missing or too much.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.check.scoring import Diagnosis, Misreadings, Outcome, exercise, plain, same

Scope = tuple[str, ...]

SCOPES: tuple[Scope, ...] = (
    ("moe_router",),
    ("attn", "moe_router"),
    ("attn", "moe_router", "moe_preprocess"),
    ("attn",),
    ("moe_router", "moe_preprocess"),
)


# ---- the steps that Python computes ----

STEPS = ["attention", "shared", "route", "preprocess", "dispatch", "experts", "combine"]
"""Steps of a layer with experts, in order; `shared` are shared experts."""
_WORDS = {"attn": ["attention"], "moe_router": ["shared", "route"], "moe_preprocess": ["preprocess"]}
"""Word of a scope -> the captured steps."""


@exercise("18.runs", "Write computed(scope, call) -> the steps whose work Python starts at that call, in order.")
def runs(answer: Any) -> Iterator[Outcome]:
    """Judge capture and replay of five scopes, and an eager call."""
    diagnosis = Diagnosis()
    cases = [(scope, call) for scope in SCOPES for call in ("capture", "replay")]
    for scope, call in (*cases, (SCOPES[2], "eager")):
        right = _computed(scope, call)
        given: list[Any] = []

        def tried(scope: Scope = scope, call: str = call, given: list[Any] = given) -> Any:
            given.append(plain(answer(list(scope), call)))
            return given[0]

        outcome = diagnosis.outcome(f"scope {list(scope)}, {call}", right, tried, _misread_runs(scope, call))
        words = _of_steps(given[0], right, call) if given and not outcome.passed else ""
        yield replace(outcome, got=outcome.got + words)


def _captured(scope: Scope) -> list[str]:
    return [step for word in scope for step in _WORDS[word]]


def _computed(scope: Scope, call: str) -> list[str]:
    inside = _captured(scope)
    return {"eager": STEPS, "capture": inside, "replay": [step for step in STEPS if step not in inside]}[call]


def _misread_runs(scope: Scope, call: str) -> Misreadings:
    inside = _captured(scope)
    up_to = STEPS[: STEPS.index(inside[-1]) + 1]
    if call == "eager":
        return {
            "this skips steps in an eager call, too; without a graph nothing is skipped": _computed(scope, "replay")
        }
    if call == "replay":
        return {
            "this computes captured steps again; their results are in the store": STEPS,
            "this lists what the graph computes; Python computes the others": inside,
            "this takes attention into every graph; without `attn` Python runs attention first": [
                step for step in STEPS if step not in up_to
            ],
            "this computes the last captured step again; the signal came when its work was done": [
                step for step in STEPS if step not in inside[:-1]
            ],
            "this forgets shared experts; they are in the graph of `moe_router`": [
                step for step in STEPS if step not in inside or step == "shared"
            ],
        }
    return {
        "this goes on after the graph; the signal ends the forward there": STEPS[STEPS.index(inside[0]) :],
        "this computes everything at the capture; the signal ends the forward early": STEPS,
        "this leaves the last captured step out; the signal comes when its work is done": inside[:-1],
        "this takes attention into every graph; without `attn` Python runs attention first": up_to,
        "this takes attention into every graph, and leaves its last step out": up_to[:-1],
        "this forgets shared experts; they are in the graph of `moe_router`": [s for s in inside if s != "shared"],
    }


def _of_steps(given: Any, right: Sequence[str], call: str) -> str:
    """Name the first step that is missing or too much, and what that means; empty for another form."""
    if not isinstance(given, list) or not set(given) <= set(STEPS):
        return f" (give a list of steps, of {', '.join(STEPS)})"
    for step in STEPS:
        if step in right and step not in given:
            return f" (no graph would hold `{step}`)" if call == "capture" else f" (nobody would compute `{step}`)"
        if step in given and step not in right:
            twice = f"`{step}` would be captured, and run again by Python" if step in STEPS[:4] else _FROZEN
            return f" ({twice})" if call == "capture" else f" (`{step}` would be computed twice)"
    return " (the steps are right, their order is not)"


_FROZEN = "the split sizes of this capture would never change"


# ---- manual hooks ----

_LAYER: dict[str, int] = {
    "attention": 0, "attention.norm": 2, "attention.qkv": 2, "mlp": 0, "mlp.norm": 2, "mlp.router": 1, "mlp.experts": 2,
}  # fmt: skip
"""Module -> number of parameters of its own."""
_SHARED = {**_LAYER, "mlp.shared_experts": 2}
_CASES: tuple[tuple[str, dict[str, int], Scope], ...] = (
    ("a layer", _LAYER, SCOPES[2]),
    ("a layer", _LAYER, SCOPES[3]),
    ("a layer", _LAYER, SCOPES[0]),
    ("a layer", _LAYER, ("attn", "moe")),
    ("a layer with shared experts", _SHARED, SCOPES[2]),
    ("a layer with shared experts", _SHARED, SCOPES[0]),
    ("a layer whose router has no parameters", {**_LAYER, "mlp.router": 0}, SCOPES[1]),
)
_PARTS = {
    "attn": ("attention",), "moe": ("mlp",), "moe_preprocess": (),
    "moe_router": ("mlp.norm", "mlp.router", "mlp.shared_experts"),
}  # fmt: skip
"""Word of a scope -> modules whose forward the graph contains, with all modules inside them."""


@exercise("18.hooks", "Write hooks(modules, scope) -> the modules whose hook the wrapper calls before each replay.")
def hooks(answer: Any) -> Iterator[Outcome]:
    """Judge four scopes of a layer, two of a layer with shared experts, and a router without parameters."""
    diagnosis = Diagnosis()
    for layer, modules, scope in _CASES:
        right = _hooked(modules, scope)
        given: list[Any] = []

        def tried(modules: dict[str, int] = modules, scope: Scope = scope, given: list[Any] = given) -> Any:
            given.append(plain(answer(dict(modules), list(scope))))
            return given[0]

        outcome = diagnosis.outcome(f"{layer}, scope {list(scope)}", right, tried, _misread_hooks(modules, scope))
        words = _of_hooks(given[0], right, modules) if given and not outcome.passed else ""
        yield replace(outcome, got=outcome.got + words)


def _inside(modules: Mapping[str, int], parts: Sequence[str]) -> list[str]:
    """Return the modules that are one of `parts`, or are inside one."""
    return [name for name in modules if any(name == part or name.startswith(f"{part}.") for part in parts)]


def _hooked(modules: Mapping[str, int], scope: Scope) -> list[str]:
    parts = [part for word in scope for part in _PARTS[word]]
    return [name for name in _inside(modules, parts) if modules[name]]


def _misread_hooks(modules: Mapping[str, int], scope: Scope) -> Misreadings:
    parts = [part for word in scope for part in _PARTS[word]]
    right, inside = _hooked(modules, scope), _inside(modules, parts)
    halves = [half for half in ("attention", "mlp") if any(part.startswith(half) for part in parts)]
    return {
        "this hooks every module with parameters; Python calls the others, and their own hooks run": [
            name for name, own in modules.items() if own
        ],
        "this takes whole halves; Python calls the experts, and their own hooks run": [
            name for name in _inside(modules, halves) if modules[name]
        ],
        "this takes the captured parts alone; parameters are in the modules inside": [
            name for name in modules if name in parts
        ],
        "this takes modules without parameters of their own, too; there is nothing to wait for": inside,
        "this forgets the norm before the router; it is in the graph as well": [n for n in right if n != "mlp.norm"],
        "this forgets shared experts; they are in the graph of `moe_router`": [n for n in right if "shared" not in n],
        "this finds none; a replay calls no module, and so no hook": [],
    }


def _of_hooks(given: Any, right: Sequence[str], modules: Mapping[str, int]) -> str:
    """Distinguish an unsafe answer from one that is merely different."""
    if not isinstance(given, list) or not set(given) <= set(modules):
        return " (give a list of names of modules)"
    if missing := [name for name in right if name not in given]:
        return f" (unsafe: {missing[0]} would compute with parameters that have not arrived)"
    if extra := [name for name in given if name not in right]:
        waits = "waits before the graph, earlier than it has to" if modules[extra[0]] else "waits for nothing"
        return f" (safe, but {extra[0]} {waits})"
    return " (the modules are right, their order is not)"


# ---- the end of a graph ----

Step = tuple[str, tuple[str, ...], tuple[str, ...]]
"""Name, values that the step reads, values that it writes; writing a name again gives it a new value."""

LAYER: list[Step] = [
    ("attention", ("x",), ("x",)),
    ("norm", ("x",), ("hidden",)),
    ("shared experts", ("hidden",), ("shared",)),
    ("route", ("hidden",), ("probs", "map")),
    ("preprocess", ("hidden", "probs", "map"), ("hidden", "probs", "counts", "origin")),
    ("dispatch", ("hidden", "probs", "counts"), ("hidden", "probs")),
    ("experts", ("hidden", "probs", "counts"), ("hidden",)),
    ("combine", ("hidden", "origin", "counts"), ("hidden",)),
    ("add shared", ("hidden", "shared"), ("hidden",)),
    ("residual", ("x", "hidden"), ("x",)),
]
_TWO_STEPS: list[Step] = [("double", ("x",), ("y",)), ("add", ("x", "y"), ("z",))]
_AGAIN: list[Step] = [("a", ("x",), ("t",)), ("b", ("t",), ("y",)), ("c", ("x",), ("t",)), ("d", ("t", "y"), ("z",))]
_BOUNDARIES: tuple[tuple[list[Step], int], ...] = (
    (_TWO_STEPS, 1),
    (_AGAIN, 2),
    (_TWO_STEPS, 2),
    (LAYER, 1),
    (LAYER, 4),
    (LAYER, 5),
    (LAYER[1:], 3),
)
NUM_DRAWN = 200
"""How many forwards are drawn at random; the last case shows the shortest one that the answer misses."""


@exercise(
    "18.boundary",
    "Write boundary(steps, captured) -> (inputs, outputs): what a graph of the first steps takes in and must give out.",
)
def boundary(answer: Any) -> Iterator[Outcome]:
    """Judge small forwards, a layer cut in four places, and a forward drawn at random."""
    diagnosis = Diagnosis()
    for steps, captured in (*_BOUNDARIES, _shortest_missed(answer)):
        right = list(_boundary(steps, captured))
        given: list[Any] = []

        def tried(steps: list[Step] = steps, captured: int = captured, given: list[Any] = given) -> Any:
            given.append(plain(answer(list(steps), captured)))
            return given[0]

        words = f"{_words(steps[:captured])} | {_words(steps[captured:])} (captured up to the bar)"
        outcome = diagnosis.outcome(words, right, tried, _misread(steps, captured))
        consequence = _consequence(given[0], right, steps, captured) if given and not outcome.passed else ""
        yield replace(outcome, got=outcome.got + consequence)


def _words(steps: Sequence[Step]) -> str:
    return "; ".join(f"{', '.join(writes)} = {name}({', '.join(reads)})" for name, reads, writes in steps) or "nothing"


def _read_and_written(steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """Return names that steps read before they write them, and names that they write, in the order of the last time."""
    inputs: list[str] = []
    written: list[str] = []
    for _, reads, writes in steps:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, written


def _wanted(steps: Sequence[Step], result: Sequence[str]) -> set[str]:
    """Return the values that are read after the graph, found from the end backwards."""
    live = set(result)
    for _, reads, writes in reversed(steps):
        live = live - set(writes) | set(reads)
    return live


def _boundary(steps: Sequence[Step], captured: int) -> tuple[list[str], list[str]]:
    inputs, written = _read_and_written(steps[:captured])
    live = _wanted(steps[captured:], steps[-1][2])
    return inputs, [name for name in written if name in live]


def _misread(steps: Sequence[Step], captured: int) -> Misreadings:
    inputs, written = _read_and_written(steps[:captured])
    after, result = steps[captured:], set(steps[-1][2])
    following = set(after[0][1]) if after else result
    by_name = {name for _, reads, _ in after for name in reads} | result
    live = _wanted(after, ())
    every = [name for _, reads, _ in steps[:captured] for name in reads]

    def with_outputs(kept: Callable[[str], bool]) -> list[list[str]]:
        return [inputs, [name for name in written if kept(name)]]

    return {
        "names are compared, but a name that is written again after the graph has another value": with_outputs(
            by_name.__contains__
        ),
        "all that the graph computes comes out; what nobody reads any more could be used again": [inputs, written],
        "every name that a step reads or writes is listed, also twice": [
            every, [name for _, _, writes in steps[:captured] for name in writes]
        ],
        "only the very next step is asked what it reads; others read later": with_outputs(following.__contains__),
        "the result is left out; the last step's writes come out as well": with_outputs(live.__contains__),
    }  # fmt: skip


def _consequence(given: Any, right: list[list[str]], steps: Sequence[Step], captured: int) -> str:
    """Name the first name that is missing or too much, and what that means; empty for another form."""
    if not (isinstance(given, list) and len(given) == 2 and all(isinstance(each, list) for each in given)):
        return " (give two lists: inputs and outputs)"
    for name in right[0]:
        if name not in given[0]:
            return f" (without the input {name} the graph has nothing to read)"
    for name in right[1]:
        if name not in given[1]:
            reader = next((step for step, reads, _ in steps[captured:] if name in reads), None)
            return f" (without {name} `{reader}` has nothing to read)" if reader else f" (the result {name} is lost)"
    for name in given[0]:
        if name not in right[0]:
            made = any(name in writes for _, _, writes in steps[:captured])
            return f" ({name} is too much{': a captured step writes it before it is read' if made else ''})"
    for name in given[1]:
        if name not in right[1]:
            made = any(name in writes for _, _, writes in steps[:captured])
            return f" ({name} is too much{'' if made else ': no captured step writes it, so the caller has it'})"
    return " (the names are right, their order is not)"


def _shortest_missed(answer: Any) -> tuple[list[Step], int]:
    """Return the shortest of the random forwards that the answer misses, or the first one if it misses none."""
    drawn = sorted(_drawn(), key=lambda case: len(case[0]))
    for steps, captured in drawn:
        try:
            missed = not same(answer(list(steps), captured), list(_boundary(steps, captured)))
        except Exception:
            missed = True
        if missed:
            return steps, captured
    return drawn[0]


def _drawn() -> Iterator[tuple[list[Step], int]]:
    draw = random.Random(16)
    for _ in range(NUM_DRAWN):
        names = [f"v{i}" for i in range(draw.randint(2, 6))]
        steps: list[Step] = []
        for number in range(draw.randint(1, 8)):
            reads = tuple(draw.sample(names, draw.randint(1, 2)))
            steps.append((f"s{number}", reads, tuple(draw.sample(names, draw.randint(1, 2)))))
        yield steps, draw.randint(1, len(steps))
