"""Solutions of chapter 23, checkpoints that survive."""

from labkit.check.solution_source import solves


@solves("23.save")
def save(disk, name, files):
    """Bytes, then the names of files, then the name of the checkpoint, each on the disk
    before the next."""
    hidden = f".{name}"
    disk.make(hidden)
    for file, data in files.items():
        disk.write(f"{hidden}/{file}", data)
        disk.sync(f"{hidden}/{file}")
    disk.sync(hidden)
    disk.rename(hidden, name)
    disk.sync(".")


def _overlaps(stored, offset, shape):
    """(key, stored offset, first element of the overlap, its shape) of each stored box
    that has such an element."""
    found = []
    for key, at, size in stored:
        first = tuple(map(max, at, offset))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(at, size, offset, shape))
        common = tuple(end - start for end, start in zip(ends, first))
        if all(length > 0 for length in common):
            found.append((key, at, first, common))
    return found


def _minus(a, b):
    return tuple(x - y for x, y in zip(a, b))


@solves("23.reads")
def reads(stored, offset, shape):
    """Overlap of each pair of boxes, counted inside both of them."""
    overlaps = _overlaps(stored, offset, shape)
    return [(key, _minus(first, at), _minus(first, offset), size) for key, at, first, size in overlaps]


@solves("23.next")
def next_samples(consumed, batch, micro, dp, rank):
    """Microbatch j of the rank is microbatch j dp + rank of the global batch."""
    count = batch // (micro * dp)
    starts = [consumed + (j * dp + rank) * micro for j in range(count)]
    return [list(range(start, start + micro)) for start in starts]
