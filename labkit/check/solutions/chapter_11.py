"""Solutions of chapter 11, Interleaving and order tables."""

from collections import Counter

from labkit.check.solution_source import solves


@solves("11.two")
def two():
    """Both microbatches pass chunk 0 first: then the first one is back, and nobody has waited."""
    return [[1, 1, 2, 2, -2, -2, -1, -1], [1, 1, 2, -2, 2, -2, -1, -1]]


def _chunks(vpp, groups):
    """Chunk of each forward: a group through one chunk after the other, then the next."""
    return [chunk for size in groups for chunk in range(vpp) for _ in range(size)]


def _ordered(forwards, backwards, warmup):
    warmup = min(warmup, len(forwards))
    pairs = [signed for pair in zip(forwards[warmup:], backwards) for signed in pair]
    return forwards[:warmup] + pairs + backwards[len(forwards) - warmup :]


@solves("11.order")
def order(pp, vpp, groups, rank):
    """On the last rank, a backward waits until its group has passed all chunks: the largest
    group decides. Each earlier rank takes two forwards more, which leaves messages time."""
    chunks = _chunks(vpp, groups)
    warmup = 2 * (pp - rank - 1) + (vpp - 1) * max(groups)
    return _ordered([c + 1 for c in chunks], [c - vpp for c in chunks], warmup)


@solves("11.early")
def too_early(order, vpp):
    """Forwards go up the chunks, backwards down, and the last chunk turns round."""
    count = Counter()
    for position, signed in enumerate(order):
        count[signed] += 1
        needed = vpp if signed == -vpp else signed - 1
        if needed and count[signed] > count[needed]:
            return position
    return None
