"""Four transformer layers over two tensor-parallel gloo ranks, forward and backward: labkit, DTensor, plain f and g.

    python benchmarks/tensor_parallel.py

The peers share one pre-LN block (fused qkv, SDPA, GELU). `DTensor` is torch's `parallelize_module` with Colwise and
Rowwise styles. `plain f/g` is the paper's recipe as one writes it down: gloo's blocking all-reduce, forward in g and
backward in f. labkit's layers do the same sums by an exchange, and hide f's behind the weight gradient.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Comparison, interleave, report, until_quiet
from torch import Tensor, nn

SIZES = {"h64": (64, 4), "h256": (256, 8), "h768": (768, 12)}
"""Case -> (hidden, heads)."""
LAYERS, SEQUENCE, BATCH = 4, 128, 2


class PlainF(torch.autograd.Function):
    """Identity forward, blocking all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad


class PlainG(torch.autograd.Function):
    """Blocking all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class PlainRow(nn.Linear):
    """Row-parallel: the bias after the sum."""

    def forward(self, input: Tensor) -> Tensor:
        return PlainG.apply(F.linear(input, self.weight)) + self.bias  # type: ignore[no-any-return, operator]


class PlainColumn(nn.Linear):
    """Column-parallel: f before the product."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(PlainF.apply(input))  # type: ignore[arg-type]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), made of the linear layers it is given."""

    def __init__(
        self, hidden: int, head_dim: int, column: Callable[..., nn.Module], row: Callable[..., nn.Module]
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = column(hidden, 3 * hidden), row(hidden, hidden)
        self.fc1, self.fc2 = column(hidden, 4 * hidden), row(4 * hidden, hidden)

    def forward(self, x_SBH: Tensor) -> Tensor:
        mixed = self.qkv(self.norm1(x_SBH))
        length, batch, _ = mixed.shape
        # [S, B, heads, 3 D] -> three of [B, heads, S, D]
        q, k, v = mixed.view(length, batch, -1, 3 * self.head_dim).permute(1, 2, 0, 3).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_SBH = x_SBH + self.proj(attended.permute(2, 0, 1, 3).reshape(length, batch, -1))
        return x_SBH + self.fc2(F.gelu(self.fc1(self.norm2(x_SBH)), approximate="tanh"))


def plain_model(hidden: int, head_dim: int) -> nn.Module:
    """The peer with f and g written out; each rank holds half of each matrix."""
    column = lambda i, o: PlainColumn(i, o // 2)  # noqa: E731
    row = lambda i, o: PlainRow(i // 2, o)  # noqa: E731
    return nn.Sequential(*(Block(hidden, head_dim, column, row) for _ in range(LAYERS)))


def dtensor_model(hidden: int, head_dim: int) -> nn.Module:
    """The peer with DTensor parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = nn.Sequential(*(Block(hidden, head_dim, nn.Linear, nn.Linear) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        styles = {
            "qkv": ColwiseParallel(),
            "proj": RowwiseParallel(),
            "fc1": ColwiseParallel(),
            "fc2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, styles)
    return model


def labkit_model(hidden: int, heads: int) -> nn.Module:
    """labkit's own transformer layers."""
    from labkit.config import ModelConfig
    from labkit.models.blocks import TransformerLayer
    from labkit.models.build import Build
    from labkit.parallel import Group

    group = Group("tp", (0, 1), dist.get_rank(), dist.group.WORLD)
    config = ModelConfig(layers=LAYERS, hidden=hidden, heads=heads, seq_length=SEQUENCE)
    build = Build(config=config, group=group, seed=0)
    return nn.Sequential(*(TransformerLayer(i, build) for i in range(LAYERS)))


def measure(case: str, repetitions: int) -> Comparison:
    """On each rank: one forward and one backward of each model, interleaved."""
    from labkit.parallel import CommLedger

    hidden, heads = SIZES[case]
    torch.manual_seed(0)
    models = {
        "labkit": labkit_model(hidden, heads),
        "DTensor": dtensor_model(hidden, hidden // heads),
        "plain f/g": plain_model(hidden, hidden // heads),
    }
    x_SBH = torch.randn(SEQUENCE, BATCH, hidden)

    def stepper(model: nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(x_SBH.clone().requires_grad_()).sum().backward()

        return step

    steps = {name: stepper(model) for name, model in models.items()}
    with CommLedger() as ledger:
        steps["labkit"]()
    assert ledger.bytes() == 4 * LAYERS * SEQUENCE * BATCH * hidden * 4, "four all-reduces of s b h per layer"
    words = f"{case}, {LAYERS} layers, s{SEQUENCE} b{BATCH}, forward and backward"
    found = interleave(words, steps, repetitions=repetitions, across_ranks=True)
    found.facts.update(all_reduces=ledger.count(), bytes_reduced=ledger.bytes())
    return found


def main() -> None:
    """Run all sizes on two ranks, one thread each, and store the table."""
    from labkit.launch import run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", nargs="+", choices=list(SIZES), default=list(SIZES), help="widths to measure")
    parser.add_argument("--repetitions", type=int, default=25, help="interleaved repetitions; 15 or more to be quoted")
    parser.add_argument("--dry-run", action="store_true", help="print only, store nothing")
    args = parser.parse_args()
    comparisons = [
        until_quiet(lambda case=case: run(measure, 2, case, args.repetitions, timeout=600.0)[0]) for case in args.cases
    ]
    report(
        "tensor_parallel",
        comparisons,
        title="Tensor parallel layers on two ranks",
        notes=["Aims for the speed-up over DTensor: 1.8 at h64, 1.3 at h256, 1.05 at h768."],
        write=not args.dry_run,
    )


if __name__ == "__main__":
    main()
