"""Bytes that a forward keeps for its backward, in closed form, tensor by tensor. Numbers only, no torch.

arXiv 2205.05198 counts s b h (34 + 5 a s / h) bytes for a GPT-2 layer with 16-bit activations and dropout. This file
counts in the same way, but for any type, with or without dropout, SwiGLU, rotary positions, grouped queries and
recomputation. Tests compare the numbers with measured ones (`SavedTensors`), to 1%. Functions with an argument `moe`
count a layer with experts if `moe` is given.

s is the sequence, b the samples, h the hidden size, a the number of heads, t the tensor-parallel size.

| per layer and rank           | no recomputation               | selective (core attention) | full        |
|------------------------------|--------------------------------|----------------------------|-------------|
| no tensor parallelism        | s b h (34 + 5 a s / h)         | 34 s b h                   | 2 s b h     |
| tensor parallel              | s b h (10 + 24/t + 5 a s / ht) | s b h (10 + 24/t)          | 2 s b h     |
| tensor and sequence parallel | s b h / t (34 + 5 a s / h)     | 34 s b h / t               | 2 s b h / t |

The term 5 a s / h counts the probabilities, their dropout mask and the probabilities after dropout. A fused attention
kernel keeps none of them. But on a CPU torch has no fused kernel with dropout, so its `math` kernel runs, which keeps
three maps of probabilities.

Grouped experts with a gate keep the tensors below. T is the number of tokens of a rank, k the experts of a token, E the
number of experts, g the width of an expert, e the bytes of an element. R is the number of rows that the rank's experts
work on: T k on average over ranks, times etp.

| tensor                              | bytes              |
|-------------------------------------|--------------------|
| the layer's input                   | T h e              |
| the rows, as experts get them       | R h e              |
| output of fc1: gate and up          | R 2g e / etp       |
| input of fc2                        | R g e / etp        |
| weights, and places of rows         | R w + 16 T k       |
| scores and choice                   | T E (w + 1)        |

Shared experts keep as much as an MLP. R differs from rank to rank, and only its mean is known before routing. w is the
number of bytes of a routing weight: 4, or more with a wider router.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from labkit.config import ModelConfig, MoEConfig
from labkit.plan.mamba import mamba_sizes, mixer_saved
from labkit.plan.sizes import DENSE, expert_width, fc1_width, ffn_width, gate_and_up, kv_width, padded_vocab, qkv_width

INDEX_BYTES = 8
"""Bytes of an index that places a row."""


def moe_saved(model: ModelConfig, moe: MoEConfig, share: Share) -> dict[str, int]:
    """Return tensor -> bytes that experts keep after the layer's second norm without recomputation, in forward order.

    Raises:
        ValueError: a capacity without padding, because then only the routing decides the number of rows.
    """
    tokens, e, h = share.tokens_between(model), share.element_bytes, model.hidden
    sent, rows = _rows(moe, share, tokens)
    inner = expert_width(model, moe) // share.etp
    jitter = 2 if moe.input_jitter else 0  # the random factors, and the product that replaces the input
    input_is_kept = not jitter or moe.shared_expert_ffn_hidden is not None
    permuted = rows if moe.dispatcher == "allgather" else sent
    return {
        "mlp layer input": tokens * h * e if input_is_kept else 0,
        **_shared_experts(model, moe, share),
        "mlp router jitter": jitter * tokens * h * e,
        "mlp router scores": _router(moe, share, tokens),
        "mlp permutation": 2 * permuted * INDEX_BYTES,
        "mlp experts fc1 input": rows * h * e,
        "mlp experts activation input": _expert_activation(model, moe, inner, e) * rows,
        "mlp experts weights": rows * _router_bytes(moe, share),
        "mlp experts fc2 input": rows * inner * e,
    }


def _rows(moe: MoEConfig, share: Share, tokens: int) -> tuple[int, int]:
    """Return the number of rows that leave this rank, and of rows that its experts work on."""
    if moe.pad_to_capacity:
        assert moe.capacity_factor is not None
        capacity = min(math.ceil(tokens * moe.top_k / moe.num_experts * moe.capacity_factor), tokens)
        return moe.num_experts * capacity, moe.num_experts * capacity * share.etp
    if moe.capacity_factor is not None:
        raise ValueError(
            "with moe.capacity_factor and without moe.pad_to_capacity only the routing decides the number of rows; set "
            "pad_to_capacity, or remove capacity_factor for an upper limit"
        )
    sent = tokens * moe.top_k
    return sent, sent * share.etp if share.expert_rows is None else share.expert_rows


def _router_bytes(moe: MoEConfig, share: Share) -> int:
    """Return the bytes of one routing weight."""
    return max({"fp32": 4, "fp64": 8}.get(moe.router_dtype, 0), share.element_bytes)


def _router(moe: MoEConfig, share: Share, tokens: int) -> int:
    """Return the bytes of scores and choice, and of what losses and a capacity add.

    Each is T E elements, or T for a sum over experts.
    """
    wide, experts = max(_router_bytes(moe, share), 4), moe.num_experts
    sinkhorn = moe.load_balancing == "sinkhorn"
    summed = moe.score_function == "sigmoid" and not sinkhorn  # the router divides sigmoids by their sum
    divided = summed and moe.top_k > 1
    kept = experts * (wide + 1) + ((experts + 1) * wide if divided else 0)
    if moe.z_loss_coeff:
        kept += (experts + 1) * wide
    if moe.load_balancing.endswith("aux_loss") and moe.aux_loss_coeff:
        kept += (experts + summed) * wide
    if moe.capacity_factor is not None:
        kept += experts
    return tokens * kept + _counts(moe, share, wide)


def _counts(moe: MoEConfig, share: Share, wide: int) -> int:
    """Return the bytes of the tokens per expert, by which the load-balancing loss multiplies."""
    if not (moe.load_balancing.endswith("aux_loss") and moe.aux_loss_coeff):
        return 0
    return moe.num_experts * wide * (share.samples if moe.load_balancing == "seq_aux_loss" else 1)


def _expert_activation(model: ModelConfig, moe: MoEConfig, inner: int, e: int) -> int:
    """Return the bytes of one row of fc1's output and of the activation's output, which grouped SwiGLU recomputes."""
    gated = gate_and_up(model) == 2
    if gated and moe.grouped_gemm:
        return 2 * inner * e
    return ((4 if gated else 2) * inner) * e


def _shared_experts(model: ModelConfig, moe: MoEConfig, share: Share) -> dict[str, int]:
    """Return tensor -> bytes of the shared experts. Their input is the layer's, unless the overlap gathers it early."""
    width = moe.shared_expert_ffn_hidden
    if width is None:
        return {}
    inside, e, t = share.tokens(model), share.element_bytes, share.tp
    gate = share.tokens_between(model) * (model.hidden + 1) * e if moe.shared_expert_gate else 0
    gathered = inside * model.hidden * e if moe.shared_expert_overlap and t > 1 else 0
    return {
        "mlp shared experts gathered input": gathered,
        "mlp shared experts activation input": inside * width * (3 if gate_and_up(model) == 2 else 1) // t * e,
        "mlp shared experts fc2 input": inside * width // t * e,
        "mlp shared experts gate": gate,
    }


def moe_kept(saved: dict[str, int], model: ModelConfig, share: Share, modules: tuple[str, ...]) -> dict[str, int]:
    """Return `saved` of a whole layer without the tensors that recomputation of `modules` drops."""
    if "moe" in modules:
        behind = ("mlp shared", "mlp router", "mlp permutation", "mlp experts")
        saved = {name: 0 if name.startswith(behind) else size for name, size in saved.items()}
        saved["mlp layer input"] = share.tokens_between(model) * model.hidden * share.element_bytes
    if "shared_experts" in modules:
        saved = {name: 0 if name.startswith("mlp shared") else size for name, size in saved.items()}
    return saved


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a layer that one rank computes, and the type of its activations."""

    samples: int = 1
    """Samples of a microbatch."""
    tp: int = 1
    """Tensor-parallel size."""
    cp: int = 1
    """Context-parallel size: a rank has 1/cp of the sequence, and its attention keeps no probabilities."""
    sequence_parallel: bool = False
    """If true, a rank has 1/tp of the sequence between tensor-parallel regions."""
    etp: int = 1
    """Tensor-parallel size inside experts."""
    expert_rows: int | None = None
    """Rows (tokens x experts) that this rank's experts work on in a layer; None is the mean over ranks."""
    element_bytes: int = 4
    """Bytes of one element of an activation."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Norms and attention dropout keep other tensors on a GPU. `cuda` follows the documentation of the kernels."""

    def tokens(self, model: ModelConfig) -> int:
        """Return the positions of all samples inside tensor-parallel regions."""
        return self.samples * model.seq_length // self.cp

    def tokens_between(self, model: ModelConfig) -> int:
        """Return the positions of all samples between tensor-parallel regions."""
        return self.tokens(model) // (self.tp if self.sequence_parallel else 1)

    @property
    def wide(self) -> int:
        """Bytes of an element that a kernel keeps in float32 or wider."""
        return max(self.element_bytes, 4)


def layer_saved(model: ModelConfig, share: Share, moe: MoEConfig | None = None, parts: str = "*-") -> dict[str, int]:
    """Return tensor -> bytes that one layer keeps without recomputation, in the order of the forward.

    A name begins with its part of the layer: `attention`, `mlp` or `mamba`. parts: its `ModelConfig.parts_of_layer`.
    """
    inside, outside = share.tokens(model), share.tokens_between(model)
    mask = outside * model.hidden if model.hidden_dropout else 0
    attention = {
        "attention norm": norm_bytes(model, share),
        "attention qkv input": outside * model.hidden * share.element_bytes,
        **{f"attention {name}": size for name, size in _core_attention(model, share).items()},
        "attention proj input": inside * model.hidden // share.tp * share.element_bytes,
        "attention dropout mask": mask,
    }
    mlp = {
        "mlp norm": norm_bytes(model, share),
        **(_mlp(model, share) if moe is None else moe_saved(model, moe, share)),
        "mlp dropout mask": mask,
    }
    return (
        (attention if "*" in parts else {})
        | (mlp if "-" in parts else {})
        | (_mamba(model, share) | {"mamba dropout mask": mask} if "M" in parts else {})
    )


def _mamba(model: ModelConfig, share: Share) -> dict[str, int]:
    """Return tensor -> bytes that a Mamba layer keeps for its norm, its projections and everything between them."""
    inside, outside = share.tokens(model), share.tokens_between(model)
    sizes = mamba_sizes(model, share.tp)
    return {
        "mamba norm": norm_bytes(model, share),
        "mamba in_proj input": outside * model.hidden * share.element_bytes,
        **{f"mamba {name}": size * share.wide for name, size in mixer_saved(model, share.samples, share.tp).items()},
        "mamba out_proj input": inside * sizes.groups * sizes.inner * share.element_bytes,
    }


def _mlp(model: ModelConfig, share: Share) -> dict[str, int]:
    inside, outside, e = share.tokens(model), share.tokens_between(model), share.element_bytes
    gate = ffn_width(model) if gate_and_up(model) == 2 else 0
    return {
        "mlp fc1 input": outside * model.hidden * e,
        # relu keeps its output, which is the input of fc2
        "mlp activation input": 0 if model.activation == "relu" else inside * (fc1_width(model) + gate) // share.tp * e,
        "mlp fc2 input": inside * ffn_width(model) // share.tp * e,
    }


def norm_bytes(model: ModelConfig, share: Share) -> int:
    """Return the bytes of a norm's input, mean and deviation.

    On a CPU torch's RMSNorm keeps its input twice, in float32.
    """
    tokens, e = share.tokens_between(model), share.element_bytes
    on_gpu = share.device == "cuda"
    if model.norm == "layernorm":
        return tokens * (model.hidden * e + 2 * (share.wide if on_gpu else e))
    return tokens * ((model.hidden * e if on_gpu else 2 * model.hidden * share.wide) + share.wide)


def _core_attention(model: ModelConfig, share: Share) -> dict[str, int]:
    """Return tensor -> bytes of q, k, v and of the tensors between them and the output of attention."""
    tokens, e, t, h = share.tokens(model), share.element_bytes, share.tp, model.hidden
    grouped = kv_width(model, t) < h // t
    qkv, repeated = tokens * qkv_width(model, t) * e, tokens * 3 * h // t * e
    probabilities = tokens * model.seq_length * model.heads // t  # a s^2 b / t elements
    if share.cp > 1 or is_one_kernel(model, share, biased=model.position == "relative"):
        return {"q, k, v": qkv, "log-sums": tokens * model.heads // t * share.wide}
    p = model.attention_dropout
    if model.attention_backend == "unfused":
        return {"q, k, v": repeated, "probabilities": probabilities * (2 * e + 1 if p else e)}
    scaled = repeated * share.wide // e
    if e >= 4 and not grouped and model.position != "rope":
        scaled += tokens * 2 * h // t * e  # scaled copies of q and k; v is a view of q, k, v
    return {"q, k, v": scaled, "probabilities": probabilities * math_bytes(model, share)}


def is_one_kernel(model: ModelConfig, share: Share, *, biased: bool = False) -> bool:
    """Return True if attention is one kernel, which keeps no probabilities.

    A CPU's kernel takes neither dropout nor biases that need a gradient (`biased`), so `fused` is torch's `math` there.
    """
    if model.attention_backend in ("math", "unfused"):
        return False
    return share.device == "cuda" or not (model.attention_dropout or biased)


def math_bytes(model: ModelConfig, share: Share) -> int:
    """Return the bytes that torch's `math` keeps per probability: with dropout also the mask and their product."""
    if not model.attention_dropout:
        return share.wide
    return 2 * share.wide + (1 if share.device == "cuda" else share.wide)


PARTS = {
    "inputs of norms": ("attention norm", "mlp norm"),
    "inputs of qkv and fc1": ("attention qkv input", "mlp fc1 input"),
    "q, k, v and output": ("attention q, k, v", "attention log-sums", "attention proj input"),
    "probabilities": ("attention probabilities",),
    "inside the MLP": ("mlp activation input", "mlp fc2 input"),
    "dropout masks": ("attention dropout mask", "mlp dropout mask"),
}
"""Part of a layer in words -> names of its tensors in `layer_saved`."""

MOE_PARTS = {
    "inputs of norms": PARTS["inputs of norms"],
    "inputs of qkv and experts": ("attention qkv input", "mlp layer input", "mlp experts fc1 input"),
    "q, k, v and output": PARTS["q, k, v and output"],
    "probabilities": PARTS["probabilities"],
    "inside experts": ("mlp experts activation input", "mlp experts weights", "mlp experts fc2 input"),
    "shared experts": (
        "mlp shared experts gathered input",
        "mlp shared experts activation input",
        "mlp shared experts fc2 input",
        "mlp shared experts gate",
    ),
    "routing": ("mlp router jitter", "mlp router scores", "mlp permutation"),
    "dropout masks": PARTS["dropout masks"],
}
"""`PARTS` of a layer with experts."""


def layer_parts(model: ModelConfig, share: Share, moe: MoEConfig | None = None) -> dict[str, int]:
    """Return part (`PARTS`, with experts `MOE_PARTS`) -> bytes that one layer keeps, recomputed as `model` says."""
    if model.recompute_granularity == "full":
        return {"inputs of norms": layer_input_bytes(model, share)}
    saved, parts = layer_kept(model, share, moe), PARTS if moe is None else MOE_PARTS
    return {part: sum(saved.get(name, 0) for name in names) for part, names in parts.items()}


def layer_activation_bytes(
    model: ModelConfig, share: Share | None = None, moe: MoEConfig | None = None, parts: str = "*-"
) -> int:
    """Return the bytes that one layer keeps with `model`'s selective recomputation; for full: `layer_input_bytes`."""
    return sum(layer_kept(model, share or Share(), moe, parts).values())


def layer_kept(model: ModelConfig, share: Share, moe: MoEConfig | None = None, parts: str = "*-") -> dict[str, int]:
    """Return `layer_saved` without the tensors that selective recomputation drops."""
    saved = layer_saved(model, share, moe, parts)
    modules = model.recompute_modules if model.recompute_granularity == "selective" else ()
    if "core_attn" in modules:
        saved |= dict.fromkeys(("attention log-sums", "attention probabilities"), 0)
        saved["attention q, k, v"] = share.tokens(model) * qkv_width(model, share.tp) * share.element_bytes
    if moe is not None:
        saved = moe_kept(saved, model, share, modules)
    elif "mlp" in modules:
        saved |= dict.fromkeys(("mlp activation input", "mlp fc2 input"), 0)
    if "layernorm" in modules:
        saved["attention qkv input"] = 0
        saved["mlp fc1 input" if moe is None else "mlp layer input"] = 0
    return saved


def layer_input_bytes(model: ModelConfig, share: Share) -> int:
    """Return the bytes that a fully recomputed layer keeps: those of its input."""
    return share.tokens_between(model) * model.hidden * share.element_bytes


def layers_activation_bytes(
    model: ModelConfig, share: Share, layers: int | range | None = None, moe: MoEConfig = DENSE
) -> int:
    """Return the bytes that the layers of one chunk keep for a microbatch, recomputed as `model` says.

    layers: indices in the model, or how many layers from the first; None takes all.
    """
    each = _bytes_of(model, share, layers, moe)
    mask = _mask_bytes(model, share) if each else 0
    if model.recompute_granularity != "full":
        return sum(each) + mask
    if model.recompute_method == "uniform":
        return -(-len(each) // model.recompute_num_layers) * layer_input_bytes(model, share) + mask
    front = min(model.recompute_num_layers, len(each))
    return front * layer_input_bytes(model, share) + sum(each[front:]) + mask


def _mask_bytes(model: ModelConfig, share: Share) -> int:
    """Return the bytes of BERT's padding mask, S scores per sample and head, which all layers of a chunk share.

    Separate operations add the mask to the scores, and keep nothing but the sum.
    """
    kept = is_one_kernel(model, share) or model.recompute_granularity != "none"
    if model.family != "bert" or not kept:
        return 0
    return share.tokens(model) * model.heads // share.tp * share.element_bytes


def _bytes_of(model: ModelConfig, share: Share, layers: int | range | None, moe: MoEConfig) -> list[int]:
    """Return `layer_activation_bytes` of each layer."""
    indices = layers if isinstance(layers, range) else range(model.layers if layers is None else layers)
    return [
        layer_activation_bytes(model, share, moe if moe.is_moe_layer(i) else None, model.parts_of_layer(i))
        for i in indices
    ]


def recomputed_at_once_bytes(
    model: ModelConfig, share: Share, layers: int | range | None = None, moe: MoEConfig = DENSE
) -> int:
    """Return the bytes that full recomputation adds while a backward recomputes its largest piece.

    They are all that the piece dropped. `layers` is as in `layers_activation_bytes`.
    """
    if model.recompute_granularity != "full":
        return 0
    each, together = _bytes_of(model, share, layers, moe), model.recompute_num_layers
    if not each:
        return 0
    if model.recompute_method == "uniform":
        pieces = [sum(each[i : i + together]) for i in range(0, len(each), together)]
    else:
        pieces = each[:together]
    return max(pieces) - layer_input_bytes(model, share)


def end_activation_bytes(
    model: ModelConfig,
    share: Share | None = None,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> int:
    """Return the bytes that embedding and loss keep for a microbatch, equal on each rank of a tensor-parallel group.

    The embedding keeps its ids (8 bytes), for t > 1 the mask of ids of other ranks, and its dropout mask. The last
    stage keeps the final norm's input and output, and for each token the exponentials of this rank's columns, padding
    included, with their scale. The exponentials are float32, or float64 in fp64. A BERT also keeps its token types, and
    what its heads read.
    """
    share = share or Share()
    tokens, outside, total = share.tokens(model), share.tokens_between(model), 0
    if pre_process:
        total += tokens * 8 + (tokens if share.tp > 1 else 0)
        total += outside * model.hidden if model.embedding_dropout else 0
        total += tokens * 8 if model.family == "bert" and model.bert_binary_head else 0
        total += norm_bytes(model, share) if model.norm_placement == "post" else 0
    if post_process:
        width = padded_vocab(model, share.tp) // share.tp
        total += norm_bytes(model, share) if model.norm_placement == "pre" else 0
        total += outside * model.hidden * share.element_bytes + tokens * (width + 1) * share.wide
        total += _head_bytes(model, share) if model.family == "bert" else 0
    return total


def _head_bytes(model: ModelConfig, share: Share) -> int:
    """Return the bytes that BERT's heads keep: inputs of activation, norm and output layer, and the pooler's output.

    Under sequence parallelism it also keeps the first positions of all ranks.
    """
    h, e = model.hidden, share.element_bytes
    gathered = share.tp if share.sequence_parallel and share.tp > 1 else 0
    order = share.samples * h * (1 + gathered) * e if model.bert_binary_head else 0
    return 2 * share.tokens_between(model) * h * e + norm_bytes(model, share) + order


def paper_layer_bytes(model: ModelConfig, share: Share, recompute: Literal["none", "selective", "full"]) -> float:
    """Return the bytes in the table at the top of this file, for 2-byte activations (arXiv 2205.05198, table 2)."""
    s, b, h, t = model.seq_length, share.samples, model.hidden, share.tp
    scores = 5 * model.heads * s / h if recompute == "none" else 0.0
    spread = t if share.sequence_parallel else 1
    if recompute == "full":
        return 2 * s * b * h / spread
    return s * b * h * (10 / spread + 24 / t + scores / t)
