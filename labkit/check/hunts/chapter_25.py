"""Hunt of chapter 25: merged pairs, whose messages hide behind another microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from labkit.check.hunts.hunting import MESSAGES_AND_NUMBERS, Fault, Hunt
from labkit.comm import in_flight
from labkit.comm.pending import Pending
from labkit.models import chunk_parts
from labkit.schedules import merging
from labkit.schedules.merged_execution import MergedStep

# ---- the faults ----


def _at_once() -> AbstractContextManager[Any]:
    """Each all-to-all is awaited right after its start, by the part that has started it."""
    honest = in_flight.collectives.all_to_all_async

    def start(*args: Any, **named: Any) -> Pending:
        pending = honest(*args, **named)
        pending.wait()
        return pending

    return patch.object(in_flight.collectives, "all_to_all_async", start)


def _other_turns() -> AbstractContextManager[Any]:
    """Of the parts of two layers the forward's come first, so each is one place too early for the other side."""
    honest = merging._by_turns  # pyright: ignore[reportPrivateUsage]
    return patch.object(merging, "_by_turns", lambda ahead, back: honest(back, ahead))


def _newest() -> AbstractContextManager[Any]:
    """A backward goes through the layers of the newest microbatch that its stage has run, not of its own."""
    honest = MergedStep._begin_backward  # pyright: ignore[reportPrivateUsage]

    def begin(self: MergedStep, step: Any, received: Any) -> Any:
        stage, own = step.action.stage, (step.action.stage, step.action.microbatch)
        newest = max(key for key in self.parts if key[0] == stage)
        self.parts[own], self.parts[newest] = self.parts[newest], self.parts[own]
        return honest(self, step, received)

    return patch.object(MergedStep, "_begin_backward", begin)


def _forgotten() -> AbstractContextManager[Any]:
    """A pair leaves the weight gradients of experts out, and nobody computes them later."""
    honest = merging._with_early_weights  # pyright: ignore[reportPrivateUsage]
    return patch.object(merging, "_with_early_weights", lambda runs, delay: honest(runs, delay and not _pair(runs)))


def _pair(runs: Sequence[Any]) -> bool:
    return {"F", "B"} <= {run.side for run in runs}


def _one_buffer() -> AbstractContextManager[Any]:
    """A layer has one buffer for its input, in which a forward overwrites what a backward has yet to read."""
    run = chunk_parts._LayerRun  # pyright: ignore[reportPrivateUsage]
    honest = run.forward

    def forward(self: Any, part: str, given: Any) -> Any:
        if part == "attention":
            (x,) = given
            buffers: dict[Any, Tensor] = self._layer.mlp.__dict__.setdefault("_one_buffer", {})
            buffer = buffers.setdefault(x.shape, x.detach().clone())
            buffer.data.copy_(x.data)
            given = (buffer.data.requires_grad_(x.requires_grad),)
        return honest(self, part, given)

    return patch.object(run, "forward", forward)


# ---- what a verdict says ----

_NUMBERS_AGREE = "Loss, gradients and parameters agree with one process to 1e-10, so no tensor is wrong: say 'none'."
_TAKE_THE_NAME = "Run one step under the microscope, and take the first name as it is printed."
_BEGINS_IN_BACKWARD = "The loss is right, so everything in forward is. Which gradients are wrong, and which are not?"

HUNT = Hunt(
    chapter="25",
    scene=(
        "Train with it under the microscope (compare(..., pretrain=suspect.around(pretrain))), and look at a step of "
        "sleeping layers (ranks.run(suspect.around(trained), True)): which parts wait, and for how long?"
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "What is at fault: which operation, order or tensor?",
        "first": "Which tensor differs first from one process, as the microscope names it? Or none.",
    },
    families=(*MESSAGES_AND_NUMBERS, "reused memory", "kept memory", "slow work"),
    faults=(
        Fault(
            "at once",
            _at_once,
            {"family": "slow work", "place": "wait|await|start|at once|block|async", "first": "none"},
            {
                "family": {
                    "missing|extra|wrong data|wrong scale|memory": "Every number is right. What does a step wait for?",
                    "wrong order": "Parts run in the order of a healthy run. In which part does a rank wait?",
                    "": "Every number is right, and the step is longer. Which parts wait?",
                },
                "place": {
                    "order|turn": "Parts run in the order of a healthy run. Which ones wait, and for whose message?",
                    "": "The parts that wait are those that start a message. When is it awaited?",
                },
                "first": {"": _NUMBERS_AGREE},
            },
            "Each all-to-all was awaited right after its start, by the part that had started it. So nothing ran while "
            "it was under way. All numbers were right, and so were the order of the parts and the messages; the "
            "waits were in attention and experts of the forward, and in combine and experts of the backward.",
        ),
        Fault(
            "other turns",
            _other_turns,
            {"family": "wrong order|slow work", "place": "order|turn|alternat|first|part", "first": "none"},
            {
                "family": {"": "Every number is right. Only some of the waits are those of a healthy run."},
                "place": {
                    "wait|start|block|async": "Messages are started and awaited where they should be. But what runs "
                    "in between?",
                    "": "Two of the four messages are hidden. Which part follows which, in the timeline?",
                },
                "first": {"": _NUMBERS_AGREE},
            },
            "Of two layers the forward's attention came first, and then the backward's combine, so experts of the "
            "forward had nothing between them and their dispatch but combine, and attention of the backward the same. "
            "Two of four messages showed. All numbers were right.",
        ),
        Fault(
            "newest",
            _newest,
            {
                "family": "wrong data",
                "place": "microbatch|newest|activation|kept|other|pop",
                "first": r"layers\.0\.mlp\.experts\.fc2\.weight gradient",
            },
            {
                "family": {
                    "reused": "Then stage 1 would be wrong as well: it also keeps several microbatches.",
                    "": _BEGINS_IN_BACKWARD,
                },
                "place": {
                    "weight|wgrad": "Norms, router and embedding of stage 0 are wrong as well, not only what is left "
                    "for later.",
                    "": "All gradients of stage 0 are wrong, none of stage 1. How many microbatches do they have to "
                    "choose from?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "A backward went through the layers of the newest microbatch of its stage instead of its own. Stage 1 has "
            "one microbatch to choose from when a pair begins, so its gradients were right. Stage 0 warms up with "
            "three, and multiplied each gradient with another microbatch's activations.",
        ),
        Fault(
            "forgotten",
            _forgotten,
            {
                "family": "wrong data|missing communication",
                "place": r"weight|wgrad|delay|\bW\b|We|experts",
                "first": r"layers\.1\.mlp\.experts\.fc2\.weight gradient",
            },
            {
                "family": {"": _BEGINS_IN_BACKWARD},
                "place": {"": "Only fc1 and fc2 of experts differ, in both layers. What do they lack?"},
                "first": {"": _TAKE_THE_NAME},
            },
            "Weight gradients of experts were split off from their part of the backward and never computed in a pair. "
            "What passes on to earlier layers was right, so only the experts' own weights learned too little, from the "
            "microbatches outside of pairs.",
        ),
        Fault(
            "one input",
            _one_buffer,
            {
                "family": "reused memory|wrong data",
                "place": r"buffer|input|overwrit|attention|norm|x\b",
                "first": r"layers\.1\.attention\.norm\.weight gradient",
            },
            {
                "family": {"": _BEGINS_IN_BACKWARD},
                "place": {
                    "experts|weight": "Both layers' experts came after something that was wrong already. What is the "
                    "first tensor to differ?",
                    "": "In layer 1 a single tensor differs, the gain of attention's norm. What does its gradient read "
                    "that the gradient of the bias doesn't?",
                },
                "first": {"": _TAKE_THE_NAME},
            },
            "Each layer had one buffer for its input, as a static input of a CUDA graph is. The forward of the next "
            "microbatch overwrote what the backward's norm had yet to read. The loss was right. The bias of that norm "
            "was right as well, since its gradient reads dy alone, and what left the layer backward was wrong.",
        ),
    ),
)
