"""Chapter 15, exercise `15.place`: which experts a rank holds, who holds the same, and the divisor of their sum."""


def wrong_1(rank, world_size, num_experts, *, tp, cp, pp, etp, ep):
    """Divides by the number of copies: a mean over edp, although the tokens came from every replica."""
    experts, copies, _ = solution(rank, world_size, num_experts, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
    return experts, copies, len(copies)


def wrong_2(rank, world_size, num_experts, *, tp, cp, pp, etp, ep):
    """Takes steps of etp * edp from copy to copy, though the axes left of edp are etp and ep."""
    experts, _, divisor = solution(rank, world_size, num_experts, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
    stage = world_size // pp
    edp = stage // (etp * ep)
    start, inside = rank // stage * stage, rank % stage
    return experts, [start + inside % (etp * edp) + i * etp * edp for i in range(edp)], divisor


def wrong_3(rank, world_size, num_experts, *, tp, cp, pp, etp, ep):
    """Does not fold: looks for the experts along dp, so that all ranks of tp and cp hold the same ones."""
    stage = world_size // pp
    start, inside = rank // stage * stage, rank % stage
    number = inside // (tp * cp) % ep
    copies = [start + other for other in range(stage) if other // (tp * cp) % ep == number]
    return held(number, num_experts, ep), copies, stage // tp
