"""What the times of a layer depend on beside the model and the machine: sizes, groups of ranks, types. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from labkit.config import ParallelConfig
from labkit.plan.collectives import Group
from labkit.plan.software import Software, software_of
from labkit.plan.workload import Workload

_ALONE = Group(1)


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank's view of a workload."""

    micro_batch: int
    tp: Group
    cp: Group
    dp: Group
    """Ranks with the same parameters outside experts: dp x cp."""
    pp: Group
    ep: Group
    etp: Group
    edp: Group
    """Ranks with the same experts."""
    sequence_parallel: bool
    precision: str
    """Type of activations and of products outside linear layers."""
    linear_precision: str
    """Type of the operands of linear layers."""
    software: Software
    routing_skew: float
    splits_backward: bool
    cp_gathers: bool
    """Context parallelism gathers all keys and values at once (`parallel.cp_comm_type`)."""
    graphed: bool
    """Layers run as CUDA graphs."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return {"fp32": 4, "fp64": 8}.get(self.precision, 2)

    def of_stage(self) -> Layout:
        """Return it without what no stage depends on whose weights are not sharded: replicas."""
        return replace(self, dp=_ALONE, edp=_ALONE)

    def of_layer(self) -> Layout:
        """Return it without what no layer depends on: pipeline and replicas."""
        return replace(self, dp=_ALONE, pp=_ALONE, edp=_ALONE)

    def of_attention(self) -> Layout:
        """Return it without what attention does not depend on: pipeline, replicas and experts."""
        return replace(self, dp=_ALONE, pp=_ALONE, ep=_ALONE, etp=_ALONE, edp=_ALONE, routing_skew=1.0)

    def of_tokens(self, *, experts: bool) -> Layout:
        """Return it without what an MLP of a given number of tokens does not depend on.

        Experts hide no collective beside a weight gradient, so a split backward does not change them.
        """
        alone = replace(self, micro_batch=1, cp=_ALONE, dp=_ALONE, pp=_ALONE, edp=_ALONE, cp_gathers=False)
        if experts:
            return replace(alone, splits_backward=False)
        return replace(alone, ep=_ALONE, etp=_ALONE, routing_skew=1.0)


def layout_of(workload: Workload, *, splits_backward: bool = False) -> Layout:
    """Return the layout of a workload."""
    config = workload.config
    parallel = config.parallel
    groups = rank_groups(parallel, workload.world_size)
    precision = config.optim.precision
    return Layout(
        micro_batch=config.train.micro_batch_size,
        **groups,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        precision=precision,
        linear_precision="fp8" if config.optim.fp8 != "none" else precision,
        software=software_of(workload.software),
        routing_skew=workload.expert_load,
        splits_backward=splits_backward,
        cp_gathers=parallel.cp_comm_type == "all_gather",
        graphed=config.graph.cuda_graph_impl not in ("none", "emulated"),
    )


@lru_cache(maxsize=4096)
def rank_groups(parallel: ParallelConfig, world_size: int) -> dict[str, Group]:
    """Return the group of each axis. Its stride is the product of the axes that vary faster in `parallel.order`."""
    dp = world_size // (parallel.tp * parallel.cp * parallel.pp)
    etp, ep = parallel.expert_tp, parallel.ep
    edp = world_size // (etp * ep * parallel.pp)
    dense = {"tp": parallel.tp, "cp": parallel.cp, "ep": 1, "dp": dp, "pp": parallel.pp}
    expert = {"tp": etp, "cp": 1, "ep": ep, "dp": edp, "pp": parallel.pp}
    of_dense, of_expert = _strides(parallel.order, dense), _strides(parallel.order, expert)
    return {
        "tp": Group(parallel.tp, of_dense["tp"]),
        "cp": Group(parallel.cp, of_dense["cp"]),
        "dp": Group(dp * parallel.cp, min(of_dense["cp"], of_dense["dp"])),
        "pp": Group(parallel.pp, of_dense["pp"]),
        "ep": Group(ep, of_expert["ep"]),
        "etp": Group(etp, of_expert["tp"]),
        "edp": Group(edp, of_expert["dp"]),
    }


def _strides(order: str, sizes: dict[str, int]) -> dict[str, int]:
    strides, stride = {}, 1
    for axis in order.split("-"):
        strides[axis] = stride
        stride *= sizes[axis]
    return strides
