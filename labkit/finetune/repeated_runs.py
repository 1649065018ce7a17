"""Several fine-tunings of one task: a sweep over Table 6, the median of several seeds, an ensemble of them.

The procedure is that of section 5.3 of Megatron-LM's paper (arXiv 1909.08053). A sweep trains each different row of the
task with the first seed and keeps the one that is best on the development set. Then every seed trains with that row.
The reported number is the median over the seeds. RACE's test scores are those of the run whose development score is the
median.

An ensemble adds the scores of all seeds, the logits of classes, pairs or tokens, and chooses by the sums.

A finished run is a row in a file of JSON lines, and a run that has a row is not computed again. But an ensemble needs
the logits themselves, which no row holds, so it trains all of its seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from labkit.evaluate.records import Key, Records, agreed, digest_of
from labkit.finetune.finetuning import Prepared, Settings, Trained, prepare, train_and_predict
from labkit.finetune.starting_weights import weights_at
from labkit.finetune.table6 import Row, rows_of
from labkit.launch import info
from labkit.train.checkpoint.inventory import is_export
from labkit.train.checkpoint.manifest import MANIFEST

MAIN = {"mnli": "m_accuracy", "qqp": "dev_accuracy", "race": "dev_accuracy", "squad": "dev_f1"}
"""The score that chooses the best row of a sweep and the median run."""

Result = dict[str, Any]


def finetune(
    settings: Settings,
    *,
    seeds: Sequence[int] = (1234,),
    sweep: bool = False,
    ensemble: bool = False,
    records: Records | None = None,
) -> list[Result]:
    """Fine-tune with every seed, and return a row for each run and a last one for all; the same on all ranks.

    records: rank 0 adds the rows there.

    Raises what `prepare` and `train_and_predict` raise: ValueError, FileNotFoundError, ConfigError, CheckpointError.
    """
    weights = agreed(lambda: str(weights_at(Path(settings.checkpoint), settings.step).source))
    runs = _Runs(prepare(replace(settings, checkpoint=weights, step=None)), records, keep=ensemble)
    row = runs.prepared.row
    if sweep:
        tried = list(dict.fromkeys(settings.own(each) for each in rows_of(runs.prepared.files.row)))
        found = [runs.one(each, seeds[0]) for each in tried]
        row = tried[_best([result["scores"][MAIN[settings.task]] for result in found])]
    of_seeds = [runs.one(row, seed) for seed in seeds]
    last = summary(settings.task, of_seeds)
    if ensemble:
        last["ensemble"] = runs.prepared.scores(added([runs.trained[row, seed].logits for seed in seeds]))
    about = {**row._asdict(), "summary": list(seeds), "sweep": sweep, "ensemble": ensemble}
    return [*runs.results.values(), runs.written(last, about)]


def summary(task: str, results: Sequence[Result]) -> Result:
    """Return the medians over the runs of all seeds, and the test scores of the median run.

    The median of an even number of runs is the lower of the two in the middle, so it is always the score of a run.
    """
    scores = list(results[0]["scores"])
    medians = {name: statistics.median_low(result["scores"][name] for result in results) for name in scores}
    main = MAIN[task]
    chosen = next(result for result in results if result["scores"][main] == medians[main])
    of_test = {name: chosen["scores"][name] for name in scores if name.startswith("test_")}
    found = {key: results[0][key] for key in ("task", "checkpoint", "batch", "lr", "epochs")}
    found |= {"seeds": [result["seed"] for result in results], "median_seed": chosen["seed"]}
    return found | {"median": {**medians, **of_test}}


def added(logits: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the sums of several runs' logits, by split."""
    return {split: np.sum([each[split] for each in logits], axis=0) for split in logits[0]}


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


class _Runs:
    """The runs of one call, each trained once."""

    def __init__(self, prepared: Prepared, records: Records | None, *, keep: bool) -> None:
        """keep: keep the logits of each run, and so train it even if it has a row already."""
        self.prepared, self._records, self._keep = prepared, records, keep
        self._writes = info.rank_info().rank == 0
        self._sources = sources(prepared) if records is not None else {}
        self.results: dict[tuple[Row, int], Result] = {}
        self.trained: dict[tuple[Row, int], Trained] = {}

    def one(self, row: Row, seed: int) -> Result:
        """Return the row of a run, which is read or computed."""
        if (row, seed) not in self.results:
            self.results[row, seed] = self._one(row, seed)
        return self.results[row, seed]

    def _one(self, row: Row, seed: int) -> Result:
        about = {**row._asdict(), "seed": seed}
        if not self._keep and (known := self._known(about)) is not None:
            return known
        trained = train_and_predict(self.prepared, row, seed)
        if self._keep:
            self.trained[row, seed] = trained
        files = self.prepared.files
        return self.written(
            {
                "task": files.row,
                "checkpoint": str(self.prepared.weights.source),
                **about,
                "steps": len(trained.losses),
                "first_loss": trained.losses[0],
                "last_loss": trained.losses[-1],
                "saved": self.prepared.settings.saved_at(row, seed),
                "left_out": files.left_out,
                "scores": self.prepared.scores(trained.logits),
            },
            about,
        )

    def _known(self, about: Key) -> Result | None:
        records = self._records
        return None if records is None else agreed(lambda: records.finished(self._key(about)))

    def _key(self, about: Key) -> Key:
        """Return everything that a row depends on, the layout included, because layouts differ by rounding."""
        given: Key = {"ranks": info.rank_info().world_size}
        given |= {name: value for name, value in asdict(self.prepared.settings).items() if name not in _IN_SOURCES}
        return {**given, **about, **self._sources}

    def written(self, result: Result, about: Key) -> Result:
        """Return the result as a row, which rank 0 adds to the records."""
        if self._records is None:
            return result
        row = {**result, "key": self._key(about)}
        if self._writes and self._records.finished(row["key"]) is None:
            self._records.add(row)
        return row


_IN_SOURCES = ("path", "checkpoint", "step", "tokenizer", "size", "batch", "lr", "epochs")
"""Settings that a row's key has in another form: as digests of files, or as the numbers of the row."""


def sources(prepared: Prepared) -> Key:
    """Return digests of the weights, the tokenizer and the task's files."""
    source, tokenizer = prepared.weights.source, prepared.settings.tokenizer
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    weights = [digest_of(file) for file in files] if is_export(source) else [digest_of(source / MANIFEST)]
    return {
        "weights": weights,
        "tokenizer": "bundled" if tokenizer is None else digest_of(tokenizer),
        "files": prepared.files.digest,
    }
