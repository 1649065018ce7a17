"""Hunt of chapter 23: a run that is saved and resumed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.train.checkpoint import checkpoints
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.rank_state import MOMENTS, Piece, RankState
from labkit.train.checkpoint.resume import Progress
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.loss_scaler import LossScaler

# ---- the faults ----


def _samples_anew() -> AbstractContextManager[Any]:
    """The resumed run begins with the first sample."""
    honest = Checkpoints.load

    def load(self: Checkpoints, scaler: LossScaler) -> Progress:
        return replace(honest(self, scaler), consumed_samples=0)

    return patch.object(Checkpoints, "load", load)


def _moments_anew() -> AbstractContextManager[Any]:
    """Adam's moments are zeros after loading, its count of updates is right."""
    honest = RankState.set_adam_steps

    def set_adam_steps(self: RankState, steps: int) -> None:
        honest(self, steps)
        for state in self._optimizer.adamw.state.values():
            for moment in MOMENTS:
                state[moment].zero_()

    return patch.object(RankState, "set_adam_steps", set_adam_steps)


def _updates_anew() -> AbstractContextManager[Any]:
    """Adam's count of updates is 0 after loading, its moments are right."""
    honest = RankState.set_adam_steps
    return patch.object(RankState, "set_adam_steps", lambda self, steps: honest(self, 0))


def _random_anew() -> AbstractContextManager[Any]:
    """The stored random states are not restored."""
    return patch.object(RankState, "load_rng", lambda self, reader: None)


def _rounded_weights() -> AbstractContextManager[Any]:
    """What is loaded as a main weight has been rounded to bf16."""
    honest = checkpoints.fill

    def fill(pieces: Iterable[Piece], reader: Reader) -> None:
        held = list(pieces)
        honest(held, reader)
        for piece in held:
            if piece.values.is_floating_point() and not piece.name.startswith(MOMENTS):
                piece.values.copy_(piece.values.bfloat16())

    return patch.object(checkpoints, "fill", fill)


# ---- what a verdict says ----

_FIRST = {
    "": "Take the lines in their order. A later one differs as a consequence of an earlier one.",
}

HUNT = Hunt(
    chapter="23",
    scene="Run suspect.around(rehearsal) on the ranks, and hold its lines against the healthy ones.",
    questions={
        "forgotten": "What doesn't survive the resume?",
        "first": "Which line is the first to differ from the healthy run's?",
        "what": "What is it instead, in a few words?",
    },
    choices={
        "forgotten": (
            "samples",
            "main weights",
            "moments",
            "Adam's count of updates",
            "random states",
            "learning rate",
        ),
        "first": ("next sample", "weights", "first loss", "first update"),
    },
    faults=(
        Fault(
            "moments anew",
            _moments_anew,
            {"forgotten": "moments", "first": "first update", "what": r"0|zero|anew|fresh|empty|not (re)?(load|stor)"},
            {
                "forgotten": {
                    "Adam's count of updates": "With a count that begins anew the first update would be larger than it "
                    "should be. How large is this one?",
                    "learning rate": "The rate is a function of the count of steps, which is right.",
                    "": "Samples, weights and the first loss are right. What has Adam, beside the weights?",
                },
                "first": _FIRST,
                "what": {"": "Adam's update is a mean over past gradients. Which mean would give this size?"},
            },
            "Both moments were zeros after loading, and their count of updates was right. So Adam took them for means "
            "over many gradients, all of them 0, and made a first update of another size and direction. Some steps "
            "later it has new moments, and nobody remembers the bump.",
        ),
        Fault(
            "samples anew",
            _samples_anew,
            {"forgotten": "samples", "first": "next sample", "what": r"0|first|begin|start|again|anew"},
            {
                "forgotten": {"": "Which line comes before all others?"},
                "first": _FIRST,
                "what": {"": "Which sample is read first after the resume?"},
            },
            "The resumed run read the first samples again. Its losses look better than they are, since it has seen "
            "these samples, and what it should have read it never reads. Only held-out text notices, and the number of "
            "the next sample.",
        ),
        Fault(
            "rounded weights",
            _rounded_weights,
            {"forgotten": "main weights", "first": "weights", "what": r"16|bf16|bfloat|round|half|precision"},
            {
                "forgotten": {"": "A weight is not what it was. By how much?"},
                "first": _FIRST,
                "what": {
                    "": "Divide the largest difference by the size of a weight. What does a rounding of 8 bits do?"
                },
            },
            "The main weights had been rounded to 16 bits on their way through the checkpoint. What chapter 13's main "
            "weights collect, updates too small to be seen in 16 bits, was lost with each resume. The loss "
            "moves by a thousandth or less.",
        ),
        Fault(
            "random anew",
            _random_anew,
            {"forgotten": "random states", "first": "first loss", "what": r"random|rng|dropout|mask|seed|generator"},
            {
                "forgotten": {
                    "samples": "The next sample is the one that it should be.",
                    "": "Weights and samples are right, and the loss is not. What else goes into a forward?",
                },
                "first": _FIRST,
                "what": {"": "What does a forward in training have that a validation doesn't?"},
            },
            "The random states weren't restored, so dropout left out other numbers than in the run that went on. The "
            "run isn't worse for it. But it isn't the same run, and masks that begin anew at each resume repeat.",
        ),
        Fault(
            "updates anew",
            _updates_anew,
            {
                "forgotten": "Adam's count of updates",
                "first": "first update",
                "what": r"0|1|zero|one|anew|first|bias|correct|large|small",
            },
            {
                "forgotten": {
                    "moments": "With moments of zeros the first update would be smaller than it should be. How "
                    "large is this one?",
                    "learning rate": "It's a function of the count of steps, which is right here.",
                    "": "Samples, weights and the first loss are right. What has Adam, beside the weights?",
                },
                "first": _FIRST,
                "what": {
                    "": "Adam divides each moment by 1 - beta^updates. What does that do to moments that are full?"
                },
            },
            "Adam's count of updates began anew, while its moments were full. It corrects young moments for having "
            "begun at 0: after one update it divides the first by 1 - beta1 and the second by 1 - beta2. Full moments "
            "don't need that, so the first update was far too large.",
        ),
    ),
)
