"""Schedules broken at random, and a judge of what can run that knows of labkit only how actions are written.

The judge passes tokens: an action takes what it needs from what exists, and adds what it makes. A schedule can run if
every row comes to its end, nothing is left over, and each stage's weights have had every microbatch once.
"""

import random
import re

from labkit.schedules import (
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    split_backward,
    without_backward,
    zbv,
    zero_bubble_h1,
)

BASES = {
    "gpipe": lambda: [gpipe(pp, m) for pp, m in ((1, 2), (2, 3), (3, 2), (4, 4))],
    "1f1b": lambda: [one_f_one_b(pp, m) for pp, m in ((2, 1), (2, 4), (3, 5), (4, 6))],
    "interleaved": lambda: [interleaved(2, 2, 4), interleaved(2, 3, 2), interleaved(4, 2, 4), interleaved(2, 2, 5, 3)],
    "zero_bubble_h1": lambda: [zero_bubble_h1(pp, m) for pp, m in ((2, 3), (3, 4), (4, 5))],
    "zbv": lambda: [zbv(pp, m) for pp, m in ((2, 4), (3, 6), (4, 8))],
    "dualpipe_v": lambda: [dualpipe_v(pp, m) for pp, m in ((2, 4), (3, 6), (4, 8))],
    "forward_only": lambda: [without_backward(schedule) for schedule in (one_f_one_b(3, 4), interleaved(2, 2, 4))],
    "gpipe_split": lambda: [split_backward(gpipe(pp, m), weight="after") for pp, m in ((2, 3), (3, 2), (4, 4))],
}
GENTLE_BASES = ("gpipe", "gpipe_split", "forward_only")
"""What runs where sends are waited for; most others do not, broken or whole."""


def swap(rng, rows):
    """Two cells of a row."""
    if all(len(row) < 2 for row in rows):
        return  # earlier mutations have left nothing to swap
    row = rng.choice([row for row in rows if len(row) > 1])
    i, j = rng.sample(range(len(row)), 2)
    row[i], row[j] = row[j], row[i]


def swap_neighbours(rng, rows):
    """A cell and the next one."""
    if all(len(row) < 2 for row in rows):
        return  # earlier mutations have left nothing to swap
    row = rng.choice([row for row in rows if len(row) > 1])
    i = rng.randrange(len(row) - 1)
    row[i], row[i + 1] = row[i + 1], row[i]


def drop(rng, rows):
    """A cell is lost."""
    row = rng.choice([row for row in rows if row])
    del row[rng.randrange(len(row))]


def duplicate(rng, rows):
    """A cell is there twice, anywhere."""
    cell, row = rng.choice(rng.choice([row for row in rows if row])), rng.choice(rows)
    row.insert(rng.randint(0, len(row)), cell)


def move(rng, rows):
    """A cell goes to another place of its row."""
    row = rng.choice([row for row in rows if len(row) > 1])
    cell = row.pop(rng.randrange(len(row)))
    row.insert(rng.randint(0, len(row)), cell)


def move_across(rng, rows):
    """A cell goes to another rank."""
    source = rng.choice([row for row in rows if row])
    cell = source.pop(rng.randrange(len(source)))
    target = rng.choice(rows)
    target.insert(rng.randint(0, len(target)), cell)


def swap_microbatches(rng, rows):
    """Two microbatches go forward in each other's place, or backward, on all ranks."""
    kinds = rng.choice(("F", "BIW"))
    numbers = sorted({m for row in rows for _, _, m in map(parse, row)})
    renamed = dict(zip(pair := rng.sample(numbers, min(2, len(numbers))), reversed(pair)))
    for row in rows:
        row[:] = [f"{s}{k}{renamed.get(m, m) if k in kinds else m}" for s, k, m in map(parse, row)]


MUTATIONS = (swap, drop, duplicate, move, move_across)
GENTLE_MUTATIONS = (swap_neighbours, swap_microbatches)
"""After one of these, many schedules can still run."""


def broken_schedule(seed):
    """(what was done to what, rows of cells, stages, microbatches): one to three mutations of a builder's schedule.

    Of four schedules one is of the gentle bases, gently mutated, so that the judges have to say yes as well as no.
    """
    rng = random.Random(seed)
    gentle = rng.random() < 0.25
    base = rng.choice(BASES[rng.choice(sorted(GENTLE_BASES if gentle else BASES))]())
    rows = [[str(action) for action in base.actions(rank)] for rank in range(base.pp)]
    choice = GENTLE_MUTATIONS if gentle else MUTATIONS if rng.random() < 0.8 else (swap_neighbours,)
    done = [rng.choice(choice) for _ in range(rng.choice((1, 1, 2, 3)))]
    for mutation in done:
        mutation(rng, rows)
    story = f"seed {seed}: {base.name} on {base.pp} ranks, " + ", ".join(mutation.__name__ for mutation in done)
    return story, rows, base.num_stages, base.num_microbatches


def parse(cell):
    """(stage, kind, microbatch)."""
    stage, kind, microbatch = re.fullmatch(r"(\d+)([A-Z])(\d+)", cell).groups()
    return int(stage), kind, int(microbatch)


class Rank:
    """What one rank holds: activations, gradients that wait for their weight half, and what its weights have had."""

    def __init__(self, stages, backward):
        self.stages, self.backward = stages, backward
        self.activations, self.halves, self.weights = set(), set(), []
        self.weights_of = set()

    def run(self, cell, arrived):
        """Run `cell`; `arrived(name)` takes a message from the neighbouring stage. Returns (stage that needs it, name)
        of what it makes for another stage, or None. Raises LookupError where something is not there."""
        stage, kind, m = parse(cell)
        self.weights_of.add(stage)
        key = (stage, m)
        if kind == "F":
            if key in self.activations or key in self.halves or key in self.weights:
                raise LookupError(f"{cell}: its place is taken")
            if stage > 0:
                arrived(f"a{stage}.{m}")
            if self.backward:
                self.activations.add(key)
            else:
                self.weights.append(key)  # nothing but a note that it ran
            return (stage + 1, f"a{stage + 1}.{m}") if stage + 1 < self.stages else None
        if kind == "W":
            self.halves.remove(key)
            self.weights.append(key)
            return None
        if key not in self.activations:
            raise LookupError(f"{cell}: no activation")
        if stage + 1 < self.stages:
            arrived(f"g{stage}.{m}")
        self.activations.remove(key)
        if kind == "I":
            self.halves.add(key)
        else:
            self.weights.append(key)
        return (stage - 1, f"g{stage - 1}.{m}") if stage > 0 else None

    @property
    def left_over(self):
        return bool(self.activations or self.halves)


def all_there(ranks, stages, microbatches):
    """Each stage's weights on one rank, and every microbatch through them once; nothing half done."""
    homes = sorted(stage for rank in ranks for stage in rank.weights_of)
    had = sorted(key for rank in ranks for key in rank.weights)
    wanted = [(stage, m) for stage in range(stages) for m in range(microbatches)]
    return homes == list(range(stages)) and had == wanted and not any(rank.left_over for rank in ranks)


def has_backward(rows):
    return any(parse(cell)[1] != "F" for row in rows for cell in row)


def can_run(rows, stages, microbatches):
    """Where sends are never waited for: the data alone decides."""
    if not all(rows):
        return False
    ranks = [Rank(stages, has_backward(rows)) for _ in rows]
    sent = []
    heads = [0] * len(rows)

    def arrived(name):
        if name not in sent:
            raise BlockingIOError(name)
        sent.remove(name)

    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while heads[r] < len(row):
                try:
                    made = ranks[r].run(row[heads[r]], arrived)
                except (LookupError, BlockingIOError):
                    break
                if made is not None:
                    sent.append(made[1])
                heads[r] += 1
                moved = True
    return heads == [len(row) for row in rows] and not sent and all_there(ranks, stages, microbatches)


def can_run_blocking(rows, stages, microbatches):
    """Where every transfer between two ranks is waited for on its own, and completes when both have come to it."""
    if not can_run(rows, stages, microbatches):
        return False
    home = {parse(cell)[0]: r for r, row in enumerate(rows) for cell in row}
    kinds = {"F": 1, "B": -1, "I": -1}
    programs = []
    for r, row in enumerate(rows):
        program = []
        for stage, kind, m in map(parse, row):
            step = kinds.get(kind)
            if step is None or (step == -1 and not has_backward(rows)):
                continue
            source, target = home.get(stage - step), home.get(stage + step)
            if source not in (None, r):
                program.append((source, "recv", stage, step, m))
            if target not in (None, r):
                program.append((target, "send", stage + step, step, m))
        programs.append(program)
    moved = True
    while moved:
        moved = False
        for r, program in enumerate(programs):
            if program and (peer := programs[program[0][0]]):
                (other, mine, *what), (back, theirs, *wanted) = program[0], peer[0]
                if back == r and {mine, theirs} == {"send", "recv"}:
                    if what != wanted:
                        return False  # messages have no names: this one would be taken for another
                    program.pop(0)
                    programs[other].pop(0)
                    moved = True
    return not any(programs)
