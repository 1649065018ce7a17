"""Where the weight of a row is applied: between activation and second projection, on F values a row, not on H.

The product is linear in it, so no result tells; the work and the memory that backward keeps do.

Shapes: N rows, H hidden, F expert width.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.comm.groups import single_process_groups
from labkit.config import presets
from labkit.moe.experts import Experts, GroupedExperts, SequentialExperts

N, H, F = 6, 64, 24


class WeightedRows(TorchDispatchMode):
    """Widths of what is multiplied by one number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mul:
            shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            if len(shapes) == 2 and shapes[1][1:] == (1,) and len(shapes[0]) == 2:
                self.widths.append(shapes[0][1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [SequentialExperts, GroupedExperts])
def test_the_weight_of_a_row_is_applied_to_the_narrow_side(kind: type[Experts]) -> None:
    config = presets.tiny_moe()
    moe = replace(config.moe, num_experts=2, ffn_hidden=F)
    experts = kind("layers.0.mlp.experts", config.model, moe, single_process_groups())
    with WeightedRows() as seen, torch.no_grad():
        experts(torch.ones(N, H), torch.tensor([4, 2]), torch.full((N,), 0.5))
    assert seen.widths and set(seen.widths) == {F}
