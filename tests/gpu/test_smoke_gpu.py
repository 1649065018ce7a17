"""The first minute on a new GPU: does each kind of work that all others rest on run, and is it right?

A gate of the GPU suite: where nothing here passes, it runs nothing else.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.fp8.casting import E4M3
from labkit.fp8.gemms import scaled_product
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.moe.grouped_gemm import Segments, grouped_product
from labkit.parallel import single_process_groups

pytestmark = pytest.mark.gpu


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Alike everywhere: drawn on the host."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(found: Tensor, exact: Tensor) -> float:
    return ((found.double().cpu() - exact).norm() / exact.norm()).item()


def test_gemm() -> None:
    a, b = drawn(512, 384), drawn(384, 256, seed=1)
    exact = a.double() @ b.double()
    assert distance(a.cuda() @ b.cuda(), exact) < 1e-3, "float32, or tf32"
    assert distance(a.cuda().bfloat16() @ b.cuda().bfloat16(), exact) < 1e-2


def test_layer_forward_and_backward() -> None:
    config = ModelConfig(layers=1, hidden=256, heads=4, seq_length=64, attention_dropout=0.0, hidden_dropout=0.0)
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        group = single_process_groups(device=device).tp
        layer = TransformerLayer(0, Build(config=config, group=group, seed=1, dtype=dtype, device=device))
        x = drawn(64, 2, 256).to(device, dtype).requires_grad_()
        y = layer(x)
        y.backward(drawn(64, 2, 256, seed=1).to(device, dtype))
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    for exact, on_gpu in zip(*found, strict=True):
        if exact.norm() > 1e-3:  # the gradient of the keys' bias is zero but for rounding
            assert distance(on_gpu, exact.double()) < 0.05


def test_capture_and_replay() -> None:
    x, weight = drawn(64, 64).cuda(), drawn(64, 64, seed=1).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x @ weight
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = (x @ weight).relu()
    for seed in (2, 3):
        x.copy_(drawn(64, 64, seed=seed))
        graph.replay()
        assert torch.equal(y, (x @ weight).relu())


def test_fp8_product() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no fp8 tensor cores (Ada, Hopper or later have)")
    a, b = drawn(64, 256).to(E4M3), drawn(96, 256, seed=1).to(E4M3)
    one = torch.ones((), device="cuda")
    product = scaled_product(a.cuda(), b.cuda(), (one, one), torch.bfloat16, fast=False)
    assert distance(product, a.double() @ b.double().t()) < 1e-2


def test_grouped_product() -> None:
    counts = [40, 0, 17, 71]
    a_NI, b_EIO = drawn(128, 64).bfloat16(), drawn(4, 64, 96, seed=1).bfloat16()
    exact = torch.cat([a.double() @ b.double() for a, b in zip(a_NI.split(counts), b_EIO, strict=True)])
    weight = b_EIO.cuda().transpose(1, 2).contiguous().transpose(1, 2)  # as experts keep theirs: [E, O, I]
    assert distance(grouped_product(a_NI.cuda(), weight, Segments(counts)), exact) < 1e-2
