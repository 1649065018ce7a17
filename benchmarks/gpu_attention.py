"""Part of the GPU benchmark: the attention kernels behind torch's scaled_dot_product_attention, side by side.

Layers call SDPA and take what torch chooses; the ring calls flash, which alone hands out log-sum-exps
(`labkit/parallel/context/attention_block.py`). Each form is timed forward and backward, at the sizes and strides that
labkit's layers give, and compared with the formula in float64.

Operations are those of the kernels, as FlashAttention counts them (arXiv 2307.08691, section 4.1): half of the pairs
under a causal mask, and five products in a backward, which computes the scores again. So the rows have no MFU, which
counts all pairs and nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_peers import DEVICE, Row, Side, beside, difference, reason
from gpu_steps import sdpa_choice
from harness import Comparison
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.parallel.context.attention_block import attend, attend_backward

LONG = 4096
"""Positions from which a call takes milliseconds; a fifth of the calls are then enough for a repetition."""
TOLERANCE = 0.02
"""Of outputs and gradients in bf16 between kernels."""


@dataclass(frozen=True)
class Sizes:
    """One call: `heads` counts those of all samples, as labkit's layers put the batch into the heads."""

    heads: int
    length: int
    head_dim: int
    causal: bool = True


SIZES = {
    "layer h4096 b8": Sizes(8 * 32, 2048, 128),
    "GPT-2 124M b16": Sizes(16 * 12, 1024, 64),
    "1.2B b8": Sizes(8 * 16, 1024, 96),
    "long sequence": Sizes(32, 16384, 128),
    "rectangle of the ring": Sizes(32, 8192, 128, causal=False),
}


@dataclass
class Operands:
    """q, k, v as views of one fused projection, [1, n, S, D], and the gradient of the output."""

    sizes: Sizes
    qkv: tuple[Tensor, Tensor, Tensor]
    grad: Tensor

    @classmethod
    def random(cls, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Operands:
        """Normal numbers, the same at every call."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (sizes.length, sizes.heads, 3, sizes.head_dim)
        mixed = torch.randn(shape, device=device, generator=generator).to(dtype)
        grad = torch.randn(shape[:2] + shape[3:], device=device, generator=generator).to(dtype)
        q, k, v = (mixed[:, :, i].transpose(0, 1)[None].detach().requires_grad_() for i in range(3))
        return cls(sizes, (q, k, v), grad.transpose(0, 1)[None])


Form = tuple[Callable[[], Tensor], Callable[[], Sequence[Tensor]]]
"""The forward, [1, n, S, D]; and dq, dk, dv of a forward that was done once and is not done again."""


def of_the_ring(given: Operands) -> Form:
    """labkit's block of the ring: flash with its log-sum-exps."""
    causal = given.sizes.causal
    q, k, v = (x.detach() for x in given.qkv)
    kept: list[Tensor] = []

    def backward() -> Sequence[Tensor]:
        if not kept:
            kept.extend(attend(q, k, v, causal=causal))
        return attend_backward(given.grad, q, k, v, kept[0], kept[1], causal=causal)

    return lambda: attend(q, k, v, causal=causal)[0], backward


def sdpa(given: Operands, backend: SDPBackend | None) -> Form:
    """scaled_dot_product_attention with one backend, or with torch's choice (None)."""
    kept: list[Tensor] = []

    def forward() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*given.qkv, is_causal=given.sizes.causal)

    def backward() -> Sequence[Tensor]:
        if not kept:
            kept.append(forward())
        return torch.autograd.grad(kept[0], given.qkv, given.grad, retain_graph=True)

    return forward, backward


FORMS: dict[str, Callable[[Operands], Form]] = {
    "labkit, flash as in the ring": of_the_ring,
    "SDPA, flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "SDPA, as torch chooses": partial(sdpa, backend=None),
}


def side(build: Callable[[Operands], Form], given: Operands, calls: int, *, forward: bool) -> Side:
    """`calls` forwards without autograd, or as many backwards."""
    ahead, back = build(given)
    last: list[Tensor] = []

    def step() -> None:
        with torch.no_grad() if forward else nullcontext():
            for _ in range(calls):
                last[:] = [ahead()] if forward else back()

    names = ("output",) if forward else ("dq", "dk", "dv")
    return Side(step, lambda: dict(zip(names, last, strict=True)))


def precise(given: Operands, heads: int) -> dict[str, Tensor]:
    """Output and gradients of the first heads by the formula in float64: no head knows of another."""
    q, k, v = (x.detach()[:, :heads].double().requires_grad_() for x in given.qkv)
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=given.sizes.causal)
    gradients = torch.autograd.grad(output, (q, k, v), given.grad[:, :heads].double())
    return {"output": output.detach()} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def errors(case: str, given: Operands, heads: int) -> Row:
    """How far each form is from float64: |a - b| / |b| over the first heads."""
    exact, row = precise(given, heads), Row(case=f"{case}: difference from float64 on {heads} heads")
    row["torch_chooses"] = sdpa_choice(*given.qkv, causal=given.sizes.causal)
    for name, build in FORMS.items():
        try:
            forward, backward = build(given)
            found = dict(zip(exact, [forward(), *backward()], strict=True))
        except Exception as error:
            row[name] = reason(error)
            continue
        row[name] = {key: float(f"{difference(x[:, :heads], exact[key]):.3g}") for key, x in found.items()}
    return row


def attention(
    sizes: dict[str, Sizes] = SIZES,
    *,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
    repetitions: int = 15,
    calls: int = 10,
    exact_heads: int = 2,
) -> Iterator[Comparison | Row]:
    """Flash, cuDNN's kernel and what torch chooses: times, memory, and difference from float64."""
    for name, one in sizes.items():
        mask = "causal" if one.causal else "no mask"
        case = f"attention, {name}: {one.heads} heads, s{one.length} d{one.head_dim}, {mask}"
        given = Operands.random(one, device, dtype)
        yield errors(case, given, min(exact_heads, one.heads))
        at_once = calls if one.length < LONG else max(1, calls // 5)
        for forward in (True, False):
            builds = {key: partial(side, build, given, at_once, forward=forward) for key, build in FORMS.items()}
            products = 2 if forward else 5
            flops = at_once * products * 2 * one.heads * one.length**2 * one.head_dim * (0.5 if one.causal else 1.0)
            words = f"{case}, {'forward' if forward else 'backward'}, {at_once} calls"
            made: dict[str, Any] = {"device": device, "tolerance": TOLERANCE, "repetitions": repetitions}
            yield from beside(words, builds, **made, flops=flops, share="share_of_peak")
        del given
