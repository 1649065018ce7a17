"""Rates of one rank's kernels: products by shape, kernels that move bytes, attention.

Each kernel runs on several sets of operands in turn, as in a step, where weights and activations come from memory or
the outer caches rather than from the innermost one.

Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.comm.groups import single_process_groups
from labkit.models.chunks import DTYPES
from labkit.parallel.vocab.cross_entropy import vocab_parallel_cross_entropy
from labkit.plan.action_times import LOSS_BYTES
from labkit.plan.software import OPTIMIZER_BYTES_IN_PLACE
from labkit.train.calibration.timing import Sample, Stopwatch

_AROUND = 16 << 20
"""Bytes of operands through which a kernel's calls go round."""
_MOST_SETS = 64
SIZES = {"cpu": (32, 128, 512, 2048), "cuda": (256, 1024, 4096, 16384)}
"""m, n and k of the measured products on a device: rows of a microbatch, hidden sizes, widths of an MLP."""
_HEADS, _HEAD = 4, 64
_TOKENS = {"cpu": (128, 512, 2048), "cuda": (2048, 8192, 32768)}
"""Tokens of the activations that memory-bound kernels move, H = 256."""
_HIDDEN, _VOCABULARY = 256, 1024


def in_turn(make: Callable[[], tuple[Tensor, ...]], call: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that calls `call` with the next of several sets of operands from `make`."""
    first = make()
    size = sum(operand.nbytes for operand in first)
    count = max(1, min(_MOST_SETS, _AROUND // max(1, size)))
    sets = itertools.cycle([first, *(make() for _ in range(count - 1))])
    return lambda: call(*next(sets))


# ---- products ----


def shapes(device: str, dtype: str) -> Iterator[tuple[int, int, int]]:
    """Yield the measured m, n, k: a grid. Of types that labkit trains in less often, without the largest size."""
    sizes = SIZES[device] if dtype in ("fp32", "bf16") and (device, dtype) != ("cpu", "bf16") else SIZES[device][:-1]
    most = SIZES[device][-1] ** 3 / 4  # the largest ones are as fast as those before them
    yield from ((m, n, k) for m, n, k in itertools.product(sizes, repeat=3) if m * n * k <= most)


def product(device: torch.device, dtype: str, shape: tuple[int, int, int], watch: Stopwatch) -> Sample:
    """Return the FLOP/s of the two products of a linear layer, x W^T of its forward and dy W of its backward."""
    m, n, k = shape
    made: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}

    def operands() -> tuple[Tensor, ...]:
        return torch.randn(m, k, **made), torch.randn(n, k, **made), torch.randn(k, n, **made)

    call = in_turn(operands, lambda x, ahead, back: (F.linear(x, ahead), x @ back))
    return watch.sample(call).inverted(2 * 2.0 * m * n * k)


def weight_gradient(device: torch.device, dtype: str, shape: tuple[int, int, int], watch: Stopwatch) -> Sample:
    """Return the FLOP/s of a product that is added to its result, dW [m, n] += dy^T x with k tokens."""
    m, n, k = shape
    made: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}

    def operands() -> tuple[Tensor, ...]:
        return torch.zeros(m, n, **made), torch.randn(k, m, **made), torch.randn(k, n, **made)

    return watch.sample(in_turn(operands, lambda out, dy, x: out.addmm_(dy.t(), x))).inverted(2.0 * m * n * k)


# ---- attention ----


def attention(device: torch.device, dtype: str, length: int, watch: Stopwatch) -> tuple[Sample, Sample]:
    """Return the FLOP/s of causal attention forward and backward: 4 and 10 operations for a pair and a column."""
    made: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}
    operations = length * (length + 1) // 2 * _HEADS * _HEAD

    def operands() -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, _HEADS, length, _HEAD, **made, requires_grad=True) for _ in range(3))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def with_output() -> tuple[Tensor, ...]:
        q, k, v = operands()
        out = forward(q, k, v)
        return q, k, v, out, torch.randn_like(out)

    def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor) -> Any:
        return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    ahead, back = watch.sample(in_turn(operands, forward)), watch.sample(in_turn(with_output, backward))
    return ahead.inverted(4.0 * operations), back.inverted(10.0 * operations)


# ---- kernels that move bytes ----


def memory_kernels(device: torch.device, dtype: str, watch: Stopwatch) -> Iterator[tuple[str, Sample]]:
    """Yield (kind, bytes/s) of each kernel and size; `copy` is what all others are compared with.

    Bytes are those that `labkit.plan` counts for the kernel, so that its time is bytes / rate.
    """
    made: dict[str, Any] = {"dtype": DTYPES[dtype], "device": device}
    for tokens in _TOKENS[device.type]:
        for name, per_element, make, call in _element_kernels(tokens, made):
            yield name, watch.sample(in_turn(make, call)).inverted(per_element * tokens * _HIDDEN)
    tokens = _TOKENS[device.type][1]
    yield from _loss(device, made, tokens, watch)
    yield "optimizer", _optimizer(device, 64 * tokens * _HIDDEN // 2, watch)


Kernel = tuple[str, float, Callable[[], tuple[Tensor, ...]], Callable[..., Any]]


def _element_kernels(tokens: int, made: dict[str, Any]) -> Iterator[Kernel]:
    """Yield (kind, bytes per element, operands, call) of the kernels over the activations of a layer."""
    e, shape = DTYPES_BYTES[made["dtype"]], (_HIDDEN,)

    def several(count: int) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: tuple(torch.randn(tokens, _HIDDEN, **made) for _ in range(count))

    weight, bias = torch.ones(shape, **made), torch.zeros(shape, **made)
    norm, norm_back = torch.native_layer_norm, torch.ops.aten.native_layer_norm_backward
    gelu_back = torch.ops.aten.gelu_backward

    def normed() -> tuple[Tensor, ...]:
        x, dy, residual = several(3)()
        _, mean, rstd = norm(x, shape, weight, bias, 1e-5)
        return x, dy, residual, mean, rstd

    def norm_backward(x: Tensor, dy: Tensor, residual: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        dx, _, _ = norm_back(dy, x, shape, mean, rstd, weight, bias, [True, True, True])
        return residual + dx

    def activate(x: Tensor) -> Tensor:
        return F.gelu(x.copy_(bias.expand_as(x)), approximate="tanh")

    yield "copy", 2 * e, several(2), lambda x, y: x.copy_(y)
    yield "residual", 5 * e, several(2), lambda x, y: x.add_(bias) + y
    yield "norm", 2 * e, several(1), lambda x: norm(x, shape, weight, bias, 1e-5)
    yield "norm, backward", 6 * e, normed, norm_backward
    yield "activation", 4 * e, several(1), activate
    yield "activation, backward", 4 * e, several(2), lambda x, dy: gelu_back(dy, x, approximate="tanh").sum(0)


DTYPES_BYTES = {dtype: torch.empty(0, dtype=dtype).element_size() for dtype in DTYPES.values()}
"""Type -> bytes of an element."""


def _loss(device: torch.device, made: dict[str, Any], tokens: int, watch: Stopwatch) -> Iterator[tuple[str, Sample]]:
    """Yield the rates of the loss, and of the gradient of the embedding, whose cost is its table's."""
    group = single_process_groups(device=device).tp
    ids = torch.randint(0, _VOCABULARY, (tokens, 1), device=device)

    def loss_of(logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits, ids, group, vocab_size=_VOCABULARY)

    def logits() -> tuple[Tensor, ...]:
        return (torch.randn(tokens, 1, _VOCABULARY, **made, requires_grad=True),)

    def with_loss() -> tuple[Tensor, ...]:
        (x,) = logits()
        return x, loss_of(x).sum()

    count = tokens * _VOCABULARY
    yield "loss", watch.sample(in_turn(logits, loss_of)).inverted(LOSS_BYTES[0] * count)
    back = watch.sample(in_turn(with_loss, lambda x, loss: torch.autograd.grad(loss, x, retain_graph=True)))
    yield "loss, backward", back.inverted(LOSS_BYTES[1] * count)
    dense, total = torch.ops.aten.embedding_dense_backward, torch.zeros(_VOCABULARY, _HIDDEN, **made)
    call = in_turn(lambda: (torch.randn(tokens, 1, _HIDDEN, **made),),
                   lambda dy: total.add_(dense(dy, ids, _VOCABULARY, -1, False)))  # fmt: skip
    per_element = DTYPES_BYTES[made["dtype"]] + 8
    yield "embedding, gradient", watch.sample(call).inverted(per_element * tokens * _HIDDEN)


def _optimizer(device: torch.device, count: int, watch: Stopwatch) -> Sample:
    """Return the rate of an update of `count` fp32 parameters: their norm, clipping, AdamW."""
    weights, grads = ([torch.randn(count // 16, device=device) for _ in range(16)] for _ in range(2))
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    adamw = torch.optim.AdamW(weights, lr=1e-4, fused=True)

    def update() -> None:
        torch._foreach_norm(grads)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_mul_(grads, 0.999)  # pyright: ignore[reportPrivateImportUsage]
        adamw.step()

    return watch.sample(update).inverted(OPTIMIZER_BYTES_IN_PLACE * count)
