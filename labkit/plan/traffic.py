"""Bytes on the wire of a layer, and the rows that a routing moves between ranks, computed before anything is sent.

A token that goes to k experts is sent as k rows of H values. A row does not travel if its expert is on the same rank.
In `token_dispatch` the rows off the diagonal of the send matrix leave a rank, and `token_combine` sends them back.
Backward does both again with gradients:

    bytes of a forward = 2 x rows off rank x H x size        and the same again backward

No transfer that sends row by row can move less. `MoEAlltoAllTokenDispatcher` moves exactly that, plus one weight for
each row and one table of counts (`extra_bytes`).

Fewer bytes need another form of transfer. Two experts of a token may be on one rank. Then that rank needs the row only
once, if it makes the copies itself and adds up its experts' results before it sends them back. The same holds for
nodes, if the network between them is the bottleneck (DeepEP; arXiv 2412.19437, 3.2.2). `dedup_factor` is the share of
the rows that is left: 0.679 for 64 experts on 8 ranks with k = 8, and 0.786 for 8 experts on 2 ranks with k = 2.

R is the number of ranks of ep, T the tokens of a rank, E the number of experts, k = top_k, H the hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import ArrayLike

from labkit.config import ModelConfig, MoEConfig


def _per_place(experts: int, places: int) -> int:
    if places < 1 or experts % places:
        raise ValueError(f"{experts} experts cannot be split over {places} ranks; choose a divisor of {experts}")
    return experts // places


def send_matrix(counts_RE: ArrayLike, ep: int) -> np.ndarray:
    """Return the rows that rank r sends to rank q, int64 [R, R], from the tokens that each rank has for each expert.

    Raises:
        ValueError: the counts have not one row per rank, or ep does not divide the experts.
    """
    counts = np.asarray(counts_RE)
    if counts.ndim != 2 or len(counts) != ep:
        raise ValueError(f"counts have shape {counts.shape}; one row for each of the {ep} ranks of ep is needed")
    return counts.reshape(ep, ep, _per_place(counts.shape[1], ep)).sum(axis=2)


def send_matrix_without_copies(maps_RTE: ArrayLike, places: int) -> np.ndarray:
    """Return the send matrix if a token travels only once to each place (rank, or node) that has experts for it.

    maps_RTE: bool, true for the experts of each token of each rank. The result is [R, places].
    """
    maps = np.asarray(maps_RTE, dtype=bool)
    per_place = _per_place(maps.shape[2], places)
    return maps.reshape(*maps.shape[:2], places, per_place).any(axis=3).sum(axis=1)


@dataclass(frozen=True, slots=True)
class AllToAllBytes:
    """Bytes that leave each rank in one forward through a layer; backward moves as many, with the two exchanged."""

    dispatch: np.ndarray
    """Bytes of tokens on the way to their experts, int64 [R]."""
    combine: np.ndarray
    """Bytes of results on their way back, int64 [R]."""

    @property
    def forward(self) -> np.ndarray:
        """Both, int64 [R]."""
        return self.dispatch + self.combine


def all_to_all_bytes(counts_RE: ArrayLike, ep: int, hidden: int, element_size: int) -> AllToAllBytes:
    """Return the bytes of this routing, row by row, without `extra_bytes`; arguments and errors as in `send_matrix`."""
    matrix = send_matrix(counts_RE, ep)
    away = matrix - np.diag(np.diag(matrix))
    return AllToAllBytes(away.sum(axis=1) * hidden * element_size, away.sum(axis=0) * hidden * element_size)


def extra_bytes(
    counts_RE: ArrayLike, ep: int, *, etp: int = 1, weight_size: int = 4, count_size: int = 4
) -> np.ndarray:
    """Return the bytes beyond the minimum that leave each rank in one forward, int64 [R].

    They are a weight with each row, and the table of counts: a rank sends its E counts to the other ranks of tp_ep
    once.
    """
    counts = np.asarray(counts_RE)
    weights = all_to_all_bytes(counts, ep, 1, weight_size).dispatch
    return weights + counts.shape[1] * count_size * (ep * etp - 1)


def expected_destinations(experts: int, places: int, top_k: int) -> float:
    """Return the expected number of places that hold an expert of a token, whose k experts are drawn uniformly.

    The k experts are different. Each of P places has E/P experts, and none of the token's experts with probability
    C(E - E/P, k) / C(E, k). So the expectation is

        P (1 - C(E - E/P, k) / C(E, k)).

    Raises:
        ValueError: `places` does not divide the experts, or k is not from 1 to E.
    """
    per_place = _per_place(experts, places)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; a token goes to 1 to {experts} experts")
    return places * (1 - comb(experts - per_place, top_k) / comb(experts, top_k))


def dedup_factor(experts: int, places: int, top_k: int) -> float:
    """Return the share of rows that is left if a token travels once to each place: `expected_destinations` / k.

    The share is the same for all rows and for the rows that leave a rank, since all places are equally likely.
    """
    return expected_destinations(experts, places, top_k) / top_k


# ---- what a layer sends, independent of the routing ----


def layer_communication_bytes(model: ModelConfig, *, samples: int = 1, tp: int = 2, element_bytes: int = 4) -> int:
    """Return the payload of a layer's four tensor-parallel all-reduces in forward and backward; 0 at t = 1.

    Each has S B H elements. A ring all-reduce sends 2 (t - 1) / t of the payload out of each rank.
    """
    return 4 * samples * model.seq_length * model.hidden * element_bytes if tp > 1 else 0


def layer_all_to_all_bytes(
    model: ModelConfig, moe: MoEConfig, *, tokens: int, ep: int, element_bytes: int = 4, weight_bytes: int = 4
) -> int:
    """Return the payload of one layer's all-to-alls, forward and backward, for a rank's `tokens`; 0 at ep = 1.

    Each token leaves k times as a row of H with its weight, and comes back k times as a row of H. Gradients travel the
    same ways. A rank returns the rows that it received, so the number is the mean over the ranks of `ep`. The routing
    decides how much of the payload stays on its rank (`send_matrix`).

    `element_bytes` is the size of an activation, `weight_bytes` that of a routing weight (float32 or wider).
    """
    return 2 * tokens * moe.top_k * (2 * model.hidden * element_bytes + weight_bytes) if ep > 1 else 0
