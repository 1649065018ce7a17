"""Megatron's indexed datasets: `PREFIX.bin` holds the token ids of all documents, `PREFIX.idx` says where each begins.

`PREFIX.bin` is the ids alone, one sequence after the other. `PREFIX.idx` has these parts, little-endian:

    9 bytes    MMIDIDX and two zeros
    uint64     version: 1
    uint8      code of the type of the ids (`DTYPES`)
    uint64     n, the number of sequences
    uint64     d, the number of document indices, one more than documents
    n x int32  tokens of each sequence
    n x int64  byte of `PREFIX.bin` at which each sequence begins
    d x int64  the first sequence of each document, and n at the end

For a GPT each document is one sequence; for BERT and T5 each sentence is one. Source: `_IndexWriter` and
`_IndexReader` of megatron/core/datasets/indexed_dataset.py, megatron-core 0.16.1.

A reader maps both files and copies nothing. When it opens them, it compares every count, length and position with the
sizes of the files, block by block. So it rejects a file that is cut off, damaged or of another format before training
begins. No number in a file decides how much memory the reader takes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from labkit.config.errors import counted
from labkit.output_files import naming

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Code of a type in the header -> the type of the ids."""
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
LARGEST_UINT16 = 65500
"""Vocabularies below this size are stored as uint16, others as int32, as Megatron's `DType.optimal_dtype` decides."""
_HEADER = struct.Struct("<9sQBQQ")
_BLOCK = 1 << 20
"""Entries of the index that are checked or written at a time."""
_ADVICE = "make the files again, or copy them again from where they were made"


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the smallest type that Megatron takes for the ids of a vocabulary: uint16 or int32."""
    return np.dtype("<u2" if vocab_size < LARGEST_UINT16 else "<i4")


def file_names(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Return the paths `PREFIX.idx` and `PREFIX.bin`; the prefix itself may contain dots."""
    return Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")


def output_file(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Return the file that is written for `path`: if `path` is a link, its target.

    Raises:
        FileExistsError: the file exists and `overwrite` is false, or the path is a folder, a device or a pipe.
        FileNotFoundError: its folder is missing.
    """
    file = Path(os.path.realpath(path))
    if os.path.lexists(file) and not (overwrite and file.is_file()):
        rule = "exists; overwrite it (--overwrite), or" if file.is_file() else "is not a regular file;"
        raise FileExistsError(f"{path}: {rule} choose another name")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{file.parent}: there is no such folder; make it first")
    return file


class IndexedDataset(Sequence[np.ndarray]):
    """Sequences of token ids: `dataset[i]` is sequence i as a read-only view of the mapped file."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        """Map and check `PREFIX.idx` and `PREFIX.bin`.

        Raises:
            FileNotFoundError: one of the files is missing.
            ValueError: a file is of another format, is cut off, or contradicts itself or the other file; the message
                names the file, and the sequence and its document if one is wrong.
        """
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = file_names(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                rule = "an indexed dataset is a pair PREFIX.idx and PREFIX.bin, named by its prefix"
                raise FileNotFoundError(f"{path}: there is no such file; {rule}")
        count, document_count = self._read_header()
        at = _HEADER.size
        buffer = np.memmap(self.idx_path, mode="r", dtype=np.uint8)
        self.sequence_lengths = np.frombuffer(buffer, "<i4", count, at)
        """Tokens of each sequence, int32."""
        self.sequence_pointers = np.frombuffer(buffer, "<i8", count, at + 4 * count)
        """Byte of the .bin file at which each sequence begins, int64."""
        self.document_indices = np.frombuffer(buffer, "<i8", document_count, at + 12 * count)
        """First sequence of each document, and at the end the number of sequences; int64."""
        self._check_documents()
        self._check_sequences()
        size = self.bin_path.stat().st_size
        self.tokens = np.memmap(self.bin_path, mode="r", dtype=self.dtype) if size else np.empty(0, self.dtype)
        """Ids of all sequences, one after another."""
        self.tokens.flags.writeable = False

    # ---- checks at open ----

    def _refuse(self, path: Path, rule: str) -> None:
        raise ValueError(f"{path}: {rule}; {_ADVICE}")

    def _read_header(self) -> tuple[int, int]:
        """Set `dtype`; return the counts of sequences and document indices, which were found to fit the file's size."""
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            header = file.read(_HEADER.size)
        if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
            self._refuse(self.idx_path, f"is not the index of an indexed dataset, which begins with {MAGIC[:7]!r}")
        if len(header) < _HEADER.size:
            self._refuse(self.idx_path, f"ends after {counted(size, 'byte')}, inside the header of {_HEADER.size}")
        _, version, code, count, document_count = _HEADER.unpack(header)
        if version != VERSION:
            self._refuse(self.idx_path, f"has version {version}; labkit and Megatron read version {VERSION}")
        if code not in DTYPES:
            self._refuse(self.idx_path, f"has type code {code}; known are 1 to {max(DTYPES)}")
        self.dtype = np.dtype(DTYPES[code])
        """Type of the ids."""
        wanted = _HEADER.size + 12 * count + 8 * document_count
        if size == wanted + count and count:
            rule = f"holds a mode for each of {count:,} sequences, as multimodal datasets do; labkit reads only text"
            raise ValueError(f"{self.idx_path}: {rule}")
        if size != wanted:
            claim = f"{counted(count, 'sequence')} and {document_count:,} document indices take {wanted:,} bytes"
            self._refuse(self.idx_path, f"has {counted(size, 'byte')}, but {claim}")
        return count, document_count

    def _check_documents(self) -> None:
        """Check that document indices begin with 0, never decrease, and end with the number of sequences."""
        found, count = self.document_indices, len(self)
        if len(found) == 0 or found[0] != 0 or found[-1] != count:
            ends = f"from {found[0]} to {found[-1]}" if len(found) else "not at all"
            self._refuse(self.idx_path, f"documents run {ends}; they must run from sequence 0 to {count}, the last")
        for start in range(0, len(found), _BLOCK):
            block = found[start : start + _BLOCK + 1]
            if (falls := np.flatnonzero(block[1:] < block[:-1])).size:
                document = start + int(falls[0])
                words = f"from sequence {found[document]} to {found[document + 1]}"
                self._refuse(self.idx_path, f"document {document} runs backwards, {words}")

    def _check_sequences(self) -> None:
        """Check that no length is negative, that each sequence begins where the one before it ends, and that the last
        one ends where the .bin file does."""
        size, end = self.bin_path.stat().st_size, 0
        for start in range(0, len(self), _BLOCK):
            lengths = self.sequence_lengths[start : start + _BLOCK]
            pointers = self.sequence_pointers[start : start + _BLOCK]
            if (bad := np.flatnonzero(lengths < 0)).size:
                where = self._named(start + int(bad[0]))
                self._refuse(self.idx_path, f"{where} has {lengths[bad[0]]} tokens")
            ends = end + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            if (bad := np.flatnonzero(pointers != np.concatenate([[end], ends[:-1]]))).size:
                at, where = int(bad[0]), self._named(start + int(bad[0]))
                before = ends[at - 1] if at else end
                self._refuse(
                    self.idx_path, f"{where} begins at byte {pointers[at]}, but the one before ends at {before}"
                )
            end = int(ends[-1])
            if end > size:
                where = self._named(start + int(np.flatnonzero(ends > size)[0]))
                self._refuse(self.bin_path, f"has {counted(size, 'byte')} and ends before the end of {where}")
        if end != size:
            held = counted(len(self), "sequence")
            self._refuse(self.bin_path, f"has {counted(size, 'byte')}, but the {held} of {self.idx_path} have {end:,}")

    def _named(self, sequence: int) -> str:
        """Return `sequence 7 (document 3)`."""
        document = int(np.searchsorted(self.document_indices, sequence, side="right")) - 1
        return f"sequence {sequence} (document {document})"

    # ---- reading ----

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        """Return sequence `index`, or the list of sequences of a slice."""
        if isinstance(index, slice):
            return [self.get(one) for one in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens `offset` to `offset + length` of sequence `index`, by default to its end, as a read-only view.

        Raises:
            IndexError: there is no such sequence, or it does not have all of these tokens.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        whole = int(self.sequence_lengths[index])
        length = whole - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > whole:
            raise IndexError(f"tokens {offset} to {offset + length} of {self._named(index)}, which has {whole}")
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        """Pickle the prefix alone, because another process maps the files itself."""
        return IndexedDataset, (self.prefix,)


class IndexedDatasetBuilder:
    """Writes an indexed dataset in a `with` block, in which `add_document` is called for each document.

    Both files have temporary names until the block ends without an error; then they take their final names. An error,
    Ctrl-C included, removes them.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike = np.int32, *, overwrite: bool = False) -> None:
        """dtype: type of the stored ids, one of `DTYPES`. overwrite: replace files of this prefix.

        Raises:
            ValueError: Megatron's format has no such type.
            FileExistsError, FileNotFoundError: see `output_file`.
        """
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            known = ", ".join(np.dtype(name).name for name in DTYPES.values())
            raise ValueError(f"an indexed dataset cannot hold {np.dtype(dtype).name}; choose one of {known}")
        self.idx_path, self.bin_path = (output_file(path, overwrite=overwrite) for path in file_names(prefix))
        ending = f".{os.getpid()}-{secrets.token_hex(4)}.partial"
        self._partial_idx, self._partial_bin = Path(f"{self.idx_path}{ending}"), Path(f"{self.bin_path}{ending}")
        self._lengths, self._documents = array("i"), array("q", [0])
        self._bin: BinaryIO = open(self._partial_bin, "xb")  # noqa: SIM115 - closed by finalize or abort
        self._done = False

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._documents) - 1

    def add_document(self, tokens: ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Append a document of the ids `tokens`; `lengths` cuts it into sequences, and by default it is one.

        Raises:
            ValueError: an id does not fit the type, or the lengths do not add up.
        """
        ids = np.asarray(tokens).reshape(-1)
        self.add_documents(ids, lengths := [ids.size] if lengths is None else lengths, [len(lengths)])

    def add_documents(self, tokens: np.ndarray, lengths: Sequence[int], sequences: Sequence[int]) -> None:
        """Append several documents at once; `sequences` says how many of `lengths` belong to each.

        Raises:
            ValueError: an id does not fit the type, or the lengths do not add up.
        """
        stored = tokens.astype(self.dtype, copy=False)
        if stored is not tokens and not np.array_equal(stored, tokens):
            wrong = tokens[np.flatnonzero(stored != tokens)[0]]
            rule = f"an id after document {self.num_documents - 1} is {wrong}, which {self.dtype.name} cannot hold"
            raise ValueError(f"{self.bin_path}: {rule}; choose a wider type")
        if sum(lengths) != stored.size or min(lengths, default=0) < 0:
            has = counted(sum(lengths), "token")
            rule = f"the sequences of document {self.num_documents} have {has}, not {stored.size:,}"
            raise ValueError(f"{self.bin_path}: {rule}; give the tokens of each sequence")
        with naming(self.bin_path):
            self._bin.write(stored.tobytes())
        self._lengths.extend(lengths)
        for number in sequences:
            self._documents.append(self._documents[-1] + number)

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another indexed dataset of the same type.

        Raises:
            FileNotFoundError, ValueError: as `IndexedDataset` does, or the types differ.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            types = f"{other.dtype.name}, not {self.dtype.name}"
            raise ValueError(f"{other.bin_path}: holds {types}; prepare both with the same tokenizer")
        with naming(self.bin_path), open(other.bin_path, "rb") as file:
            shutil.copyfileobj(file, self._bin, 1 << 22)
        before = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.tobytes())
        self._documents.frombytes((other.document_indices[1:] + before).tobytes())

    def finalize(self) -> None:
        """Flush both files to the disk and give them their final names."""
        with naming(self.bin_path):
            self._sync(self._bin)
        with naming(self.idx_path, self._partial_idx), open(self._partial_idx, "xb") as file:
            file.write(_HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(self._lengths), len(self._documents)))
            for part in self._parts_of_index():
                file.write(part.tobytes())
            self._sync(file)
        self.idx_path.unlink(missing_ok=True)  # no reader may find an old index next to new tokens
        os.replace(self._partial_bin, self.bin_path)
        os.replace(self._partial_idx, self.idx_path)
        self._done = True

    def _parts_of_index(self) -> Iterator[np.ndarray]:
        """Yield lengths, pointers and document indices, in blocks."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        yield lengths.astype("<i4", copy=False)
        end = 0
        for start in range(0, len(lengths), _BLOCK):
            ends = end + np.cumsum(lengths[start : start + _BLOCK], dtype=np.int64) * self.dtype.itemsize
            yield np.concatenate([[end], ends[:-1]]).astype("<i8")
            end = int(ends[-1])
        yield np.frombuffer(self._documents, dtype=np.int64).astype("<i8", copy=False)

    @staticmethod
    def _sync(file: BinaryIO) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def abort(self) -> None:
        """Remove what was written. After `finalize` nothing is left to remove."""
        with suppress(OSError):  # on a full disk closing fails, too, because the buffer is not empty
            self._bin.close()
        if not self._done:
            for path in (self._partial_bin, self._partial_idx):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._done:
                self.finalize()
        finally:
            self.abort()
