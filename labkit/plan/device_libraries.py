"""Memory that libraries take on a GPU, whatever the model: workspaces of products, and Megatron-LM's global buffer.

No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from labkit.config import RunConfig
from labkit.plan.activations import Share
from labkit.plan.workload import Gpu, Libraries, Workload

MIB = 1 << 20
CUBLAS_THREADS = 2
"""Threads with a cuBLAS handle and workspace of their own: the one that runs forwards, and autograd's. Source:
aten/src/ATen/cuda/CublasHandlePool.cpp, a workspace for each pair of handle and stream."""
CUBLAS_DEFAULT: dict[Gpu, int] = {"v100": 8320 << 10, "a100": 8320 << 10, "h100": 32 * MIB, "b200": 32 * MIB}
"""torch's workspace without CUBLAS_WORKSPACE_CONFIG: `:4096:2:16:8` up to Ampere, `:4096:8` from Hopper. Source:
`getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp."""
ENGINE_WORKSPACE: dict[Gpu, int] = {"v100": 4 * MIB, "a100": 4 * MIB, "h100": 32 * MIB, "b200": 32 * MIB}
"""Source: `get_cublas_workspace_size_bytes` in transformer_engine/pytorch/cpp_extensions/gemm.py."""
GROUPED_STREAMS = 4
"""Further workspaces of grouped products, which run on this many streams. Source: `get_cublas_workspace` there, and
`nvte_get_num_compute_streams` in transformer_engine/common/util/multi_stream.h."""
USER_BUFFER_STREAMS = 3
"""Further workspaces of products that overlap with collectives. Source: `_NUM_MAX_UB_STREAMS` there."""


class Term(NamedTuple):
    """One item of a rank's memory."""

    name: str
    bytes: int
    formula: str
    """The formula with its inputs."""


def workspaces(config: RunConfig, libraries: Libraries) -> tuple[Term, Term]:
    """Return the workspaces of cuBLAS and of Transformer Engine."""
    gpu, setting = libraries.gpu, libraries.cublas_workspace
    default = CUBLAS_DEFAULT["a100" if gpu == "b200" and libraries.small_blackwell_workspace else gpu]
    each = default if setting is None else setting
    source = "torch's default" if setting is None else "CUBLAS_WORKSPACE_CONFIG"
    engines = 0
    if config.model.transformer_impl == "transformer_engine":
        engines = 1 + (GROUPED_STREAMS if config.moe.num_experts and config.moe.grouped_gemm else 0)
        engines += USER_BUFFER_STREAMS if libraries.user_buffers else 0
    elif libraries.megatron and config.moe.num_experts:
        engines = 1  # the router's product is the engine's in Megatron's local layers, too
    return (
        Term("cuBLAS", CUBLAS_THREADS * each, f"{CUBLAS_THREADS} threads x {each:,} bytes ({source}, {gpu})"),
        Term("Transformer Engine", engines * ENGINE_WORKSPACE[gpu], f"{engines} x {ENGINE_WORKSPACE[gpu]:,} ({gpu})"),
    )


def global_buffer(workload: Workload, share: Share) -> Term:
    """Return Megatron-LM's global memory buffer, which is as large as its largest use so far.

    Local layers multiply queries and keys into it, and gather a sequence that is split. A dispatcher that gathers the
    tokens of all ranks of its experts does so there. Source: `get_global_memory_buffer` in megatron/core.
    """
    model, parallel, moe = workload.config.model, workload.config.parallel, workload.config.moe
    uses = {"nothing": 0}
    if workload.libraries.megatron:
        gathered = share.tokens_between(model) * model.hidden * share.element_bytes
        if model.transformer_impl == "local":
            sequence = share.tokens(model) * model.hidden * share.element_bytes
            uses["a sequence"] = sequence if parallel.sequence_parallel else 0
            scores = share.tokens(model) * model.seq_length * model.heads // share.tp * share.element_bytes
            uses["scores of one layer, b a s^2 / t"] = scores if model.attention_backend == "unfused" else 0
        if moe.num_experts and moe.dispatcher == "allgather":
            uses["the tokens of all ranks of its experts"] = gathered * parallel.ep * parallel.expert_tp
    use = max(uses, key=lambda name: uses[name])
    return Term("global buffer", uses[use], f"for {use}")
