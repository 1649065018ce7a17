"""Operations of a pass and of a step in closed form: model FLOPs and hardware FLOPs. No torch.

Tests compare them with torch's counter. An operation is one addition or one multiplication, so a GEMM [m, k] x [k, n]
has 2 m k n. In a layer with experts the router chooses k experts for each token. Because k is fixed, the number of
operations is known before routing, unless a capacity drops or pads tokens.

S is the sequence, B the samples, H the hidden size, V the vocabulary, L the number of layers, k the experts of a token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from labkit.config import ModelConfig, MoEConfig, RunConfig
from labkit.plan.mamba import mamba_linear_flops, scan_flops
from labkit.plan.parameters import expert_parameters, moe_parameters
from labkit.plan.sizes import DENSE, decoder_length, fc1_width, ffn_width, layer_indices, moe_layers, qkv_width
from labkit.plan.stages import configured_schedule, stage_contents
from labkit.schedules import Schedule
from labkit.schedules.simulator import kept_whole


@dataclass(frozen=True)
class Flops:
    """Operations of the GEMMs of a pass. Norms, activations and softmax are not counted, as in arXiv 2104.04473."""

    linear: int
    """GEMMs with the weights that every token uses: attention, MLP, router and shared experts."""
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
        """Return the operations of `factor` such passes."""
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
    """Return the operations of one forward pass of `samples` whole sequences.

    Args:
        model: shape of the model.
        samples: number of sequences.
        causal: count only the S (S + 1) / 2 pairs per head that a causal mask leaves. False counts all S^2, as arXiv
            2104.04473 and torch's counter do.
        layers: indices of the layers to count, or how many layers from the first; None counts all.
        logits: count the output layer too, without the columns of padding, and the heads of a BERT.
        moe: the experts. Every token uses k of them; a capacity that drops or pads is not considered.

    In a T5 only the decoder is causal, and the logits are those of the decoder's tokens.
    """
    if model.family == "t5":
        return _t5_forward_flops(model, samples, causal, layer_indices(model, layers), logits)
    tokens, h = samples * model.seq_length, model.hidden
    parts = "".join(model.parts_of_layer(index) for index in layer_indices(model, layers))
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
    """Count the layers of each half like a GPT's, and then cross-attention.

    Its q and proj are computed for the decoder's tokens, its k and v for the encoder's.
    """
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
    """Return the operations of BERT's dense layers after the last layer.

    They run at every position, and for the order of sentences at the first one.
    """
    if model.family != "bert":
        return 0
    order = samples * model.hidden * (model.hidden + 2) if model.bert_binary_head else 0
    return 2 * (samples * model.seq_length * model.hidden**2 + order)


def step_flops(model: ModelConfig, *, samples: int = 1, causal: bool = False, moe: MoEConfig = DENSE) -> Flops:
    """Return the operations of forward and backward of `samples` sequences: the *model FLOPs*, without recomputation.

    The backward of a GEMM is two GEMMs, one for the gradient of each operand, so a step costs three forward passes.
    """
    return forward_flops(model, samples=samples, causal=causal, moe=moe).times(3)


def hardware_flops(config: RunConfig, schedule: Schedule | None = None) -> int:
    """Return the operations that all ranks together execute in a step: the *hardware FLOPs* of arXiv 2205.05198.

    They are `step_flops` plus the forwards that backward repeats as `config.model` says. Microbatches that their rank
    keeps whole repeat nothing (`kept_whole`). Operations that a kernel repeats inside, as flash attention does, do not
    count.

    schedule: the schedule of the run; None takes the configured one on as few ranks as its layout needs.
    """
    model, batch = config.model, config.train.global_batch_size
    total = step_flops(model, samples=batch, moe=config.moe).total
    if model.recompute_granularity == "none":
        return total
    if schedule is None:
        schedule = configured_schedule(config)
    contents, count = stage_contents(config, schedule.num_stages), schedule.num_microbatches
    for rank in range(schedule.pp):
        most = model.num_microbatches_with_partial_activation_checkpoints or 0
        kept = Counter(stage for stage, _ in kept_whole(schedule, rank, most))
        for stage in schedule.stages_of(rank):
            repeated = _repeated_flops(model, config.moe, contents[stage].layers)
            total += repeated * (count - kept[stage]) * (batch // count)
    return total


def _repeated_flops(model: ModelConfig, moe: MoEConfig, layers: range) -> int:
    """Return the operations that the backward of one sample repeats in the layers of one stage."""
    if model.recompute_granularity == "full":
        depth = model.layers  # after it comes a T5's decoder, whose first layers are counted from its own start
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
    """Return the operations of a step by arXiv 2104.04473, section 5.1: 96 B S L H^2 (1 + S / 6H + V / 16LH).

    The formula assumes F = 4H, as many key/value heads as heads, full attention, and recomputation of every layer.
    Without recomputation the factors are 72, 6 and 12. For such models the formula equals `step_flops`.
    """
    s, h, v, layers = model.seq_length, model.hidden, model.vocab_size, model.layers
    factor, logits = (96, 16) if recompute else (72, 12)
    return factor * samples * s * layers * h * h * (1 + s / (6 * h) + v / (logits * layers * h))
