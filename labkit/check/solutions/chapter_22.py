"""Solutions of chapter 22, Cleaning a corpus and fine-tuning."""

import math
import re

from labkit.check.solution_source import solves


@solves("22.similarity")
def similarity(a, b):
    """What both sets of shingles have, over what at least one of them has."""

    def shingles(text):
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}

    one, other = shingles(a), shingles(b)
    return len(one & other) / len(one | other)


@solves("22.bands")
def bands(hashes, threshold, most_missed):
    """More rows make the curve steeper, and need more bands to miss as little: take as
    many rows as the hashes allow, and the fewest bands that do."""
    best = None
    for rows in range(1, hashes + 1):
        needed = math.log(most_missed) / math.log1p(-(threshold**rows))
        if (count := math.ceil(needed)) * rows <= hashes:
            best = count, rows
    return best


@solves("22.keep")
def keep(documents, tests, similar, is_short):
    """Only what is kept, and every test document, can remove a later document."""
    kept = []
    for number, document in enumerate(documents):
        others = tests + [documents[each] for each in kept]
        if not is_short(document) and not any(similar(document, o) for o in others):
            kept.append(number)
    return kept


@solves("22.report")
def report(dev_logits, dev_labels, test_logits, test_labels):
    """The development set chooses the run in the middle, and the test set has no say."""
    dev = (dev_logits.argmax(-1) == dev_labels).mean(-1)  # by seed
    test = (test_logits.argmax(-1) == test_labels).mean(-1)
    middle = list(dev).index(sorted(dev)[(len(dev) - 1) // 2])
    ensemble = (test_logits.sum(0).argmax(-1) == test_labels).mean()
    return dev[middle], test[middle], ensemble
