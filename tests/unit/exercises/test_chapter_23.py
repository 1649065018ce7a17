"""Wrong answers to the exercises of chapter 23, with what each believes and words of its score."""

from labkit.check import score

# ---- 23.save ----


def saving(*, hidden=True, files=True, folder=True, name=True, every=1, early=False):
    """An answer to 23.save; the arguments leave steps out."""

    def save(disk, step, data):
        at = f".{step}" if hidden else step
        disk.make(at)
        if early:
            disk.rename(at, step)
            at = step
        for file, bytes_ in data.items():
            disk.write(f"{at}/{file}", bytes_)
            for _ in range(every if files else 0):
                disk.sync(f"{at}/{file}")
        if folder:
            disk.sync(at)
        if hidden and not early:
            disk.rename(at, step)
        if name:
            disk.sync(".")

    return save


SAVES = {
    "in place": (saving(hidden=False), "under a name that no restart looks at"),
    # Renames first, so that it need not think of it later.
    "early": (saving(early=True), "has its name before it has its files"),
    "no sync": (saving(files=False), "sync each file before the rename"),
    "no folder": (saving(folder=False), "a folder is synced as well"),
    "no name": (saving(name=False), "the rename itself is lost"),
    "twice": (saving(every=2), "a sync waits for the disk"),
    "nothing": (lambda disk, name, files: None, "under the name that it's given"),
}

# ---- 23.reads ----


def overlaps(stored, offset, shape, least=1):
    for key, at, size in stored:
        first = tuple(map(max, at, offset))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(at, size, offset, shape))
        if all(end - start >= least for end, start in zip(ends, first)):
            yield key, at, first, ends


def minus(a, b):
    return tuple(x - y for x, y in zip(a, b))


def reading(make, least=1):
    """An answer to 23.reads from (stored offset, own offset, first element, end of the overlap) -> three tuples."""

    def reads(stored, offset, shape):
        return [(key, *make(at, offset, a, b)) for key, at, a, b in overlaps(stored, offset, shape, least)]

    return reads


right = reading(lambda at, mine, first, ends: (minus(first, at), minus(first, mine), minus(ends, first)))
READS = {
    "whole boxes": (
        lambda stored, offset, shape: [(key, (0,) * len(shape), (0,) * len(shape), shape) for key, _, _ in stored],
        "as if it held all of my box",
    ),
    # Forgets that a file holds a box, not the whole tensor: its first element is not element 0.
    "stored offset": (
        reading(lambda at, mine, first, ends: (first, minus(first, mine), minus(ends, first))),
        "subtract the stored box's offset",
    ),
    "own offset": (
        reading(lambda at, mine, first, ends: (minus(first, at), first, minus(ends, first))),
        "subtract my offset",
    ),
    "both offsets": (reading(lambda at, mine, first, ends: (first, first, minus(ends, first))), "from each the offset"),
    # Gives columns before rows, as a picture's x and y, where a tensor's shape begins with its rows.
    "reversed": (
        lambda *case: [(key, *(part[::-1] for part in parts)) for key, *parts in right(*case)],
        "dimensions are in reverse order",
    ),
    # Reads boxes that only touch its own: an overlap of no element is none.
    "touching": (
        reading(lambda at, mine, first, ends: (minus(first, at), minus(first, mine), minus(ends, first)), least=0),
        "boxes that only touch mine",
    ),
    "ends": (
        reading(lambda at, mine, first, ends: (minus(first, at), minus(first, mine), ends)),
        "where the overlap ends",
    ),
}

# ---- 23.next ----


def next_of(first=lambda consumed, batch: consumed, dp_of=lambda dp: dp, rank_of=lambda rank: rank):
    def next_samples(consumed, batch, micro, dp, rank):
        begin, count = first(consumed, batch), batch // micro // dp_of(dp)
        starts = [begin + (j * dp_of(dp) + rank_of(rank)) * micro for j in range(count)]
        return [list(range(start, start + micro)) for start in starts]

    return next_samples


def runs_of_ranks(consumed, batch, micro, dp, rank):
    start, count = consumed + rank * batch // dp, batch // dp // micro
    return [[start + j * micro + b for b in range(micro)] for j in range(count)]


def one_by_one(consumed, batch, micro, dp, rank):
    own = list(range(consumed + rank, consumed + batch, dp))
    return [own[at : at + micro] for at in range(0, len(own), micro)]


NEXT = {
    "from 0": (next_of(first=lambda consumed, batch: 0), "begins with sample 0 again"),
    "steps": (next_of(first=lambda consumed, batch: consumed // batch), "counts steps instead of samples"),
    "the same": (next_of(dp_of=lambda dp: 1, rank_of=lambda rank: 0), "every replica reads the same"),
    "runs": (runs_of_ranks, "its own run of samples"),
    "one by one": (one_by_one, "dealt out one by one"),
    "one list": (lambda *case: [each for row in next_of()(*case) for each in row], "give one for each microbatch"),
}

TABLES = {"23.save": SAVES, "23.reads": READS, "23.next": NEXT}
RIGHT = {"23.save": saving(), "23.reads": right, "23.next": next_of()}


def test_reads_may_come_in_any_order_from_a_generator():
    assert score("23.reads", lambda *case: reversed(right(*case))).ok


def test_an_answer_that_reads_an_element_twice_is_told_so():
    twice = score("23.reads", lambda *case: [*right(*case), *right(*case)])
    assert twice.passed == 0 and twice.outcomes[-1].got.endswith("read 2 times")
    assert score("23.reads", lambda *case: []).outcomes[-1].got.endswith("read never")


def test_the_samples_are_those_that_labkit_reads():
    from labkit.check.chapter_23 import _RESUMES, _rows
    from labkit.config import presets
    from labkit.data.batches import microbatch_positions

    for consumed, batch, micro, dp, rank in _RESUMES:
        config = presets.tiny().override({"global_batch_size": batch, "micro_batch_size": micro})
        read = consumed + microbatch_positions(config, dp=dp, dp_rank=rank, step=0)
        assert _rows(consumed, batch, micro, dp, rank) == read.tolist()


def test_a_name_is_on_the_disk_only_after_a_sync_of_its_folder():
    from labkit.check.stopping_disk import Disk

    disk = Disk()
    disk.make("a")
    disk.write("a/x", b"1234")
    assert disk.after_kill() == {"a": {"x": b"1234"}} and disk.names_first() == {"a": {"x": b""}}
    disk.sync("a/x")
    disk.sync(".")
    assert disk.synced_only() == {"a": {}}
    disk.sync("a")
    assert disk.synced_only() == {"a": {"x": b"1234"}}
