"""The pre-trained weights: a checkpoint of labkit, of any layout, or a model in Hugging Face's safetensors.

Every rank reads only its own shards. The heads of the pre-training are not read, except for the pooler, with which the
pair head continues. If the model has no pooler, a randomly initialised one is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import ParallelGroups
from labkit.config import ConfigError, ModelConfig
from labkit.train.checkpoint.boxes import Box, whole
from labkit.train.checkpoint.exchange import Import, model_of
from labkit.train.checkpoint.inventory import chosen, is_export
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.rank_state import Piece, RankWeights
from labkit.train.checkpoint.shard_files import Reader

NEW = ("task_head.",)
"""Prefixes of the names of weights that no pre-trained model has."""
MAY_BE_NEW = ("binary_head.pooler.",)
"""Prefixes of the names of weights that a pre-trained model may lack."""


class Weights(Protocol):
    """Whole tensors by name."""

    source: Path
    """The checkpoint, or the file or folder of a model."""
    model: ModelConfig
    """Shape of the model."""
    shapes: dict[str, tuple[int, ...]]
    """Name -> shape of the whole tensor."""

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """Copy the elements `box` of a tensor into `into`."""

    def problems(self, rank: int, ranks: int) -> list[str]:
        """Return a sentence for each fault in this rank's share of the files."""
        ...


class _Checkpoint:
    """A checkpoint of labkit."""

    def __init__(self, path: Path, step: int | None) -> None:
        self.source = chosen(path, step)
        self._reader = Reader(self.source)
        self.model, _ = model_of(self._reader.manifest)
        self.shapes = {name: tensor.shape for name, tensor in self._reader.manifest.tensors.items()}
        self.read = self._reader.read

    def problems(self, rank: int, ranks: int) -> list[str]:
        return self._reader.problems(sorted(self._reader.manifest.files)[rank::ranks])


class _Export:
    """A model of Hugging Face."""

    def __init__(self, path: Path) -> None:
        self.source, found = path, Import(path)
        self.model, self._tensors = found.model, found.tensors
        self.shapes = {name: tuple(like.shape) for name, like in found.likes.items()}

    def read(self, name: str, box: Box, into: Tensor) -> None:
        tensor = self._tensors[name]
        into.copy_(whole(tensor.shape).view(tensor, box))

    def problems(self, rank: int, ranks: int) -> list[str]:
        return []  # `Import` has looked at all shapes, and the format has no checksums


def weights_at(path: Path, step: int | None = None) -> Weights:
    """Return the weights at `path`. step: which checkpoint of a folder of them; None is the latest.

    Raises CheckpointError if there is no model or a damaged one, ConfigError if it is not a BERT.
    """
    found: Weights = _Export(path) if is_export(path) else _Checkpoint(path, step)
    if found.model.family != "bert":
        raise ConfigError([f"--checkpoint: {found.source} holds a {found.model.family}; fine-tuning needs a BERT"])
    return found


def load_weights(chunks: list[nn.Module], groups: ParallelGroups, weights: Weights) -> None:
    """Fill the parameters of this rank's chunks except the new ones of the task's head. All ranks call this together.

    Raises CheckpointError on all ranks if files are damaged, or if tensors are missing or of another shape.
    """
    pieces, own = list(_to_fill(chunks, groups, weights)), weights.problems(groups.world.rank, groups.world.size)
    for piece in pieces:
        if weights.shapes.get(piece.name) != piece.full_shape:
            there = weights.shapes.get(piece.name, "missing")
            own.append(f"{weights.source} does not fit its model: {piece.name} is {there}, not {piece.full_shape}")
    if found := dict.fromkeys(word for words in gather_objects(own, groups.world) for word in words):
        raise CheckpointError("; ".join(list(found)[:5]))
    for piece in pieces:
        weights.read(piece.name, piece.box, piece.values)


def _to_fill(chunks: list[nn.Module], groups: ParallelGroups, weights: Weights) -> Iterator[Piece]:
    for piece in RankWeights(chunks, groups).whole_pieces():
        lacking = piece.name.startswith(MAY_BE_NEW) and piece.name not in weights.shapes
        if not piece.name.startswith(NEW) and not lacking:
            yield piece
