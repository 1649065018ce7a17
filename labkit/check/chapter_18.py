"""Exercises and bets of chapter 18: a step that stops or is skipped, the end of a graph, the time that a graph saves.

Wrong answers are compared with those of known misunderstandings. The score says what follows from the first step or
name that is missing or too much.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import Diagnosis, Finding, Misreadings, Outcome, asked, exercise, holds, plain, same, shown
from labkit.graphs.study.launches import WAIT, Program, run_program

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

ask(
    "18.frozen",
    "The layer gets a second batch, but its experts split their rows by the first batch's counts. What happens?",
    choices={
        "an error": "Both batches have as many rows, so every shape fits, and nobody compares the counts.",
        "the right output": "The boundaries between the experts are those of another batch, so rows near them meet the "
        "wrong expert.",
        "a wrong output": "Both batches have as many rows, so every shape fits and nothing raises. But an expert gets "
        "rows that the router sent to its neighbour.",
    },
)
ask(
    "18.detached",
    "With x.detach() the error is gone. What, if anything, is wrong now?",
    choices={
        "nothing": "The numbers of x are right, but detach() cuts it off from the graph that made it, and the gradient "
        "of the residual connection ends there.",
        "the output": "A replay writes new numbers to the address of x, so the output is right.",
        "gradients": "A replay writes new numbers to the address of x, so the output is right to the bit. But nothing "
        "leads back from them into the graph: what flows through the residual connection is lost.",
    },
)
ask(
    "18.hooks",
    "Graphs replace the layers from step 3 on (the first step is 0), and nobody calls the hooks. Which step is the "
    "first with a wrong loss?",
    unit="",
    misread=lambda: {
        "That step replays first, but its parameters are right: the capture before it has waited for all gathers.": 3,
        "That one is too late: after step 4's update somebody has noticed.": 5,
    },
    because="The capture waits for all gathers, so the first replay, step 3, is right. Its update starts new gathers, "
    "and in step 4 nobody waits for them.",
)
ask(
    "18.price",
    "Two GPTs learn the same language with the balancing loss. One drops what doesn't fit at factor 1, the other one "
    "drops nothing. How much higher is the first one's loss on samples that neither has seen?",
    choices={
        "less than 1 %": "At this size the limit costs less than three seeds can tell from nothing. It doesn't follow "
        "that it is free: Table 1 of the Switch Transformer has 0.5 % for one expert per token and 1.6 % for two.",
        "1 to 10 %": "Table 1 of the Switch Transformer has 1.6 % for two experts per token after 100,000 steps. Our "
        "runs are far shorter, and theirs differ less than two seeds do.",
        "more than 10 %": "A batch of uneven tokens suggests that, but nobody had balanced its router.",
    },
)
ask(
    "18.worth",
    "In the second run a GPU needs 13.5 ms per layer and microbatch, both passes together. Suppose that it had waited "
    "for every launch that the graphs save in our layer. How much shorter would the step be, in percent?",
    unit="%",
    misread=lambda forward, every, launch: {
        "That counts the forward alone; the backward has a graph of its own.": 100 * forward * launch / 13_500,
        "That counts every launch; the second half of the layer is still launched one by one.": 100
        * every
        * launch
        / 13_500,
    },
    because="The graphs of our layer save about two dozen launches in each pass, at 6 us each. That is little of "
    "13.5 ms.",
)


# ---- a step that stops, or is skipped ----


class _Stopped(Exception):
    pass


class _Graph:
    """What the decorated steps of a layer share, as the chapter defines it."""

    def __init__(self, *, capturing: bool = False, **store: Any) -> None:
        self.store: dict[str, Any] = store
        self.capturing = capturing

    def stop(self, result: Any) -> None:
        raise _Stopped(result)


_SITUATIONS: tuple[tuple[str, bool, bool, dict[str, Any]], ...] = (
    ("no graph is captured, the store is empty", False, False, {}),
    ("the last step, no graph is captured, the store is empty", True, False, {}),
    ("the last step, while a graph is captured", True, True, {}),
    ("a step before the last, while a graph is captured", False, True, {}),
    ("a replay: the store has the step's result", False, False, {"step": "stored"}),
    ("a replay: the store has the last step's result", True, False, {"step": "stored"}),
    ("a replay: the store has the step's result, and it is None", False, False, {"step": None}),
    ("a replay: the store has another step's result", True, False, {"other": "stored"}),
)
"""(words, last, capturing, store)."""


@exercise(
    "18.step",
    "Write decorated(step, last, graph) -> a function that returns the stored result of `step` if graph.store has one, "
    "and else computes it; while a graph is captured the last step ends the forward.",
)
def step(answer: Any) -> Iterator[Outcome]:
    """Judge eight situations, and a step that was decorated before the capture began."""
    for words, last, capturing, store in _SITUATIONS:
        right = "stops with its result" if last and capturing else "returns what is stored" if "step" in store else (
            "computes its result"
        )  # fmt: skip
        yield holds(words, right, lambda case=(last, capturing, store): _of_step(answer, *case))
    yield holds("the last step, decorated before the capture began", "stops with its result", lambda: _early(answer))


def _of_step(answer: Any, last: bool, capturing: bool, store: dict[str, Any]) -> Finding:
    graph = _Graph(capturing=capturing, **store)
    calls: list[tuple[Any, ...]] = []

    def step(*args: Any) -> Any:
        calls.append(args)
        return "computed"

    wrapped = answer(step, last, graph)
    if not callable(wrapped):
        return "form", f"{shown(wrapped)}: return a function that takes the arguments of the step"
    stopped, made = _ended(wrapped)
    return _judged(last and capturing, "step" in store, store.get("step"), calls, stopped, made)


def _ended(wrapped: Any) -> tuple[bool, Any]:
    try:
        return False, wrapped("rows", "weights")
    except _Stopped as signal:
        return True, signal.args[0] if signal.args else None


def _judged(ends: bool, is_stored: bool, stored: Any, calls: list[Any], stopped: bool, made: Any) -> Finding:
    """Return the misunderstanding behind what a decorated step did, or True."""
    if is_stored and calls:
        why = "a result may be None; ask whether its name is in the store" if stored is None else (
            "the graph has computed this, and its result is in the store"
        )  # fmt: skip
        return why, f"computes the step again: {why}"
    if not is_stored and not calls:
        why = "the signal comes when its work is done" if stopped else "a step without a stored result must compute"
        return why, f"doesn't compute the step: {why}"
    if calls and calls[0] != ("rows", "weights"):
        return "arguments", f"calls the step with {shown(calls[0])}; pass its arguments on"
    if stopped and not ends:
        why = "only the last captured step ends the forward, and only during a capture"
        return why, f"stops: {why}"
    if ends and not stopped:
        why = "no later operation may get into the graph"
        return why, f"goes on during the capture: {why}; call graph.stop"
    wanted = stored if is_stored else "computed"
    if made != wanted:
        return "result", f"{'stops with' if stopped else 'returns'} {shown(made)}; the result is {shown(wanted)}"
    return True


def _early(answer: Any) -> Finding:
    graph = _Graph()
    wrapped = answer(lambda *_: "computed", True, graph)
    graph.capturing = True
    stopped, _ = _ended(wrapped)
    why = "the layer is decorated once, and captured later; ask graph.capturing at each call"
    return True if stopped else (why, f"goes on: {why}")


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


def draw_boundary(answer: Any) -> Figure | None:
    """Draw what the answer lets out of a layer's graph, at the first end that it gets wrong, or after `preprocess`."""
    from labkit.viz.graphs.partial_graphs import values_at_the_end  # matplotlib, which a score does without

    cases = [(LAYER, 5), (LAYER, 4), (LAYER, 1), (_AGAIN, 2)]
    given = {number: plain(answer(list(steps), captured)) for number, (steps, captured) in enumerate(cases)}
    if any(not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], list)) for pair in given.values()):
        return None
    wrong = [n for n, (steps, captured) in enumerate(cases) if given[n][1] != _boundary(steps, captured)[1]]
    shown_case = wrong[0] if wrong else 0
    steps, captured = cases[shown_case]
    return values_at_the_end(steps, captured, given[shown_case][1], _boundary(steps, captured)[1])


@exercise(
    "18.boundary",
    "Write boundary(steps, captured) -> (inputs, outputs): what a graph of the first steps takes in and must give out.",
    draw=draw_boundary,
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


# ---- the time that a graph saves ----

_PROGRAMS: tuple[tuple[str, Program, float], ...] = (
    ("one operation", [5.0], 6.0),
    ("short operations", [3.0, 3.0, 3.0], 6.0),
    ("a long operation, then short ones", [20.0, 1.0, 1.0], 6.0),
    ("a graph", [[3.0, 3.0, 3.0]], 6.0),
    ("a graph, then an operation", [[3.0, 3.0, 3.0, 3.0], 2.0], 6.0),
    ("long operations, a wait, long operations", [20.0, 20.0, WAIT, 20.0, 20.0], 6.0),
    ("a graph, a wait, an operation", [[3.0, 3.0, 3.0], WAIT, 5.0], 6.0),
    ("a wait when nothing was launched", [WAIT, 5.0], 6.0),
    ("an operation, two waits, a graph", [12.0, WAIT, WAIT, [1.0, 1.0]], 4.0),
)
"""(words, program, microseconds of a launch)."""


@exercise(
    "18.clock",
    "Write finish(program, launch) -> the time at which the device has run everything. An entry of the program is the "
    'duration of an operation, a list of durations (a graph), or "wait".',
)
def clock(answer: Any) -> Iterator[Outcome]:
    """Judge nine programs, with graphs and waits."""
    return asked(
        _PROGRAMS,
        given=lambda words, program, launch: f"{words}: {list(program)}, launch {launch:g}",
        right=lambda _, program, launch: run_program(program, launch).end,
        tried=lambda _, program, launch: answer(
            [list(e) if isinstance(e, list) else e for e in program], launch
        ),
        misread=lambda _, program, launch: _misread_clock(program, launch),
        equal=lambda value, other: isinstance(value, int | float) and abs(value - other) < 1e-9,
    )  # fmt: skip


def _flat(program: Program) -> list[float | str]:
    """Return the program without graphs: each operation is launched by itself."""
    return [x for entry in program for x in (entry if isinstance(entry, list) else [entry])]  # type: ignore[list-item]


def _misread_clock(program: Program, launch: float) -> Misreadings:
    work = sum(x for x in _flat(program) if not isinstance(x, str))
    launches = sum(not isinstance(entry, str) for entry in program)
    return {
        "this never waits; at a wait the host stands still until the device has ended all its work": run_program(
            [entry for entry in program if entry != WAIT], launch
        ).end,
        "this launches each operation of a graph; a graph is launched once": run_program(_flat(program), launch).end,
        "this adds everything up, as if the host waited for each operation; it launches on while the device works": (
            launches * launch + work
        ),
        "this leaves the launches out": work,
        "this gives the time of the host, not of the device": _host_ends(program, launch),
        "this waits by a launch; the host waits for the device, and that may take no time or long": run_program(
            [0.0 if entry == WAIT else entry for entry in program], launch
        ).end,
    }


def _host_ends(program: Program, launch: float) -> float:
    """Return when the host has launched everything."""
    return max((run.end for run in run_program(program, launch).host), default=0.0)
