"""Exercises and bets of chapter 15: the experts' digits of a rank, two sums of gradients, a layout for eight GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.rank_threads import RankThreads
from labkit.check.scoring import Finding, Misreadings, Outcome, asked, exercise, holds, shown
from labkit.comm.rank_generator import rank_generators
from labkit.config import presets
from labkit.plan.fitting import RESERVE, fullest
from labkit.plan.machine import load_machine
from labkit.plan.step_time import predict_step, schedule_of
from labkit.plan.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor

    from labkit.comm.motion import Held
    from labkit.viz.figure import Figure

Sizes = Mapping[str, Any]
Array = NDArray[Any]


def _words(sizes: Sizes) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in sizes.items())


# ---- the experts' digits of a rank ----

_NAMES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""Axis of the experts' generator -> its name in the chapter."""
_LAYOUTS: tuple[tuple[int, Sizes], ...] = (
    (2, {"tp": 1, "cp": 2, "pp": 1, "etp": 1, "ep": 2}),
    (8, {"tp": 1, "cp": 2, "pp": 1, "etp": 1, "ep": 4}),
    (8, {"tp": 2, "cp": 2, "pp": 1, "etp": 1, "ep": 8}),
    (8, {"tp": 1, "cp": 2, "pp": 1, "etp": 2, "ep": 2}),
    (16, {"tp": 2, "cp": 2, "pp": 2, "etp": 2, "ep": 2}),
    (24, {"tp": 1, "cp": 6, "pp": 2, "etp": 1, "ep": 4}),
)
_DRAWN = 1
"""The layout that is drawn."""
Digits = dict[str, int]


def _digits(inside: int, stage: int, axes: Mapping[str, int]) -> Digits:
    """Return the digits of a place in its stage, for axes with the fastest first, and the stage."""
    found: Digits = {}
    for axis, size in axes.items():
        inside, found[axis] = divmod(inside, size)
    return {axis: found[axis] for axis in ("etp", "ep", "edp")} | {"pp": stage}


def _right_digits(world: int, sizes: Sizes) -> list[Digits]:
    _, experts = rank_generators(world_size=world, **sizes)
    ranks = range(world)
    return [{_NAMES[axis]: digit for axis, digit in experts.coordinates(r).items() if axis in _NAMES} for r in ranks]


def _misread_digits(world: int, sizes: Sizes) -> Misreadings:
    tp, cp, pp, etp, ep = (sizes[axis] for axis in ("tp", "cp", "pp", "etp", "ep"))
    stage = world // pp
    edp, dp = stage // (etp * ep), stage // (tp * cp)

    def each(rule: Callable[[int, int], Digits]) -> list[Digits]:
        return [rule(rank % stage, rank // stage) for rank in range(world)]

    return {
        "ep is still a part of dp, so all ranks of a cp group hold the same experts": each(
            lambda inside, p: {
                "etp": inside % tp,
                "ep": inside // (tp * cp) % ep,
                "edp": inside // tp % cp + cp * (inside // (tp * cp) // ep),
                "pp": p,
            }
        ),
        "etp is the fastest axis of the experts, as tp is of attention": each(
            lambda inside, p: _digits(inside, p, {"ep": ep, "etp": etp, "edp": edp})
        ),
        "copies are neighbours here, and ranks that share the experts out are far apart; in the order tp-cp-ep-dp-pp "
        "ep is faster than dp": each(lambda inside, p: _digits(inside, p, {"etp": etp, "edp": edp, "ep": ep})),
        "edp is not dp: it is what etp and ep leave of the stage": each(
            lambda inside, p: _digits(inside, p, {"etp": etp, "ep": ep, "edp": edp}) | {"edp": inside // (tp * cp) % dp}
        ),
        "the ranks of all stages are numbered together, but a rank holds experts of its own stage only": [
            {"etp": rank % etp, "ep": rank // etp % ep, "edp": rank // (etp * ep), "pp": rank // stage}
            for rank in range(world)
        ],
        "the experts' tp is etp, which may be another size than tp": each(
            lambda inside, p: _digits(inside, p, {"etp": tp, "ep": ep, "edp": max(1, stage // (tp * ep))})
        ),
    }


def draw_digits(answer: Any) -> Figure | None:
    """Draw the numbering that the answer gives on eight GPUs, and the right one below it."""
    from labkit.viz.layout.arcs import arcs_of  # matplotlib, which a score does without
    from labkit.viz.layout.folding import Reading, readings

    world, sizes = _LAYOUTS[_DRAWN]
    attention, experts = readings(sizes, world)
    found = [answer(rank, world, **sizes) for rank in range(world)]
    axes = tuple(experts.digits)
    if any(not isinstance(each, dict) or set(each) != set(axes) for each in found):
        return None
    digits = {axis: np.array([int(each[axis]) for each in found]) for axis in axes}
    yours = Reading("experts", digits, {axis: int(digits[axis].max()) + 1 for axis in axes}, experts.job_axes)
    return arcs_of({"your numbering": (attention, yours), "cp 2, ep 4, as it should be": (attention, experts)})


@exercise(
    "15.digits",
    "Write expert_digits(rank, world, tp, cp, pp, etp, ep) -> the digits etp, ep, edp and pp of the rank.",
    draw=draw_digits,
)
def digits(answer: Any) -> Iterator[Outcome]:
    """Judge all ranks of six layouts: with and without tp, etp, stages, and copies of the experts."""
    return asked(
        _LAYOUTS,
        given=lambda world, sizes: f"{world} ranks, {_words(sizes)}",
        right=_right_digits,
        tried=lambda world, sizes: [answer(rank, world, **sizes) for rank in range(world)],
        misread=_misread_digits,
    )


# ---- two sums of gradients ----

_RUNS: tuple[tuple[int, Sizes], ...] = (
    (4, {"tp": 1, "cp": 4, "pp": 1, "etp": 1, "ep": 4}),
    (8, {"tp": 1, "cp": 2, "pp": 1, "etp": 1, "ep": 4}),
    (4, {"tp": 1, "cp": 4, "pp": 1, "etp": 1, "ep": 1}),
    (8, {"tp": 1, "cp": 2, "pp": 2, "etp": 1, "ep": 2}),
    (8, {"tp": 2, "cp": 2, "pp": 1, "etp": 1, "ep": 4}),
)
_KINDS = ("dp", "cp", "dp_cp", "tp", "etp", "ep", "edp", "tp_ep")
_WIDTH = 3
"""Numbers of a gradient."""


class _Case:
    """Gradients of the losses on the ranks of a layout, and the groups of each rank.

    `of_dense[r]` is the gradient of the loss on rank r with respect to the dense weights that the rank holds, and
    `of_experts[r, e]` that of expert e, wherever it is. Small integers sum exactly.
    """

    def __init__(self, world: int, sizes: Sizes) -> None:
        from labkit.comm.group_plan import groups_of_rank

        numbers = np.random.default_rng(world + sum(sizes.values()))
        self.world, self.groups = world, [groups_of_rank(rank, sizes, world) for rank in range(world)]
        self.held = [int(np.flatnonzero(own["ep"] == rank)[0]) for rank, own in enumerate(self.groups)]
        self.of_dense = numbers.integers(1, 9, (world, _WIDTH)) * 4.0
        self.of_experts = numbers.integers(1, 9, (world, sizes["ep"], _WIDTH)) * 4.0

    def losses(self, rank: int) -> int:
        """Return the number of losses of which the step's loss is the mean."""
        return len(self.groups[rank]["dp_cp"])

    def local(self, rank: int) -> Array:
        """Return what backward gives a rank for its experts: parts of the losses of all ranks of its ep group."""
        return np.sum([self.of_experts[other, self.held[rank]] for other in self.groups[rank]["ep"]], axis=0)

    def summed(self, rank: int, kind: str) -> Array:
        """Return the sum over a kind of group of what backward gives for experts."""
        return np.sum([self.local(other) for other in self.groups[rank][kind]], axis=0)

    def right(self, rank: int) -> tuple[Array, Array]:
        dense = np.sum([self.of_dense[other] for other in self.groups[rank]["dp_cp"]], axis=0)
        return dense / self.losses(rank), self.summed(rank, "edp") / self.losses(rank)


def _meanings(case: _Case, rank: int) -> dict[str, Array]:
    """Return words for a misunderstanding -> the gradient of experts that it gives."""
    own, losses, summed = case.groups[rank], case.losses(rank), case.summed(rank, "edp")
    wrong = {
        "this is the mean over the copies of the expert, but its rows came from all ranks of ep, so more losses are in "
        "the sum than there are copies": summed / len(own["edp"]),
        "the sum is not divided, and the loss of the step is a mean": summed,
        "the group of the dense weights adds up gradients of different experts": case.summed(rank, "dp_cp") / losses,
        "the mean over the group of the dense weights, whose ranks hold different experts": (
            case.summed(rank, "dp_cp") / len(own["dp_cp"])
        ),
        "nobody has added up the copies, so they drift apart": case.local(rank) / losses,
        "each rank keeps what its own backward gave; copies drift apart": case.local(rank),
        "ranks of ep hold different experts, so their gradients must not be added": case.summed(rank, "ep") / losses,
        "the ranks of ep hold different experts": case.summed(rank, "ep") / len(own["ep"]),
        "ranks of tp share one loss, and so do the stages; count the losses, not the ranks": summed / case.world,
        "ep ranks are counted, but each loss counts once, and there are dp cp of them": summed / len(own["ep"]),
        "edp ep counts the ranks of a stage; ranks of tp share one loss": summed / (len(own["edp"]) * len(own["ep"])),
    }
    return {words: value for words, value in wrong.items() if not np.array_equal(value, case.right(rank)[1])}


def _finished(answer: Any, case: _Case) -> list[tuple[Any, Any]]:
    ranks = RankThreads(case.world)

    def program(rank: int) -> tuple[Any, Any]:
        groups = {kind: case.groups[rank][kind].tolist() for kind in _KINDS}
        made = {kind: SimpleNamespace(name=kind, size=len(g), ranks=g) for kind, g in groups.items()}

        def all_reduce(x: Any, group: Any) -> Array:
            every = ranks.meet(rank, f"all_reduce over {group.name}", np.array(x, dtype=float))
            return np.sum([every[other] for other in group.ranks], axis=0)

        given = case.of_dense[rank].copy(), case.local(rank).copy()
        dense, expert = answer(*given, SimpleNamespace(**made), all_reduce)
        return np.asarray(dense, dtype=float), np.asarray(expert, dtype=float)

    return ranks.run(program)


@exercise(
    "15.finish",
    "Write finish(dense, expert, g, all_reduce) -> the complete gradients of the dense weights and of the experts.",
)
def finish(answer: Any) -> Iterator[Outcome]:
    """Judge both gradients on every rank of five layouts: folded, with copies, without ep, in stages, with tp."""
    for world, sizes in _RUNS:
        case, found, error = _Case(world, sizes), [], ""
        try:
            found = _finished(answer, case)
        except (Exception, SystemExit) as problem:
            error = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        for place, name in enumerate(("dense weights", "experts")):
            yield holds(
                f"{world} ranks, {_words(sizes)}: {name}",
                "the gradient of one process on every rank",
                lambda f=found, c=case, p=place, e=error: (e, e) if e else _judged(f, c, p),
            )


def _judged(found: list[tuple[Any, Any]], case: _Case, place: int) -> Finding:
    for rank, each in enumerate(found):
        value, right = each[place], case.right(rank)[place]
        if value.shape == right.shape and np.allclose(value, right, 1e-12):
            continue
        if value.shape != right.shape:
            return "shape", f"an array of shape {list(value.shape)} on rank {rank}; keep the shape {list(right.shape)}"
        ratio = value / right
        factor = f"{ratio[0]:.4g} times the right one" if np.allclose(ratio, ratio[0]) else "no multiple of it"
        if place == 0:
            reason = "dense weights have copies on all ranks of dp and cp, and as many losses are in the mean"
        else:
            wrong = _meanings(case, rank)
            reason = next((words for words, other in wrong.items() if np.allclose(value, other, 1e-12)), "")
        return reason or shown(value), f"{shown(value)} on rank {rank}, {factor}{f': {reason}' if reason else ''}"
    return True


# ---- rows in motion ----


def boxes_of(tokens: Tensor, rows: Tensor) -> dict[str, Held]:
    """Return a box of `Motion.holds` for each row, by its token [n], in the colour of the part of the sequence.

    Rank r has the tokens 2r and 2r + 1 at first, which are part r.
    """
    from labkit.comm.motion import Held

    named = sorted(zip(tokens.tolist(), rows, strict=True), key=lambda pair: pair[0])
    return {f"token {t}": Held(f"part {t // 2}", [t // 2], row) for t, row in named}


# ---- a layout for eight GPUs ----

GPUS, SAMPLES, TOKENS = 8, 64, 32_768
UNFOLDED, BEST = 32.17, 26.42
"""Seconds of a step: the fastest layout that does not fold, though it may recompute, and the fastest of all that
recompute nothing. `tests/unit/exercises/test_chapter_15.py` searches them anew."""
_AXES = ("tp", "cp", "pp", "ep", "etp")
_ROOMY = 0.85
"""Share of the memory below which a layout cuts more than it has to."""


@dataclass(frozen=True)
class _Predicted:
    """What the plan says of a layout."""

    seconds: float
    gigabytes: float
    available: float
    parts: Mapping[str, float]


def predicted(sizes: Mapping[str, int]) -> _Predicted:
    """Return the plan's step and memory of DeepSeekMoE 16B with long sequences on eight H100s.

    Microbatches of one sample, nothing recomputed, the optimizer sharded, sequence parallelism with tp. Raises
    ValueError (or ConfigError, which is one) for an impossible layout.
    """
    split = {f"parallel.{axis}": sizes[axis] for axis in _AXES} | {"parallel.sequence_parallel": sizes["tp"] > 1}
    batch = {"train.global_batch_size": SAMPLES, "train.micro_batch_size": 1, "model.seq_length": TOKENS}
    batch |= {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True}
    config = presets.get("deepseek_moe_16b").override(split | batch)
    machine = load_machine("h100")
    workload = Workload(config, GPUS, software=machine.default_software)
    step = predict_step(workload, machine)
    need = fullest(workload, machine, schedule_of(workload.config, workload.microbatches))
    return _Predicted(step.seconds, need.bytes / 1e9, (machine.memory_bytes - RESERVE) / 1e9, step.parts)


@exercise(
    "15.layout",
    "Write layout() -> a dict with tp, cp, pp, ep and etp for DeepSeekMoE 16B with 32,768 tokens on eight H100s.",
    ladder=True,
)
def layout(answer: Any) -> Iterator[Outcome]:
    """Judge one layout four times: is it legal, does it fit, is it faster than any unfolded one, is it the fastest?"""
    where = "8 H100s"
    yield holds(where, "a layout that labkit accepts", lambda: _legal(answer()) or True)
    yield holds(where, "it fits", lambda: _fits(answer()))
    for most, words in ((UNFOLDED, "faster than every layout that doesn't fold"), (BEST, "as fast as any")):
        yield holds(where, f"{words}: at most {most:.1f} s per step", lambda most=most: _fast(answer(), most))


def _legal(sizes: Any) -> tuple[str, str] | None:
    """Return what is wrong with a layout; None for a legal one."""
    if not isinstance(sizes, Mapping) or set(sizes) != set(_AXES):
        return "form", f"{shown(sizes)}: give a dict with {', '.join(_AXES)}"
    if any(not isinstance(size, int) or size < 1 for size in sizes.values()):
        return "form", f"{shown(sizes)}: sizes are whole numbers from 1 on"
    if GPUS % (sizes["tp"] * sizes["cp"] * sizes["pp"]):
        return "attention", f"tp cp pp is {sizes['tp'] * sizes['cp'] * sizes['pp']}, which does not divide {GPUS}"
    if (GPUS // sizes["pp"]) % (sizes["etp"] * sizes["ep"]):
        wide = sizes["etp"] * sizes["ep"]
        return "experts", f"etp ep is {wide}, which does not divide the {GPUS // sizes['pp']} ranks of a stage"
    try:
        predicted(sizes)
    except ValueError as problem:
        return "rejected", " ".join(str(problem).split())[:200]
    return None


def _fits(sizes: Any) -> Finding:
    if wrong := _legal(sizes):
        return wrong
    found = predicted(sizes)
    if found.gigabytes <= found.available:
        return True
    if sizes["ep"] * sizes["etp"] == 1:
        why = "each rank holds all experts of its layers"
    elif sizes["tp"] * sizes["cp"] < 4:
        why = "the experts are shared out, so what is left is activations of long sequences, which tp and cp cut"
    else:
        why = "weights or activations have to be cut once more"
    return why, f"{found.gigabytes:.1f} GB of {found.available:.1f}: {why}"


def _fast(sizes: Any, most: float) -> Finding:
    fits = _fits(sizes)
    if fits is not True:
        return fits
    found = predicted(sizes)
    if found.seconds <= most + 0.005:
        return True
    names = ("tp", "cp", "ep", "dp", "pp", "bubble")
    largest = max(names, key=lambda part: found.parts.get(part, 0.0))
    if sizes["etp"] > 1:
        why = "etp cuts each expert's matrices, and its ranks add up in every layer; ep only moves rows"
    elif largest == "bubble" and found.parts["bubble"] > 0.3:
        why = "stages wait for each other; the experts are shared out by ep already"
    elif found.gigabytes < _ROOMY * found.available:
        why = "activations are cut finer than memory asks for; what tp and cp leave is dp, which costs next to nothing"
    else:
        why = "another way to cut activations as far waits less"
    cost = f"{largest} costs {found.parts.get(largest, 0.0):.1f} s of it"
    return why, f"{found.seconds:.1f} s, and {cost}: {why}"


# ---- bets ----

ask(
    "15.gpus",
    "Attention with cp 8, experts with ep 8, one pipeline stage, tp 1. How many GPUs does that need at least?",
    choices={
        "8": "The same eight GPUs can hold eight parts of a sequence and eight parts of the experts. Nothing forces "
        "two ranks with different parts of a sequence to hold the same experts.",
        "16": "More than one group of each kind isn't needed: the ranks of a cp group can share the experts out.",
        "64": "That is true if ep is cut out of dp, as in GShard and DeepSpeed-MoE. Then all ranks of a cp group hold "
        "the same experts.",
    },
)
ask(
    "15.adam",
    "In every step the experts' gradients are n times too large (n is the size of ep). The optimizer is Adam, and "
    "nothing is clipped. How far is the loss from the right one after 100 steps?",
    choices={
        "under 1 %": "Adam divides each gradient by the root of the mean of its squares. A factor that is the same in "
        "every step is in both, and drops out.",
        "1 to 20 %": "With plain gradient descent it would be in this range or further off. Adam divides a gradient by "
        "its own size.",
        "over 20 %, or it diverges": "A step that is n times too large would do that. But Adam's step doesn't grow "
        "with the gradient.",
    },
)
ask(
    "15.memory",
    "cp 8 on eight GPUs, the optimizer states sharded over the copies. By what factor does ep 8 shrink the experts' "
    "weights, gradients and optimizer states on a GPU, compared with ep 1?",
    misread=lambda: {
        "The weights and gradients shrink so much. But with ep 1 there are eight copies of each expert, over which the "
        "optimizer states were sharded already.": 8.0,
        "They would, if the optimizer states were all: those are sharded over the same eight GPUs either way.": 1.0,
        "Those are the bytes of a weight with ep 1. With ep 8 a weight costs 18/8 = 2.25 bytes on a GPU.": 7.5,
    },
    unit="times",
    because="With ep 1 a GPU holds all experts, at 6 + 12/8 = 7.5 bytes per weight. With ep 8 it holds an eighth of "
    "them, at 18 bytes, since there are no copies left: 2.25 bytes per weight.",
)
ask(
    "15.nodes",
    "The same model, groups of the same sizes, a small batch and a large one. Which numbering of the ranks sends more "
    "between the nodes?",
    choices={
        "ep across nodes": "Rows travel for every sample and layer. With enough samples they are more than the "
        "experts' gradients, which are sent once in a step.",
        "copies across nodes": "The experts are most of the model, so their gradients are many bytes. With few samples "
        "in a step they are more than the rows.",
        "different for each batch": "Rows grow with the samples of a step, and gradients don't. With few samples there "
        "are more bytes of gradients, with many there are more bytes of rows.",
        "both the same": "They would be the same if all groups were inside a node, or none.",
    },
)
