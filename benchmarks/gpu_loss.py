"""Part of the GPU benchmark: the output layer and its loss, by size of chunk, beside torch's own.

Small chunks bound the memory of a second copy of the logits; each chunk reads the weight again, and in backward adds to
the whole weight gradient. `labkit.parallel.vocab.cross_entropy.CHUNKS` holds what labkit takes; the rows here say what
other sizes would cost, in time and in memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from harness import Comparison, interleave
from torch import Tensor, nn

from labkit.parallel import single_process_groups
from labkit.parallel.groups import Group
from labkit.parallel.vocab.cross_entropy import CHUNKS, ChunkSizes, chunk_sizes, linear_cross_entropy
from labkit.parallel.vocab.vocab_parallel import padded_vocab_size

TOKENS, VOCAB = 16_384, 50_257
EXPONENTS = (22, 24, 25, 26, 27, 28, 29, 30)
"""Logits of a chunk, forward and backward, as powers of 2."""
Step = Callable[[], Any]


class Problem:
    """Hidden states, an output weight with a float32 gradient buffer as in training, and labels."""

    def __init__(self, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
        self.group: Group = single_process_groups(device=device).tp
        self.vocab, self.rows = vocab, padded_vocab_size(vocab, 128, 1)
        torch.manual_seed(0)
        self.hidden_NH = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        self.weight_VH = nn.Parameter(0.02 * torch.randn(self.rows, hidden, device=device, dtype=dtype))
        self.weight_VH.main_grad = torch.zeros(self.rows, hidden, device=device)  # type: ignore[attr-defined]
        self.labels_N = torch.randint(0, vocab, (tokens,), device=device)

    def _anew(self) -> None:
        self.hidden_NH.grad = self.weight_VH.grad = None

    def ours(self, sizes: ChunkSizes, *, fused: bool = True) -> Step:
        """Forward and backward with chunks of `sizes`. As in training, `fused` adds the weight gradient to a float32
        `main_grad`; else it is made in the type of the weight, as the peers do."""

        def step() -> Tensor:
            self._anew()
            kind = self.hidden_NH.device.type
            usual, CHUNKS[kind] = CHUNKS[kind], sizes
            try:
                loss = linear_cross_entropy(
                    self.hidden_NH[:, None], self.weight_VH, self.labels_N[:, None], self.group,
                    vocab_size=self.vocab, padded_vocab_size=self.rows, gradient_accumulation_fusion=fused,
                    check_ids=False,
                )  # fmt: skip
                loss.mean().backward()
            finally:
                CHUNKS[kind] = usual
            return loss

        return step

    def whole(self) -> Step:
        """All logits at once, in the type of the weights, and torch's loss in float32."""

        def step() -> Tensor:
            self._anew()
            logits = self.hidden_NH @ self.weight_VH[: self.vocab].t()
            loss = F.cross_entropy(logits.float(), self.labels_N)
            loss.backward()
            return loss

        return step

    def fused_by_torch(self) -> Step | None:
        """torch's own chunked loss with its default options; None before the version that brought it."""
        function, options = (getattr(F, "linear_cross_entropy", None), getattr(nn, "LinearCrossEntropyOptions", None))
        if function is None or options is None:
            return None

        def step() -> Tensor:
            self._anew()
            loss = function(self.hidden_NH, self.weight_VH[: self.vocab], self.labels_N, options=options())
            loss.backward()
            return loss

        return step


def loss_chunks(
    *,
    tokens: int = TOKENS,
    vocab: int = VOCAB,
    hidden_sizes: tuple[int, ...] = (768, 4096),
    exponents: tuple[int, ...] = EXPONENTS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    repetitions: int = 15,
) -> Iterator[Comparison]:
    """Forward and backward of output layer and loss: labkit's chunk sizes, other sizes, and torch's ways."""
    where = torch.device("cuda" if device is None else device)
    for hidden in hidden_sizes:
        problem = Problem(tokens, hidden, vocab, dtype, where)
        chosen = chunk_sizes(where)
        steps: dict[str, Step] = {"labkit": problem.ours(chosen)}
        steps["labkit, gradient in the weight's type"] = problem.ours(chosen, fused=False)
        steps |= {f"chunks of 2^{n}": problem.ours(ChunkSizes(1 << n, 1 << n, 1 << n)) for n in exponents}
        steps["whole logits, F.cross_entropy"] = problem.whole()
        if (fused := problem.fused_by_torch()) is not None:
            steps["F.linear_cross_entropy, chunked"] = fused
        peaks, unable = peak_gib(steps, where)
        for name in unable:
            del steps[name]
        synchronize = torch.cuda.synchronize if where.type == "cuda" else None
        found = interleave(
            f"output layer and loss, {tokens:,} tokens, h{hidden}, V{vocab:,}, {str(dtype).removeprefix('torch.')}",
            steps, repetitions=repetitions, synchronize=synchronize, max_load=float(os.cpu_count() or 1),
        )  # fmt: skip
        facts: dict[str, Any] = {"peak_gib": peaks}
        yield replace(found, facts=facts | ({"unable": unable} if unable else {}))


def peak_gib(steps: Mapping[str, Step], device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """(GiB that each step takes beyond what was there before it, why a step cannot run); no GiB on a CPU."""
    peaks: dict[str, float] = {}
    unable: dict[str, str] = {}
    for name, step in steps.items():
        try:
            step()  # what is made lazily
            if device.type == "cuda":
                gc.collect()
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
                step()
                peaks[name] = round((torch.cuda.max_memory_allocated(device) - before) / 2**30, 3)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            unable[name] = f"{type(error).__name__}: {(str(error).strip() or 'no text').splitlines()[0][:200]}"
    return peaks, unable
