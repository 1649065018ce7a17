"""Generations of training software: what their code does that no configuration says. No torch.

A generation is a fact of a code base at a time, read from it. How fast its GEMMs run on a machine is a number of the
machine (`Machine.software`), because that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Software:
    """What the kernels and the communication of one generation do."""

    name: str
    """The name, as in `Workload.software`."""
    doc: str
    """Which code it is."""
    fused_softmax: bool = True
    """Scale, mask and softmax of unfused attention are one kernel; else four."""
    fused_elementwise: bool = True
    """Bias and GeLU, and bias, dropout and residual addition, are one kernel each; else one each per operation."""
    overlaps_input_gradient: bool = True
    """The collective of a column-parallel layer's input gradient runs while the weight gradient is computed."""
    overlaps_tensor_parallel: bool = False
    """All-gathers and reduce-scatters of sequence parallelism run in pieces during the GEMM beside them
    (`--tp-comm-overlap`)."""
    scatters_transfers: bool = False
    """Between stages each rank of tp sends its share, and the receivers gather the whole over their own links
    (arXiv 2104.04473, section 4.1). Sequence parallelism needs no gather."""
    stops_recomputation_early: bool = False
    """Recomputation of a whole layer ends when the last tensor that backward needs is there: the last product of the
    MLP is left out (torch.utils.checkpoint without reentry, since torch 2.1)."""
    selective_share: float | None = None
    """Share of a layer's products that selective recomputation repeats, with all kernels that only move bytes; None
    repeats what `model.recompute_modules` names."""
    gathers_tensor_by_tensor: bool = False
    """Sharded weights are gathered one tensor at a time, by one ring with one adapter for each node, and half of it
    beside computation; else all weights of a layer at once, beside the layer before."""
    sharded_gradient_bytes: int = 4
    """Bytes of a gradient that is scattered to fully sharded ranks; FSDP2 and Megatron's FSDP sum in fp32."""
    fp16_gradient_bytes: int = 2
    """Bytes of a gradient that travels in a run with fp16."""
    overlap_slowdown: float = 0.3
    """Seconds by which a second of hidden communication slows the computation beside it, as both use SMs and HBM. 0.3
    follows from the backward of one layer in arXiv 2205.05198, table 4: 11.9 ms."""
    optimizer_bytes: int = 50
    """Bytes that the update of one parameter reads and writes, beyond Adam's own 30: cast or unscale (6), norm (4),
    clip (8), and the copy of the new weight (2)."""


TITAN_SHARE = 0.37
"""torchtitan's selective recomputation repeats every second product of a layer (wk, wo, w3; its rule from memory,
unverified): of a Llama 3.1 8B (1/4 + 1 + 3.5) / (2.5 + 10.5) of the operations."""
OPTIMIZER_BYTES_IN_PLACE = 44
"""Bytes per parameter of an update without a cast and without a copy: of the 50 of `Software.optimizer_bytes` less
unscaling (4) and the new weight in 16 bits (2)."""
SOFTWARE = {
    row.name: row
    for row in (
        Software(
            "megatron_2019",
            "Megatron-LM of arXiv 1909.08053: apex's LayerNorm, GeLU by torch.jit, softmax of separate kernels",
            fused_softmax=False,
            fused_elementwise=False,
            overlaps_input_gradient=False,
        ),
        Software(
            "megatron_2021",
            "Megatron-LM of arXiv 2104.04473: fused softmax, no overlap of tensor-parallel communication",
            overlaps_input_gradient=False,
            scatters_transfers=True,
        ),
        Software(
            "megatron_2022",
            "Megatron-LM of arXiv 2205.05198: the input gradient's collective overlaps the weight gradient",
            scatters_transfers=True,
        ),
        Software(
            "megatron_2023",
            "the Megatron-LM of 2023 of arXiv 2401.10241, on RoCE",
        ),
        Software(
            "megatron_core",
            "Megatron-Core with Transformer Engine and fused attention",
            fp16_gradient_bytes=4,
        ),
        Software(
            "megatron_tp_overlap",
            "Megatron-Core with --tp-comm-overlap",
            overlaps_tensor_parallel=True,
            fp16_gradient_bytes=4,
        ),
        Software(
            "foundry_2023",
            "MosaicML's llm-foundry: eager torch with flash attention and FSDP",
            fused_elementwise=False,
            stops_recomputation_early=True,
            sharded_gradient_bytes=2,  # PURE mixed precision
            overlap_slowdown=0.75,  # fitted on A100 and H100: 0.7 to 0.8 is best on both
            optimizer_bytes=44,
        ),
        Software(
            "zero_2021",
            "DeepSpeed's ZeRO-3 of 2021 around Megatron-LM's kernels",
            overlaps_input_gradient=False,
            gathers_tensor_by_tensor=True,
        ),
        Software(
            "labkit_cpu",
            "labkit on CPUs: eager torch, gloo",
            fused_softmax=False,
            fused_elementwise=False,
            overlap_slowdown=1.0,  # gloo's threads and the ranks share the cores, so what is hidden is computed later
            optimizer_bytes=OPTIMIZER_BYTES_IN_PLACE,
        ),
        Software(
            "torchtitan",
            "torchtitan: torch.compile, FSDP2 and DTensor",
            stops_recomputation_early=True,
            selective_share=TITAN_SHARE,
            optimizer_bytes=44,
        ),
        Software(
            "torchtitan_async",
            "torchtitan with asynchronous tensor parallelism (torch's symmetric memory)",
            stops_recomputation_early=True,
            selective_share=TITAN_SHARE,
            overlaps_tensor_parallel=True,
            optimizer_bytes=44,
        ),
    )
}
"""Name -> generation."""
MEGATRON_OF_TODAY = ("megatron_core", "megatron_tp_overlap")
"""Generations whose assumptions hold for a run that today's pretrain_gpt.py makes of a plan's arguments."""


def software_of(name: str) -> Software:
    """Return the generation with this name; ValueError for an unknown one."""
    if name not in SOFTWARE:
        raise ValueError(f"software is {name!r}; choose one of {', '.join(SOFTWARE)}")
    return SOFTWARE[name]
