"""Lifetimes and live bytes: which tensors are in memory after each kernel, and how many bytes after each operation."""

import torch
from torch.nn import functional as F

from labkit.models import Lifetimes, LiveBytes


def test_what_a_product_saves_is_in_memory_until_its_backward() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with Lifetimes() as memory:
        made = memory.results_of(lambda: torch.ones(3, 2), ["x"])
        y = F.gelu(made() @ weight)
        y.sum().backward()
        F.gelu(made())  # a second result has no name
    forward, backward = [("mm", ("x",)), ("gelu", ("x",))], [("gelu_backward", ("x",)), ("mm", ("x",))]
    assert memory.moments == [*forward, *backward, ("gelu", ())]


def test_what_nobody_saves_is_gone_after_its_last_use() -> None:
    with torch.no_grad(), Lifetimes() as memory:
        made = memory.results_of(lambda: torch.ones(3, 2), ["x"])
        F.gelu(made() @ torch.ones(2, 2))
    assert memory.moments == [("mm", ("x",)), ("gelu", ())]


def test_live_bytes_count_what_a_block_has_made_and_a_storage_once() -> None:
    before = torch.ones(100)
    with LiveBytes() as memory:
        made = before * 2
        view = made.view(10, 10)  # no memory of its own
        del made
        doubled = view + before.view(10, 10)
        del view
        _last = doubled.sum()
    assert memory.moments == [400, 400, 400, 800, 404] and memory.peak == 800


def test_cross_entropy_has_three_tensors_of_logits_in_memory_in_its_backward() -> None:
    logits = torch.randn(50, 200, requires_grad=True)
    labels = torch.arange(50)
    with LiveBytes() as memory:
        F.cross_entropy(logits, labels).backward()
    assert 3 <= memory.peak / logits.nbytes < 3.05
