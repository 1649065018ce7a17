"""Hunt of chapter 11: interleaving, with several chunks of the model on each rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import FIRST_TENSOR, NUMBERS_AGREE, Fault, Hunt
from labkit.comm.fault_injection import delayed
from labkit.models import chunks as model_chunks
from labkit.schedules import execution
from labkit.schedules.builders import interleaved
from labkit.schedules.execution import RankStep
from labkit.schedules.ir import Schedule
from labkit.schedules.lowering import Program
from labkit.schedules.runtime import PipelineRuntime
from labkit.schedules.tables import convert_schedule_table_to_order, get_schedule_table

LATE = 0.05
"""Seconds by which messages over the slow link are late."""

# ---- the faults ----


def _chunks_swapped() -> AbstractContextManager[Any]:
    """Each rank builds the layers of its next chunk in the place of each chunk."""
    honest = model_chunks.stage_contents

    def contents(config: Any, num_stages: int) -> Any:
        right, pp = honest(config, num_stages), config.parallel.pp
        return [replace(held, layers=right[(stage + pp) % num_stages].layers) for stage, held in enumerate(right)]

    return patch.object(model_chunks, "stage_contents", contents)


def _short_circuit() -> AbstractContextManager[Any]:
    """On rank 0 a chunk reads what the chunk before it on the same rank made, not what the last rank has sent."""
    honest = RankStep._forward

    def forward(self: RankStep, step: Any, received: Any) -> Any:
        stage, microbatch, pp = step.action.stage, step.action.microbatch, _size(self)
        made_here: dict[Any, Any] = self.__dict__.setdefault("made_here", {})
        if stage and stage % pp == 0 < pp < self.setup.num_stages:
            received = tuple(x.requires_grad_() for x in made_here.pop((stage - pp, microbatch)))
        made = honest(self, step, received)
        if stage % pp == 0 and stage + pp < self.setup.num_stages:
            made_here[stage, microbatch] = [x.detach().clone() for x in made]
        return made

    return patch.object(RankStep, "_forward", forward)


def _groups_begin_anew() -> AbstractContextManager[Any]:
    """The gradients of a chunk are emptied where a group of microbatches begins, as if each were a step of its own."""
    honest = RankStep._forward

    def forward(self: RankStep, step: Any, received: Any) -> Any:
        pp, chunk = _size(self), self.setup.chunks[step.chunk]
        if 1 < pp < self.setup.num_stages and step.action.microbatch and step.action.microbatch % pp == 0:
            for parameter in chunk.parameters():
                if getattr(parameter, "main_grad", None) is not None:
                    parameter.main_grad.zero_()
        return honest(self, step, received)

    return patch.object(RankStep, "_forward", forward)


def _other_table(build: Callable[[int, int, int], Schedule]) -> AbstractContextManager[Any]:
    """All ranks run the table that `build` makes for as many ranks, chunks per rank and microbatches."""
    honest = PipelineRuntime._program

    def program(self: PipelineRuntime, forward_only: bool) -> Program:
        given = self.schedule
        if not forward_only and given.num_stages > given.pp > 1:
            self.schedule = build(given.pp, given.num_stages // given.pp, given.num_microbatches)
        try:
            return honest(self, forward_only)
        finally:
            self.schedule = given

    return patch.object(PipelineRuntime, "_program", program)


def _short_warm_up(pp: int, vpp: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B whose rank r warms up with p - r - 1 forwards for the ranks after it, not with twice as many."""
    table, rows = get_schedule_table(microbatches, vpp, pp), []
    for rank in range(pp):
        warmup = min(pp - rank - 1 + (vpp - 1) * pp, len(table))
        seen: dict[int, int] = {}
        row = []
        for signed in convert_schedule_table_to_order(warmup, vpp, table):
            seen[signed] = seen.get(signed, -1) + 1
            row.append(f"{(abs(signed) - 1) * pp + rank}{'F' if signed > 0 else 'B'}{seen[signed]}")
        rows.append(row)
    return Schedule("interleaved 1F1B", pp * vpp, microbatches, rows)


def _one_group(pp: int, vpp: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B with the whole batch as one group."""
    return interleaved(pp, vpp, microbatches, microbatches)


def _slow_way_round() -> AbstractContextManager[Any]:
    """Messages from the last rank to rank 0 are late."""
    honest = execution.start

    def start(p2p: Any, ops: Any) -> Any:
        pp = p2p.groups.pp
        goes_round = pp.rank == pp.size - 1 > 0 and any(op.operation == "send" and op.peer == 0 for op in ops)
        with delayed(LATE, operation="send") if goes_round else nullcontext():
            return honest(p2p, ops)

    return patch.object(execution, "start", start)


def _size(step: RankStep) -> int:
    return step.setup.p2p.groups.pp.size


# ---- what a verdict says ----

_FIRST = {"": "The microscope reads outputs, then the loss, then gradients from the top down: take its first name."}

HUNT = Hunt(
    chapter="11",
    scene=(
        "The microscope (microscope(suspect.around(train.pretrain))) speaks of the numbers, and the timeline "
        "(timeline(suspect.around(asleep))) of order, memory and time: one of them shows it. A busy machine makes all "
        "ranks a little late; run the timeline again before you believe in lost time."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which chunk, message, gradient, or part of the table is at fault?",
        "first": FIRST_TENSOR,
    },
    faults=(
        Fault(
            "groups begin anew",
            _groups_begin_anew,
            {
                "family": "wrong data|reused memory",
                "place": r"group|gradient|main_grad|buffer|zero|first microbatch|accumul",
                "first": r"final_norm\.(bias|weight) gradient",
            },
            {
                "family": {
                    "communication": "A lost message would spoil the stages before it as well, and the last one is "
                    "wrong already.",
                    "wrong scale": "There is no common ratio: compare two gradients with the right ones.",
                    "": "The loss is right, so is every output. Which layers' gradients are wrong, and which are not?",
                },
                "place": {
                    "message|send|recv|activation": "Outputs and loss agree, and layers of the last chunk are wrong "
                    "that no message of another stage reaches.",
                    "": "One chunk of a rank is wrong and its other one is right. Where are the third forward and the "
                    "first backwards of each in the rank's row?",
                },
                "first": _FIRST,
            },
            "Where the second group of microbatches began, a chunk's gradients were emptied, as if a new step did. "
            "The last chunk has run the first group's backwards by then and loses them. Chunk 0 hasn't: its third "
            "forward comes before its first backward, so nothing is lost, and it looks healthy. Megatron has a "
            "function for just this question, is_first_microbatch_for_model_chunk, because a virtual microbatch's "
            "number alone doesn't answer it.",
        ),
        Fault(
            "chunks swapped",
            _chunks_swapped,
            {
                "family": "wrong order|wrong data",
                "place": "layer|chunk|placement|stage|offset|vp_stage|model",
                "first": r"layers\.0.* output",
            },
            {
                "family": {
                    "communication": "As many messages as on a healthy run, and each arrives.",
                    "": "The first layer of all is wrong already, and it has received nothing from anybody.",
                },
                "place": {
                    "message|send|recv|activation|label|data": "The embedding's output agrees, and it's what the "
                    "first layer reads. No message has been sent by then.",
                    "": "The embedding's output is right, the output of layers.0 is wrong. What did rank 0 run there?",
                },
                "first": _FIRST,
            },
            "Every rank built the layers of one chunk in the place of the other, so a microbatch passed the second "
            "half of the model first. Shapes agree, and a model that has learned nothing has nearly the same loss in "
            "any order of its layers. In Megatron the offset of a chunk's layers depends on vp_stage, and its code "
            "asserts that somebody has given it.",
        ),
        Fault(
            "short circuit",
            _short_circuit,
            {
                "family": "wrong data|missing communication",
                "place": "rank 0|chunk 1|activation|wrap|around|round|last rank|message|receive|recv|input",
                "first": r"layers\.\d+.* output",
            },
            {
                "family": {
                    "wrong order": "Every rank runs its row, and every layer is on its rank.",
                    "": "The outputs of the first stages are right. From one border on nothing is.",
                },
                "place": {
                    "label|data": "An output in the middle of the model differs, and no label has been read by then.",
                    "": "All stages up to the last rank's first one are right. Who reads what that one made?",
                },
                "first": _FIRST,
            },
            "On rank 0 the second chunk read what the first chunk of the same rank had made, as if the two were "
            "neighbours. They aren't: between them are the first chunks of all other ranks, whose work was thrown "
            "away. The last rank's message was received and dropped. Shapes agree, and in a fresh model a few layers "
            "less hardly show in the loss.",
        ),
        Fault(
            "short warm-up",
            lambda: _other_table(_short_warm_up),
            {
                "family": "wrong order",
                "place": "warm|factor|table|row|order|forward",
                "first": "none",
            },
            {
                "family": {
                    "slow": "Every action takes as long as it should. Compare the order of the bars with the row.",
                    "kept": "The fullest rank keeps less than it should, not more. Why?",
                    "": "Every number is right. Does each rank run its row?",
                },
                "place": {"": "Count the forwards of rank 0 before its first backward, and compare with its row."},
                "first": {"": NUMBERS_AGREE},
            },
            "Rank r warmed up with p - r - 1 forwards for the ranks after it instead of twice as many. With free "
            "messages the batch takes as long as before, and keeps less, so it looks like an improvement. Over a "
            "network each further pair of a forward and a backward waits for its messages.",
        ),
        Fault(
            "one group",
            lambda: _other_table(_one_group),
            {
                "family": "kept memory|wrong order",
                "place": "group|table|row|order|warm|microbatch_group_size|in flight",
                "first": "none",
            },
            {
                "family": {
                    "slow": "Every action takes as long as it should, and so does the batch.",
                    "": "Every number is right. What does the fullest rank keep?",
                },
                "place": {"": "Read rank 0's first bars: how many microbatches pass chunk 0 before chunk 1's first?"},
                "first": {"": NUMBERS_AGREE},
            },
            "The whole batch was one group: all microbatches passed chunk 0 before the first one came to chunk 1. "
            "Time and numbers are those of the table, but the memory grows with the batch, as under GPipe.",
        ),
        Fault(
            "slow way round",
            _slow_way_round,
            {
                "family": "slow work",
                "place": "rank 3|last rank|last|to rank 0|wrap|around|round|link|message",
                "first": "none",
            },
            {
                "family": {
                    "wrong": "Every number is right, and every rank runs its row. When do the bars begin?",
                    "kept": "The peak is the one of the table.",
                    "": "As many messages as on a healthy run. When does each of them arrive?",
                },
                "place": {
                    "gradient|backward": "The first late bar is a forward, and no gradient exists by then.",
                    "": "Which bar is the first that starts late, and on whose message does it wait?",
                },
                "first": {"": NUMBERS_AGREE},
            },
            "Messages from the last rank to rank 0 were late. 1F1B doesn't have that link: between the last rank and "
            "the first there is nothing to send. Interleaving sends every microbatch over it, once for each chunk but"
            " the last. With N = p rank 0 has no time to spare in its warm-up, so the first late message is a wait.",
        ),
    ),
)
