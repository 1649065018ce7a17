"""Merged pairs with layers that sleep and all-to-alls that are real: how much of their time is hidden.

    python benchmarks/merged_pairs.py                     # writes results/merged_pairs.json
    python benchmarks/merged_pairs.py --picture pair.png  # and draws the last step of one rank
    python benchmarks/merged_pairs.py --sleep 0 --dry-run # layers compute instead, on cores that gloo needs too

Each attention and each set of experts sleeps in forward and in backward, so ranks share two cores, and what is left of
them moves messages. Everything else is real: a small GPT with experts in every layer, its runtime, autograd, gloo. Its
all-to-alls take 20 ms at least, as on a slow network (`labkit.comm.delayed`), because on one machine they take less
than waking up does; `--network 0` leaves them as they are.

An all-to-all that nothing hides shows as the time for which a rank waits for it. Unmerged steps give the time of one:
their waits over their number. (A dispatch sends rows and weights at once, and counts as one.) The model
(`labkit.schedules.merging`) says that a pair hides an all-to-all behind the other side's part if that takes longer,
and what runs alone hides none. So it says what merged steps still wait for, and the share is
(waits unmerged - waits merged) / (waits unmerged - waits merged by the model).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from harness import Comparison, report

from labkit.comm.fault_injection import delayed
from labkit.config import RunConfig, presets
from labkit.events import Event
from labkit.launch import run
from labkit.models.synthetic_load import SleepingParts
from labkit.plan.stages import configured_schedule
from labkit.schedules import LayerTimes, Schedule
from labkit.schedules.merging import pair_lanes
from labkit.train import pretrain

SLEEP = 0.040
"""Seconds of a part's forward; its backward takes twice as long."""
NETWORK = 0.020
"""Seconds that an all-to-all takes at least."""
CASES: list[dict[str, Any]] = [{}, {"pp": 2}, {"pp": 2, "vpp": 2}]
"""Layouts besides ep 2."""
SHAPE = {"hidden": 64, "heads": 2, "seq_length": 64, "micro_batch_size": 1, "moe.ffn_hidden": 16, "layer_freq": [1],
         "layers": 4, "aux_loss_coeff": 0.0}  # fmt: skip
WAIT = "wait all_to_all ep"
TITLE = "Merged pairs of sleeping layers"
NOTES = [
    "hidden: share of the all-to-all time that the model says can hide which is hidden; aim: at least 0.70.",
    "seconds are steps: merged beside unmerged, in turn.",
]


def config_of(case: dict[str, Any], *, merged: bool, steps: int, microbatches: int) -> RunConfig:
    """The run of a case: `microbatches` on each rank."""
    changes = {**SHAPE, "ep": 2, **case, "train.steps": steps, "global_batch_size": 2 * microbatches}
    changes |= {"train.keep_event_steps": steps, "overlap_moe_expert_parallel_comm": merged}
    return presets.tiny_moe().override(changes)


def steps_of(config: RunConfig, seconds: float, network: float) -> list[list[Event]]:
    """On each rank: the Events of every step but the first, which opens connections."""
    torch.set_num_threads(1)
    with delayed(network, operation="all_to_all") if network else nullcontext():
        events = pretrain(config, observer=SleepingParts(seconds)).events
    steps = sorted({event.step for event in events if event.step is not None})[1:]
    return [[event for event in events if event.step == step] for step in steps]


@dataclass(frozen=True)
class Hidden:
    """What the waits of a case say."""

    transfer: float
    """Seconds of one all-to-all that nothing hides."""
    unmerged: float
    """Seconds for which a rank waits in a step, mean of ranks."""
    merged: float
    """The same with merged pairs."""
    modelled: float
    """The same, by the model."""

    @property
    def share(self) -> float:
        """Hidden, of what the model says can be hidden; 0 where that is nothing."""
        can_hide = self.unmerged - self.modelled
        return (self.unmerged - self.merged) / can_hide if can_hide > 1e-9 else 0.0


def waited(ranks: list[list[list[Event]]]) -> float:
    """Seconds of waits for all-to-alls in a step: the median over steps of the mean over ranks."""
    by_step = zip(*ranks, strict=True)
    return statistics.median(
        statistics.fmean(sum(e.duration for e in step if e.name == WAIT) for step in steps) for steps in by_step
    )


def modelled_waits(schedule: Schedule, layers: int, transfer: float, seconds: float) -> float:
    """Seconds of waits in a step by the model, mean of ranks."""
    twice = {"combine": 0.0, "experts": 2 * seconds, "attention": 2 * seconds}
    layer = LayerTimes(
        forward={"attention": seconds, "experts": seconds, "combine": 0.0}, backward=twice,
        dispatch=transfer, combine=transfer,
    )  # fmt: skip
    lanes = pair_lanes([layer] * layers, [layer] * layers)
    of_pair = max(lane.end for lane in lanes) - 6 * seconds * layers
    cells = [cell for rank in range(schedule.pp) for cell in schedule.cells(rank)]
    pairs = sum(len(cell) == 2 for cell in cells)
    return (pairs * of_pair + (len(cells) - pairs) * 2 * transfer * layers) / schedule.pp


def step_seconds(ranks: list[list[list[Event]]]) -> list[float]:
    """Seconds of each step: from the first Event of any rank to the last."""
    return [
        max(e.end for step in steps for e in step) - min(e.start for step in steps for e in step)
        for steps in zip(*ranks, strict=True)
    ]


def measure(
    case: dict[str, Any], seconds: float, network: float, *, repetitions: int, microbatches: int
) -> tuple[Comparison, Hidden, Any]:
    """Run a case merged and unmerged, and compare."""
    world = 2 * case.get("pp", 1)
    seen = {}
    for merged in (True, False):
        config = config_of(case, merged=merged, steps=repetitions + 1, microbatches=microbatches)
        seen[merged] = run(steps_of, world, config, seconds, network, timeout=900)
    schedule = configured_schedule(config_of(case, merged=True, steps=2, microbatches=microbatches), world)
    layers = 4 // schedule.num_stages
    unmerged, merged = waited(seen[False]), waited(seen[True])
    waits = 4 * layers * schedule.num_microbatches * schedule.num_stages / schedule.pp
    transfer = unmerged / waits
    found = Hidden(transfer, unmerged, merged, modelled_waits(schedule, layers, transfer, seconds))
    name = f"ep2 {' '.join(f'{k}{v}' for k, v in case.items()) or 'pp1'}, {microbatches} microbatches"
    times = {"labkit, merged pairs": step_seconds(seen[True]), "labkit, unmerged": step_seconds(seen[False])}
    facts = {"hidden": round(found.share, 3), "all_to_all_ms": round(1e3 * transfer, 3)}
    facts |= {f"wait_{k}_ms": round(1e3 * getattr(found, k), 1) for k in ("unmerged", "merged", "modelled")}
    return Comparison(name, times, facts=facts), found, seen[True]


def draw(ranks: list[list[list[Event]]], path: str) -> None:
    """Draw the last step of the first rank: parts above, all-to-alls and waits in the strip below."""
    from labkit.viz import gantt

    last = ranks[0][-1]
    kept = [e for e in last if e.name.split()[-1] in ("attention", "experts", "combine") or "all_to_all ep" in e.name]
    gantt([replace(event, name=event.name.split()[0] if event.kind != "collective" else event.name) for event in kept],
          name="merged pairs").fig.savefig(path, dpi=130)  # fmt: skip


def main() -> None:
    """Measure all cases and store the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sleep", type=float, default=1e3 * SLEEP, help="ms of a part; 0 computes instead")
    parser.add_argument("--network", type=float, default=1e3 * NETWORK, help="ms that an all-to-all takes at least")
    parser.add_argument("--repetitions", type=int, default=15, help="steps; 15 or more to be quoted")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--picture", help="a PNG file for the last step of one rank")
    parser.add_argument("--dry-run", action="store_true", help="print only, store nothing")
    args = parser.parse_args()
    found = []
    for case in CASES:
        sizes = {"repetitions": args.repetitions, "microbatches": args.microbatches}
        comparison, hidden, steps = measure(case, 1e-3 * args.sleep, 1e-3 * args.network, **sizes)
        found.append(comparison)
        print(f"{comparison.case}: {hidden.share:.0%} hidden, {comparison.facts}", flush=True)
        if args.picture and case is CASES[0]:
            draw(steps, args.picture)
    report("merged_pairs", found, title=TITLE, notes=NOTES, write=not args.dry_run)


if __name__ == "__main__":
    main()
