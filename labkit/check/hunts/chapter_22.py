"""Hunt of chapter 22: a corpus that is cleaned, a model that is fine-tuned, and a number that is reported."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.data.cleaning import Cleaner
from labkit.finetune import finetuning, repeated_runs
from labkit.finetune.task_samples import Packer

# ---- the faults ----


def _short_ones_remove() -> AbstractContextManager[Any]:
    """A short document is left out, and remembered as if it had been kept."""
    honest = Cleaner._is_short

    def is_short(self: Cleaner, text: str) -> bool:
        short = honest(self, text)
        if short:
            self._seen.add(self._seen.of(text))
        return short

    return patch.object(Cleaner, "_is_short", is_short)


def _dev_in_training() -> AbstractContextManager[Any]:
    """The development questions are among those that are trained on."""
    honest = finetuning.read_task

    def read_task(*args: Any, **options: Any) -> Any:
        files = honest(*args, **options)
        files.train = [*files.train, *files.splits["dev"]]
        return files

    return patch.object(finetuning, "read_task", read_task)


def _one_segment() -> AbstractContextManager[Any]:
    """Every token has type 0."""
    honest = Packer.packed

    def packed(self: Packer, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens, types, mask = honest(self, first, second)
        return tokens, np.zeros_like(types), mask

    return patch.object(Packer, "packed", packed)


def _best_seed() -> AbstractContextManager[Any]:
    """The row of all seeds has the scores of the best one."""
    honest = repeated_runs.summary

    def summary(task: str, results: Sequence[Any]) -> Any:
        best = max(results, key=lambda result: result["scores"][repeated_runs.MAIN[task]])
        return honest(task, [best]) | {"seeds": [result["seed"] for result in results]}

    return patch.object(repeated_runs, "summary", summary)


def _counted_twice() -> AbstractContextManager[Any]:
    """The first run's logits are added twice."""
    honest = repeated_runs.added

    def added(logits: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return honest([*logits, logits[0]])

    return patch.object(repeated_runs, "added", added)


# ---- what a verdict says ----

_STAGE = {
    "cleaning": "Read the report of the cleaner: which counts are other than they should be? None.",
    "samples": "The arrays of a sample are those of the healthy run.",
    "training": "As many samples are trained on as there are in the file.",
    "report": "The row of all seeds has the median, and the ensemble is the sum of all runs' logits.",
}
_SHOWN = {"": "One of them differs from the healthy run in a way that chance can't explain. The others don't."}

HUNT = Hunt(
    chapter="22",
    scene="Run the rehearsal with it, suspect.around(rehearsal)(), and hold each part of what it returns against the "
    "healthy run's.",
    questions={
        "stage": "Where is the fault?",
        "shown_by": "Which part of what the rehearsal returns shows it?",
        "place": "What is done wrong, in a few words?",
    },
    choices={
        "stage": ("cleaning", "samples", "training", "report"),
        "shown_by": ("cleaned", "sample", "steps", "row", "logits"),
    },
    faults=(
        Fault(
            "one segment",
            _one_segment,
            {"stage": "samples", "shown_by": "sample", "place": r"type|segment"},
            {
                "stage": _STAGE,
                "shown_by": {"steps": "There are as many steps as before.", **_SHOWN},
                "place": {
                    "label": "The label is right.",
                    "mask|padd": "The mask says rightly where the padding begins.",
                    "": "Compare the arrays of the sample one by one.",
                },
            },
            "All token types were 0, so the model couldn't see where the option ends and the article begins, except by "
            "[SEP]. The loss falls all the same, and by chance a score may even be higher. Only the sample's array of "
            "types shows it.",
        ),
        Fault(
            "short ones remove",
            _short_ones_remove,
            {"stage": "cleaning", "shown_by": "cleaned", "place": r"short|teaser|stub|preview"},
            {
                "stage": _STAGE,
                "shown_by": _SHOWN,
                "place": {
                    "test": "As many documents as before were left out as copies of test documents.",
                    "thresh|similar|jaccard|hash": "Similarity is computed as before. Similar to what, though?",
                    "": "More documents count as duplicates. What are they duplicates of, and is that in the corpus?",
                },
            },
            "A short document was left out and remembered all the same, so that the whole text, when it came later, "
            "counted as its duplicate. Neither was kept. Nothing downstream can show it: the model just never reads "
            "these documents. labkit's own cleaner did this once.",
        ),
        Fault(
            "best seed",
            _best_seed,
            {"stage": "report", "shown_by": "row", "place": r"best|max|median|seed"},
            {
                "stage": _STAGE,
                "shown_by": {"logits": "The ensemble is what it should be.", **_SHOWN},
                "place": {"": "Which of the runs' scores does the row have, and where is it among them?"},
            },
            "The row of all seeds had the scores of the best one. Every run was right. Among three runs the best is a "
            "bit above the median, among twenty a good deal, and no model has become better by it.",
        ),
        Fault(
            "dev in training",
            _dev_in_training,
            {"stage": "training", "shown_by": "steps", "place": r"dev|leak|train"},
            {
                "stage": _STAGE,
                "shown_by": {
                    "row": "A development score above the test score can be chance, with so few questions. What can't?",
                    **_SHOWN,
                },
                "place": {"": "Where do the additional steps come from? How many questions are they?"},
            },
            "The development questions were among those that were trained on. With so few steps the score hardly says "
            "so; but the number of steps does, because it's the epochs times the samples over the batch.",
        ),
        Fault(
            "counted twice",
            _counted_twice,
            {"stage": "report", "shown_by": "logits", "place": r"twice|double|two times|2 ?x|ensemble|added|sum"},
            {
                "stage": _STAGE,
                "shown_by": {"row": "The row of all seeds has the run in the middle.", **_SHOWN},
                "place": {"": "Add the runs' logits yourself, and take them from the ensemble's. What is left?"},
            },
            "The first run was in the sum twice. The ensemble's score is a score like any other, and may be higher or "
            "lower. What the ensemble has more than the sum of the runs are exactly the first run's logits.",
        ),
    ),
)
