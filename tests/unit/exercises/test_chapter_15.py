"""Wrong answers to the exercises of chapter 15, with what each believes and words of its score."""

import pytest

from labkit.check import chapter_15, score
from labkit.check.solutions.chapter_15 import expert_digits
from labkit.config import presets
from labkit.plan.layouts import parse_words
from labkit.plan.machine import load_machine
from labkit.plan.search import Search
from labkit.plan.workload import Workload


def places(rule):
    """An answer to 15.digits by a rule of (place in the stage, ranks of a stage, all sizes)."""

    def answer(rank, world, **sizes):
        stage = world // sizes["pp"]
        return {"pp": rank // stage, **rule(rank % stage, stage, **sizes)}

    return answer


def cut(inside, *axes):
    """Digits of a place by (axis, size), with the fastest axis first."""
    found = {}
    for axis, size in axes:
        inside, found[axis] = divmod(inside, size)
    return found


DIGITS = {
    "in dp": (
        places(
            lambda i, n, tp, cp, pp, etp, ep: {
                "etp": i % tp, "ep": i // (tp * cp) % ep, "edp": i // tp % cp + cp * (i // (tp * cp) // ep),
            }
        ),
        "ep is still a part of dp, so all ranks of a cp group hold the same experts",
    ),
    # Lets the ranks that hold different experts be the nearest, though shards of one expert should be.
    "ep fastest": (
        places(lambda i, n, tp, cp, pp, etp, ep: cut(i, ("ep", ep), ("etp", etp), ("edp", n // (etp * ep)))),
        "etp is the fastest axis of the experts",
    ),
    # Reads the order string with dp before ep, so that copies are neighbours.
    "copies first": (
        places(lambda i, n, tp, cp, pp, etp, ep: cut(i, ("etp", etp), ("edp", n // (etp * ep)), ("ep", ep))),
        "copies are neighbours here",
    ),
    # Takes attention's copies for those of the experts.
    "dp": (
        places(
            lambda i, n, tp, cp, pp, etp, ep: {
                "etp": i % etp, "ep": i // etp % ep, "edp": i // (tp * cp) % (n // (tp * cp)),
            }
        ),
        "edp is not dp: it is what etp and ep leave of the stage",
    ),
    "all stages": (
        lambda rank, world, tp, cp, pp, etp, ep: {
            "etp": rank % etp, "ep": rank // etp % ep, "edp": rank // (etp * ep), "pp": rank // (world // pp),
        },
        "the ranks of all stages are numbered together",
    ),
    "tp": (
        places(
            lambda i, n, tp, cp, pp, etp, ep: cut(i, ("etp", tp), ("ep", ep), ("edp", max(1, n // (tp * ep))))
        ),
        "the experts' tp is etp",
    ),
    "nothing": (lambda rank, world, **sizes: None, "got [None, None]"),
}  # fmt: skip


def finishing(of_experts, of_dense=None):
    """An answer to 15.finish: the gradient of experts by a rule of (gradient, groups, all_reduce)."""

    def answer(dense, expert, g, add):
        dense = of_dense(dense, g, add) if of_dense else add(dense, g.dp_cp) / g.dp_cp.size
        return dense, of_experts(expert, g, add)

    return answer


FINISH = {
    # Averages over the copies, though each copy has already seen the losses of all ranks of ep.
    "copies": (
        finishing(lambda x, g, add: add(x, g.edp) / g.edp.size),
        "this is the mean over the copies of the expert",
    ),
    "sum": (finishing(lambda x, g, add: add(x, g.edp)), "the sum is not divided"),
    # Treats experts as dense weights: what other ranks of the group hold are other experts.
    "dense": (finishing(lambda x, g, add: add(x, g.dp_cp) / g.dp_cp.size), "adds up gradients of different experts"),
    "alone": (finishing(lambda x, g, add: x / g.dp_cp.size), "nobody has added up the copies"),
    "own": (finishing(lambda x, g, add: x), "each rank keeps what its own backward gave"),
    "ep": (finishing(lambda x, g, add: add(x, g.ep) / g.dp_cp.size), "ranks of ep hold different experts"),
    "dense too": (
        finishing(lambda x, g, add: add(x, g.edp) / g.dp_cp.size, lambda x, g, add: add(x, g.dp) / g.dp.size),
        "dense weights have copies on all ranks of dp and cp",
    ),
    # Counts the ranks of tp, which share one loss.
    "stage": (
        finishing(lambda x, g, add: add(x, g.edp) / (g.edp.size * g.ep.size)),
        "ranks of tp share one loss",
    ),
    "shape": (finishing(lambda x, g, add: x[:1]), "keep the shape [3]"),
    "error": (finishing(lambda x, g, add: x / g.world.size), "AttributeError"),
}


def sizes(tp=1, cp=1, pp=1, ep=1, etp=1):
    return lambda: {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}


LAYOUTS = {
    "form": (lambda: {"tp": 2}, 0, "give a dict with tp, cp, pp, ep, etp"),
    "numbers": (sizes(tp=0), 0, "sizes are whole numbers from 1 on"),
    # Multiplies cp and ep, as if the experts were cut out of what attention leaves.
    "three": (sizes(tp=3), 0, "tp cp pp is 3, which does not divide 8"),
    "sixteen": (sizes(cp=2, ep=16), 0, "etp ep is 16, which does not divide the 8 ranks of a stage"),
    "stages": (sizes(pp=8), 0, "28 layers cannot be shared evenly"),
    "cp": (sizes(cp=8), 1, "each rank holds all experts"),
    "ep": (sizes(ep=8), 1, "activations of long sequences, which tp and cp cut"),
    "tp": (sizes(tp=8, etp=8), 2, "etp cuts each expert's matrices"),
    "chapter": (sizes(cp=8, ep=8), 3, "activations are cut finer than memory asks for"),
    "sums": (sizes(tp=4, ep=8), 3, "another way to cut activations as far waits less"),
    # Cuts as far as the best layout, by the axis that waits less, but cp leaves the dense weights whole.
    "no tp": (sizes(cp=4, ep=8), 1, "weights or activations have to be cut once more"),
}


TABLES = {
    "15.digits": DIGITS,
    "15.finish": FINISH,
    "15.layout": {name: (answer, words) for name, (answer, _, words) in LAYOUTS.items()},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_stands_on_its_rung_and_hears_what_costs_most(name: str) -> None:
    answer, rung, words = LAYOUTS[name]
    found = score("15.layout", answer)
    assert found.passed == rung and words in " ".join(repr(found).split())


def test_the_rungs_are_what_the_search_finds() -> None:
    """Also that nothing with cp 8 fits without folding, even if it recomputes."""
    machine = load_machine("h100")
    run = {"model.seq_length": chapter_15.TOKENS, "train.global_batch_size": chapter_15.SAMPLES}
    config = presets.get("deepseek_moe_16b").override(run)
    base = Workload(config, chapter_15.GPUS, software=machine.default_software)
    search = Search(base, machine, fixed=parse_words("micro_batch=1"))
    rows = search.rows
    unfolded = (rows["dp"] % rows["ep"] == 0) & (rows["etp"] == rows["tp"])
    (best,) = search.best(1, unfolded)
    assert best.prediction.seconds == pytest.approx(chapter_15.UNFOLDED, abs=0.005) and best.row["recompute"]
    assert not search.best(1, unfolded & (rows["cp"] == 8))
    fastest = search.best(1, (rows["recompute"] == 0) & (rows["vpp"] == 1))[0].prediction.seconds
    assert fastest == pytest.approx(chapter_15.BEST, abs=0.005)
    assert search.best(1)[0].prediction.seconds > chapter_15.BEST - 0.05
    assert search.available / 1e9 == pytest.approx(chapter_15.predicted(sizes(cp=8, ep=8)()).available)


def test_the_drawing_shows_the_answer_above_the_right_numbering() -> None:
    figure = chapter_15.draw_digits(DIGITS["copies first"][0])
    assert figure.sentence == (
        "your numbering: cp [0, 1] [2, 3] [4, 5] [6, 7], ep [0, 2, 4, 6] [1, 3, 5, 7]; "
        "cp 2, ep 4, as it should be: cp [0, 1] [2, 3] [4, 5] [6, 7], ep [0, 1, 2, 3] [4, 5, 6, 7]."
    )
    assert chapter_15.draw_digits(lambda *rank, **sizes: {"ep": 0}) is None
    assert expert_digits(5, 8, 1, 2, 1, 1, 4) == {"etp": 0, "ep": 1, "edp": 1, "pp": 0}
