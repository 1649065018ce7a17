"""Solutions of chapter 20, Evaluation and generation."""

import math

from labkit.check.solution_source import solves


@solves("20.windows")
def my_windows(tokens, length, stride):
    """The first window scores all its labels; each later one those that the window
    before has not reached."""
    found, scored = [], 1
    while scored < tokens or not found:
        start = stride * len(found)
        end = min(start + length + 1, tokens)
        found.append((start, scored, end))
        scored = end
    return found


@solves("20.perplexity")
def perplexity(blocks, words):
    """All losses, shared out over the words of the file. The stub is right only
    where words and tokens are as many, and all windows have one mean loss."""
    return math.exp(sum(loss for loss, _ in blocks) / words)


def _most_likely_first(probabilities):
    return sorted(range(len(probabilities)), key=lambda each: -probabilities[each])


@solves("20.top_p")
def kept(probabilities, p):
    """A token stays if those before it add up to less than p; so the one that crosses p
    stays."""
    found, total = [], 0.0
    for each in _most_likely_first(probabilities):
        if total >= p:
            break
        found.append(each)
        total += probabilities[each]
    return found
