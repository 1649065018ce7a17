"""Clean documents before they are tokenised, by the rules of arXiv 1909.08053, section 4.1.

1. Newlines: a single one inside a paragraph becomes a blank; empty lines stay.
2. Short documents: fewer than 128 tokens are left out.
3. Evaluation documents: one whose Jaccard similarity to a document of the test sets is 0.7 or more is left out.
4. Near-duplicates: one whose similarity to an earlier kept document is 0.7 or more is left out.

The similarity of two documents is that of their sets of 5-grams of words, without case and punctuation. MinHash and
locality-sensitive hashing (the package datasketch) find candidates; the exact similarity of the sets decides. So LSH
can miss a pair but never invents one. At similarity 0.7 the 25 bands of 5 rows miss 1 pair in 100:
(1 - 0.7^5)^25 = 0.01.

The report also counts the 8-grams of the test sets that the kept documents contain: the paper's measure of leakage.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from labkit.data.documents import pieces_of
from labkit.data.indexed import output_file
from labkit.data.text import load_tokenizer
from labkit.output_files import naming

SHINGLE, OVERLAP = 5, 8
"""Words in an n-gram: for the similarity, and for the overlap with the test sets."""
BANDS, ROWS = 25, 5
_WORD = re.compile(r"\w+")
_SINGLE_NEWLINE = re.compile(r"(?<=\S)[ \t]*\r?\n[ \t]*(?=\S)")
_FACTOR = 0x9E3779B97F4A7C15
"""An odd number. The hash of an n-gram is a polynomial in it, modulo 2^64, with the words' hashes as coefficients."""


@dataclass(frozen=True)
class Rules:
    """The steps of a cleaning; each has a value that leaves it out."""

    key: str = "text"
    """JSON key or Parquet column of the text."""
    tokenizer: str | None = None
    """File of the tokenizer that counts the tokens of a document (`load_tokenizer`); None is the bundled one."""
    min_tokens: int = 128
    """Fewest tokens of a document that is kept; 0 keeps all."""
    jaccard: float = 0.7
    """Documents with this similarity or more count as the same; at 1 only those with equal sets of n-grams do."""
    repair_newlines: bool = True
    """Join the lines of a paragraph."""


@dataclass
class Report:
    """Counts of a cleaning."""

    read: int = 0
    short: int = 0
    evaluation: int = 0
    """Documents left out because a test set has them or a near-duplicate of them."""
    duplicates: int = 0
    kept: int = 0
    test_ngrams: int = 0
    """8-grams of all test documents."""
    overlapping: int = 0
    """8-grams of test documents that occur in a kept document."""
    removed: list[tuple[int, str]] = field(default_factory=list, repr=False)
    """Each document that was left out: its number, counted from 0, and why (`short`, `evaluation`, `duplicate`)."""


def ngrams(text: str, n: int) -> np.ndarray:
    """Return the hashes of the n-grams of a text's words, uint64, in order; a text of fewer words is one n-gram."""
    words = [xxhash.xxh3_64_intdigest(word.encode()) for word in _WORD.findall(text.lower())]
    hashes = np.array(words, dtype=np.uint64)
    n = max(1, min(n, len(hashes)))
    size = max(0, len(hashes) - n + 1)
    combined = np.zeros(size, np.uint64)
    for place in range(n):
        combined = combined * np.uint64(_FACTOR) + hashes[place : place + size]
    return combined


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return the intersection over the union of two sorted arrays without repetitions; 0 if both are empty."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / max(1, len(a) + len(b) - both)


class Similar:
    """The documents seen so far, and a search among them for one that is similar to a new one."""

    def __init__(self, threshold: float) -> None:
        """Raises ModuleNotFoundError without datasketch."""
        try:
            from datasketch import MinHash, MinHashLSH
        except ModuleNotFoundError:
            rule = "near-duplicates are found by the package datasketch (pip install 'labkit[data]')"
            raise ModuleNotFoundError(rule, name="datasketch") from None
        self.threshold = threshold
        self._sketch: Callable[[], Any] = lambda: MinHash(BANDS * ROWS, hashfunc=int)
        self._index: Any = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
        self._sets: list[np.ndarray] = []

    def of(self, text: str) -> tuple[np.ndarray, Any]:
        """Return the sorted set of a text's n-grams, and its MinHash."""
        shingles, sketch = np.unique(ngrams(text, SHINGLE)), self._sketch()
        if len(shingles):
            sketch.update_batch((shingles & np.uint64(0xFFFFFFFF)).tolist())
        return shingles, sketch

    def find(self, document: tuple[np.ndarray, Any]) -> int | None:
        """Return the number of the first added document that is similar enough; None if LSH finds none."""
        shingles, sketch = document
        candidates = sorted(self._index.query(sketch))
        return next((one for one in candidates if jaccard(shingles, self._sets[one]) >= self.threshold), None)

    def add(self, document: tuple[np.ndarray, Any]) -> None:
        """Remember a document under the next number; the first is 0."""
        shingles, sketch = document
        self._index.insert(len(self._sets), sketch, check_duplication=False)
        self._sets.append(shingles)

    def __len__(self) -> int:
        return len(self._sets)


class TestNgrams:
    """The 8-grams of the test sets, and which of them the kept documents contain."""

    __test__ = False  # pytest would collect it because of its name

    def __init__(self, texts: Sequence[str]) -> None:
        parts = [ngrams(text, OVERLAP) for text in texts]
        self._hashes, self._counts = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]), return_counts=True)
        self._met = np.zeros(len(self._hashes), dtype=bool)

    def meet(self, text: str) -> None:
        """Mark the 8-grams that a kept document contains."""
        if len(self._hashes):
            own = ngrams(text, OVERLAP)
            place = np.minimum(np.searchsorted(self._hashes, own), len(self._hashes) - 1)
            self._met[place[self._hashes[place] == own]] = True

    @property
    def counts(self) -> tuple[int, int]:
        """8-grams of the test documents, and those of them that were met, counted as often as the test documents have
        them."""
        return int(self._counts.sum()), int(self._counts[self._met].sum())


def repaired(text: str) -> str:
    """Return the text with each paragraph on one line."""
    return _SINGLE_NEWLINE.sub(" ", text)


def clean(
    paths: Sequence[str | Path],
    target: str | Path,
    rules: Rules | None = None,
    *,
    tests: Sequence[str | Path] = (),
    overwrite: bool = False,
    progress: Callable[[int], object] = lambda size: None,
) -> Report:
    """Write the documents of `paths` that pass all rules to `target`, one JSON object per line, and return the counts.

    tests: files of documents on which a model will be evaluated.

    Raises:
        DocumentError: a file cannot be read.
        FileExistsError, FileNotFoundError: see `output_file`, which is called for `target`.
        ModuleNotFoundError: datasketch is not installed.
    """
    rules, target = rules or Rules(), output_file(target, overwrite=overwrite)
    cleaner = Cleaner(rules, [text for path in tests for text, _ in _texts(path, rules)])
    partial = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with naming(target, partial), open(partial, "x", encoding="utf-8") as file:
            for path in paths:
                for text, size in _texts(path, rules):
                    if (kept := cleaner(text)) is not None:
                        file.write(json.dumps({rules.key: kept}, ensure_ascii=False) + "\n")
                    progress(size)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return cleaner.finished()


def _texts(path: str | Path, rules: Rules) -> Iterator[tuple[str, int]]:
    """Yield each text of a file, and the bytes of the file that are finished with it."""
    for piece in pieces_of(path, rules.key):
        texts = piece.texts(rules.key)
        for number, text in enumerate(texts):
            yield text, piece.size if number == len(texts) - 1 else 0


class Cleaner:
    """Applies the rules to one document after another."""

    def __init__(self, rules: Rules, tests: Sequence[str]) -> None:
        """tests: texts of the evaluation documents."""
        self.rules, self.report = rules, Report()
        self._tokenizer = load_tokenizer(rules.tokenizer) if rules.min_tokens else None
        texts = [repaired(text) if rules.repair_newlines else text for text in tests]
        self._seen, self._ngrams, self._tests = Similar(rules.jaccard), TestNgrams(texts), len(texts)
        for text in texts:
            self._seen.add(self._seen.of(text))

    def __call__(self, text: str) -> str | None:
        """Return the repaired text, or None if the document is left out."""
        number, self.report.read = self.report.read, self.report.read + 1
        text = repaired(text) if self.rules.repair_newlines else text
        if self._is_short(text):
            self.report.short += 1
            self.report.removed.append((number, "short"))
            return None
        document = self._seen.of(text)
        if (same := self._seen.find(document)) is not None:
            evaluation = same < self._tests
            self.report.evaluation += evaluation
            self.report.duplicates += not evaluation
            self.report.removed.append((number, "evaluation" if evaluation else "duplicate"))
            return None
        self._seen.add(document)
        self._ngrams.meet(text)
        self.report.kept += 1
        return text

    def _is_short(self, text: str) -> bool:
        if self._tokenizer is None:
            return False
        return len(self._tokenizer.encode(text).ids) < self.rules.min_tokens

    def finished(self) -> Report:
        """Return the counts, including the overlap with the test sets."""
        self.report.test_ngrams, self.report.overlapping = self._ngrams.counts
        return self.report
