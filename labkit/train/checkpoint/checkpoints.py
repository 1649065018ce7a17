"""`Checkpoints`: the checkpoints of a run, as one of its ranks saves and loads them.

A save has three stages, so that a kill at any moment leaves the last complete checkpoint as it was:

    collect    each rank takes the tensors that it writes; an asynchronous save copies them to the host
    write      each rank writes one file into `.step_N.partial` and brings it to the disk; an asynchronous save does so
               in a thread
    commit     the ranks exchange checksums; rank 0 writes the manifest, renames the folder to `step_N`, lets `latest`
               name it (`step_folders.py`), and removes checkpoints beyond `checkpoint.keep`

While an asynchronous save is under way, each step ends with a question to all ranks: are the files written? If so, the
ranks commit. So threads never communicate.

The folder is the run's own, because `train/run_folder` makes and locks it before, and ends what a killed save had
begun.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import RunConfig
from labkit.parallel.data_parallel.optimizer import MegatronOptimizer
from labkit.train.checkpoint import step_folders as disk
from labkit.train.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    covering_problem,
    key_of,
    versions,
    write_manifest,
)
from labkit.train.checkpoint.rank_state import Piece, RankState, fill
from labkit.train.checkpoint.resume import (
    Progress,
    continues_folder,
    model_differences,
    other_differences,
    same_layout,
    to_try,
)
from labkit.train.checkpoint.shard_files import Reader, shard_name, write_shard
from labkit.train.loss_scaler import LossScaler
from labkit.train.run_folder.contents import INTERVAL, saves_into


@dataclass(frozen=True)
class _Written:
    """The outcome of one rank's writing."""

    file: StoredFile | None
    """None for a rank that owns nothing."""
    boxes: list[tuple[str, str, tuple[int, ...], Any, str]]
    """(tensor, type, whole shape, box, checksum) of each box in the file."""
    error: str = ""


@dataclass
class _Save:
    """A save under way."""

    progress: Progress
    training: dict[str, Any]
    thread: threading.Thread | None
    written: _Written | None = None


class Checkpoints:
    """Saves and loads the state of a run. All ranks call every method; a run without a folder for it saves nothing."""

    def __init__(
        self, config: RunConfig, groups: ParallelGroups, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer,
        *, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        """chunks, optimizer: as `pretrain` makes them. say: gets sentences for the user, on rank 0.

        A `with` block ends with a save that is under way.
        """
        self._config, self._groups = config, groups
        self._state = RankState(chunks, optimizer, groups)
        self._say = say if groups.world.rank == 0 else lambda _: None
        self._folder = saves_into(config)
        self._pending: _Save | None = None
        self._staging: dict[str, Tensor] = {}
        self.last: Path | None = None
        """The newest checkpoint that this run has saved or loaded."""
        self.continues = False
        """The loaded checkpoint belongs to the run whose files are in `train.output_dir`."""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish a save. After an error no rank waits for others, so a save under way is left unfinished."""
        if kind is None:
            self.finish()

    # ---- loading ----

    def load(self, scaler: LossScaler) -> Progress:
        """Load the checkpoint that `checkpoint.load` asks for, and return how far its run had come.

        A damaged checkpoint is named, and the one before it used. Under the layout that saved it, the run goes on bit
        for bit as if it had not been interrupted. Another layout derives its random states from seed, step and rank.
        This is reported, and so is every field that differs.

        Raises CheckpointError on all ranks for a checkpoint of another model, and if every checkpoint is damaged.
        """
        paths = self._to_try()
        if not paths:
            return Progress()
        damaged: list[str] = []
        for path in paths:
            reader, found = self._checked(path)
            if reader is None or found:
                damaged += found
                continue
            if damaged:
                self._say(f"damaged, so not used: {'; '.join(damaged)}")
            return self._loaded(reader, scaler)
        raise CheckpointError("no checkpoint can be used: " + "; ".join(damaged))

    def _to_try(self) -> list[Path]:
        """Return the checkpoints to try as rank 0 sees them, since another machine may see the folder late or never."""
        found, problem = list[Path](), ""
        if self._groups.world.rank == 0:
            try:
                found = to_try(self._config)
                for newer in disk.passed_over(found[0].parent) if found else ():
                    latest = found[0].parent / disk.LATEST
                    self._say(f"not used, because {latest} names an earlier checkpoint: step {newer}")
            except CheckpointError as error:
                problem = str(error)
        found, problem = self._gathered((found, problem))[0]
        if problem:
            raise CheckpointError(problem)
        return found

    def _checked(self, path: Path) -> tuple[Reader | None, list[str]]:
        """Return a reader of the checkpoint and what is wrong with it. Each rank looks at its share of the files."""
        try:
            reader = Reader(path)
            files = sorted(reader.manifest.files)[self._groups.world.rank :: self._groups.world.size]
            own = reader.problems(files)
        except CheckpointError as error:
            reader, own = None, [str(error)]
        return reader, list(dict.fromkeys(problem for problems in self._gathered(own) for problem in problems))

    def _loaded(self, reader: Reader, scaler: LossScaler) -> Progress:
        stored, config = reader.manifest, self._config
        if refused := model_differences(stored, config):
            raise CheckpointError("; ".join(refused))
        training = stored.training
        updates = training["step"] - training["skipped_steps"]
        with_moments = any(name.startswith("exp_avg.") for name in stored.tensors)
        pieces = self._state.to_load(with_moments=with_moments)
        self._agree(self._state.misfits(reader, pieces))
        fill(pieces, reader)
        if with_moments:
            self._state.set_adam_steps(updates)
        scaler.restore(training.get("loss_scaler", {}))
        said = other_differences(stored, config)
        other = self._other_place(stored)
        if not other:
            self._state.load_rng(reader)
        elif "parallel" in stored.config:  # else imported weights, which have no random states to go on with
            self._state.derive_rng(config.train.seed, stored.step)
            said.append(f"random states are derived from seed, step and rank, because the {other} has changed")
        if not self._state.load_fp8(reader, stored.step):
            said.append("the checkpoint has no fp8 history for this model, so the history starts anew")
        if config.model.transformer_impl == "transformer_engine" and config.optim.fp8 != "none":
            said.append("Transformer Engine does not hand out its fp8 history, so the history starts anew")
        reader.close()
        self.last, self.continues = reader.folder, continues_folder(config, reader.folder, stored)
        self._say(f"resumed from {reader.folder}{': ' if said else ''}{'; '.join(said)}")
        return Progress(training["step"], training["consumed_samples"], training["skipped_steps"])

    def _other_place(self, stored: Manifest) -> str:
        """Return `layout` or `device` if the checkpoint's random states are not those of these ranks, else nothing."""
        if not same_layout(stored, self._config, self._groups.world.size):
            return "layout"
        of_gpu = "rng.00000.cuda" in stored.tensors
        return "" if of_gpu == (self._groups.device.type == "cuda") else "device"

    # ---- saving ----

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after `step`: every `checkpoint.interval` steps and after the last."""
        if self._folder is None:
            return False
        return step % (self._config.checkpoint.interval or INTERVAL) == 0 or step == self._config.train.steps

    def save(self, progress: Progress, scaler: LossScaler) -> None:
        """Save the state after `progress.step` steps; with `checkpoint.asynchronous` only start to save it.

        Raises CheckpointError on all ranks if a rank cannot write, for example on a full disk. Earlier checkpoints
        stay.
        """
        if self._folder is None or self.last == disk.step_folder(self._folder, progress.step):
            return
        self.finish()
        asynchronous = self._config.checkpoint.asynchronous
        pieces = self._mine(progress)
        tensors = {key_of(piece.name, piece.box): piece.values for piece in pieces}
        held = self._staged(tensors) if asynchronous else {key: _on_host(values) for key, values in tensors.items()}
        save = _Save(progress, _training(progress, scaler), None)
        partial = disk.partial_folder(self._folder, progress.step)

        def write() -> None:
            save.written = _write(partial, shard_name(self._groups.world.rank), pieces, held)

        self._pending = save
        if asynchronous:
            save.thread = threading.Thread(target=write, name="checkpoint", daemon=True)
            save.thread.start()
        else:
            write()
            self.finish()

    def save_now(self, progress: Progress, scaler: LossScaler) -> str | None:
        """Save, also asynchronously, and wait for it. Return the checkpoint; None for a run that saves nothing."""
        self.save(progress, scaler)
        self.finish()
        return str(self.last) if self._folder is not None else None

    def poll(self) -> None:
        """Commit a save under way if all ranks have written. Call this after each step."""
        if self._pending is not None and all(self._gathered(self._pending.written is not None)):
            self._commit()

    def finish(self) -> None:
        """Wait for a save under way, and commit it. Raises CheckpointError as `save` does."""
        if self._pending is not None:
            if self._pending.thread is not None:
                self._pending.thread.join()
            self._commit()

    def _mine(self, progress: Progress) -> list[Piece]:
        """Return the pieces that this rank writes."""
        with_moments = progress.step > progress.skipped_steps
        pieces = [*self._state.pieces(with_moments=with_moments), *self._state.fp8_pieces(), *self._state.rng_pieces()]
        return [piece for piece in pieces if piece.written]

    def _staged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies on the host, in memory that later saves use again."""
        for key, values in tensors.items():
            kept = self._staging.get(key)
            if kept is None or kept.shape != values.shape:  # random states get longer
                pinned = values.device.type == "cuda"
                self._staging[key] = kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
            kept.copy_(values, non_blocking=True)
        if self._groups.device.type == "cuda":
            torch.cuda.current_stream(self._groups.device).synchronize()
        return {key: self._staging[key] for key in tensors}

    def _commit(self) -> None:
        save, self._pending = self._pending, None
        assert save is not None and save.written is not None and self._folder is not None
        parts: list[_Written] = self._gathered(save.written)
        failed = [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error]
        problem = ""
        if self._groups.world.rank == 0:
            problem = self._not_saved(save.progress.step, failed) if failed else self._completed(save, parts)
        self._agree(problem)
        self.last = disk.step_folder(self._folder, save.progress.step)

    def _not_saved(self, step: int, failed: Sequence[str]) -> str:
        """Remove the partial folder and return the error."""
        assert self._folder is not None
        shutil.rmtree(disk.partial_folder(self._folder, step), ignore_errors=True)
        kept = f"the last good one is {self.last}" if self.last is not None else "there is no earlier one"
        return f"the checkpoint of step {step} could not be written ({'; '.join(failed)}); {kept}"

    def _completed(self, save: _Save, parts: Sequence[_Written]) -> str:
        """Rank 0: write the manifest, let the checkpoint appear, remove old ones. Return why there is no checkpoint."""
        assert self._folder is not None
        step = save.progress.step
        partial = disk.partial_folder(self._folder, step)
        tensors, problem = _merged(parts)
        if problem:
            return self._not_saved(step, [problem])
        files = {shard_name(rank): part.file for rank, part in enumerate(parts) if part.file is not None}
        made = Manifest(
            step, tensors, files, save.training, self._config.to_dict(), self._groups.world.size, versions()
        )
        try:
            for stray in {path.name for path in partial.iterdir()} - {MANIFEST, *files}:
                (partial / stray).unlink()
            write_manifest(partial, made)
            disk.appear(self._folder, step)
        except OSError as error:
            return self._not_saved(step, [f"rank 0: {error}"])
        for problem in disk.remove_superseded(self._folder, step, self._config.checkpoint.keep):
            self._say(problem)
        return ""

    # ---- agreement ----

    def _gathered(self, own: Any) -> list[Any]:
        with comm_scope(layer="checkpoint", phase="report"):
            return gather_objects(own, self._groups.world)

    def _agree(self, problem: str) -> None:
        """Raise CheckpointError on all ranks if one of them has a problem."""
        if found := list(filter(None, self._gathered(problem))):
            raise CheckpointError("; ".join(found))


def _on_host(values: Tensor) -> Tensor:
    return values.detach().cpu().contiguous()


def _write(partial: Path, file: str, pieces: Sequence[Piece], held: dict[str, Tensor]) -> _Written:
    """Write this rank's file. Errors are returned, not raised, because all ranks must learn of them."""
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if not held:
            return _Written(None, [])
        stored, sums = write_shard(partial / file, held)
    except OSError as error:
        return _Written(None, [], error.strerror or str(error))
    except Exception as error:  # in a thread nobody else would learn of it
        return _Written(None, [], repr(error))
    boxes = []
    for piece in pieces:
        dtype = str(piece.values.dtype).removeprefix("torch.")
        boxes.append((piece.name, dtype, piece.full_shape, piece.box, sums[key_of(piece.name, piece.box)]))
    return _Written(stored, boxes)


def _merged(parts: Sequence[_Written]) -> tuple[dict[str, StoredTensor], str]:
    """Return all ranks' boxes by tensor, and why they do not make up whole tensors, or an empty string."""
    tensors: dict[str, StoredTensor] = {}
    for rank, part in enumerate(parts):
        for name, dtype, shape, box, digits in part.boxes:
            there = tensors.get(name) or StoredTensor(dtype, shape, ())
            if (there.dtype, there.shape) != (dtype, shape):
                return (
                    {},
                    f"{name} is {dtype} {list(shape)} on rank {rank} and {there.dtype} {list(there.shape)} elsewhere",
                )
            tensors[name] = replace(there, boxes=(*there.boxes, StoredBox(box, shard_name(rank), digits)))
    found = (covering_problem(name, tensor) for name, tensor in tensors.items())
    problem = next(filter(None, found), "")
    advice = "; give parameters of a model provider names of the whole model"
    advice += " (labkit.parallel.parameters.weights.tag_parameter)"
    return tensors, f"{problem}{advice}" if problem else ""


def _training(progress: Progress, scaler: LossScaler) -> dict[str, Any]:
    return {
        "step": progress.step,
        "consumed_samples": progress.consumed_samples,
        "skipped_steps": progress.skipped_steps,
        "loss_scaler": scaler.state(),
    }
