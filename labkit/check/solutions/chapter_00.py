"""Solutions of chapter 00, Tour of the workbench."""

from labkit.check.solution_source import solves


@solves("00.same")
def first_apart(losses, reference, tolerance):
    gaps = (abs(a - b) / abs(b) for a, b in zip(losses, reference))
    return next((step for step, gap in enumerate(gaps) if gap > tolerance), None)


@solves("00.idle")
def idle_share(rows):
    busy = sum(end - start for row in rows for start, end in row)
    step = max(row[-1][1] for row in rows) - min(row[0][0] for row in rows)
    return 1 - busy / (len(rows) * step)


@solves("00.tour")
def layouts(ranks, layers, heads, batch):
    found = set()
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks // tp + 1):
            dp, rest = divmod(ranks, tp * pp)
            if not (rest or heads % tp or layers % pp or batch % dp):
                found.add((tp, pp, dp))
    return found
