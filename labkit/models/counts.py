"""The layers of each stage, and the cost of a model in closed form: parameters, operations, bytes. No torch.

The schedule places a stage on a rank (`Schedule.placement`). The number of a stage alone decides its layers, so any
placement trains the same model.

Each cost equals a measured one. Tests compare parameters with the built model's in every layout, operations with
torch's counter and messages with the ledger. `activation_bytes.py` has the saved activations.

In a layer with experts, the router chooses k experts for each token. k is fixed, so operations and the sum of messages
are known before routing, unless a capacity drops or pads tokens.

The layers of a T5 count through its encoder and its decoder.

Notation: S sequence, B samples, H hidden, F ffn_hidden, V vocabulary, L layers, D = H / heads. t is the tensor-parallel
size, E the number of experts, k those for a token, G the width of an expert. An operation is one addition or one
multiplication, so a GEMM [m, k] x [k, n] has 2 m k n.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.config.pipeline_layout import parse_layout
from labkit.models.mamba.mamba_costs import mamba_linear_flops, mamba_parameters, scan_flops
from labkit.schedules import Schedule, build_schedule
from labkit.schedules.simulator import kept_whole

DENSE = MoEConfig()
"""No layer has experts."""
NUM_TOKENTYPES = 2
"""Token types of a BERT with the sentence-order head: tokens of the first sentence, tokens of the second."""


# ---- stages ----


@dataclass(frozen=True, slots=True)
class StageContents:
    """The parts of the model on one stage."""

    layers: range
    """Global indices of its transformer layers; empty for a stage without layers."""
    embedding: bool
    """True on the stage that embeds tokens (the first; of an encoder-decoder also the decoder's first)."""
    loss: bool
    """True on the stage with the final norm, the output layer and the loss (the last)."""


def stage_contents(config: RunConfig, num_stages: int) -> list[StageContents]:
    """Return the contents of every stage: as `parallel.pipeline_layout` says, else equal shares of the layers.

    The stages before `parallel.split_rank` share the layers of an encoder, the others those of its decoder.

    Raises:
        ValueError: the stages do not divide the layers, or `pipeline_layout` has other numbers of stages or layers.
    """
    layers, parallel = config.model.layers, config.parallel
    if config.model.has_two_halves:
        return _halves(config.model, num_stages, parallel.split_rank)
    if parallel.pipeline_layout is not None:
        return _from_text(parallel.pipeline_layout, layers, num_stages)
    standalone = parallel.standalone_embedding_stage
    return [
        StageContents(_equal_share(layers, stage, num_stages, standalone), stage == 0, stage == num_stages - 1)
        for stage in range(num_stages)
    ]


def _from_text(text: str, num_layers: int, num_stages: int) -> list[StageContents]:
    stages = parse_layout(text)
    held = sum(stage.count("t") for stage in stages)
    if len(stages) != num_stages or held != num_layers:
        raise ValueError(
            f"parallel.pipeline_layout {text!r} has {len(stages)} stages and {held} layers; "
            f"the schedule has {num_stages} stages and the model {num_layers} layers"
        )
    contents, first = [], 0
    for stage in stages:
        size = stage.count("t")
        contents.append(StageContents(range(first, first + size), "E" in stage, "L" in stage))
        first += size
    return contents


def _halves(model: ModelConfig, num_stages: int, split: int | None) -> list[StageContents]:
    """Stages before `split` hold equal shares of the encoder, the others of the decoder; a lone stage holds both."""
    if num_stages == 1:
        return [StageContents(range(all_layers(model)), embedding=True, loss=True)]
    if split is None or not 0 < split < num_stages:
        raise ValueError(
            f"an encoder-decoder on {num_stages} stages needs parallel.split_rank from 1 to {num_stages - 1}, the "
            f"decoder's first stage; it is {split}"
        )
    first, depth, decoders = model.layers, decoder_layers(model), num_stages - split
    encoder = [_equal_share(first, stage, split, False) for stage in range(split)]
    decoder = [_equal_share(depth, stage, decoders, False) for stage in range(decoders)]
    held = [*encoder, *(range(first + each.start, first + each.stop) for each in decoder)]
    return [StageContents(each, stage in (0, split), stage == num_stages - 1) for stage, each in enumerate(held)]


def _equal_share(num_layers: int, stage: int, num_stages: int, standalone_embedding_stage: bool) -> range:
    """Layers s L / S to (s + 1) L / S of stage s of S. A standalone embedding stage has none and is not counted."""
    if standalone_embedding_stage:
        if num_stages == 1:
            raise ValueError("standalone_embedding_stage needs a second stage for the layers; set pp to 2 or more")
        if stage == 0:
            return range(0)
        stage, num_stages = stage - 1, num_stages - 1
    if num_layers % num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be shared evenly by {num_stages} stages; take a multiple of {num_stages} "
            "layers, or set parallel.pipeline_layout, which gives the layers of every stage"
        )
    size = num_layers // num_stages
    return range(stage * size, (stage + 1) * size)


def stage_layers(
    num_layers: int,
    *,
    pp: int,
    pp_rank: int,
    vpp: int = 1,
    chunk: int = 0,
    standalone_embedding_stage: bool = False,
) -> range:
    """Return the global indices of the layers of chunk `chunk` on pipeline rank `pp_rank` under looped placement.

    Chunk v of rank r is stage v P + r. Its equal share starts at layer v (L / V) + r L / (P V). So a microbatch meets
    the layers in order when it visits all ranks for chunk 0, then all ranks for chunk 1, and so on.

    Raises:
        ValueError: the stages do not divide the layers, or the rank or the chunk does not exist.
    """
    if not 0 <= pp_rank < pp or not 0 <= chunk < vpp:
        raise ValueError(
            f"pipeline rank {pp_rank} of {pp} and chunk {chunk} of {vpp} do not exist; ranks and chunks count from 0"
        )
    return _equal_share(num_layers, chunk * pp + pp_rank, pp * vpp, standalone_embedding_stage)


# ---- widths ----


def decoder_layers(model: ModelConfig) -> int:
    """Layers of the decoder behind an encoder; 0 without one."""
    return (model.decoder_layers or model.layers) if model.has_two_halves else 0


def decoder_length(model: ModelConfig) -> int:
    """Tokens that the decoder behind an encoder reads; 0 without one."""
    return (model.decoder_seq_length or model.seq_length) if model.has_two_halves else 0


def all_layers(model: ModelConfig) -> int:
    """Layers of the whole model, both halves of a T5 together."""
    return model.layers + decoder_layers(model)


def kv_width(model: ModelConfig, tp: int = 1) -> int:
    """Columns of the keys (or of the values) on one rank: kv_heads x D / t, but at least D, one head."""
    return max(1, (model.kv_heads or model.heads) // tp) * (model.hidden // model.heads)


def qkv_width(model: ModelConfig, tp: int = 1) -> int:
    """Columns of queries, keys and values on one rank."""
    return model.hidden // tp + 2 * kv_width(model, tp)


def ffn_width(model: ModelConfig) -> int:
    """F, the width inside the MLP; 4H by default."""
    return model.ffn_hidden or 4 * model.hidden


def fc1_width(model: ModelConfig) -> int:
    """Columns of the first matrix of the MLP: F, or 2F with the gate of SwiGLU."""
    return ffn_width(model) * gate_and_up(model)


def gate_and_up(model: ModelConfig) -> int:
    """2 for SwiGLU and GeGLU, whose gate doubles the columns of the first matrix of an MLP or expert; else 1."""
    return 2 if model.activation in ("swiglu", "geglu") else 1


def expert_width(model: ModelConfig, moe: MoEConfig) -> int:
    """G, the width inside an expert; F by default."""
    return moe.ffn_hidden or ffn_width(model)


def moe_layers(model: ModelConfig, moe: MoEConfig, layers: int | range | None = None) -> int:
    """Number of layers with experts among `layers`: a range of indices, the first so many, or all (None)."""
    return sum(map(moe.is_moe_layer, _indices(model, layers)))


def _indices(model: ModelConfig, layers: int | range | None) -> range:
    if isinstance(layers, range):
        return layers
    return range(all_layers(model) if layers is None else layers)


def padded_vocab(model: ModelConfig, tp: int = 1) -> int:
    """Rows of the vocabulary tables, all ranks together: V up to the next multiple of divisible_by x t."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple


# ---- parameters ----


def norm_parameters(model: ModelConfig) -> int:
    """Parameters of one norm: a weight per feature, and a bias for LayerNorm."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def attention_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of qkv and proj on one rank: qkv (column-parallel) divides weight and bias by t, proj the weight."""
    h = model.hidden
    return qkv_width(model, tp) * (h + model.bias) + h * h // tp + h * model.bias


def mlp_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Parameters of fc1 and fc2 on one rank."""
    h = model.hidden
    return (fc1_width(model) * (h + model.bias) + ffn_width(model) * h) // tp + h * model.bias


def expert_parameters(model: ModelConfig, moe: MoEConfig) -> int:
    """Parameters of one expert: H G (gate_and_up + 1)."""
    return model.hidden * expert_width(model, moe) * (gate_and_up(model) + 1)


def moe_parameters(model: ModelConfig, moe: MoEConfig, *, tp: int = 1, ep: int = 1, etp: int = 1) -> int:
    """Parameters of router, experts and shared experts of one layer on one rank.

    Router (H E) and shared gate (H) are whole. A rank has E / ep experts cut over etp, and shared experts cut over t.
    """
    shared = model.hidden * (moe.shared_expert_ffn_hidden or 0) * (gate_and_up(model) + 1) // tp
    gate = model.hidden if moe.shared_expert_gate else 0
    experts = moe.num_experts // ep * expert_parameters(model, moe) // etp
    return model.hidden * moe.num_experts + experts + shared + gate


def layer_parameters(
    model: ModelConfig, tp: int = 1, *, moe: MoEConfig = DENSE, index: int = 0, ep: int = 1, etp: int = 1
) -> int:
    """Parameters of layer `index` on one rank; each rank has the whole norms, one for each part of the layer.

    A decoder layer of a T5 has a second attention, with its norm.
    """

    def of_part(part: str) -> int:
        if part == "-" and moe.is_moe_layer(index):
            return moe_parameters(model, moe, tp=tp, ep=ep, etp=etp)
        return {"M": mamba_parameters, "*": attention_parameters, "-": mlp_parameters}[part](model, tp)

    parts = model.parts_of_layer(index) + ("*" if model.family == "t5" and index >= model.layers else "")
    return sum(of_part(part) + norm_parameters(model) for part in parts)


def half_parameters(model: ModelConfig, indices: range, tp: int = 1) -> int:
    """Parameters of a T5's halves beside their layers `indices`, on one rank: relative biases, the encoder's norm."""
    if model.family != "t5" or not indices:
        return 0
    halves = (indices.start < model.layers) + (indices.stop > model.layers)
    biases = halves * model.relative_buckets * model.heads // tp if model.position == "relative" else 0
    return biases + (norm_parameters(model) if model.layers - 1 in indices else 0)


def has_output_bias(model: ModelConfig) -> bool:
    """True where the output layer adds a bias to each word's logit."""
    return model.family == "bert" or (model.family == "t5" and model.bias)


def first_parameters(model: ModelConfig) -> int:
    """Parameters before the first layer beside the words: positions, token types, the norm of BERT's layout `post`."""
    total = model.seq_length * model.hidden if model.position == "learned" else 0
    if model.family == "bert" and model.bert_binary_head:
        total += NUM_TOKENTYPES * model.hidden
    return total + (norm_parameters(model) if model.norm_placement == "post" else 0)


def last_parameters(model: ModelConfig) -> int:
    """Parameters behind the last layer that every rank holds whole: final norm, dense layers of BERT's heads."""
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
    """Parameters of one model chunk on one rank, padding included, as in `GPTModel(...).parameters()`.

    `layers` are indices in the model, or the number of first layers. A last stage that is not also the first has an
    output weight of its own: untied, or the second copy of the tied weight.
    """
    table = padded_vocab(model, tp) // tp * model.hidden
    indices = _indices(model, layers)
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
    """Parameters of the whole model without padding, tied weights counted once: the number in a model's name."""
    unpadded = model.vocab_size * model.hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    unpadded += model.vocab_size if has_output_bias(model) else 0
    indices = range(all_layers(model))
    layers = sum(layer_parameters(model, moe=moe, index=index) for index in indices) + half_parameters(model, indices)
    return unpadded + first_parameters(model) + layers + last_parameters(model)


def active_parameters(model: ModelConfig, moe: MoEConfig = DENSE) -> int:
    """Parameters that work for one token: k experts of each layer with experts, and all that belongs to no expert."""
    idle = (moe.num_experts - moe.top_k) * moe_layers(model, moe)
    return model_parameters(model, moe) - idle * expert_parameters(model, moe)


def rank_parameters(config: RunConfig, *, pp_rank: int = 0, schedule: Schedule | None = None) -> int:
    """Parameters of all chunks of pipeline rank `pp_rank` under `schedule`; None takes the configured schedule.

    A rank with both the first and the last stage has the tied weight once.
    """
    parallel, model = config.parallel, config.model
    if schedule is None:
        schedule = _configured_schedule(config)
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


def _configured_schedule(config: RunConfig) -> Schedule:
    """On as few ranks as the layout needs."""
    parallel = config.parallel
    microbatches = config.num_microbatches(parallel.smallest_world_size)
    return build_schedule(config.schedule, pp=parallel.pp, vpp=parallel.vpp, microbatches=microbatches)


# ---- operations ----


@dataclass(frozen=True)
class Flops:
    """Operations of the GEMMs of a pass. Norms, activations and softmax are not counted, as in arXiv 2104.04473."""

    linear: int
    """GEMMs with the weights that all tokens meet: attention, MLP, router and shared experts."""
    attention: int
    """The two products q k^T and probabilities x v, and the products of Mamba's scans."""
    logits: int
    """The GEMM of the output layer, and those of BERT's heads."""
    experts: int = 0
    """GEMMs of the routed experts, k for each token."""

    @property
    def total(self) -> int:
        """Sum of all four."""
        return self.linear + self.attention + self.logits + self.experts

    def times(self, factor: int) -> Flops:
        """Operations of `factor` such passes."""
        return Flops(self.linear * factor, self.attention * factor, self.logits * factor, self.experts * factor)


def forward_flops(
    model: ModelConfig,
    *,
    samples: int = 1,
    causal: bool = False,
    layers: int | range | None = None,
    logits: bool = True,
    moe: MoEConfig = DENSE,
) -> Flops:
    """Operations of one forward pass of `samples` whole sequences.

    Args:
        model: shape of the model.
        samples: number of sequences.
        causal: count only the S (S + 1) / 2 pairs a head that a causal mask leaves. False counts all S^2, as arXiv
            2104.04473 and torch's counter do.
        layers: indices of the layers to count, or the number of first layers; None counts all.
        logits: count the output layer too, without the columns of padding, and the heads of a BERT.
        moe: the experts. Every token meets k of them; a capacity that drops or pads is not considered.

    Only the decoder of a T5 is causal. Its logits are of the decoder's tokens.
    """
    if model.family == "t5":
        return _t5_forward_flops(model, samples, causal, _indices(model, layers), logits)
    tokens, h = samples * model.seq_length, model.hidden
    parts = "".join(model.parts_of_layer(index) for index in _indices(model, layers))
    attentions, mlps, scans = (parts.count(letter) for letter in "*-M")
    with_experts = moe_layers(model, moe, layers)
    attention = h * qkv_width(model) + h * h
    mlp = h * (fc1_width(model) + ffn_width(model))
    beside_experts = moe_parameters(model, moe) - moe.num_experts * expert_parameters(model, moe)
    weights = attentions * attention + (mlps - with_experts) * mlp + with_experts * beside_experts
    pairs = model.seq_length * (model.seq_length + 1) // 2 if causal else model.seq_length**2
    of_scans = (mamba_linear_flops(model), scan_flops(model, causal=causal)) if scans else (0, 0)
    return Flops(
        linear=2 * tokens * weights + tokens * scans * of_scans[0],
        attention=4 * samples * pairs * h * attentions + samples * scans * of_scans[1],
        logits=2 * tokens * h * model.vocab_size + _head_flops(model, samples) if logits else 0,
        experts=2 * tokens * with_experts * moe.top_k * expert_parameters(model, moe),
    )


def _t5_forward_flops(model: ModelConfig, samples: int, causal: bool, indices: range, logits: bool) -> Flops:
    """The layers of each half as a GPT's, and cross-attention: q and proj of the decoder's tokens, k and v of both."""
    in_encoder = len([index for index in indices if index < model.layers])
    crossing, h, length = len(indices) - in_encoder, model.hidden, decoder_length(model)
    half = replace(model, family="gpt", position="learned", decoder_layers=None, decoder_seq_length=None)
    encoder = forward_flops(half, samples=samples, layers=in_encoder, logits=False)
    half = replace(half, seq_length=length)
    decoder = forward_flops(half, samples=samples, causal=causal, layers=crossing, logits=logits)
    cross = 4 * samples * crossing * h
    return Flops(
        linear=encoder.linear + decoder.linear + cross * h * (length + model.seq_length),
        attention=encoder.attention + decoder.attention + cross * length * model.seq_length,
        logits=decoder.logits,
    )


def _head_flops(model: ModelConfig, samples: int) -> int:
    """Operations of BERT's dense layers behind the last layer: at every position, and at the first for the order."""
    if model.family != "bert":
        return 0
    order = samples * model.hidden * (model.hidden + 2) if model.bert_binary_head else 0
    return 2 * (samples * model.seq_length * model.hidden**2 + order)


def step_flops(model: ModelConfig, *, samples: int = 1, causal: bool = False, moe: MoEConfig = DENSE) -> Flops:
    """Operations of forward and backward of `samples` sequences: the *model FLOPs*, without any recomputation.

    The backward of a GEMM is two GEMMs, one for the gradient of each operand, so a step costs three forward passes.
    """
    return forward_flops(model, samples=samples, causal=causal, moe=moe).times(3)


def hardware_flops(config: RunConfig, schedule: Schedule | None = None) -> int:
    """Operations that all ranks together execute in a step: the *hardware FLOPs* of arXiv 2205.05198.

    They are `step_flops` and the forwards that `config.model` has backward repeat. Microbatches that their rank keeps
    whole repeat nothing (`kept_whole`). Operations that a kernel repeats inside, as flash attention does, do not count.

    schedule: of the run; None takes the configured one on as few ranks as its layout needs.
    """
    model, batch = config.model, config.train.global_batch_size
    total = step_flops(model, samples=batch, moe=config.moe).total
    if model.recompute_granularity == "none":
        return total
    if schedule is None:
        schedule = _configured_schedule(config)
    contents, count = stage_contents(config, schedule.num_stages), schedule.num_microbatches
    for rank in range(schedule.pp):
        most = model.num_microbatches_with_partial_activation_checkpoints or 0
        kept = Counter(stage for stage, _ in kept_whole(schedule, rank, most))
        for stage in schedule.stages_of(rank):
            repeated = _repeated_flops(model, config.moe, contents[stage].layers)
            total += repeated * (count - kept[stage]) * (batch // count)
    return total


def _repeated_flops(model: ModelConfig, moe: MoEConfig, layers: range) -> int:
    """Operations that the backward of one sample repeats in the layers of one stage."""
    if model.recompute_granularity == "full":
        depth = model.layers  # behind it is a T5's decoder, whose first layers count anew
        halves = range(layers.start, min(layers.stop, depth)), range(max(layers.start, depth), layers.stop)
        most = model.recompute_num_layers if model.recompute_method == "block" else None
        return sum(forward_flops(model, layers=half[:most], logits=False, moe=moe).total for half in halves)
    names, h = model.recompute_modules, model.hidden
    total = forward_flops(model, layers=layers, logits=False).attention if "core_attn" in names else 0
    router, experts = h * moe.num_experts, moe.num_experts * expert_parameters(model, moe)
    for index in layers:
        weights = 0
        if moe.is_moe_layer(index):
            shared = moe_parameters(model, moe) - router - experts
            weights = shared if "shared_experts" in names else 0
            weights = router + shared + moe.top_k * expert_parameters(model, moe) if "moe" in names else weights
        elif "mlp" in names:
            weights = h * (fc1_width(model) + ffn_width(model))
        in_decoder = model.family == "t5" and index >= model.layers
        total += 2 * weights * (decoder_length(model) if in_decoder else model.seq_length)
    return total


def paper_step_flops(model: ModelConfig, *, samples: int = 1, recompute: bool = True) -> float:
    """Operations of a step by arXiv 2104.04473, section 5.1: 96 B S L H^2 (1 + S / 6H + V / 16LH).

    The formula assumes F = 4H, as many key/value heads as heads, full attention, and recomputation of every layer.
    Without recomputation the factors are 72, 6 and 12. For such models the formula equals `step_flops`.
    """
    s, h, v, layers = model.seq_length, model.hidden, model.vocab_size, model.layers
    factor, logits = (96, 16) if recompute else (72, 12)
    return factor * samples * s * layers * h * h * (1 + s / (6 * h) + v / (logits * layers * h))


# ---- bytes ----


def layer_communication_bytes(model: ModelConfig, *, samples: int = 1, tp: int = 2, element_bytes: int = 4) -> int:
    """Payload of the four tensor-parallel all-reduces of a layer, forward and backward: S B H elements each; 0 at t =
    1.

    A ring all-reduce sends 2 (t - 1) / t of the payload out of each rank.
    """
    return 4 * samples * model.seq_length * model.hidden * element_bytes if tp > 1 else 0


def layer_all_to_all_bytes(
    model: ModelConfig, moe: MoEConfig, *, tokens: int, ep: int, element_bytes: int = 4, weight_bytes: int = 4
) -> int:
    """Payload of the all-to-alls of one layer, forward and backward, on a rank with `tokens` tokens; 0 at ep = 1.

    Each token leaves k times as a row of H with its weight, and comes back k times as a row of H. Gradients travel the
    same ways. A rank returns the rows that it received, so the number is the mean over the ranks of `ep`. The routing
    decides how much of the payload stays on its rank (`labkit.moe.dispatch.traffic`).

    `element_bytes` is the size of an activation, `weight_bytes` that of a routing weight (float32 or wider).
    """
    return 2 * tokens * moe.top_k * (2 * model.hidden * element_bytes + weight_bytes) if ep > 1 else 0
