"""Solutions of chapter 20, Evaluation and generation."""

import math

import torch

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


@solves("20.scores")
def scores(blocks, text):
    """One sum of losses, shared out over tokens, words, or bytes. The stub is right only
    where windows are equally hard, and each token is a word and a byte."""
    total, scored = sum(loss for loss, _ in blocks), sum(count for _, count in blocks)
    bits = total / math.log(2)
    of_word = math.exp(total / len(text.split()))
    return math.exp(total / scored), of_word, bits / len(text.encode())


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


@solves("20.attend")
def attend(q, k, v, kept):
    """All keys so far. The mask's diagonal ends at the last token: the last query sees
    every key, the one before it all but one."""
    if kept is not None:
        k, v = torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1)
    new, every = q.shape[1], k.shape[1]
    may_see = torch.ones(new, every, dtype=torch.bool, device=q.device).tril(every - new)
    products = q @ k.mT / q.shape[2] ** 0.5
    return products.masked_fill(~may_see, -math.inf).softmax(-1) @ v, (k, v)
