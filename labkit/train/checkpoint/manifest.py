"""The manifest of a checkpoint, and the folder of a run's checkpoints. Needs no torch.

    DIR/latest                          name of the newest checkpoint: `step_00000003`
    DIR/step_00000003/manifest.json     what is stored, where, with its checksums; written last
    DIR/step_00000003/*.safetensors     the tensors, one file a rank
    DIR/.step_00000006.partial          a checkpoint that is being written, or was cut off; no reader looks at it
    DIR/.step_00000001.old              a checkpoint that is being removed

A checkpoint appears by one rename, after all its files are on the disk. So a step folder is complete, or something
changed it afterwards, and the checksums show what. The first line of manifest.json is the checksum of all that follows.

A tensor is stored as boxes (`boxes.py`), each under the key `NAME@OFFSET` of a safetensors file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.train.checkpoint.boxes import Box, whole

FORMAT = 1
"""Version of the layout on disk. A reader refuses a higher one."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2")  # fmt: skip
"""Types of stored tensors, by torch's names."""
PATIENCE = 2.0
"""Seconds for which a run tries to lock its folder: ranks of a killed run may just be ending."""
MANIFEST, LATEST = "manifest.json", "latest"
_STEP = re.compile(r"step_(\d{8,15})")
_REMAINS = re.compile(r"\.step_\d{8,15}\.(partial|old)")
_FILE = re.compile(r"[\w.-]+\.safetensors")
_HEAD = re.compile(rb'\{"checksum": "([0-9a-f]{16})",\n')


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written: which one, what is wrong, what to do."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor in one of the files."""

    box: Box
    """Place in the whole tensor."""
    file: str
    """Name of the safetensors file."""
    checksum: str
    """xxh3_64 of the bytes."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A whole tensor."""

    dtype: str
    """torch's name of the type, such as `float32`."""
    shape: tuple[int, ...]
    """Shape in one process, without padding."""
    boxes: tuple[StoredBox, ...]
    """Its parts, which cover it exactly once."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return whole(self.shape).numel


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One safetensors file."""

    size: int
    """Bytes."""
    header_checksum: str
    """xxh3_64 of the header with its length."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of manifest.json."""

    step: int
    """Finished steps."""
    tensors: dict[str, StoredTensor]
    """By name: parameters under their full names; `exp_avg.NAME` and others before the state that belongs to them."""
    files: dict[str, StoredFile]
    """By file name."""
    training: dict[str, Any]
    """State of the loop: consumed samples, skipped steps, loss scale."""
    config: dict[str, Any]
    """The whole configuration of the run; of imported weights the fields of the sections model and moe."""
    world_size: int
    """Ranks of the run that wrote it."""
    versions: dict[str, str]
    """Of labkit, torch and others, and the git commit of labkit's source if there is one."""


def key_of(name: str, box: Box) -> str:
    """The name of a box inside its safetensors file."""
    return f"{name}@{','.join(map(str, box.offset))}"


def checksum(data: Any) -> str:
    """xxh3_64 of a buffer, as 16 hexadecimal digits. It finds accidents, not forgeries."""
    import xxhash  # here, so that a run without checkpoints needs it not

    return xxhash.xxh3_64_hexdigest(data)


# ---- the text of a manifest ----


def to_json(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "boxes": [[b.box.offset, b.box.shape, b.file, b.checksum] for b in tensor.boxes],
        }
        for name, tensor in manifest.tensors.items()
    }
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "training": manifest.training,
        "config": manifest.config,
        "files": {name: asdict(file) for name, file in manifest.files.items()},
        "tensors": tensors,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    rest = ",\n".join(lines).encode() + b"}\n"
    return f'{{"checksum": "{checksum(rest)}",\n'.encode() + rest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, and bring it and the names in the folder to the disk."""
    with (folder / MANIFEST).open("wb") as file:
        file.write(to_json(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`.

    Raises CheckpointError for a manifest that is missing, damaged, from a newer labkit, or inconsistent.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        what = f"has no {MANIFEST}, so it is no complete checkpoint" if folder.is_dir() else "is no folder"
        raise CheckpointError(f"{folder}: {what}; name another checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror or error}") from None
    head = _HEAD.match(data)
    if head is None or checksum(data[head.end() :]) != head[1].decode():
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its checksum does not fit; use another checkpoint")
    try:
        content = json.loads(data)
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{folder}: the checkpoint has format {content['format']}, and this labkit reads up to {FORMAT}; "
                "install the labkit that wrote it or a newer one"
            )
        manifest = _parsed(content)
        if (named := _STEP.fullmatch(folder.name)) and int(named[1]) != manifest.step:
            raise CheckpointError(f"{folder}: its manifest is that of step {manifest.step}; use another checkpoint")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / MANIFEST} is no manifest of labkit ({error})") from None
    if problem := _inconsistent(manifest):
        raise CheckpointError(f"{folder / MANIFEST}: {problem}; use another checkpoint")
    return manifest


def _parsed(content: Mapping[str, Any]) -> Manifest:
    """The manifest in `content`. Every value that is used later has its type, else this raises ValueError."""
    tensors = {
        name: StoredTensor(
            _text(tensor["dtype"], DTYPES),
            _sizes(tensor["shape"]),
            tuple(StoredBox(Box(_sizes(o), _sizes(s)), _text(file), _text(c)) for o, s, file, c in tensor["boxes"]),
        )
        for name, tensor in content["tensors"].items()
    }
    files = {n: StoredFile(_count(f["size"]), _text(f["header_checksum"])) for n, f in content["files"].items()}
    training, config = content["training"], content["config"]
    done, skipped = _count(training["step"]), _count(training["skipped_steps"])
    if done != content["step"] or skipped > done or not isinstance(training.get("loss_scaler", {}), dict):
        raise ValueError("the state of the loop is of another step, or incomplete")
    _count(training["consumed_samples"])
    if not all(isinstance(section, dict) for section in (config, content["versions"], *config.values())):
        raise ValueError("the configuration is no table of tables")
    world_size = _count(content["world_size"], least=1)
    return Manifest(_count(content["step"]), tensors, files, training, config, world_size, content["versions"])


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} stands where a count must be")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _text(value: Any, known: Container[str] | None = None) -> str:
    if not isinstance(value, str) or (known is not None and value not in known):
        raise ValueError(f"{value!r} stands where a {'word' if known is None else 'type of numbers'} must be")
    return value


def _inconsistent(manifest: Manifest) -> str:
    """Why the boxes do not make up the tensors, or an empty string."""
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            return f"{name!r} is no name of a safetensors file"
    for name, tensor in manifest.tensors.items():
        everything = whole(tensor.shape)
        for stored in tensor.boxes:
            if stored.file not in manifest.files:
                return f"{name} lies in {stored.file}, which is not listed"
            if len(stored.box.offset) != len(tensor.shape) or len(stored.box.shape) != len(tensor.shape):
                return f"a part of {name} has other dimensions than its shape {list(tensor.shape)}"
            if stored.box.overlap(everything) != stored.box and everything.numel:
                return f"a part of {name} lies outside its shape {list(tensor.shape)}"
        if problem := covering_problem(name, tensor):
            return problem
    return ""


def covering_problem(name: str, tensor: StoredTensor) -> str:
    """Why the boxes do not cover the tensor exactly once, or an empty string."""
    places = [stored.box.offset for stored in tensor.boxes]
    if len(set(places)) < len(places):
        files = sorted({stored.file for stored in tensor.boxes if places.count(stored.box.offset) > 1})
        return f"{name} is stored twice, in {' and '.join(files)}"
    held = sum(stored.box.numel for stored in tensor.boxes)
    if held != tensor.numel:
        return f"{name} has {tensor.numel} elements, and {held} are stored"
    return ""


# ---- the folder of a run's checkpoints ----


def step_folder(folder: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return folder / f"step_{step:08d}"


def partial_folder(folder: Path, step: int) -> Path:
    """Folder in which that checkpoint is written."""
    return folder / f".step_{step:08d}.partial"


def lock_folder(folder: Path) -> int | None:
    """Lock the folder for one run. Return the descriptor that holds the lock, or None if another run has it.

    The kernel releases the lock when the process ends. The function tries for `PATIENCE`. A file system without locks
    locks nothing. Raises OSError if there is no folder.
    """
    descriptor, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return descriptor
        if time.monotonic() > deadline:
            os.close(descriptor)
            return None
        time.sleep(0.02)


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, complete or damaged, in ascending order."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def latest_step(folder: Path) -> int | None:
    """The step that the file `latest` names, if that checkpoint is there; else the highest step, or None."""
    steps = steps_in(folder)
    try:
        named = _STEP.fullmatch((folder / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        named = None
    if named and int(named[1]) in steps:
        return int(named[1])
    return steps[-1] if steps else None


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a run in the order in which a resuming run tries them: `latest`, then those before it."""
    last = latest_step(folder)
    return [step_folder(folder, step) for step in reversed(steps_in(folder)) if last is not None and step <= last]


def superseded(folder: Path, step: int, keep: int) -> list[int]:
    """Steps before the last `keep` checkpoints up to `step`. A checkpoint without a sound manifest does not count."""
    steps = [one for one in steps_in(folder) if one <= step]
    sound = 0
    for place, one in reversed([*enumerate(steps)]):
        with contextlib.suppress(CheckpointError):
            read_manifest(step_folder(folder, one))
            sound += 1
        if sound == keep:
            return steps[:place]
    return []


def name_latest(folder: Path, step: int) -> None:
    """Make `latest` name the checkpoint of `step`, by one rename."""
    draft = folder / f".{LATEST}.partial"
    with draft.open("w") as file:
        file.write(f"{step_folder(folder, step).name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, folder / LATEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_step(folder: Path, step: int) -> None:
    """Remove a checkpoint: first from the names that readers look at."""
    aside = folder / f".{step_folder(folder, step).name}.old"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(step_folder(folder, step), aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_remains(folder: Path) -> None:
    """Remove what a run left that was cut off in a save. Only a run that holds the lock may do so."""
    for path in remains_in(folder):
        shutil.rmtree(path, ignore_errors=True)


def remains_in(folder: Path) -> list[Path]:
    """Folders of checkpoints whose writing or removal was cut off, or is under way."""
    return sorted(path for path in folder.iterdir() if _REMAINS.fullmatch(path.name))
