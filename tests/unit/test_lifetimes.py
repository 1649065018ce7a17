"""Lifetimes: which tensors are in memory after each kernel."""

import torch
from torch.nn import functional as F

from labkit.models import Lifetimes


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
