"""Hunt of chapter 12: a schedule with split backwards on real ranks. A fault is on rank 0 or 1 of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import FIRST_TENSOR, NUMBERS_AGREE, Fault, Hunt
from labkit.schedules.execution import RankStep
from labkit.schedules.ir import Action, Schedule
from labkit.schedules.runtime import PipelineRuntime

# ---- the faults ----


def _weight_lost() -> AbstractContextManager[Any]:
    """The W of microbatch 1 computes nothing."""
    honest = RankStep._weight

    def weight(self: RankStep, step: Any, received: Any) -> Any:
        if _is_on(1, self) and step.action.microbatch == 1:
            self.weight_gradients._pending.pop((step.action.stage, 1))
            return ()
        return honest(self, step, received)

    return patch.object(RankStep, "_weight", weight)


def _earlier_gradient() -> AbstractContextManager[Any]:
    """The rank's later stage hands down the gradient of the microbatch before."""
    honest = RankStep._backward
    last: dict[RankStep, Any] = {}

    def backward(self: RankStep, step: Any, received: Any) -> Any:
        made = honest(self, step, received)
        if not _is_on(1, self) or 2 * step.action.stage < self.setup.num_stages:
            return made
        before, last[self] = last.get(self, made), made
        return before

    return patch.object(RankStep, "_backward", backward)


def _slow_forward() -> AbstractContextManager[Any]:
    """A forward of the rank's earlier stage takes twice as long."""
    honest = RankStep._forward

    def forward(self: RankStep, step: Any, received: Any) -> Any:
        start = time.perf_counter()
        made = honest(self, step, received)
        if _is_on(0, self) and 2 * step.action.stage < self.setup.num_stages:
            time.sleep(time.perf_counter() - start)
        return made

    return patch.object(RankStep, "_forward", forward)


@contextmanager
def _other_row(rank: int, change: Callable[[list[Action]], list[Action]]) -> Iterator[None]:
    """This rank runs its row in another order, with the messages in the same one."""
    honest = PipelineRuntime._program

    def program(self: PipelineRuntime, forward_only: bool) -> Any:
        given = self.schedule
        if self.groups.pp.rank == rank and not forward_only:
            rows = [given.actions(each) for each in range(given.pp)]
            rows[rank] = change(rows[rank])
            self.schedule = Schedule(given.name, given.num_stages, given.num_microbatches, rows)
        try:
            return honest(self, forward_only)
        finally:
            self.schedule = given

    with patch.object(PipelineRuntime, "_program", program):
        yield


def _weights_at_once(row: list[Action]) -> list[Action]:
    """Every W follows its I."""
    others = [action for action in row if action.kind != "W"]
    return [each for a in others for each in ([a, Action(a.stage, "W", a.microbatch)] if a.kind == "I" else [a])]


def _weights_last(row: list[Action]) -> list[Action]:
    """Every W comes at the end of the row."""
    return sorted(row, key=lambda action: action.kind == "W")


def _gradients_last(row: list[Action]) -> list[Action]:
    """The input gradients of the earlier stage, for which the rank before waits, come at the end of the row."""
    stage = min(action.stage for action in row)
    return sorted(row, key=lambda action: action.stage == stage and action.kind in "IW")


def _is_on(rank: int, step: RankStep) -> bool:
    return step.setup.p2p.groups.pp.rank == rank


# ---- what a verdict says ----

_RANK = {
    "": "All ranks but one do what they should. Whose gradients, whose bars or whose memory are not as they should be?"
}
_ACTION_OF_TIME = "Compare the order of each rank's bars with its row in the table, letter by letter."

HUNT = Hunt(
    chapter="12",
    scene=(
        "Run the ZB-V table with it: the microscope (compare(..., pretrain=suspect.around(...))) for the numbers, "
        "sleep_through on the ranks for the timeline, gantt with memory=True for what a rank keeps. Give ranks a "
        "timeout of 20 seconds: nobody promises that a run comes to its end. If all ranks are late, that's the "
        "machine: take the quickest of several runs, and look for a rank that differs from the others."
    ),
    questions={
        "family": "What kind of fault is it?",
        "rank": "Which rank of the pipeline has it?",
        "action": "Which kind of action is at fault?",
        "first": FIRST_TENSOR,
    },
    choices={"rank": ("0", "1", "2", "3"), "action": ("F", "I", "W")},
    faults=(
        Fault(
            "weight lost",
            _weight_lost,
            {
                "family": "wrong data|wrong scale",
                "rank": "1",
                "action": "W",
                "first": r"layers\.(6|5)\.mlp\.fc2\.bias gradient",
            },
            {
                "family": {
                    "communication": "A W sends nothing and waits for nobody, and all messages arrived.",
                    "": "The loss is right, and every rank runs its row, in its order. What does the microscope say?",
                },
                "rank": _RANK,
                "action": {
                    "I": "A wrong I would spoil every layer before it. Here the gradients before this layer are right.",
                    "F": "A wrong forward would change the loss.",
                },
                "first": {"": "The microscope reads from the output back to the input: take its first name."},
            },
            "On rank 1 the W of microbatch 1 computed nothing, so the weights of its linear layers lack the share of "
            "one microbatch. Only they do: the norms' gradients come with I and are right, and so are all other "
            "ranks', because nobody waits for a W.",
        ),
        Fault(
            "gradient of another microbatch",
            _earlier_gradient,
            {
                "family": "wrong data|wrong order",
                "rank": "1",
                "action": "I",
                "first": r"layers\.(5|3)\.mlp\.fc2\.bias gradient",
            },
            {
                "family": {
                    "missing": "As many messages arrived as were sent. What did they contain?",
                    "": "The loss is right; from one layer down every gradient is wrong. What did that layer receive?",
                },
                "rank": {
                    "0|2|3": "The first wrong layer only computes with what it was given. Who sends it its gradient?"
                },
                "action": {
                    "W": "A wrong W spoils one layer. Here every layer before it is wrong as well.",
                    "F": "A wrong forward would change the loss.",
                },
                "first": {"": "The microscope reads from the output back to the input: take its first name."},
            },
            "On rank 1 the I of the later stage handed down the gradient of the microbatch before. Shapes agree and "
            "messages carry no name, so nothing raised. The gradients of that stage itself are right, all below it are "
            "wrong, and so the fault is one stage after the first tensor that differs.",
        ),
        Fault(
            "slow forward",
            _slow_forward,
            {"family": "slow work", "rank": "0", "action": "F", "first": "none"},
            {
                "family": {
                    "wrong order": "Every rank ran its row in the order of the table.",
                    "": "The numbers are right, and so is what each rank keeps. What is left is time.",
                },
                "rank": {"1|2|3": "This rank waits. For whose message?"},
                "action": {"": "Compare the lengths of the bars of one kind and one stage with their prediction."},
                "first": {"": NUMBERS_AGREE},
            },
            "On rank 0 each forward of its earlier stage took twice as long: a straggler. All others wait for it, so "
            "the step is longer on every rank, and the longest waits are not where the fault is.",
        ),
        Fault(
            "weights at once",
            lambda: _other_row(1, _weights_at_once),
            {"family": "wrong order", "rank": "1", "action": "W", "first": "none"},
            {
                "family": {
                    "slow": "Every action takes as long as it should. Only some of them begin late.",
                    "": "The numbers are right. Does each rank do what its row says?",
                },
                "rank": _RANK,
                "action": {"": _ACTION_OF_TIME},
                "first": {"": NUMBERS_AGREE},
            },
            "Rank 1 ran each W right after its I. W is needed by nobody, and in its place the rank could have run an "
            "I or an F that others wait for. That costs half a step, too little for a measured length: only the order"
            " of the bars tells.",
        ),
        Fault(
            "weights last",
            lambda: _other_row(0, _weights_last),
            {"family": "kept memory|wrong order", "rank": "0", "action": "W", "first": "none"},
            {
                "family": {
                    "slow": "Every action takes as long as it should.",
                    "": "The numbers are right. What does each rank keep, and for how long?",
                },
                "rank": _RANK,
                "action": {"": _ACTION_OF_TIME},
                "first": {"": NUMBERS_AGREE},
            },
            "Rank 0 put all its W off to the end of the row. Until then it keeps the activations of every microbatch: "
            "its peak is that of GPipe, and on a GPU with memory for p microbatches it would have stopped.",
        ),
        Fault(
            "gradients last",
            lambda: _other_row(1, _gradients_last),
            {"family": "wrong order", "rank": "1", "action": "I", "first": "none"},
            {
                "family": {
                    "missing": "Every message would be sent, if only its sender got so far.",
                    "": "Every rank waits in a receive, so the messages that they wait for were never sent. Why?",
                },
                "rank": {
                    "0": "Rank 0 has no gradient to go on with. Who owes it one?",
                    "": "This rank waits for a forward or a gradient of a neighbour that waits as well: go on along "
                    "the cycle, up to the rank whose row could have gone another way.",
                },
                "action": {
                    "W": "Nobody waits for a W.",
                    "F": "Forwards stop as well, but only when a rank has no gradient to go on with.",
                },
                "first": {"": "The run does not come to its end, so there is nothing to compare: say 'none'."},
            },
            "Rank 1 put the input gradients of its earlier stage off to the end of the row. Rank 0 waits for the "
            "first of them and sends no more forwards; rank 1 waits for what these would have come back as. In the "
            "report every rank is in a receive, and no rank has made a mistake of its own that it could tell: a cycle"
            " is seen only if all of their rows are laid next to each other, which is what verify does.",
        ),
    ),
)
