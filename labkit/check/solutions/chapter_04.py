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


def _of_label(part, labels, rank):
    """The label's logit where this rank owns it, else 0."""
    local = labels - rank * part.shape[1]
    own = (local >= 0) & (local < part.shape[1])
    return np.where(own, part[np.arange(len(labels)), np.where(own, local, 0)], 0.0)


def _real(logits, columns):
    return [part[:, :count] for part, count in zip(logits, columns)]


@solves("04.loss")
def own_loss(logits, labels, columns, all_reduce):
    """Three numbers per token: the maximum, the sum of exponentials, the label's logit."""
    real = _real(logits, columns)
    top = all_reduce([part.max(axis=1) for part in real], "max")
    total = all_reduce([np.exp(part - most[:, None]).sum(axis=1) for part, most in zip(real, top)], "sum")
    target = all_reduce([_of_label(part, labels, rank) for rank, part in enumerate(logits)], "sum")
    return [np.log(each) + most - logit for each, most, logit in zip(total, top, target)]


def _added(ranks, together):
    """Sum of the gradients of the ranks that belong together, for each rank that holds
    a copy."""
    found = []
    for rank in ranks:
        parts = [other["grad"] for other in ranks if other["grad"] is not None and together(rank, other)]
        found.append(None if rank["grad"] is None else [sum(column) for column in zip(*parts)])
    return found


def _one_pipeline(rank, other):
    return (rank["tp"], rank["dp"]) == (other["tp"], other["dp"])


@solves("04.tied")
def tied_gradients(ranks):
    """First and last stage of the same pipeline add up: equal in tp and dp, and both
    have a gradient."""
    return _added(ranks, _one_pipeline)
