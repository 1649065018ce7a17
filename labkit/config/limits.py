"""What single fields may hold: words, numbers and files. Tables only; `rules` applies them."""

from __future__ import annotations

from typing import NamedTuple

LARGEST = 2**31 - 1
"""Largest size and count, and largest world size: ranks are 32-bit integers in every transport."""

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes that an order string may name."""

CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": ("gpt", "bert", "t5"),
    "model.position": ("learned", "rope"),
    "model.norm": ("layernorm", "rmsnorm"),
    "model.activation": ("gelu", "gelu_tanh", "swiglu"),
    "model.transformer_impl": ("local", "transformer_engine"),
    "model.attention_backend": ("fused", "unfused"),
    "model.recompute_granularity": ("none", "selective", "full"),
    "model.recompute_method": ("uniform", "block"),
    "parallel.cp_comm_type": ("p2p", "all_gather"),
    "parallel.distributed_backend": ("auto", "gloo", "nccl"),
    "schedule.name": ("auto", "gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zbv", "dualpipe_v"),
    "moe.dispatcher": ("allgather", "alltoall", "local"),
    "moe.score_function": ("softmax", "sigmoid"),
    "moe.router_dtype": ("fp32", "fp64", "model"),
    "moe.load_balancing": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "moe.drop_policy": ("probs", "position"),
    "graph.cuda_graph_impl": ("none", "local", "transformer_engine", "emulated"),
    "optim.lr_schedule": ("constant", "cosine", "linear", "inverse-square-root", "wsd"),
    "optim.wsd_decay_style": ("exponential", "linear", "cosine", "minus-sqrt"),
    "optim.precision": ("fp32", "bf16", "fp16", "fp64"),
    "optim.fp8": ("none", "e4m3", "hybrid"),
    "optim.fp8_recipe": ("delayed", "current", "blockwise"),
    "optim.fp8_amax_compute_algo": ("max", "most_recent"),
    "optim.data_parallel": ("bucketed", "naive"),
}
"""Words that a field may hold."""

CHUNKS: dict[str, int] = {"gpipe": 1, "1f1b": 1, "zero_bubble_h1": 1, "zbv": 2, "dualpipe_v": 2}
"""Model chunks a rank of the schedules that fix their number; the others run `parallel.vpp`."""

SPLIT_BACKWARDS = ("zero_bubble_h1", "zbv", "dualpipe_v")
"""Schedules that run input and weight gradients apart."""

RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm", "moe", "shared_experts")
"""Parts of a layer that `model.recompute_modules` may name."""

GRAPH_SCOPES = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess")
"""Parts of a layer that `graph.cuda_graph_scope` may name."""


class Interval(NamedTuple):
    """Numbers that a field may hold."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    def broken(self, value: float) -> str:
        """The rule that `value` breaks, or an empty string. NaN breaks every rule."""
        if not (value > self.low if self.low_open else value >= self.low):
            return f"must be {'greater than' if self.low_open else 'at least'} {self.low:g}"
        if not (value < self.high if self.high_open else value <= self.high):
            high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
            return f"must be {'below' if self.high_open else 'at most'} {high}"
        return ""


COUNT = Interval(1, LARGEST)
_COUNT_OR_NONE = Interval(0, LARGEST)
_SHARE = Interval(0, 1, high_open=True)
_POSITIVE = Interval(0, 1e30, low_open=True)
_NOT_NEGATIVE = Interval(0, 1e30)
RANGES: dict[str, Interval] = {
    **dict.fromkeys(
        ("model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.ffn_hidden", "model.vocab_size",
         "model.make_vocab_size_divisible_by", "model.seq_length", "parallel.tp", "parallel.pp", "parallel.vpp",
         "parallel.cp", "parallel.ep", "parallel.etp", "parallel.split_rank", "schedule.microbatch_group_size",
         "moe.top_k", "moe.ffn_hidden", "moe.num_groups", "moe.group_topk", "moe.shared_expert_ffn_hidden",
         "optim.decay_steps", "optim.wsd_decay_steps", "train.steps", "train.micro_batch_size",
         "train.global_batch_size", "train.log_interval", "train.keep_event_steps", "model.recompute_num_layers",
         "optim.bucket_size", "optim.num_distributed_optimizer_instances", "optim.loss_scale_window",
         "optim.hysteresis", "optim.fp8_amax_history_len"), COUNT),
    **dict.fromkeys(
        ("parallel.rank_offset", "moe.num_experts", "graph.cuda_graph_warmup_steps", "optim.warmup_steps",
         "train.eval_interval", "train.eval_steps",
         "model.num_microbatches_with_partial_activation_checkpoints"), _COUNT_OR_NONE),
    **dict.fromkeys(
        ("model.embedding_dropout", "model.attention_dropout", "model.hidden_dropout", "optim.beta1", "optim.beta2",
         "train.label_smoothing", "moe.input_jitter"), _SHARE),
    **dict.fromkeys(("model.rope_theta", "model.norm_eps", "model.init_std", "optim.eps",
         "optim.initial_loss_scale", "optim.min_loss_scale", "moe.topk_scaling_factor", "moe.capacity_factor",
         "moe.expert_bias_update_rate"), _POSITIVE),
    **dict.fromkeys(("optim.lr", "optim.min_lr", "optim.weight_decay", "optim.clip_grad", "moe.aux_loss_coeff",
         "moe.z_loss_coeff"), _NOT_NEGATIVE),
    "parallel.distributed_timeout_minutes": Interval(0, 10_080, low_open=True),
    "optim.loss_scale": Interval(1, 1e30),
    "optim.fp8_margin": Interval(0, 64),
    "train.timing_log_level": Interval(0, 2),
    "train.seed": Interval(0, 2**32 - 1),
}  # fmt: skip
"""Numbers that a field may hold, both ends included unless marked open."""

FILES = ("schedule.path", "data.path", "data.tokenizer")
"""Fields that name an existing file."""
