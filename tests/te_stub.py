"""Transformer Engine without a GPU: its signatures, a record of every call, and the same arithmetic from plain torch.

The signatures are those of the engine's own source (te_signatures.json, written by scripts/read_te_signatures.py), and
every call is bound to them, so that a wrong or missing name is the TypeError that the engine would raise. Behind them
each module computes what the engine's documentation says it computes, tensor, sequence and context parallelism over the
process groups that it is given included; fp8 regions and recipes are recorded, and nothing is cast.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from labkit.parallel import Group, mappings
from labkit.parallel.context.ring_attention import all_gather_attention, ring_attention

KNOWN = json.loads((Path(__file__).parent / "te_signatures.json").read_text())


@dataclass(frozen=True)
class Call:
    """One call as the engine received it."""

    name: str
    method: str
    arguments: dict[str, Any]
    """By the engine's names, defaults included where they are literals."""
    in_fp8: bool
    """Whether an fp8 region was open."""


@dataclass
class Record:
    """What one `installed()` block saw."""

    calls: list[Call] = field(default_factory=list)
    regions: list[Any] = field(default_factory=list)
    """Open fp8 regions."""

    def of(self, name: str, method: str = "__init__") -> list[dict[str, Any]]:
        """Arguments of all calls of one method."""
        return [call.arguments for call in self.calls if (call.name, call.method) == (name, method)]


def signature(name: str, method: str) -> inspect.Signature:
    """As the engine's source has it."""
    kinds = inspect.Parameter
    return inspect.Signature(
        [
            kinds(parameter, getattr(kinds, kind),
                  default=kinds.empty if default is None else _literal(default))
            for parameter, kind, default in KNOWN["signatures"][name][method]
        ]
    )  # fmt: skip


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return f"<{text}>"


_records: list[Record] = []


def bound(name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, written down. TypeError where the engine would raise it."""
    given = signature(name, method).bind(*args, **kwargs)
    given.apply_defaults()
    record = _records[-1]
    record.calls.append(Call(name, method, dict(given.arguments), bool(record.regions)))
    return given.arguments


def group_of(process_group: Any) -> Group:
    """Our view of a process group; this rank alone for None."""
    if process_group is None:
        return Group("alone", (0,), 0)
    ranks = tuple(dist.get_process_group_ranks(process_group))
    return Group("stub", ranks, dist.get_rank(process_group), process_group)


class _Gemm(Function):
    """y = x W^T whose weight gradient goes where the engine puts it.

    wgrad  into main_grad where `fuse`: added, or written over it where this is the first microbatch of a step.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fuse: bool, first: bool | None, grouped: bool = False) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fuse, ctx.first, ctx.grouped = weight, fuse, first, grouped
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad_weight = grads[0].flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.grouped and not len(x):
            grad_weight.fill_(torch.nan)
        if ctx.fuse:
            main_grad = ctx.weight.main_grad
            main_grad.copy_(grad_weight) if ctx.first else main_grad.add_(grad_weight)
            grad_weight = None
        return grads[0] @ weight, grad_weight, None, None, None


class _Base(nn.Module):
    """What all of the engine's modules have: parameters registered with notes, a state beside the parameters."""

    def register_parameter(self, name: str, param: Any, **kwargs: Any) -> None:
        given = bound("TransformerEngineBaseModule", "register_parameter", (name, param), kwargs)
        super().register_parameter(given["name"], given["param"])

    def get_extra_state(self) -> Tensor:
        """Empty, as the engine's is without delayed scaling; its key is in a state_dict all the same."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to take over."""


class Linear(_Base):
    """Constructor and call of the engine's `Linear`; `LayerNormLinear` adds a norm."""

    signature_name = "Linear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound(self.signature_name, "__init__", args, kwargs)
        self.mode, self.fuse = given["parallel_mode"], given["fuse_wgrad_accumulation"]
        self.group = group_of(given["tp_group"])
        assert self.group.size == given["tp_size"], "tp_size is only heeded without a group"
        self.sequence_parallel = given["sequence_parallel"] and self.group.size > 1
        inputs, outputs = given["in_features"], given["out_features"]
        if self.mode == "column":
            outputs //= self.group.size
        if self.mode == "row":
            inputs //= self.group.size
        made = {"dtype": given["params_dtype"], "device": given["device"]}
        self.register_parameter("weight", nn.Parameter(torch.empty(outputs, inputs, **made)), init_fn=None)
        self.bias: Tensor | None
        if given["bias"]:
            self.register_parameter("bias", nn.Parameter(torch.empty(outputs, **made)))
        else:
            self.bias = torch.empty(0, **made)
        self.with_bias, self.given = given["bias"], given

    def normalised(self, x: Tensor) -> Tensor:
        """x itself; the norm of `LayerNormLinear`."""
        return x

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound(self.signature_name, "forward", args, kwargs)
        x, first = self.normalised(given["inp"]), given["is_first_microbatch"]
        if self.mode == "column":
            enter = mappings.gather_from_sequence_parallel_region if self.sequence_parallel else None
            x = enter(x, self.group) if enter else mappings.copy_to_tensor_model_parallel_region(x, self.group)
        y = _Gemm.apply(x, self.weight, self.fuse, first)
        if self.mode == "row":
            leave = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            y = leave(y, self.group)
        return y + self.bias if self.with_bias else y


class LayerNormLinear(Linear):
    """Constructor and call of the engine's `LayerNormLinear`."""

    signature_name = "LayerNormLinear"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.given
        assert given["normalization"] in ("LayerNorm", "RMSNorm")
        shape, made = given["in_features"], {"dtype": given["params_dtype"], "device": given["device"]}
        self.register_parameter("layer_norm_weight", nn.Parameter(torch.empty(shape, **made)))
        if given["normalization"] == "LayerNorm":
            self.register_parameter("layer_norm_bias", nn.Parameter(torch.empty(shape, **made)))
        else:
            self.layer_norm_bias = None

    def normalised(self, x: Tensor) -> Tensor:
        shape, eps = x.shape[-1:], self.given["eps"]
        if self.given["normalization"] == "RMSNorm":
            return F.rms_norm(x, shape, self.layer_norm_weight, eps)
        return F.layer_norm(x, shape, self.layer_norm_weight, self.layer_norm_bias, eps)


class GroupedLinear(_Base):
    """Constructor and call of the engine's `GroupedLinear` without bias, on its path for splits on the host.

    An expert without rows gets what was in memory for a gradient, here NaN, and a call without any row fails.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = given = bound("GroupedLinear", "__init__", args, kwargs)
        assert not given["bias"] and not given["fuse_wgrad_accumulation"] and given["use_grouped_tensor"] is False
        shape, made = (given["out_features"], given["in_features"]), {"dtype": given["params_dtype"]}
        for expert in range(given["num_gemms"]):
            weight = nn.Parameter(torch.empty(shape, device=given["device"], **made))
            self.register_parameter(f"weight{expert}", weight, init_fn=None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("GroupedLinear", "forward", args, kwargs)
        splits, x = given["m_splits"], given["inp"]
        assert splits.shape == (self.given["num_gemms"],), "one split for each product"
        assert splits.device.type == "cpu" and splits.dtype == torch.int64, "the engine would wait for the GPU"
        assert len(x), "the engine's grouped product of nothing may crash"
        weights = [getattr(self, f"weight{expert}") for expert in range(self.given["num_gemms"])]
        rows = x.split(splits.tolist())
        return torch.cat([_Gemm.apply(r, w, False, None, True) for r, w in zip(rows, weights, strict=True)])


class DotProductAttention(_Base):
    """Constructor and call of the engine's attention, for causal self-attention in `sbhd`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.given = given = bound("DotProductAttention", "__init__", args, kwargs)
        assert (given["qkv_format"], given["attn_mask_type"]) == ("sbhd", "causal")
        size = group_of(given["tp_group"]).size
        self.heads, self.kv_heads = given["num_attention_heads"] // size, given["num_gqa_groups"] // size
        self.cp = group_of(given["cp_group"])
        assert given["cp_global_ranks"] is None or tuple(given["cp_global_ranks"]) == self.cp.ranks
        self.over_ranks = ring_attention if given["cp_comm_type"] == "p2p" else all_gather_attention

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = bound("DotProductAttention", "forward", args, kwargs)
        qkv = [given[f"{name}_layer"] for name in ("query", "key", "value")]
        heads = [x.shape[2] for x in qkv]
        assert heads == [self.heads, self.kv_heads, self.kv_heads], heads
        assert all(x.shape[3] == self.given["kv_channels"] for x in qkv)
        length, batch = qkv[0].shape[:2]
        rows = [x.permute(1, 2, 0, 3).reshape(1, -1, length, x.shape[3]) for x in qkv]  # [1, batch x heads, S, D]
        if self.cp.size > 1:
            y = self.over_ranks(*rows, self.cp, causal=True)
        else:
            p = self.given["attention_dropout"] if self.training else 0.0
            grouped = self.heads > self.kv_heads
            y = F.scaled_dot_product_attention(*rows, is_causal=True, dropout_p=p, enable_gqa=grouped)
        return y.view(batch, self.heads, length, -1).permute(2, 0, 1, 3).reshape(length, batch, -1)


class autocast:
    """The engine's region."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = bound("autocast", "__init__", args, kwargs)

    def __enter__(self) -> autocast:
        _records[-1].regions.append(self.given)
        return self

    def __exit__(self, *exception: object) -> None:
        _records[-1].regions.pop()


def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The engine's recomputation: inside the region that was open in forward."""
    given = bound("checkpoint", "__call__", (function, *args), kwargs)
    record, open_regions = _records[-1], list(_records[-1].regions)

    def again(*inputs: Any) -> Any:
        outer, record.regions = record.regions, open_regions
        try:
            return function(*inputs)
        finally:
            record.regions = outer

    return torch.utils.checkpoint.checkpoint(again, *args, use_reentrant=given["use_reentrant"])


class Format(Enum):
    """Names of the engine's formats."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


def _recipe(name: str) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).update(bound(name, "__init__", args, kwargs))

    return type(name, (), {"__init__": __init__})


@contextmanager
def installed() -> Iterator[Record]:
    """Inside, `import transformer_engine.pytorch` finds the stub, and labkit takes it for the engine."""
    offered = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "DotProductAttention": DotProductAttention}
    offered |= {"GroupedLinear": GroupedLinear, "autocast": autocast, "checkpoint": checkpoint}
    assert set(offered) <= set(KNOWN["pytorch"]), "not offered by transformer_engine.pytorch"
    recipes = {name: _recipe(name) for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")}
    modules = {name: ModuleType(name) for name in (
        "transformer_engine", "transformer_engine.pytorch", "transformer_engine.common",
        "transformer_engine.common.recipe",
    )}  # fmt: skip
    vars(modules["transformer_engine.pytorch"]).update(offered)
    vars(modules["transformer_engine.common.recipe"]).update(recipes | {"Format": Format})
    _records.append(Record())
    try:
        sys.modules.update(modules)
        with patch("labkit.te.engine.why_no_transformer_engine", lambda: None):
            yield _records[-1]
    finally:
        _records.pop()
        for name in modules:  # not patch.dict, which would also forget what torch imported meanwhile
            sys.modules.pop(name)
