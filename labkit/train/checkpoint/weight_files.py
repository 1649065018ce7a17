"""Safetensors files of whole weights, read and written one tensor after the other.

`safetensors.torch.save_file` needs all tensors at once, but the format itself does not. A file begins with the length
of its header (8 bytes) and the header, JSON with type, shape and place of each tensor. The tensors follow without gaps.
So a writer that knows types and shapes can write the header first.

Types and shapes are given as meta tensors, which hold no data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from labkit.config.errors import shown
from labkit.data.text import parse_json
from labkit.models.convert import HuggingFaceState
from labkit.train.checkpoint.manifest import CheckpointError, StoredFile, checksum

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Types of weights -> the format's names."""
LARGEST_JSON = 50_000_000
"""Bytes of the largest JSON file that is read; the index of a model of 10,000 tensors has one million."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""transformers' names of a model in one file, and of the list of several."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Suffixes of files whose reading runs code that they contain."""


# ---- writing ----


def write_tensors(
    path: Path, plan: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> tuple[StoredFile, dict[str, str]]:
    """Write `tensors` to a new file and bring it to the disk. Return the file and the checksum of each tensor.

    plan: a meta tensor for each, in the same order. An order by falling element size aligns all of them.
    Raises OSError, for example on a full disk.
    """
    header, sums = _header(plan), {}
    with path.open("wb") as file:
        file.write(header)
        for (name, like), (given, tensor) in zip(plan.items(), tensors, strict=True):
            assert (name, like.dtype, like.shape) == (given, tensor.dtype, tensor.shape), f"{given} is not as planned"
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            sums[name] = checksum(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return StoredFile(file.tell(), checksum(header)), sums


def _header(plan: Mapping[str, Tensor]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    end = 0
    for name, like in plan.items():
        start, end = end, end + like.nbytes
        content[name] = {"dtype": TYPES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ---- reading ----


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a model in Hugging Face's files, by their names there. Each is read when somebody asks for it."""

    def __init__(self, source: Path) -> None:
        """source: a safetensors file, or a folder with `model.safetensors` or the index of several files.

        Raises:
            CheckpointError: files that are missing, damaged or pickled, or types that no weight has.
        """
        paths, listed = files_of(source)
        self._file: dict[str, Any] = {}
        held: dict[str, Path] = {}
        for path in paths:
            opened = _opened(path)
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(HuggingFaceState.IGNORED):
                    continue
                if name in held and not torch.equal(self._file[name].get_tensor(name), opened.get_tensor(name)):
                    raise CheckpointError(
                        f"{source}: {held[name].name} and {path.name} have different tensors {shown(name)}; remove the "
                        "file that is not the model's"
                    )
                self._file[name], held[name] = opened, path
        for name in listed:
            if name not in self._file and not name.endswith(HuggingFaceState.IGNORED):
                raise CheckpointError(
                    f"{source}: no file has the tensor {shown(name)} of {INDEX}; fetch the model again"
                )
        self.likes: dict[str, Tensor] = {name: self._like(name) for name in self._file}
        """A meta tensor for each."""

    def _like(self, name: str) -> Tensor:
        held = self._file[name].get_slice(name)
        types = {word: dtype for dtype, word in TYPES.items()}
        if held.get_dtype() not in types:
            raise CheckpointError(
                f"the tensor {shown(name)} has type {held.get_dtype()}; weights that labkit imports have one of "
                f"{', '.join(types)}, so load the model in transformers and save it in bfloat16 first"
            )
        return torch.empty(held.get_shape(), dtype=types[held.get_dtype()], device="meta")

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({error}); fetch or write it again") from None


def files_of(source: Path) -> tuple[list[Path], list[str]]:
    """Return the safetensors files of a model, and the tensors that its index lists, if it has an index.

    source: a file, or a folder. Raises CheckpointError.
    """
    if source.suffix in PICKLED:
        raise CheckpointError(_pickled(source, source.name))
    if source.is_file():
        return [source], []
    if not source.is_dir():
        raise CheckpointError(f"{source} is neither a folder nor a file; give a safetensors file, or a model's folder")
    listed = _weight_map(source / INDEX) if (source / INDEX).is_file() else {}
    files = [*([WHOLE] if (source / WHOLE).is_file() else []), *listed.values()]
    if files:
        return [source / file for file in dict.fromkeys(files)], list(listed)
    if pickled := sorted(path.name for path in source.iterdir() if path.suffix in PICKLED):
        raise CheckpointError(_pickled(source, pickled[0]))
    raise CheckpointError(f"{source} has neither {WHOLE} nor {INDEX}; give the folder that save_pretrained wrote")


def _pickled(source: Path, file: str) -> str:
    return (
        f"{source}: {file} is pickled, and reading a pickle runs code that it contains; labkit reads only "
        "safetensors, so load the model in transformers where you trust it, and save_pretrained it"
    )


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file, from the index of a model in several files."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} has no weight_map of tensors and files; fetch the model again")
    for file in found.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names the file {shown(file)}; the files of a model are safetensors files next to their index"
            )
        if not os.path.isfile(index.parent / file):  # Path.is_file raises for a name that is too long
            raise CheckpointError(f"{index.parent} lacks {shown(file)}, which {index.name} names; fetch it again")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError."""
    try:
        if not path.is_file():
            raise CheckpointError(f"there is no {path.name} in {path.parent}; a model's folder has one")
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path} is larger than {LARGEST_JSON:,} bytes; this is not a file of a model")
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not the JSON of a model ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} has no JSON object; this is not a file of a model")
    return content
