"""LAMBADA's cloze: does the model predict the last word of a passage? (arXiv 1606.06031; 1909.08053, section 5.2)

Each line of the file is a passage, as `{"text": "..."}`. The model reads all tokens before the target and, by teacher
forcing, those of the target. A passage counts as right if every token of the target is the most likely one.

    loose     the target is the last token of the passage
    strict    the target is the whole last word, as in the paper

The whole passage is tokenised at once, with one blank before the last word. The target begins at the first token that
has a part of the blank or the word. Megatron-LM tokenises the word alone, as `" word"`. GPT-2's tokenizer gives the
same tokens in both cases, but a tokenizer that marks the beginning of a text would mark the word as well: Llama's makes
`▁▁word`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from labkit.data.text import parse_json, read_lines, whole_characters
from labkit.evaluate.model import CheckpointModel

if TYPE_CHECKING:
    from tokenizers import Encoding

Encode = Callable[[str], "Encoding"]


@dataclass(frozen=True)
class Passage:
    """One passage as token ids."""

    context: list[int]
    target: list[int]
    """The tokens to predict."""


@dataclass(frozen=True)
class Accuracy:
    """How many passages of a file the model completes."""

    right: int
    passages: int

    @property
    def accuracy(self) -> float:
        """Share of the passages whose whole target was predicted."""
        return self.right / self.passages

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95% interval by Wilson (1927)."""
        z2, n, p = 1.96**2, self.passages, self.accuracy
        middle, half = p + z2 / (2 * n), 1.96 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
        return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def read_passages(path: str | Path, encode: Encode, *, strict: bool = True) -> list[Passage]:
    """Return the passages of a file of JSON lines. Raises a ValueError that names the line and its fault."""
    passages = []
    for number, line in enumerate(read_lines(path, "--path"), 1):
        if not line.strip():
            continue
        try:
            text = whole_characters(parse_json(line)["text"])
            passages.append(passage_of(text, encode, strict=strict))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f'{path}, line {number}: no passage; each line must be JSON as {{"text": "..."}}'
            ) from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not passages:
        raise ValueError(f"{path} has no passages")
    return passages


def passage_of(text: str, encode: Encode, *, strict: bool = True) -> Passage:
    """Cut a passage before its target. Raises ValueError if nothing is left before the target."""
    if not strict:
        ids = encode(text.strip()).ids
        if len(ids) < 2:
            raise ValueError("the passage has fewer than two tokens")
        return Passage(ids[:-1], ids[-1:])
    word = (text.split() or [""])[-1]
    before = text.rstrip().removesuffix(word).rstrip()
    whole = encode(f"{before} {word}")
    begin = next((place for place, (_, end) in enumerate(whole.offsets) if end > len(before)), len(whole.ids))
    if not 0 < begin < len(whole.ids):
        raise ValueError("the passage has fewer than two words")
    return Passage(whole.ids[:begin], whole.ids[begin:])


def score_passages(
    model: CheckpointModel,
    passages: Sequence[Passage],
    *,
    micro_batch_size: int = 8,
    done: Sequence[bool] = (),
    on_results: Callable[[list[bool], int], None] | None = None,
) -> list[bool]:
    """Return True for each passage whose target the model predicts. All ranks call this together and get the same.

    A passage longer than the model's sequence loses its beginning. done: results of an earlier call, after which this
    one continues. on_results: called on every rank after each batch, with all results so far and the number of
    passages.

    Raises ValueError for a target that the model's sequence cannot hold, and for logits that are not finite.
    """
    longest = max(len(passage.target) for passage in passages)
    if longest >= model.seq_length:
        raise ValueError(f"a target of {longest:,} tokens does not fit the model's sequence of {model.seq_length:,}")
    results = list(done)
    while len(results) < len(passages):
        batch = passages[len(results) : len(results) + micro_batch_size]
        results += _score(model, batch)
        if on_results is not None:
            on_results(results, len(passages))
    return results


def _score(model: CheckpointModel, batch: Sequence[Passage]) -> list[bool]:
    """Score one batch. Positions after a passage are padding, which a causal model does not see."""
    rows = [(passage.context + passage.target)[-model.seq_length - 1 :] for passage in batch]
    width, most = max(map(len, rows)) - 1, max(len(passage.target) for passage in batch)
    tokens_BS = torch.zeros(len(batch), width, dtype=torch.int64)
    positions_BP = torch.zeros(len(batch), most, dtype=torch.int64)
    for number, (row, passage) in enumerate(zip(rows, batch, strict=True)):
        tokens_BS[number, : len(row) - 1] = torch.tensor(row[:-1])
        count = len(passage.target)
        positions_BP[number, :count] = torch.arange(len(row) - 1 - count, len(row) - 1)
    chosen_BP = model.choose(
        tokens_BS.to(model.device), positions_BP.to(model.device), lambda logits_BPV: logits_BPV.argmax(dim=-1)
    )
    return [ids[: len(p.target)] == p.target for ids, p in zip(chosen_BP.tolist(), batch, strict=True)]
