"""Chapter 15, exercise `15.place`: which experts a rank holds, who holds the same, and the divisor of their sum."""

Place = tuple[list[int], list[int], int]


def _held(number: int, num_experts: int, ep: int) -> list[int]:
    each = num_experts // ep
    return list(range(number * each, (number + 1) * each))


def solution(rank: int, world_size: int, num_experts: int, *, tp: int, cp: int, pp: int, etp: int, ep: int) -> Place:
    """Inside its stage a rank is etp + etp size * (ep + ep size * edp); the divisor is that of the dense gradients."""
    stage = world_size // pp
    start, inside = rank // stage * stage, rank % stage
    copies = [start + other for other in range(inside % (etp * ep), stage, etp * ep)]
    return _held(inside // etp % ep, num_experts, ep), copies, stage // tp


def wrong_1(rank: int, world_size: int, num_experts: int, *, tp: int, cp: int, pp: int, etp: int, ep: int) -> Place:
    """Divides by the number of copies: a mean over edp, although the tokens came from every replica."""
    experts, copies, _ = solution(rank, world_size, num_experts, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
    return experts, copies, len(copies)


def wrong_2(rank: int, world_size: int, num_experts: int, *, tp: int, cp: int, pp: int, etp: int, ep: int) -> Place:
    """Takes steps of etp * edp from copy to copy, though the axes left of edp are etp and ep."""
    experts, _, divisor = solution(rank, world_size, num_experts, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)
    stage = world_size // pp
    edp = stage // (etp * ep)
    start, inside = rank // stage * stage, rank % stage
    return experts, [start + inside % (etp * edp) + i * etp * edp for i in range(edp)], divisor


def wrong_3(rank: int, world_size: int, num_experts: int, *, tp: int, cp: int, pp: int, etp: int, ep: int) -> Place:
    """Does not fold: looks for the experts along dp, so that all ranks of tp and cp hold the same ones."""
    stage = world_size // pp
    start, inside = rank // stage * stage, rank % stage
    number = inside // (tp * cp) % ep
    copies = [start + other for other in range(stage) if other // (tp * cp) % ep == number]
    return _held(number, num_experts, ep), copies, stage // tp
