"""Saving and loading a run's state on one rank: labkit beside torch.save and torch's distributed checkpoint (DCP).

    python benchmarks/checkpoint.py              # 100 MB and 1 GB; writes results/checkpoint.json
    python benchmarks/checkpoint.py --megabytes 100 --dry

The state is parameters, both moments of AdamW and the step, in fp32. Every alternative brings its files to the disk
(fsync) and removes its previous ones. labkit's times include its checksums; `checksums_ms` tells what they cost.
Loading reads files that the page cache holds, and copies into a model that exists; labkit checks every byte first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import Comparison, interleave, peak_of, report

from labkit.config import RunConfig, presets
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.rank_state import MOMENTS
from labkit.train.checkpoint.resume import Progress
from labkit.train.checkpoint.shard_files import checksum_of
from labkit.train.loss_scaler import build_loss_scaler
from labkit.train.pretraining import initialize, setup_model_and_optimizer


class State:
    """A GPT of about `megabytes` with its optimizer, on this process alone."""

    def __init__(self, megabytes: int, folder: Path) -> None:
        hidden = 256 if megabytes < 500 else 512
        parameters = megabytes * 1_000_000 // 12
        layers = max(1, round((parameters - 1024 * hidden) / (12 * hidden * hidden)))
        config = presets.tiny().override(
            {"layers": layers, "hidden": hidden, "heads": 8, "allow_oversubscription": True}
        )
        self.config: RunConfig = config.override({"checkpoint.dir": str(folder / "labkit"), "checkpoint.keep": 1})
        self.folder = folder
        run = initialize(self.config)
        self.groups = run.groups
        self.chunks, self.optimizer, _ = setup_model_and_optimizer(run)
        for part in self.optimizer.updated_parts():
            self.optimizer.adamw.state[part.master].update({name: torch.rand_like(part.master) for name in MOMENTS})
            self.optimizer.adamw.state[part.master]["step"] = torch.tensor(1.0)
        self.scaler = build_loss_scaler(self.config.optim)
        self.step = 0

    def checkpoints(self, **changes: Any) -> Checkpoints:
        """labkit's checkpoints of this state."""
        return Checkpoints(self.config.override(changes), self.groups, self.chunks, self.optimizer, say=lambda _: None)

    def theirs(self) -> dict[str, Any]:
        """The same tensors as state dicts, for the peers."""
        model = {name: tensor for chunk in self.chunks for name, tensor in chunk.state_dict().items()}
        moments = {
            f"{number}.{name}": self.optimizer.adamw.state[part.master][name]
            for number, part in enumerate(self.optimizer.updated_parts())
            for name in (*MOMENTS, "step")
        }
        return {"model": model, "optimizer": moments}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for part in self.theirs().values() for tensor in part.values())


def synced(path: Path) -> None:
    """Bring a file, or a folder with its files, to the disk."""
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        descriptor = os.open(one, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def savers(state: State, ours: Checkpoints) -> dict[str, Callable[[], None]]:
    """Each saves the state once more and removes what it saved before."""
    theirs = state.theirs()

    def labkit() -> None:
        state.step += 1
        ours.save(Progress(state.step, 0, 0), state.scaler)

    def torch_save() -> None:
        torch.save(theirs, state.folder / "new.pt")
        synced(state.folder / "new.pt")
        os.replace(state.folder / "new.pt", state.folder / "torch.pt")

    def torch_dcp() -> None:
        shutil.rmtree(state.folder / "old", ignore_errors=True)
        if (state.folder / "dcp").exists():
            os.rename(state.folder / "dcp", state.folder / "old")
        dcp.save(theirs, checkpoint_id=state.folder / "dcp", no_dist=True)
        synced(state.folder / "dcp")
        shutil.rmtree(state.folder / "old", ignore_errors=True)

    return {"labkit": labkit, "torch.save": torch_save, "torch DCP": torch_dcp}


def loaders(state: State) -> dict[str, Callable[[], None]]:
    """Each fills the tensors of the state from what `savers` wrote last."""
    theirs = state.theirs()

    def labkit() -> None:
        reading = Checkpoints(state.config, state.groups, state.chunks, state.optimizer, say=lambda _: None)
        reading.load(state.scaler)

    def torch_load() -> None:
        read = torch.load(state.folder / "torch.pt", weights_only=True)
        for part, tensors in theirs.items():
            for name, tensor in tensors.items():
                tensor.detach().copy_(read[part][name])

    def torch_dcp() -> None:
        dcp.load(theirs, checkpoint_id=state.folder / "dcp", no_dist=True)

    return {"labkit": labkit, "torch.load": torch_load, "torch DCP": torch_dcp}


def size_of(path: Path) -> int:
    """Bytes of a file or of all files in a folder."""
    return sum(one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file())


def measure(megabytes: int, repetitions: int, folder: Path) -> list[Comparison]:
    """Saving, loading, and the steps around an asynchronous save."""
    state = State(megabytes, folder)
    words, ours = f"{state.nbytes / 1e6:.0f} MB", state.checkpoints()
    saving = savers(state, ours)
    found = interleave(f"save {words}, fsync included", saving, repetitions=repetitions, warmup=1)
    start = time.perf_counter()
    for part in state.theirs().values():
        for tensor in part.values():
            checksum_of(tensor.detach().contiguous())
    checksums = time.perf_counter() - start
    peaks = {name: round(peak_of(step) / 1e6) for name, step in saving.items()}
    places = {"labkit": "labkit", "torch.save": "torch.pt", "torch DCP": "dcp"}
    sizes = {name: round(size_of(folder / place) / 1e6, 1) for name, place in places.items()}
    facts = {"checksums_ms": round(1e3 * checksums, 1), "peak_memory_mb": peaks, "size_mb": sizes}
    found = replace(found, facts=facts)
    reading = loaders(state)
    loading = interleave(f"load {words} from the page cache", reading, repetitions=repetitions, warmup=1)
    loading = replace(loading, facts={"peak_memory_mb": {n: round(peak_of(step) / 1e6) for n, step in reading.items()}})
    return [found, loading, around(state, words, repetitions)]


def around(state: State, words: str, repetitions: int) -> Comparison:
    """Five stand-ins for a training step (a product of 0.2 s or so), in whose first a save is due: synchronous,
    asynchronous, torch's asynchronous save, and none."""
    x = torch.rand(1500, 1500)
    behind = state.checkpoints(**{"checkpoint.asynchronous": True})

    def steps(begin: Callable[[], None], poll: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            begin()
            for _ in range(5):
                for _ in range(4):
                    torch.mm(x, x)
                poll()

        return run

    theirs, pending = state.theirs(), []

    def ours() -> None:
        state.step += 1
        behind.save(Progress(state.step, 0, 0), state.scaler)

    def dcp_begin() -> None:
        for future in pending:
            future.result()
        pending[:] = [dcp.async_save(theirs, checkpoint_id=state.folder / f"async{state.step % 2}", no_dist=True)]

    def nothing() -> None: ...

    alternatives = {
        "labkit, asynchronous": steps(ours, behind.poll),
        "torch DCP, asynchronous": steps(dcp_begin, nothing),
        "no save": steps(nothing, nothing),
    }
    found = interleave(
        f"five steps, a save of {words} begins before the first", alternatives, repetitions=repetitions, warmup=1
    )
    behind.finish()
    for future in pending:
        future.result()
    return found


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--folder", help="where to write; default: a temporary folder beside the repository's build/")
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(options.folder or Path(__file__).resolve().parents[1] / "build")
    root.mkdir(parents=True, exist_ok=True)
    rows: list[Comparison] = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory(dir=root) as folder:
            rows += measure(megabytes, options.repetitions, Path(folder))
    report(
        "checkpoint",
        rows,
        title="Saving and loading a run's state on one rank",
        notes=[
            "Parameters and two moments in fp32, one thread. Peak memory is the growth of the process's own memory.",
            "labkit's files contain a checksum for every tensor; `checksums ms` is the time for these alone.",
            "Both asynchronous rows include copying the state, and waiting for the rest of the previous save.",
        ],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
