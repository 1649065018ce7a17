"""Chapter 19, exercise `19.copies`: copies(tp, pp, dp, split) -> groups of the words' and the positions' copies."""


def _groups(tp, dp, stages):
    return [[stage * dp * tp + row for stage in sorted(set(stages))] for row in range(dp * tp)]


def wrong_1(tp, pp, dp, split):
    """Takes over the groups of a GPT, which has one first stage."""
    return _groups(tp, dp, [0, pp - 1]), _groups(tp, dp, [0])


def wrong_2(tp, pp, dp, split):
    """Takes the split rank as the last rank of the encoder."""
    return _groups(tp, dp, [0, split - 1, pp - 1]), _groups(tp, dp, [0, split - 1])


def wrong_3(tp, pp, dp, split):
    """Thinks that positions belong to words, and adds them up over the same ranks."""
    words = _groups(tp, dp, [0, split, pp - 1])
    return words, words
