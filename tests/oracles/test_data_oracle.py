"""Our data against megatron-core's: the same files, the same indices, the same samples."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit.data import IndexedDataset, IndexedDatasetBuilder
from labkit.data.indexed import DTYPES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core says which optional packages are missing
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core")
pytestmark = pytest.mark.oracle


def sentences(seed: int, dtype: str) -> list[list[np.ndarray]]:
    """Documents of sentences with ids over the whole range of a type."""
    random, kind = np.random.default_rng(seed), np.dtype(dtype)
    documents = [[random.integers(0, 8) for _ in range(random.integers(0, 4))] for _ in range(12)]
    if kind.kind == "f":
        return [[random.normal(size=size).astype(kind) for size in document] for document in documents]
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return [
        [random.integers(low, high, size, kind.newbyteorder("="), endpoint=True) for size in document]
        for document in documents
    ]


def ours_written(prefix: Path, documents: list[list[np.ndarray]], dtype: str) -> None:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            flat = np.concatenate([np.empty(0, dtype), *document])
            builder.add_document(flat.astype(dtype), [len(sentence) for sentence in document])


def theirs_written(prefix: Path, documents: list[list[np.ndarray]], dtype: str) -> None:
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        for sentence in document:
            builder.add_item(torch.from_numpy(sentence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_indexed_datasets_are_the_same_bits_both_ways(dtype: str, tmp_path: Path) -> None:
    documents = sentences(1, dtype)
    ours_written(tmp_path / "ours", documents, dtype)
    if dtype == "<u2":  # add_item takes tensors, and not every torch has uint16
        documents = [[sentence.astype(np.int32) for sentence in document] for document in documents]
    theirs_written(tmp_path / "theirs", documents, dtype)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    here, there = IndexedDataset(tmp_path / "theirs"), theirs.IndexedDataset(str(tmp_path / "ours"))
    assert len(here) == len(there) > 10 and here.dtype == np.dtype(there.index.dtype)
    for index in range(len(here)):
        np.testing.assert_array_equal(here[index], there[index])
        half = int(here.sequence_lengths[index]) // 2
        np.testing.assert_array_equal(here.get(index, half), there.get(index, half))
    np.testing.assert_array_equal(here.document_indices, there.document_indices)
    np.testing.assert_array_equal(here.sequence_lengths, there.sequence_lengths)


def test_joined_datasets_are_the_same_bits(tmp_path: Path) -> None:
    for name, seed in (("a", 2), ("b", 3)):
        ours_written(tmp_path / name, sentences(seed, "<i4"), "<i4")
    with IndexedDatasetBuilder(tmp_path / "ours", "<i4") as builder:
        for name in "ab":
            builder.add_index(tmp_path / name)
    peer = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for name in "ab":
        peer.add_index(str(tmp_path / name))
    peer.finalize(str(tmp_path / "theirs.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
