"""Documents in files: plain text, JSON lines and Parquet, cut into pieces that processes tokenise in parallel.

    .txt                 one document, the whole file, UTF-8, with or without a byte order mark
    .jsonl, .json        one JSON object per line; the text is the value of a key
    .parquet             one document per row; the text is a column (needs the package pyarrow)

A `Piece` is about a quarter of a megabyte of one file. Reading a file into pieces is cheap; `texts` decodes a piece, in
the process that tokenises it. An error names the file and the line of the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from labkit.config.errors import no_file
from labkit.data.text import decode_utf8, parse_json, whole_characters

PIECE_BYTES = 1 << 18
"""Bytes of a file in one piece; a longer line, row group or text stays whole."""
ENDINGS = (".txt", ".jsonl", ".json", ".parquet")
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?P<gap>\s+)(?=[\"'(\[]*[^\W_a-z])|(?P<paragraph>\n\s*\n)")
_DOCUMENT_END = re.compile(r"\n\s*\n(?=\S)")


class DocumentError(ValueError):
    """A file of documents cannot be read; the message names the file and the place, and says what to do."""


@dataclass(frozen=True)
class Piece:
    """Some documents of one file, not decoded yet."""

    path: str
    first: int
    """Number of the first line or row, from 1."""
    items: tuple[bytes | str, ...]
    """One whole text, lines of JSON, or the texts of rows."""
    size: int
    """Bytes of the file that this piece covers."""

    def texts(self, key: str) -> list[str]:
        """Return the texts of the documents; a blank line is not one.

        Raises:
            DocumentError: a line is not UTF-8 or not JSON, has no text under `key`, or has half a surrogate pair in it.
        """
        if Path(self.path).suffix in (".jsonl", ".json"):
            numbered = enumerate(self.items, self.first)
            lines = ((number, self._decoded(line, number)) for number, line in numbered)
            return [self._text_of(line, number, key) for number, line in lines if line.strip()]
        return [self._decoded(item, self.first) if isinstance(item, bytes) else item for item in self.items]

    def _decoded(self, item: bytes | str, line: int) -> str:
        try:
            return decode_utf8(item) if isinstance(item, bytes) else item
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            rule = f"line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x})"
            raise DocumentError(f"{self.path}: {rule}; convert it, for example with `iconv -t utf-8`") from None

    def _text_of(self, item: str, line: int, key: str) -> str:
        try:
            found = parse_json(item)
        except (ValueError, RecursionError) as error:
            rule = f"line {line} is not JSON ({error})"
            raise DocumentError(f"{self.path}: {rule}; each line must be one object") from None
        if not isinstance(found, dict) or not isinstance(found.get(key), str):
            keys = ", ".join(map(repr, found)) if isinstance(found, dict) else f"a {type(found).__name__}"
            rule = f"line {line} has no text under {key!r}, it has {keys or 'no key'}"
            raise DocumentError(f"{self.path}: {rule}; name the right one with --key")
        try:
            return whole_characters(found[key])
        except ValueError as error:
            raise DocumentError(f"{self.path}: line {line} {error}") from None


def pieces_of(path: str | Path, key: str) -> Iterator[Piece]:
    """Yield the pieces of one file.

    Raises:
        DocumentError: the file is missing, of another kind, or damaged.
        ModuleNotFoundError: the file is Parquet, and pyarrow is not installed.
    """
    path = _sound(path)
    if path.suffix == ".txt":
        content = path.read_bytes()
        yield Piece(str(path), 1, (content,), len(content))
    elif path.suffix in (".jsonl", ".json"):
        yield from _lines(path)
    else:
        yield from _rows(path, key)


def _sound(path: str | Path) -> Path:
    """Return the path if the file exists and its name has one of `ENDINGS`."""
    path = Path(path)
    if not path.is_file():
        raise DocumentError(f"{path}: {no_file(path)}; labkit reads {', '.join(ENDINGS)}")
    if path.suffix not in ENDINGS:
        raise DocumentError(f"{path}: labkit reads {', '.join(ENDINGS)} files; convert it, or rename it")
    return path


def _lines(path: Path) -> Iterator[Piece]:
    first = 1
    with open(path, "rb") as file:
        while lines := file.readlines(PIECE_BYTES):
            yield Piece(str(path), first, tuple(lines), sum(map(len, lines)))
            first += len(lines)


def _rows(path: Path, key: str) -> Iterator[Piece]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        rule = f"{path}: Parquet files need the package pyarrow (pip install 'labkit[data]')"
        raise ModuleNotFoundError(rule, name="pyarrow") from None
    first = 1
    try:
        file = parquet.ParquetFile(path)
        if key not in file.schema_arrow.names:
            columns = ", ".join(map(repr, file.schema_arrow.names))
            raise DocumentError(f"{path}: has no column {key!r}, it has {columns}; name the right one with --key")
        share = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=512, columns=[key]):
            texts = batch.column(0).to_pylist()
            if (bad := next((n for n, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
                kind = type(texts[bad]).__name__
                raise DocumentError(f"{path}: row {first + bad} has a {kind} under {key!r}, not text; leave it out")
            yield Piece(str(path), first, tuple(texts), round(share * len(texts)))
            first += len(texts)
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        rule = f"a text after row {first - 1} is not UTF-8 (byte 0x{bad:02x})"
        raise DocumentError(f"{path}: {rule}; write the column as UTF-8") from None
    except ArrowException as error:
        raise DocumentError(f"{path}: is not a Parquet file, or it is damaged ({error}); make it again") from None


def total_bytes(paths: Sequence[str | Path]) -> int:
    """Return the bytes of all files, for a progress bar. Raises DocumentError if one is missing or of another kind."""
    return sum(_sound(path).stat().st_size for path in paths)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a text, cut after `.`, `!` or `?` before a capital or digit, and at empty lines."""
    parts = (text[start:end].strip() for start, end in pairwise([0, *_sentence_ends(text), len(text)]))
    return [part for part in parts if part]


def borders_of(text: str) -> tuple[list[int], list[int]]:
    """Return where the sentences of a text end, and where its documents end: places between two of its characters.

    A document begins at a line without indentation after an empty line.
    """
    return _sentence_ends(text), [match.start() for match in _DOCUMENT_END.finditer(text)]


def _sentence_ends(text: str) -> list[int]:
    return [match.start(match.lastgroup or 0) for match in _SENTENCE_END.finditer(text)]
