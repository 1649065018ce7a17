"""Figures with a sentence: rank grids, traffic between nodes, timelines, curves. Names are loaded on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "figure": ("Figure",),
    "block": ("tensor_parallel_block",),
    "buckets": ("bucket_map", "zero_stages"),
    "placement": ("layer_placement",),
    "policy_bars": ("compare_policies", "explore_policies", "policy_loads"),
    "ranks": ("rank_grid", "rank_neighbours"),
    "router_lab": ("replay", "replay_policies", "skewed_logits", "standard_policies"),
    "comms": ("TransformerTraffic", "bytes_between_nodes", "compare_orders", "order_traffic"),
    "widgets": ("explore_layout", "explore_schedule", "is_live"),
    "timeline": ("compare_timelines", "gantt", "gantt_overlay"),
    "overlap": ("bucket_size_curve", "overlap_gantt"),
    "bucket_explorer": ("explore_buckets",),
    "folding": ("fold_grid", "folded_digits", "readings"),
    "folding_explorer": ("explore_folding",),
    "trace": ("write_trace",),
    "context": ("context_mask", "measured_ring", "ring_timeline"),
    "curves": ("loss_curves",),
    "graph_pool": ("buffer_lives", "explore_pool", "pool_blocks", "pool_frame", "pool_frames"),
    "masks": ("dropout_masks",),
    "partial_graphs": ("padding_costs", "PaddingCost", "sequence_diagram"),
    "moe": ("dispatch_steps", "send_matrix_figure"),
    "moe_load": ("capacity_curve", "explore_skew", "load_over_training", "skew_curve"),
    "graphs": ("by_call", "cost_by_size", "graph_memory", "launch_timeline"),
    "memory": ("Kept", "live_bytes", "saved_waterfall"),
}
"""Module -> the names that this package offers from it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.viz.block import tensor_parallel_block as tensor_parallel_block
    from labkit.viz.bucket_explorer import explore_buckets as explore_buckets
    from labkit.viz.buckets import bucket_map as bucket_map
    from labkit.viz.buckets import zero_stages as zero_stages
    from labkit.viz.comms import TransformerTraffic as TransformerTraffic
    from labkit.viz.comms import bytes_between_nodes as bytes_between_nodes
    from labkit.viz.comms import compare_orders as compare_orders
    from labkit.viz.comms import order_traffic as order_traffic
    from labkit.viz.context import context_mask as context_mask
    from labkit.viz.context import measured_ring as measured_ring
    from labkit.viz.context import ring_timeline as ring_timeline
    from labkit.viz.curves import loss_curves as loss_curves
    from labkit.viz.figure import Figure as Figure
    from labkit.viz.folding import fold_grid as fold_grid
    from labkit.viz.folding import folded_digits as folded_digits
    from labkit.viz.folding import readings as readings
    from labkit.viz.folding_explorer import explore_folding as explore_folding
    from labkit.viz.graph_pool import buffer_lives as buffer_lives
    from labkit.viz.graph_pool import explore_pool as explore_pool
    from labkit.viz.graph_pool import pool_blocks as pool_blocks
    from labkit.viz.graph_pool import pool_frame as pool_frame
    from labkit.viz.graph_pool import pool_frames as pool_frames
    from labkit.viz.graphs import by_call as by_call
    from labkit.viz.graphs import cost_by_size as cost_by_size
    from labkit.viz.graphs import graph_memory as graph_memory
    from labkit.viz.graphs import launch_timeline as launch_timeline
    from labkit.viz.masks import dropout_masks as dropout_masks
    from labkit.viz.memory import Kept as Kept
    from labkit.viz.memory import live_bytes as live_bytes
    from labkit.viz.memory import saved_waterfall as saved_waterfall
    from labkit.viz.moe import dispatch_steps as dispatch_steps
    from labkit.viz.moe import send_matrix_figure as send_matrix_figure
    from labkit.viz.moe_load import capacity_curve as capacity_curve
    from labkit.viz.moe_load import explore_skew as explore_skew
    from labkit.viz.moe_load import load_over_training as load_over_training
    from labkit.viz.moe_load import skew_curve as skew_curve
    from labkit.viz.overlap import bucket_size_curve as bucket_size_curve
    from labkit.viz.overlap import overlap_gantt as overlap_gantt
    from labkit.viz.partial_graphs import PaddingCost as PaddingCost
    from labkit.viz.partial_graphs import padding_costs as padding_costs
    from labkit.viz.partial_graphs import sequence_diagram as sequence_diagram
    from labkit.viz.placement import layer_placement as layer_placement
    from labkit.viz.policy_bars import compare_policies as compare_policies
    from labkit.viz.policy_bars import explore_policies as explore_policies
    from labkit.viz.policy_bars import policy_loads as policy_loads
    from labkit.viz.ranks import rank_grid as rank_grid
    from labkit.viz.ranks import rank_neighbours as rank_neighbours
    from labkit.viz.router_lab import replay as replay
    from labkit.viz.router_lab import replay_policies as replay_policies
    from labkit.viz.router_lab import skewed_logits as skewed_logits
    from labkit.viz.router_lab import standard_policies as standard_policies
    from labkit.viz.timeline import compare_timelines as compare_timelines
    from labkit.viz.timeline import gantt as gantt
    from labkit.viz.timeline import gantt_overlay as gantt_overlay
    from labkit.viz.trace import write_trace as write_trace
    from labkit.viz.widgets import explore_layout as explore_layout
    from labkit.viz.widgets import explore_schedule as explore_schedule
    from labkit.viz.widgets import is_live as is_live


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
