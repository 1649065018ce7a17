"""Wrong answers to the exercises of chapter 15, with what each believes and words of its score."""

from math import lcm

from labkit.check import score
from labkit.check.chapter_15 import _left_of_pp, _Order, _Place, _right, _sides

WORLDS = {
    # Does not fold: gives every axis ranks of its own, as if experts knew who holds which part of a sequence.
    "product": (lambda tp, cp, pp, etp, ep: tp * cp * ep * pp, "as without folding"),
    # Takes the larger of the two products, which is right only where the smaller one divides it.
    "larger": (lambda tp, cp, pp, etp, ep: pp * max(tp * cp, etp * ep), "has the larger product"),
    "all sizes": (lambda tp, cp, pp, etp, ep: tp * cp * pp * etp * ep * 1, "all sizes are multiplied"),
    # Folds the experts over the pipeline too, though a stage has experts of its own layers.
    "pipeline": (lambda tp, cp, pp, etp, ep: lcm(tp * cp * pp, etp * ep), "over the pipeline"),
    "one stage": (lambda tp, cp, pp, etp, ep: lcm(tp * cp, etp * ep), "this is one stage"),
    "experts": (lambda tp, cp, pp, etp, ep: pp * etp * ep, "these are the ranks of the experts"),
}


def place(**changed):
    """An answer to 15.place that is right but for the given parts: functions of (the right answer, the case)."""

    def answer(rank, world_size, num_experts, **sizes):
        case = _Place(rank, world_size, num_experts, sizes)
        right = dict(zip(("experts", "copies", "divisor"), _right(case)))
        return tuple({**right, **{part: change(right, case) for part, change in changed.items()}}.values())

    return answer


def _stage(case):
    size = case.ranks // case.sizes["pp"]
    start = case.rank // size * size
    return list(range(start, start + size))


def _ep_group(right, case):
    """Ranks of one block of etp x ep with the rank's digit of etp."""
    etp, block = case.sizes["etp"], case.sizes["etp"] * case.sizes["ep"]
    return [r for r in _stage(case) if r // block == case.rank // block and (r - case.rank) % etp == 0]


def _by_wrong_stride(right, case):
    etp, edp = case.sizes["etp"], len(right["copies"])
    start = case.rank // len(_stage(case)) * len(_stage(case))
    return [start + (case.rank - start) % (etp * edp) + i * etp * edp for i in range(edp)]


def _unfolded(rank, world_size, num_experts, *, tp, cp, pp, etp, ep):
    stage = world_size // pp
    start, inside = rank // stage * stage, rank % stage
    number = inside // (tp * cp) % ep
    copies = [start + other for other in range(stage) if other // (tp * cp) % ep == number]
    held = num_experts // ep
    return list(range(number * held, number * held + held)), copies, stage // tp


PLACES = {
    "all experts": (place(experts=lambda right, case: list(range(case.experts))), "these are all experts"),
    "dealt out": (
        place(
            experts=lambda right, case: list(
                range(right["experts"][0] // len(right["experts"]), case.experts, case.sizes["ep"])
            )
        ),
        "experts are dealt out in turn",
    ),
    "etp": (
        place(
            experts=lambda right, case: (lambda e, i: list(range(i * e, i * e + e)))(
                len(right["experts"]), case.rank % case.sizes["ep"]
            )
        ),
        "shards of the same expert",
    ),
    # Divides by the number of copies: a mean over edp, although the tokens came from every replica.
    "no etp": (place(divisor=lambda right, case: len(right["copies"])), "averaged over edp"),
    "8 times": (
        place(divisor=lambda right, case: len(right["copies"])),
        "got 1, which makes the gradient 8 times too large: averaged over edp",
    ),
    "tp counts": (
        place(divisor=lambda right, case: len(_stage(case))),
        "4 times too small: ranks of tp share one loss",
    ),
    "dp alone": (
        place(divisor=lambda right, case: right["divisor"] // case.sizes["cp"]),
        "ranks of cp have losses of their own",
    ),
    "the sum": (place(divisor=lambda right, case: 1), "the sum is not divided"),
    "ep": (place(divisor=lambda right, case: case.sizes["ep"]), "this counts the ranks of ep"),
    "world": (place(divisor=lambda right, case: case.ranks), "all ranks are counted"),
    "dense group": (
        place(copies=lambda right, case: [r for r in _stage(case) if (r - case.rank) % case.sizes["tp"] == 0]),
        "the group of attention's weights (dp x cp)",
    ),
    "stage": (
        place(copies=lambda right, case: _stage(case)),
        "mixes in the gradients of rank 0 that holds expert 0: this is the whole stage",
    ),
    "ep group": (place(copies=_ep_group), "these ranks exchange tokens (ep)"),
    # Takes steps of etp * edp from copy to copy, though the axes left of edp are etp and ep.
    "stride": (place(copies=_by_wrong_stride), "the stride of edp is etp ep"),
    # Does not fold: looks for the experts along dp, so that all ranks of tp and cp hold the same ones.
    "unfolded": (_unfolded, "without folding ep is a part of dp"),
    "alone": (place(copies=lambda right, case: [case.rank]), "which loses the gradients of rank 9"),
    "form": (lambda *ranks, **sizes: None, "return (experts, ranks, divisor)"),
}


def safe(rule):
    return lambda order, world, **sizes: rule(_Order(order, world, sizes))


SAFE = {
    "last": (
        safe(lambda case: case.order.endswith("pp")),
        "rejects a safe order: both numberings put every rank into the same pipeline: only orders that end",
    ),
    # Lets pp stand at either end alone: pp in the middle is taken for a mistake, whatever the sizes are.
    "ends": (safe(lambda case: "pp" in (case.order[:2], case.order[-2:])), "only orders with pp at an end pass"),
    # Asks for equal numbers of copies, dp and edp, which say nothing about the stride of pp.
    "copies": (safe(lambda case: _sides(case)[0]["dp"] == _sides(case)[1]["dp"]), "equal numbers of copies"),
    # Believes that one order string is one numbering, so that any order is safe.
    "any": (
        safe(lambda case: True),
        "True, and rank 1 would hold attention of stage 0 and experts of stage 1: every order passes",
    ),
    "one stage": (
        safe(lambda case: case.sizes["pp"] > 1 and _left_of_pp(case, 0) == _left_of_pp(case, 1)),
        "a layout with one stage",
    ),
    "none": (safe(lambda case: False), "rejects a safe order"),
    "form": (safe(lambda case: "yes"), "give True or False"),
    "raised": (safe(lambda case: case.sizes["dp"]), "KeyError: 'dp'"),
}

TABLES = {"15.world": WORLDS, "15.place": PLACES, "15.safe": SAFE}


def test_the_first_sentence_names_the_misunderstanding() -> None:
    for name, table in TABLES.items():
        for answer, words in table.values():
            assert words in repr(score(name, answer)).splitlines()[1]


def test_leave_and_refusal_are_told_apart_and_once() -> None:
    flipped = score(
        "15.safe", safe(lambda case: not (case.sizes["pp"] == 1 or _left_of_pp(case, 0) == _left_of_pp(case, 1)))
    )
    assert flipped.passed == 0
    assert repr(flipped).count("rejects a safe order") == 1 == repr(flipped).count("would hold attention of")
