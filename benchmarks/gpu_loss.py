"""Part of the GPU benchmark: the output layer and its loss, by size of chunk, beside torch's own.

Small chunks bound the memory of a second copy of the logits; each chunk reads the weight again, and in backward adds to
the whole weight gradient. `labkit.parallel.vocab.cross_entropy.CHUNKS` holds what labkit takes; the rows here say what
other sizes would cost, in time and in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_peers import DEVICE, Row, Side, beside
from gpu_plain import LAYER_TOLERANCE
from harness import Comparison
from torch import Tensor, nn

from labkit.comm.groups import Group
from labkit.parallel import single_process_groups
from labkit.parallel.vocab.cross_entropy import CHUNKS, ChunkSizes, linear_cross_entropy
from labkit.parallel.vocab.vocab_parallel import padded_vocab_size

TOKENS, VOCAB = 16_384, 50_257
EXPONENTS = (22, 24, 25, 26, 27, 28, 29, 30)
"""Logits of a chunk, forward and backward, as powers of 2."""


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

    def side(self, loss_of: Callable[[], Tensor], sizes: ChunkSizes | None = None) -> Side:
        """Forward and backward of a loss that is a mean, with chunks of `sizes`; None is labkit's own choice.

        The compared results are loss and gradient of the hidden states: `main_grad` grows from step to step.
        """
        kept: list[Tensor] = []

        def drop() -> None:
            kept.clear()
            self.hidden_NH.grad = self.weight_VH.grad = None

        def forward() -> None:
            with chunks_of(sizes, self.hidden_NH.device):
                kept.append(loss_of())

        def backward() -> None:
            with chunks_of(sizes, self.hidden_NH.device):
                kept[0].backward()
            kept[0] = kept[0].detach()

        def results() -> dict[str, Tensor]:
            assert self.hidden_NH.grad is not None
            return {"loss": kept[0], "hidden_gradient": self.hidden_NH.grad}

        return Side(lambda: (drop(), forward(), backward()), results, (drop, forward, backward))

    def ours(self, sizes: ChunkSizes | None = None, *, fused: bool = True) -> Side:
        """labkit's. As in training, `fused` adds the weight gradient to a float32 `main_grad`; else it is made in the
        type of the weight, as the peers do."""

        def loss() -> Tensor:
            return linear_cross_entropy(
                self.hidden_NH[:, None], self.weight_VH, self.labels_N[:, None], self.group, vocab_size=self.vocab,
                padded_vocab_size=self.rows, gradient_accumulation_fusion=fused, check_ids=False,
            ).mean()  # fmt: skip

        return self.side(loss, sizes)

    def whole(self) -> Side:
        """All logits at once, in the type of the weights, and torch's loss in float32. The columns of padding are in
        the loss, as in nanoGPT: rows of an odd length would make the products slow."""
        return self.side(lambda: F.cross_entropy((self.hidden_NH @ self.weight_VH.t()).float(), self.labels_N))

    def fused_by_torch(self) -> Side:
        """torch's own chunked loss with its default options; it is younger than torch 2.11."""
        options = nn.LinearCrossEntropyOptions  # type: ignore[attr-defined]
        function: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
        return self.side(lambda: function(self.hidden_NH, self.weight_VH, self.labels_N, options=options()))


@contextmanager
def chunks_of(sizes: ChunkSizes | None, device: torch.device) -> Iterator[None]:
    """Inside the block labkit's loss takes chunks of these sizes on such a device."""
    usual = CHUNKS[device.type]
    CHUNKS[device.type] = sizes or usual
    try:
        yield
    finally:
        CHUNKS[device.type] = usual


def loss_chunks(
    *,
    tokens: int = TOKENS,
    vocab: int = VOCAB,
    hidden_sizes: tuple[int, ...] = (768, 4096),
    exponents: tuple[int, ...] = EXPONENTS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = DEVICE,
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """Forward and backward of output layer and loss: labkit's chunk sizes, other sizes, and torch's ways."""
    for hidden in hidden_sizes:
        problem = Problem(tokens, hidden, vocab, dtype, device)
        builds: dict[str, Callable[[], Side]] = {
            "labkit": problem.ours,
            "labkit, gradient in the weight's type": partial(problem.ours, fused=False),
            **{f"chunks of 2^{n}": partial(problem.ours, ChunkSizes(1 << n, 1 << n, 1 << n)) for n in exponents},
            "whole logits, F.cross_entropy": problem.whole,
            "F.linear_cross_entropy, chunked": problem.fused_by_torch,
        }
        case = f"output layer and loss, {tokens:,} tokens, h{hidden}, V{vocab:,}, {str(dtype).removeprefix('torch.')}"
        yield from beside(case, builds, device=device, tolerance=LAYER_TOLERANCE, repetitions=repetitions)
        del problem, builds
