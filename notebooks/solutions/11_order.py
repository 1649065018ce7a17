"""Chapter 11, exercise `11.order`: order(pp, vpp, microbatches, group_size, rank) -> the signed order of one rank."""


def _chunks(vpp: int, microbatches: int, group_size: int) -> list[int]:
    """Chunk of each forward: a group of microbatches through one chunk after the other, then the next group."""
    starts = range(0, microbatches, group_size)
    return [chunk for start in starts for chunk in range(vpp) for _ in range(min(group_size, microbatches - start))]


def _ordered(chunks: list[int], backwards: list[int], warmup: int) -> list[int]:
    forwards = [chunk + 1 for chunk in chunks]
    warmup = min(warmup, len(forwards))
    pairs = [signed for pair in zip(forwards[warmup:], backwards) for signed in pair]
    return forwards[:warmup] + pairs + backwards[len(forwards) - warmup :]


def solution(pp: int, vpp: int, microbatches: int, group_size: int, rank: int) -> list[int]:
    """The table, backwards with chunks counted from the other end, and a warm-up that leaves messages time."""
    chunks = _chunks(vpp, microbatches, group_size)
    return _ordered(chunks, [chunk - vpp for chunk in chunks], 2 * (pp - rank - 1) + (vpp - 1) * group_size)


def wrong_1(pp: int, vpp: int, microbatches: int, group_size: int, rank: int) -> list[int]:
    """Takes 1F1B's warm-up of p - r - 1 without the factor 2: it runs, but no message has any time."""
    chunks = _chunks(vpp, microbatches, group_size)
    return _ordered(chunks, [chunk - vpp for chunk in chunks], pp - rank - 1 + (vpp - 1) * group_size)


def wrong_2(pp: int, vpp: int, microbatches: int, group_size: int, rank: int) -> list[int]:
    """Believes that backwards visit the chunks in the order of the forwards: gradients come from the last one first."""
    chunks = _chunks(vpp, microbatches, group_size)
    return _ordered(chunks, [-chunk - 1 for chunk in chunks], 2 * (pp - rank - 1) + (vpp - 1) * group_size)


def wrong_3(pp: int, vpp: int, microbatches: int, group_size: int, rank: int) -> list[int]:
    """Takes all microbatches through a chunk before the next one, whatever the group size says."""
    chunks = _chunks(vpp, microbatches, microbatches)
    return _ordered(chunks, [chunk - vpp for chunk in chunks], 2 * (pp - rank - 1) + (vpp - 1) * group_size)
