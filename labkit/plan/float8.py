"""Bytes that linear layers with fp8 operands hold in Transformer Engine, beyond those in 16 bits. No torch.

A product keeps its operands in one byte. Weights have an fp8 copy in addition to the 16-bit one, or instead of it if
the parameters themselves are fp8 (Megatron's --fp8-param-gather). Hopper multiplies fp8 matrices in one layout alone,
so there a weight has a transposed copy, too. The input of a linear layer is kept in fp8. So proj's is a copy of
attention's result, which attention keeps in 16 bits.

Source: transformer_engine/pytorch/module/layernorm_linear.py and base.py (`_fp8_workspaces`).
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import ModelConfig, RunConfig
from labkit.plan.activations import Share
from labkit.plan.device_libraries import Term
from labkit.plan.parameters import attention_parameters, mlp_parameters
from labkit.plan.sizes import ffn_width
from labkit.plan.stages import StageContents
from labkit.plan.workload import Libraries
from labkit.plan.zero_stages import ELEMENT_BYTES


def is_float8(config: RunConfig) -> bool:
    """Return True if linear layers take fp8 operands."""
    return config.optim.fp8 != "none"


def fp8_weights(config: RunConfig, libraries: Libraries, stages: Sequence[StageContents]) -> Term:
    """Return the fp8 weights on a rank beyond the 16-bit ones; negative if they replace them."""
    name = "fp8 weights"
    if not is_float8(config):
        return Term(name, 0, "none")
    model, tp = config.model, config.parallel.tp
    biases = model.bias * (4 * model.hidden)  # at most; small beside the matrices
    layer = attention_parameters(model, tp) + mlp_parameters(model, tp) - biases
    copies = 1 if libraries.gpu == "b200" else 2
    replaced = ELEMENT_BYTES[config.optim.precision] if libraries.float8_parameters else 0
    layers = sum(len(holds.layers) for holds in stages)
    formula = f"{layers} layers x {layer:,} parameters x ({copies} - {replaced}) bytes"
    return Term(name, layers * layer * (copies - replaced), formula)


def saved_bytes(config: RunConfig, share: Share, layers: range) -> int:
    """Return the bytes that layers keep of a microbatch beyond 16-bit ones; negative, because inputs are narrower."""
    model: ModelConfig = config.model
    if not is_float8(config) or model.recompute_granularity == "full":
        return 0
    inside, outside, narrower = share.tokens(model), share.tokens_between(model), share.element_bytes - 1
    inputs = 2 * outside * model.hidden + inside * ffn_width(model) // share.tp
    return len(layers) * (inside * model.hidden // share.tp - inputs * narrower)
