"""What a run costs, by arithmetic without torch: parameters, operations, memory, bytes on the wire, and overlap.

Names are imported only when they are used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.plan.activations import Share as Share
    from labkit.plan.activations import layer_activation_bytes as layer_activation_bytes
    from labkit.plan.activations import layer_parts as layer_parts
    from labkit.plan.activations import paper_layer_bytes as paper_layer_bytes
    from labkit.plan.checkpoint_intervals import daly_interval as daly_interval
    from labkit.plan.checkpoint_intervals import daly_seconds as daly_seconds
    from labkit.plan.checkpoint_intervals import young_interval as young_interval
    from labkit.plan.choice_costs import at_scale as at_scale
    from labkit.plan.choice_table import AtScale as AtScale
    from labkit.plan.cluster import Checkpoint as Checkpoint
    from labkit.plan.cluster import Cluster as Cluster
    from labkit.plan.cluster import checkpoint_of as checkpoint_of
    from labkit.plan.device_memory import DeviceMemory as DeviceMemory
    from labkit.plan.device_memory import gpu_memory as gpu_memory
    from labkit.plan.flops import forward_flops as forward_flops
    from labkit.plan.flops import hardware_flops as hardware_flops
    from labkit.plan.flops import paper_step_flops as paper_step_flops
    from labkit.plan.flops import step_flops as step_flops
    from labkit.plan.goodput import ClusterRun as ClusterRun
    from labkit.plan.goodput import Goodput as Goodput
    from labkit.plan.goodput import best_goodput as best_goodput
    from labkit.plan.goodput import cluster_run as cluster_run
    from labkit.plan.goodput import goodput_by_size as goodput_by_size
    from labkit.plan.goodput import interval_curve as interval_curve
    from labkit.plan.goodput import simulate_goodput as simulate_goodput
    from labkit.plan.memory import RankMemory as RankMemory
    from labkit.plan.memory import rank_memory as rank_memory
    from labkit.plan.node_traffic import TransformerTraffic as TransformerTraffic
    from labkit.plan.node_traffic import bytes_between_nodes as bytes_between_nodes
    from labkit.plan.node_traffic import order_traffic as order_traffic
    from labkit.plan.overlap import BackwardPiece as BackwardPiece
    from labkit.plan.overlap import Link as Link
    from labkit.plan.overlap import exposed_seconds as exposed_seconds
    from labkit.plan.overlap import predict_step as predict_step
    from labkit.plan.parameters import active_parameters as active_parameters
    from labkit.plan.parameters import expert_parameters as expert_parameters
    from labkit.plan.parameters import layer_parameters as layer_parameters
    from labkit.plan.parameters import model_parameters as model_parameters
    from labkit.plan.parameters import rank_parameters as rank_parameters
    from labkit.plan.parameters import stage_parameters as stage_parameters
    from labkit.plan.sizes import all_layers as all_layers
    from labkit.plan.sizes import expert_width as expert_width
    from labkit.plan.sizes import moe_layers as moe_layers
    from labkit.plan.sizes import padded_vocab as padded_vocab
    from labkit.plan.slowest_rank import jitter_factor as jitter_factor
    from labkit.plan.slowest_rank import largest_normal_quantiles as largest_normal_quantiles
    from labkit.plan.slowest_rank import straggler_chance as straggler_chance
    from labkit.plan.stages import stage_contents as stage_contents
    from labkit.plan.stages import stage_layers as stage_layers
    from labkit.plan.timed_layer import is_between as is_between
    from labkit.plan.timed_layer import layer_timeline as layer_timeline
    from labkit.plan.timed_layer import unhidden as unhidden
    from labkit.plan.traffic import AllToAllBytes as AllToAllBytes
    from labkit.plan.traffic import all_to_all_bytes as all_to_all_bytes
    from labkit.plan.traffic import dedup_factor as dedup_factor
    from labkit.plan.traffic import expected_destinations as expected_destinations
    from labkit.plan.traffic import extra_bytes as extra_bytes
    from labkit.plan.traffic import layer_all_to_all_bytes as layer_all_to_all_bytes
    from labkit.plan.traffic import layer_communication_bytes as layer_communication_bytes
    from labkit.plan.traffic import send_matrix as send_matrix
    from labkit.plan.traffic import send_matrix_without_copies as send_matrix_without_copies
    from labkit.plan.workload import Extras as Extras
    from labkit.plan.workload import Libraries as Libraries
    from labkit.plan.workload import Workload as Workload
    from labkit.plan.zero_stages import BytesPerParameter as BytesPerParameter
    from labkit.plan.zero_stages import bytes_per_parameter as bytes_per_parameter

__all__, __getattr__, __dir__ = public_names(__name__)
