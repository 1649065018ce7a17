"""One evaluation of one checkpoint as a task: its key, the items to score, and the row of its result.

`labkit eval` and the chapter on evaluation both call `evaluate` inside ranks. WikiText's text and LAMBADA's passages
become the same kind of task, so progress, resuming and rows are implemented once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.comm.collectives import gather_objects
from labkit.data.text import load_tokenizer, read_text, size_of
from labkit.evaluate.lambada import Accuracy, read_passages, score_passages
from labkit.evaluate.model import CheckpointModel
from labkit.evaluate.records import Key, Records, digest_of
from labkit.evaluate.wikitext import detokenized, original_words, perplexity_of, score_windows
from labkit.launch import info
from labkit.train.checkpoint.manifest import MANIFEST

if TYPE_CHECKING:
    from tokenizers import Tokenizer

KEEP_EVERY = 10.0
"""Seconds after which what is scored so far is stored again."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings of an evaluation; picklable, so that a launcher can send it to ranks."""

    name: str
    """`wikitext` or `lambada`."""
    path: str
    """File of the text, or of the passages."""
    tokenizer: str | None = None
    """File of the tokenizer; None is the bundled one."""
    stride: int = 32
    """wikitext: tokens by which the window moves."""
    detokenize: bool = True
    """wikitext: undo the tokenised form of WikiText's files."""
    strict: bool = True
    """lambada: the target is the whole last word, not its last token alone."""
    micro_batch_size: int = 4
    """Windows or passages of one forward pass."""
    precision: str = "fp32"
    """Type of the computation."""

    def key(self, checkpoint: Path) -> Key:
        """Return everything that the result depends on."""
        settings = {k: v for k, v in asdict(self).items() if k not in ("path", "tokenizer", "micro_batch_size")}
        tokenizer = "bundled" if self.tokenizer is None else digest_of(self.tokenizer)
        checkpoint = checkpoint.resolve()
        return {
            **settings,
            "file": digest_of(self.path),
            "tokenizer": tokenizer,
            "checkpoint": str(checkpoint),
            "manifest": digest_of(checkpoint / MANIFEST),
        }


def evaluate(model: CheckpointModel, task: Task, records: Records | None = None) -> dict[str, Any]:
    """Score the checkpoint of `model` and return its row; the same on all ranks, which call this together.

    records: rank 0 adds the row there, and stores what is scored so far every few seconds. If rank 0 has the row
        already, it is returned as it is.

    Raises ValueError if the text cannot be scored.
    """
    key, first = task.key(model.folder), model.groups.world.rank == 0
    own = (records.finished(key), records.done(key)) if records is not None else (None, [])
    row, done = gather_objects(own, model.groups.world)[0]
    if row is not None:
        return row
    keeper = _Keeper(records if first else None, key, model.folder.name)
    found = TASKS[task.name](model, task, done, keeper)
    row = {"checkpoint": model.folder.name, "step": model.manifest.step, "task": task.name, **found, "key": key}
    if records is not None and first:
        records.add(row)
    return row


class _Keeper:
    """Reports the progress of an evaluation, and stores what is scored so far every `KEEP_EVERY` seconds."""

    def __init__(self, records: Records | None, key: Key, name: str) -> None:
        self._records, self._key, self._name, self._kept = records, key, name, time.monotonic()

    def __call__(self, scored: list[Any], count: int) -> None:
        info.report_progress({"run": self._name, "steps": count, "step": len(scored)})
        if self._records is not None and time.monotonic() - self._kept > KEEP_EVERY:
            self._records.keep(self._key, scored)
            self._kept = time.monotonic()


def _wikitext(model: CheckpointModel, task: Task, done: Sequence[Any], keeper: Callable[..., None]) -> dict[str, Any]:
    text = read_text(task.path, "--path")
    if not (words := original_words(text)):
        raise ValueError(f"{task.path} has no words; give a text to score")
    ids = tokenizer_for(model, task.tokenizer).encode(detokenized(text) if task.detokenize else text).ids
    blocks = [(float(loss), int(count)) for loss, count in done]
    blocks = score_windows(
        model, ids, stride=task.stride, micro_batch_size=task.micro_batch_size, done=blocks, on_blocks=keeper
    )
    found = perplexity_of(blocks, tokens=len(ids), original_words=words)
    low, high = found.interval
    return {
        "perplexity": found.perplexity,
        "low": low,
        "high": high,
        "adjusted_perplexity": found.adjusted_perplexity,
        "token_perplexity": found.token_perplexity,
        "loss": found.loss,
        "tokens": found.tokens,
        "original_words": found.original_words,
    }


def _lambada(model: CheckpointModel, task: Task, done: Sequence[Any], keeper: Callable[..., None]) -> dict[str, Any]:
    passages = read_passages(task.path, tokenizer_for(model, task.tokenizer).encode, strict=task.strict)
    results = score_passages(
        model, passages, micro_batch_size=task.micro_batch_size, done=[bool(each) for each in done], on_results=keeper
    )
    found = Accuracy(sum(results), len(results))
    low, high = found.interval
    return {"accuracy": found.accuracy, "low": low, "high": high, "right": found.right, "passages": found.passages}


TASKS = {"wikitext": _wikitext, "lambada": _lambada}
"""The evaluations by the name that `labkit eval` takes."""


def tokenizer_for(model: CheckpointModel, tokenizer: str | None) -> Tokenizer:
    """Return the tokenizer of a file. Raises ValueError if the model's vocabulary is too small for it."""
    loaded = load_tokenizer(tokenizer)
    size, most = size_of(loaded), model.config.model.vocab_size
    if size > most:
        raise ValueError(
            f"the tokenizer has {size:,} tokens (the largest id plus 1), and the model's vocabulary {most:,} "
            "(model.vocab_size): give the tokenizer that the model was trained with (--tokenizer)"
        )
    return loaded
