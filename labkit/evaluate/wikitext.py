"""Perplexity of a long text, as the Megatron-LM paper computes it for WikiText-103 (arXiv 1909.08053, section 5.2).

A window of `seq_length` tokens moves over the text in steps of `stride`. The first window scores all its tokens. Each
later one scores its last `stride` tokens, and the rest of it is their context. So every token of the text except the
first is scored once.

Two perplexities are reported. `perplexity`, the paper's, divides the sum of losses by the number of original words,
T_o, so that models with different tokenizers can be compared. `adjusted_perplexity` is that of Megatron's code: exp of
the mean loss per token times (T - 1) / (T_o - 1), for a text of T tokens. Because T - 1 tokens are scored, that is
exp(sum of losses / (T_o - 1)), so the two differ only by the one token that is not scored.

WikiText's files are in a tokenised form (`Mr. Smith 's dog , @-@`). `detokenized` undoes that before the tokenizer
reads the text, but T_o counts the words of the file as it is (`original_words`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from labkit.config.errors import counted
from labkit.evaluate.model import CheckpointModel
from labkit.evaluate.sampling import NOT_FINITE

Blocks = list[tuple[float, int]]
"""(sum of losses, number of scored tokens) of each window, in order."""

_WORD = re.compile(r"\S+|(?<= )\n(?= )")
_JOINED = (
    ("s '", "s'"),
    *((f" @{mark}@ ", mark) for mark in "-,."),  # inside numbers and words
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
_PAIRS = ("()", "[]", "{}", '""', "''")
_REST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def original_words(text: str) -> int:
    """Return T_o: the number of words of `text`, and of its line ends that are between blanks.

    WikiText's files write a line end as a word of its own, and Megatron-LM splits them at single blanks
    (`tasks/zeroshot_gpt/datasets.py`). So the paper's 245,566 words of WikiText-103 are 241,211 words and 4,355 line
    ends.
    """
    return len(_WORD.findall(text.strip()))


def detokenized(text: str) -> str:
    """Return a text of WikiText as people write it: no blanks before punctuation, none inside brackets and quotes.

    The replacements and their order are those of Megatron-LM (`tasks/zeroshot_gpt/detokenizer.py`).
    """
    for old, new in _JOINED:
        text = text.replace(old, new)
    for left, right in _PAIRS:
        inside = f"[^{re.escape(right)}]*?"
        text = re.sub(rf"{re.escape(left)}\s*({inside})\s*{re.escape(right)}", rf"{left}\1{right}", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text


@dataclass(frozen=True)
class Perplexity:
    """The loss of a text, and the perplexities that follow from it. Their exponents are capped at 20."""

    loss_sum: float
    """Sum of the losses of all scored tokens, nats."""
    scored: int
    """Scored tokens."""
    tokens: int
    """Tokens of the text, T."""
    original_words: int
    """T_o, as `original_words` counts."""
    standard_error: float
    """Standard error of the mean loss per token; windows are taken as independent."""

    @property
    def loss(self) -> float:
        """Mean loss per token, nats."""
        return self.loss_sum / self.scored

    @property
    def perplexity(self) -> float:
        """exp(sum of losses / T_o), as in the paper."""
        return math.exp(min(self.loss_sum / self.original_words, 20.0))

    @property
    def adjusted_perplexity(self) -> float:
        """exp(mean loss x (T - 1) / (T_o - 1)), as in Megatron's code."""
        return math.exp(min(self.loss * (self.tokens - 1) / max(1, self.original_words - 1), 20.0))

    @property
    def token_perplexity(self) -> float:
        """exp(mean loss per token)."""
        return math.exp(min(self.loss, 20.0))

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of `perplexity`."""
        half = 1.96 * self.standard_error * self.scored
        low, high = ((self.loss_sum + sign * half) / self.original_words for sign in (-1, 1))
        return math.exp(min(low, 20.0)), math.exp(min(high, 20.0))


def window_starts(tokens: int, seq_length: int, stride: int) -> range:
    """Return the first tokens of the windows that score every token of the text but its first.

    Raises ValueError for a text of fewer than two tokens, and for a stride that is not from 1 to seq_length.
    """
    if not 1 <= stride <= seq_length:
        raise ValueError(f"stride = {stride}: must be from 1 to the model's sequence of {counted(seq_length, 'token')}")
    if tokens < 2:
        raise ValueError(f"the text has {counted(tokens, 'token')}; it needs 2, of which the second is scored")
    further = max(0, tokens - 1 - seq_length)
    return range(0, stride * math.ceil(further / stride) + 1, stride)


def score_windows(
    model: CheckpointModel,
    tokens: Sequence[int],
    *,
    stride: int = 32,
    micro_batch_size: int = 4,
    done: Blocks | None = None,
    on_blocks: Callable[[Blocks, int], None] | None = None,
) -> Blocks:
    """Score every window of the text. All ranks call this together and get the same.

    done: windows that an earlier call has scored, after which this one continues.
    on_blocks: called on every rank after each batch, with all windows so far and the number of all windows.

    Raises ValueError for losses that are not finite.
    """
    starts = window_starts(len(tokens), model.seq_length, stride)
    blocks = list(done or [])
    text = torch.as_tensor(tokens, dtype=torch.int64)
    while len(blocks) < len(starts):
        batch = starts[len(blocks) : len(blocks) + micro_batch_size]
        rows = [_window(text, start, model.seq_length, stride) for start in batch]
        inputs_BS, labels_BS, counted_BS = (torch.stack(part).to(model.device) for part in zip(*rows, strict=True))
        loss_BS = model.losses(inputs_BS, labels_BS).double().masked_fill(~counted_BS, 0)
        if not bool(loss_BS.isfinite().all()):
            raise ValueError(NOT_FINITE)
        blocks += list(zip(loss_BS.sum(dim=1).tolist(), counted_BS.sum(dim=1).tolist()))
        if on_blocks is not None:
            on_blocks(blocks, len(starts))
    return blocks


def _window(
    text: torch.Tensor, start: int, seq_length: int, stride: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens, labels, True where the label is scored) of one window, padded after the end of the text."""
    piece = text[start : start + seq_length + 1]
    real = len(piece) - 1
    inputs, labels = torch.zeros(2, seq_length, dtype=torch.int64)
    inputs[:real], labels[:real] = piece[:-1], piece[1:]
    counted = torch.zeros(seq_length, dtype=torch.bool)
    counted[0 if start == 0 else seq_length - stride : real] = True
    return inputs, labels, counted


def perplexity_of(blocks: Blocks, *, tokens: int, original_words: int) -> Perplexity:
    """Return the perplexity of scored windows, with the standard error of a ratio of sums."""
    total, scored = sum(loss for loss, _ in blocks), sum(count for _, count in blocks)
    mean, count = total / scored, len(blocks)
    spread = sum((loss - mean * number) ** 2 for loss, number in blocks)
    error = math.sqrt(spread * count / max(1, count - 1)) / scored
    return Perplexity(total, scored, tokens, original_words, error)
