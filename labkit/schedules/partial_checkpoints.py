"""Which microbatches need no recomputation: the memory that a stage has left, spent on activations.

Under full recomputation a stage keeps little of each microbatch in flight. Where memory is left, some of them may keep
everything, and their backward costs no second forward (arXiv 2205.05198, appendix C: microbatch-level recomputation).
Late stages have fewer in flight, so there the same number covers a larger share, up to all. Megatron's option is
`num_microbatches_with_partial_activation_checkpoints`.
"""

from __future__ import annotations

from labkit.schedules.ir import Schedule


def kept_whole(schedule: Schedule, rank: int, count: int) -> frozenset[tuple[int, int]]:
    """(stage, microbatch) whose activations `rank` keeps whole: at any time at most `count`, and as many as can be.

    A forward takes a place where one is free; B gives it back, or W where the backward is split. Under 1F1B with w
    warm-up forwards that is Megatron's rule, the first `count` of every w + 1 microbatches. Its rule for interleaving
    counts the same way, though there backwards do not follow the order of the forwards; this one goes by the row.

    Raises ValueError for a negative count.
    """
    if count < 0:
        raise ValueError(f"{count} microbatches cannot be kept whole; give 0 or more")
    alive: set[tuple[int, int]] = set()
    kept: set[tuple[int, int]] = set()
    for action in schedule.actions(rank):
        key = (action.stage, action.microbatch)
        if action.kind == "F" and len(alive) < count:
            alive.add(key)
            kept.add(key)
        elif action.kind in "BW":
            alive.discard(key)
    return frozenset(kept)
