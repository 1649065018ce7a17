"""Tables that were measured on a machine: rates of products by shape, times of collectives by size. No torch.

A roofline describes a GPU, whose tiles and waves are known. The products of a CPU's library follow no such formula, so
`labkit calibrate` measures some shapes, and a shape between them gets a mean of theirs. `Machine.products` and
`Level.measured` hold such tables; a machine from data sheets has none.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class Product(NamedTuple):
    """One measured product [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    efficiency: float
    """Its rate over the machine's peak, transfers from and to memory included."""


class Transfer(NamedTuple):
    """One measured collective, or message, between two ranks."""

    size: float
    """Bytes, as `collective_seconds` counts them."""
    seconds: float


Products = tuple[Product, ...]
Transfers = tuple[Transfer, ...]

_POWER = 4
"""Exponent of the distance in the weights of the mean: a shape near a measured one is close to it in rate."""


@lru_cache(maxsize=65536)
def product_efficiency(table: Products, m: int, n: int, k: int) -> float:
    """Return the efficiency of a product by Shepard's mean of the measured ones (D. Shepard, ACM 1968).

        log e = sum w_i log e_i / sum w_i,   w_i = 1 / |x - x_i|^4,   x = (log m, log n, log k)

    A measured shape has its own efficiency, and no shape has more than the best one or less than the worst.
    """
    total = weights = 0.0
    for row in table:
        distance = math.hypot(math.log(m / row.m), math.log(n / row.n), math.log(k / row.k))
        if distance < 1e-9:
            return row.efficiency
        weight = distance**-_POWER
        total += weight * math.log(row.efficiency)
        weights += weight
    return math.exp(total / weights)


def transfer_seconds(table: Transfers, size: float) -> float:
    """Return the time of `size` bytes between two ranks: a line between the measured sizes around it, in logarithms.

    Fewer bytes than the fewest measured take as long as those, and more than the most have their bandwidth.
    """
    if size <= table[0].size:
        return table[0].seconds
    for low, high in pairwise(table):
        if size <= high.size:
            share = math.log(size / low.size) / math.log(high.size / low.size)
            return low.seconds * (high.seconds / low.seconds) ** share
    return table[-1].seconds * size / table[-1].size


def ring_seconds(table: Transfers, size: float, ranks: int) -> float:
    """Return the time of a collective of `ranks` ranks, from that of two.

    With two, each rank passes half of the bytes on, once, or twice in an all-reduce. A ring of n ranks passes an n-th
    on, n - 1 times as often; so it takes n - 1 times as long as two ranks do with 2 / n of the bytes.
    """
    return (ranks - 1) * transfer_seconds(table, 2 * size / ranks)
