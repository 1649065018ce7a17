"""The large tensors of a rank's state, in the order in which Megatron-LM allocates them. No torch.

Without sharding each weight is a tensor of its own, and so are its float32 master and its two moments; gradients are in
one buffer per stage. The distributed optimizer has a buffer for the weights, too, and a rank's masters and moments are
the pieces of the weights that its part of the buffer covers. Norms and biases are left out: they are small.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.mamba import mamba_sizes
from labkit.plan.sizes import expert_width, fc1_width, ffn_width, gate_and_up, padded_vocab, qkv_width
from labkit.plan.stages import StageContents
from labkit.plan.zero_stages import ELEMENT_BYTES

STATE_BYTES = 4
"""Bytes of a master's or moment's element."""


def state_tensors(config: RunConfig, stages: Sequence[StageContents], replicas: tuple[int, int]) -> tuple[int, ...]:
    """Return the bytes of the tensors in their order.

    replicas: ranks that hold the same dense weights, and those that hold the same experts.
    """
    width = ELEMENT_BYTES[config.optim.precision]
    gradient = width if config.optim.grad_reduce_in_bf16 else STATE_BYTES
    parts = [[part for part in _matrices(config, holds) if part] for holds in stages]
    if config.optim.distributed_optimizer:
        buffers = [sum(part) for each in parts for part in each]
        pieces = [
            piece
            for each in parts
            for part, ranks in zip(each, replicas, strict=False)
            for piece in _last_share(part, ranks // config.optim.num_distributed_optimizer_instances)
        ]
        weights = [size for buffer in buffers for size in (buffer * width, buffer * gradient)]
    else:
        pieces = [matrix for each in parts for part in each for matrix in part]
        weights = [piece * width for piece in pieces] + [sum(part) * gradient for each in parts for part in each]
    masters = [piece * STATE_BYTES for piece in pieces] if width < STATE_BYTES else []
    return (*weights, *masters, *(size for piece in pieces for size in [piece * STATE_BYTES] * 2))


def _last_share(matrices: Sequence[int], ranks: int) -> list[int]:
    """Return the pieces of the last of `ranks` equal parts of a buffer, which holds the matrices in reverse."""
    left, pieces = sum(matrices) // max(1, ranks), []
    for matrix in matrices:
        pieces.append(min(left, matrix))
        left -= pieces[-1]
    return [piece for piece in pieces if piece]


def second_moments(config: RunConfig, stages: Sequence[StageContents]) -> int:
    """Return the bytes of Adam's second moment of all matrices of layers, which Muon does without."""
    elements = 0
    for holds in stages:
        for index in holds.layers:
            dense, expert = layer_matrices(config, index)
            elements += sum(dense) + sum(expert) * (config.moe.num_experts // config.parallel.ep)
    return elements * STATE_BYTES


def _matrices(config: RunConfig, holds: StageContents) -> tuple[list[int], list[int]]:
    """Return the elements of a stage's dense matrices and of those of its experts, on one rank."""
    model, parallel = config.model, config.parallel
    table = padded_vocab(model, parallel.tp) // parallel.tp * model.hidden
    positions = [model.seq_length * model.hidden] if model.position == "learned" else []
    dense, experts = [table, *positions] if holds.embedding else [], []
    for index in holds.layers:
        of_layer, of_expert = layer_matrices(config, index)
        dense += of_layer
        experts += of_expert * (config.moe.num_experts // parallel.ep)
    tied = holds.embedding and not model.untie_embeddings_and_output_weights
    return dense + ([table] if holds.loss and not tied else []), experts


def layer_matrices(config: RunConfig, index: int) -> tuple[list[int], list[int]]:
    """Return the elements of a layer's dense matrices and of those of one of its experts, on one rank."""
    model, tp, parts = config.model, config.parallel.tp, config.model.parts_of_layer(index)
    dense = _attention(model, tp) if "*" in parts else []
    dense += _cross_attention(model, tp) if model.family == "t5" and index >= model.layers else []
    dense += _mamba(model, tp) if "M" in parts else []
    if "-" in parts and config.moe.is_moe_layer(index):
        return dense, _expert(model, config.moe, config.parallel.expert_tp)
    if "-" in parts:
        dense += [fc1_width(model) * model.hidden // tp, ffn_width(model) * model.hidden // tp]
    return dense, []


def _attention(model: ModelConfig, tp: int) -> list[int]:
    return [model.hidden * model.hidden // tp, qkv_width(model, tp) * model.hidden]


def _cross_attention(model: ModelConfig, tp: int) -> list[int]:
    return [model.hidden * model.hidden // tp] * 2 + [2 * model.hidden * model.hidden // tp]


def _mamba(model: ModelConfig, tp: int) -> list[int]:
    sizes = mamba_sizes(model, tp)
    return [sizes.groups * sizes.projected * model.hidden, sizes.groups * sizes.inner * model.hidden]


def _expert(model: ModelConfig, moe: MoEConfig, etp: int) -> list[int]:
    width = expert_width(model, moe) // etp
    return [gate_and_up(model) * width * model.hidden, width * model.hidden]
