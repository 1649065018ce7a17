"""MoE parallel folding in pictures: one grid of ranks that attention and experts read in two ways.

A *reading* gives each rank its digits. Attention numbers the ranks of a pipeline stage by tp, cp, dp. Experts number
the same ranks by etp, ep, edp (arXiv 2504.14960). Without folding, ep divides dp and etp is tp, so a stage needs at
least tp cp ep ranks. With folding, the products tp cp dp and etp ep edp only have to be equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.comm.mixed_radix import as_size
from labkit.comm.rank_generator import DEFAULT_ORDER, RankGenerator, rank_generators
from labkit.viz.figure import Figure
from labkit.viz.layout.rank_grids import Grid, nodes_in_words
from labkit.viz.live import LiveFigure, is_live, whole_number, words
from labkit.viz.style import new_figure, nth_style, styled

_SIZES = ("tp", "cp", "pp", "etp", "ep")
MAX_DRAWN = 512
"""Most ranks that `fold_grid` draws."""
_EXPERT_NAMES = {"tp": "etp", "dp": "edp"}
"""Axes of the expert generator -> the names that their groups have."""

_LETTERS = {"tp": "t", "cp": "c", "dp": "d", "pp": "p", "etp": "t", "ep": "e", "edp": "d"}
"""Letter before each digit in a cell."""


@dataclass(frozen=True)
class Reading:
    """Digits of the ranks of a layout, as attention or the experts number them."""

    name: str
    """`attention` or `experts`."""
    digits: dict[str, np.ndarray]
    """Axis -> digit of each rank (int64 [world_size]), with the axes in the layout's order, fastest first."""
    sizes: dict[str, int]
    """Axis -> its size."""
    job_axes: tuple[str, ...]
    """Axes along which ranks do different parts of one thing: tp and cp, or etp and ep."""

    def number(self, axes: Sequence[str]) -> np.ndarray:
        """Return each rank's digits along `axes` as one number (int64 [world_size]); the first axis varies fastest."""
        value, stride = np.zeros_like(next(iter(self.digits.values()))), 1
        for axis in axes:
            value = value + self.digits[axis] * stride
            stride *= self.sizes[axis]
        return value

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups along which `axes` vary, as lists of ranks counted from 0."""
        owner = self.number([axis for axis in self.digits if axis not in axes])
        return [np.flatnonzero(owner == group).tolist() for group in np.unique(owner)]

    @property
    def words(self) -> str:
        """The sizes above 1, as in `cp 8 dp 2`."""
        return _sizes_in_words(self.sizes, self.digits)


def readings(sizes: Mapping[str, Any], world_size: int, *, folded: bool = True) -> tuple[Reading, Reading]:
    """Return attention's and the experts' reading of the ranks 0 to world_size - 1.

    sizes: any of tp, cp, pp, ep, etp, order, as for `rank_generators`.
    folded: False gives the experts the groups that they had before folding: ep is cut out of dp, etp is tp, and copies
        of an expert are the ranks of cp and what is left of dp.

    Raises ValueError as `rank_generators` does, and without folding also if ep does not divide dp, or etp is not tp.
    """
    given = dict(sizes)
    order = given.pop("order", DEFAULT_ORDER)
    plain = rank_generators(world_size=world_size, **given)  # the usual order never disagrees: this finds dp and edp
    if folded:
        dense, expert = rank_generators(world_size=world_size, **given, order=order)
    else:
        dense, expert = (RankGenerator(**each.sizes, order=order) for each in plain)
    attention = Reading("attention", *_digits(dense, {}, without="ep"), ("tp", "cp"))
    if not folded:
        return attention, _unfolded(attention, given)
    return attention, Reading("experts", *_digits(expert, _EXPERT_NAMES, without="cp"), ("etp", "ep"))


def _digits(
    generator: RankGenerator, names: Mapping[str, str], *, without: str
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    ranks = np.arange(generator.world_size)
    axes = [axis for axis in generator.axes if axis != without]
    digits = {names.get(a, a): ranks // generator.strides[a] % generator.sizes[a] for a in axes}
    return digits, {names.get(a, a): generator.sizes[a] for a in axes}


def _unfolded(attention: Reading, given: Mapping[str, Any]) -> Reading:
    """Return the experts' reading in one generator with attention: their groups are parts of the dp groups."""
    ep, tp, dp = as_size("ep", given.get("ep", 1)), attention.sizes["tp"], attention.sizes["dp"]
    if dp % ep:
        raise ValueError(f"without folding ep is cut out of dp: ep {ep} does not divide dp {dp}; use a larger world")
    if given.get("etp") not in (None, tp):
        raise ValueError(f"without folding experts are cut as attention is: etp is {given['etp']}, tp {tp}")
    of = attention.digits
    copies = of["cp"] + attention.sizes["cp"] * (of["dp"] // ep)
    digits = {"etp": of["tp"], "ep": of["dp"] % ep, "edp": copies, "pp": of["pp"]}
    sizes = {"etp": tp, "ep": ep, "edp": attention.sizes["cp"] * dp // ep, "pp": attention.sizes["pp"]}
    return Reading("experts", digits, sizes, ("etp", "ep"))


# ---- one grid, coloured two ways ----


def fold_grid(sizes: Mapping[str, Any], *, world_size: int, gpus_per_node: int = 8, folded: bool = True) -> Figure:
    """Draw the grid of nodes and GPUs twice: coloured by each rank's job in attention, and by its job for experts.

    One colour is one job. On the left a job is a shard of the weights and a part of the sequence. On the right a job is
    a shard of certain experts. Dark lines separate samples, copies of the experts, and stages. Arguments and errors are
    those of `readings`, but more than MAX_DRAWN ranks are an error too.
    """
    if world_size > MAX_DRAWN:
        raise ValueError(f"{world_size} ranks make cells too small to see; draw at most {MAX_DRAWN}")
    both = readings(sizes, world_size, folded=folded)
    grid = Grid(world_size, gpus_per_node)
    scale = 0.47 if grid.columns <= 8 else 0.36
    with styled():
        width = grid.columns * scale + 0.7
        side_by_side = width <= 4.6
        shape = (1, 2) if side_by_side else (2, 1)
        fig = new_figure(shape[1] * max(width, 2.9), shape[0] * (grid.rows * scale + 1.7))
        for axes, reading in zip(fig.subplots(*shape).ravel(), both):
            _colour(axes, grid, reading)
    attention, experts = both
    crossing = [f"{axis} groups {_crossing(grid, reading.groups(axis))}"
                for reading, axis in ((attention, "cp"), (experts, "ep")) if reading.sizes[axis] > 1]  # fmt: skip
    how = "" if folded else ", not folded"
    place = f"{world_size} ranks on {nodes_in_words(grid.nodes)} of {grid.gpus}{how}"
    parts = [f"attention {attention.words}, experts {experts.words}", *crossing]
    return Figure(fig, f"{place}: {'; '.join(parts)}.")


def _colour(axes: Any, grid: Grid, reading: Reading) -> None:
    jobs_by = " and ".join(axis for axis in reading.job_axes if reading.sizes[axis] > 1) or "one"
    parted = "samples" if reading.name == "attention" else "copies"
    parted += " and stages" if reading.sizes["pp"] > 1 else ""
    grid.prepare(axes, "")
    title = f"{reading.name}: {reading.words}\ncolour: {jobs_by}\nlines separate {parted}"
    axes.set_title(title, loc="left", fontsize=8.5)
    jobs = reading.number(reading.job_axes)
    for rank, job in enumerate(jobs.tolist()):
        letters = letters_of(reading, rank)
        grid.draw(axes, rank, *nth_style(job), _cell_text(rank, letters), size=7 if len(letters) <= 5 else 6)
    grid.outline(axes, reading.groups(*reading.job_axes), width=2.2)


def letters_of(reading: Reading, rank: int, without: Sequence[str] = ()) -> str:
    """Return the digits of a rank along the axes larger than 1, each after its letter, as in `c3d0`."""
    shown = [axis for axis in reading.digits if reading.sizes[axis] > 1 and axis not in without]
    return "".join(f"{_LETTERS[axis]}{reading.digits[axis][rank]}" for axis in shown)


def _cell_text(rank: int, letters: str) -> str:
    """Return the rank, and below it its digits on at most two lines."""
    if len(letters) <= 5:
        return f"{rank}\n{letters}"
    half = len(letters) // 2
    half += half % 2
    return f"{rank}\n{letters[:half]}\n{letters[half:]}"


def _crossing(grid: Grid, groups: list[list[int]]) -> str:
    crossing = sum(grid.span(group) > 1 for group in groups)
    if not crossing:
        return "all inside a node"
    return "all across nodes" if crossing == len(groups) else f"{crossing} of {len(groups)} across nodes"


def _sizes_in_words(sizes: Mapping[str, int], axes: Mapping[str, Any]) -> str:
    return " ".join(f"{axis} {sizes[axis]}" for axis in axes if sizes[axis] > 1) or "on one rank"


# ---- controls ----


def explore_folding(
    *,
    world_size: int = 16,
    gpus_per_node: int = 8,
    tp: int = 2,
    cp: int = 2,
    pp: int = 2,
    ep: int = 4,
    etp: int = 1,
    order: str = DEFAULT_ORDER,
    folded: bool = True,
) -> Any:
    """Return `fold_grid` of the given layout; in a live notebook add controls for every size, the order and folding.

    Returns a Figure, or in a live notebook an ipywidgets box that shows the same figure first. An impossible
    layout hides the picture and shows the reason.
    """
    sizes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    setting = {"world_size": world_size, "gpus_per_node": gpus_per_node, **sizes, "order": order, "folded": folded}
    figure = _drawn(setting)
    return _controls(figure, setting) if is_live() else figure


def _drawn(setting: dict[str, Any]) -> Figure:
    room = {name: setting[name] for name in ("world_size", "gpus_per_node", "folded")}
    return fold_grid({name: setting[name] for name in (*_SIZES, "order")}, **room)


def _controls(figure: Figure, start: dict[str, Any]) -> Any:
    import ipywidgets as widgets

    numbers = ("world_size", "gpus_per_node", *_SIZES)
    inputs: dict[str, Any] = {name: whole_number(name, start[name], most=2**12) for name in numbers}
    inputs["order"] = words("order", start["order"])
    inputs["folded"] = widgets.Checkbox(value=start["folded"], description="folded")
    rows = (("world_size", "gpus_per_node"), ("tp", "cp", "pp"), ("etp", "ep"), ("order", "folded"))
    return LiveFigure(figure).panel(inputs, _drawn, rows)
