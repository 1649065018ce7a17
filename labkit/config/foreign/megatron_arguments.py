"""A configuration as arguments of Megatron-LM's pretrain_gpt.py: model, layout, batch and precision.

`labkit.config.foreign.megatron` reads them back. Data, checkpoints and logging are left to the user (`NOT_WRITTEN`).
"""

from __future__ import annotations

from typing import Any

from labkit.config.run_config import RunConfig

SCHEDULES_OF_MEGATRON = ("auto", "1f1b", "interleaved")
"""Schedules that pretrain_gpt.py runs."""
NOT_WRITTEN = (
    "the tokenizer (--tokenizer-type, --tokenizer-model) and data (--data-path, --split)",
    "checkpoints (--save, --load, --save-interval), logging and evaluation (--eval-iters)",
    "the optimizer besides --lr: decay, warm-up, weight decay, betas, clipping",
)
"""What pretrain_gpt.py also needs, in words."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS=1"
"""With tp or cp above 1 on GPUs before Blackwell, communication overlaps in the planned order only with this
environment variable; Megatron-LM stops without it under sequence parallelism."""
_VALUES = {
    "num-layers": "model.layers",
    "hidden-size": "model.hidden",
    "num-attention-heads": "model.heads",
    "ffn-hidden-size": "model.ffn_hidden",
    "seq-length": "model.seq_length",
    "max-position-embeddings": "model.seq_length",
    "vocab-size": "model.vocab_size",
    "make-vocab-size-divisible-by": "model.make_vocab_size_divisible_by",
    "attention-dropout": "model.attention_dropout",
    "hidden-dropout": "model.hidden_dropout",
    "norm-epsilon": "model.norm_eps",
    "tensor-model-parallel-size": "parallel.tp",
    "pipeline-model-parallel-size": "parallel.pp",
    "context-parallel-size": "parallel.cp",
    "pipeline-model-parallel-layout": "parallel.pipeline_layout",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "train-iters": "train.steps",
    "lr": "optim.lr",
}
"""Flag -> field; None is not written."""
_VALUES_OF_EXPERTS = {
    "num-experts": "moe.num_experts",
    "moe-router-topk": "moe.top_k",
    "moe-ffn-hidden-size": "moe.ffn_hidden",
    "moe-shared-expert-intermediate-size": "moe.shared_expert_ffn_hidden",
    "expert-model-parallel-size": "parallel.ep",
    "expert-tensor-parallel-size": "parallel.expert_tp",
    "moe-token-dispatcher-type": "moe.dispatcher",
}
_ATTENTION = {"fused": "auto", "cudnn": "fused", "flash": "flash", "unfused": "unfused"}
"""Kernel of `model.attention_backend` -> --attention-backend; Megatron-LM has no other."""
_SWITCHES = {
    "swiglu": ("model.activation", "swiglu"),
    "disable-bias-linear": ("model.bias", False),
    "untie-embeddings-and-output-weights": ("model.untie_embeddings_and_output_weights", True),
    "sequence-parallel": ("parallel.sequence_parallel", True),
    "use-distributed-optimizer": ("optim.distributed_optimizer", True),
    "overlap-grad-reduce": ("optim.overlap_grad_reduce", True),
    "overlap-param-gather": ("optim.overlap_param_gather", True),
    "grad-reduce-in-bf16": ("optim.grad_reduce_in_bf16", True),
    "bf16": ("optim.precision", "bf16"),
    "fp16": ("optim.precision", "fp16"),
}
"""Flag without a value -> the field and the value for which it is given."""
_WORDS = {
    "normalization": ("model.norm", {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}),
    "position-embedding-type": ("model.position", {"learned": "learned_absolute", "rope": "rope", "none": "none"}),
}
"""Flag -> the field, and Megatron-LM's words for its values."""


def megatron_arguments(config: RunConfig, *, overlaps_tensor_parallel: bool = False) -> str:
    """Return the arguments, one to a line. `config` has a schedule of `SCHEDULES_OF_MEGATRON`.

    overlaps_tensor_parallel: collectives of sequence parallelism run beside GEMMs (--tp-comm-overlap).
    """
    model, moe, parallel = config.model, config.moe, config.parallel
    given = {flag: _of(config, name) for flag, name in _VALUES.items()}
    given |= {flag: words[_of(config, name)] for flag, (name, words) in _WORDS.items()}
    given |= {flag: True for flag, (name, value) in _SWITCHES.items() if _of(config, name) == value}
    if model.position == "rope":
        given["rotary-base"] = int(model.rope_theta)
    if model.kv_heads is not None:
        given |= {"group-query-attention": True, "num-query-groups": model.kv_heads}
    if moe.num_experts:
        given |= {flag: _of(config, name) for flag, name in _VALUES_OF_EXPERTS.items()}
        given |= {"moe-grouped-gemm": moe.grouped_gemm, "moe-layer-freq": _pattern(config)}
    if parallel.vpp > 1 and parallel.pipeline_layout is None:
        given["num-virtual-stages-per-pipeline-rank"] = parallel.vpp
    if model.recompute_granularity != "none":
        given["recompute-granularity"] = model.recompute_granularity
    if model.recompute_granularity == "full":
        given |= {"recompute-method": model.recompute_method, "recompute-num-layers": model.recompute_num_layers}
    if model.recompute_granularity == "selective":
        given["recompute-modules"] = " ".join(model.recompute_modules)
    given["attention-backend"] = _ATTENTION.get(model.attention_backend)
    if parallel.cp > 1:
        given["cp-comm-type"] = parallel.cp_comm_type.replace("_", "")
    if overlaps_tensor_parallel and parallel.sequence_parallel:
        given["tp-comm-overlap"] = True
    if config.optim.precision == "fp16" and not config.optim.grad_reduce_in_bf16:
        given["accumulate-allreduce-grads-in-fp32"] = True
    if config.optim.fp8 != "none":
        given |= {"fp8-format": config.optim.fp8, "fp8-recipe": _fp8_recipe(config)}
    if model.activation == "gelu" and model.bias:
        given["no-bias-gelu-fusion"] = True
    lines = [_line(flag, value) for flag, value in given.items() if value is not None and value is not False]
    return "\n".join([*lines, ""])


def _of(config: RunConfig, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def _line(flag: str, value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) and set(value) & set("|[]*()") else value
    return f"--{flag}" if value is True else f"--{flag} {text}"


def _pattern(config: RunConfig) -> str | None:
    """Return the pattern of layers with experts, as Megatron-LM's list expression; None if all have them."""
    pattern = config.moe.layer_freq
    if set(pattern) == {1}:
        return None
    return f"({list(pattern)})*{config.model.layers // len(pattern)}".replace(" ", "")


def _fp8_recipe(config: RunConfig) -> str:
    return {"current": "tensorwise"}.get(config.optim.fp8_recipe, config.optim.fp8_recipe)
