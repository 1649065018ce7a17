"""Linear layers of Transformer Engine on labkit's parameters: after a norm, row-parallel, and of all experts of a rank.

labkit makes the parameters by (seed, name), and labkit's modules hold them under the same names as without the engine.
The engine's module gets the same Parameter objects. It is not a child of labkit's module and adds nothing to a
state_dict, so both implementations load the same state_dict. A norm's module only holds its parameters:
`LayerNormLinear` applies the norm, so that the normalised activation is made once, in fp8 where that is on.

Shapes: S sequence, B batch, H hidden, N rows, I input size, O output size.
"""

from __future__ import annotations

from typing import Any, TypeAlias, Unpack

import torch
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.moe.grouped_gemm import Segments
from labkit.parallel import layers
from labkit.parallel.parameters.parameter_record import Replicated, record_of
from labkit.parallel.parameters.weights import make_expert_parameter, make_parameter
from labkit.te.engine import EngineFloat8, engine

NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
"""A value of `model.norm` -> the engine's name for it."""


class FusedNorm(nn.Module):
    """A module that holds the parameters of a norm, which the next linear layer applies.

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
        """Return x unchanged: the next linear layer applies the norm."""
        return x_SBH


ParallelLinear: TypeAlias = layers.ColumnParallelLinear | layers.RowParallelLinear


class _EngineLinear(nn.Module):
    """A linear layer of the engine on the parameters of labkit's own.

    Args:
        own: labkit's layer, which has made the parameters.
        layer: the engine's module, made with `engine_options(own)`.
        precision: with the engine's fp8 the weight is cast once a step.
    """

    def __init__(self, own: ParallelLinear, layer: Any, precision: layers.Precision) -> None:
        super().__init__()
        self.name, self.weight, self.bias = own.name, own.weight, own.bias
        layer.register_parameter("weight", own.weight)
        if own.bias is not None:
            layer.register_parameter("bias", own.bias)
        record_of(self.weight).added_elsewhere = True
        self.engine_layer = (layer,)  # in a tuple, so that it is no child and its names stay out of the state_dict
        self.is_first_microbatch: bool | None = None
        if isinstance(precision, EngineFloat8):
            precision.casts_once_a_step(self)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(y, None), as from labkit's layers. Weight gradients come with input gradients, never in a later W."""
        (layer,) = self.engine_layer
        y = layer(x, is_first_microbatch=self.is_first_microbatch)
        if self.is_first_microbatch:
            self.is_first_microbatch = False
        return y, None


def engine_options(own: ParallelLinear) -> dict[str, Any]:
    """What the engine's module must know of labkit's layer. On `meta` it allocates nothing."""
    return {
        "name": own.name,
        "bias": own.bias is not None,
        "sequence_parallel": own.plan.sequence_parallel,
        "fuse_wgrad_accumulation": own.plan.accumulate,
        "tp_group": own.group.process_group,
        "tp_size": own.group.size,
        "params_dtype": own.weight.dtype,
        "device": "meta",
    }


class NormColumnParallelLinear(_EngineLinear):
    """A norm and a column-parallel layer as one `LayerNormLinear`.

    Args:
        norm: the module with the parameters of the norm.
        linear: as in `layers.ColumnParallelLinear`; `precision` is the engine's own fp8, or none.
        The rest as there.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        norm: FusedNorm,
        partition_stride: int = 1,
        replicated: Replicated | None = None,
        **linear: Unpack[layers.LinearOptions],
    ) -> None:
        precision = linear.pop("precision", layers.NATIVE)
        own = layers.ColumnParallelLinear(
            name, input_size, output_size, partition_stride=partition_stride, replicated=replicated, **linear
        )
        layer = engine().LayerNormLinear(
            input_size,
            len(own.weight) * own.group.size,  # the engine takes 1/t of it; more with replicated rows
            eps=norm.eps,
            normalization=NORMS[norm.kind],
            parallel_mode="column",
            **engine_options(own),
        )
        super().__init__(own, layer, precision)
        layer.register_parameter("layer_norm_weight", norm.weight)
        if norm.bias is not None:
            layer.register_parameter("layer_norm_bias", norm.bias)


class RowParallelLinear(_EngineLinear):
    """A row-parallel layer as `Linear`; arguments as in `layers.RowParallelLinear`."""

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        **linear: Unpack[layers.LinearOptions],
    ) -> None:
        precision = linear.pop("precision", layers.NATIVE)
        own = layers.RowParallelLinear(name, input_size, output_size, **linear)
        layer = engine().Linear(input_size, output_size, parallel_mode="row", **engine_options(own))
        super().__init__(own, layer, precision)


class GroupedLinear(nn.Module):
    """One projection of all experts of a rank as the engine's `GroupedLinear`; constructed like `StackedLinear`.

    The engine has one weight per expert, labkit one stack of weights. Before each call the engine's module gets views
    of the stack. Gradients return through the views and arrive stacked (one copy of the weight gradients). They come
    with the input gradients, never in a later W, and the data-parallel wrapper adds them to `main_grad`.

    The engine's kernels may leave the gradient of an expert without rows uninitialised, and fail if there is no row at
    all (TransformerEngine#2499, #3019). So such gradients are set to zero, and a call without rows skips the engine.
    """

    def __init__(
        self, name: str, part: str, full_shape: tuple[int, int, int], *, accumulate: bool = False, **made: Any
    ) -> None:
        """Take the arguments of `StackedLinear`. `accumulate` has no effect, since the wrapper adds gradients."""
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
            delattr(layer, own)  # a module refuses a view in the place of a Parameter
        self.engine_layer = (layer,)

    def forward(self, x_NI: Tensor, segments: Segments) -> Tensor:
        """[N, I] -> [N, O]."""
        if not len(x_NI):
            return x_NI @ self.weight[0].t()  # stays in autograd's graph, with zeros for all experts
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
                setattr(layer, own, None)  # a kept view would keep autograd's graph
