"""The safetensors files of a checkpoint: a rank writes one, and reads boxes out of all of them.

Every byte of a file is covered by a checksum of the manifest: the header as a whole, and each tensor. So a changed bit
is found before anything is loaded, and named by file and tensor. Nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit.config.errors import counted
from labkit.train.checkpoint.boxes import Box
from labkit.train.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    StoredBox,
    StoredFile,
    checksum,
    key_of,
    read_manifest,
)


def shard_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def checksum_of(tensor: Tensor) -> str:
    """Return the checksum of the bytes of a contiguous tensor on the host."""
    return checksum(tensor.reshape(-1).view(torch.uint8).numpy())


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> tuple[StoredFile, dict[str, str]]:
    """Write contiguous tensors of the host to `path` and bring them to the disk. Return the file and the checksum of
    each tensor. Raises OSError, for example on a full disk."""
    sums = {key: checksum_of(tensor) for key, tensor in tensors.items()}
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return StoredFile(path.stat().st_size, checksum(_header(file))), sums


def _header(file: Any) -> bytes:
    """Return the first bytes of a safetensors file: the length of its JSON header, and the header."""
    length = file.read(8)
    return length + file.read(min(int.from_bytes(length, "little"), 1 << 30))


@dataclass
class Reader:
    """Reads the tensors of one checkpoint. Files are mapped into memory, so only what is read is loaded."""

    folder: Path
    """The checkpoint."""
    manifest: Manifest = field(init=False)
    """Its manifest, checked."""
    _files: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Read the manifest. Raises CheckpointError as `read_manifest` does."""
        self.manifest = read_manifest(self.folder)

    def problems(self, files: Iterable[str] | None = None) -> list[str]:
        """Return one sentence for each file or tensor that differs from the manifest, after reading every byte.

        files: names of the files to read; None is all.
        """
        found = []
        for name in self.manifest.files if files is None else files:
            found += self._problems_of(name)
        return found

    def _problems_of(self, file: str) -> list[str]:
        expected, path = self.manifest.files[file], self.folder / file
        try:
            size = path.stat().st_size
            if size != expected.size:
                return [f"{path} has {counted(size, 'byte')} where {expected.size:,} were written"]
            with path.open("rb") as opened:
                if checksum(_header(opened)) != expected.header_checksum:
                    return [f"{path}: the header is not the one that was written (checksum)"]
            return [
                f"{path}: {name} at {list(box.box.offset)} is not what was written ({why})"
                for name, box in self._boxes_in(file)
                if (why := self._difference(name, box))
            ]
        except FileNotFoundError:
            return [f"{path} is missing"]
        except OSError as error:
            return [f"{path} cannot be read: {error.strerror or error}"]
        except SafetensorError as error:
            return [f"{path} is not a valid safetensors file: {error}"]

    def _difference(self, name: str, stored: StoredBox) -> str:
        """Return why a stored box is not that of the manifest, or an empty string."""
        tensor = self._tensor(name, stored)
        if (str(tensor.dtype), tuple(tensor.shape)) != (f"torch.{self.manifest.tensors[name].dtype}", stored.box.shape):
            return f"{tensor.dtype} of shape {list(tensor.shape)}"
        return "" if checksum_of(tensor) == stored.checksum else "checksum"

    def _boxes_in(self, file: str) -> list[tuple[str, StoredBox]]:
        tensors = self.manifest.tensors.items()
        return [(name, box) for name, tensor in tensors for box in tensor.boxes if box.file == file]

    def _tensor(self, name: str, stored: StoredBox) -> Tensor:
        """Return a stored box, as a view of its file."""
        if stored.file not in self._files:
            self._files[stored.file] = safe_open(self.folder / stored.file, framework="pt")
        return self._files[stored.file].get_tensor(key_of(name, stored.box))

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy the elements `box` of the tensor `name` into `into`, which has their shape; the type is converted.

        Raises CheckpointError if the checkpoint has no such tensor.
        """
        tensor = self.manifest.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        for stored in tensor.boxes:
            common = stored.box.overlap(box)
            if common is not None:
                box.view(into, common).copy_(stored.box.view(self._tensor(name, stored), common))

    def read_whole(self, name: str) -> Tensor:
        """Return the whole tensor `name`. Raises CheckpointError as `read` does."""
        stored = self.manifest.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        made = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.read(name, Box((0,) * len(stored.shape), stored.shape), made)
        return made

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
