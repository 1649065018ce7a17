"""What a GPT costs, in closed form: parameters, floating-point operations and bytes. Numbers only, no torch.

Everything here is equal to what is measured, and tested to be: parameters exactly, in every layout; operations exactly
against torch's counter; messages exactly against the ledger. Saved activations: `activation_bytes.py`.

Notation: S sequence, B samples, H hidden, F ffn_hidden, V vocabulary, L layers, D = H / heads; t tensor-parallel size.
An operation is one addition or one multiplication, so a GEMM [m, k] x [k, n] has 2 m k n.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config import ModelConfig, RunConfig
from labkit.models.placement import stage_contents
from labkit.schedules import Schedule, build_schedule


def kv_width(model: ModelConfig) -> int:
    """Columns of all keys (or of all values): kv_heads x D."""
    return (model.kv_heads or model.heads) * (model.hidden // model.heads)


def ffn_width(model: ModelConfig) -> int:
    """F."""
    return model.ffn_hidden or 4 * model.hidden


def fc1_width(model: ModelConfig) -> int:
    """Columns of the first matrix of the MLP: F, or 2F where a gate stands beside them."""
    return ffn_width(model) * (2 if model.activation == "swiglu" else 1)


def padded_vocab(model: ModelConfig, tp: int = 1) -> int:
    """Rows of the vocabulary tables, all ranks together: V up to the next multiple of divisible_by x t."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple


# ---- parameters ----


def norm_parameters(model: ModelConfig) -> int:
    """Of one norm: a weight per feature, and a bias for LayerNorm."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def layer_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Of one transformer layer on one rank.

    Column-parallel layers divide weight and bias by t, row-parallel ones the weight only; norms are whole everywhere.
    """
    h, qkv = model.hidden, model.hidden + 2 * kv_width(model)
    column = (qkv + fc1_width(model)) * (h + model.bias) // tp
    row = (h + ffn_width(model)) * h // tp + 2 * h * model.bias
    return column + row + 2 * norm_parameters(model)


def stage_parameters(
    model: ModelConfig, *, layers: int, pre_process: bool = True, post_process: bool = True, tp: int = 1
) -> int:
    """Of one model chunk on one rank, padding included, as `GPTModel(...).parameters()` holds them.

    A last stage that is not also the first has an output weight of its own: untied, or the tied weight's second copy.
    """
    table = padded_vocab(model, tp) // tp * model.hidden
    total = layers * layer_parameters(model, tp)
    if pre_process:
        total += table + (model.seq_length * model.hidden if model.position == "learned" else 0)
    if post_process:
        total += norm_parameters(model)
        if not pre_process or model.untie_embeddings_and_output_weights:
            total += table
    return total


def model_parameters(model: ModelConfig) -> int:
    """Of the whole model without padding and with tied weights counted once: the number that names it."""
    unpadded = model.vocab_size * model.hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    positions = model.seq_length * model.hidden if model.position == "learned" else 0
    return unpadded + positions + model.layers * layer_parameters(model) + norm_parameters(model)


def rank_parameters(config: RunConfig, *, pp_rank: int = 0, schedule: Schedule | None = None) -> int:
    """Of all chunks of pipeline rank `pp_rank` under `schedule`; None means the one that the config names.

    Where first and last stage are on one rank, the tied weight is there once.
    """
    parallel, model = config.parallel, config.model
    if schedule is None:
        microbatches = config.num_microbatches(parallel.smallest_world_size)
        schedule = build_schedule(config.schedule, pp=parallel.pp, vpp=parallel.vpp, microbatches=microbatches)
    contents = stage_contents(config, schedule.num_stages)
    held = [contents[stage] for stage in schedule.stages_of(pp_rank)]
    total = sum(
        stage_parameters(
            model, layers=len(stage.layers), pre_process=stage.embedding, post_process=stage.loss, tp=parallel.tp
        )
        for stage in held
    )
    in_one_chunk = any(stage.embedding and stage.loss for stage in held)
    both_ends = any(stage.embedding for stage in held) and any(stage.loss for stage in held)
    if both_ends and not in_one_chunk and not model.untie_embeddings_and_output_weights:
        total -= padded_vocab(model, parallel.tp) // parallel.tp * model.hidden
    return total


# ---- operations ----


@dataclass(frozen=True)
class Flops:
    """Operations of the GEMMs of a pass; norms, activations and softmax are not counted, as is the custom."""

    linear: int
    """Of the four matrices of every layer (five with a gate)."""
    attention: int
    """q k^T and probabilities x v."""
    logits: int
    """Of the output layer."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.linear + self.attention + self.logits

    def times(self, factor: int) -> Flops:
        """`factor` such passes."""
        return Flops(self.linear * factor, self.attention * factor, self.logits * factor)


def forward_flops(
    model: ModelConfig, *, samples: int = 1, causal: bool = False, layers: int | None = None, logits: bool = True
) -> Flops:
    """One forward pass of `samples` whole sequences.

    Args:
        model: the shape.
        samples: sequences.
        causal: count only the pairs a causal mask leaves, S (S + 1) / 2 a head, which is the least that must be
            computed. False counts all S^2, as the literature and torch's counter do.
        layers: of a part of the model; None means all.
        logits: whether the output layer is in it (its real columns; padding takes no part in the loss).
    """
    tokens, h = samples * model.seq_length, model.hidden
    layers = model.layers if layers is None else layers
    weights = h * (h + 2 * kv_width(model)) + h * h + h * (fc1_width(model) + ffn_width(model))
    pairs = model.seq_length * (model.seq_length + 1) // 2 if causal else model.seq_length**2
    return Flops(
        linear=2 * tokens * weights * layers,
        attention=4 * samples * pairs * h * layers,
        logits=2 * tokens * h * model.vocab_size if logits else 0,
    )


def step_flops(model: ModelConfig, *, samples: int = 1, causal: bool = False, recompute: bool = False) -> Flops:
    """Forward and backward of `samples` sequences: a backward GEMM costs two of the forward's, one for each operand.

    With `recompute` (activation checkpointing of every layer) the layers run forward twice, the output layer once.
    """
    once = forward_flops(model, samples=samples, causal=causal)
    total = once.times(3)
    if not recompute:
        return total
    return Flops(total.linear + once.linear, total.attention + once.attention, total.logits)


def paper_step_flops(model: ModelConfig, *, samples: int = 1, recompute: bool = True) -> float:
    """The formula of arXiv 2104.04473, section 5.1: 96 B S L H^2 (1 + S / 6H + V / 16LH).

    It assumes F = 4H, as many key/value heads as heads, full attention, and recomputation of every layer; without it
    the factors are 72, 6 and 12. For such models it equals `step_flops`.
    """
    s, h, v, layers = model.seq_length, model.hidden, model.vocab_size, model.layers
    factor, logits = (96, 16) if recompute else (72, 12)
    return factor * samples * s * layers * h * h * (1 + s / (6 * h) + v / (logits * layers * h))


# ---- bytes ----

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""`optim.precision` -> bytes of a weight and of an activation."""


@dataclass(frozen=True)
class StateBytes:
    """What a rank keeps for its parameters between steps."""

    weights: int
    """In the model's precision."""
    gradients: int
    """`main_grad`: float32 for 16-bit weights."""
    optimizer: int
    """Adam's two moments, and for 16-bit weights their float32 masters."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(parameters: int, precision: str = "fp32") -> StateBytes:
    """Of `parameters` parameters: 16 bytes each in fp32 (4 + 4 + 8), 18 in bf16 and fp16 (2 + 4 + 12), 32 in fp64
    (8 + 8 + 16).

    Raises:
        ValueError: unknown precision.
    """
    if precision not in ELEMENT_BYTES:
        raise ValueError(f"precision is {precision!r}; choose one of {', '.join(ELEMENT_BYTES)}")
    weight = ELEMENT_BYTES[precision]
    full = max(weight, 4)
    master = full if weight < full else 0
    return StateBytes(parameters * weight, parameters * full, parameters * (2 * full + master))


def layer_communication_bytes(model: ModelConfig, *, samples: int = 1, tp: int = 2, element_bytes: int = 4) -> int:
    """Payload of the tensor-parallel all-reduces of one layer, forward and backward: 4 of S B H elements; 0 at t = 1.

    On the wire a ring all-reduce moves 2 (t - 1) / t of it out of each rank.
    """
    return 4 * samples * model.seq_length * model.hidden * element_bytes if tp > 1 else 0
