"""Scores of predictions: accuracy, and SQuAD's exact match and F1 with questions that have no answer.

SQuAD compares words after capitals, punctuation, articles and extra white space are removed from both texts. F1 is the
harmonic mean of precision and recall over words, counted as often as they occur. A prediction is scored against each
right answer of its question, and the best score counts. If the truth or the prediction is that there is no answer, both
scores are 1 if the other says so, too, else 0 (arXiv 1806.03822).

All scores are shares from 0 to 1; the paper's table has them times 100.

Shapes: N samples, L labels, n scores of one label.
"""

from __future__ import annotations

import re
import string
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from labkit.evaluate.sampling import NOT_FINITE
from labkit.finetune.task_files import LEVELS, Choice, Passage, TaskFiles
from labkit.finetune.task_samples import Windows

LONGEST_ANSWER = 30
"""Most tokens of an answer that is considered, as in the code of arXiv 1810.04805."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def scores_of(files: TaskFiles, split: str, logits_NLn: np.ndarray, windows: Windows | None) -> dict[str, float]:
    """Return the scores of one split by name, such as `dev_accuracy` or `dev_f1`.

    logits_NLn: logits of each sample, in the order of the file. windows: windows of SQuAD; None for other tasks.

    Raises ValueError for logits that are not finite.
    """
    if not np.isfinite(logits_NLn).all():
        raise ValueError(f"{split}: {NOT_FINITE}")
    if windows is None:
        found = choice_scores(files.splits[split], logits_NLn.argmax(-1)[:, 0])
    else:
        passages: Sequence[Passage] = files.splits[split]
        may_refuse = any(not passage.answers for passage in passages)
        found = squad_scores(passages, answers(passages, windows, logits_NLn, may_refuse=may_refuse))
    return {f"{split}_{name}": value for name, value in found.items()}


# ---- choices ----


def choice_scores(examples: Sequence[Choice], chosen_N: np.ndarray) -> dict[str, float]:
    """Return the accuracy, and for RACE that of each level as well."""
    right_N = chosen_N == np.array([example.label for example in examples])
    found = {"accuracy": float(right_N.mean())}
    for level in LEVELS:
        of_level_N = np.array([example.level == level for example in examples])
        if of_level_N.any():
            found[f"{level}_accuracy"] = float(right_N[of_level_N].mean())
    return found


# ---- spans ----


def answers(
    passages: Sequence[Passage], windows: Windows, logits_NLn: np.ndarray, *, may_refuse: bool
) -> dict[str, str]:
    """Return the predicted text of each question by its id; empty if the prediction is that it has no answer.

    logits_NLn: [windows, 2, S], scores of each position as the first and as the last token. The score of a span is the
    sum of both. may_refuse: "no answer" competes with the spans. Its score is that of [CLS] as first and as last token,
    in the window where that is lowest, and it wins if it is above that of every span.
    """
    best: dict[int, tuple[float, int, int, int]] = {}
    none: defaultdict[int, float] = defaultdict(lambda: np.inf)
    for index, place in enumerate(windows.places):
        first_n, last_n = logits_NLn[index, :, place.at : place.at + place.end - place.start].astype(np.float64)
        none[place.passage] = min(none[place.passage], float(logits_NLn[index, :, 0].sum()))
        if len(first_n) == 0:
            continue
        score, first, last = best_span(first_n, last_n)
        if place.passage not in best or score > best[place.passage][0]:
            best[place.passage] = score, index, first, last
    found = {}
    for number, passage in enumerate(passages):
        refused = number not in best or (may_refuse and none[number] > best[number][0])
        found[passage.id] = "" if refused else windows.text(*best[number][1:])
    return found


def best_span(first_n: np.ndarray, last_n: np.ndarray) -> tuple[float, int, int]:
    """Return (score, first token, last token) of the best span of at most `LONGEST_ANSWER` tokens."""
    tokens, best = len(first_n), (-np.inf, 0, 0)
    for further in range(min(LONGEST_ANSWER, tokens)):
        sums = first_n[: tokens - further] + last_n[further:]
        if (score := sums[at := int(sums.argmax())]) > best[0]:
            best = float(score), at, at + further
    return best


def words_of_answer(text: str) -> list[str]:
    """Return the words that SQuAD compares."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(prediction: str, truth: str) -> float:
    """Return 1 if both have the same words in the same order, else 0."""
    return float(words_of_answer(prediction) == words_of_answer(truth))


def f1(prediction: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall over words."""
    ours, theirs = words_of_answer(prediction), words_of_answer(truth)
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def squad_scores(passages: Sequence[Passage], predicted: Mapping[str, str]) -> dict[str, float]:
    """Return F1 and exact match over all questions, and separately for those with and without an answer if there are
    both."""
    by_kind: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for passage in passages:
        texts = [text for text, _ in passage.answers if words_of_answer(text)] or [""]
        text = predicted[passage.id]
        pair = max(f1(text, truth) for truth in texts), max(exact_match(text, truth) for truth in texts)
        by_kind[""].append(pair)
        by_kind["answerable_" if passage.answers else "unanswerable_"].append(pair)
    if len(by_kind) == 2:
        by_kind = defaultdict(list, {"": by_kind[""]})
    return {
        f"{kind}{name}": float(np.mean([pair[at] for pair in pairs]))
        for kind, pairs in by_kind.items()
        for at, name in enumerate(("f1", "exact_match"))
    }
