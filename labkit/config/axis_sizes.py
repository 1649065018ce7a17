"""The sizes of a layout's axes, data parallelism included, and how they are written in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.config.sections import ParallelConfig


def axis_sizes(parallel: ParallelConfig, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the axes by which dense layers are split, and of those by which experts are."""
    tp, cp, pp, ep = parallel.tp, parallel.cp, parallel.pp, parallel.ep
    etp = tp if parallel.etp is None else parallel.etp
    dense = {"tp": tp, "cp": cp, "dp": world_size // (tp * cp * pp), "pp": pp}
    experts = {"etp": etp, "ep": ep, "edp": world_size // (etp * ep * pp), "pp": pp}
    return dense, experts


def sizes_in_words(sizes: Mapping[str, int]) -> str:
    """Return the sizes as `tp 2 x cp 1 x dp 2 x pp 2`."""
    return " x ".join(f"{axis} {size:,}" for axis, size in sizes.items())
