"""Data for training: the sample index of a billion tokens beside megatron-core's, and tokenisation beside `tokenizers`.

    python benchmarks/data.py                    # writes results/data.json
    python benchmarks/data.py --tokens 1e7 --dry

The sample index is document, sample and shuffle index of one epoch, from the lengths of documents alone: 500 tokens on
average, log-normal, and a sequence length of 1,024. megatron-core's are its own functions, with its loop in C++.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import Comparison, interleave, peak_of, report, until_quiet

from labkit.data import bundled_text, load_tokenizer
from labkit.data.preparation import prepare
from labkit.data.sample_index import build_indices

SEQ_LENGTH = 1024


def lengths_of(tokens: int) -> np.ndarray:
    """Lengths of documents with `tokens` tokens together, int32."""
    random = np.random.default_rng(1)
    lengths = np.maximum(1, random.lognormal(5.7, 1.0, size=int(tokens / 450))).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    return lengths[: int(np.searchsorted(ends, tokens)) + 1]


def megatron_indices(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The index arrays of one epoch, in the calls of megatron-core's GPTDataset."""
    from megatron.core.datasets import gpt_dataset, helpers

    random, tokens = np.random.RandomState(1), int(lengths.sum(dtype=np.int64))
    documents = np.arange(len(lengths), dtype=np.int32)
    document_index = gpt_dataset._build_document_index(documents, 1, random, False)
    sample_index = helpers.build_sample_idx(lengths, document_index, SEQ_LENGTH, 1, tokens, True, True)
    samples = len(sample_index) - 1
    shuffle_index = gpt_dataset._build_shuffle_index(samples, samples, random)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}


def tokenisation(megabytes: int, workers: int, repetitions: int, folder: Path) -> Comparison:
    """`labkit data prepare` of a JSON lines file beside the library alone, which has the texts in memory and keeps
    nothing: as many processes as the library has threads."""
    entries = [entry for entry in bundled_text().split("\n\n") if entry.strip()]
    size = sum(len(entry.encode()) for entry in entries)
    texts = entries * max(1, round(megabytes * 1e6 / size))
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = load_tokenizer()

    def ours() -> None:
        prepare([source], folder / "out", workers=workers, overwrite=True)

    def alone() -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
        tokenizer.encode_batch_fast(texts, add_special_tokens=False)

    real = sum(len(text.encode()) for text in texts) / 1e6
    words = f"{workers} process" + ("es" if workers > 1 else "")
    alternatives: dict[str, Callable[[], Any]] = {"labkit data prepare": ours, "tokenizers alone": alone}
    found = interleave(f"tokenise {real:.0f} MB, {words}", alternatives, repetitions=repetitions, warmup=1)
    rates = {name: round(real / found.median(name), 2) for name in alternatives}
    return replace(found, facts={"mb_per_second": rates})


def sample_index(tokens: int, repetitions: int) -> Comparison:
    """The three arrays of one epoch."""
    lengths = lengths_of(tokens)
    alternatives: dict[str, Callable[[], Any]] = {name: partial(build, lengths) for name, build in INDICES.items()}
    ours, theirs = (build() for build in alternatives.values())
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])
    case = f"sample index of {tokens:,} tokens in {len(lengths):,} documents"
    found = interleave(case, alternatives, repetitions=repetitions, warmup=1)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        peaks = {name: round(fresh.apply(peak_of_indices, (name, tokens)) / 1e6) for name in INDICES}
    return replace(found, facts={"peak_memory_mb": peaks})


def labkit_indices(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """The index arrays of one epoch."""
    return build_indices(lengths, range(len(lengths)), seq_length=SEQ_LENGTH, num_samples=None, seed=1)


INDICES: dict[str, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    "labkit": labkit_indices,
    "megatron-core": megatron_indices,
}


def peak_of_indices(name: str, tokens: int) -> int:
    """Peak of one alternative in a process that has done nothing else but import."""
    INDICES[name](lengths_of(10_000_000))
    lengths = lengths_of(tokens)
    return peak_of(lambda: INDICES[name](lengths))


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--megabytes", type=int, default=8, help="text for one process; several get twice as much")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            until_quiet(lambda: sample_index(int(options.tokens), options.repetitions)),
            until_quiet(lambda: tokenisation(options.megabytes, 1, options.repetitions, Path(folder))),
            until_quiet(
                lambda: tokenisation(2 * options.megabytes, options.workers, options.repetitions, Path(folder))
            ),
        ]
    report(
        "data",
        rows,
        title="Data: sample index and tokenisation",
        notes=[
            "Peak memory is the growth of a fresh process's own memory, including the arrays that it returns.",
            "labkit's time includes reading JSON lines, starting its processes, and writing both files (fsync).",
            "The library alone tokenises texts in memory, with a thread per process of labkit, and stores nothing.",
        ],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
