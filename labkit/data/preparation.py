"""From files of documents to an indexed dataset: read, tokenise in several processes, append the end token, write.

The calling process reads pieces of a quarter of a megabyte (`documents.py`). It is one of the workers: it hands pieces
to the others, at most two for each at a time, and tokenises the next one itself, already while they start. A worker
returns the ids of a piece as one array. The caller writes the arrays in the order of the files, so the result does not
depend on the number of workers. Both files of the dataset get their names at the very
end, so an error or Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from labkit.data.documents import DocumentError, Piece, pieces_of, sentences_of
from labkit.data.indexed import IndexedDatasetBuilder, dtype_for
from labkit.data.text import end_token, load_tokenizer, size_of


@dataclass(frozen=True)
class Recipe:
    """How texts become token ids."""

    tokenizer: str | None = None
    """File of the tokenizer (`load_tokenizer`); None is the bundled one."""
    key: str = "text"
    """Key or column of the text in JSON lines and Parquet."""
    append_eod: bool | None = None
    """Close each document with the end token, if the vocabulary has one (Megatron's `--append-eod`). None closes it
    unless sentences are kept, because samples for BERT and T5 have end tokens of their own."""
    sentences: bool = False
    """Keep each sentence as a sequence of its own, as BERT's samples need them (Megatron's `--split-sentences`)."""


class Tokenised(NamedTuple):
    """The documents of one piece."""

    ids: np.ndarray
    """Ids of all documents, one after another."""
    lengths: list[int]
    """Tokens of each sequence."""
    sequences: list[int]
    """Sequences of each document."""
    empty: int
    """Documents without a token, which are left out."""
    size: int
    """Bytes of the piece."""


class Prepared(NamedTuple):
    """Counts of a finished preparation."""

    documents: int
    tokens: int
    empty: int
    """Documents without a token, which were left out."""


class PieceTokenizer:
    """Tokenises pieces by one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises what `load_tokenizer` raises."""
        self.recipe, self.tokenizer = recipe, load_tokenizer(recipe.tokenizer)
        self.dtype = dtype_for(size_of(self.tokenizer))
        append = not recipe.sentences if recipe.append_eod is None else recipe.append_eod
        end = end_token(self.tokenizer, recipe.tokenizer) if append else None
        self._end = [] if end is None else [end]

    def __call__(self, piece: Piece) -> Tokenised:
        """Return the ids of the documents of a piece."""
        texts = piece.texts(self.recipe.key)
        parts = [sentences_of(text) if self.recipe.sentences else [text] for text in texts]
        flat = [part for document in parts for part in document]
        encoded = iter(self.tokenizer.encode_batch_fast(flat))
        ids, lengths, sequences, empty = list[int](), list[int](), list[int](), 0
        for document in parts:
            found = [tokens for _ in document if (tokens := next(encoded).ids)]
            if not found:
                empty += 1
                continue
            found[-1] = found[-1] + self._end
            for tokens in found:
                ids += tokens
            lengths += map(len, found)
            sequences.append(len(found))
        return Tokenised(np.array(ids, self.dtype), lengths, sequences, empty, piece.size)


def prepare(
    paths: Sequence[str | Path],
    prefix: str | Path,
    recipe: Recipe | None = None,
    *,
    workers: int = 1,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda size: None,
) -> Prepared:
    """Write the documents of `paths` as the indexed dataset `prefix`; `progress` gets the bytes of each finished piece.

    Raises:
        DocumentError: a file cannot be read, or no document has a token.
        FileExistsError, FileNotFoundError, ValueError: see `IndexedDatasetBuilder` and `load_tokenizer`.
        ChildProcessError: a worker died, for example for lack of memory.
    """
    recipe = recipe or Recipe()
    tokenise = PieceTokenizer(recipe)
    tokens = empty = 0
    with IndexedDatasetBuilder(prefix, tokenise.dtype, overwrite=overwrite) as builder:
        pieces = (piece for path in paths for piece in pieces_of(path, recipe.key))
        results = map(tokenise, pieces) if workers == 1 else _side_by_side(tokenise, pieces, workers)
        for result in results:
            builder.add_documents(result.ids, result.lengths, result.sequences)
            tokens, empty = tokens + len(result.ids), empty + result.empty
            progress(result.size)
        if not tokens:
            raise DocumentError(f"{', '.join(map(str, paths))}: no document has a token; there is nothing to write")
        documents = builder.num_documents
    return Prepared(documents, tokens, empty)


def _side_by_side(tokenise: PieceTokenizer, pieces: Iterator[Piece], workers: int) -> Iterator[Tokenised]:
    """Yield the results of all pieces in order, computed by this process and `workers` - 1 others."""
    others, context = workers - 1, multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(others, mp_context=context, initializer=_begin, initargs=(tokenise.recipe,))
    waiting: deque[Future[Tokenised]] = deque()
    try:
        for piece in pieces:
            if sum(not future.done() for future in waiting) < 2 * others:
                waiting.append(pool.submit(_tokenised, piece))
                continue
            with _one_thread():
                made = tokenise(piece)
            waiting.append(Future())
            waiting[-1].set_result(made)
            while waiting and waiting[0].done():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        rule = "a worker died, perhaps for lack of memory (use fewer workers), or because the script that calls this"
        raise ChildProcessError(f"{rule} does its work outside of `if __name__ == '__main__':`") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


THREADS = "TOKENIZERS_PARALLELISM"
"""The variable with which the library allows itself several threads; a worker has one."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let the library use one thread in the block."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = "false"
    try:
        yield
    finally:
        os.environ.pop(THREADS)
        if before is not None:
            os.environ[THREADS] = before


_of_this_worker: PieceTokenizer | None = None


def _begin(recipe: Recipe) -> None:
    """Load the tokenizer of a worker. It ignores Ctrl-C, which reaches every process of a terminal, because the caller
    acts on it for all."""
    global _of_this_worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ[THREADS] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _of_this_worker = PieceTokenizer(recipe)


def _end_with_parent() -> None:
    """End this worker as soon as the caller has ended, also if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        with suppress(OSError):
            parent.join()
        os._exit(1)


def _tokenised(piece: Piece) -> Tokenised:
    assert _of_this_worker is not None, "_begin ran in this process"
    return _of_this_worker(piece)
