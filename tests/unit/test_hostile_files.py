"""Row F17: files that are made to harm. Nothing in them runs, nothing hangs, and memory stays bounded."""

import json
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import ConfigError, RunConfig
from labkit.data import IndexedDataset, load_tokenizer
from labkit.data.documents import pieces_of
from labkit.data.index_cache import cached
from labkit.data.text import read_text
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.weight_files import WeightFiles

MOST = 200 << 20
"""Bytes by which the process may grow over all examples of a test."""


class Bomb:
    """Makes a file when somebody unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.mark), "w")


def texts(path: Path) -> list[str]:
    return [text for piece in pieces_of(path, "text") for text in piece.texts("text")]


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "configuration": ("run.yaml", RunConfig.from_yaml),
    "text": ("text.txt", read_text),
    "tokenizer": ("tokenizer.json", load_tokenizer),
    "vocabulary of GPT-2": ("vocab.json", load_tokenizer),
    "vocabulary of BERT": ("vocab.txt", load_tokenizer),
    "JSON lines": ("books.jsonl", texts),
    "Parquet": ("books.parquet", texts),
    "index": ("corpus.idx", lambda path: IndexedDataset(path.with_suffix(""))),
    "weights": ("model.safetensors", WeightFiles),
    "weights in a folder": ("model.safetensors.index.json", lambda path: WeightFiles(path.parent)),
}


@pytest.mark.parametrize("form", ["pickle", "torch.save", "npy"])
@pytest.mark.parametrize("name", READERS)
def test_a_pickle_under_another_name_does_not_run(name: str, form: str, tmp_path: Path) -> None:
    """It is refused by an error that names the file."""
    mark, (file, read) = tmp_path / "ran", READERS[name]
    for other in ("merges.txt", "corpus.bin"):
        (tmp_path / other).write_bytes(b"")
    with (tmp_path / file).open("wb") as stream:
        if form == "npy":
            np.save(stream, np.array([Bomb(mark)], dtype=object), allow_pickle=True)
        elif form == "pickle":
            pickle.dump(Bomb(mark), stream)
        else:
            torch.save({"weight": Bomb(mark)}, stream)
    with pytest.raises((ValueError, OSError, ConfigError)) as refused:
        read(tmp_path / file)
    assert file in str(refused.value) and not mark.exists()


def test_a_pickle_in_the_cache_of_index_arrays_counts_as_none(tmp_path: Path) -> None:
    arrays = cached(tmp_path, {"key": 1}, lambda: {"index": np.arange(5)})
    assert arrays["index"].tolist() == [0, 1, 2, 3, 4]
    (file,) = tmp_path.glob("*/index.npy")
    np.save(file, np.array([Bomb(tmp_path / "ran")] * 5, dtype=object), allow_pickle=True)
    again = cached(tmp_path, {"key": 1}, lambda: {"index": np.arange(5)})
    assert again["index"].tolist() == [0, 1, 2, 3, 4] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("change", [lambda text: "[" * 10**5, lambda text: '{"arrays": {}}',
                                    lambda text: text.replace('"key": 1', '"key": 2')])  # fmt: skip
def test_a_changed_description_in_the_cache_counts_as_none(tmp_path: Path, change: Callable[[str], str]) -> None:
    cached(tmp_path, {"key": 1}, lambda: {"index": np.arange(5), "order": np.arange(2)})
    (file,) = tmp_path.glob("*/description.json")
    for wrong in (change(file.read_text()), file.read_text().replace('"order"', '"other"')):
        file.write_text(wrong)
        again = cached(tmp_path, {"key": 1}, lambda: {"index": np.arange(6), "order": np.arange(2)})
        assert again["index"].tolist() == [0, 1, 2, 3, 4, 5] and again["order"].tolist() == [0, 1]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError("5 requested and 2 written")])
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr(np, "save", Mock(side_effect=error))
    with pytest.raises(ConfigError, match=r"data\.cache = .*: cannot be written \((No space|5 req).*\); make room"):
        cached(tmp_path, {"key": 1}, lambda: {"index": np.arange(5)})
    assert list(tmp_path.iterdir()) == []


_SIZES = st.sampled_from([0, 1, 7, 8, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, -1]) | st.integers(-5, 200)
_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "BF16", "I8", "BOOL", "F4", "nothing", 3]),
        "shape": st.lists(_SIZES, max_size=4) | st.none(),
        "data_offsets": st.lists(_SIZES, max_size=3) | st.text(max_size=3),
    },
)
_HEADERS = (
    st.dictionaries(st.sampled_from(["a", "b", "../c", "/etc/d", "__metadata__", "\x00"]), _ENTRY, max_size=4)
    | st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=4))
)  # fmt: skip


@settings(max_examples=300, deadline=2000)
@given(_HEADERS, st.none() | st.sampled_from([0, 1, 2**20, 2**40, 2**63, 2**64 - 1]), st.integers(0, 300))
def test_fuzzed_headers_of_safetensors_give_tensors_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, header: Any, claimed: int | None, rest: int
) -> None:
    """claimed: length of the header that the file claims; None is its own."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = tmp_path_factory.getbasetemp() / "model.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + bytes(rest))
    try:
        files = WeightFiles(path)
        assert sum(files[name].nbytes for name in files) <= rest
    except CheckpointError as error:
        assert str(error)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST
