"""The order in which the layers of a merged pair run, and the time that it takes.

A merged pair is a forward of one microbatch and a backward of another. Their layers run side by side, as
`get_overlap_moe_expert_parallel_comm_order` says: the forward from its first layer, the backward from its last. A layer
with experts consists of three parts, between which its rows travel. A part awaits its rows, computes, and starts the
next transfer. The parts of the two sides alternate, so each transfer is under way while the other side computes:

    compute      combine'  attention  experts'  experts   attention'  combine
    all-to-all       └ combine' ┘ └ dispatch ┘ └ dispatch' ┘ └ combine ┘

(' marks the backward, whose transfers bear the names of the forward's.) Each all-to-all is started at the end of one
part and awaited by the next part of the same side. With delayed weight gradients (Megatron's `delay_wgrad_compute`) a
backward computes them apart: those of the experts right after experts', under dispatch', and those of attention right
before the forward's combine, under its all-to-all. Those of the last layer wait for the last combine of the pair. (In
Megatron-LM a layer ends with those of attention: combine runs in the stream of the all-to-alls, out of their way.)

A dense layer has two parts, attention and mlp. Its transfers are none, but it hides those of the other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from labkit.schedules.tables import get_overlap_moe_expert_parallel_comm_order

MOE_PARTS = ("attention", "experts", "combine")
"""Parts of a layer with experts, in the order of its forward. Attention includes the norms, the router and the
permutation; combine adds up each token's results."""
DENSE_PARTS = ("attention", "mlp")
"""Parts of a layer without."""
Parts = tuple[str, ...]

_STARTS = {("F", "attention"): "dispatch", ("F", "experts"): "combine",
           ("B", "combine"): "combine", ("B", "experts"): "dispatch"}  # fmt: skip
"""Transfer that a part of a layer with experts starts at its end."""
_AWAITS = {("F", "experts"): "dispatch", ("F", "combine"): "combine",
           ("B", "experts"): "combine", ("B", "attention"): "dispatch"}  # fmt: skip
"""Transfer that such a part awaits before it computes."""


class PartRun(NamedTuple):
    """One piece of work of a pair; prints as `F 0 experts`."""

    side: str
    """F, B, or W for weight gradients that the backward left out."""
    layer: int
    """Position of the layer in its chunk, 0 first."""
    part: str
    """One of MOE_PARTS or DENSE_PARTS."""

    def __str__(self) -> str:
        return f"{self.side} {self.layer} {self.part}"


def pair_order(forward: Sequence[Parts], backward: Sequence[Parts], *, delay_wgrad: bool = False) -> list[PartRun]:
    """Return the parts of a forward and a backward in the order they run.

    forward, backward: the parts of each layer of the two chunks. Without one of them the other side runs alone.
    """
    numbers = [*([-1] if backward else []), *([2] if forward else [])]
    layers = [len(backward), len(forward)]
    order = get_overlap_moe_expert_parallel_comm_order(numbers, layers, delay_wgrad)
    runs: list[PartRun] = []
    waiting: tuple[PartRun, ...] = ()  # a forward's layer whose partner may follow
    for number in order:
        layer = int(abs(number)) - 1
        if number > 0:
            runs += waiting
            layer -= len(backward)
            waiting = tuple(PartRun("F", layer, part) for part in forward[layer])
        elif number == int(number):
            back = tuple(PartRun("B", layer, part) for part in reversed(backward[layer]))
            runs += _with_early_weights(_by_turns(waiting, back), delay_wgrad)
            waiting = ()
        else:
            runs += waiting
            combine = runs[-1:] if runs[-1].side == "F" and runs[-1].part == "combine" else []
            apart = [PartRun("W", layer, part) for part in backward[layer] if part == "attention"]
            runs[len(runs) - len(combine) :] = [*apart, *combine]
            waiting = ()
    return [*runs, *waiting]


def _by_turns(ahead: Sequence[PartRun], back: Sequence[PartRun]) -> list[PartRun]:
    """Return the parts of two layers by turns. The layer with experts begins, and of two such layers the backward."""
    first, second = (back, ahead) if len(back) >= len(ahead) else (ahead, back)
    return [run for pair in zip_longest(first, second) for run in pair if run is not None]


def _with_early_weights(runs: Sequence[PartRun], delay_wgrad: bool) -> list[PartRun]:
    """Put the weight gradients of experts and MLPs right after their part of the backward."""
    early = {run: [PartRun("W", run.layer, run.part)] for run in runs if run.side == "B" and run.part in _LEAVES}
    return [each for run in runs for each in (run, *(early.get(run, []) if delay_wgrad else []))]


_LEAVES = ("experts", "mlp")
"""Parts whose weight gradients come right after them where they are delayed."""


# ---- the time of a pair ----


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer's parts and transfers."""

    forward: Mapping[str, float]
    """By part, in the order of the forward."""
    backward: Mapping[str, float]
    """By part: the gradients of inputs."""
    weight: Mapping[str, float] = field(default_factory=dict)
    """By part: the gradients of weights. They come with the part, or later where they are delayed."""
    dispatch: float = 0.0
    """The all-to-all that brings rows to their experts; its backward takes as long."""
    combine: float = 0.0
    """The all-to-all that brings results back."""

    @property
    def parts(self) -> Parts:
        """The parts, in the order of the forward."""
        return tuple(self.forward)


class Lane(NamedTuple):
    """Work of a pair from `start` to `end` seconds after the pair's start."""

    lane: str
    """`compute`, or `all_to_all` for a transfer."""
    name: str
    """`F 0 experts`, or `F 0 dispatch` for a transfer."""
    start: float
    end: float


def pair_lanes(
    forward: Sequence[LayerTimes], backward: Sequence[LayerTimes], *, delay_wgrad: bool = False
) -> list[Lane]:
    """Return what a pair does when, on one lane for computing and one for the all-to-alls, which never overlap."""
    order = pair_order([one.parts for one in forward], [one.parts for one in backward], delay_wgrad=delay_wgrad)
    lanes: list[Lane] = []
    now = free = 0.0
    ends: dict[tuple[str, int, str], float] = {}
    for run in order:
        times = (forward if run.side == "F" else backward)[run.layer]
        awaited = _AWAITS.get((run.side, run.part)) if "experts" in times.parts else None
        now = max(now, ends.get((run.side, run.layer, awaited or ""), 0.0))
        seconds = _seconds(run, times, delay_wgrad)
        lanes.append(Lane("compute", str(run), now, now + seconds))
        now += seconds
        started = _STARTS.get((run.side, run.part)) if "experts" in times.parts else None
        if started is not None:
            begins = max(now, free)
            free = begins + (times.dispatch if started == "dispatch" else times.combine)
            ends[run.side, run.layer, started] = free
            lanes.append(Lane("all_to_all", f"{run.side} {run.layer} {started}", begins, free))
    return lanes


def _seconds(run: PartRun, times: LayerTimes, delay_wgrad: bool) -> float:
    """Return the computation of a part, with its weight gradients where they are not delayed."""
    if run.side == "F":
        return times.forward[run.part]
    weight = times.weight.get(run.part, 0.0)
    if run.side == "W":
        return weight
    return times.backward[run.part] + (0.0 if delay_wgrad else weight)


def pair_seconds(forward: Sequence[LayerTimes], backward: Sequence[LayerTimes], *, delay_wgrad: bool = False) -> float:
    """Return the seconds from the start of a pair to its end; of one side alone, if the other has no layers."""
    lanes = pair_lanes(forward, backward, delay_wgrad=delay_wgrad)
    return max((lane.end for lane in lanes), default=0.0)
