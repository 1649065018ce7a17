"""A layout as text: its sizes for a sentence, and its name for the rows of a comparison.

    `layout_words`    8 ranks: tp 2 x cp 1 x dp 2 x pp 2
    `layout_name`     tp2 cp2 pp1 dp2 sp recompute full zero

The name leaves out everything that is at its default, so a plain layout has a short name.
"""

from __future__ import annotations

from pathlib import Path

from labkit.config import GraphConfig, ModelConfig, OptimConfig, RunConfig
from labkit.config.axis_sizes import axis_sizes, sizes_in_words
from labkit.config.errors import counted


def layout_words(config: RunConfig, world_size: int) -> str:
    """Return the sizes as `8 ranks: tp 2 x cp 1 x dp 2 x pp 2, experts etp 1 x ep 4 x edp 1 x pp 2`."""
    dense, experts = map(sizes_in_words, axis_sizes(config.parallel, world_size))
    words = f"{counted(world_size, 'rank')}: {dense}"
    return f"{words}, experts {experts}" if config.moe.num_experts else words


def layout_name(config: RunConfig, world_size: int) -> str:
    """Name sizes, experts, stages and schedule, layers and fp8, recomputation, gradient buffers, graphs."""
    parallel = config.parallel
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp}
    sizes["dp"] = world_size // (parallel.tp * parallel.cp * parallel.pp)
    words = [f"{axis}{size}" for axis, size in sizes.items() if axis != "cp" or size > 1]
    words += [f"vpp{parallel.vpp}"] if parallel.vpp > 1 else []
    words += ["sp"] if parallel.sequence_parallel else []
    words += ["all-gather"] if parallel.cp > 1 and parallel.cp_comm_type == "all_gather" else []
    layers = ["transformer engine"] if config.model.transformer_impl == "transformer_engine" else []
    layers += [f"fp8 {config.optim.fp8} {config.optim.fp8_recipe}"] if config.optim.fp8 != "none" else []
    layers += ["compiled"] if config.model.compile != "none" else []
    words += [*_experts(config), *_schedule(config), *layers]
    return " ".join([*words, *_recomputed(config.model), *_gradients(config.optim), *_graphs(config.graph)])


def _experts(config: RunConfig) -> list[str]:
    """Name the sizes of expert parallelism, the dispatcher, and what happens to tokens beyond a capacity."""
    parallel, moe = config.parallel, config.moe
    if moe.num_experts == 0:
        return []
    etp = parallel.tp if parallel.etp is None else parallel.etp
    words = [f"ep{parallel.ep}"] if parallel.ep > 1 else []
    words += [f"etp{etp}"] if max(etp, parallel.tp) > 1 else []
    words += [moe.dispatcher] if moe.dispatcher != "alltoall" else []
    words += [] if moe.grouped_gemm else ["sequential"]
    words += [] if moe.capacity_factor is None else [f"capacity {moe.capacity_factor:g}"]
    words += ["padded"] if moe.pad_to_capacity else []
    return words + (["shared overlapped"] if moe.shared_expert_overlap else [])


def _schedule(config: RunConfig) -> list[str]:
    own, parallel = config.schedule, config.parallel
    words = [Path(own.path).name] if own.path is not None else [own.name] if own.name != "auto" else []
    words += [parallel.pipeline_layout] if parallel.pipeline_layout is not None else []
    words += ["standalone embedding"] if parallel.standalone_embedding_stage else []
    words += [] if own.batch_p2p_comm is None else ["batched" if own.batch_p2p_comm else "even/odd"]
    words += ["variable lengths"] if own.variable_seq_lengths else []
    words += [f"group {own.microbatch_group_size}"] if own.microbatch_group_size is not None else []
    words += ["all warm-up"] if own.all_warmup else []
    words += ["merged pairs"] if own.overlap_moe_expert_parallel_comm else []
    words += ["delayed weight gradients"] if own.delay_wgrad_compute else []
    return words


def _recomputed(model: ModelConfig) -> list[str]:
    granularity, in_flight = model.recompute_granularity, model.num_microbatches_with_partial_activation_checkpoints
    if granularity == "none":
        return []
    words = [f"recompute {granularity if granularity == 'full' else '+'.join(model.recompute_modules)}"]
    if granularity == "full" and (model.recompute_method, model.recompute_num_layers) != ("uniform", 1):
        words.append(f"{model.recompute_method} {model.recompute_num_layers}")
    return [*words, *([] if in_flight is None else [f"of {in_flight} in flight"])]


def _gradients(optim: OptimConfig) -> list[str]:
    words = ["naive"] if optim.data_parallel == "naive" else []
    words += [f"buckets of {optim.bucket_size}"] if optim.bucket_size is not None else []
    words += [] if optim.overlap_grad_reduce else ["no overlap"]
    words += ["average"] if optim.average_in_collective else []
    words += ["per token"] if optim.calculate_per_token_loss else []
    words += ["zero"] if optim.distributed_optimizer else []
    words += ["gather ahead"] if optim.overlap_param_gather else []
    instances = optim.num_distributed_optimizer_instances
    return words + ([f"{instances} instances"] if instances > 1 else [])


def _graphs(graph: GraphConfig) -> list[str]:
    if graph.cuda_graph_impl in ("none", "full_iteration"):
        return [] if graph.cuda_graph_impl == "none" else ["graphs full_iteration"]
    return [f"{graph.cuda_graph_impl} graphs {'+'.join(graph.cuda_graph_modules) or 'of layers'}"]
