"""Exercises and bets of chapter 22: similar documents, bands of a sketch, who removes whom, the number to report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.check.bets import ask
from labkit.check.scoring import Misreadings, Outcome, asked, close, exercise, holds, plain, shown

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

Array = NDArray[Any]

# ---- the similarity of two documents ----

_TEXT = "one two three four five six seven eight nine ten eleven twelve"
_PAIRS = (
    (_TEXT, _TEXT),
    (_TEXT, f"{_TEXT}."),
    (_TEXT, "One, two; three (four) five\nsix SEVEN eight nine. Ten eleven, twelve!"),
    (_TEXT, _TEXT.replace("seven", "7")),
    (_TEXT, "seven eight nine ten eleven twelve one two three four five six"),
    (_TEXT, "one two three four five six seven eight"),
    ("go on and on and on and on and on", "go on and on and on"),
    ("no such file", "no such file"),
    ("no such file", _TEXT),
)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _grams(units: Sequence[str], n: int = 5) -> list[tuple[str, ...]]:
    return [tuple(units[at : at + n]) for at in range(max(1, len(units) - n + 1))]


def _jaccard(one: Sequence[Any], other: Sequence[Any]) -> float:
    a, b = set(one), set(other)
    return len(a & b) / len(a | b)


def _similarity(a: str, b: str) -> float:
    return _jaccard(_grams(_words(a)), _grams(_words(b)))


@exercise("22.similarity", "Write similarity(a, b) -> the Jaccard similarity of two texts by their 5-grams of words.")
def similarity(answer: Any) -> Iterator[Outcome]:
    """Judge equal texts, other punctuation, a changed word, another order, an excerpt, repetitions, short texts."""
    return asked(
        _PAIRS,
        given="{!r} and {!r}".format,
        right=lambda a, b: round(_similarity(a, b), 4),
        tried=lambda a, b: round(float(answer(a, b)), 4),
        misread=_misread_similarity,
        equal=close(atol=1e-4),
    )


def _misread_similarity(a: str, b: str) -> Misreadings:
    one, other = _grams(_words(a)), _grams(_words(b))
    both, either = len(set(one) & set(other)), len(set(one) | set(other))
    common = sum(min(one.count(gram), other.count(gram)) for gram in set(one))
    found = {
        "this is an exact comparison; a comma is enough to get past it": float(a == b),
        "these are words without their order; a shingle is five words in a row": _jaccard(_words(a), _words(b)),
        "these are five characters in a row; take five words": _jaccard(
            _grams(list(a.lower())), _grams(list(b.lower()))
        ),
        "capitals count here; make the text lower case first": _jaccard(
            _grams(re.findall(r"\w+", a)), _grams(re.findall(r"\w+", b))
        ),
        "punctuation counts here; take the words alone": _jaccard(_grams(a.lower().split()), _grams(b.lower().split())),
        "this is the share of the smaller set; divide by what at least one of them has": (
            both / min(len(set(one)), len(set(other)))
        ),
        "the divisor has the common shingles twice; divide by the union": both / (len(set(one)) + len(set(other))),
        "this counts the common shingles twice over both sets (Dice); divide by the union": (
            2 * both / (len(set(one)) + len(set(other)))
        ),
        "repeated shingles count several times here; take sets": common / (len(one) + len(other) - common),
        "a text of fewer than five words has no shingle here; let all its words be one": (
            both / either if min(len(_words(a)), len(_words(b))) >= 5 else 0.0
        ),
    }
    return {words: round(value, 4) for words, value in found.items()}


# ---- how little has to change ----

ask(
    "22.words",
    "A document has 100 different words. You change some of them, far apart from each other. How many do you have to "
    "change before the copy is less than 0.7 similar?",
    misread=lambda: {
        "30 % of the words are far more than 30 % of the shingles: a changed word spoils the five that it is in.": 30,
        "You've counted that each word spoils five shingles, 30 of 96. But the copy has as many new ones, and they are "
        "in the union, too.": 6,
        "With three it's 81 of 111 shingles, 0.73.": 3,
    },
    unit="words",
    because="100 words have 96 shingles. k changes spoil 5 k of them and bring 5 k new ones: (96 - 5 k) / (96 + 5 k), "
    "which is 0.66 for k = 4.",
)
ask(
    "22.pairs",
    "OpenWebText has 8 million documents. One core compares each of them with each other one, as above. How long does "
    "that take?",
    choices={
        "under a day": "A comparison takes microseconds, and 8 million of those are seconds. But there are "
        "8 million times 8 million, halved.",
        "days to months": "There are 3.2 * 10^13 pairs, so one microsecond each would be 3.2 * 10^7 seconds, a year.",
        "years": "There are 3.2 * 10^13 pairs, and a year has 3.2 * 10^7 seconds: one microsecond each is a year.",
    },
)

# ---- bands ----

_SKETCHES = ((125, 0.7, 0.0101), (128, 0.7, 0.01), (128, 0.7, 0.05), (256, 0.8, 0.01), (64, 0.5, 0.1), (20, 0.9, 0.02))
"""(hashes of a sketch, similarity of a pair that must not be missed, share of such pairs that may be)."""


def _missed(bands: int, rows: int, similarity: float) -> float:
    return float((1 - similarity**rows) ** bands)


def _bands(hashes: int, threshold: float, most_missed: float) -> tuple[int, int]:
    """Return the legal choice with the fewest candidates at half the threshold."""
    every = [(b, r) for r in range(1, hashes + 1) for b in range(1, hashes // r + 1)]
    legal = [each for each in every if _missed(*each, threshold) <= most_missed]
    return min(legal, key=lambda each: 1 - _missed(*each, threshold / 2))


def draw_bands(answer: Any) -> Figure | None:
    """Draw the curve of the answer next to the best one."""
    from labkit.viz.sketch_bands import band_curves  # matplotlib, which a score does without

    hashes, threshold, most_missed = _SKETCHES[0]
    b, r = (int(each) for each in plain(answer(hashes, threshold, most_missed)))
    best = _bands(hashes, threshold, most_missed)
    curves = {"the least work": best} if (b, r) == best else {"yours": (b, r), "the least work": best}
    return band_curves(curves, threshold=threshold)


@exercise(
    "22.bands",
    "Write bands(hashes, threshold, most_missed) -> (bands, rows) that miss few pairs and let few others in.",
    draw=draw_bands,
)
def bands(answer: Any) -> Iterator[Outcome]:
    """Judge sketches of 20 to 256 hashes, for thresholds of 0.5 to 0.9."""
    for case in _SKETCHES:
        hashes, threshold, most_missed = case
        b, r = _bands(*case)
        yield holds(
            f"{hashes} hashes, threshold {threshold}, at most {most_missed:.2%} missed",
            f"{b} bands of {r}",
            lambda case=case: _judged_bands(answer(*case), *case),
        )


def _judged_bands(found: Any, hashes: int, threshold: float, most_missed: float) -> tuple[str, str]:
    found, best = plain(found), _bands(hashes, threshold, most_missed)
    if found == list(best):
        return "", ""
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(n, int) and n > 0 for n in found):
        return "not two counts", f"{shown(found)}, which are not (bands, rows)"
    b, r = found
    said, missed = f"{b} bands of {r}", _missed(b, r, threshold)
    if b * r > hashes:
        why = "these are more hashes than a sketch has"
        return why, f"{said}, {b * r} hashes: {why}"
    if b == 1 and missed > most_missed:
        why = "in one band a pair has to agree everywhere, so most similar pairs are missed"
    elif (r, b) == best:
        why = "bands and rows are swapped: a pair has to agree in all rows of any band"
    elif missed > most_missed:
        why = "too many similar pairs have no band in common; give more bands, or fewer rows"
    elif r == 1:
        why = "bands of one row let nearly every pair in; more rows make the curve steeper"
    else:
        why = "this misses few enough, and compares more than it has to; can a band have more rows, or be left out?"
    return why, f"{said}, which miss {missed:.2%}: {why}"


# ---- who removes whom ----

_SHORT = 4
"""Letters of a document that is too short."""
_CORPORA = (
    (["abcd", "efgh"], []),
    (["abc", "abcd", "stuv", "stuvw", "stuvwx"], []),
    (["abcd", "abcde", "efgh"], []),
    (["abc", "abcd", "efgh"], []),
    (["abcd", "abcde", "abcdef"], []),
    (["abcd", "efgh"], ["abcd"]),
    (["abcd", "abcde", "efgh"], ["abcdefg"]),
    (["abcd", "efgh"], ["abc"]),
    (["abcd", "abcde", "abcdef", "abcdefg"], ["abc"]),
)
"""(documents, test documents). Two are similar if one begins the other and has at most one letter more."""


def _alike(a: str, b: str) -> bool:
    return abs(len(a) - len(b)) <= 1 and (a.startswith(b) or b.startswith(a))


def _is_short(document: str) -> bool:
    return len(document) < _SHORT


def _kept(
    documents: Sequence[str],
    tests: Sequence[str],
    *,
    short_removes: bool = False,
    removed_removes: bool = False,
    long_tests: bool = False,
    last: bool = False,
) -> list[int]:
    """Return the numbers of the documents that are kept; an argument that is not its default is a misunderstanding."""
    kept: list[int] = []
    removing = [text for text in tests if not (long_tests and _is_short(text))]
    for number in reversed(range(len(documents))) if last else range(len(documents)):
        document = documents[number]
        short, known = _is_short(document), any(_alike(document, other) for other in removing)
        if not short and not known:
            kept.append(number)
        if not (short or known) or (short and short_removes) or (known and removed_removes):
            removing.append(document)
    return sorted(kept)


@exercise("22.keep", "Write keep(documents, tests, similar, is_short) -> the numbers of the documents that are kept.")
def keep(answer: Any) -> Iterator[Outcome]:
    """Judge copies, stubs, chains of copies, test documents, and test documents that are short."""
    return asked(
        _CORPORA,
        given="documents {} and tests {}".format,
        right=_kept,
        tried=lambda documents, tests: answer(list(documents), list(tests), _alike, _is_short),
        misread=lambda documents, tests: {
            "a short document that is left out removes no other: nobody would have the text any more": _kept(
                documents, tests, short_removes=True
            ),
            "a copy that is left out removes no other: the one after it may be far from all that is kept": _kept(
                documents, tests, removed_removes=True
            ),
            "whatever was left out, short or copy, removes later documents; only what is kept may": _kept(
                documents, tests, short_removes=True, removed_removes=True
            ),
            "a short test document counts, too: the model would be tested on it": _kept(
                documents, tests, long_tests=True
            ),
            "of two similar documents the first one stays": _kept(documents, tests, last=True),
            "the test documents are not looked at": _kept(documents, []),
            "short documents stay": [
                number for number in range(len(documents))
                if not any(_alike(documents[number], other) for other in [*tests, *documents[:number]])
            ],
        },
    )  # fmt: skip


# ---- five seeds ----

ask(
    "22.spread",
    "The same weights, the same data, the same learning rate; five seeds give five orders of the samples, five masks "
    "of dropout, and a new layer with other numbers. How far apart are the best and the worst score, of 160 questions?",
    choices={
        "at most one question": "A question is 0.6 points, about as much as RoBERTa and the 336M model differ in the "
        "paper's MNLI column. Chance does more here.",
        "up to 3 points": "That is a usual spread for a large model and a task with many samples. With few samples it "
        "is larger.",
        "over 3 points": "The order of few samples, masks and a head of random numbers lead to models that differ, and "
        "a small development set adds noise of its own.",
    },
)
ask(
    "22.ensemble",
    "Add the logits of the five runs, and choose by the sums. Where is this score, compared with the five?",
    choices={
        "below the median": "Runs that make the same mistakes can't correct each other, and one that is confident and "
        "wrong outvotes the others. It happens.",
        "from the median to the best": "Where the runs disagree, the sum follows those that are sure. If they make "
        "many mistakes together, that isn't enough to pass the best.",
        "above the best": "The sum follows the runs that are sure, and their mistakes differ. The paper's ensembles "
        "are above its single models, too. But count the questions before you call it a proof.",
    },
)


def _tables(seed: int, seeds: int) -> tuple[Array, Array, Array, Array]:
    """Return (dev logits, dev labels, test logits, test labels) of made-up runs of unequal quality."""
    numbers = np.random.default_rng(seed)
    made: list[Array] = []
    for count in (40, 32):
        labels = numbers.integers(0, 4, count)
        skill = numbers.uniform(0.5, 4.0, (seeds, 1, 1))
        logits = numbers.normal(0, 1.5, (seeds, count, 4)) + skill * np.eye(4)[labels]
        made += [np.round(logits * np.exp(numbers.normal(0, 1.2, (seeds, count, 1))), 2), labels]
    return made[0], made[1], made[2], made[3]


_RUNS = tuple(_tables(seed, seeds) for seed, seeds in ((249, 5), (237, 5), (195, 5), (269, 3), (5, 1)))


def _accuracies(logits: Array, labels: Array) -> Array:
    return np.asarray((logits.argmax(-1) == labels).mean(-1))


def _reported(case: Sequence[Array], chosen: Callable[[Array], int]) -> tuple[float, float]:
    dev, test = _accuracies(case[0], case[1]), _accuracies(case[2], case[3])
    run = chosen(dev)
    return float(dev[run]), float(test[run])


def _middle(dev: Array) -> int:
    return int(np.flatnonzero(dev == np.sort(dev)[(len(dev) - 1) // 2])[0])


def _summed(logits: Array, labels: Array) -> float:
    return float((logits.argmax(-1) == labels).mean())


@exercise(
    "22.report",
    "Write report(dev_logits, dev_labels, test_logits, test_labels) -> (dev score, test score, ensemble's test score).",
)
def report(answer: Any) -> Iterator[Outcome]:
    """Judge five seeds three times, three seeds, and one."""

    def given(*case: Array) -> str:
        dev, test = (list(np.round(_accuracies(*case[at : at + 2]), 3)) for at in (0, 2))
        return f"runs with dev {shown(dev)} and test {shown(test)}"

    return asked(
        _RUNS,
        given=given,
        right=_right_report,
        tried=lambda *case: [round(float(each), 4) for each in answer(*(part.copy() for part in case))],
        misread=_misread_report,
        equal=close(atol=1e-3),
    )


def _right_report(*case: Array) -> list[float]:
    return [round(each, 4) for each in (*_reported(case, _middle), _summed(case[2].sum(0), case[3]))]


def _misread_report(*case: Array) -> Misreadings:
    dev, test = _accuracies(case[0], case[1]), _accuracies(case[2], case[3])
    of_dev, of_test, ensemble = _right_report(*case)
    votes = np.eye(4)[case[2].argmax(-1)].sum(0)
    shares = np.exp(case[2] - case[2].max(-1, keepdims=True))
    shares = (shares / shares.sum(-1, keepdims=True)).sum(0)
    best = _reported(case, lambda scores: int(scores.argmax()))
    found = {
        "this is the best of the runs; report the one in the middle": (*best, ensemble),
        "the test set has chosen here: it is the best test score": (of_dev, float(test.max()), ensemble),
        "this is the median of the test scores; take the test score of the run in the middle of the development set": (
            of_dev, float(np.median(test)), ensemble
        ),
        "these are means; the paper reports medians": (float(dev.mean()), float(test.mean()), ensemble),
        "this is the first run; sort the runs by their development scores": (float(dev[0]), float(test[0]), ensemble),
        "the runs vote here; add their logits, so that one that is sure counts more": (
            of_dev, of_test, _summed(votes, case[3])
        ),
        "probabilities are added here; add the logits": (of_dev, of_test, _summed(shares, case[3])),
        "the first run is counted twice in the sum": (of_dev, of_test, _summed(case[2].sum(0) + case[2][0], case[3])),
        "the last is the mean of the runs' scores; add the logits, and score the sum": (
            of_dev, of_test, float(test.mean())
        ),
        "the best of the runs, three times over: an ensemble is a run of its own": (*best, best[1]),
    }  # fmt: skip
    return {words: [round(each, 4) for each in values] for words, values in found.items()}
