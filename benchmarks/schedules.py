"""Orders of a large pipeline, verified and simulated: labkit and torch.distributed.pipelining (row C2).

    python benchmarks/schedules.py            # about three minutes; writes results/schedules.json
    python benchmarks/schedules.py --quick    # a look: pp8 vpp4 M256, 3 repetitions, nothing written

Interleaved 1F1B on 64 ranks with 8 chunks each and 4096 microbatches: 4,194,304 actions. Both sides list what every
rank runs, in order; the lists are compared before anything is timed (every rank at pp8 vpp4 M64, three at full size).
Torch's side is `ScheduleInterleaved1F1B._calculate_single_rank_operations` for each rank, which needs no process group;
its idle slots (None) are dropped for the comparison. The second row is labkit alone: the orders, proven with `verify`
over batched transfers and timed with `simulate`, from nothing, since a Schedule remembers what was derived from it.
Memory is what a fresh process grows by at its peak (VmHWM), the schedule itself included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from harness import LEAST, Comparison, interleave, report, until_quiet

from labkit.schedules import Schedule, Timeline, interleaved, simulate, verify


class Sizes(NamedTuple):
    """Of an interleaved schedule."""

    pp: int
    vpp: int
    microbatches: int

    @property
    def actions(self) -> int:
        """Forwards and backwards over all ranks."""
        return 2 * self.pp * self.vpp * self.microbatches

    def __str__(self) -> str:
        return f"pp{self.pp} vpp{self.vpp} M{self.microbatches} ({self.actions:,} actions)"


FULL, QUICK, COMPARED = Sizes(64, 8, 4096), Sizes(8, 4, 256), Sizes(8, 4, 64)


def labkit_orders(sizes: Sizes) -> Schedule:
    """Ours: columns over all ranks."""
    return interleaved(*sizes)


def torch_orders(sizes: Sizes, ranks: list[int] | None = None) -> list[list[Any]]:
    """Torch's: a list of actions for each rank, with None where the rank idles."""
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    pp, vpp, microbatches = sizes
    rounds = max(1, microbatches // pp)
    fields = {"pp_group_size": pp, "n_local_stages": vpp, "_n_microbatches": microbatches}
    schedule: Any = SimpleNamespace(**fields, number_of_rounds=rounds, microbatches_per_round=microbatches // rounds)
    of_rank = ScheduleInterleaved1F1B._calculate_single_rank_operations
    return [of_rank(schedule, rank) for rank in (range(pp) if ranks is None else ranks)]


def check_equal(sizes: Sizes, ranks: list[int]) -> None:
    """Both list the same actions in the same order on `ranks`."""
    ours = labkit_orders(sizes)
    for rank, theirs in zip(ranks, torch_orders(sizes, ranks), strict=True):
        named = [str(op) for op in theirs if op is not None]
        assert [str(action) for action in ours.actions(rank)] == named, f"rank {rank} of {sizes}"


def labkit_proof(sizes: Sizes) -> Timeline:
    """What stands before a run: orders, no deadlock over batched transfers, and when each action will run."""
    schedule = labkit_orders(sizes)
    verify(schedule, "batched")
    return simulate(schedule)


def peak_mib(work: str, sizes: Sizes) -> int:
    """By how many MiB a fresh process grows while it does `work`, one of the keys of WORK."""
    command = [sys.executable, __file__, "--child", work, *map(str, sizes)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


WORK = {"orders": labkit_orders, "proof": labkit_proof, "torch": torch_orders}


def child(work: str, sizes: Sizes) -> None:
    """Do the work once on a small schedule, which imports and warms up all that it needs, then measure the real one."""
    WORK[work](Sizes(2, 2, 2))
    before = _status_kib("VmRSS")
    kept = WORK[work](sizes)
    print(round((_status_kib("VmHWM") - before) / 1024))
    del kept


def _status_kib(name: str) -> int:
    """A line of this process's status. The high-water mark of getrusage would be the parent's, where that is larger."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(sizes: Sizes, repetitions: int) -> list[Comparison]:
    """Orders against torch; then orders, verification and simulation alone."""

    def orders() -> Comparison:
        alternatives = {"labkit": lambda: labkit_orders(sizes), "torch": lambda: torch_orders(sizes)}
        return interleave(f"orders of {sizes}", alternatives, repetitions=repetitions, warmup=1)

    def proof() -> Comparison:
        alternatives = {"labkit": lambda: labkit_proof(sizes)}
        return interleave(f"the same, verified (batched) and simulated: {sizes}", alternatives, repetitions=repetitions)

    attempts = 4 if repetitions >= LEAST else 1
    found = [until_quiet(step, attempts=attempts) for step in (orders, proof)]
    peaks = [{"labkit": peak_mib("orders", sizes), "torch": peak_mib("torch", sizes)}]
    peaks.append({"labkit": peak_mib("proof", sizes)})
    return [replace(one, facts={"peak_MiB": peak}) for one, peak in zip(found, peaks, strict=True)]


NOTES = (
    "torch: `_calculate_single_rank_operations` of its interleaved schedule for every rank; same actions.",
    "The second row has no peer: torch can't prove that an order never deadlocks, or predict when actions run.",
    "Aims: orders in 100 ms; verified and simulated in 4000 ms and 600 MiB, without compiled code.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller schedule, 3 repetitions, nothing written")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Sizes(*map(int, given.child[1:])))
        return
    sizes, repetitions = (QUICK, 3) if given.quick else (FULL, LEAST)
    check_equal(COMPARED, list(range(COMPARED.pp)))
    check_equal(sizes, [0, sizes.pp // 2, sizes.pp - 1])
    report(
        "schedules",
        measure(sizes, repetitions),
        title="Schedules: orders, verification, simulation",
        notes=NOTES,
        write=not given.quick,
    )


if __name__ == "__main__":
    main()
