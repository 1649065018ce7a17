"""Solutions of chapter 04, Vocabulary and loss."""

import numpy as np

from labkit.check.solution_source import solves


@solves("04.lookup")
def own_rows(ids, part, rank):
    """Own ids read their row, and foreign ids get zeros, so that the sum over ranks has
    each row once."""
    local = ids - rank * len(part)
    own = (local >= 0) & (local < len(part))
    return np.where(own[:, None], part[np.where(own, local, 0)], 0)


@solves("04.loss")
def token_loss(logits, labels, first, real, all_reduce):
    """Three numbers per token in two messages: the maximum, then both sums at once."""
    words = logits[:, :real]
    top = all_reduce(words.max(axis=1), "max")
    total = np.exp(words - top[:, None]).sum(axis=1)
    local = labels - first
    own = (local >= 0) & (local < real)
    target = np.where(own, words[np.arange(len(labels)), np.where(own, local, 0)], 0.0)
    total, target = all_reduce(np.stack([total, target]), "sum")
    log_sum = np.log(total) + top
    return log_sum - target, log_sum


@solves("04.tied")
def complete(grad, place, pp, all_reduce):
    """First and last stage of one pipeline have the same rows: equal in t and d. Other
    stages have no copy."""
    t, d, p = place
    if p not in (0, pp - 1):
        return None
    return all_reduce(grad, [(t, d, 0), (t, d, pp - 1)])
