"""Figures with a sentence under each: rank grids, traffic between nodes, timelines, curves and more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.plan.node_traffic import TransformerTraffic as TransformerTraffic
    from labkit.plan.node_traffic import bytes_between_nodes as bytes_between_nodes
    from labkit.plan.node_traffic import order_traffic as order_traffic
    from labkit.viz.activations import Kept as Kept
    from labkit.viz.activations import saved_waterfall as saved_waterfall
    from labkit.viz.attention_ring import context_mask as context_mask
    from labkit.viz.attention_ring import measured_ring as measured_ring
    from labkit.viz.attention_ring import ring_box as ring_box
    from labkit.viz.attention_ring import ring_timeline as ring_timeline
    from labkit.viz.batch_bars import batch_results as batch_results
    from labkit.viz.box_map import stored_boxes as stored_boxes
    from labkit.viz.curves import loss_curves as loss_curves
    from labkit.viz.data_parallel.bucket_maps import bucket_map as bucket_map
    from labkit.viz.data_parallel.bucket_maps import zero_stages as zero_stages
    from labkit.viz.data_parallel.bucket_overlap import bucket_size_curve as bucket_size_curve
    from labkit.viz.data_parallel.bucket_overlap import explore_buckets as explore_buckets
    from labkit.viz.data_parallel.bucket_overlap import overlap_gantt as overlap_gantt
    from labkit.viz.data_parallel.launch_orders import bucket_meetings as bucket_meetings
    from labkit.viz.data_parallel.layer_gathers import layer_gathers as layer_gathers
    from labkit.viz.encoders.masked_words import masked_words as masked_words
    from labkit.viz.encoders.norm_layouts import norm_layouts as norm_layouts
    from labkit.viz.encoders.path_widths import path_widths as path_widths
    from labkit.viz.encoders.read_positions import read_positions as read_positions
    from labkit.viz.encoders.split_stages import distance_buckets as distance_buckets
    from labkit.viz.encoders.split_stages import split_stages as split_stages
    from labkit.viz.encoders.split_stages import stage_work as stage_work
    from labkit.viz.experts.expert_load import explore_skew as explore_skew
    from labkit.viz.experts.expert_load import load_over_training as load_over_training
    from labkit.viz.experts.expert_load import skew_curve as skew_curve
    from labkit.viz.experts.policy_bars import compare_policies as compare_policies
    from labkit.viz.experts.policy_bars import explore_policies as explore_policies
    from labkit.viz.experts.router_balance import load_and_scores as load_and_scores
    from labkit.viz.experts.router_balance import loss_beside_load as loss_beside_load
    from labkit.viz.experts.router_balance import mass_tables as mass_tables
    from labkit.viz.experts.router_balance import price_of_balance as price_of_balance
    from labkit.viz.experts.router_lab import replay as replay
    from labkit.viz.experts.router_lab import replay_policies as replay_policies
    from labkit.viz.experts.router_lab import skewed_logits as skewed_logits
    from labkit.viz.experts.router_lab import standard_policies as standard_policies
    from labkit.viz.figure import Figure as Figure
    from labkit.viz.goodput_explorer import explore_goodput as explore_goodput
    from labkit.viz.graphs.gradient_errors import gradient_errors as gradient_errors
    from labkit.viz.graphs.graph_pool import buffer_lives as buffer_lives
    from labkit.viz.graphs.graph_pool import explore_pool as explore_pool
    from labkit.viz.graphs.graph_pool import pool_blocks as pool_blocks
    from labkit.viz.graphs.graph_pool import pool_collisions as pool_collisions
    from labkit.viz.graphs.graph_pool import pool_frame as pool_frame
    from labkit.viz.graphs.graph_pool import pool_frames as pool_frames
    from labkit.viz.graphs.launch_costs import by_call as by_call
    from labkit.viz.graphs.launch_costs import graph_memory as graph_memory
    from labkit.viz.graphs.launch_costs import launch_timeline as launch_timeline
    from labkit.viz.graphs.launch_costs import times_by_duration as times_by_duration
    from labkit.viz.graphs.partial_graphs import PaddingCost as PaddingCost
    from labkit.viz.graphs.partial_graphs import padding_costs as padding_costs
    from labkit.viz.graphs.partial_graphs import sequence_diagram as sequence_diagram
    from labkit.viz.graphs.partial_graphs import values_at_the_end as values_at_the_end
    from labkit.viz.graphs.pool_choices import pool_choices as pool_choices
    from labkit.viz.held_weights import weight_parts as weight_parts
    from labkit.viz.kept_over_time import tensor_lifetimes as tensor_lifetimes
    from labkit.viz.layer_gradients import gradient_table as gradient_table
    from labkit.viz.layer_memory import TensorArea as TensorArea
    from labkit.viz.layer_memory import layer_areas as layer_areas
    from labkit.viz.layer_memory import memory_over_time as memory_over_time
    from labkit.viz.layer_messages import layer_timelines as layer_timelines
    from labkit.viz.layout.arcs import fold_arcs as fold_arcs
    from labkit.viz.layout.folding import explore_folding as explore_folding
    from labkit.viz.layout.folding import fold_grid as fold_grid
    from labkit.viz.layout.node_placements import placed_ranks as placed_ranks
    from labkit.viz.layout.order_comparison import compare_orders as compare_orders
    from labkit.viz.layout.rank_grids import explore_layout as explore_layout
    from labkit.viz.layout.rank_grids import rank_grid as rank_grid
    from labkit.viz.layout.rank_grids import rank_neighbours as rank_neighbours
    from labkit.viz.linear_maps import rank_matrices as rank_matrices
    from labkit.viz.link_times import bandwidth_by_size as bandwidth_by_size
    from labkit.viz.link_times import term_bars as term_bars
    from labkit.viz.live import is_live as is_live
    from labkit.viz.machine_scaling import Rate as Rate
    from labkit.viz.machine_scaling import published_rates as published_rates
    from labkit.viz.machine_scaling import roofline as roofline
    from labkit.viz.machine_scaling import step_parts as step_parts
    from labkit.viz.matrix_cuts import cut_matrices as cut_matrices
    from labkit.viz.motion import in_motion as in_motion
    from labkit.viz.number_formats import gradient_range as gradient_range
    from labkit.viz.number_formats import precision_flow as precision_flow
    from labkit.viz.pipeline.played_table import play_table as play_table
    from labkit.viz.pipeline.schedule_explorer import explore_schedule as explore_schedule
    from labkit.viz.pipeline.stage_layers import layer_placement as layer_placement
    from labkit.viz.pipeline.timeline import compare_timelines as compare_timelines
    from labkit.viz.pipeline.timeline import gantt as gantt
    from labkit.viz.pipeline.timeline import gantt_overlay as gantt_overlay
    from labkit.viz.pipeline.trace import write_trace as write_trace
    from labkit.viz.rank_agreement import mask_agreement as mask_agreement
    from labkit.viz.rank_agreement import replica_drift as replica_drift
    from labkit.viz.rank_chunks import before_and_after as before_and_after
    from labkit.viz.run_curves import training_curves as training_curves
    from labkit.viz.run_curves import watch_runs as watch_runs
    from labkit.viz.sketch_bands import band_curves as band_curves
    from labkit.viz.text_scores import named_curves as named_curves
    from labkit.viz.text_scores import scoring_windows as scoring_windows
    from labkit.viz.text_scores import token_choices as token_choices
    from labkit.viz.text_scores import token_prices as token_prices
    from labkit.viz.tp_layer import split_sequence as split_sequence
    from labkit.viz.tp_layer import tensor_parallel_block as tensor_parallel_block
    from labkit.viz.vocabulary import added_rows as added_rows
    from labkit.viz.vocabulary import memory_of_losses as memory_of_losses
    from labkit.viz.vocabulary import split_softmax as split_softmax
    from labkit.viz.vocabulary import vocabulary_shards as vocabulary_shards

__all__, __getattr__, __dir__ = public_names(__name__)
