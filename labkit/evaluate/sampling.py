"""The choice of the next token from logits: greedy, or drawn after repetition penalty, temperature, top-k and top-p.

The order of the steps and their meaning are those of `transformers`: repetition penalty (arXiv 1909.05858),
temperature, top-k (arXiv 1805.04833), top-p (arXiv 1904.09751). Draws are made on the host from a generator with a
seed, so they do not depend on the layout. Logits of two layouts differ by rounding, which changes a draw only at a tie.

Shapes: B samples, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.config.errors import shown
from labkit.config.field_spec import FieldSpec

NO_TOKEN = -1
"""The id that is chosen where logits are not finite."""
NOT_FINITE = (
    "the logits are not finite, so they have no probabilities: use a checkpoint without NaN and infinity, a wider "
    "--precision or, when generating, a repetition penalty closer to 1"
)
"""The message with which every evaluation rejects such logits."""
FIELDS = (
    FieldSpec("temperature", "float", ge=0),
    FieldSpec("top_k", "int", ge=0),
    FieldSpec("top_p", "float", gt=0, le=1),
    FieldSpec("repetition_penalty", "float", gt=0),
    FieldSpec("seed", "int", ge=0, le=2**63 - 1),
)
"""The values that `Sampling` may have."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The choice of a token; the defaults take the most likely one.

    Raises a ValueError that lists everything that is wrong.
    """

    temperature: float = 0.0
    """Logits are divided by it before a draw; 0 takes the most likely token."""
    top_k: int = 0
    """Draw from this many of the most likely tokens; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens whose probabilities add up to at least this."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that occurred are divided by it, negative ones multiplied by it."""
    seed: int = 1234
    """Seed of the draws."""

    def __post_init__(self) -> None:
        values = [(spec, getattr(self, spec.name)) for spec in FIELDS]
        problems = [f"{spec.name} = {shown(value)} {rule}" for spec, value in values if (rule := spec.broken(value))]
        if not problems and self.temperature == 0 and (self.top_k or self.top_p < 1):
            problems = ["temperature = 0 takes the most likely token; top_k and top_p need a temperature above 0"]
        if problems:
            raise ValueError("; ".join(problems))


class Sampler:
    """Chooses the tokens of one batch, step by step."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits_BV: Tensor, seen_BV: Tensor | None = None) -> Tensor:
        """Choose ids [B] from logits; NO_TOKEN where the largest is not finite, for example in a row with a NaN.

        seen_BV: True for tokens that occurred in a sample; needed by the repetition penalty.
        """
        how, logits_BV = self.sampling, logits_BV.double()  # a small temperature or penalty exceeds float32
        if how.repetition_penalty != 1 and seen_BV is not None:
            logits_BV = penalised(logits_BV, seen_BV, how.repetition_penalty)
        best_B1 = logits_BV.amax(dim=-1, keepdim=True)
        if how.temperature == 0:
            ids_B = logits_BV.argmax(dim=-1)
        else:
            ids_B = self._drawn((logits_BV - best_B1) / how.temperature).to(logits_BV.device)
        return ids_B.where(best_B1[:, 0].isfinite(), NO_TOKEN)

    def _drawn(self, logits_BV: Tensor) -> Tensor:
        """Draw ids [B] on the host. Each row's largest logit is 0, which division by a temperature does not change."""
        kept_BV = within_top_p(within_top_k(logits_BV, self.sampling.top_k), self.sampling.top_p)
        probabilities_BV = kept_BV.softmax(dim=-1).cpu()
        draws_B1 = torch.rand(len(probabilities_BV), 1, generator=self._generator, dtype=torch.float64)
        ids_B1 = torch.searchsorted(probabilities_BV.cumsum(dim=-1), draws_B1, right=True)
        last_B1 = (probabilities_BV > 0).long().mul(torch.arange(probabilities_BV.shape[-1])).amax(-1, keepdim=True)
        return torch.minimum(ids_B1, last_B1)[:, 0]  # rounding may leave the sum below 1; then the last one is drawn


def penalised(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Return the logits, with those of the tokens that occurred lowered (by a penalty above 1)."""
    lower_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, lower_BV, logits_BV)


def within_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Set all logits below the k-th largest of each sample to -inf; 0 keeps all."""
    if not 0 < k < logits_BV.shape[-1]:
        return logits_BV
    least_B1 = logits_BV.topk(k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < least_B1, -math.inf)


def within_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Set all logits to -inf but the fewest largest ones whose probabilities add up to at least p."""
    if p >= 1:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1) - sorted_BV.softmax(dim=-1)
    return logits_BV.masked_fill(
        torch.empty_like(order_BV, dtype=torch.bool).scatter_(1, order_BV, before_BV >= p), -math.inf
    )
