"""Transformer Engine's context parallelism against our ring, on the same pieces of one sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from labkit.config import ModelConfig, ParallelConfig
from labkit.launch import run
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.models.core_attention import CoreAttention
from labkit.parallel import initialize_model_parallel, zigzag_split

pytestmark = pytest.mark.gpu

CP, LENGTH, DIM = 2, 512, 64
MODEL = ModelConfig(layers=1, hidden=8 * DIM, heads=8, kv_heads=2, seq_length=LENGTH, vocab_size=1024)


def both_forms(cp_comm_type: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output, dq, dk and dv of this rank's part: the engine's, and those of our layer."""
    from labkit.te.dot_product import CoreAttention as EngineCoreAttention

    groups = initialize_model_parallel(ParallelConfig(cp=CP))
    engine = EngineCoreAttention(
        replace(MODEL, transformer_impl="transformer_engine"), None, groups.tp, groups.cp, cp_comm_type
    )
    ours = CoreAttention(MODEL, None, groups.cp, cp_comm_type)
    generator = torch.Generator().manual_seed(0)  # alike on every rank: drawn on the host
    shapes = [(1, heads, LENGTH, DIM) for heads in (8, 2, 2, 8)]
    whole = [torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes]
    *parts, grad = (zigzag_split(x, CP, groups.cp.rank, 2) for x in whole)
    found: list[list[torch.Tensor]] = []
    for layer in (engine, ours):
        q, k, v = (x.clone().requires_grad_() for x in parts)
        out = layer(q, k, v)
        found.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), grad))])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather"])
def test_the_engines_ring_computes_what_ours_does(cp_comm_type: str) -> None:
    """Causal, grouped queries, zigzag: wrong positions or a lost block differ by their own size, roundings by 2^-6."""
    if (missing := why_no_transformer_engine()) is not None:
        pytest.skip(f"needs transformer_engine: {missing}")
    if torch.cuda.device_count() < CP:
        pytest.skip(f"NCCL runs one rank per GPU, and cp = {CP} needs {CP} GPUs; here is {torch.cuda.device_count()}")
    for pairs in run(both_forms, CP, cp_comm_type, backend="nccl", device="cuda", timeout=300):
        for theirs, ours in pairs:
            assert ((theirs.double() - ours.double()).norm() / ours.double().norm()).item() < 2**-6
