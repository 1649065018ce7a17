"""The plan of static input buffers, one for each layer and microbatch, made from the order table before any capture.

A graph reads its input at a fixed address, and the backward reads that input again. So every (layer, microbatch) needs
a buffer that nobody writes between its forward and its backward. Two microbatches that are never in flight together can
share a buffer. The plan walks along the order. A forward takes a buffer for each of its layers: the longest free
buffer of the same signature (shape, type, layout), else a new one. A backward gives its layers' buffers back.

    order            1   1  -1   1  -1  -1      one layer, warm-up 1
    microbatch       0   1   0   2   1   2
    buffer           0   1  (0)  0  (1) (0)     in brackets: given back

L equal layers per chunk, V chunks, M microbatches and w forwards in warm-up need L min(w + 1, M V) buffers. The example
needs 2. Their number stops growing with M; a buffer for each (layer, microbatch) would make L V M.

Sources: Transformer Engine 2.20, `make_graphed_callables` with `_reuse_graph_input_output_buffers`. The engine gives an
input back at the backward even where weight gradients (c - 0.5) come later. So does megatron-core 0.16.1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from labkit.graphs.order_table import Pass, layers_of_chunks, order_sizes, read_order, sample_places


class PlanError(ValueError):
    """A plan in which one use reads a buffer that another use has overwritten. The message draws both uses."""


class Use(NamedTuple):
    """One layer at one microbatch; equal to the plain tuple."""

    chunk: int
    """Model chunk of the rank, 0 first."""
    layer: int
    """Layer in the chunk, 0 first."""
    microbatch: int
    """Microbatch, 0 first."""

    @property
    def virtual_microbatch(self) -> tuple[int, int]:
        """(chunk, microbatch): one forward and one backward in the order."""
        return self.chunk, self.microbatch

    def __str__(self) -> str:
        return f"chunk {self.chunk} layer {self.layer} microbatch {self.microbatch}"


@dataclass(frozen=True)
class BufferPlan:
    """The buffer of every (chunk, layer, microbatch), counted from 0, and the steps that take and free it."""

    layers_per_chunk: tuple[int, ...]
    """Layers of each model chunk."""
    num_microbatches: int
    """Microbatches of each chunk."""
    assignment: Mapping[Use, int]
    """(chunk, layer, microbatch) -> buffer."""
    acquired_at: Mapping[Use, int]
    """(chunk, layer, microbatch) -> step of the order that takes the buffer: its forward."""
    freed_at: Mapping[Use, int]
    """(chunk, layer, microbatch) -> step of the order that gives the buffer back for other uses: its backward."""
    signature: tuple[Hashable, ...]
    """Signature of each buffer; None where none were given."""

    @property
    def num_buffers(self) -> int:
        """Distinct static input buffers of the rank."""
        return len(self.signature)

    @property
    def buffers_by_signature(self) -> dict[Hashable, int]:
        """Signature -> number of buffers."""
        return dict(Counter(self.signature))

    def lives(self, buffer: int) -> list[Use]:
        """The uses of a buffer, in the order in which they take it."""
        users = [use for use, assigned in self.assignment.items() if assigned == buffer]
        return sorted(users, key=self.acquired_at.__getitem__)

    def held_at(self, step: int) -> int:
        """Number of buffers in use after a step of the order."""
        return sum(self.acquired_at[use] <= step < self.freed_at[use] for use in self.assignment)


def plan_buffers(
    order: Sequence[float],
    layers_per_chunk: int | Sequence[int],
    signatures: Sequence[Hashable] | None = None,
    *,
    early_release: int = 0,
    keep_for_weight_gradients: bool = False,
) -> BufferPlan:
    """Plan the static inputs of a rank: first in, first out, one pool per signature over all chunks.

    Args:
        order: Signed chunk numbers, as `Schedule.order` and `convert_schedule_table_to_order` give them.
        layers_per_chunk: Layers of each chunk, or one number for all.
        signatures: Inputs share a buffer only if their signatures are equal. One entry per layer of the rank (chunk by
            chunk), or one per sample argument in the layout of `sample_index`. None: all are equal.
        early_release: Give every buffer back this many steps before its backward. This is wrong on purpose, to show
            what such a plan does to a loss; `check_plan` rejects the plan.
        keep_for_weight_gradients: Hold a buffer until the weight gradients (c - 0.5) have run. Transformer Engine
            does not; that is right for layers whose weight gradients read no static input.

    Raises:
        ValueError: an order that `read_order` rejects, layers that do not fit it, a wrong number of signatures,
            early_release below 0.
    """
    passes = read_order(order)
    chunks, microbatches = order_sizes(passes)
    layers = layers_of_chunks(layers_per_chunk, chunks)
    if early_release < 0:
        raise ValueError(f"early_release is {early_release}: give a number of steps, 0 for a plan that is right")
    wanted = _signatures_of_uses(signatures, layers, microbatches)
    taken, read_last = _first_and_last_steps(passes, keep_for_weight_gradients)
    freed_at = {
        use: max(taken[use.virtual_microbatch], read_last[use.virtual_microbatch] - early_release) for use in wanted
    }
    assignment, buffers = _first_in_first_out(passes, layers, wanted, freed_at)
    acquired_at = {use: taken[use.virtual_microbatch] for use in assignment}
    return BufferPlan(layers, microbatches, assignment, acquired_at, freed_at, tuple(buffers))


def plan_from(order: Sequence[float], numbers: Sequence[int], layers_per_chunk: int = 1) -> BufferPlan:
    """Return the plan in which forward i of the order takes buffer `numbers[i]`, one for each of its layers.

    Each buffer is held until the backward that reads it. Equal numbers are the same buffers, so the plan may be unsafe:
    `check_plan` finds out.

    Raises:
        ValueError: an order that `read_order` rejects, or a list that does not have one number for each forward.
    """
    plan = plan_buffers(order, layers_per_chunk)
    forwards = [one for one in read_order(order) if one.kind == "F"]
    if len(numbers) != len(forwards):
        raise ValueError(f"{len(numbers)} buffers for {len(forwards)} forwards: give one for each forward")
    places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    assignment = {
        Use(one.chunk, layer, one.microbatch): places[number] * layers_per_chunk + layer
        for one, number in zip(forwards, numbers, strict=True)
        for layer in range(layers_per_chunk)
    }
    return replace(plan, assignment=assignment, signature=(None,) * (len(places) * layers_per_chunk))


def _first_in_first_out(
    passes: Sequence[Pass], layers: tuple[int, ...], wanted: Mapping[Use, Hashable], freed_at: Mapping[Use, int]
) -> tuple[dict[Use, int], list[Hashable]]:
    """Walk along the order; return the buffer of every use and the signature of every buffer."""
    assignment: dict[Use, int] = {}
    buffers: list[Hashable] = []
    free: dict[Hashable, deque[int]] = {}
    leaving: dict[int, list[Use]] = {}
    for use, step in freed_at.items():  # by chunk, microbatch, layer: the order in which a chunk gives buffers back
        leaving.setdefault(step, []).append(use)
    for one in passes:
        for use in leaving.get(one.step, ()):
            if use in assignment:
                free.setdefault(wanted[use], deque()).append(assignment[use])
        for layer in range(layers[one.chunk]) if one.kind == "F" else ():
            use = Use(one.chunk, layer, one.microbatch)
            queue = free.get(wanted[use])
            if not queue:
                buffers.append(wanted[use])
            assignment[use] = queue.popleft() if queue else len(buffers) - 1
            if freed_at[use] == one.step:  # a plan so early that the buffer goes at the step that took it
                leaving.setdefault(one.step + 1, []).append(use)
    return assignment, buffers


def check_plan(plan: BufferPlan, order: Sequence[float], *, keep_for_weight_gradients: bool = False) -> None:
    """Reject a plan under which an input could be overwritten before its backward has read it.

    The check reads forwards and backwards from the order, and then compares the uses of each buffer. It does not depend
    on `plan_buffers`.

    Raises:
        PlanError: two uses of a buffer overlap (the message draws both), a buffer is given back before its backward, or
            a layer and microbatch has no buffer.
        ValueError: an order that `read_order` rejects.
    """
    passes = read_order(order)
    first, last = _first_and_last_steps(passes, keep_for_weight_gradients)
    layers = layers_of_chunks(plan.layers_per_chunk, order_sizes(passes)[0])
    expected = {Use(chunk, layer, microbatch) for chunk, microbatch in first for layer in range(layers[chunk])}
    if expected ^ set(plan.assignment):
        wrong = min(expected ^ set(plan.assignment))
        trouble = "has no buffer in the plan" if wrong in expected else "has a buffer, but is not in the order"
        raise PlanError(f"{Use(*wrong)} {trouble}: plan the order that runs, with the layers that it has")
    _refuse_two_lives(plan, order, first, last)
    for use in map(Use._make, plan.assignment):
        begin, end = first[use.virtual_microbatch], last[use.virtual_microbatch]
        if plan.freed_at[use] < end or plan.acquired_at[use] != begin:
            raise PlanError(
                f"{use} holds buffer {plan.assignment[use]} from step {plan.acquired_at[use]} and gives it back at "
                f"step {plan.freed_at[use]}. Its forward runs at step {begin}, its backward reads the buffer at step "
                f"{end}\n{_picture(order, [(use, begin, end)])}"
            )


def _refuse_two_lives(
    plan: BufferPlan,
    order: Sequence[float],
    first: Mapping[tuple[int, int], int],
    last: Mapping[tuple[int, int], int],
) -> None:
    users: dict[int, list[tuple[Use, int, int]]] = {}
    for use in map(Use._make, plan.assignment):
        begin, end = first[use.virtual_microbatch], last[use.virtual_microbatch]
        users.setdefault(plan.assignment[use], []).append((use, begin, end))
    collisions = [
        (later[1], buffer, earlier, later)
        for buffer, lives in users.items()
        for earlier, later in pairwise(sorted(lives, key=lambda life: life[1]))
        if later[1] <= earlier[2]
    ]
    if collisions:
        begin, buffer, earlier, later = min(collisions)
        raise PlanError(
            f"buffer {buffer} has two lives at once: {later[0]} takes it at step {begin}, but the backward of "
            f"{earlier[0]} reads it at step {earlier[2]}\n{_picture(order, [earlier, later])}"
        )


def _signatures_of_uses(
    signatures: Sequence[Hashable] | None, layers: tuple[int, ...], microbatches: int
) -> Mapping[Use, Hashable]:
    uses = [Use(*place) for place in sample_places(layers, microbatches)]
    if signatures is None:
        return dict.fromkeys(uses, None)
    if len(signatures) == len(uses):  # one per sample argument, in the layout of `uses`
        return dict(zip(uses, signatures, strict=True))
    if len(signatures) != sum(layers):
        raise ValueError(
            f"{len(signatures)} signatures for {sum(layers)} layers and {microbatches} microbatches: give one per "
            f"layer, or one per layer and microbatch ({len(uses)})"
        )
    before = [sum(layers[:chunk]) for chunk in range(len(layers))]
    return {use: signatures[before[use.chunk] + use.layer] for use in uses}


def _first_and_last_steps(
    passes: Sequence[Pass], keep_for_weight_gradients: bool
) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """(chunk, microbatch) -> step of its forward; -> step of the last pass that reads its input."""
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for one in passes:
        if one.kind == "F":
            first[one.chunk, one.microbatch] = one.step
        elif one.kind == "B" or keep_for_weight_gradients:
            last[one.chunk, one.microbatch] = one.step
    return first, last


_WINDOW = 24
"""Largest number of steps that a picture shows."""


def _picture(order: Sequence[float], lives: Sequence[tuple[Use, int, int]]) -> str:
    """Draw uses (use, forward, backward) of a buffer under the order: F forward, = held, B backward, ! held twice."""
    start = max(0, max(begin for _, begin, _ in lives) - _WINDOW // 2)
    steps = range(start, min(len(order), start + _WINDOW))
    rows = [("step", [str(step) for step in steps]), ("order", [f"{order[step]:g}" for step in steps])]
    for use, begin, end in lives:
        letters = {begin: "F", end: "B"} | dict.fromkeys(range(begin + 1, end), "=")
        rows.append((str(use), [letters.get(step, ".") for step in steps]))
    if len(lives) == 2:
        rows.append(("held twice", ["!" if lives[1][1] <= step <= lives[0][2] else "" for step in steps]))
    width = max(len(name) for name, _ in rows)
    cell = max(len(text) for _, cells in rows for text in cells)
    return "\n".join(
        f"  {name:{width}}  {' '.join(f'{text:>{cell}}' for text in cells)}".rstrip() for name, cells in rows
    )
