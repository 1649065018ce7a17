"""Time of one kernel on a GPU, by its roofline: GEMMs, attention, and kernels that only move bytes. No torch.

    GEMM [m, k] x [k, n]    max(2 m n k / (peak x efficiency), bytes / memory rate)
    fused attention         4 (or 10 backward) x pairs x width / (peak x efficiency)
    memory-bound            bytes / memory rate

The efficiency of a GEMM has four factors:

    efficiency = ceiling x software x tiles / (waves x SMs) x k / (k + depth)

A GEMM's output is cut into tiles, and each SM computes one tile at a time. The last wave of tiles leaves SMs idle,
and tiles at the edge compute nothing useful. cuBLAS chooses the tile, and may cut k (split-k) to fill a wave, so the
best of `TILES` and of `SPLITS` counts. `depth` is the start and the end of a tile, in elements of k. On the 183 shapes
that SimuMax measured on an A100 PCIe, these factors leave a mean error of 3.5 %, where one number leaves 6.0 %; on 432
of a B200 9.7 % and 11.5 % (MooreThreads/SimuMax@4dcaae5).

A machine that was measured has a table of efficiencies by shape instead (`Machine.products`), in which memory counts
already, and its own rate for kinds of kernels that only move bytes (`Machine.memory_rates`).
"""

from __future__ import annotations

from functools import lru_cache

from labkit.plan.machine import Machine
from labkit.plan.measured import product_efficiency
from labkit.plan.terms import Term

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (256, 64, 0.9),
    (64, 256, 0.9),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.65),
)
"""Rows and columns of a tile, and its rate relative to the largest: a small tile reuses less of what it loads. The
sizes are cuBLAS's; the rates are assumed, and checked by the errors above."""
SPLITS = (1, 2, 3, 4)
"""Pieces into which k may be cut."""
_SPLIT_RATE = 0.95
"""Rate of a GEMM whose pieces of k are added up at the end."""
_LEAST_SPLIT = 512
"""Fewest elements of k in a piece."""


@lru_cache(maxsize=65536)
def gemm_shape_efficiency(m: int, n: int, k: int, sms: int, depth: float, groups: int = 1) -> float:
    """Return the efficiency of the shape of `groups` equal GEMMs, from 0 to 1, without ceiling and software."""
    best = 0.0
    for rows, columns, rate in TILES:
        over, along = -(-m // rows), -(-n // columns)
        tiles, useful = over * along * groups, m * n / (over * rows * along * columns)
        for split in SPLITS:
            if split > 1 and k // split < _LEAST_SPLIT:
                break
            waves = -(-tiles * split // sms)
            piece = k / split
            value = rate * useful * tiles * split / (waves * sms) * piece / (piece + depth)
            best = max(best, value if split == 1 else value * _SPLIT_RATE)
    return best


def gemm(
    machine: Machine,
    name: str,
    shape: tuple[int, int, int],
    *,
    precision: str,
    software: str,
    weight_gradient: bool = False,
    groups: int = 1,
    part: str = "",
) -> Term:
    """Return the time of `groups` products [m, k] x [k, n], which run at once.

    shape: m, n, k. precision: type of the operands. weight_gradient: the result is added into fp32.
    """
    m, n, k = shape
    if precision in machine.products:
        return _measured_gemm(machine, name, shape, precision, software, weight_gradient, groups, part)
    operand = {"fp8": 1, "fp32": 4, "fp64": 8}.get(precision, 2)
    result = 8 if weight_gradient else max(operand, 2)
    moved = groups * (operand * (m * k + k * n) + result * m * n)
    flops = 2.0 * groups * m * n * k
    efficiency = gemm_shape_efficiency(m, n, k, machine.sms, machine.gemm_depth, groups)
    efficiency *= machine.gemm_ceiling[precision] * software_rate(machine, software)
    efficiency *= machine.weight_gradient_efficiency if weight_gradient else 1.0
    compute = flops / (machine.peak_flops[precision] * efficiency)
    memory = moved / (machine.memory_bandwidth * machine.memory_efficiency)
    formula = "max(2 g m n k / (peak x efficiency), bytes / memory rate)"
    inputs = (
        ("g", groups), ("m", m), ("n", n), ("k", k), ("peak", machine.peak_flops[precision]),
        ("efficiency", efficiency), ("bytes", moved),
    )  # fmt: skip
    return Term(name, "gemm", max(compute, memory), formula, inputs, part)


def _measured_gemm(machine: Machine, name: str, shape: tuple[int, int, int], precision: str, software: str,
                   weight_gradient: bool, groups: int, part: str) -> Term:  # fmt: skip
    """Return the time of products by the machine's own table; memory is in its efficiencies."""
    m, n, k = shape
    efficiency = product_efficiency(machine.products[precision], m, n, k) * software_rate(machine, software)
    efficiency *= machine.weight_gradient_efficiency if weight_gradient else 1.0
    peak = machine.peak_flops[precision]
    inputs = (("g", groups), ("m", m), ("n", n), ("k", k), ("peak", peak), ("efficiency", efficiency))
    formula = "2 g m n k / (peak x measured efficiency)"
    return Term(name, "gemm", 2.0 * groups * m * n * k / (peak * efficiency), formula, inputs, part)


def software_rate(machine: Machine, software: str, of: str = "") -> float:
    """Return a constant of a generation of software on a machine, or the machine's default for it.

    of: nothing for the rate of GEMMs, or `attention`, or `host` (`Machine.software`).
    """
    known, suffix = machine.software, f" {of}" if of else ""
    return known.get(software + suffix, known.get("default" + suffix, 1.0))


def fused_attention(
    machine: Machine,
    name: str,
    *,
    pairs: float,
    width: float,
    blocks: float,
    backward: bool,
    rate: float,
    dtype: str = "bf16",
) -> Term:
    """Return the time of a fused attention kernel (flash attention, arXiv 2205.14135), which keeps no probabilities.

    pairs: query-key pairs that it computes over all samples, for one head. width: columns of the heads on this rank.
    blocks: blocks of 128 queries over heads and samples, which fill the SMs. rate: the software's rate.

    A pair costs 4 operations per column forward (two products), and 10 backward (five).
    """
    factor, ceiling = (10, machine.attention_ceiling[1]) if backward else (4, machine.attention_ceiling[0])
    filled = min(1.0, blocks / machine.sms)
    flops = factor * pairs * width
    seconds = flops / (machine.peak_flops[dtype] * ceiling * rate * filled)
    inputs = (("pairs", pairs), ("width", width), ("efficiency", ceiling * rate * filled))
    return Term(
        name, "attention", seconds, f"{factor} pairs x width / (peak x efficiency)", inputs, "core_attn", 1 + backward
    )


def memory_bound(machine: Machine, name: str, elements: float, per_element: float, *, kind: str = "memory",
                 part: str = "", launches: int = 1) -> Term:  # fmt: skip
    """Return the time of kernels that read and write `per_element` bytes for each of `elements`."""
    rate = machine.memory_bandwidth * machine.memory_efficiency
    if machine.memory_rates:
        rate *= machine.memory_rates.get(kernel_kind(name), 1.0)
    inputs = (("elements", elements), ("bytes each", per_element), ("rate", rate))
    return Term(name, kind, elements * per_element / rate, "elements x bytes each / rate", inputs, part, launches)


def kernel_kind(name: str) -> str:
    """Return the kind of a memory-bound kernel, a key of `Machine.memory_rates`: its name without its place.

    `attention norm, backward` is of the kind `norm, backward`.
    """
    head, comma, tail = name.partition(",")
    return head.rpartition(" ")[2] + comma + tail
