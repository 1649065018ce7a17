"""The order in which a rank captures its layers, from its row of a schedule. Imports no torch.

A row can be captured if every chunk runs its microbatches backward in the order in which it ran them forward: an order
table names chunks and no microbatches. And a backward must be one piece, since the graph of a layer holds all of it.
"""

from __future__ import annotations

from labkit.schedules.ir import Schedule


def capture_order(schedule: Schedule, pp_rank: int) -> list[int]:
    """What a rank captures: its row, or one microbatch where each backward follows its forward at once.

    Raises:
        ValueError: a backward in two actions, or backwards in another order than forwards.
    """
    actions = schedule.actions(pp_rank)
    if any(action.kind in "IW" for action in actions):
        raise ValueError(
            f"{schedule.name} splits backwards into input and weight gradients, and the graph of a layer holds both: "
            "choose a schedule with whole backwards (1f1b, interleaved, gpipe), or set graph.cuda_graph_impl to none"
        )
    for stage in schedule.stages_of(pp_rank):
        runs = {kind: [a.microbatch for a in actions if a.stage == stage and a.kind == kind] for kind in "FB"}
        if runs["F"] != sorted(runs["F"]) or runs["B"] != runs["F"]:
            raise ValueError(
                f"{schedule.name} runs stage {stage} forward for microbatches {runs['F']} and backward for "
                f"{runs['B']}; graphs that share memory need both in ascending order"
            )
    order = [int(entry) for entry in schedule.order(pp_rank)]
    return [1, -1] if order == [1, -1] * schedule.num_microbatches else order
