"""Hunt of chapter 16: a captured layer, and what a call of it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.graphs.graphed_callable import GraphedCallable

# ---- the faults ----


def _gradients_shared() -> AbstractContextManager[Any]:
    """Gradients of parameters leave without a copy, as from torch's own function (pytorch issue 181723)."""

    def handed_out(self: GraphedCallable, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else gradient.detach()

    return patch.object(GraphedCallable, "_handed_out", handed_out)


def _same_dice() -> AbstractContextManager[Any]:
    """Every replay of a forward begins at the same random state, as with a generator that the graph does not know."""
    honest = GraphedCallable.replay_forward

    def replay_forward(self: GraphedCallable, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return honest(self, inputs)

    return patch.object(GraphedCallable, "replay_forward", replay_forward)


def _input_left() -> AbstractContextManager[Any]:
    """The first call copies its input in, later ones do not."""
    honest = GraphedCallable.replay_forward

    def replay_forward(self: GraphedCallable, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        given, self.seen = (self.captured.inputs if hasattr(self, "seen") else inputs), True  # type: ignore[attr-defined]
        return honest(self, given)

    return patch.object(GraphedCallable, "replay_forward", replay_forward)


def _mode_not_asked() -> AbstractContextManager[Any]:
    """The graph of training replays in evaluation, too."""
    return patch.object(GraphedCallable, "_fits_mode", lambda self, args, kwargs: True)


def _never_replayed() -> AbstractContextManager[Any]:
    """Every call takes the way that is meant for another mode, and runs the module itself."""
    return patch.object(GraphedCallable, "_fits_mode", lambda self, args, kwargs: False)


# ---- what a verdict says ----

_OTHERS = "Compare entry by entry with the healthy run's. Most entries are as they should be, and these are ruled out."

HUNT = Hunt(
    chapter="16",
    scene=(
        "healthy = measure() and ill = suspect.around(measure)() have the same entries. Every entry of a healthy run "
        "has a relation to another one, or to a count that you can work out; one of these relations is broken."
    ),
    questions={
        "family": "What kind of fault is it?",
        "entry": "Which entry of `measure` shows it?",
        "place": "Which step of a call is at fault, in your own words? What should it have done?",
    },
    choices={"entry": ("outputs", "gradients", "dropped", "evaluation", "replays")},
    faults=(
        Fault(
            "gradients shared",
            _gradients_shared,
            {"family": "reused memory", "entry": "gradients", "place": "clon|cop(y|ied)|alias|static "
            "grad|hand|\\.grad"},
            {
                "family": {
                    "wrong scale": "With one microbatch the scale is right. It is not the factor that is wrong.",
                    "": "Run one microbatch alone: its gradient is right. What has the second one done to it?",
                },
                "entry": {"outputs": "They are equal to those without graphs, to the bit.", "": _OTHERS},
                "place": {
                    "input": "Then the outputs would be wrong as well.",
                    "": "Compare with 2 g1. Whose memory is `.grad`?",
                },
            },
            "Gradients of parameters left the graph without a copy, so autograd kept the graph's own memory as "
            "`.grad`. The second replay wrote g1 over g0, and adding it gave 2 g1. It is the bug of section 6. One "
            "microbatch is right, and so is everything else.",
        ),
        Fault(
            "same dice",
            _same_dice,
            {"family": "random numbers", "entry": "dropped", "place": "rng|random|generator|seed|mask|dice|state"},
            {
                "family": {
                    "wrong data": "The input arrived: without dropout the outputs are right.",
                    "": "Without dropout everything is right.",
                },
                "entry": {"": _OTHERS},
                "place": {"": "What has to differ between two calls with the same input, and where does it come from?"},
            },
            "Every replay began at the same random state, so dropout drew the same mask again and again. Only two "
            "outputs for the same input, compared with each other, show it: each by itself looks as it should.",
        ),
        Fault(
            "input left",
            _input_left,
            {"family": "wrong data", "entry": "outputs", "place": "input|copy.?in|static_x"},
            {
                "family": {
                    "reused": "Nothing was overwritten. Something was not written.",
                    "": "The first output is right. Of which batch is the second?",
                },
                "entry": {
                    "gradients": "They are wrong, too, but because what the backward reads was wrong before.",
                    "": _OTHERS,
                },
                "place": {
                    "grad": "The first microbatch's gradient is right. What was already wrong before the second "
                    "backward?",
                    "": "A graph reads an address. Who has to put the batch there?",
                },
            },
            "From the second call on the input was not copied into the static input, so the graph computed the first "
            "batch again: two outputs alike for two batches. The gradients were wrong only because of that.",
        ),
        Fault(
            "mode not asked",
            _mode_not_asked,
            {"family": "random numbers|wrong data", "entry": "evaluation", "place": "mode|eval|train|fit|choos|eager"},
            {
                "family": {"": "In training everything is right."},
                "entry": {
                    "replays": "They are one more than they should be. Which call was that?",
                    "": _OTHERS,
                },
                "place": {
                    "rng|seed|random": "Dropout draws as it should. But should it draw there at all?",
                    "": "Who decides if a call replays?",
                },
            },
            "The layer replayed its graph of training in evaluation. A graph knows no mode, so dropout was on there. "
            "The loss of training says nothing; the loss of validation would only have been a little high.",
        ),
        Fault(
            "never replayed",
            _never_replayed,
            {"family": "not captured|slow work", "entry": "replays", "place": "replay|mode|eager|fits|choos|graph"},
            {
                "family": {"": "Every number is right. So what does the run not do?"},
                "entry": {"": "All numbers agree. One entry is no tensor."},
                "place": {"": "How many graphs ran?"},
            },
            "Each call took the way that is meant for evaluation and ran the module itself. Every number is right, the "
            "graphs were captured, their memory is taken, and no launch is saved. Only a count of replays shows it.",
        ),
    ),
)  # fmt: skip
