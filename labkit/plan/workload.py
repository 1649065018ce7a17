"""What is planned: a configuration, the number of its ranks, and what a `RunConfig` cannot say. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from labkit.config import RunConfig
from labkit.plan.latent_attention import Latent

Gpu = Literal["v100", "a100", "h100", "b200"]
"""Generation of a GPU: V100 (Volta), A100 (Ampere), H100 and H200 (Hopper), B200, GB200 and GB300 (Blackwell)."""


@dataclass(frozen=True, kw_only=True)
class Libraries:
    """The libraries around a run on GPUs, as far as they decide its memory. The defaults are those of labkit."""

    megatron: bool = False
    """True for a run of Megatron-LM, false for one of labkit."""
    gpu: Gpu = "h100"
    cublas_workspace: int | None = None
    """Bytes of a workspace by CUBLAS_WORKSPACE_CONFIG; None is torch's default for the GPU."""
    small_blackwell_workspace: bool = False
    """True for a torch that gives Blackwell the workspace of Ampere, as in NVIDIA's containers until April 2026."""
    expandable_segments: bool = False
    """The setting of torch's allocator of that name; with it, a block has no unused remainder."""
    user_buffers: bool = False
    """Transformer Engine overlaps products with tensor-parallel collectives (Megatron's --tp-comm-overlap)."""
    float8_parameters: bool = False
    """Weights of linear layers are fp8 (Megatron's --fp8-param-gather), with `optim.fp8`."""
    fused_cross_entropy: bool = False
    """Megatron's --cross-entropy-loss-fusion."""


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Parts of a model or of its training that labkit does not have."""

    qk_norm: bool = False
    """Norms of queries and keys in every layer (--qk-layernorm), one for all heads; of both latents with `latent`."""
    latent: Latent | None = None
    """Multi-latent attention in every layer."""
    depths: int = 0
    """Depths of multi-token prediction (--mtp-num-layers)."""
    deferred_gradients: int | None = None
    """Most microbatches whose gradient of the output layer waits (--defer-embedding-wgrad-compute); 0 is all of them,
    None is none."""
    muon: bool = False
    """Muon (arXiv 2502.16982) updates the matrices of layers: with one moment where Adam has two."""
    position_rows: int | None = None
    """Rows of the table of learned positions; None is `model.seq_length`."""
    attention_mask: bool = False
    """Each microbatch brings a mask of S x S booleans per sample, as Megatron's data loader makes unless
    --no-create-attention-mask-in-dataloader is given."""


@dataclass(frozen=True)
class Workload:
    """A run on `world_size` ranks, of a machine that is named elsewhere."""

    config: RunConfig
    world_size: int
    fsdp: bool = False
    """True if weights, gradients and optimizer are sharded over data parallelism (ZeRO-3, arXiv 1910.02054)."""
    reshard_after_forward: bool = True
    """With `fsdp`: gather the weights once more for backward. False keeps them in between (SHARD_GRAD_OP)."""
    expert_load: float = 1.0
    """Rows that the fullest rank's experts get, relative to the mean over ranks; routing decides it."""
    software: str = "megatron_core"
    """Generation of the training code; a name in `labkit.plan.software.SOFTWARE`. It decides the times."""
    extras: Extras = field(default_factory=Extras)
    libraries: Libraries = field(default_factory=Libraries)
    """Decide the memory."""

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.config.data_parallel_size(self.world_size)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one data-parallel rank."""
        return self.config.num_microbatches(self.world_size)
