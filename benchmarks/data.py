"""Data for training: the sample index of a billion tokens beside megatron-core's, and tokenisation beside `tokenizers`.

    python benchmarks/data.py                    # writes results/data.json
    python benchmarks/data.py --tokens 1e7 --dry

The sample index is document, sample and shuffle index of one epoch, from the lengths of documents alone: 500 tokens on
average, log-normal, and a sequence length of 1,024. megatron-core's are its own functions, with its loop in C++.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Comparison, interleave, report

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


def peak_of(step: Callable[[], object]) -> int:
    """Largest growth of this process's own memory during a call, in bytes."""
    before, most, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, anonymous_bytes())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    step()
    ended.set()
    watcher.join()
    return max(0, most - before)


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def sample_index(tokens: int, repetitions: int) -> Comparison:
    """The three arrays of one epoch."""
    lengths = lengths_of(tokens)

    def ours() -> dict[str, np.ndarray]:
        return build_indices(lengths, range(len(lengths)), seq_length=SEQ_LENGTH, num_samples=None, seed=1)

    def theirs() -> dict[str, np.ndarray]:
        return megatron_indices(lengths)

    for name, array in ours().items():
        np.testing.assert_array_equal(array, theirs()[name])
    case = f"sample index of {tokens:,} tokens in {len(lengths):,} documents"
    alternatives: dict[str, Callable[[], Any]] = {"labkit": ours, "megatron-core": theirs}
    found = interleave(case, alternatives, repetitions=repetitions, warmup=1)
    peaks = {"labkit": round(peak_of(ours) / 1e6), "megatron-core": round(peak_of(theirs) / 1e6)}
    return replace(found, facts={"peak_memory_mb": peaks})


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    report(
        "data",
        [sample_index(int(options.tokens), options.repetitions)],
        title="Data: sample index and tokenisation",
        notes=["Peak memory is the growth of the process's own memory, the arrays that it returns included."],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
