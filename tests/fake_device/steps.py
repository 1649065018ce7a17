"""Training steps of labkit on the fake device: two optimizer steps of each case, by `train_step` itself.

A small model of every family, in every precision, through every dispatcher and under every kind of parallelism. The
second step is looked at for waits and copies: what is made once, such as a table of angles, was made in the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from audit import Audit
from fake_groups import fake_groups
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from labkit.config import RunConfig
from labkit.moe.dispatch import host_copy
from labkit.parallel.parameters import weights
from labkit.train.forward_step import forward_step_of
from labkit.train.pipeline import Pipeline
from labkit.train.preflight import schedule_of
from labkit.train.pretraining import Run, setup_model_and_optimizer
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

MICROBATCHES, SAMPLES = 2, 2
WAITS = 2
"""Of each step: for the loss; and for the norm, with what comes in the same exchange (finite, stop)."""
COUNTS = 2 * MICROBATCHES
"""More of them where tokens travel: each layer waits in each microbatch for the rows of each expert. Shapes tell them
under drop-and-pad."""


@dataclass(frozen=True)
class Case:
    """A configuration by dotted names, and what its step may do."""

    changes: dict[str, Any]
    waits: int = WAITS
    """Times that the host waits for the device in a step."""
    copies: int = 0
    """At most so many copies from pageable memory in a step."""
    rank: int = 0
    """The rank that runs."""


SMALL = {
    "model.layers": 2, "model.hidden": 128, "model.heads": 4, "model.vocab_size": 512, "model.seq_length": 64,
    "model.use_cpu_initialization": False, "optim.lr_schedule": "constant", "optim.precision": "bf16",
    "train.record_events": False, "train.micro_batch_size": SAMPLES,
}  # fmt: skip
LLAMA = {
    "model.kv_heads": 2, "model.position": "rope", "model.norm": "rmsnorm", "model.activation": "swiglu",
    "model.bias": False, "model.untie_embeddings_and_output_weights": True,
}  # fmt: skip
MAMBA = {
    "model.family": "mamba", "model.position": "none", "model.norm": "rmsnorm", "model.mamba_state_dim": 16,
    "model.mamba_head_dim": 16, "model.mamba_num_groups": 4,
}  # fmt: skip
BERT, T5 = {"model.family": "bert"}, {"model.family": "t5"}
RELATIVE = T5 | {"model.position": "relative"}
MOE = LLAMA | {"moe.num_experts": 4, "moe.top_k": 2}
PADDED = {"moe.capacity_factor": 1.0, "moe.pad_to_capacity": True}
SHARED = {"moe.shared_expert_ffn_hidden": 64, "moe.shared_expert_gate": True}
AHEAD = {"moe.shared_expert_overlap": True}
BUCKETS = {"optim.overlap_grad_reduce": True, "optim.bucket_size": 20_000}
ZERO = {"optim.distributed_optimizer": True}
ZERO_AHEAD = ZERO | BUCKETS | {"optim.overlap_param_gather": True}
FP32, FP16 = {"optim.precision": "fp32"}, {"optim.precision": "fp16"}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1, "model.embedding_dropout": 0.1}


def fp8(recipe: str) -> dict[str, Any]:
    """Products in fp8 with the scales of a recipe."""
    return {"optim.fp8": "hybrid", "optim.fp8_recipe": recipe}


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
    "gpt distributed optimizer": Case(ZERO),
    "llama bf16": Case(LLAMA),
    **{f"llama fp8 {recipe}": Case(LLAMA | fp8(recipe)) for recipe in ("delayed", "current", "blockwise")},
    "bert fp32": Case(BERT | FP32, copies=4),  # flags in `Pipeline.means`, of 2 losses and microbatches
    "bert bf16": Case(BERT, copies=4),
    "t5 fp32": Case(T5 | FP32),
    "t5 bf16": Case(T5),
    "t5 relative bf16": Case(RELATIVE),
    "mamba fp32": Case(MAMBA | FP32),
    "mamba bf16": Case(MAMBA),
    "mamba hybrid bf16": Case(MAMBA | {"model.hybrid_override_pattern": "M*"}),
    **{f"moe {name}": Case(MOE | {"moe.dispatcher": name}) for name in ("alltoall", "allgather", "local")},
    "moe padded": Case(MOE | PADDED),
    "moe local padded": Case(MOE | PADDED | {"moe.dispatcher": "local"}),
    "moe sequential experts": Case(MOE | {"moe.grouped_gemm": False}, WAITS + COUNTS),
    "moe fp16 losses": Case(MOE | FP16 | {"moe.aux_loss_coeff": 0.1, "moe.z_loss_coeff": 0.1}, WAITS + COUNTS),
    "moe shared": Case(MOE | SHARED, WAITS + COUNTS),
    "moe shared overlap": Case(MOE | SHARED | AHEAD, WAITS + COUNTS),
    "moe expert bias": Case(MOE | {"moe.score_function": "sigmoid", "moe.expert_bias": True}, WAITS + COUNTS),
    "dp2": Case(BUCKETS | ranks(dp=2)),
    "dp2 zero": Case(ZERO_AHEAD | ranks(dp=2)),
    "dp2 shared overlap fp32": Case(MOE | SHARED | AHEAD | BUCKETS | FP32 | ranks(dp=2), WAITS + COUNTS),
    "dp2 shared overlap": Case(MOE | SHARED | AHEAD | BUCKETS | ranks(dp=2), WAITS + COUNTS),
    "dp2 zero mamba": Case(MAMBA | ZERO_AHEAD | ranks(dp=2)),
    "tp2": Case(ranks(tp=2) | DROPOUT),
    "tp2 llama": Case(LLAMA | ranks(tp=2)),
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
}


def config_of(case: Case) -> tuple[RunConfig, int]:
    """The configuration and the number of ranks of its layout."""
    sizes = {name: case.changes.get(f"parallel.{name}", 1) for name in ("tp", "cp", "pp", "dp")}
    world = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    changes = SMALL | {name: value for name, value in case.changes.items() if name != "parallel.dp"}
    changes["train.global_batch_size"] = SAMPLES * MICROBATCHES * sizes["dp"]
    return RunConfig().override(changes), world


def batches(config: RunConfig) -> Iterator[dict[str, Tensor]]:
    """Endless microbatches of one rank."""
    model, device = config.model, torch.device("cuda", 0)
    shape = SAMPLES, model.seq_length // config.parallel.cp

    def ids() -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def ones(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    while True:
        if model.family == "bert":
            yield {
                "tokens_BS": ids(), "types_BS": ids(), "labels_BS": ids(), "loss_mask_BS": ones(),
                "is_random_B": ids()[:, 0].contiguous(), "padding_mask_BS": ones(torch.int64),
            }  # fmt: skip
        elif model.family == "t5":
            yield {
                "text_enc": ids(), "text_dec": ids(), "labels": ids(), "loss_mask": ones(),
                "enc_mask": ones(torch.int64),
            }  # fmt: skip
        else:
            yield {"tokens_BS": ids(), "labels_BS": ids(), "loss_mask_BS": ones()}


@contextmanager
def without_numbers(audit: Audit, rows: int) -> Iterator[None]:
    """Inside the block weights are not drawn, and the counts of a router share `rows` equally."""
    arrived = host_copy.HostCopy.wait

    def zeros(name: str, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: Any = None, **_: Any):
        kept = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.zeros(tuple(shape), dtype=kept, device=device or "cpu")

    def equal(copy: host_copy.HostCopy) -> Tensor:
        counts = arrived(copy)
        audit.host_uses(counts, "counts of a router")
        with unset_fake_temporarily():
            return torch.full(counts.shape, rows // counts.shape[-1], dtype=counts.dtype)

    with patch.object(weights, "draw", zeros), patch.object(host_copy.HostCopy, "wait", equal):
        yield


def two_steps(case: Case, audit: Audit) -> dict[str, Any]:
    """Build the model of the case and train it for two steps; the audit then knows the second.

    Returns what the case allows."""
    config, world = config_of(case)
    config.validate(world)
    schedule = schedule_of(config, world)
    tokens = SAMPLES * config.model.seq_length // config.parallel.cp
    rows = tokens // (config.parallel.tp if config.parallel.sequence_parallel else 1) * config.moe.top_k
    with ExitStack() as stack:
        stack.enter_context(without_numbers(audit, rows))
        groups = stack.enter_context(fake_groups(audit, config.parallel, world, case.rank))
        chunks, optimizer, _ = setup_model_and_optimizer(Run(config, groups, schedule, Timers(0)))
        pipeline = Pipeline(config, groups, chunks, forward_step_of(config.model.family), schedule)
        given = batches(config)
        for step in range(2):
            audit.begin()
            train_step(pipeline, optimizer, Timers(0), given, step=step, lr=1e-3, clip_grad=0.5)
    return {"allowed": {"waits": case.waits, "copies": case.copies}}
