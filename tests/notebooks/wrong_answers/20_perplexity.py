"""Chapter 20, exercise `20.perplexity`: perplexity(blocks, words) -> the perplexity of a text by its words."""

import math


def wrong_1(blocks, words):
    """Divides by the tokens, whose number is the tokenizer's; models with two tokenizers cannot be compared then."""
    return math.exp(sum(loss for loss, _ in blocks) / sum(count for _, count in blocks))


def wrong_2(blocks, words):
    """Averages perplexities, in which a hard window weighs exponentially more than an easy one."""
    return sum(math.exp(loss / count) for loss, count in blocks) / len(blocks)


def wrong_3(blocks, words):
    """Takes losses for bits: the logarithms of cross-entropy are natural."""
    return 2 ** (sum(loss for loss, _ in blocks) / words)
