"""Wrong answers to the exercises of chapter 22, with what each believes and words of its score."""

import math
import re

import numpy as np

# ---- 22.similarity ----


def by(units, n=5, ratio=lambda one, other: len(one & other) / len(one | other), collect=set, least=1):
    """A similarity by n-grams of what `units` cuts a text into."""

    def answer(a, b):
        one, other = (
            collect([tuple(cut[at : at + n]) for at in range(max(least, len(cut) - n + 1))])
            for cut in (units(a), units(b))
        )
        return ratio(one, other) if one or other else 0.0

    return answer


def words(text):
    return re.findall(r"\w+", text.lower())


def repeated(one, other):
    common = sum(min(one.count(gram), other.count(gram)) for gram in set(one))
    return common / (len(one) + len(other) - common)


SIMILARITY = {
    # Believes that a copy is equal to its original.
    "exact": (lambda a, b: float(a == b), "a comma is enough to get past it"),
    "bag": (by(words, 1), "these are words without their order"),
    "characters": (by(lambda text: list(text.lower())), "five characters in a row"),
    "capitals": (by(lambda text: re.findall(r"\w+", text)), "make the text lower case first"),
    "punctuation": (by(lambda text: text.lower().split()), "take the words alone"),
    "containment": (by(words, ratio=lambda a, b: len(a & b) / min(len(a), len(b))), "the smaller set"),
    "sum": (by(words, ratio=lambda a, b: len(a & b) / (len(a) + len(b))), "the common shingles twice; divide"),
    "dice": (by(words, ratio=lambda a, b: 2 * len(a & b) / (len(a) + len(b))), "(Dice)"),
    "lists": (by(words, ratio=repeated, collect=list), "take sets"),
    "short": (by(words, least=0), "let all its words be one"),
}

# ---- 22.bands ----


def fewest(hashes, threshold, most_missed):
    """The right answer: as many rows as the hashes allow, and the fewest bands that miss little enough."""
    legal = [
        (count, rows)
        for rows in range(1, hashes + 1)
        if (count := math.ceil(math.log(most_missed) / math.log1p(-(threshold**rows)))) * rows <= hashes
    ]
    return legal[-1]


BANDS = {
    "one row": (lambda hashes, s, missed: (hashes, 1), "bands of one row let nearly every pair in"),
    "one band": (lambda hashes, s, missed: (1, hashes), "agree everywhere"),
    "swapped": (lambda *case: fewest(*case)[::-1], "bands and rows are swapped"),
    "too many": (lambda *case: (fewest(*case)[0], fewest(*case)[1] + 9), "more hashes than a sketch has"),
    # Believes that a curve is steep enough when it's halfway up at the threshold.
    "half": (lambda hashes, s, missed: fewest(hashes, s, 0.5), "too many similar pairs"),
    "all hashes": (lambda hashes, s, missed: (hashes // 2, 2), "can a band have more rows"),
    "words": (lambda *case: "many", "which are not (bands, rows)"),
}

# ---- 22.keep ----


def kept(documents, tests, similar, is_short, *, first_short=True, removing="kept", known=lambda tests: tests):
    """The right loop; `removing` says which earlier documents remove a later one."""
    found, others = [], list(known(tests))
    for number, document in enumerate(documents):
        short, copy = is_short(document), any(similar(document, other) for other in others)
        if not (short and first_short) and not copy:
            found.append(number)
        which = {"short": short, "copies": copy, "all": True, "kept": False}
        if which[removing] or not (short or copy):
            others.append(document)
    return found


KEEP = {
    "all": (lambda *case: kept(*case, removing="all"), "whatever was left out, short or copy"),
    # Looks for copies first, and for short documents afterwards.
    "short": (lambda *case: kept(*case, removing="short"), "nobody would have the text any more"),
    "copies": (lambda *case: kept(*case, removing="copies"), "far from all that is kept"),
    "no tests": (lambda *case: kept(*case, known=lambda tests: []), "the test documents are not looked at"),
    "long tests": (
        lambda documents, tests, similar, is_short: kept(
            documents, [text for text in tests if not is_short(text)], similar, is_short
        ),
        "a short test document counts, too",
    ),
    "last": (
        lambda documents, tests, *how: sorted(
            len(documents) - 1 - number for number in kept(documents[::-1], tests, *how)
        ),
        "the first one stays",
    ),
}

# ---- 22.report ----


def reported(run=lambda dev, test: np.argsort(dev, kind="stable")[(len(dev) - 1) // 2], score=None, total=None):
    """Report the scores of a run, or other scores, and an ensemble made by `total` from the logits."""

    def answer(dev_logits, dev_labels, test_logits, test_labels):
        dev = (dev_logits.argmax(-1) == dev_labels).mean(-1)
        test = (test_logits.argmax(-1) == test_labels).mean(-1)
        chosen = run(dev, test)
        summed = total(test_logits) if total else test_logits.sum(0)
        ensemble = (summed.argmax(-1) == test_labels).mean()
        return (*(score(dev, test) if score else (dev[chosen], test[chosen])), ensemble)

    return answer


def probabilities(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return (shares / shares.sum(-1, keepdims=True)).sum(0)


REPORT = {
    "best": (reported(run=lambda dev, test: dev.argmax()), "this is the best of the runs"),
    "first": (reported(run=lambda dev, test: 0), "this is the first run"),
    "means": (reported(score=lambda dev, test: (dev.mean(), test.mean())), "the paper reports medians"),
    "medians": (reported(score=lambda d, t: (np.median(d), np.median(t))), "this is the median of the test scores"),
    "votes": (reported(total=lambda logits: np.eye(4)[logits.argmax(-1)].sum(0)), "the runs vote here"),
    "probabilities": (reported(total=probabilities), "add the logits"),
    "twice": (reported(total=lambda logits: logits.sum(0) + logits[0]), "counted twice"),
}

TABLES = {"22.similarity": SIMILARITY, "22.bands": BANDS, "22.keep": KEEP, "22.report": REPORT}
RIGHT = {
    "22.similarity": by(words),
    "22.bands": lambda *case: list(fewest(*case)),
    "22.keep": kept,
    "22.report": reported(),
}
