"""Random schedules that can run: any placement, full or split backwards, rows in any order the dependencies allow.

The order comes from a random walk: whatever could run next on any rank is drawn from, until all has run. That proves
that it can run, without labkit's own notion of dependencies.
"""

import random

from labkit.schedules import Action, Schedule

PLACEMENTS = ("looped", "v", "any")


def random_placement(rng, pp, kind):
    """Rank of each stage."""
    if kind == "v":
        return [*range(pp), *reversed(range(pp))]
    if kind == "looped":
        return [*range(pp)] * rng.randint(1, 3)
    extra = [rng.randrange(pp) for _ in range(rng.randint(0, pp + 2))]
    placement = [*range(pp), *extra]
    rng.shuffle(placement)
    return placement


def random_legal_schedule(seed, pp=None, microbatches=None, placement=None, forward_only=False):
    """A schedule drawn by `seed`; what is not given is drawn, too. `forward_only` leaves out the backwards."""
    rng = random.Random(seed)
    pp = pp or rng.randint(1, 5)
    microbatches = microbatches or rng.randint(1, 6)
    home = random_placement(rng, pp, placement or rng.choice(PLACEMENTS))
    split = rng.choice([0.0, 0.5, 1.0])
    eager = rng.random()  # how much a rank prefers backwards: 0 is GPipe-like, 1 near 1F1B
    stages = len(home)
    kinds = {
        (s, m): "" if forward_only else "IW" if rng.random() < split else "B"
        for s in range(stages)
        for m in range(microbatches)
    }
    rows = [[] for _ in range(pp)]
    ready = [Action(0, "F", m) for m in range(microbatches)]
    done = set()
    while ready:
        late = [action for action in ready if action.kind != "F"]
        action = rng.choice(late if late and rng.random() < eager else ready)
        ready.remove(action)
        rows[home[action.stage]].append(action)
        done.add(action)
        ready += _freed(action, kinds, stages)
    assert len(done) == stages * microbatches + sum(map(len, kinds.values()))
    return Schedule(f"random {seed}", stages, microbatches, rows)


def _freed(action, kinds, stages):
    """What can run now that `action` has."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F" and stage + 1 < stages:
        return [Action(stage + 1, "F", microbatch)]
    freed = [Action(stage, "W", microbatch)] if action.kind == "I" else []
    following = stage if action.kind == "F" else stage - 1  # the last forward turns round, a gradient goes down
    if action.kind != "W" and following >= 0 and kinds[following, microbatch]:
        freed.append(Action(following, kinds[following, microbatch][0], microbatch))
    return freed
