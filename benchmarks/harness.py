"""Measure alternatives side by side, and refuse to quote what the machine was too busy to measure.

    comparison = interleave("2 layers", {"labkit": step, "peer": peer_step})
    report("one_rank", [comparison])            # prints a table, writes results/one_rank.json

The rule of honesty: ours and the peers' run interleaved (ABAB...), at least 15 times each; what is quoted is the median
of the ratios of neighbouring runs. A comparison in which any alternative's median exceeds 1.3 times its minimum, or
during which other processes kept more than 0.2 cores busy, is marked as rejected: its raw seconds are stored, and
nothing is quoted. Inside ranks (`across_ranks=True`, every rank calls it alike) a barrier stands before each repetition
and the slowest rank counts.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import provenance
import table
from other_work import MAX_OTHERS, OtherWork

RESULTS = Path(__file__).parent / "results"
LEAST = 15
"""Repetitions below which nothing is quoted."""
MAX_NOISE = 1.3
"""Largest median / minimum of one alternative."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of every repetition of every alternative; the first alternative is ours."""

    case: str
    """What was measured: sizes and layout in words."""
    seconds: dict[str, list[float]]
    """By alternative, in order of repetition: entry i of each ran next to entry i of the others."""
    others: float | None = None
    """Cores that other processes kept busy meanwhile, on average; None where the system does not tell."""
    max_others: float = MAX_OTHERS
    """Cores of others above which the comparison is rejected."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Whatever else belongs into the stored row: counts, bytes, rates (values that JSON can hold)."""
    unfit: str = ""
    """What a benchmark's own look at the machine, never at the alternatives, found against it."""

    @property
    def ours(self) -> str:
        """Name of the first alternative."""
        return next(iter(self.seconds))

    def median(self, name: str) -> float:
        """Median seconds of an alternative."""
        return statistics.median(self.seconds[name])

    def noise(self, name: str) -> float:
        """Median over minimum of an alternative."""
        return self.median(name) / min(self.seconds[name])

    def ratio(self, peer: str) -> float:
        """Median over repetitions of ours / peer: 0.5 means that ours takes half of the peer's time."""
        return statistics.median(a / b for a, b in zip(self.seconds[self.ours], self.seconds[peer], strict=True))

    @property
    def rejected(self) -> str | None:
        """Why the times may not be quoted; None when they may."""
        noisy = [f"{name} median/min {self.noise(name):.2f}" for name in self.seconds if self.noise(name) > MAX_NOISE]
        if self.others is not None and self.others > self.max_others:
            noisy.append(f"others kept {self.others:.2f} cores busy")
        if self.unfit:
            noisy.append(self.unfit)
        if noisy:
            return f"rejected: noisy ({', '.join(noisy)})"
        repetitions = len(self.seconds[self.ours])
        return f"rejected: {repetitions} repetitions, at least {LEAST} needed" if repetitions < LEAST else None

    def row(self) -> dict[str, Any]:
        """What is stored: times and ratios, or the reason why none may be quoted; and the raw seconds either way."""
        row: dict[str, Any] = {"case": self.case, "repetitions": len(self.seconds[self.ours])}
        row |= {"others_cores": self.others and round(self.others, 3), "others_limit": self.max_others}
        row |= {"noise": {name: round(self.noise(name), 3) for name in self.seconds}}
        row |= {"raw_seconds": {name: [round(one, 9) for one in seconds] for name, seconds in self.seconds.items()}}
        if self.rejected:
            return row | {"rejected": self.rejected} | self.facts
        row["median_ms"] = {name: round(1e3 * self.median(name), 4) for name in self.seconds}
        row["ratio_to"] = {name: round(self.ratio(name), 4) for name in self.seconds if name != self.ours}
        return row | self.facts


def interleave(
    case: str,
    alternatives: Mapping[str, Callable[[], Any]],
    *,
    repetitions: int = 15,
    warmup: int = 3,
    across_ranks: bool = False,
    synchronize: Callable[[], Any] | None = None,
    max_others: float = MAX_OTHERS,
) -> Comparison:
    """Time every alternative `repetitions` times in turn; the first one is ours.

    `synchronize` (`torch.cuda.synchronize`) is called before each clock reading where work is asynchronous.
    """
    wait = synchronize or (lambda: None)
    meet = _barrier if across_ranks else (lambda: None)
    for _ in range(warmup):
        for step in alternatives.values():
            step()
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    gc.collect()
    gc.disable()
    others = OtherWork()
    try:
        for _ in range(repetitions):
            for name, step in alternatives.items():
                wait()
                meet()
                start = time.perf_counter()
                step()
                wait()
                seconds[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    cores = others.cores(max_others, across_ranks=across_ranks)
    if across_ranks:
        seconds = _slowest_rank(seconds)
    return Comparison(case, seconds, cores, max_others)


def until_quiet(measure: Callable[[], Comparison], *, attempts: int = 4, pause: float = 15.0) -> Comparison:
    """`measure()`, again after a pause while it is rejected, at most `attempts` times.

    The rule that rejects looks at noise and at others' work alone, never at who was faster.
    """
    found = measure()
    for _ in range(attempts - 1):
        if not found.rejected:
            break
        time.sleep(pause)
        found = measure()
    return found


def peak_of(step: Callable[[], Any]) -> int:
    """Largest growth of this process's own memory (without pages of files) during a call, in bytes."""
    gc.collect()
    before, most, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, anonymous_bytes())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    ended.set()
    watcher.join()
    return max(0, most - before)


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _slowest_rank(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """The largest time over ranks of every single repetition."""
    import torch
    import torch.distributed as dist

    table = torch.tensor(list(seconds.values()), dtype=torch.float64)
    on_gpu = dist.get_backend() == "nccl"
    table = table.cuda() if on_gpu else table
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, table.tolist(), strict=True))


def report(
    name: str,
    comparisons: Sequence[Comparison] = (),
    *,
    title: str = "",
    rows: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    write: bool = True,
) -> dict[str, Any]:
    """Print the table, write `results/NAME.json` and bring docs/benchmarks.md up to date; returns what was written.

    `rows` takes finished rows that are no interleaved times (counts, bytes, rates of one side): each needs a `case`.
    `title` heads the table in docs/benchmarks.md; `notes` are sentences that a reader needs to judge the numbers.
    """
    result = _result(name, [*(comparison.row() for comparison in comparisons), *rows], title, notes)
    print(f"\n{result['title']}")
    for comparison in comparisons:
        _print_comparison(comparison)
    for row in rows:
        print(f"  {row['case']}: " + ", ".join(f"{key} {value}" for key, value in row.items() if key != "case"))
    for note in notes:
        print(f"  Note: {note}")
    if write:
        path = write_result(result)
        print(f"  written: {path.relative_to(RESULTS.parent.parent)}")
    return result


def store(name: str, rows: Sequence[Mapping[str, Any]], *, title: str, notes: Sequence[str]) -> None:
    """What `report` writes, without a word: for a long run, after each of its rows."""
    write_result(_result(name, rows, title, notes))


def _result(name: str, rows: Sequence[Mapping[str, Any]], title: str, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "benchmark": name,
        "title": title or name,
        **provenance.origin(),
        "rows": [dict(row) for row in rows],
        "notes": list(notes),
    }


def write_result(result: Mapping[str, Any]) -> Path:
    """Write `results/NAME.json` and bring docs/benchmarks.md up to date."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['benchmark']}.json"
    text = json.dumps(result, indent=2)
    path.write_text(re.sub(r"\[\s+([-+.\deE,\s]+?)\s+\]", _on_one_line, text) + "\n")
    table.main()
    return path


def _on_one_line(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def _print_comparison(comparison: Comparison) -> None:
    print(f"  {comparison.case}" + (f"   {comparison.rejected}; not to be quoted:" if comparison.rejected else ""))
    for name in comparison.seconds:
        ratio = "" if name == comparison.ours else f"   ours/this {comparison.ratio(name):.3f}"
        milliseconds = 1e3 * comparison.median(name)
        print(f"    {name:<24}{milliseconds:10.3f} ms   median/min {comparison.noise(name):.2f}{ratio}")
    for key, value in comparison.facts.items():
        print(f"    {key}: {value}")
