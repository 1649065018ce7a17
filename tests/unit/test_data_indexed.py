"""Indexed datasets: the bytes of Megatron's format, and the refusal of every file that is not one."""

import os
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.data import IndexedDataset, IndexedDatasetBuilder
from labkit.data.indexed import DTYPES, dtype_for

DOCUMENTS = ([1, 2, 3], [], [7], [9, 8, 7, 6, 5])
HEADER = 34


def write(prefix: Path, documents=DOCUMENTS, dtype=np.uint16, lengths=None) -> Path:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for number, ids in enumerate(documents):
            builder.add_document(ids, None if lengths is None else lengths[number])
    return prefix


def test_the_bytes_are_those_of_the_format(tmp_path):
    prefix = write(tmp_path / "a", [[1, 2, 300], [4]])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
    assert Path(f"{prefix}.idx").read_bytes() == expected
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<4H", 1, 2, 300, 4)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=4), max_size=6),
    st.sampled_from(sorted(DTYPES.values())),
)
def test_any_documents_survive_a_round_trip(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("data") / "corpus.with.dots"
    flat = [[token for sentence in document for token in sentence] for document in documents]
    write(prefix, flat, dtype, [[len(sentence) for sentence in document] for document in documents])
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == np.dtype(dtype) and dataset.num_documents == len(documents)
    assert [one.tolist() for one in dataset] == [sentence for document in documents for sentence in document]
    assert np.diff(dataset.document_indices).tolist() == [len(document) for document in documents]
    assert dataset.num_tokens == sum(map(len, flat))
    assert [one.tolist() for one in dataset[1:3]] == [one.tolist() for one in dataset][1:3]


def test_parts_of_a_sequence_are_views_of_the_mapped_file(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "a"))
    part = dataset.get(3, 1, 3)
    assert part.tolist() == [8, 7, 6] and np.shares_memory(part, dataset.tokens)
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1
    assert pickle.loads(pickle.dumps(dataset))[3].tolist() == [9, 8, 7, 6, 5]
    for index, offset, length in ((4, 0, None), (-1, 0, None), (3, 3, 3), (3, -1, 2), (0, 0, -1)):
        with pytest.raises(IndexError, match=r"a, which has 4|\(document \d\), which has"):
            dataset.get(index, offset, length)


def test_datasets_are_joined(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", [[5], [6, 6]], lengths=[[1], [1, 1]])
    with IndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder:
        builder.add_index(first)
        builder.add_index(second)
    joined = IndexedDataset(tmp_path / "c")
    assert [one.tolist() for one in joined] == [*map(list, DOCUMENTS), [5], [6], [6]]
    assert joined.document_indices.tolist() == [0, 1, 2, 3, 4, 5, 7]
    with pytest.raises(ValueError, match="holds uint16, not int32"), IndexedDatasetBuilder(tmp_path / "d") as builder:
        builder.add_index(first)


def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path):
    for wrong in (65536, -1, 1.5):
        with (
            pytest.raises(ValueError, match=rf"an id after document 0 is {wrong}, which uint16 cannot hold"),
            IndexedDatasetBuilder(tmp_path / "a", np.uint16) as builder,
        ):
            builder.add_document([1])
            builder.add_document([2, wrong])
    with (
        pytest.raises(ValueError, match="sequences of document 0 have 3 tokens, not 2"),
        IndexedDatasetBuilder(tmp_path / "a") as builder,
    ):
        builder.add_document([1, 2], [1, 2])
    with pytest.raises(KeyboardInterrupt), IndexedDatasetBuilder(tmp_path / "a") as builder:
        builder.add_document([1])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_is_replaced_only_if_asked(tmp_path):
    prefix = write(tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"a\.idx: exists; overwrite it"):
        IndexedDatasetBuilder(prefix)
    with IndexedDatasetBuilder(prefix, np.int64, overwrite=True) as builder:
        builder.add_document([2**40])
        assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]
    assert IndexedDataset(prefix)[0].tolist() == [2**40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_the_target_of_a_link_is_replaced_and_nothing_but_files(tmp_path):
    (tmp_path / "far").mkdir()
    for ending in ("idx", "bin"):
        (tmp_path / f"a.{ending}").symlink_to(Path("far", f"own.{ending}"))
    prefix = write(tmp_path / "a")
    with IndexedDatasetBuilder(prefix, overwrite=True) as builder:
        builder.add_document([7])
    assert IndexedDataset(tmp_path / "far" / "own")[0].tolist() == IndexedDataset(prefix)[0].tolist() == [7]
    assert all(path.is_symlink() for path in tmp_path.glob("a.*")) and len(list(tmp_path.iterdir())) == 3
    for number, make in enumerate([Path.mkdir, os.mkfifo, lambda path: path.symlink_to("1.bin")]):
        make(tmp_path / f"{number}.bin")
        with pytest.raises(FileExistsError, match=rf"{number}\.bin: is not a regular file; choose another name"):
            IndexedDatasetBuilder(tmp_path / f"{number}", overwrite=True)


def test_types_that_the_format_lacks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot hold uint32; choose one of uint8, int8"):
        IndexedDatasetBuilder(tmp_path / "a", np.uint32)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        IndexedDatasetBuilder(tmp_path / "none" / "a")
    assert [dtype_for(size).name for size in (65499, 65500)] == ["uint16", "int32"]


# ---- files that are refused ----


def changed(prefix: Path, at: int, form: str, *values: float, ending: str = "idx") -> None:
    path = Path(f"{prefix}.{ending}")
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, *values)
    path.write_bytes(data)


LENGTHS, POINTERS, INDICES = HEADER, HEADER + 4 * 4, HEADER + 12 * 4
BAD = {
    "magic": (0, "<c", (b"X",), r"a\.idx: is not the index of an indexed dataset, which begins with b'MMIDIDX'"),
    "version": (9, "<Q", (2,), r"a\.idx: has version 2; labkit and Megatron read version 1"),
    "type 0": (17, "<B", (0,), r"a\.idx: has type code 0; known are 1 to 8"),
    "wider type": (
        17,
        "<B",
        (4,),
        r"a\.idx: sequence 1 \(document 1\) begins at byte 6, but the one before ends at 12",
    ),
    "huge count": (18, "<Q", (2**63,), r"122 bytes, but 9,223,372,036,854,775,808 sequences and 5 document"),
    "huge documents": (26, "<Q", (2**64 - 1,), r"122 bytes, but 4 sequences and 18,446,744,073,709,551,615"),
    "negative length": (LENGTHS + 8, "<i", (-1,), r"a\.idx: sequence 2 \(document 2\) has -1 tokens"),
    "long length": (LENGTHS + 12, "<i", (2**31 - 1,), r"a\.bin: has 18 bytes and ends before the end of sequence 3"),
    "short length": (LENGTHS + 12, "<i", (4,), r"a\.bin: has 18 bytes, but the 4 sequences of .*a\.idx have 16"),
    "pointer past the end": (POINTERS + 24, "<q", (2**62,), r"sequence 3 \(document 3\) begins at byte 46116860"),
    "document past the end": (INDICES + 32, "<q", (9,), r"a\.idx: documents run from 0 to 9; .* from sequence 0 to 4"),
    "document backwards": (INDICES + 8, "<q", (3,), r"a\.idx: document 1 runs backwards, from sequence 3 to 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_index_that_contradicts_itself_is_refused(name, tmp_path):
    at, form, values, said = BAD[name]
    prefix = write(tmp_path / "a")
    changed(prefix, at, form, *values)
    with pytest.raises(ValueError, match=said) as refusal:
        IndexedDataset(prefix)
    assert str(refusal.value).endswith("make the files again, or copy them again from where they were made")


def test_files_that_are_cut_off_or_missing_are_refused(tmp_path):
    prefix = write(tmp_path / "a")
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    whole, ids = index.read_bytes(), tokens.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.idx: (is not|ends after|has)"):
            IndexedDataset(prefix)
    index.write_bytes(whole + b"\0\0")
    with pytest.raises(ValueError, match="has 124 bytes, but 4 sequences"):
        IndexedDataset(prefix)
    index.write_bytes(whole + bytes(4))
    with pytest.raises(ValueError, match="a mode for each of 4 sequences, as multimodal datasets do"):
        IndexedDataset(prefix)
    index.write_bytes(whole)
    for size in range(len(ids)):
        tokens.write_bytes(ids[:size])
        with pytest.raises(ValueError, match=r"a\.bin: has \d+ bytes? and ends before the end of sequence \d"):
            IndexedDataset(prefix)
    tokens.write_bytes(ids + b"\0\0")
    with pytest.raises(ValueError, match=r"a\.bin: has 20 bytes, but the 4 sequences"):
        IndexedDataset(prefix)
    tokens.unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.bin: there is no such file; .* named by its prefix"):
        IndexedDataset(prefix)


SILENT = {
    (INDICES + 8, 0),  # document 1 begins at 0 instead of 1, so that document 0 is empty
    (INDICES + 16, 0),  # document 2 begins at 3 instead of 2
    (INDICES + 24, 0),  # document 3 begins at 2 instead of 3
}
"""The only bits (byte, bit) that contradict nothing: borders of documents between the same sequences."""


def test_a_flipped_bit_anywhere_in_the_index_is_refused(tmp_path):
    """Lengths, pointers, documents and the size of the .bin file each follow from the others."""
    prefix = write(tmp_path / "a")
    path = Path(f"{prefix}.idx")
    data, accepted = bytearray(path.read_bytes()), set()
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            path.write_bytes(data)
            try:
                IndexedDataset(prefix)
                accepted.add((at, bit))
            except ValueError as refusal:
                assert str(refusal).startswith((f"{prefix}.idx: ", f"{prefix}.bin: "))
            data[at] ^= 1 << bit
    assert accepted == SILENT


def test_no_claim_of_a_file_decides_how_much_is_allocated(tmp_path):
    """A sparse index of 12 GB whose sizes agree is refused after its first block, not after a billion entries."""
    prefix = tmp_path / "big"
    count = 10**9
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, 2))
        file.truncate(HEADER + 12 * count + 16)
    Path(f"{prefix}.bin").write_bytes(b"")
    tracemalloc.start()
    with pytest.raises(ValueError, match="documents run from 0 to 0"):
        IndexedDataset(prefix)
    changed_sparse(prefix, HEADER + 12 * count + 8, count)
    changed_sparse(prefix, HEADER, 2**31 - 1, "<i")
    with pytest.raises(ValueError, match=r"big\.idx: sequence 1 \(document 0\) begins at byte 0, but .* at 4294967294"):
        IndexedDataset(prefix)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6


def changed_sparse(prefix: Path, at: int, value: int, form: str = "<q") -> None:
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(at)
        file.write(struct.pack(form, value))
        os.fsync(file.fileno())
