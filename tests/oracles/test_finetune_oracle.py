"""Scores of fine-tuning against torchmetrics, on generated answers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from labkit.finetune.scores import choice_scores, squad_scores
from labkit.finetune.task_files import Choice, Passage

torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
pytestmark = pytest.mark.oracle
WORDS = ["the", "a", "An", "bug", "Bug.", "red", "co-op", "café", "3.5", "(hack)", "bug", "'s", "  ", "!", "read\tme"]


def test_f1_and_exact_match_of_generated_answers() -> None:
    """Answers of any words and lengths, with articles, punctuation and none at all; several truths a question."""
    from torchmetrics.functional.text.squad import _normalize_text
    from torchmetrics.text import SQuAD

    draw = random.Random(7)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(5)))

    passages, predicted = [], {}
    for number in range(500):
        answers = tuple((text(), 0) for _ in range(draw.randrange(4)))
        passages.append(Passage(str(number), "q", "c", answers))
        predicted[str(number)] = draw.choice([*(each for each, _ in answers), text(), text()])
    for passage in passages:
        ours = squad_scores([passage], predicted)
        # The official script of SQuAD 2.0 drops truths of articles alone; torchmetrics has the script of 1.1.
        told = [each for each, _ in passage.answers if _normalize_text(each)] or [""]
        truths = {"answers": {"text": told, "answer_start": [0] * len(told)}, "id": passage.id}
        theirs = SQuAD()([{"prediction_text": predicted[passage.id], "id": passage.id}], [truths])
        assert 100 * ours["f1"] == pytest.approx(float(theirs["f1"]), abs=1e-4), (passage, predicted[passage.id])
        assert 100 * ours["exact_match"] == pytest.approx(float(theirs["exact_match"])), passage
    shares = squad_scores(passages, predicted)
    assert 0.1 < shares["exact_match"] < shares["f1"] < 0.9, "the answers are neither all right nor all wrong"


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_accuracy(classes: int) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    random_numbers = np.random.default_rng(classes)
    logits, labels = random_numbers.normal(size=(200, classes)), random_numbers.integers(0, classes, 200)
    levels = random_numbers.choice(["middle", "high"], 200)
    examples = [Choice((("a", "b"),), int(label), str(level)) for label, level in zip(labels, levels)]
    ours = choice_scores(examples, logits.argmax(-1))
    for name, chosen in {
        "accuracy": labels >= 0,
        **{f"{each}_accuracy": levels == each for each in set(levels)},
    }.items():
        theirs = MulticlassAccuracy(classes, average="micro")(
            torch.tensor(logits[chosen]), torch.tensor(labels[chosen])
        )
        assert ours[name] == pytest.approx(float(theirs), abs=1e-6)
