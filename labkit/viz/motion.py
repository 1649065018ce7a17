"""Data in motion: what each rank holds at each moment, and between two moments an arrow for each message.

A column is a moment, a block of rows a rank, a box one of its slots. What changed since the moment before has a thick
frame, and an empty slot has nothing in it. An arrow has the colour of the activity that made it, or else of the rank
that sends or of what it carries. All of it was recorded (labkit/comm/motion.py); nothing is drawn by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.patches import ConnectionPatch, Rectangle
from matplotlib.patheffects import Normal, Stroke

from labkit.comm.motion import Held, Motion
from labkit.comm.motion_clock import Arrow, Movement, movement
from labkit.config.errors import counted
from labkit.viz.figure import Figure
from labkit.viz.live import LiveFigure, is_live
from labkit.viz.style import INK, box, color, hatch, mixed, new_figure, nth_color, nth_style, styled, text_color

ON_PAPER = 4
"""Most steps of a picture that stands still."""
_ROWS = (0.14, 0.22)
"""Inches of a slot: with many slots and with few."""
_TALL = 6.0
"""Inches of all slots from which on they are made smaller."""
_BETWEEN_RANKS = 0.16
"""Inches between two ranks."""
_GAP = 0.75
"""Inches between two moments, the room of the arrows."""
_TOP = 0.42
"""Inches above the first rank."""
_CHIPS = 0.3
"""Inches of the colours of a sum, left of its text."""
_LETTER = 0.07
"""Inches of a letter in a box."""
_THIN = "#AAAAAA"
"""Colour of the frame of what is empty, or has not changed."""


def in_motion(
    motions: Sequence[Motion],
    *,
    what: str = "",
    first: int = 0,
    unit: str = "rank",
    arrows: Literal["sender", "content"] = "sender",
) -> Any:
    """Draw the recordings of all ranks; in a live notebook a slider steps through them.

    motions: the recordings of ranks 0, 1, ...
    what: the mechanism, for the sentence.
    first: the first of the up to four steps on paper, or the one under the slider; step s leads from moment s to s + 1.
    unit: what a rank is called, such as `stage` in a pipeline.
    arrows: whose colour they have where no activity made them, the sending rank's or that of the box that they leave.

    Raises ValueError for recordings that do not belong together, and for a step that is not there.
    """
    seen = movement(motions)
    figure = motion_frames(seen, what=what, first=first, unit=unit, arrows=arrows)
    return _stepper(seen, what, first, unit, arrows) if is_live() else figure


def motion_frames(
    seen: Movement,
    *,
    what: str = "",
    first: int = 0,
    count: int = ON_PAPER,
    unit: str = "rank",
    arrows: str = "sender",
) -> Figure:
    """Draw up to `count` steps from step `first` on, with `unit` and `arrows` as in `in_motion`.

    Raises ValueError for a step that is not there.
    """
    steps = max(1, seen.length - 1)
    if not 0 <= first < steps:
        raise ValueError(f"step {first} is not there: this recording has the steps 0 to {steps - 1}")
    last = min(first + count, seen.length - 1)
    picture = _Picture(seen, range(first, last + 1), unit, arrows)
    with styled():
        fig = new_figure(picture.width, picture.height)
        picture.draw(fig.add_subplot())
    return Figure(fig, _sentence(seen, (first, last), what, unit))


def _stepper(seen: Movement, what: str, first: int, unit: str, arrows: str) -> Any:
    """Return one step at a time, under a slider and buttons."""
    import ipywidgets as widgets

    last = max(0, seen.length - 2)
    play = widgets.Play(value=first, min=0, max=last, step=1, interval=1200, show_repeat=False, description="play")
    slider = widgets.IntSlider(value=first, min=0, max=last, description="step")
    widgets.jslink((play, "value"), (slider, "value"))
    same = {"what": what, "count": 1, "unit": unit, "arrows": arrows}
    live = LiveFigure(motion_frames(seen, first=first, **same))
    live.follow({"first": slider}, lambda given: motion_frames(seen, **same, **given))
    return widgets.VBox([widgets.HBox([play, slider]), *live.parts])


class _Picture:
    """Places of ranks, slots and moments, in inches from the upper left corner."""

    def __init__(self, seen: Movement, moments: Sequence[int], unit: str, arrows: str) -> None:
        self.seen, self.moments, self.unit, self.arrows = seen, moments, unit, arrows
        self.slots = [_slots_of(seen, rank) for rank in range(len(seen.states))]
        texts = [held.text for state in seen.states for moment in state.values() for held in moment.slots.values()]
        names = [name for slots in self.slots for name in slots if len(slots) > 1]
        self.box = max(0.6, 0.16 + _LETTER * max(map(len, texts), default=0)) + _CHIPS * _has_sums(seen)
        self.left = 0.62 + 0.065 * max(map(len, names), default=0)
        self.width = max(self.left + len(moments) * (self.box + _GAP) - _GAP + 0.15, 4.2)
        self.row = min(_ROWS[1], max(_ROWS[0], _TALL / sum(map(len, self.slots))))
        self.rows: dict[tuple[int, str], float] = {}
        """(rank, slot) -> upper edge."""
        down = _TOP
        for rank, slots in enumerate(self.slots):
            for slot in slots:
                self.rows[rank, slot] = down
                down += self.row
            down += _BETWEEN_RANKS
        self.height = down - _BETWEEN_RANKS + 0.12

    def _x(self, moment: int) -> float:
        """Return the left edge of a moment; moments before the first one are at the first."""
        return self.left + max(0, moment - self.moments[0]) * (self.box + _GAP)

    def draw(self, axes: Any) -> None:
        """Draw names, boxes and arrows."""
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        axes.set_axis_off()
        self._name_ranks(axes)
        for moment in self.moments:
            axes.text(self._x(moment) + self.box / 2, _TOP - 0.1, self._title(moment), ha="center", fontsize=8)
            for rank in range(len(self.slots)):
                self._draw_rank(axes, rank, moment)
        for arrow in self.seen.arrows:
            if arrow.end in self.moments[1:]:
                self._draw_message(axes, arrow)

    def _name_ranks(self, axes: Any) -> None:
        for rank, slots in enumerate(self.slots):
            axes.text(0.04, self._middle(rank, None), f"{self.unit} {rank}", va="center", fontsize=9)
            for slot in slots if len(slots) > 1 else ():
                place = self.left - 0.06, self._middle(rank, slot)
                axes.text(*place, slot, ha="right", va="center", fontsize=min(7, 40 * self.row), color="#555555")

    def _title(self, moment: int) -> str:
        titles = [state[moment].title for state in self.seen.states if moment in state and state[moment].title]
        return titles[0] if titles else f"after step {moment - 1}" if moment else "start"

    def _draw_rank(self, axes: Any, rank: int, moment: int) -> None:
        now, before = self.seen.held(rank, moment), self.seen.held(rank, moment - 1)
        for slot in self.slots[rank]:
            held = now.slots.get(slot) if now else None
            corner = self._x(moment), self.rows[rank, slot]
            if held is None:
                box(axes, corner, self.box, self.row, "#FFFFFF", edgecolor=_THIN, linewidth=0.5)
            else:
                changed = moment > self.moments[0] and held != (before.slots.get(slot) if before else None)
                draw_held(axes, corner, self.box, self.row, held, changed=changed)

    def _draw_message(self, axes: Any, arrow: Arrow) -> None:
        passes_a_box = arrow.end > max(arrow.start, self.moments[0]) + 1
        for leaves, arrives in _pairs(arrow):
            fill = self._color_of(arrow, leaves)
            start = self._x(arrow.start) + self.box, self._middle(arrow.source, leaves)
            end = self._x(arrow.end), self._middle(arrow.target, arrives)
            look = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 1, "shrinkB": 0}
            look["zorder"] = 2.5 if passes_a_box else 0.5
            line = ConnectionPatch(start, end, "data", "data", color=fill, linewidth=1.4, **look)
            line.set_path_effects([Stroke(linewidth=2.2, foreground=INK), Normal()])
            axes.add_patch(line)

    def _color_of(self, arrow: Arrow, slot: str | None) -> str:
        """Return the colour of the activity in the slot that a message leaves; without one that of `arrows`."""
        moment = self.seen.held(arrow.source, arrow.start)
        held = moment.slots.get(slot) if moment and slot is not None else None
        activities = [each for each in held.colors if isinstance(each, str)] if held else []
        if self.arrows == "content" and held and len(held.colors) == 1:
            return _look(held.colors[0])[0]
        return color(activities[0]) if len(activities) == 1 else nth_color(arrow.source)

    def _middle(self, rank: int, slot: str | None) -> float:
        """Return the height of the middle of a slot, or of all slots of the rank."""
        slots = [slot] if slot is not None and (rank, slot) in self.rows else self.slots[rank]
        return (self.rows[rank, slots[0]] + self.rows[rank, slots[-1]] + self.row) / 2


def _has_sums(seen: Movement) -> bool:
    """Return True if some box has several colours."""
    moments = (moment for state in seen.states for moment in state.values())
    return any(len(held.colors) > 1 for moment in moments for held in moment.slots.values())


def _slots_of(seen: Movement, rank: int) -> list[str]:
    """Return every slot that a rank ever has, in the order of the moment that has most of them."""
    moments = sorted(seen.states[rank].values(), key=lambda moment: -len(moment.slots))
    return list(dict.fromkeys(slot for moment in moments for slot in moment.slots)) or [""]


def _pairs(arrow: Arrow) -> list[tuple[str | None, str | None]]:
    """Pair the slots that a message leaves with those in which it arrives."""
    count = max(len(arrow.leaves), len(arrow.arrives), 1)
    leaves, arrives = (list(slots) or [None] for slots in (arrow.leaves, arrow.arrives))
    return [(leaves[i % len(leaves)], arrives[i % len(arrives)]) for i in range(count)]


def draw_held(
    axes: Any, corner: tuple[float, float], width: float, height: float, held: Held, *, changed: bool
) -> None:
    """Draw one slot: its colour, or a chip for each of several, and its text; with a thick frame if it changed."""
    looks = [_look(each) for each in held.colors]
    (fill, pattern), chips = (looks[0], 0.0) if len(looks) == 1 else (("#FFFFFF", ""), _CHIPS * bool(looks))
    if held.partial:
        fill, pattern = mixed(fill, 0.6), "////"
    x, y = corner
    axes.add_patch(Rectangle(corner, width, height, facecolor=fill, hatch=pattern, edgecolor="#FFFFFF", linewidth=0))
    for number, (chip, chip_pattern) in enumerate(looks if chips else ()):
        place, wide = (x + number * chips / len(looks), y), chips / len(looks)
        axes.add_patch(Rectangle(place, wide, height, facecolor=chip, hatch=chip_pattern, linewidth=0))
    frame = {"edgecolor": "#000000", "linewidth": 1.6} if changed else {"edgecolor": _THIN, "linewidth": 0.5}
    axes.add_patch(Rectangle(corner, width, height, fill=False, zorder=3 if changed else 2, **frame))
    pad = {"facecolor": fill, "edgecolor": "none", "pad": 0.8} if pattern else None
    middle = x + (chips + width) / 2, y + height / 2
    look = {"fontsize": min(8, 40 * height), "color": text_color(fill), "bbox": pad, "zorder": 4}
    axes.text(*middle, held.text, ha="center", va="center", **look)


def _look(what: int | str) -> tuple[str, str]:
    return nth_style(what) if isinstance(what, int) else (color(what), hatch(what))


def _sentence(seen: Movement, shown_steps: tuple[int, int], what: str, unit: str) -> str:
    """Say how many messages there were, of how many bytes, and which steps are shown."""
    (first, last), steps = shown_steps, max(1, seen.length - 1)
    sent = [sum(arrow.bytes for arrow in seen.arrows if arrow.source == rank) for rank in range(len(seen.states))]
    by_rank = (
        f"{sent[0]:,} from each {unit}" if len(set(sent)) == 1 else f"by {unit} {', '.join(f'{n:,}' for n in sent)}"
    )
    shown = f"step {first}" if last - first == 1 else f"steps {first} to {last - 1}"
    part = "" if last - first >= seen.length - 1 else f"; shown: {shown}"
    return (
        f"{what + ': ' if what else ''}{counted(len(seen.states), unit)}, {counted(steps, 'step')}, "
        f"{counted(len(seen.arrows), 'message')}, bytes sent {by_rank}{part}."
    )
