"""Chapter 10, exercise `10.one_f_one_b`: row(pp, rank, microbatches) -> the actions of one rank under 1F1B."""


def _row(rank: int, warmup: int, microbatches: int) -> list[str]:
    pairs = [f"{rank}{kind}{m}" for i in range(microbatches - warmup) for kind, m in (("F", warmup + i), ("B", i))]
    first = [f"{rank}F{m}" for m in range(warmup)]
    return first + pairs + [f"{rank}B{m}" for m in range(microbatches - warmup, microbatches)]


def solution(pp: int, rank: int, microbatches: int) -> list[str]:
    """Warm up with as many forwards as there are stages behind, or all there are; then pairs; then what is left."""
    return _row(rank, min(pp - rank - 1, microbatches), microbatches)


def wrong_1(pp: int, rank: int, microbatches: int) -> list[str]:
    """Believes that ranks further down the pipeline warm up longer, because they start later."""
    return _row(rank, min(rank, microbatches), microbatches)


def wrong_2(pp: int, rank: int, microbatches: int) -> list[str]:
    """Forgets that there may be fewer microbatches than stages behind a rank."""
    return _row(rank, pp - rank - 1, microbatches)


def wrong_3(pp: int, rank: int, microbatches: int) -> list[str]:
    """Runs all forwards before the first backward: that is GPipe, with its memory."""
    return _row(rank, microbatches, microbatches)
