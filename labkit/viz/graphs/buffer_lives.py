"""Static inputs of graphs in a pipeline: which microbatch holds which buffer, from its forward to its backward.

Colours stand for microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.patches import Patch, Rectangle

from labkit.config.errors import counted
from labkit.graphs.buffers import BufferPlan, Use
from labkit.graphs.order_table import read_order
from labkit.viz.figure import Figure
from labkit.viz.style import ALERT, name_cells, new_figure, nth_color, styled, text_color

MAX_LABELS = 60
"""Most steps or captures along an axis that are all labelled."""
WIDTH = 9.0
WRONG = {"fill": False, "edgecolor": ALERT, "linewidth": 2.5}
"""Frame around memory that two microbatches hold at once."""


def thinned(labels: Sequence[str], most: int = MAX_LABELS) -> list[str]:
    """Label every second, every third, ... place of an axis if more than `most` labels would touch."""
    every = -(-len(labels) // most)
    return [label if place % every == 0 else "" for place, label in enumerate(labels)]


def buffer_lives(plan: BufferPlan, order: Sequence[float], *, what: str = "") -> Figure:
    """Draw a row per static input buffer and a column per step: the holder from its forward to its backward.

    A bar reaches to the backward that reads the buffer, even if the plan gives the buffer back before. If two
    bars of one row meet, the plan is wrong, and the meeting has a colour of its own.

    what: the first words of the sentence.
    """
    with styled():
        fig = new_figure(WIDTH, 1.25 + 0.3 * plan.num_buffers)
        meetings = _draw_plan(fig.subplots(), plan, order)
        _explain_plan(fig, plan, meetings)
    return Figure(fig, _plan_sentence(plan, order, meetings, what))


def compare_plans(plan: BufferPlan, target: BufferPlan, order: Sequence[float]) -> Figure:
    """Draw a reader's plan above, and below it the one to which it is compared, as `buffer_lives` draws each."""
    with styled():
        heights = [each.num_buffers + 2 for each in (plan, target)]
        fig = new_figure(WIDTH, 1.0 + 0.3 * sum(heights))
        above, below = fig.subplots(2, 1, height_ratios=heights)
        meetings = _draw_plan(above, plan, order)
        _draw_plan(below, target, order)
        above.set_title("yours", loc="left")
        above.set_xlabel("")
        below.set_title("longest free first", loc="left")
        _explain_plan(fig, plan, meetings)
    return Figure(fig, _plan_sentence(plan, order, meetings, "Your plan"))


def _draw_plan(axes: Any, plan: BufferPlan, order: Sequence[float]) -> list[tuple[int, int, int, Use, Use]]:
    """Draw the lives of all buffers, and return the meetings that are marked in it."""
    lives = _lives(plan, order)
    meetings = _meetings(plan, lives)
    for use, first, last in sorted(lives, key=lambda life: life[1]):
        _draw_life(axes, plan.assignment[use], use, first, last)
        if not any(use == meeting[4] for meeting in meetings):  # those are named where they meet
            _write_user(axes, use, first, plan.assignment[use] + 0.52, len(plan.layers_per_chunk) > 1)
    for meeting in meetings:
        _draw_meeting(axes, meeting, len(plan.layers_per_chunk) > 1)
    numbered = [f"{entry:g}\n{step}" for step, entry in enumerate(order)]
    columns = thinned(numbered, MAX_LABELS if len(order) <= 100 else MAX_LABELS // 2)  # three digits are wide
    name_cells(axes, columns, [f"buffer {number}" for number in range(plan.num_buffers)])
    axes.set_xlabel("above: order, one step per column; below: number of the step")
    return meetings


def _explain_plan(fig: Any, plan: BufferPlan, meetings: Sequence[Any]) -> None:
    held = "held by microbatch (chunk in brackets)"
    if len(plan.layers_per_chunk) == 1:
        held = "held by microbatch, from its forward to its backward"
    handles = [Patch(facecolor="#BBBBBB", label=held)]
    if meetings:
        handles.append(Patch(label="held twice", **WRONG))
    fig.legend(handles=handles, loc="outside upper right", ncols=2)


def _lives(plan: BufferPlan, order: Sequence[float]) -> list[tuple[Use, int, int]]:
    """List (user, step of its forward, step of its backward)."""
    steps = {(one.kind, one.chunk, one.microbatch): one.step for one in read_order(order)}
    uses = [Use(*use) for use in plan.assignment]
    return [(use, steps["F", use.chunk, use.microbatch], steps["B", use.chunk, use.microbatch]) for use in uses]


def _draw_life(axes: Any, row: int, use: Use, first: int, last: int) -> None:
    fill = nth_color(use.microbatch)
    axes.add_patch(Rectangle((first + 0.04, row + 0.08), last + 0.92 - first, 0.84, facecolor=fill, edgecolor="none"))


def _write_user(axes: Any, use: Use, first: float, height: float, chunks: bool) -> None:
    label = f"{use.microbatch} ({use.chunk + 1})" if chunks else str(use.microbatch)
    axes.text(first + 0.2, height, label, va="center", fontsize=8, color=text_color(nth_color(use.microbatch)))


def _draw_meeting(axes: Any, meeting: tuple[int, int, int, Use, Use], chunks: bool) -> None:
    """Draw the old holder of the buffer above, the new holder below, and a frame around both."""
    row, first, last, earlier, later = meeting
    for user, low in ((earlier, 0.08), (later, 0.5)):
        box = Rectangle((first, row + low), last + 0.96 - first, 0.42, facecolor=nth_color(user.microbatch))
        axes.add_patch(box)
        _write_user(axes, user, first, row + low + 0.22, chunks)
    axes.add_patch(Rectangle((first, row + 0.08), last + 0.96 - first, 0.84, **WRONG))


def _meetings(plan: BufferPlan, lives: Sequence[tuple[Use, int, int]]) -> list[tuple[int, int, int, Use, Use]]:
    """List (buffer, first step, last step, old holder, new holder) wherever two lives of a buffer meet, in order."""
    found: list[tuple[int, int, int, Use, Use]] = []
    for buffer in range(plan.num_buffers):
        rows = sorted((life for life in lives if plan.assignment[life[0]] == buffer), key=lambda life: life[1])
        for (earlier, _, end), (later, begin, until) in pairwise(rows):
            if begin <= end:
                found.append((buffer, begin, min(end, until), earlier, later))
    return sorted(found, key=lambda meeting: meeting[1])


def _plan_sentence(plan: BufferPlan, order: Sequence[float], meetings: Sequence[Any], what: str) -> str:
    held = max(plan.held_at(step) for step in range(len(order)))
    buffers, inputs = counted(plan.num_buffers, "buffer"), counted(len(plan.assignment), "input")
    text = f"{what + ': ' if what else ''}{buffers} for {inputs}"
    if not meetings:
        return f"{text}, at most {held} held at once, no buffer held twice."
    buffer, step, _, earlier, later = meetings[0]
    return (
        f"{text}; held twice in {counted(len(meetings), 'place')}, first buffer {buffer} at step {step}, which "
        f"microbatch {later.microbatch} takes before the backward of microbatch {earlier.microbatch} has read it."
    )
