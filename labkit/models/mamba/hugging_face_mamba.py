"""Mamba-2 in Hugging Face's names (`Mamba2ForCausalLM`): the tensors, and the fields of `config.json`.

Their rows of a projection or convolution are sorted by kind, [z .. x .. b .. c .. dt ..]. Ours are sorted by group
(`mamba_mixer.py`). Their model has only Mamba layers, so a hybrid has no counterpart.
`labkit.models.convert` reads and writes states by `mamba_names`, and `hugging_face_config` the other functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.config import ModelConfig
from labkit.plan.mamba import CHUNK, MambaSizes, mamba_sizes

SEQ_LENGTH = 2048
"""`model.seq_length` of a model whose `config.json` names no longest sequence, because it has no positions."""
INFINITE = (math.inf, {"__float__": "Infinity"})
"""Infinity. JSON cannot write it, so transformers 5 writes a mapping."""
SAME = {"norm.weight": "norm.weight", "gated_norm.weight": "mixer.norm.weight"} | {
    name: f"mixer.{name}" for name in ("out_proj.weight", "A_log", "dt_bias", "D")
}
"""Our tensor of a layer -> theirs, for equal ones."""


class Renamed(NamedTuple):
    """One tensor under both names."""

    ours: str
    theirs: str
    from_theirs: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def by_group(theirs: Tensor, widths: tuple[int, ...], groups: int) -> Tensor:
    """Sort rows that are sorted by kind by group instead. widths: rows of each kind in one group."""
    kinds = theirs.split([groups * width for width in widths])
    return torch.cat([kind.unflatten(0, (groups, -1)) for kind in kinds], dim=1).flatten(0, 1)


def by_kind(ours: Tensor, widths: tuple[int, ...], groups: int) -> Tensor:
    """Sort rows that are sorted by group by kind instead: the inverse of `by_group`."""
    kinds = ours.unflatten(0, (groups, -1)).split(widths, dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in kinds])


def _widths(sizes: MambaSizes) -> tuple[int, ...]:
    return (sizes.inner, sizes.inner, sizes.state, sizes.state, sizes.heads)


def mamba_names(config: ModelConfig) -> Iterator[Renamed]:
    """Yield every tensor of the model under both names."""
    sizes = mamba_sizes(config)
    projected = {"widths": _widths(sizes), "groups": sizes.groups}
    convolved = {"widths": _widths(sizes)[1:-1], "groups": sizes.groups}
    yield Renamed("embedding.word.weight", "backbone.embeddings.weight", _same, _same)
    for index in range(config.layers):
        ours, theirs = f"layers.{index}.mamba", f"backbone.layers.{index}"
        biases = {"out_proj.bias": "mixer.out_proj.bias"} if config.bias else {}
        for name, their_name in (SAME | biases).items():
            yield Renamed(f"{ours}.{name}", f"{theirs}.{their_name}", _same, _same)
        for part in ("weight", "bias") if config.bias else ("weight",):
            to, back = partial(by_group, **projected), partial(by_kind, **projected)  # type: ignore[arg-type]
            yield Renamed(f"{ours}.in_proj.{part}", f"{theirs}.mixer.in_proj.{part}", to, back)
        to, back = partial(by_group, **convolved), partial(by_kind, **convolved)  # type: ignore[arg-type]
        yield Renamed(f"{ours}.conv.bias", f"{theirs}.mixer.conv1d.bias", to, back)
        yield Renamed(
            f"{ours}.conv.weight",
            f"{theirs}.mixer.conv1d.weight",
            lambda kernel, to=to: to(kernel.squeeze(1)),
            lambda weight, back=back: back(weight).unsqueeze(1),
        )
    yield Renamed("final_norm.weight", "backbone.norm_f.weight", _same, _same)
    if config.untie_embeddings_and_output_weights:
        yield Renamed("output.weight", "lm_head.weight", _same, _same)


def mamba_layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each tensor of the layers."""
    sizes, h = mamba_sizes(config), config.hidden
    inner, heads = sizes.groups * sizes.inner, sizes.groups * sizes.heads
    channels, projected = sizes.groups * sizes.convolved, sizes.groups * sizes.projected
    of_layer: dict[str, tuple[int, ...]] = {
        "norm.weight": (h,),
        "in_proj.weight": (projected, h),
        "conv.weight": (channels, config.mamba_conv_width),
        "conv.bias": (channels,),
        "gated_norm.weight": (inner,),
        "out_proj.weight": (h, inner),
        **dict.fromkeys(("A_log", "dt_bias", "D"), (heads,)),
    }
    if config.bias:
        of_layer |= {"in_proj.bias": (projected,), "out_proj.bias": (h,)}
    return {f"layers.{index}.mamba.{name}": shape for index in range(config.layers) for name, shape in of_layer.items()}


def check_mamba2(config: ModelConfig) -> None:
    """Reject a model that `Mamba2ForCausalLM` cannot hold.

    Raises:
        ValueError: such a model; the message names the field.
    """
    needed = {"position": "none", "norm": "rmsnorm"}
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise ValueError(f"model.{name} is {getattr(config, name)}, and Hugging Face's Mamba-2 has {value}")
    if set(config.hybrid_override_pattern or "M") != {"M"}:
        raise ValueError(
            f"model.hybrid_override_pattern is {config.hybrid_override_pattern}, and Hugging Face's Mamba-2 has only "
            "Mamba layers"
        )
    if (inner := config.mamba_heads * config.mamba_head_dim) % config.hidden:
        raise ValueError(
            f"the heads of a Mamba layer are {inner} wide together, and Hugging Face's Mamba-2 needs a multiple of "
            f"model.hidden = {config.hidden}"
        )


def mamba_config(config: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return our config of the model in a `config.json`, and option -> the values our model has, default first."""
    allowed = {
        "hidden_act": ["silu"],
        "use_conv_bias": [True],
        "time_step_limit": [[0.0, end] for end in INFINITE],
    }
    heads = config["num_heads"]
    model = ModelConfig(
        family="mamba",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=math.gcd(config["hidden_size"], heads),  # heads of attention, which the model does not have
        vocab_size=config["vocab_size"],
        seq_length=config.get("max_position_embeddings") or SEQ_LENGTH,
        position="none",
        norm="rmsnorm",
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        bias=config.get("use_bias", False),
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        mamba_state_dim=config["state_size"],
        mamba_head_dim=config["head_dim"],
        mamba_num_groups=config["n_groups"],
        mamba_num_heads=heads,
        mamba_conv_width=config.get("conv_kernel", 4),
    )
    return model, allowed


def mamba_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of `config.json` that other families name otherwise."""
    return {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "max_position_embeddings": config.seq_length,
        "num_heads": config.mamba_heads,
        "head_dim": config.mamba_head_dim,
        "state_size": config.mamba_state_dim,
        "n_groups": config.mamba_num_groups,
        "expand": config.mamba_heads * config.mamba_head_dim // config.hidden,
        "conv_kernel": config.mamba_conv_width,
        "chunk_size": CHUNK,
        "layer_norm_epsilon": config.norm_eps,
        "use_bias": config.bias,
        "residual_in_fp32": False,
        "pad_token_id": None,
    }
