"""Hunt of chapter 20: a text is scored, continued in a batch, penalised, drawn and written twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.evaluate import generation, wikitext
from labkit.evaluate.kv_cache import CachedAttention
from labkit.evaluate.sampling import Sampler
from labkit.models.attention import ParallelAttention

# ---- the faults ----


def _overlap_scored() -> AbstractContextManager[Any]:
    """Every window scores all its labels."""
    honest = wikitext._window

    def window(text: Tensor, start: int, seq_length: int, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        return honest(text, start, seq_length, seq_length)

    return patch.object(wikitext, "_window", window)


def _padding_seen() -> AbstractContextManager[Any]:
    """The padding of a shorter prompt is attended to like a text."""
    honest = CachedAttention._mask

    def mask(self: CachedAttention, first: int, heads: int) -> Tensor:
        padding, self.padding_B = (
            self.padding_B,
            torch.zeros_like(self.padding_B) if self.padding_B is not None else None,
        )
        made = honest(self, first, heads)
        self.padding_B = padding
        return made

    return patch.object(CachedAttention, "_mask", mask)


def _prompt_forgotten() -> AbstractContextManager[Any]:
    """The repetition penalty knows the new tokens, and not those of the prompt."""
    honest = generation._Occurred.__init__

    def init(self: Any, model: Any, tokens_BS: Tensor, padding_B: Tensor) -> None:
        honest(self, model, tokens_BS, padding_B)
        self.seen_BV.zero_()

    return patch.object(generation._Occurred, "__init__", init)


def _one_number() -> AbstractContextManager[Any]:
    """The generator gets its seed before each draw."""
    honest = Sampler._drawn

    def drawn(self: Sampler, logits_BV: Tensor) -> Tensor:
        self._generator.manual_seed(self.sampling.seed)
        return honest(self, logits_BV)

    return patch.object(Sampler, "_drawn", drawn)


def _not_emptied() -> AbstractContextManager[Any]:
    """A cache of one text is still full when the next one begins."""

    @contextmanager
    def caching(chunk: nn.Module, longest: int, padding_B: Tensor | None = None) -> Iterator[None]:
        layers: list[Any] = [module for module in chunk.modules() if isinstance(module, ParallelAttention)]
        cores = [layer.core for layer in layers]
        for layer in layers:
            caches = layer.__dict__.setdefault("_caches", {})
            new = CachedAttention(16 * longest, padding_B)
            layer.core = caches.setdefault(longest, new) if padding_B is None else new
        try:
            yield
        finally:
            for layer, core in zip(layers, cores, strict=True):
                layer.core = core

    return patch.object(generation, "caching", caching)


# ---- what a verdict says ----

_STAGE = {
    "scoring": "The windows score each label once: count them.",
    "cache": "The cache holds the keys and values of this text, and of nothing else.",
    "choice": "From the same logits the same tokens are chosen as in the healthy run, equally often.",
}
_SHOWN = {"": "The healthy run and the suspect's agree there."}

HUNT = Hunt(
    chapter="20",
    scene="Run the rehearsal with it, suspect.around(rehearsal)(), and hold each part of what it returns against the "
    "healthy run's.",
    questions={
        "stage": "Where is the fault?",
        "shown_by": "Which part of what the rehearsal returns shows it?",
        "place": "What is done wrong, in a few words?",
    },
    choices={
        "stage": ("scoring", "cache", "choice"),
        "shown_by": ("perplexity", "batch", "penalised", "draws", "twice"),
    },
    faults=(
        Fault(
            "padding seen",
            _padding_seen,
            {"stage": "cache", "shown_by": "batch", "place": r"pad|mask"},
            {
                "stage": _STAGE,
                "shown_by": {"twice": "A prompt that is alone has no padding, and is right.", **_SHOWN},
                "place": {
                    "position|place": "Positions count from the first real token. What else does a short prompt have "
                    "in front of it?",
                    "": "The longer prompt's text is right. What does the shorter one have that it lacks alone?",
                },
            },
            "The shorter prompt's padding was attended to, as if it were a text of token 0. The longest prompt of a "
            "batch has no padding and is right, so a test with one prompt, or with prompts of equal length, passes.",
        ),
        Fault(
            "overlap scored",
            _overlap_scored,
            {"stage": "scoring", "shown_by": "perplexity", "place": r"overlap|all|twice|label|context|stride|window"},
            {
                "stage": _STAGE,
                "shown_by": _SHOWN,
                "place": {"": "Compare the number of scored labels with the tokens of the text."},
            },
            "Every window scored all its labels, so most tokens counted several times. The perplexity of a token is "
            "plausible, because it's still a mean; the number of labels isn't, since each must be scored once.",
        ),
        Fault(
            "prompt forgotten",
            _prompt_forgotten,
            {"stage": "choice", "shown_by": "penalised", "place": r"prompt|seen|occur|context"},
            {
                "stage": _STAGE,
                "shown_by": {"twice": "Without a penalty the text is right.", **_SHOWN},
                "place": {
                    "strength|penalty is|too (weak|small|large|strong)|factor": "The penalty is as strong as before. "
                    "Which tokens does it know?",
                    "": "Find the first token that differs. Has the healthy run's penalty a reason to avoid it, and "
                    "where did this token occur?",
                },
            },
            "The penalty knew the tokens that had been written, and not those of the prompt. Whoever measures the "
            "repetition of what is written finds nothing. CTRL's penalty, and that of transformers for a decoder, "
            "count the prompt.",
        ),
        Fault(
            "one number",
            _one_number,
            {"stage": "choice", "shown_by": "draws", "place": r"seed|generator|random|same (number|draw)|rng"},
            {
                "stage": _STAGE,
                "shown_by": _SHOWN,
                "place": {
                    "top|temper|soft": "The probabilities are right. With what are they drawn?",
                    "": "Forty times the same four probabilities, and one result. What must be the same each time?",
                },
            },
            "The generator got its seed anew before each draw, so each token was drawn with the same random number. A "
            "text with a seed stays reproducible, and looks random, because the probabilities differ from place to "
            "place.",
        ),
        Fault(
            "not emptied",
            _not_emptied,
            {
                "stage": "cache",
                "shown_by": "twice",
                "place": r"empt|reset|clear|stale|left|old|previous|first text|before",
            },
            {
                "stage": _STAGE,
                "shown_by": {"batch": "With padding the cache is new each time.", **_SHOWN},
                "place": {
                    "seed|random": "The text is greedy; nothing is drawn.",
                    "mask|position|place": "The first time the text is right, with the same mask and the same places. "
                    "What is different the second time?",
                    "": "The same prompt, the same model, and the second text is another one. What was there already?",
                },
            },
            "The cache of the first text was still full when the second one began, so its tokens attended to a text "
            "that had nothing to do with them. A script that writes one text never shows it; a server does, from its "
            "second customer on.",
        ),
    ),
)
