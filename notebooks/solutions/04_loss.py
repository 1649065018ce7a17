"""Chapter 04, exercise `04.loss`: loss(logits, labels, columns, all_reduce) -> the loss of each token, by rank."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
AllReduce = Callable[[list[Array], str], list[Array]]


def _of_label(part: Array, labels: NDArray[np.int64], rank: int) -> Array:
    """The label's logit where this rank owns it, else 0."""
    local = labels - rank * part.shape[1]
    own = (local >= 0) & (local < part.shape[1])
    return np.where(own, part[np.arange(len(labels)), np.where(own, local, 0)], 0.0)


def _real(logits: list[Array], columns: list[int]) -> list[Array]:
    return [part[:, :count] for part, count in zip(logits, columns)]


def solution(logits: list[Array], labels: NDArray[np.int64], columns: list[int], all_reduce: AllReduce) -> list[Array]:
    """Three numbers a token: the maximum, the sum of exponentials, the label's logit."""
    real = _real(logits, columns)
    top = all_reduce([part.max(axis=1) for part in real], "max")
    total = all_reduce([np.exp(part - most[:, None]).sum(axis=1) for part, most in zip(real, top)], "sum")
    target = all_reduce([_of_label(part, labels, rank) for rank, part in enumerate(logits)], "sum")
    return [np.log(each) + most - logit for each, most, logit in zip(total, top, target)]


def wrong_1(logits: list[Array], labels: NDArray[np.int64], columns: list[int], all_reduce: AllReduce) -> list[Array]:
    """Lets each rank subtract its own maximum and adds the sums as they are, which have different scales."""
    real = _real(logits, columns)
    top = all_reduce([part.max(axis=1) for part in real], "max")
    total = all_reduce([np.exp(part - part.max(axis=1)[:, None]).sum(axis=1) for part in real], "sum")
    target = all_reduce([_of_label(part, labels, rank) for rank, part in enumerate(logits)], "sum")
    return [np.log(each) + most - logit for each, most, logit in zip(total, top, target)]


def wrong_2(logits: list[Array], labels: NDArray[np.int64], columns: list[int], all_reduce: AllReduce) -> list[Array]:
    """Counts the padding as words: a column of zeros adds exp(0) to the sum, and its share depends on tp."""
    return solution(logits, labels, [part.shape[1] for part in logits], all_reduce)


def wrong_3(logits: list[Array], labels: NDArray[np.int64], columns: list[int], all_reduce: AllReduce) -> list[Array]:
    """Trusts exp: without a maximum it overflows beyond 709 in float64, and beyond 88 in float32."""
    total = all_reduce([np.exp(part).sum(axis=1) for part in _real(logits, columns)], "sum")
    target = all_reduce([_of_label(part, labels, rank) for rank, part in enumerate(logits)], "sum")
    return [np.log(each) - logit for each, logit in zip(total, target)]
