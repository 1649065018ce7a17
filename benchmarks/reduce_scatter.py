"""Reduce-scatter of 16 MiB between two gloo ranks: labkit's exchange and add against gloo's own.

    python benchmarks/reduce_scatter.py

gloo emulates reduce-scatter by an all-reduce of the whole tensor; the least that must travel is half of it. All-reduce
and all-gather stand beside it, since they take the same exchange at two ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from harness import Comparison, interleave, report, until_quiet

MIB = 2**20


def measure(operation: str, mebibytes: int, repetitions: int) -> Comparison:
    """On each rank: one collective, by labkit and by torch on gloo."""
    import torch
    import torch.distributed as dist

    from labkit.parallel import Group, all_gather, all_reduce, reduce_scatter

    # Newer torch warns at the old names.
    gloo_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gloo_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    group = Group("tp", (0, 1), dist.get_rank(), dist.group.WORLD)
    x = torch.randn(mebibytes * MIB // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    half, y, expected = x[: x.numel() // 2].clone(), torch.empty_like(x), torch.empty(x.numel() // 2)
    gloo_reduce_scatter(expected, x)
    assert torch.equal(reduce_scatter(x, group), expected), "both must compute the same bits"
    cases = {
        "reduce-scatter": (lambda: reduce_scatter(x, group), lambda: gloo_reduce_scatter(expected, x)),
        # A maximum does not grow when it is repeated.
        "all-reduce": (lambda: all_reduce(x, group, "max"), lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX)),
        "all-gather": (lambda: all_gather(half, group), lambda: gloo_all_gather(y, half)),
    }
    steps = dict(zip(("labkit", "torch on gloo"), cases[operation], strict=True))
    words = f"{operation}, {mebibytes} MiB"
    found = interleave(words, steps, repetitions=repetitions, across_ranks=True)
    found.facts["least_bytes_sent_by_a_rank"] = mebibytes * MIB // (1 if operation == "all-reduce" else 2)
    return found


def main() -> None:
    """Run on two ranks and store the table."""
    from labkit.launch import run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--mebibytes", type=int, default=16, help="size of the tensor that is reduced")
    parser.add_argument("--repetitions", type=int, default=25, help="interleaved repetitions; 15 or more to be quoted")
    parser.add_argument("--dry-run", action="store_true", help="print only, store nothing")
    args = parser.parse_args()
    sizes = (args.mebibytes, args.repetitions)
    comparisons = [
        until_quiet(lambda operation=operation: run(measure, 2, operation, *sizes, timeout=300.0)[0])
        for operation in ("reduce-scatter", "all-reduce", "all-gather")
    ]
    report(
        "reduce_scatter",
        comparisons,
        title="Reduce-scatter on two ranks",
        notes=["Aim: reduce-scatter at most 0.4 of gloo's time (2.5 times as fast)."],
        write=not args.dry_run,
    )


if __name__ == "__main__":
    main()
