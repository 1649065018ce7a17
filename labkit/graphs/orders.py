"""The order in which a rank captures its layers, from its row of a schedule. Imports no torch.

A row can be captured if every chunk runs its microbatches backward in the order in which it ran them forward: an order
table names chunks and no microbatches. Where a backward is split, its weight gradients are a graph of their own.
"""

from __future__ import annotations

from labkit.schedules.ir import Schedule


def capture_order(schedule: Schedule, pp_rank: int, *, weight_gradients: bool = True) -> list[int | float]:
    """What a rank captures: its row, or one microbatch where each is through before the next begins.

    weight_gradients: whether graphs of weight gradients alone are to be had.

    Raises:
        ValueError: backwards of a stage in another order than its forwards, some of them split and some whole, or split
            where they may not be.
    """
    actions = schedule.actions(pp_rank)
    if not weight_gradients and any(action.kind == "W" for action in actions):
        raise ValueError(
            f"{schedule.name} splits backwards into input and weight gradients, and the engine's layers compute both "
            "together: choose a schedule with whole backwards (1f1b, interleaved, gpipe), or set "
            "graph.cuda_graph_impl to local"
        )
    for stage in schedule.stages_of(pp_rank):
        runs = {kind: [a.microbatch for a in actions if a.stage == stage and a.kind == kind] for kind in "FBIW"}
        forwards = runs["F"]
        whole, split = runs["B"] == forwards and not runs["W"], runs["I"] == runs["W"] == forwards and not runs["B"]
        if forwards != sorted(forwards) or not (whole or split):
            backwards = ", ".join(f"{kind} {runs[kind]}" for kind in "BIW" if runs[kind])
            raise ValueError(
                f"{schedule.name} runs stage {stage} forward for microbatches {forwards} and backward for {backwards}: "
                "graphs that share memory need both in ascending order, and all backwards of one kind"
            )
    order = schedule.order(pp_rank)
    one = order[: len(order) // schedule.num_microbatches]
    return one if set(one) >= {1, -1} and order == one * schedule.num_microbatches else order
