"""The manifest of a checkpoint. Needs no torch.

    step_00000003/manifest.json     what is stored, where, with its checksums; written last
    step_00000003/*.safetensors     the tensors, one file per rank

The first line of manifest.json is the checksum of all that follows.

A tensor is stored as boxes (`boxes.py`), each under the key `NAME@OFFSET` of a safetensors file.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from labkit.train.checkpoint.boxes import Box, whole

FORMAT = 1
"""Version of the layout on disk. A reader rejects a higher one."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2")  # fmt: skip
"""Types of stored tensors, by torch's names."""
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step_(\d{8,15})")
"""Name of a checkpoint: its finished steps."""
_FILE = re.compile(r"[\w.-]+\.safetensors")
_HEAD = re.compile(rb'\{"checksum": "([0-9a-f]{16})",\n')


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written. The message says which one, what is wrong and what to do."""


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
    """Stored tensors by name: parameters by their full names, and state that belongs to them as `exp_avg.NAME` etc."""
    files: dict[str, StoredFile]
    """The safetensors files, by file name."""
    training: dict[str, Any]
    """State of the loop: consumed samples, skipped steps, loss scale."""
    config: dict[str, Any]
    """The whole configuration of the run; for imported weights only fields of the sections model and moe."""
    world_size: int
    """Ranks of the run that wrote it."""
    versions: dict[str, str]
    """Versions of labkit, torch and others, and the git commit of labkit's source if there is one."""


def key_of(name: str, box: Box) -> str:
    """Return the name of a box inside its safetensors file."""
    return f"{name}@{','.join(map(str, box.offset))}"


def checksum(data: Any) -> str:
    """Return xxh3_64 of a buffer, as 16 hexadecimal digits. It detects accidents, not forgeries."""
    import xxhash  # here, so that a run without checkpoints does not need it

    return xxhash.xxh3_64_hexdigest(data)


# ---- the text of a manifest ----


def to_json(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json."""
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
    """Write manifest.json, and bring it to the disk."""
    with (folder / MANIFEST).open("wb") as file:
        file.write(to_json(manifest))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises CheckpointError for a manifest that is missing, damaged, from a newer labkit, or inconsistent.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        what = f"has no {MANIFEST}, so it is not a complete checkpoint" if folder.is_dir() else "is not a folder"
        raise CheckpointError(f"{folder}: {what}; name another checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error.strerror or error}") from None
    head = _HEAD.match(data)
    if head is None or checksum(data[head.end() :]) != head[1].decode():
        raise CheckpointError(f"{folder / MANIFEST} is damaged: its checksum does not match; use another checkpoint")
    try:
        content = json.loads(data)
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{folder}: the checkpoint has format {content['format']}, and this labkit reads up to {FORMAT}; "
                "install the labkit that wrote it or a newer one"
            )
        manifest = _parsed(content)
        if (named := STEP_NAME.fullmatch(folder.name)) and int(named[1]) != manifest.step:
            raise CheckpointError(f"{folder}: its manifest is from step {manifest.step}; use another checkpoint")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of labkit ({error})") from None
    if problem := _inconsistent(manifest):
        raise CheckpointError(f"{folder / MANIFEST}: {problem}; use another checkpoint")
    return manifest


def _parsed(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest in `content`. Raises ValueError unless every value that is used later has its type."""
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
    if done != content["step"] or skipped > done:
        raise ValueError("the state of the loop is from another step, or incomplete")
    if not all(type(value) in (int, float) and isfinite(value) for value in training.get("loss_scaler", {}).values()):
        raise ValueError("the state of the loss scale is not made of numbers")
    _count(training["consumed_samples"])
    if not all(isinstance(section, dict) for section in (config, content["versions"], *config.values())):
        raise ValueError("the configuration is not a mapping of mappings")
    world_size = _count(content["world_size"], least=1)
    return Manifest(_count(content["step"]), tensors, files, training, config, world_size, content["versions"])


def _count(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:  # the sum of two is an int64
        raise ValueError(f"{value!r} is not a count")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _text(value: Any, known: Container[str] | None = None) -> str:
    if not isinstance(value, str) or (known is not None and value not in known):
        raise ValueError(f"{value!r} is not a {'word' if known is None else 'type of numbers'}")
    return value


def _inconsistent(manifest: Manifest) -> str:
    """Return why the boxes do not make up the tensors, or an empty string."""
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            return f"{name!r} is not the name of a safetensors file"
    for name, tensor in manifest.tensors.items():
        everything = whole(tensor.shape)
        for stored in tensor.boxes:
            if stored.file not in manifest.files:
                return f"{name} is in {stored.file}, which is not listed"
            if len(stored.box.offset) != len(tensor.shape) or len(stored.box.shape) != len(tensor.shape):
                return f"a part of {name} has other dimensions than its shape {list(tensor.shape)}"
            if stored.box.overlap(everything) != stored.box and everything.numel:
                return f"a part of {name} is outside its shape {list(tensor.shape)}"
        if problem := covering_problem(name, tensor):
            return problem
    return ""


def covering_problem(name: str, tensor: StoredTensor) -> str:
    """Return why the boxes do not cover the tensor exactly once, or an empty string."""
    places = [stored.box.offset for stored in tensor.boxes]
    if len(set(places)) < len(places):
        files = sorted({stored.file for stored in tensor.boxes if places.count(stored.box.offset) > 1})
        return f"{name} is stored twice, in {' and '.join(files)}"
    held = sum(stored.box.numel for stored in tensor.boxes)
    if held != tensor.numel:
        return f"{name} has {tensor.numel} elements, and {held} are stored"
    return ""


@cache
def versions() -> dict[str, str]:
    """Return the versions of labkit and the libraries under it, for a manifest."""
    import importlib.metadata

    names = ("labkit", "torch", "safetensors", "numpy")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():  # otherwise a repository around an installed labkit would answer
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True)
            versions["commit"] = done.stdout.strip()
    return versions
