"""Where in a rank's row the gradients of a chunk are synchronised and its parameters gathered.

Communication slows down the computation that runs at the same time, and one slow rank would hold up
all others. So Megatron starts these collectives at places that all ranks of the pipeline reach at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.schedules.ir import Action, Schedule


def sync_places(
    schedule: Schedule, rank: int, actions: Sequence[Action], chunks: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return, for each action, the chunks whose gradient synchronisation follows it and whose parameter gathering
    precedes it.

    The gradients of a chunk start after the rank's backward number k + pp_rank, with k the chunk's last: backward
    reaches rank 0 last. The parameters of the chunk after chunk c start before the forward number k - pp_rank, with k
    the first of c. In general a stage lags by its distance from its chunk's lowest stage, which is pp_rank where
    placement is looped. Gradients whose place is not reached start after the last action; chunks 0 and 1 are gathered
    before the first.
    """
    after: list[list[int]] = [[] for _ in actions]
    before: list[list[int]] = [[] for _ in actions]
    if schedule.forward_only:
        return [()] * len(actions), [()] * len(actions)
    lags = schedule.derived("lags", _lags)
    stages = schedule.stages_of(rank)
    backwards = [i for i, action in enumerate(actions) if action.kind in "BW"]
    last = {chunks[i]: k for k, i in enumerate(backwards)}
    for chunk, k in sorted(last.items()):
        due = k + lags[stages[chunk]]
        after[backwards[due] if due < len(backwards) else -1].append(chunk)
    forwards = [i for i, action in enumerate(actions) if action.kind == "F"]
    first = {chunks[i]: k for k, i in reversed(list(enumerate(forwards)))}
    before[0] = list(range(len(stages)))[:2]
    for chunk, k in sorted(first.items()):
        if 1 < chunk + 1 < len(stages):
            before[forwards[max(0, k - lags[stages[chunk]])]].append(chunk + 1)
    return [tuple(sorted(c)) for c in after], [tuple(sorted(c)) for c in before]


def _lags(schedule: Schedule) -> list[int]:
    """Return, by stage, how many stages it is above the lowest one of its chunk number."""
    chunks = {stage: chunk for rank in range(schedule.pp) for chunk, stage in enumerate(schedule.stages_of(rank))}
    lowest: dict[int, int] = {}
    for stage in range(schedule.num_stages):
        lowest.setdefault(chunks[stage], stage)
    return [stage - lowest[chunks[stage]] for stage in range(schedule.num_stages)]
