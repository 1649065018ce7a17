"""`generate`: continue prompts token by token, with a cache of keys and values, on tp x pp ranks.

Prompts of unequal length are padded on the left. No real token attends to the padding, and positions count from the
first real token. The first pass takes all prompts at once. Each further pass takes only the one token that was chosen,
because the cache has the keys and values of all tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from labkit.config.errors import counted
from labkit.evaluate.kv_cache import caching
from labkit.evaluate.model import CheckpointModel
from labkit.evaluate.sampling import Sampler, Sampling
from labkit.parallel.vocab.token_ids import check_token_ids

MOST_NEW_TOKENS = 64
"""Tokens added to a prompt if the caller does not say how many."""


def generate(
    model: CheckpointModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    sampling: Sampling | None = None,
    end: int | Sequence[int] | None = None,
    on_tokens: Callable[[list[int | None]], None] | None = None,
) -> list[list[int]]:
    """Return the new token ids of each prompt, the same on all ranks. All ranks call this together.

    prompts: token ids of each sample; lengths may differ.
    max_new_tokens: most tokens to add to each prompt. None adds as many as model.seq_length leaves after the longest
        prompt, at most `MOST_NEW_TOKENS`.
    sampling: choice of tokens; None is greedy.
    end: the token that ends a sample, or several that do; it is the last one returned. None gives each sample
        `max_new_tokens` tokens.
    on_tokens: called on every rank after each pass, with the new token of each sample, None for one that has ended.

    Raises:
        ValueError: there is no prompt, one is empty, a text would have more tokens than model.seq_length, the model is
            of another family than gpt, or the logits are not finite.
        TokenIdError: an id is outside the vocabulary.
    """
    if (family := model.config.model.family) != "gpt":
        raise ValueError(
            f"labkit generates with a cache of keys and values, which only model.family = gpt has; this is a {family}"
        )
    if max_new_tokens is None:
        room = model.seq_length - max(map(len, prompts), default=0)
        max_new_tokens = max(1, min(MOST_NEW_TOKENS, room))
    tokens_BS, padding_B = _aligned(model, prompts, max_new_tokens)
    batch, length = tokens_BS.shape
    sampler = Sampler(sampling or Sampling())
    occurred = _Occurred(model, tokens_BS, padding_B) if sampler.sampling.repetition_penalty != 1 else None
    made: list[list[int]] = [[] for _ in prompts]
    open_B = torch.ones(batch, dtype=torch.bool, device=model.device)
    ends = torch.tensor([end] if isinstance(end, int) else list(end or ()), dtype=torch.int64, device=model.device)
    positions_BS = (torch.arange(length, device=model.device) - padding_B[:, None]).clamp(min=0)

    def pick(logits_B1V: Tensor) -> Tensor:
        return sampler(logits_B1V[:, 0], None if occurred is None else occurred.seen_BV)[:, None]

    with caching(model.chunk, length + max_new_tokens, padding_B if bool(padding_B.any()) else None):
        for _ in range(max_new_tokens):
            last_B1 = torch.full((batch, 1), tokens_BS.shape[1] - 1, device=model.device)
            tokens_BS = model.choose(tokens_BS, last_B1, pick, position_ids_BS=positions_BS)
            if occurred is not None:
                occurred.add(tokens_BS)
            chosen = [token if is_open else None for token, is_open in zip(tokens_BS[:, 0].tolist(), open_B.tolist())]
            for ids, token in zip(made, chosen, strict=True):
                ids += [] if token is None else [token]
            if on_tokens is not None:
                on_tokens(chosen)
            if len(ends):
                open_B &= ~torch.isin(tokens_BS[:, 0], ends)
                if not bool(open_B.any()):
                    break
            positions_BS = positions_BS[:, -1:] + 1
    return made


def _aligned(model: CheckpointModel, prompts: Sequence[Sequence[int]], new: int) -> tuple[Tensor, Tensor]:
    """Return (tokens [B, S], padded on the left; number of padded positions [B])."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths:
        raise ValueError("generate needs at least one prompt")
    if 0 in lengths:
        raise ValueError(f"{_name(lengths, 0)} has no token; give at least one, such as the end-of-text token")
    if new < 1:
        raise ValueError(f"max_new_tokens is {new}; it must be 1 or more")
    longest, most = max(lengths), model.seq_length
    if longest + new > most:
        advice = "shorten the prompt, or ask for fewer tokens" if longest < most else "shorten the prompt"
        raise ValueError(
            f"{_name(lengths, longest)} and {counted(new, 'new token')} are {longest + new:,} tokens in all; "
            f"the model's sequence has {most:,} (model.seq_length): {advice}"
        )
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    tokens_BS = check_token_ids(torch.tensor(rows), model.config.model.vocab_size).to(model.device)
    return tokens_BS, torch.tensor([longest - length for length in lengths], device=model.device)


def _name(lengths: Sequence[int], length: int) -> str:
    """Return words for the first prompt of this length, for messages."""
    return "the prompt" if len(lengths) == 1 else f"prompt {lengths.index(length) + 1}"


class _Occurred:
    """The tokens that occurred in each sample, for the repetition penalty."""

    def __init__(self, model: CheckpointModel, tokens_BS: Tensor, padding_B: Tensor) -> None:
        real_BS = torch.arange(tokens_BS.shape[1], device=model.device) >= padding_B[:, None]
        shape = (len(tokens_BS), model.config.model.vocab_size)
        counts_BV = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self.seen_BV = counts_BV.scatter_add_(1, tokens_BS, real_BS.long()) > 0

    def add(self, tokens_B1: Tensor) -> None:
        """Add one more token of each sample."""
        self.seen_BV.scatter_(1, tokens_B1, True)
