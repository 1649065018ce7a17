"""Weights of a checkpoint to Hugging Face's files, and back: `labkit checkpoint export` and `import`.

    reader = Reader(Path("runs/a/step_00000100"))
    export_weights(Export(reader), Path("model.safetensors"))

    import_weights(Import(Path("llama")), Path("runs/b"))

Both pass the tensors on one by one, so memory holds one whole tensor of the model with its converted form. No process
group and no model is needed. `Export` and `Import` look only at names, types and shapes, and reject what does not fit
before anything is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.config import ConfigError, ModelConfig, MoEConfig, RunConfig
from labkit.models.convert import HuggingFaceState, full_state_to_hugging_face
from labkit.models.full_shapes import full_shapes
from labkit.models.hugging_face_config import (
    config_to_hugging_face,
    family_of,
    model_config_from_hugging_face,
    moe_config_from_hugging_face,
)
from labkit.output_files import appearing
from labkit.train.checkpoint import step_folders as disk
from labkit.train.checkpoint.boxes import whole
from labkit.train.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    key_of,
    versions,
    write_manifest,
)
from labkit.train.checkpoint.resume import MODEL_FIELDS
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.checkpoint.weight_files import WeightFiles, read_json, write_tensors
from labkit.train.run_folder.lock import FolderError, locked

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Words of `labkit checkpoint export --dtype` -> types."""
STATE = ("exp_avg.", "exp_avg_sq.", "fp8.", "rng.")
"""Prefixes of the names of stored tensors that are no weights."""
LARGEST_FILE = 2_000_000_000
"""Most bytes of one file of an imported checkpoint, unless one tensor alone is larger."""


# ---- export ----


class Export:
    """The weights of a checkpoint as Hugging Face's tensors."""

    def __init__(self, reader: Reader, dtype: torch.dtype | None = None) -> None:
        """dtype: type of all tensors; None keeps the stored types.

        Raises CheckpointError for a model that Hugging Face does not have, and for tensors that are not this model's.
        """
        self._reader, self._dtype = reader, dtype
        self.model, self.moe = model_of(reader.manifest)
        try:
            self.family = family_of(self.model, self.moe)
        except ValueError as error:
            raise CheckpointError(f"{reader.folder} cannot be written in Hugging Face's names: {error}") from None
        stored = {name: t for name, t in reader.manifest.tensors.items() if not name.startswith(STATE)}
        _check_shapes({name: t.shape for name, t in stored.items()}, self.model, self.moe, str(reader.folder))
        likes = {name: torch.empty(t.shape, dtype=_dtype_of(t, dtype), device="meta") for name, t in stored.items()}
        self._names = sorted(likes, key=lambda name: -likes[name].itemsize)
        self.likes: dict[str, Tensor] = {}
        """A meta tensor for each of theirs, in the order in which `tensors` yields them."""
        for name in self._names:
            self.likes |= full_state_to_hugging_face(self.model, {name: likes[name]}, self.moe)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (their name, tensor). Raises CheckpointError for a weight that the type cannot hold."""
        for name in self._names:
            tensor = self._reader.read_whole(name)
            if self._dtype is not None:
                tensor = _rounded(name, tensor, self._dtype)
            yield from full_state_to_hugging_face(self.model, {name: tensor}, self.moe).items()

    def config(self) -> dict[str, Any]:
        """Return the `config.json` that goes with the tensors."""
        widest = max((like.dtype for like in self.likes.values()), key=lambda dtype: dtype.itemsize)
        return config_to_hugging_face(self.model, self.moe, dtype=str(widest).removeprefix("torch."))


def model_of(manifest: Manifest) -> tuple[ModelConfig, MoEConfig]:
    """Return the model whose weights a checkpoint holds. Raises CheckpointError if its manifest describes none."""
    try:
        config = RunConfig().override({name: manifest.config[name] for name in ("model", "moe")})
    except (KeyError, ConfigError) as error:
        raise CheckpointError(
            f"the manifest of step {manifest.step} describes a model that this labkit does not have ({error})"
        ) from None
    return config.model, config.moe


def _dtype_of(tensor: StoredTensor, wanted: torch.dtype | None) -> torch.dtype:
    return wanted or getattr(torch, tensor.dtype)


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = tensor.to(dtype)
    if not rounded.isfinite().all() and tensor.isfinite().all():
        word = next(word for word, known in PRECISIONS.items() if known == dtype)
        raise CheckpointError(
            f"{name} has values up to {tensor.abs().max():.3g}, and {word} ends at {torch.finfo(dtype).max:.3g}; "
            "export as bf16 or fp32"
        )
    return rounded


def _check_shapes(found: Mapping[str, tuple[int, ...]], model: ModelConfig, moe: MoEConfig | None, source: str) -> None:
    """Raise CheckpointError unless `found` has the tensors of the model, in its shapes, and no others."""
    wanted = full_shapes(model, moe)
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(f"{source} has no tensor {name}, which its configuration requires")
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(found[name])}, but its configuration requires {list(shape)}"
            )
    if other := [name for name in found if name not in wanted]:
        raise CheckpointError(f"{source}: {other[0]} is not a tensor of the model that its configuration describes")


def export_weights(export: Export, file: Path) -> StoredFile:
    """Write the weights to `file`, which appears when it is whole."""
    with appearing(file) as draft:
        written = write_tensors(draft, export.likes, export.tensors())[0]
    disk.sync_folder(file.parent)
    return written


def export_folder(export: Export, folder: Path, file: str) -> StoredFile:
    """Write the weights and `config.json` to `folder`, from which transformers loads them."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        written = export_weights(export, folder / file)
        with appearing(folder / "config.json") as draft:
            draft.write_text(json.dumps(export.config(), indent=2, allow_nan=False) + "\n")
        disk.sync_folder(folder)
    except BaseException:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return written


# ---- import ----


class Import:
    """A model of Hugging Face as our tensors."""

    def __init__(self, source: Path) -> None:
        """source: a model's folder, or a safetensors file with `config.json` next to it.

        Raises CheckpointError for a model that labkit does not have, and for files that do not fit their config.json.
        """
        files = WeightFiles(source)
        described = (source if source.is_dir() else source.parent) / "config.json"
        self.model, self.moe = _described(described)
        try:
            self.tensors = HuggingFaceState(self.model, files, self.moe)
            """Our tensors; each is read and converted when somebody asks for it."""
            self.likes = dict(HuggingFaceState(self.model, files.likes, self.moe))
            """A meta tensor for each."""
        except ValueError as error:
            raise CheckpointError(f"{source} does not fit its config.json: {error}") from None

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the sections `model` and `moe` of our configuration, with the fields that the weights fix."""
        config = RunConfig(model=self.model, moe=self.moe).to_dict()
        of_experts = "moe." if self.moe.num_experts else "moe.num_experts"
        fixed = [name for name in (*MODEL_FIELDS, "model.seq_length") if name.startswith(("model.", of_experts))]
        return {
            section: {name: value for name, value in config[section].items() if f"{section}.{name}" in fixed}
            for section in ("model", "moe")
        }


def _described(path: Path) -> tuple[ModelConfig, MoEConfig]:
    """Return our configuration of the model in a `config.json`. Raises CheckpointError."""
    read = read_json(path)
    try:
        model, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
        config = RunConfig().override({"model": vars(model), "moe": vars(moe)})
        if problems := config.problems():
            raise ConfigError(problems)
    except KeyError as error:
        raise CheckpointError(f"{path} has no field {error}; fetch the model again") from None
    except ConfigError as error:
        raise CheckpointError(f"{path} describes a model that labkit cannot train: {error.problems[0]}") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} describes a model that labkit does not have: {error}") from None
    return config.model, config.moe


def import_weights(source: Import, folder: Path) -> Manifest:
    """Write the weights as the checkpoint of step 0 in `folder`, from which runs begin by `checkpoint.load`.

    Raises CheckpointError for a folder that holds checkpoints or in which a run saves. After any error the folder is as
    it was.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if odd := disk.in_the_way(folder):
        raise CheckpointError(f"{folder}: {odd}")
    try:
        with locked(folder):
            return _imported(source, folder, made=made)
    except FolderError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _imported(source: Import, folder: Path, *, made: bool) -> Manifest:
    """Import into a folder that is locked. made: the folder is new, so an error removes it."""
    try:
        if disk.steps_in(folder):
            raise CheckpointError(f"{folder} holds checkpoints already; name another folder, or remove them")
        disk.settle(folder)
        return _written(source, folder)
    except BaseException:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(disk.partial_folder(folder, 0), ignore_errors=True)


def _written(source: Import, folder: Path) -> Manifest:
    partial = disk.partial_folder(folder, 0)
    partial.mkdir()
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, names in enumerate(_shared_out(source.likes)):
        file = f"weights_{number:05d}.safetensors"
        keys = {name: key_of(name, whole(source.likes[name].shape)) for name in names}
        plan = {keys[name]: source.likes[name] for name in names}
        files[file], sums = write_tensors(partial / file, plan, ((keys[name], source.tensors[name]) for name in names))
        for name in names:
            like = source.likes[name]
            box = StoredBox(whole(like.shape), file, sums[keys[name]])
            tensors[name] = StoredTensor(str(like.dtype).removeprefix("torch."), tuple(like.shape), (box,))
    training = {"step": 0, "consumed_samples": 0, "skipped_steps": 0}
    made = Manifest(0, tensors, files, training, source.sections(), 1, versions())
    write_manifest(partial, made)
    disk.appear(folder, 0)
    return made


def _shared_out(likes: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the tensor names of each file, wide types first, so that all tensors are aligned."""
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(likes, key=lambda name: -likes[name].itemsize):
        if files[-1] and size + likes[name].nbytes > LARGEST_FILE:
            files.append([])
            size = 0
        files[-1].append(name)
        size += likes[name].nbytes
    return files
