"""Solutions of chapter 15, MoE folding."""

from labkit.check.solution_source import solves


@solves("15.digits")
def expert_digits(rank, world, tp, cp, pp, etp, ep):
    """tp and cp say nothing about the experts: inside its stage a rank is etp + etp size * (ep + ep size * edp)."""
    stage = world // pp
    inside = rank % stage
    return {
        "etp": inside % etp,
        "ep": inside // etp % ep,
        "edp": inside // (etp * ep),
        "pp": rank // stage,
    }


@solves("15.finish")
def finish(dense, expert, g, all_reduce):
    """Every loss of dp x cp is in both sums once, so both are divided by their number."""
    losses = g.dp_cp.size
    return all_reduce(dense, g.dp_cp) / losses, all_reduce(expert, g.edp) / losses


@solves("15.layout")
def layout():
    """Experts over all eight GPUs. cp 4 waits less, but does not fit by 2 GB; tp 2 cuts the dense weights as well."""
    return {"tp": 2, "cp": 2, "pp": 1, "ep": 8, "etp": 1}
