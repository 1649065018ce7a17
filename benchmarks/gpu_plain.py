"""Parts of the GPU benchmark: a layer (row G1) and whole steps (row G2) beside plain torch, eager and compiled.

The plain model is `plain_gpt.py`, with the weights of ours. In the step it is trained as one writes it for one GPU:
float32 weights, autocast to bf16, torch's clipping and fused AdamW. Both sides check that the gradient is finite before
they update, and report the loss. So in every step the host reads two numbers of the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from gpu_peers import DEVICE, Row, Side, beside
from gpu_steps import GPT2, PLAIN, attention_backend, batches, layer_flops, our_run
from harness import Comparison
from plain_gpt import Block, PlainGPT
from torch import Tensor, nn

from labkit import plan
from labkit.config import ModelConfig, TrainConfig, presets
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.models.chunks import DTYPES
from labkit.parallel import single_process_groups
from labkit.plan.zero_stages import bytes_per_parameter
from labkit.train.stepping import train_step

LAYER = ModelConfig(layers=1, hidden=4096, heads=32, seq_length=2048, **PLAIN)
STACK = replace(presets.table1("1.2B").model, **PLAIN)
LAYER_TOLERANCE = 0.03
"""Of outputs and gradients in bf16 whose sums run in another order."""
LOSS_TOLERANCE = 0.01
"""Of the loss after a few optimizer steps; the plain model's padded columns, 47 of 50,304, are in its loss."""
LR = 1e-4
Ranges = Callable[..., AbstractContextManager[Any]]
"""`ranges(name, log_level=1)` surrounds a phase of a step."""


def no_ranges(name: str, log_level: int = 1) -> AbstractContextManager[Any]:
    """Marks nothing."""
    return nullcontext()


# ---- the same weights ----


@torch.no_grad()
def as_plain(layer: TransformerLayer, block: Block) -> Block:
    """The plain block with the weights of ours. Rows of qkv are by head in ours (q, k, v of head 0, ..), and all q, all
    k, all v in the plain block."""
    attention, mlp = layer.attention, layer.mlp

    def by_kind(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (block.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    pairs: list[tuple[Any, Any]] = [
        (block.norm_1, attention.norm), (block.qkv, attention.qkv), (block.proj, attention.proj),
        (block.norm_2, mlp.norm), (block.fc1, mlp.fc1), (block.fc2, mlp.fc2),
    ]  # fmt: skip
    for plain, ours in pairs:
        for name, parameter in plain.named_parameters():
            value = getattr(ours, name)
            parameter.copy_(by_kind(value) if plain is block.qkv else value)
    return block


@torch.no_grad()
def plain_model(model: ModelConfig, device: torch.device) -> PlainGPT:
    """The plain GPT in float32 with the initial weights of ours."""
    from labkit.models import GPTModel

    ours = GPTModel(model, single_process_groups(device=device), layers=range(model.layers), seed=TrainConfig().seed)
    assert ours.embedding is not None and ours.embedding.position is not None and ours.final_norm is not None
    plain = PlainGPT(model).to(device)
    plain.word.weight.copy_(ours.embedding.word.weight)
    plain.position.weight.copy_(ours.embedding.position.weight)
    plain.norm.load_state_dict(ours.final_norm.state_dict())
    for block, layer in zip(plain.blocks, ours.layers.values(), strict=True):
        as_plain(layer, block)  # pyright: ignore[reportArgumentType]
    return plain


# ---- one layer ----


def our_layers(config: ModelConfig, device: torch.device, dtype: torch.dtype, **parts: Any) -> list[TransformerLayer]:
    """`config.layers` layers of ours, always with the same weights. parts: other arguments of their `Build`."""
    groups = single_process_groups(device=device)
    build = Build(config=config, group=groups.tp, seed=1, dtype=dtype, device=device, **parts)
    return [TransformerLayer(index, build) for index in range(config.layers)]


def plain_blocks(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    """The same as plain blocks, for [B, S, H]."""
    ours = our_layers(config, device, dtype)
    return nn.Sequential(*(as_plain(layer, Block(config).to(device, dtype)) for layer in ours))


def random_pair(config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Input and output gradient, [S, B, H], the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (config.seq_length, batch, config.hidden)
    x, grad = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2))
    return x, grad


def stack_side(
    run: Callable[[Tensor], Tensor],
    last: Any,
    x: Tensor,
    grad: Tensor,
    weights: Sequence[nn.Module],
    *,
    batch_first: bool = False,
    after: Callable[[], None] = lambda: None,
) -> Side:
    """Forward and backward of `run`; results are output, input gradient and weight gradients of the MLP in `last`.

    weights: the modules whose gradients are dropped before each step.
    batch_first: x and grad are [B, S, H] instead of [S, B, H]; results are [S, B, H] either way.
    after: called after each backward.
    """
    x = x.detach().requires_grad_()
    output: list[Tensor] = []

    def drop() -> None:
        x.grad = None
        output.clear()
        for module in weights:
            module.zero_grad(set_to_none=True)

    def forward() -> None:
        output.append(run(x))

    def backward() -> None:
        output[0].backward(grad)
        output[0] = output[0].detach()
        after()

    def step() -> None:
        drop()
        forward()
        backward()

    def results() -> dict[str, Tensor]:
        assert x.grad is not None
        found = {"output": output[0], "input_gradient": x.grad}
        found = {key: value.transpose(0, 1) if batch_first else value for key, value in found.items()}
        return found | {"fc1_gradient": last.fc1.weight.grad, "fc2_gradient": last.fc2.weight.grad}

    return Side(step, results, (drop, forward, backward))


def our_layer_side(config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype) -> Side:
    """One layer of ours."""
    [layer] = our_layers(config, device, dtype)
    return stack_side(layer, layer.mlp, *random_pair(config, batch, device, dtype), [layer])


def plain_layer_side(config: ModelConfig, batch: int, device: torch.device, dtype: torch.dtype, wrap: Any) -> Side:
    """The plain block, called through `wrap(block)`."""
    [block] = plain_blocks(config, device, dtype)
    x, grad = (t.transpose(0, 1).contiguous() for t in random_pair(config, batch, device, dtype))
    return stack_side(wrap(block), block, x, grad, [block], batch_first=True)


def layer(
    config: ModelConfig = LAYER,
    batch: int = 8,
    *,
    device: torch.device = DEVICE,
    dtype: torch.dtype = torch.bfloat16,
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """G1 beside its peers: forward and backward of one transformer layer."""
    sizes = (config, batch, device, dtype)
    builds = {
        "labkit": lambda: our_layer_side(*sizes),
        "plain, eager": lambda: plain_layer_side(*sizes, lambda block: block),
        "plain, compiled": lambda: plain_layer_side(*sizes, lambda block: torch.compile(block, fullgraph=True)),
    }
    case = f"G1: layer h{config.hidden} s{config.seq_length} b{batch} beside plain torch, forward and backward"
    yield from beside(
        case, builds, device=device, tolerance=LAYER_TOLERANCE, repetitions=repetitions,
        flops=layer_flops(config, batch), facts={"attention_backend": attention_backend(*sizes)},
    )  # fmt: skip


# ---- the whole step ----


@dataclass
class Training:
    """A model that is trained: `step(ranges)` does one step and returns the loss as a number."""

    step: Callable[[Ranges], float]

    def side(self) -> Side:
        """Its step without ranges; the result is the last loss."""
        last: list[float] = []

        def step() -> None:
            last[:] = [self.step(no_ranges)]

        return Side(step, lambda: {"loss": torch.tensor(last)})


class Marked:
    """An optimizer whose update is a range of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.ranges = optimizer, no_ranges

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update."""
        with self.ranges("update"):
            self.optimizer.step(lr, factor)


def our_training(model: ModelConfig, micro_batch: int, *, device: torch.device, precision: str) -> Training:
    """Ours: weights of `precision` with float32 masters."""
    pipeline, optimizer, data = our_run(model, micro_batch, device, precision=precision)
    marked: Any = Marked(optimizer)

    def step(ranges: Ranges) -> float:
        marked.ranges = ranges
        timers: Any = SimpleNamespace(phase=ranges)
        return train_step(pipeline, marked, timers, data, step=0, lr=LR, clip_grad=1.0).loss

    return Training(step)


def plain_training(
    model: ModelConfig, micro_batch: int, *, device: torch.device, precision: str, wrap: Any = lambda model: model
) -> Training:
    """The plain model, called through `wrap(model)`."""
    plain = plain_model(model, device)
    run, optim = wrap(plain), presets.gpt2_124m().optim
    made: dict[str, Any] = {"eps": optim.eps, "weight_decay": optim.weight_decay, "fused": True}
    adam = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(optim.beta1, optim.beta2), **made)
    data = batches(model, micro_batch, device)

    def step(ranges: Ranges) -> float:
        batch = next(data)
        with ranges("forward-backward"):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = run(batch["tokens_BS"], batch["labels_BS"])
            loss.backward()
        with ranges("finalize-grads"):
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, error_if_nonfinite=True)
        with ranges("update"):
            adam.step()
            adam.zero_grad(set_to_none=True)
        return loss.item()

    return Training(step)


def whole_step(
    case: str,
    model: ModelConfig,
    micro_batch: int,
    peers: dict[str, Any],
    *,
    device: torch.device,
    precision: str,
    repetitions: int,
    **facts: Any,
) -> Iterator[Comparison | Row]:
    """A whole training step of ours beside the plain model, called through each of `peers`."""
    made: dict[str, Any] = {"device": device, "precision": precision}
    builds = {"labkit": lambda: our_training(model, micro_batch, **made).side()}
    builds |= {
        name: lambda wrap=wrap: plain_training(model, micro_batch, **made, wrap=wrap).side()
        for name, wrap in peers.items()
    }
    sizes = f"{model.layers} layers h{model.hidden} s{model.seq_length} b{micro_batch}"
    facts["attention_backend"] = attention_backend(model, micro_batch, device, DTYPES[precision])
    yield from beside(
        f"G2: {case}, {sizes}, whole step", builds, device=device, tolerance=LOSS_TOLERANCE, repetitions=repetitions,
        flops=plan.step_flops(model, samples=micro_batch).total, facts=facts,
    )  # fmt: skip


def gpt2(
    model: ModelConfig = GPT2,
    micro_batch: int = 16,
    *,
    device: torch.device = DEVICE,
    precision: str = "bf16",
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """G2 beside its peers: a whole training step of GPT-2 124M."""
    peers = {"plain, eager": lambda plain: plain, "plain, compiled": lambda plain: torch.compile(plain, fullgraph=True)}
    made: dict[str, Any] = {"device": device, "precision": precision, "repetitions": repetitions}
    yield from whole_step("GPT beside plain torch", model, micro_batch, peers, **made)


def stack(
    model: ModelConfig = STACK,
    micro_batch: int = 8,
    *,
    device: torch.device = DEVICE,
    precision: str = "bf16",
    repetitions: int = 15,
) -> Iterator[Comparison | Row]:
    """G2: the paper's 1.2B model (40 layers, hidden 1536), the whole step at its batch of 8."""
    parameters = plan.stage_parameters(model, layers=model.layers)
    state = parameters * float(bytes_per_parameter(param_dtype=precision, stage=0).total)
    facts: Row = {"parameters": parameters, "state_gib": round(state / 2**30, 2)}
    made: dict[str, Any] = {"device": device, "precision": precision, "repetitions": repetitions}
    yield from whole_step("1.2B", model, micro_batch, {}, **made, **facts)
