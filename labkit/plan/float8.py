"""Bytes that linear layers with fp8 operands hold, beyond those in 16 bits. No torch.

A product keeps its operands in one byte. Weights have an fp8 copy in addition to the 16-bit one, or instead of it if
the parameters themselves are fp8 (Megatron's --fp8-param-gather). Hopper multiplies fp8 matrices in one layout alone,
so there a weight has a transposed copy, too. The input of a linear layer is kept in fp8. So proj's is a copy of
attention's result, which a fused kernel keeps in 16 bits.

Routed experts are linear layers as well. Their rows are filled up to a multiple of 16 for each expert; with any number
of rows equally likely that is 7.5 on average. What the router reads stays in 16 bits, and so do the rows that travel.
Shared experts share this input: with scales of earlier steps they keep a copy of their own, otherwise they cast it
again. Megatron's two matrices that go down in multi-latent attention each keep a copy of their input.

labkit's own layers differ in two recipes. `blockwise` keeps inputs uncast and weights cast back, in float32. The first
step of `delayed` does not cast the rows of experts, so they count in full.

Source: layernorm_linear.py, grouped_linear.py, fp8_padding.py and base.py (`_fp8_workspaces`) in
transformer_engine/pytorch/module, and megatron/core/transformer/moe (experts.py, shared_experts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from labkit.config import RunConfig
from labkit.plan.activations import Share, is_one_kernel, layer_kept
from labkit.plan.device_libraries import Term
from labkit.plan.latent_attention import latent_matrices
from labkit.plan.sizes import gate_and_up
from labkit.plan.stage_activations import most_that_is_kept
from labkit.plan.stages import StageContents
from labkit.plan.state_tensors import layer_matrices
from labkit.plan.workload import Workload
from labkit.plan.zero_stages import ELEMENT_BYTES

PADDING_ROWS = (16 - 1) / 2
"""Rows of zeros of an expert, on average: products on fp8 tensor cores take a multiple of 16."""
_INPUTS = ("attention qkv input", "mlp fc1 input", "mlp fc2 input", "mlp shared experts fc2 input")
"""Names in `layer_saved` of inputs of linear layers that nothing else keeps."""
_EXPERT_INPUTS = ("mlp experts fc1 input", "mlp experts fc2 input")


def is_float8(config: RunConfig) -> bool:
    """Return True if linear layers take fp8 operands."""
    return config.optim.fp8 != "none"


def _are_own_layers(workload: Workload) -> bool:
    """Return True for labkit's layers, false for Transformer Engine's."""
    return not workload.libraries.megatron and workload.config.model.transformer_impl == "local"


def fp8_weights(workload: Workload, stages: Sequence[StageContents]) -> Term:
    """Return the fp8 weights on a rank beyond the 16-bit ones; negative if they replace them."""
    config, libraries, name = workload.config, workload.libraries, "fp8 weights"
    if not is_float8(config):
        return Term(name, 0, "none")
    copies = 1 if libraries.gpu == "b200" else 2
    if _are_own_layers(workload) and config.optim.fp8_recipe == "blockwise":
        copies = 4
    replaced = ELEMENT_BYTES[config.optim.precision] if libraries.float8_parameters else 0
    elements = sum(_matrices(workload, index) for holds in stages for index in holds.layers)
    if depths := workload.extras.depths * sum(holds.loss for holds in stages):
        joined = 2 * config.model.hidden**2 // config.parallel.tp
        elements += depths * (_matrices(workload, config.model.layers - 1) + joined)
    return Term(name, elements * (copies - replaced), f"{elements:,} elements of matrices x ({copies} - {replaced})")


def _matrices(workload: Workload, index: int) -> int:
    """Return the elements of a layer's matrices on one rank, but for the router's."""
    config, model, tp = workload.config, workload.config.model, workload.config.parallel.tp
    dense, expert = layer_matrices(config, index)
    elements = sum(dense) + sum(expert) * (config.moe.num_experts // config.parallel.ep)
    if expert:
        elements += model.hidden * (config.moe.shared_expert_ffn_hidden or 0) * (gate_and_up(model) + 1) // tp
    if workload.extras.latent and "*" in model.parts_of_layer(index):
        elements += sum(latent_matrices(model, workload.extras.latent, tp)) - sum(dense[:2])
    return elements


def saved_bytes(workload: Workload, config: RunConfig, share: Share, layers: Iterable[int]) -> int:
    """Return the bytes that layers keep of a microbatch beyond 16-bit ones; negative, because inputs are narrower.

    config: that of the workload, or with less recomputation.
    """
    recipe, own = config.optim.fp8_recipe, _are_own_layers(workload)
    if not is_float8(config) or config.model.recompute_granularity == "full" or (own and recipe == "blockwise"):
        return 0
    return sum(_of_layer(workload, config, share, index) for index in layers)


def _of_layer(workload: Workload, config: RunConfig, share: Share, index: int) -> int:
    model, moe, parts, e = config.model, config.moe, config.model.parts_of_layer(index), share.element_bytes
    own, delayed = _are_own_layers(workload), config.optim.fp8_recipe == "delayed"
    routed = most_that_is_kept(moe) if moe.is_moe_layer(index) and "-" in parts else None
    wide = layer_kept(model, share, routed, parts)
    casts_rows = routed is not None and not (own and delayed)
    kept, narrow = wide, _INPUTS
    if casts_rows:
        rows = share.expert_rows or share.tokens_between(model) * moe.top_k * share.etp
        padding = round(PADDING_ROWS * moe.num_experts / config.parallel.ep) if share.device == "cuda" else 0
        kept = layer_kept(model, replace(share, expert_rows=rows + padding), routed, parts)
        narrow += _EXPERT_INPUTS
    more = sum(kept.values()) - sum(wide.values()) - sum(kept.get(name, 0) for name in narrow) * (e - 1) // e
    if routed and wide.get("mlp shared experts fc2 input") and (own or delayed):
        more += share.tokens_between(model) * model.hidden
    return more + (_of_attention(workload, config, share, wide) if "*" in parts else 0)


def _of_attention(workload: Workload, config: RunConfig, share: Share, wide: dict[str, int]) -> int:
    """Return the bytes of proj's input, and of latents, beyond 16-bit ones."""
    model, latent, e = config.model, workload.extras.latent, share.element_bytes
    result = wide["attention proj input"] // e
    more = 0
    if latent:
        result = share.tokens(model) * (model.heads // share.tp) * latent.value_head
        inputs = (latent.query_rank or 0) + latent.rank
        if latent.query_rank:
            inputs -= model.hidden  # of the second copy of the matrices that go down
        more -= share.tokens_between(model) * inputs * (e - 1)
    return more + (result if is_one_kernel(model, share) else -result * (e - 1))
