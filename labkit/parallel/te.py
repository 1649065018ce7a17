"""Our blocks as Transformer Engine's modules: the one file that knows its names (`model.transformer_impl`).

| ours                             | Transformer Engine's     | under the parameter names                         |
|----------------------------------|--------------------------|---------------------------------------------------|
| norm, then ColumnParallelLinear  | LayerNormLinear          | `norm.weight`, `norm.bias`, `qkv.weight`, ..      |
| RowParallelLinear                | Linear                   | `proj.weight`, `proj.bias`                        |
| core attention, any cp_comm_type | DotProductAttention      | none                                              |
| moe's StackedLinear              | GroupedLinear            | `fc1.weight`, `fc2.weight`, stacked               |
| Float8Recipe                     | DelayedScaling, Float8CurrentScaling, Float8BlockScaling                     ||
| recompute.checkpoint, with fp8   | checkpoint               | (replays the fp8 scales of the first pass)        |

Parameters are ours: made by (seed, name), with our attributes, held by our modules under our names. The engine's module
is given the same Parameter objects; it is no child of ours and so adds nothing to a state_dict, which therefore moves
between the two implementations as it is. A norm's module only holds its parameters: `LayerNormLinear` normalises
itself, so that the normalised activation is made once, in fp8 where that is on.

The engine communicates over the process groups that it is given, beside our ledger. It needs a GPU, so everything
imports it when a model is built.

Shapes: S sequence, B batch, H hidden, I input size, O output size, D head dimension; n = B x query heads on this rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.launch.machine import why_no_transformer_engine
from labkit.parallel.fp8 import Float8Recipe, Float8Scaling
from labkit.parallel.groups import Group, ParallelGroups
from labkit.parallel.parameter_record import Replicated, record_of
from labkit.parallel.random import RngTracker
from labkit.parallel.weights import Seed, make_expert_parameter, make_parameter

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
"""Our name of a norm -> the engine's."""


def engine() -> Any:
    """`transformer_engine.pytorch`.

    Raises:
        ValueError: it cannot be used here; one sentence says what is missing and how to get it.
    """
    if (missing := why_no_transformer_engine()) is not None:
        raise ValueError(f"model.transformer_impl is transformer_engine. {missing}; or set it to local")
    return importlib.import_module("transformer_engine.pytorch")


class FusedNorm(nn.Module):
    """Holds the parameters of a norm that the linear layer behind it applies; hands its input on.

    Args:
        name: name in the whole model.
        config: `hidden`, `norm` and `norm_eps`.
        sequence_parallel: the gradients of its parameters are partial sums over the tensor-parallel group.
    """

    def __init__(self, name: str, config: ModelConfig, *, sequence_parallel: bool, **made: Any) -> None:
        super().__init__()
        self.kind, self.eps, shape = config.norm, config.norm_eps, (config.hidden,)
        self.weight = make_parameter(f"{name}.weight", shape, fill=1.0, **made)
        with_bias = config.norm == "layernorm"
        self.bias = make_parameter(f"{name}.bias", shape, fill=0.0, **made) if with_bias else None
        for parameter in self.parameters():
            record_of(parameter).sequence_parallel = sequence_parallel

    def forward(self, x_SBH: Tensor) -> Tensor:
        """x itself."""
        return x_SBH


class _EngineLinear(nn.Module):
    """A linear layer of the engine on parameters of ours."""

    def __init__(self, name: str, layer: Any, parameters: dict[str, nn.Parameter], *, caches: bool) -> None:
        """parameters: by the engine's names. caches: cast the weight to fp8 once a step."""
        super().__init__()
        self.name = name
        for theirs, parameter in parameters.items():
            layer.register_parameter(theirs, parameter)
        self.weight = parameters["weight"]
        record_of(self.weight).added_elsewhere = True
        self.bias = parameters.get("bias")
        self.engine_layer = (layer,)  # in a tuple: no child, so its names stay out of ours
        self.is_first_microbatch = True if caches else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """As our layer of the same place: (y, None). Weight gradients come with input gradients, never in a later W."""
        (layer,) = self.engine_layer
        y = layer(x, is_first_microbatch=self.is_first_microbatch)
        if self.is_first_microbatch:
            self.is_first_microbatch = False
        return y, None


def _linear_options(
    group: Group, bias: bool, sequence_parallel: bool, gradient_accumulation_fusion: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """What `Linear` and `LayerNormLinear` are both told. On `meta` they allocate nothing: they are given parameters."""
    return {
        "bias": bias,
        "sequence_parallel": sequence_parallel,
        "fuse_wgrad_accumulation": gradient_accumulation_fusion,
        "tp_group": group.process_group,
        "tp_size": group.size,
        "params_dtype": dtype,
        "device": "meta",
    }


class NormColumnParallelLinear(_EngineLinear):
    """A norm and a column-parallel layer as one `LayerNormLinear`; constructed as our `ColumnParallelLinear`.

    norm: whose parameters it applies first. float8: given, the weight is cast once a step; the scales are the engine's.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        norm: FusedNorm,
        group: Group,
        bias: bool = True,
        sequence_parallel: bool = False,
        gradient_accumulation_fusion: bool = False,
        float8: Float8Scaling | None = None,
        seed: Seed = 0,
        std: float = 0.02,
        partition_stride: int = 1,
        replicated: Replicated | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        cut: dict[str, Any] = {"group": group, "partition_dim": 0, "partition_stride": partition_stride}
        cut |= {"replicated": replicated, "dtype": dtype, "device": device}
        parameters = {"weight": make_parameter(f"{name}.weight", (output_size, input_size), seed=seed, std=std, **cut)}
        if bias:
            parameters["bias"] = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **cut)
        options = _linear_options(group, bias, sequence_parallel, gradient_accumulation_fusion, dtype)
        layer = engine().LayerNormLinear(
            input_size,
            len(parameters["weight"]) * group.size,  # of which it takes this rank's 1/t; more where rows are replicated
            eps=norm.eps,
            normalization=NORMS[norm.kind],
            parallel_mode="column",
            name=name,
            **options,
        )
        super().__init__(name, layer, parameters, caches=float8 is not None)
        layer.register_parameter("layer_norm_weight", norm.weight)
        if norm.bias is not None:
            layer.register_parameter("layer_norm_bias", norm.bias)


class RowParallelLinear(_EngineLinear):
    """A row-parallel layer as `Linear`; constructed as our `RowParallelLinear`."""

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        group: Group,
        bias: bool = True,
        sequence_parallel: bool = False,
        gradient_accumulation_fusion: bool = False,
        float8: Float8Scaling | None = None,
        seed: Seed = 0,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        cut: dict[str, Any] = {"group": group, "partition_dim": 1} | made
        parameters = {"weight": make_parameter(f"{name}.weight", (output_size, input_size), seed=seed, std=std, **cut)}
        if bias:
            parameters["bias"] = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **made)
            record_of(parameters["bias"]).sequence_parallel = sequence_parallel and group.size > 1
        options = _linear_options(group, bias, sequence_parallel, gradient_accumulation_fusion, dtype)
        layer = engine().Linear(input_size, output_size, parallel_mode="row", name=name, **options)
        super().__init__(name, layer, parameters, caches=float8 is not None)


class Rows(Protocol):
    """Which rows belong to which expert (`moe.grouped_gemm.Segments`)."""

    tokens_per_expert: Tensor


class GroupedLinear(nn.Module):
    """One projection of all experts of a rank as the engine's `GroupedLinear`; constructed as `moe`'s `StackedLinear`.

    The engine knows one weight per expert. Ours is one stack: before each call the engine's module is given views of
    it, so that gradients travel back through them and arrive stacked (one copy of the weight gradients). They come
    with the input gradients, never in a later W, and are added to `main_grad` by the data-parallel wrapper.

    Its kernels may leave the gradient of an expert without rows as it was in memory, and fail without any row
    (TransformerEngine#2499, #3019): such gradients are set to zero, and nothing is asked of it for nothing.
    """

    def __init__(
        self, name: str, part: str, full_shape: tuple[int, int, int], *, accumulate: bool = False, **made: Any
    ) -> None:
        """As in `StackedLinear`; `accumulate` is left to the wrapper."""
        super().__init__()
        self.weight = make_expert_parameter(name, f"{part}.weight", full_shape, **made)
        experts, outputs, inputs = self.weight.shape
        layer = engine().GroupedLinear(
            experts,
            inputs,
            outputs,
            bias=False,
            fuse_wgrad_accumulation=False,
            params_dtype=self.weight.dtype,
            device="meta",
            name=f"{name}.{part}",
            use_grouped_tensor=False,
        )
        self.names = [f"weight{expert}" for expert in range(experts)]
        for own in self.names:
            delattr(layer, own)  # a Parameter would take no view in its place
        self.engine_layer = (layer,)

    def forward(self, x_NI: Tensor, segments: Rows) -> Tensor:
        """[N, I] -> [N, O]."""
        if not len(x_NI):
            return x_NI @ self.weight[0].t()  # stays in the graph, with zeros for all experts
        (layer,) = self.engine_layer
        counts = segments.tokens_per_expert
        for own, weight_OI, rows in zip(self.names, self.weight.unbind(), counts.tolist(), strict=True):
            if not rows and weight_OI.requires_grad:
                weight_OI.register_hook(torch.zeros_like)
            setattr(layer, own, weight_OI)
        try:
            return layer(x_NI, counts)
        finally:
            for own in self.names:
                setattr(layer, own, None)  # a view kept here would keep the graph


class CoreAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v as `DotProductAttention`, context parallelism included; called as ours.

    Args:
        config: heads, sizes and dropout.
        rng: random states; needed where attention drops.
        tp: tensor-parallel group, over which heads are cut.
        cp: context-parallel group; None is this rank alone.
        cp_comm_type: `p2p` or `all_gather`.

    Raises:
        ValueError: the unfused form, which is a choice of our layers.
    """

    def __init__(
        self, config: ModelConfig, rng: RngTracker | None, tp: Group, cp: Group | None = None, cp_comm_type: str = "p2p"
    ) -> None:
        super().__init__()
        if config.attention_backend != "fused":
            raise ValueError(
                f"model.attention_backend is {config.attention_backend}: Transformer Engine chooses its kernels itself "
                "(its variables NVTE_FLASH_ATTN and NVTE_FUSED_ATTN); set it to fused, or transformer_impl to local"
            )
        self.dropout, self.rng = config.attention_dropout, rng
        self.heads, self.head_dim = config.heads // tp.size, config.hidden // config.heads
        over_ranks: dict[str, Any] = {}
        if cp is not None and cp.size > 1:
            over_ranks = {
                "cp_group": cp.process_group,
                "cp_global_ranks": list(cp.ranks),
                "cp_stream": torch.cuda.Stream() if torch.cuda.is_available() else None,
                "cp_comm_type": cp_comm_type,
            }
        attention = engine().DotProductAttention(
            config.heads,
            self.head_dim,
            num_gqa_groups=max(config.kv_heads or config.heads, tp.size),  # copies of a head count as heads
            attention_dropout=config.attention_dropout,
            qkv_format="sbhd",
            attn_mask_type="causal",
            tp_size=tp.size,
            tp_group=tp.process_group,
            **over_ranks,
        )
        self.engine_attention = (attention,)

    def train(self, mode: bool = True) -> CoreAttention:
        """The engine's module, which is no child, drops in training only as well."""
        self.engine_attention[0].train(mode)
        return super().train(mode)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, n, S, D], k and v [1, m, S, D] with n a multiple of m -> [1, n, S, D]; causal."""
        length, batch = q.shape[2], q.shape[1] // self.heads
        q, k, v = (x[0].transpose(0, 1).unflatten(1, (batch, -1)) for x in (q, k, v))  # [S, B, heads, D], no copy
        (attention,) = self.engine_attention
        with self._random_state():
            y = attention(q, k, v)
        return y.view(length, batch * self.heads, self.head_dim).transpose(0, 1)[None]

    def _random_state(self) -> AbstractContextManager[Any]:
        if not (self.dropout and self.training):
            return nullcontext()
        assert self.rng is not None, "attention dropout needs the random states of model_parallel_seed"
        return self.rng.fork("model-parallel-rng")


# ---- fp8 and recomputation ----


def engine_recipe(recipe: Float8Recipe, *, reduces: bool) -> Any:
    """The engine's recipe object. reduces: there are other ranks to agree with on an amax."""
    engine()  # says in a sentence where it is missing
    recipes = importlib.import_module("transformer_engine.common.recipe")
    fp8_format = recipes.Format.HYBRID if recipe.hybrid else recipes.Format.E4M3
    if recipe.name == "current":
        return recipes.Float8CurrentScaling(fp8_format=fp8_format)
    if recipe.name == "blockwise":
        return recipes.Float8BlockScaling(fp8_format=fp8_format)
    return recipes.DelayedScaling(
        margin=recipe.margin,
        fp8_format=fp8_format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        reduce_amax=reduces,
    )


class EngineFloat8:
    """fp8 of one model chunk: the region in which the engine's layers cast, and what starts afresh with a step.

    Args:
        recipe: formats and scaling. The engine moves the history of `delayed` on with every microbatch.
        groups: amax is agreed over tp_dp_cp. Where that is this rank alone nothing is reduced: without a group the
            engine would take the whole world, other pipeline stages included.
        chunk: whose linear layers cast their weights once a step.
    """

    def __init__(self, recipe: Float8Recipe, groups: ParallelGroups, chunk: nn.Module) -> None:
        self.group, self._engine = groups.tp_dp_cp, engine()
        self.recipe = engine_recipe(recipe, reduces=self.group.size > 1)
        self._layers = [layer for layer in chunk.modules() if isinstance(layer, _EngineLinear)]

    def region(self) -> AbstractContextManager[Any]:
        """Forward of all layers of one microbatch runs inside; backward needs none."""
        group = self.group.process_group
        return self._engine.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=group)

    def graph_options(self) -> dict[str, Any]:
        """What `make_graphed_callables` must be told, since captured layers run outside the region; weights are cast by
        the replays of the first microbatch alone."""
        group = self.group.process_group
        named = {"enabled": True, "recipe": self.recipe, "amax_reduction_group": group}
        return named | {"cache_quantized_params": True}

    def end_step(self) -> None:
        """After the last microbatch: weights will change, so the next forward casts them again."""
        for layer in self._layers:
            layer.is_first_microbatch = True


def checkpoint(function: Callable[..., Any], *args: Any, rng: RngTracker | None = None) -> Any:
    """`recompute.checkpoint` by the engine's own: the second pass casts with the scales of the first.

    rng: named random states that `function` draws from.
    """
    tracker = None if rng is None else (lambda: rng)
    found = importlib.import_module("transformer_engine.pytorch")  # a model of its layers has been built
    return found.checkpoint(function, *args, get_rng_state_tracker=tracker, use_reentrant=True)
