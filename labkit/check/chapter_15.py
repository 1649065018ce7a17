"""Exercises of chapter 15: how many ranks a folded layout needs, an expert's place and gradient, safe order strings.

Right answers come from the library's rank generators, and wrong ones are compared with those of known
misunderstandings. A score says by which factor a wrong divisor spoils the gradient. It names the first rank that a
wrong group loses or mixes in, and the first rank that an unsafe order puts into two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from math import lcm
from typing import Any, NamedTuple

from labkit.check.scoring import Diagnosis, Misreadings, Outcome, exercise, fitting, holds, plain, shown
from labkit.comm.mixed_radix import prefix_product
from labkit.comm.rank_generator import DEFAULT_ORDER, rank_generators

Sizes = dict[str, Any]


def _words(sizes: Sizes) -> str:
    return " ".join(f"{axis} {size}" for axis, size in sizes.items())


def _laid_out(ranks: int, sizes: Sizes, order: str = DEFAULT_ORDER) -> bool:
    try:
        rank_generators(world_size=ranks, **sizes, order=order)
    except ValueError:
        return False
    return True


def _kept(tried: Callable[[], Any]) -> Any:
    """Return the value, or the exception that was raised instead."""
    try:
        return tried()
    except (Exception, SystemExit) as error:
        return error


def _unless_raised(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


# ---- ranks of a layout ----

_WORLDS: tuple[Sizes, ...] = (
    {"tp": 1, "cp": 6, "pp": 2, "etp": 1, "ep": 4},
    {"tp": 1, "cp": 8, "pp": 1, "etp": 1, "ep": 8},
    {"tp": 4, "cp": 1, "pp": 2, "etp": 1, "ep": 4},
    {"tp": 2, "cp": 2, "pp": 4, "etp": 1, "ep": 64},
    {"tp": 2, "cp": 3, "pp": 1, "etp": 2, "ep": 2},
)
"""Two where neither product divides the other, tp cp = etp ep without and with a pipeline, and ep larger than tp cp."""


@exercise("15.world", "Write smallest_world(tp, cp, pp, etp, ep) -> the fewest ranks that hold the folded layout.")
def world(answer: Any) -> Iterator[Outcome]:
    """Judge five layouts; the right answer is the smallest number of ranks that the library lays out."""
    diagnosis = Diagnosis()
    given = [_kept(lambda s=sizes: answer(**s)) for sizes in _WORLDS]
    rows = [_misread_worlds(**sizes) for sizes in _WORLDS]
    for sizes, value, row in zip(_WORLDS, given, fitting(given, rows)):
        right = next(ranks for ranks in count(1) if _laid_out(ranks, sizes))
        yield diagnosis.outcome(_words(sizes), right, lambda v=value: _unless_raised(v), row)


def _misread_worlds(tp: int, cp: int, pp: int, etp: int, ep: int) -> Misreadings:
    attention, experts = tp * cp, etp * ep
    return {
        "ep gets ranks of its own next to tp and cp, as without folding": attention * ep * pp,
        "all sizes are multiplied; attention and experts share their ranks": attention * experts * pp,
        "a stage has the larger product of ranks; it must be a multiple of the smaller one, too": (
            pp * max(attention, experts)
        ),
        "experts are folded over the pipeline, too; a stage has experts of its own layers": lcm(
            attention * pp, experts
        ),
        "this is one stage; the layout has pp of them": lcm(attention, experts),
        "these are the ranks of attention; the experts need whole copies, too": pp * attention,
        "these are the ranks of the experts; attention needs whole copies, too": pp * experts,
    }


# ---- place of an expert ----


class _Place(NamedTuple):
    rank: int
    ranks: int
    experts: int
    sizes: Sizes


_PLACES = (
    _Place(5, 8, 8, {"tp": 1, "cp": 8, "pp": 1, "etp": 1, "ep": 8}),
    _Place(13, 16, 8, {"tp": 4, "cp": 1, "pp": 2, "etp": 1, "ep": 4}),
    _Place(3, 16, 16, {"tp": 4, "cp": 1, "pp": 2, "etp": 1, "ep": 8}),
    _Place(14, 16, 4, {"tp": 2, "cp": 2, "pp": 2, "etp": 2, "ep": 2}),
    _Place(21, 32, 6, {"tp": 2, "cp": 2, "pp": 2, "etp": 2, "ep": 2}),
)
_PARTS = ("its experts", "the ranks that add up their gradients", "what the sum is divided by")


@exercise(
    "15.place",
    "Write expert_place(rank, world_size, num_experts, *, tp, cp, pp, etp, ep) -> (experts, ranks, divisor).",
)
def place(answer: Any) -> Iterator[Outcome]:
    """Judge three questions about each of five layouts in the order tp-cp-ep-dp-pp, each a case of its own."""
    diagnosis = Diagnosis()
    kept = [_kept(lambda c=case: _three(answer(c.rank, c.ranks, c.experts, **c.sizes))) for case in _PLACES]
    given = [[each] * len(_PARTS) if isinstance(each, BaseException) else each for each in kept]
    columns = zip(*given)
    misread = [fitting(column, list(map(read, _PLACES))) for column, read in zip(columns, _MISREAD)]
    for case, parts, rows in zip(_PLACES, given, zip(*misread)):
        words = f"rank {case.rank} of {case.ranks}, {case.experts} experts, {_words(case.sizes)}"
        for index, (value, right) in enumerate(zip(parts, _right(case))):
            asked = f"{words}: {_PARTS[index]}"
            outcome = diagnosis.outcome(asked, right, lambda v=value: _unless_raised(v), rows[index])
            failed = not outcome.passed and not isinstance(value, BaseException)
            yield _with_consequence(outcome, _CONSEQUENCES[index](value, case)) if failed else outcome


def _with_consequence(outcome: Outcome, words: str) -> Outcome:
    """Return the outcome with a finding that also says what the answer would do to a gradient."""
    value, colon, reason = outcome.got.partition(": ")
    return replace(outcome, got=f"{value}, {words}{colon}{reason}") if words else outcome


def _right(case: _Place) -> tuple[list[int], list[int], int]:
    dense, expert = rank_generators(world_size=case.ranks, **case.sizes)
    copies = expert.group_of("dp", case.rank).tolist()
    return _held(case, expert.coordinates(case.rank)["ep"]), copies, dense.sizes["dp"] * dense.sizes["cp"]


def _held(case: _Place, number: int) -> list[int]:
    """Return the number-th of ep equal parts of the experts."""
    each = case.experts // case.sizes["ep"]
    return list(range(number * each, (number + 1) * each))


def _inside(case: _Place) -> tuple[int, int, int]:
    """Return (ranks of a stage, first rank of this rank's stage, place in it)."""
    stage = case.ranks // case.sizes["pp"]
    return stage, case.rank // stage * stage, case.rank % stage


def _misread_experts(case: _Place) -> Misreadings:
    tp, cp, etp, ep = (case.sizes[axis] for axis in ("tp", "cp", "etp", "ep"))
    _, _, inside = _inside(case)
    return {
        "these are all experts; each rank of ep holds a part of them": list(range(case.experts)),
        "without folding ep is a part of dp; here it takes all ranks of the stage": _held(
            case, inside // (tp * cp) % ep
        ),
        "the digit of etp is faster than that of ep: neighbours hold shards of the same expert": _held(
            case, inside % ep
        ),
        "the digit of ep is counted over all stages; etp comes first, then ep": _held(case, case.rank % ep),
        "experts are dealt out in turn; the i-th rank of ep holds the i-th part of the list": list(
            range(inside // etp % ep, case.experts, ep)
        ),
    }


def _misread_copies(case: _Place) -> Misreadings:
    tp, cp, etp, ep = (case.sizes[axis] for axis in ("tp", "cp", "etp", "ep"))
    stage, start, inside = _inside(case)
    edp = stage // (etp * ep)
    whole = range(start, start + stage)
    dense, expert = rank_generators(world_size=case.ranks, **case.sizes)
    number = inside // (tp * cp) % ep
    return {
        "this is the whole stage; most of its ranks hold other experts": list(whole),
        "the group of attention's weights (dp x cp) adds up gradients of different experts": (
            dense.group_of("dp-cp", case.rank).tolist()
        ),
        "copies along dp are copies of attention": dense.group_of("dp", case.rank).tolist(),
        "these ranks exchange tokens (ep), and hold different experts": expert.group_of("ep", case.rank).tolist(),
        "the stride of edp is etp ep, the product of the sizes to its left, not etp edp": [
            start + inside % (etp * edp) + i * etp * edp for i in range(edp)
        ],
        "without folding the ranks of cp hold the same experts; here they do not": [
            rank for rank in whole if (rank - start) // (tp * cp) % ep == number
        ],
        "copies are taken for neighbours; etp and ep are faster than edp": [
            start + inside // edp * edp + i for i in range(edp)
        ],
        "the first rank of the stage is not added": list(range(inside % (etp * ep), stage, etp * ep)),
    }


def _misread_divisors(case: _Place) -> Misreadings:
    dense, expert = rank_generators(world_size=case.ranks, **case.sizes)
    stage = case.ranks // case.sizes["pp"]
    return {
        "averaged over edp, but the all-to-all brought home what the tokens of all ranks of ep contributed": (
            expert.sizes["dp"]
        ),
        "ranks of tp share one loss, so they do not count": stage,
        "all ranks are counted, with tp and the other stages": case.ranks,
        "ranks of cp have losses of their own, so they count": dense.sizes["dp"],
        "this counts the ranks of ep; each loss counts once, and there are dp cp of them": case.sizes["ep"],
        "the sum is not divided": 1,
    }


def _factor(value: Any, case: _Place) -> str:
    """Say by how much the gradient would be wrong."""
    right = _right(case)[2]
    if not isinstance(value, (int, float)) or value <= 0 or value == right:
        return ""
    large = value < right
    times = right / value if large else value / right
    return f"which makes the gradient {times:g} times too {'large' if large else 'small'}"


def _lost_or_mixed(value: Any, case: _Place) -> str:
    """Name the first rank whose gradients would be lost, or mixed in although it has other experts."""
    right = _right(case)[1]
    given = [rank for rank in plain(value) if isinstance(rank, int)]
    for rank in sorted({*right, *given}):
        if rank in right and rank not in given:
            return f"which loses the gradients of rank {rank}"
        if rank not in right:
            if not 0 <= rank < case.ranks:
                return f"but there is no rank {rank}"
            held = _right(case._replace(rank=rank))[0]
            stage, start, _ = _inside(case)
            alien = "of another stage" if rank // stage != start // stage else f"that holds {_experts(held, case)}"
            return f"which mixes in the gradients of rank {rank} {alien}"
    return "which is not in ascending order" if given != right else ""


def _experts(held: list[int], case: _Place) -> str:
    if held == _right(case)[0]:
        return "another shard"
    return f"expert {held[0]}" if len(held) == 1 else f"experts {held[0]} to {held[-1]}"


def _three(value: Any) -> tuple[Any, Any, Any]:
    """Split a returned value into (experts, ranks, divisor)."""
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise ValueError(f"the answer is {value!r}; return (experts, ranks, divisor)")
    experts, ranks, divisor = value
    return list(experts), list(ranks), divisor


_MISREAD = (_misread_experts, _misread_copies, _misread_divisors)
_CONSEQUENCES: tuple[Callable[[Any, _Place], str], ...] = (lambda value, case: "", _lost_or_mixed, _factor)
"""What a wrong answer does to a gradient, one function for each of `_PARTS`."""


# ---- safe order strings ----


class _Order(NamedTuple):
    order: str
    world: int
    sizes: Sizes


_HALF = {"tp": 2, "cp": 1, "pp": 2, "etp": 1, "ep": 2}
_ORDERS = (
    _Order("tp-pp-cp-ep-dp", 8, _HALF),
    _Order("tp-cp-ep-dp-pp", 8, _HALF),
    _Order("pp-dp-tp-cp-ep", 8, _HALF | {"ep": 4}),
    _Order("tp-ep-pp-cp-dp", 8, _HALF),
    _Order("tp-cp-ep-pp-dp", 16, {"tp": 2, "cp": 2, "pp": 2, "etp": 1, "ep": 4}),
    _Order("tp-ep-pp-dp-cp", 16, {"tp": 2, "cp": 1, "pp": 2, "etp": 2, "ep": 2}),
    _Order("dp-pp-tp-cp-ep", 24, {"tp": 2, "cp": 3, "pp": 2, "etp": 1, "ep": 3}),
    _Order("ep-pp-tp-cp-dp", 8, {"tp": 2, "cp": 1, "pp": 1, "etp": 1, "ep": 4}),
)
"""Equal copies but unsafe; two that need no look at sizes; products left of pp that agree, twice; two that disagree;
one stage."""


@exercise(
    "15.safe", "Write safe(order, world, tp, cp, pp, etp, ep) -> True if both numberings have the same pipelines."
)
def safe(answer: Any) -> Iterator[Outcome]:
    """Judge eight orders; rejecting a safe one and accepting an unsafe one are two reasons, each shown once."""
    right = [_laid_out(case.world, case.sizes, order=case.order) for case in _ORDERS]
    given: list[Any] = []
    for case in _ORDERS:
        try:
            given.append(answer(case.order, case.world, **case.sizes))
        except (Exception, SystemExit) as error:
            given.append(error)
    belief = next((words for words, rule in _RULES.items() if [rule(case) for case in _ORDERS] == given), "")
    named = False
    for case, expected, value in zip(_ORDERS, right, given):
        kind, finding = _verdict(case, expected, value)
        if kind and belief and not named:
            finding, named = f"{finding}: {belief}", True
        yield holds(
            f"{case.order} on {case.world} ranks, {_words(case.sizes)}",
            f"{expected}",
            lambda kind=kind, finding=finding: (kind, finding),
        )


def _verdict(case: _Order, expected: bool, value: Any) -> tuple[str, str]:
    """Return (kind of mistake, sentence); both empty for a right answer."""
    if isinstance(value, BaseException):
        return "raised", f"{type(value).__name__}: {' '.join(str(value).split())[:200]}"
    if not isinstance(value, bool):
        return "form", f"{shown(value)}: give True or False"
    if value == expected:
        return "", ""
    if expected:
        return "strict", "False, which rejects a safe order: both numberings put every rank into the same pipeline"
    attention, experts = (_stages(case, side) for side in (0, 1))
    rank = next(rank for rank in range(case.world) if attention[rank] != experts[rank])
    held = f"rank {rank} would hold attention of stage {attention[rank]} and experts of stage {experts[rank]}"
    return "unsafe", f"True, and {held}"


def _sides(case: _Order) -> tuple[Sizes, Sizes]:
    """Return the sizes of the axes in the case's order, for attention and for the experts."""
    s, axes = case.sizes, case.order.split("-")
    stage = case.world // s["pp"]
    attention = {"tp": s["tp"], "cp": s["cp"], "ep": 1, "dp": stage // (s["tp"] * s["cp"]), "pp": s["pp"]}
    experts = {"tp": s["etp"], "cp": 1, "ep": s["ep"], "dp": stage // (s["etp"] * s["ep"]), "pp": s["pp"]}
    return {axis: attention[axis] for axis in axes}, {axis: experts[axis] for axis in axes}


def _left_of_pp(case: _Order, side: int) -> int:
    """Return the stride of pp."""
    sizes = _sides(case)[side]
    return prefix_product(list(sizes.values()))[list(sizes).index("pp")]


def _stages(case: _Order, side: int) -> list[int]:
    stride, pp = _left_of_pp(case, side), case.sizes["pp"]
    return [rank // stride % pp for rank in range(case.world)]


def _one_axis_at_pp(case: _Order) -> bool:
    axes = case.order.split("-")
    beside = axes[max(axes.index("pp") - 1, 0)]
    attention, experts = _sides(case)
    return attention[beside] == experts[beside]


_RULES: dict[str, Callable[[_Order], bool]] = {
    "only orders that end in pp pass; the two strides of pp can agree in other orders, too": lambda case: (
        case.order.endswith("pp")
    ),
    "only orders with pp at an end pass; in the middle the sizes decide": lambda case: (
        case.order.startswith("pp") or case.order.endswith("pp")
    ),
    "equal numbers of copies (dp and edp) are asked for, which say nothing about the stride of pp": lambda case: (
        _sides(case)[0]["dp"] == _sides(case)[1]["dp"]
    ),
    "every order passes; one order string gives two strides of pp, since sizes differ": lambda case: True,
    "only the axis before pp is compared; the stride is the product of all axes before it": _one_axis_at_pp,
    "a layout with one stage has one pipeline per rank, so any order is safe": lambda case: (
        case.sizes["pp"] > 1 and _left_of_pp(case, 0) == _left_of_pp(case, 1)
    ),
}
"""Words for a misunderstanding -> the answer that it gives in a case."""
