"""megatron-core's MoE layer on CPU, of the same shape and from the same weights as ours: peer and oracle.

Its all-to-all dispatcher copies counts on a CUDA stream of its own and expects NumPy arrays back; here streams do
nothing and host tensors become those arrays. All else is its own code. Its grouped experts need a GPU, so its experts
are `SequentialMLP`.

Runs inside a rank (`labkit.launch.run`), where it initialises megatron's `parallel_state`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ModelConfig, MoEConfig
from labkit.parallel import ParallelGroups

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # what megatron asks for; silences a warning


class _NoStream:
    """Stands in for a CUDA stream and for its events."""

    wait_stream = synchronize = staticmethod(lambda *args: None)

    def record_event(self) -> _NoStream:
        return self


def load() -> SimpleNamespace:
    """What is used of megatron-core, imported with its CUDA queries answered for the CPU."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moe = "megatron.core.transformer.moe"
        dispatchers = importlib.import_module(f"{moe}.token_dispatcher")
        found = SimpleNamespace(
            parallel_state=importlib.import_module("megatron.core.parallel_state"),
            TransformerConfig=importlib.import_module("megatron.core.transformer").TransformerConfig,
            module_spec=importlib.import_module("megatron.core.models.gpt.moe_module_specs").get_moe_module_spec,
            build_module=importlib.import_module("megatron.core.transformer.spec_utils").build_module,
        )
    megatron_on_cpu.settle()
    stream = _NoStream()
    torch.cuda.Stream = lambda *args, **kwargs: stream  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda *args: stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *args: contextlib.nullcontext()  # type: ignore[assignment]
    dispatchers.maybe_move_tensor_to_cpu = _as_on_the_host
    importlib.import_module(f"{moe}.moe_utils").te_general_gemm = None  # defined only beside Transformer Engine
    return found


def _as_on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def layer(
    model: ModelConfig,
    moe: MoEConfig,
    groups: ParallelGroups,
    *,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
) -> nn.Module:
    """Its MoE layer with the all-to-all dispatcher and sequential experts, for this rank.

    compiled: its fused activation, which goes through `torch.compile` and so needs a C++ compiler.
    """
    mcore = load()
    parallel = groups.config
    if not mcore.parallel_state.model_parallel_is_initialized():
        mcore.parallel_state.initialize_model_parallel(
            parallel.tp, expert_model_parallel_size=parallel.ep, expert_tensor_parallel_size=parallel.etp
        )
    gated = model.activation == "swiglu"
    config = mcore.TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_moe_experts=moe.num_experts,
        moe_ffn_hidden_size=moe.ffn_hidden,
        moe_router_topk=moe.top_k,
        moe_router_pre_softmax=moe.pre_softmax,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32" if dtype != torch.float64 else "fp64",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        moe_shared_expert_intermediate_size=moe.shared_expert_ffn_hidden,
        moe_shared_expert_gate=moe.shared_expert_gate,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
        add_bias_linear=False,
        tensor_model_parallel_size=parallel.tp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
        bias_activation_fusion=compiled,
        gradient_accumulation_fusion=False,
    )
    spec = mcore.module_spec(use_te=False, num_experts=moe.num_experts, moe_grouped_gemm=False)
    made: nn.Module = mcore.build_module(spec, config=config, layer_number=1)
    return made


def pairs(ours: nn.Module, theirs: nn.Module) -> list[tuple[nn.Parameter, int | None, nn.Parameter]]:
    """(our parameter, index of the expert in it or None, theirs) of two layers; together all parameters of both."""
    router: Any = ours.router
    found: list[tuple[Any, int | None, Any]] = [(router.weight, None, theirs.router.weight)]  # type: ignore[union-attr]
    experts: Any = ours.experts
    for index, expert in enumerate(theirs.experts.local_experts):  # type: ignore[union-attr, arg-type]
        found += [(experts.fc1.weight, index, expert.linear_fc1.weight)]
        found += [(experts.fc2.weight, index, expert.linear_fc2.weight)]
    shared: Any = ours.shared_experts
    if shared is not None:
        their: Any = theirs.shared_experts
        found += [
            (shared.fc1.weight, None, their.linear_fc1.weight),
            (shared.fc2.weight, None, their.linear_fc2.weight),
        ]
        found += [] if shared.gate is None else [(shared.gate.weight, None, their.gate_weight)]
    assert {id(p) for _, _, p in found} == {id(p) for p in theirs.parameters()}
    assert {id(p) for p, _, _ in found} == {id(p) for p in ours.parameters()}
    return found


def copy_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Give their layer our weights."""
    with torch.no_grad():
        for own, expert, their in pairs(ours, theirs):
            their.copy_(own if expert is None else own[expert])


def largest_gradient_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Over all parameters, relative to the largest gradient of each; after a backward of both."""
    worst = 0.0
    for own, expert, their in pairs(ours, theirs):
        assert own.grad is not None and their.grad is not None
        grad = own.grad if expert is None else own.grad[expert]
        worst = max(worst, float((grad - their.grad).abs().max() / their.grad.abs().max().clamp(min=1e-30)))
    return worst
