"""Wrong answers to the exercises of chapter 18, with what each believes and words of its score."""

from labkit.check import chapter_18, score
from labkit.check.chapter_18 import _read_and_written
from labkit.graphs.study.launches import WAIT, run_program


def stepping(last_check=lambda last, graph: last and graph.capturing, stored=lambda graph, name: name in graph.store,
             computes_first=True, at_decoration=False):  # fmt: skip
    """A decorator with one of its parts replaced."""

    def decorated(step, last, graph):
        early = last_check(last, graph)

        def wrapped(*args):
            if stored(graph, step.__name__):
                return graph.store[step.__name__]
            ends = early if at_decoration else last_check(last, graph)
            if ends and not computes_first:
                graph.stop(None)
            result = step(*args)
            if ends:
                graph.stop(result)
            return result

        return wrapped

    return decorated


STEPS = {
    # Runs every step at a replay, too, as if nothing had been computed.
    "again": (stepping(stored=lambda graph, name: False), "its result is in the store"),
    # Asks whether the stored result is true, and so computes a step whose result is None.
    "none": (stepping(stored=lambda graph, name: graph.store.get(name) is not None), "a result may be None"),
    # Ends the forward before the last step has computed, so that the graph lacks its work.
    "early": (stepping(computes_first=False), "the signal comes when its work is done"),
    # Ends the forward at every captured step, the first one as well.
    "each": (stepping(lambda last, graph: graph.capturing), "only the last captured step ends the forward"),
    # Looks at `capturing` while the layer is decorated, which is before any capture.
    "once": (stepping(at_decoration=True), "ask graph.capturing at each call"),
}


def coming_out(wanted):
    """An answer whose outputs are the captured names in `wanted(names, steps behind the graph, result)`."""

    def boundary(steps, captured):
        inputs, written = _read_and_written(steps[:captured])
        kept = wanted(written, steps[captured:], steps[-1][2])
        return inputs, [name for name in written if name in kept]

    return boundary


BOUNDARIES = {
    # Lets everything come out that is computed in the graph; its memory could then never be reused.
    "all": (coming_out(lambda written, after, result: written), "could be used again"),
    # Asks only what the very next step reads, and forgets the residual and the shared experts.
    "next step": (coming_out(lambda _, after, result: after[0][1] if after else result), "others read later"),
    # Lets whatever later steps read by name come out, even if its value is another one by then.
    "by name": (
        coming_out(lambda _, after, result: {name for _, reads, _ in after for name in reads} | set(result)),
        "has another value",
    ),
}


def flat(program):
    return [x for entry in program for x in (entry if isinstance(entry, list) else [entry])]


CLOCKS = {
    # The host never waits, as if it knew the counts.
    "no wait": (
        lambda program, launch: run_program([entry for entry in program if entry != WAIT], launch).end,
        "at a wait the host stands still",
    ),
    # A graph is launched operation by operation.
    "each": (lambda program, launch: run_program(flat(program), launch).end, "a graph is launched once"),
    # Host and device take turns.
    "sum": (
        lambda program, launch: (
            launch * sum(entry != WAIT for entry in program) + sum(x for x in flat(program) if x != WAIT)
        ),
        "it launches on while the device works",
    ),
    # Launches cost nothing.
    "free": (lambda program, launch: sum(x for x in flat(program) if x != WAIT), "leaves the launches out"),
}

TABLES = {"18.step": STEPS, "18.boundary": BOUNDARIES, "18.clock": CLOCKS}


def test_a_name_too_much_at_a_boundary_has_its_reason() -> None:
    def names(steps, captured):
        read, written = ([name for step in steps[:captured] for name in step[which]] for which in (1, 2))
        return read, written

    assert "(t is too much: a captured step writes it before it is read)" in repr(score("18.boundary", names))
    both = lambda steps, captured: (["x"], ["x", "y"])  # noqa: E731
    assert "(x is too much: no captured step writes it, so the caller has it)" in repr(score("18.boundary", both))


def test_the_picture_of_a_boundary_shows_the_first_wrong_end() -> None:
    next_step = BOUNDARIES["next step"][0]
    assert chapter_18.draw_boundary(next_step).sentence == (
        "A graph of 5 of 10 steps gives out hidden, probs, counts; missing x, shared, origin."
    )
    right = chapter_18.draw_boundary(chapter_18._boundary)
    assert right.sentence == "A graph of 5 of 10 steps gives out x, shared, hidden, probs, counts, origin."
    assert chapter_18.draw_boundary(lambda steps, captured: "x") is None


def test_a_decorated_step_gets_its_arguments_and_hands_on_its_result() -> None:
    def forgets(step, last, graph):
        return lambda *args: graph.store.get(step.__name__) or step()

    assert "calls the step with []; pass its arguments on" in repr(score("18.step", forgets))
    assert "return a function that takes the arguments of the step" in repr(score("18.step", lambda s, last, g: s("r")))
