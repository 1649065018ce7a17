"""Weak and strong scaling of labkit over the GPUs of a node or of several, and the transfers between them.

    torchrun --nproc-per-node 8 benchmarks/scaling.py                  # a node
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 benchmarks/scaling.py
    python benchmarks/scaling.py --nproc 8                             # a node, without torchrun
    python benchmarks/scaling.py --device cpu --nproc 2                # a rehearsal on a laptop, with tiny models

**Never run on several GPUs.** It was only rehearsed on two CPU ranks over gloo.

Each point trains a model whose size fits (`scaling_series`), in bf16 on GPUs, and is shown beside the step that
`labkit plan` predicts for the machine: labkit's machine with this GPU, or `--machine h200`, or the YAML file that
`labkit calibrate` wrote. Efficiency is the FLOP/s of a rank over those of the same series on one rank.

`transports` trains the longest pipeline over each of labkit's transports between stages. `collectives` times
all-reduce, all-gather, reduce-scatter, all-to-all and messages from 4 KiB to 1 GiB over NCCL, between 2 ranks, those of
a node and all of them. The bus bandwidth is that of nccl-tests: the bytes that leave a rank, over the time.

Every row is in the JSON file as soon as it is measured. To publish it:

    cp build/scaling.json benchmarks/results/ && python benchmarks/table.py

The steps of a node of eight H100 take 8 minutes by the plan's predictions; building the models comes on top. Many nodes
take hours, so begin with `--only dp --steps 3`. Exit code 2: bad input.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path += [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import numpy as np
import provenance
import torch
import torch.distributed as dist
from scaling_series import AXES, Point, counts, points

from labkit.comm import collectives
from labkit.comm.groups import ParallelGroups
from labkit.config import ConfigError, ParallelConfig, RunConfig
from labkit.data.gpt_data import SPLITS, GPTDataset
from labkit.launch import rank_info, report_progress, run
from labkit.models.chunks import embedding_ends
from labkit.parallel import initialize_model_parallel
from labkit.plan.collectives import Group, collective_seconds
from labkit.plan.machine import Machine, load_machine
from labkit.plan.machine_names import machine_of_gpu
from labkit.plan.stages import configured_schedule
from labkit.train.calibration.timing import Stopwatch, nothing
from labkit.train.calibration.transfers import transfers
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import Run, build_data_iterators, setup_model_and_optimizer
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

PARTS = (*AXES, "transports", "collectives")
STEPS, WARM_UP = 10, 3
"""Measured steps of a point, and those before them."""
LIMIT = 7200.0
"""Seconds that ranks wait for a point that doesn't need them."""
SIZES = tuple(4096 * 4**power for power in range(10))
"""Bytes of transfers: 4 KiB to 1 GiB."""
BUS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""Collective -> c in c (n - 1) / n x bytes, what leaves each rank; a message leaves whole."""
TITLE = "Scaling over several ranks"
NOTES = (
    "Efficiency: FLOP/s of a rank over those of the same series on one rank; operations without recomputation.",
    "Strong scaling keeps model and global batch.",
    "Weak scaling: a model wider by the root of n (tp), n x layers (pp), samples (dp), sequence (cp), experts (ep).",
    "plan: the step that labkit plan predicts. A step is as long as its slowest rank.",
)


class Work(NamedTuple):
    """What the ranks measure."""

    points: list[Point]
    steps: int
    sizes: tuple[int, ...]
    """Bytes of transfers; none if there is nothing to time."""
    groups: tuple[int, ...]
    """Ranks between which they are timed."""


# ---- on the ranks ----


def measure(work: Work) -> None:
    """Measure everything; rank 0 reports each result. Ranks that a point doesn't need wait for its end."""
    for number, point in enumerate(work.points):
        if rank_info().rank < point.ranks:
            seconds, peak = measured_point(point, work.steps)
            report_progress({"point": number, "seconds": seconds, "peak_bytes": peak})
        dist.barrier()
    for ranks in work.groups if work.sizes else ():
        if rank_info().rank < ranks:
            measured_transfers(ranks, work.sizes)
        dist.barrier()


def measured_point(point: Point, steps: int) -> tuple[list[float], int]:
    """Seconds of each step, and the bytes that the fullest GPU allocated."""
    config, schedule = point.config, configured_schedule(point.config, point.ranks)
    ends = embedding_ends(config, schedule)
    with initialize_model_parallel(config.parallel, world_size=point.ranks, ends=ends) as groups:
        on_gpu = groups.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        found = list(timed_steps(Run(config, groups, schedule, Timers(0)), steps))
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        most = slowest([*found, float(peak)], groups)
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return most[:-1], int(most[-1])


def timed_steps(training: Run, steps: int) -> Iterator[float]:
    """Train, and yield the seconds of each step after the warm-up on this rank."""
    config, groups, timers = training.config, training.groups, training.timers
    chunks, optimizer, _ = setup_model_and_optimizer(training)
    pipeline = Pipeline(config, groups, chunks, gpt_forward_step, training.schedule)
    batches = build_data_iterators(training, random_text).train(0)
    wait = torch.cuda.synchronize if groups.device.type == "cuda" else nothing
    for step in range(WARM_UP + steps):
        collectives.barrier(groups.world)
        wait()
        start = time.perf_counter()
        train_step(pipeline, optimizer, timers, batches, step=step, lr=1e-4, clip_grad=1.0)
        wait()
        if step >= WARM_UP:
            yield time.perf_counter() - start


def random_text(config: RunConfig) -> tuple[GPTDataset, ...]:
    """Train, validation and test splits of random tokens."""
    length = config.model.seq_length
    count = config.train.global_batch_size * length + 1
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, count, dtype=np.int32)
    return tuple(GPTDataset(tokens, length, name=name) for name in SPLITS)


def slowest(values: Sequence[float], groups: ParallelGroups) -> list[float]:
    """The largest of each value over the ranks of a point."""
    on_gpu = groups.world.size > 1 and dist.get_backend(groups.world.process_group) == "nccl"
    table = torch.tensor(values, dtype=torch.float64, device=groups.device if on_gpu else "cpu")
    return collectives.all_reduce(table, groups.world, "max").tolist()


def measured_transfers(ranks: int, sizes: Sequence[int]) -> None:
    """Report the seconds of each transfer between the first `ranks` ranks."""
    with initialize_model_parallel(ParallelConfig(tp=ranks), world_size=ranks) as groups, torch.no_grad():
        watch = Stopwatch(wait=torch.cuda.synchronize if groups.device.type == "cuda" else nothing)
        for kind, size, sample in transfers(groups.tp, groups.device, watch, sizes):
            (seconds,) = slowest([sample.value], groups)
            report_progress({"transfer": kind, "ranks": ranks, "bytes": size, "seconds": seconds})


# ---- rows, printed and stored ----


class Results:
    """Rows of the table and of the JSON file, as they come."""

    def __init__(self, work: Work, machine: Machine | None, out: Path | None, ranks: int) -> None:
        """out: None on a rank that neither prints nor writes."""
        self.work, self.machine, self.out = work, machine, out
        self.rows: list[dict[str, Any]] = []
        self.alone: dict[tuple[str, str], float] = {}
        nodes = ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        plan = f"predictions for {machine.name}" if machine else "no predictions: no machine was given or known"
        self.notes = [*NOTES, f"{ranks} ranks on {nodes} node{'s' * (nodes > 1)}; {plan}."]
        if out is not None:
            print(f"{'':<28} {'ms':>10} {'plan ms':>10} {'error':>8} {'TFLOP/s':>8} {'efficiency':>10}", flush=True)

    def take(self, told: Mapping[str, Any]) -> None:
        """Take one report of rank 0."""
        if "point" in told:
            self.take_point(self.work.points[told["point"]], told["seconds"], told["peak_bytes"])
        elif "transfer" in told:
            self.take_transfer(told["transfer"], told["ranks"], told["bytes"], told["seconds"])
        self.store()

    def take_point(self, point: Point, seconds: list[float], peak_bytes: int) -> None:
        """Add the row of a point, and print it."""
        median = statistics.median(seconds)
        rate = point.flops / median
        alone = self.alone.setdefault(point.series, rate) if point.ranks == 1 else self.alone.get(point.series)
        model, config = point.config.model, point.config
        row: dict[str, Any] = {"case": point.case, "median_ms": {"labkit": 1e3 * median}}
        row |= {"raw_seconds": seconds, "noise": median / min(seconds), "tflop_per_s_and_rank": rate / 1e12}
        row |= {"layers": model.layers, "hidden": model.hidden, "sequence": model.seq_length}
        row |= {"global_batch": config.train.global_batch_size, "precision": config.optim.precision}
        row |= {"experts": config.moe.num_experts} if config.moe.num_experts else {}
        row |= {"efficiency": rate / alone} if alone else {}
        if peak_bytes:
            row |= {"peak_gb": peak_bytes / 1e9, "plan_peak_gb": point.peak_bytes() / 1e9}
        predicted = None
        if self.machine is not None:
            predicted = point.predicted(self.machine).seconds
            row["median_ms"]["plan"] = 1e3 * predicted
            row["plan_error"] = predicted / median - 1
        self.rows.append(row)
        share = f"{row['efficiency']:10.1%}" if alone else ""
        self.print_line(point.case, median, predicted, f"{rate / 1e12:8.4g} {share}")

    def take_transfer(self, kind: str, ranks: int, size: int, seconds: float) -> None:
        """Add a size to the row of its collective, and print it."""
        case = f"{kind.replace('_', '-')}, {ranks} ranks"
        if not self.rows or self.rows[-1]["case"] != case:
            self.rows.append({"case": case, "us": {}, "bus_gb_per_s": {}})
        bus = (BUS[kind] * (ranks - 1) / ranks if kind in BUS else 1.0) * size / seconds
        self.rows[-1]["us"][in_words(size)] = 1e6 * seconds
        self.rows[-1]["bus_gb_per_s"][in_words(size)] = bus / 1e9
        predicted = None
        if self.machine is not None:
            predicted = collective_seconds(self.machine, kind, size, Group(ranks))
            self.rows[-1].setdefault("plan_us", {})[in_words(size)] = 1e6 * predicted
        self.print_line(f"{case}, {in_words(size)}", seconds, predicted, f"bus {bus / 1e9:.3g} GB/s")

    def leave_out(self, point: Point, reason: str) -> None:
        """Add the row of a point that cannot run."""
        self.rows.append({"case": point.case, "could_not_run": reason})
        if self.out is not None:
            print(f"{point.case:<28} left out: {reason}", flush=True)

    def print_line(self, name: str, seconds: float, predicted: float | None, rest: str) -> None:
        """Print a line of the table."""
        if self.out is not None:
            plan = f"{1e3 * predicted:10.4g} {predicted / seconds - 1:+8.1%}" if predicted else f"{'-':>10} {'-':>8}"
            print(f"{name:<28} {1e3 * seconds:10.4g} {plan} {rest}", flush=True)

    def store(self) -> None:
        """Write the file anew."""
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            result = {"benchmark": "scaling", "title": TITLE, **provenance.origin()}
            self.out.write_text(json.dumps(result | {"rows": self.rows, "notes": self.notes}, indent=1) + "\n")


def in_words(size: int) -> str:
    """Bytes in words."""
    unit = next(unit for unit in (30, 20, 10, 0) if size >> unit)
    return f"{size >> unit} {('B', 'KiB', 'MiB', 'GiB')[unit // 10]}"


# ---- the command ----


class Here(NamedTuple):
    """The ranks and GPUs that there are."""

    device: str
    ranks: int
    gpu: str
    """Name of the GPU; empty on a CPU."""
    memory: float
    """Bytes of a GPU."""


def found_here(options: argparse.Namespace) -> Here:
    """Return what the benchmark runs on.

    Raises:
        ValueError: ranks that are too few, too many, or no power of two.
    """
    started = os.environ.get("WORLD_SIZE")
    if started is not None and options.nproc not in (None, int(started)):
        raise ValueError(f"--nproc {options.nproc}: torchrun started {started} ranks; leave --nproc out")
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.device == "cuda" and not gpus:
        raise ValueError("--device cuda: torch sees no GPU here; `labkit doctor` says why. --device cpu rehearses")
    device = "cuda" if gpus else "cpu"
    if gpus:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # before CUDA starts: tp and cp overlap only so
    ranks = int(started) if started else options.nproc if options.nproc is not None else gpus
    if not gpus and not ranks:
        raise ValueError("torch sees no GPU here; rehearse on the CPU with --device cpu --nproc 2")
    if ranks < 2:
        raise ValueError(f"scaling needs at least 2 ranks, but here is {ranks}; benchmarks/gpu.py measures one GPU")
    if ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        raise ValueError(f"{ranks} ranks are no power of two; give --nproc {below}, or start {below} with torchrun")
    if device == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) > gpus:
        raise ValueError(f"{ranks} ranks need a GPU each, but torch sees {gpus}; give --nproc {gpus}")
    if device == "cpu":
        return Here(device, ranks, "", 0.0)
    properties = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0)))
    return Here(device, ranks, properties.name, float(properties.total_memory))


def chosen_work(options: argparse.Namespace, here: Here) -> Work:
    """Return what is measured.

    Raises:
        ValueError: an unknown part, a size out of range, or no model that fits.
    """
    parts = options.only.split(",") if options.only else PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise ValueError(f"--only {options.only}: no part {unknown[0]!r}; parts: {','.join(PARTS)}")
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}: give at least 1")
    most = options.largest or (SIZES[-1] if here.device == "cuda" else 1 << 20)
    if most < SIZES[0]:
        raise ValueError(f"--largest {options.largest}: the smallest transfer has {SIZES[0]} bytes; give at least that")
    sizes = tuple(size for size in SIZES if size <= most) if "collectives" in parts else ()
    node = int(os.environ.get("LOCAL_WORLD_SIZE", here.ranks))
    groups = tuple(count for count in counts(here.ranks) if count in (2, node, here.ranks))
    return Work(points(parts, here.ranks, here.device, here.memory), options.steps, sizes, groups)


def chosen_machine(name: str | None, here: Here, work: Work) -> Machine | None:
    """Return the machine to predict for: the given one, or labkit's with this GPU, or None.

    Raises:
        ValueError: no such machine, or it has no times for what is measured.
    """
    name = name or (machine_of_gpu(here.gpu) if here.gpu else None)
    if name is None:
        return None
    machine = load_machine(name)
    for point in work.points:
        if not point.forbidden():
            point.predicted(machine)
    return machine


def main(given: Sequence[str] | None = None) -> int:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", help="predict for this machine of labkit, or this file of `labkit calibrate`")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: GPUs if there are")
    parser.add_argument("--nproc", type=int, help="number of ranks without torchrun; default: one for each GPU")
    parser.add_argument("--only", default="", help=f"parts, joined by commas, of {','.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"measured steps of a point; default: {STEPS}")
    parser.add_argument("--largest", type=int, help="bytes of the largest transfer; default: 1 GiB, on a CPU 1 MiB")
    parser.add_argument("--out", type=Path, default=Path("build/scaling.json"), help="default: build/scaling.json")
    options = parser.parse_args(given)
    first = os.environ.get("RANK", "0") == "0"
    try:
        here = found_here(options)
        work = chosen_work(options, here)
        machine = chosen_machine(options.machine, here, work)
    except (ConfigError, ValueError) as error:
        if not first:
            time.sleep(2)  # rank 0 prints it, and torchrun ends all ranks after the first exit
            return 2
        parser.error(str(error))
    results = Results(work, machine, options.out if first else None, here.ranks)
    possible = []
    for point in work.points:
        if reason := point.forbidden():
            results.leave_out(point, reason)
        else:
            possible.append(point)
    results.work = work = work._replace(points=possible)
    run(measure, here.ranks, work, device=here.device, progress=results.take, timeout=LIMIT)
    if first:
        print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
