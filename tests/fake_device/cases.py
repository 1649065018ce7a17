"""The cases of `steps.py`: a small model of every family, in every precision, through every dispatcher and under every
kind of parallelism. We combine only features that share code. `make test` runs `DAILY`, which has every feature once;
`make sweep` runs all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.config import RunConfig

LAYERS, MICROBATCHES, SAMPLES = 2, 2, 2
WAITS = 2
"""Host waits per step: one for the loss, one for the norm (the finite and stop flags travel with it)."""
COUNTS = LAYERS * MICROBATCHES
"""Further waits where tokens are dispatched: each layer waits in each microbatch for the number of rows of each expert.
With drop-and-pad the counts follow from shapes, so nothing waits."""
REPLAYS: dict[str, Any] = {"steps": 3}
"""With graphs: a step that warms up, one that captures, one that replays."""


@dataclass(frozen=True)
class Case:
    """A configuration by dotted names, and what its step may do."""

    changes: dict[str, Any]
    waits: int = WAITS
    """Exactly how often the host waits for the device in a step."""
    copies: int = 0
    """At most so many copies from pageable memory in a step."""
    rank: int = 0
    """The rank that runs."""
    steps: int = 2
    """Waits, copies and GEMMs are counted in the last one only."""


SMALL = {
    "model.layers": LAYERS, "model.hidden": 128, "model.heads": 4, "model.vocab_size": 512, "model.seq_length": 64,
    "model.use_cpu_initialization": False, "optim.lr_schedule": "constant", "optim.precision": "bf16",
    "train.record_events": False, "train.micro_batch_size": SAMPLES,
}  # fmt: skip
LLAMA = {
    "model.kv_heads": 2, "model.position": "rope", "model.norm": "rmsnorm", "model.activation": "swiglu",
    "model.bias": False, "model.untie_embeddings_and_output_weights": True,
}  # fmt: skip
MAMBA = {
    "model.layers": 1, "model.family": "mamba", "model.position": "none", "model.norm": "rmsnorm",
    "model.mamba_state_dim": 16, "model.mamba_head_dim": 16, "model.mamba_num_groups": 4,
}  # fmt: skip
BERT, T5 = ({"model.layers": 1, "model.family": family} for family in ("bert", "t5"))
RELATIVE = T5 | {"model.position": "relative"}
MOE = LLAMA | {"moe.num_experts": 4, "moe.top_k": 2}
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}
SHARED = {"moe.shared_expert_ffn_hidden": 64, "moe.shared_expert_gate": True}
AHEAD = {"moe.shared_expert_overlap": True}
BUCKETS = {"optim.overlap_grad_reduce": True, "optim.bucket_size": 20_000}
ZERO = {"optim.distributed_optimizer": True}
ZERO_AHEAD = ZERO | BUCKETS | {"optim.overlap_param_gather": True}
IN_PART = {"graph.cuda_graph_modules": ("attn", "moe_router", "moe_preprocess")}
GRAPHS = {"graph.cuda_graph_impl": "local", "graph.cuda_graph_warmup_steps": 1}
FP32, FP16 = {"optim.precision": "fp32"}, {"optim.precision": "fp16"}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1, "model.embedding_dropout": 0.1}


def fp8(recipe: str) -> dict[str, Any]:
    """Products in fp8 with the scales of a recipe, of one layer."""
    return {"model.layers": 1, "optim.fp8": "hybrid", "optim.fp8_recipe": recipe}


def ranks(**sizes: Any) -> dict[str, Any]:
    """A layout; `dp` is what the other sizes leave of the ranks."""
    return {f"parallel.{name}": size for name, size in sizes.items()}


CASES = {
    "gpt fp32": Case(FP32),
    "gpt bf16": Case({}),
    "gpt fp16": Case(FP16),
    "gpt dropout": Case(DROPOUT),
    "gpt unfused attention": Case({"model.attention_backend": "unfused"} | DROPOUT),
    "gpt 50257 tokens": Case({"model.vocab_size": 50257, "model.make_vocab_size_divisible_by": 128}),
    "gpt recompute full": Case({"model.recompute_granularity": "full"} | DROPOUT),
    "gpt recompute selective": Case(
        {"model.recompute_granularity": "selective", "model.recompute_modules": ("core_attn", "mlp")} | DROPOUT
    ),
    "llama bf16": Case(LLAMA),
    **{f"llama fp8 {recipe}": Case(LLAMA | fp8(recipe)) for recipe in ("delayed", "current", "blockwise")},
    "bert fp32": Case(BERT | FP32, copies=4),  # flags in `Pipeline.means`, of 2 losses and microbatches
    "bert bf16": Case(BERT, copies=4),
    "t5 fp32": Case(T5 | FP32),
    "t5 bf16": Case(T5),
    "t5 relative bf16": Case(RELATIVE),
    "mamba fp32": Case(MAMBA | FP32),
    "mamba bf16": Case(MAMBA),
    "mamba hybrid bf16": Case(MAMBA | {"model.layers": 2, "model.hybrid_override_pattern": "M*"}),
    **{
        f"moe {name}": Case(MOE | {"moe.dispatcher": name}, WAITS + COUNTS)
        for name in ("alltoall", "allgather", "local")
    },
    "moe padded": Case(MOE | PADDED),
    "moe local padded": Case(MOE | PADDED | {"moe.dispatcher": "local"}),
    "moe sequential experts": Case(MOE | {"moe.grouped_gemm": False}, WAITS + COUNTS),
    "moe fp16 losses": Case(MOE | FP16 | {"moe.aux_loss_coeff": 0.1, "moe.z_loss_coeff": 0.1}, WAITS + COUNTS),
    "moe shared": Case(MOE | SHARED, WAITS + COUNTS),
    "moe shared overlap": Case(MOE | SHARED | AHEAD, WAITS + COUNTS),
    "moe fp8": Case(MOE | fp8("delayed") | {"optim.fp8": "e4m3"}, WAITS + MICROBATCHES),
    "moe fp8 hybrid": Case(MOE | SHARED | fp8("current"), WAITS + MICROBATCHES),
    "moe expert bias": Case(MOE | {"moe.score_function": "sigmoid", "moe.expert_bias": True}, WAITS + COUNTS),
    "graphs gpt": Case(GRAPHS, **REPLAYS),
    "graphs gpt full iteration": Case(GRAPHS | {"graph.cuda_graph_impl": "full_iteration"}, **REPLAYS),
    "graphs mamba": Case(MAMBA | GRAPHS, **REPLAYS),
    "graphs gpt fp8": Case(fp8("delayed") | GRAPHS, **REPLAYS),
    "graphs moe shared overlap": Case(MOE | PADDED | SHARED | AHEAD | GRAPHS, **REPLAYS),
    "graphs moe in part": Case(MOE | GRAPHS | IN_PART, WAITS + COUNTS, **REPLAYS),
    "graphs moe fp8": Case(MOE | PADDED | fp8("current") | GRAPHS, **REPLAYS),
    "graphs dp2": Case(BUCKETS | GRAPHS | ranks(dp=2), **REPLAYS),
    "graphs tp2": Case(LLAMA | GRAPHS | ranks(tp=2, sequence_parallel=True), **REPLAYS),
    "dp2": Case(BUCKETS | ranks(dp=2)),
    "dp2 zero": Case(ZERO_AHEAD | ranks(dp=2)),
    "dp2 shared overlap": Case(MOE | SHARED | AHEAD | BUCKETS | ranks(dp=2), WAITS + COUNTS),
    "tp2": Case(ranks(tp=2) | DROPOUT),
    "tp2 sequence parallel": Case(LLAMA | ranks(tp=2, sequence_parallel=True)),
    "tp2 sequence parallel fp8": Case(LLAMA | fp8("current") | ranks(tp=2, sequence_parallel=True)),
    "tp2 mamba": Case(MAMBA | ranks(tp=2)),
    "tp2 t5 relative": Case(RELATIVE | ranks(tp=2)),
    "cp2 ring first rank": Case(LLAMA | ranks(cp=2, cp_comm_type="p2p")),
    "cp2 ring last rank": Case(LLAMA | ranks(cp=2, cp_comm_type="p2p"), rank=1),
    "cp2 all_gather": Case(LLAMA | ranks(cp=2, cp_comm_type="all_gather")),
    "ep2 alltoall": Case(MOE | BUCKETS | ranks(ep=2, dp=2), WAITS + COUNTS),
    "ep2 allgather": Case(MOE | BUCKETS | {"moe.dispatcher": "allgather"} | ranks(ep=2, dp=2), WAITS + COUNTS),
    "ep2 padded": Case(MOE | PADDED | BUCKETS | ranks(ep=2, dp=2)),
    "ep2 shared overlap": Case(MOE | SHARED | AHEAD | BUCKETS | ranks(ep=2, dp=2), WAITS + COUNTS),
    "tp2 ep2 zero": Case(MOE | ZERO_AHEAD | ranks(tp=2, sequence_parallel=True, ep=2, dp=2), WAITS + COUNTS),
    "pp2 first stage": Case(LLAMA | ranks(pp=2)),
    "pp2 last stage": Case(LLAMA | ranks(pp=2), rank=1),
    "pp2 tp2": Case(ranks(pp=2, tp=2)),
    "pp2 interleaved": Case({"model.layers": 4} | ranks(pp=2, vpp=2)),
    "pp2 zero bubble": Case(LLAMA | {"schedule.name": "zero_bubble_h1"} | ranks(pp=2)),
    "pp2 dp2 zero": Case(ZERO_AHEAD | ranks(pp=2, dp=2), rank=1),
    "tp2 ep2 etp1 padded": Case(MOE | PADDED | ranks(tp=2, sequence_parallel=True, ep=2, etp=1)),
    "cp2 tp2 per token loss": Case({"optim.calculate_per_token_loss": True} | ranks(cp=2, tp=2)),
}

DAILY = (
    "gpt fp16", "gpt unfused attention", "gpt recompute selective", "llama bf16", "llama fp8 delayed", "bert fp32",
    "t5 relative bf16", "mamba hybrid bf16", "moe padded", "moe sequential experts", "moe fp16 losses",
    "moe shared overlap", "moe fp8", "moe expert bias", "graphs gpt full iteration", "graphs moe shared overlap",
    "graphs moe in part", "graphs dp2", "dp2 shared overlap", "tp2 sequence parallel fp8", "tp2 t5 relative",
    "cp2 ring last rank", "cp2 all_gather", "ep2 allgather", "tp2 ep2 zero", "pp2 interleaved", "pp2 zero bubble",
    "pp2 dp2 zero", "tp2 ep2 etp1 padded", "cp2 tp2 per token loss",
)  # fmt: skip
"""Every family, precision, dispatcher, kind of graph and kind of parallelism, and every kind of overlap."""


def config_of(case: Case) -> tuple[RunConfig, int]:
    """The configuration and the number of ranks of its layout."""
    sizes = {name: case.changes.get(f"parallel.{name}", 1) for name in ("tp", "cp", "pp", "dp")}
    world = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    changes = SMALL | {name: value for name, value in case.changes.items() if name != "parallel.dp"}
    changes["train.global_batch_size"] = SAMPLES * MICROBATCHES * sizes["dp"]
    return RunConfig().override(changes), world
