"""Parameters of a model in closed form: of a layer, of a stage on one rank, of the whole model. No torch.

Tests compare them with those of the built model in every layout. The layers of a T5 are numbered through its encoder
and its decoder. A layer with experts has E of them, and a rank has E / ep.

S is the sequence, B the samples, H the hidden size, F ffn_hidden, V the vocabulary, L the number of layers, and D =
H / heads. t is the tensor-parallel size, E the number of experts, k how many a token uses, G the width of an expert.
"""

from __future__ import annotations

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.mamba import mamba_parameters
from labkit.plan.sizes import (
    DENSE,
    NUM_TOKENTYPES,
    all_layers,
    expert_width,
    fc1_width,
    ffn_width,
    gate_and_up,
    layer_indices,
    moe_layers,
    padded_vocab,
    qkv_width,
)
from labkit.plan.stages import configured_schedule, stage_contents
from labkit.schedules import Schedule


def norm_parameters(model: ModelConfig) -> int:
    """Return the parameters of one norm: a weight per feature, and for LayerNorm also a bias."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def attention_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Return the parameters of qkv and proj on one rank: t divides qkv's weight and bias, and proj's weight."""
    h = model.hidden
    return qkv_width(model, tp) * (h + model.bias) + h * h // tp + h * model.bias


def mlp_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Return the parameters of fc1 and fc2 on one rank."""
    h = model.hidden
    return (fc1_width(model) * (h + model.bias) + ffn_width(model) * h) // tp + h * model.bias


def expert_parameters(model: ModelConfig, moe: MoEConfig) -> int:
    """Return the parameters of one expert: H G (gate_and_up + 1)."""
    return model.hidden * expert_width(model, moe) * (gate_and_up(model) + 1)


def moe_parameters(model: ModelConfig, moe: MoEConfig, *, tp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """Return the parameters of router, experts and shared experts of one layer on one rank.

    Every rank has the router (H E) and the shared gate (H) whole. It has E / ep experts, which etp cuts, and its part
    of the shared experts, which t cuts.
    """
    shared = model.hidden * (moe.shared_expert_ffn_hidden or 0) * (gate_and_up(model) + 1) // tp
    gate = model.hidden if moe.shared_expert_gate else 0
    experts = moe.num_experts // ep * expert_parameters(model, moe) // etp
    return model.hidden * moe.num_experts + experts + shared + gate


def layer_parameters(
    model: ModelConfig, tp: int = 1, *, moe: MoEConfig = DENSE, index: int = 0, ep: int = 1, etp: int = 1
) -> int:
    """Return the parameters of layer `index` on one rank; each rank has all norms whole, one per part of the layer.

    A decoder layer of a T5 has a second attention, with its norm.
    """

    def of_part(part: str) -> int:
        if part == "-" and moe.is_moe_layer(index):
            return moe_parameters(model, moe, tp=tp, ep=ep, etp=etp)
        return {"M": mamba_parameters, "*": attention_parameters, "-": mlp_parameters}[part](model, tp)

    parts = model.parts_of_layer(index) + ("*" if model.family == "t5" and index >= model.layers else "")
    return sum(of_part(part) + norm_parameters(model) for part in parts)


def half_parameters(model: ModelConfig, indices: range, tp: int = 1) -> int:
    """Return the parameters on one rank that a T5's halves have in addition to their layers `indices`.

    They are the relative biases, and the norm at the end of the encoder.
    """
    if model.family != "t5" or not indices:
        return 0
    halves = (indices.start < model.layers) + (indices.stop > model.layers)
    biases = halves * model.relative_buckets * model.heads // tp if model.position == "relative" else 0
    return biases + (norm_parameters(model) if model.layers - 1 in indices else 0)


def has_output_bias(model: ModelConfig) -> bool:
    """Return True if the output layer adds a bias to each word's logit."""
    return model.family == "bert" or (model.family == "t5" and model.bias)


def first_parameters(model: ModelConfig) -> int:
    """Return the parameters before the first layer except the words: positions, token types, layout `post`'s norm."""
    total = model.seq_length * model.hidden if model.position == "learned" else 0
    if model.family == "bert" and model.bert_binary_head:
        total += NUM_TOKENTYPES * model.hidden
    return total + (norm_parameters(model) if model.norm_placement == "post" else 0)


def last_parameters(model: ModelConfig) -> int:
    """Return the parameters after the last layer that a rank has whole: final norm, dense layers of BERT's heads."""
    total = norm_parameters(model) if model.norm_placement == "pre" else 0
    if model.family != "bert":
        return total
    dense = model.hidden * (model.hidden + 1)
    order = dense + 2 * (model.hidden + 1) if model.bert_binary_head else 0
    return total + dense + norm_parameters(model) + order


def stage_parameters(
    model: ModelConfig,
    *,
    layers: int | range,
    pre_process: bool = True,
    post_process: bool = True,
    tp: int = 1,
    moe: MoEConfig = DENSE,
    ep: int = 1,
    etp: int = 1,
) -> int:
    """Return the parameters of one model chunk on one rank, with padding, as in `GPTModel(...).parameters()`.

    `layers` are indices in the model, or how many layers from the first. A last stage that is not also the first has an
    output weight of its own: either untied, or the second copy of the tied weight.
    """
    table = padded_vocab(model, tp) // tp * model.hidden
    indices = layer_indices(model, layers)
    total = sum(layer_parameters(model, tp, moe=moe, index=index, ep=ep, etp=etp) for index in indices)
    total += half_parameters(model, indices, tp)
    if pre_process:
        total += table + first_parameters(model)
    if post_process:
        total += last_parameters(model) + (padded_vocab(model, tp) // tp if has_output_bias(model) else 0)
        if not pre_process or model.untie_embeddings_and_output_weights:
            total += table
    return total


def model_parameters(model: ModelConfig, moe: MoEConfig = DENSE) -> int:
    """Return the parameters of the whole model without padding, tied weights once: the number in a model's name."""
    unpadded = model.vocab_size * model.hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    unpadded += model.vocab_size if has_output_bias(model) else 0
    indices = range(all_layers(model))
    layers = sum(layer_parameters(model, moe=moe, index=index) for index in indices) + half_parameters(model, indices)
    return unpadded + first_parameters(model) + layers + last_parameters(model)


def active_parameters(model: ModelConfig, moe: MoEConfig = DENSE) -> int:
    """Return the parameters that one token uses: k experts of each MoE layer, and everything outside experts."""
    idle = (moe.num_experts - moe.top_k) * moe_layers(model, moe)
    return model_parameters(model, moe) - idle * expert_parameters(model, moe)


def rank_parameters(config: RunConfig, *, pp_rank: int = 0, schedule: Schedule | None = None) -> int:
    """Return the parameters of all chunks of pipeline rank `pp_rank` under `schedule`, by default the configured one.

    A rank with both the first and the last stage has the tied weight only once.
    """
    parallel, model = config.parallel, config.model
    if schedule is None:
        schedule = configured_schedule(config)
    contents = stage_contents(config, schedule.num_stages)
    held = [contents[stage] for stage in schedule.stages_of(pp_rank)]
    total = sum(
        stage_parameters(
            model,
            layers=stage.layers,
            pre_process=stage.embedding,
            post_process=stage.loss,
            tp=parallel.tp,
            moe=config.moe,
            ep=parallel.ep,
            etp=parallel.tp if parallel.etp is None else parallel.etp,
        )
        for stage in held
    )
    in_one_chunk = any(stage.embedding and stage.loss for stage in held)
    both_ends = any(stage.embedding for stage in held) and any(stage.loss for stage in held)
    if both_ends and not in_one_chunk and not model.untie_embeddings_and_output_weights:
        total -= padded_vocab(model, parallel.tp) // parallel.tp * model.hidden
    return total
