"""Solutions of chapter 15, MoE folding."""

from math import lcm, prod

from labkit.check.solution_source import solves


@solves("15.world")
def smallest_world(tp, cp, pp, etp, ep):
    """A stage must be a whole number of attention's copies and of the experts' copies;
    there are pp of them."""
    return pp * lcm(tp * cp, etp * ep)


def held(number, num_experts, ep):
    each = num_experts // ep
    return list(range(number * each, (number + 1) * each))


@solves("15.place")
def expert_place(rank, world_size, num_experts, *, tp, cp, pp, etp, ep):
    """Inside its stage a rank is etp + etp size * (ep + ep size * edp); the divisor is
    that of the dense gradients."""
    stage = world_size // pp
    start, inside = rank // stage * stage, rank % stage
    copies = [start + other for other in range(inside % (etp * ep), stage, etp * ep)]
    return held(inside // etp % ep, num_experts, ep), copies, stage // tp


def strides_of_pp(order, world, tp, cp, pp, etp, ep):
    """In attention's numbering, and in the experts'."""
    stage = world // pp
    attention = {"tp": tp, "cp": cp, "ep": 1, "dp": stage // (tp * cp)}
    experts = {"tp": etp, "cp": 1, "ep": ep, "dp": stage // (etp * ep)}
    left = order.split("-")[: order.split("-").index("pp")]
    return [prod(sizes[axis] for axis in left) for sizes in (attention, experts)]


@solves("15.safe")
def safe(order, world, tp, cp, pp, etp, ep):
    """Equal strides of pp give equal pipelines; one stage is one pipeline per rank."""
    attention, experts = strides_of_pp(order, world, tp, cp, pp, etp, ep)
    return pp == 1 or attention == experts
