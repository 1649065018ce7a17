"""Mixture of experts: routers, dispatchers, experts, and the layer that joins them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.moe.balance import AuxLossAutoScaler as AuxLossAutoScaler
    from labkit.moe.balance import AuxLossScale as AuxLossScale
    from labkit.moe.balance import aux_loss_scale as aux_loss_scale
    from labkit.moe.balance import updated_expert_bias as updated_expert_bias
    from labkit.moe.dispatch.allgather import MoEAllGatherTokenDispatcher as MoEAllGatherTokenDispatcher
    from labkit.moe.dispatch.alltoall import MoEAlltoAllTokenDispatcher as MoEAlltoAllTokenDispatcher
    from labkit.moe.dispatch.dispatcher import MoELocalTokenDispatcher as MoELocalTokenDispatcher
    from labkit.moe.dispatch.dispatcher import MoETokenDispatcher as MoETokenDispatcher
    from labkit.moe.dispatch.permutation import permute as permute
    from labkit.moe.dispatch.permutation import sort_chunks_by_idxs as sort_chunks_by_idxs
    from labkit.moe.dispatch.permutation import unpermute as unpermute
    from labkit.moe.experts import Experts as Experts
    from labkit.moe.experts import GroupedExperts as GroupedExperts
    from labkit.moe.experts import SequentialExperts as SequentialExperts
    from labkit.moe.layer import MoELayer as MoELayer
    from labkit.moe.layer import build_dispatcher as build_dispatcher
    from labkit.moe.replay import RoutingReplay as RoutingReplay
    from labkit.moe.router import TopKRouter as TopKRouter
    from labkit.moe.router import finish_router_step as finish_router_step
    from labkit.moe.router import routers_of as routers_of
    from labkit.moe.routing import apply_capacity as apply_capacity
    from labkit.moe.routing import get_capacity as get_capacity
    from labkit.moe.routing import topk_routing as topk_routing
    from labkit.moe.shared_experts import SharedExpertMLP as SharedExpertMLP
    from labkit.moe.statistics import RouterStatistics as RouterStatistics
    from labkit.moe.statistics import RouterSummary as RouterSummary
    from labkit.moe.statistics import summarize as summarize
    from labkit.plan.traffic import AllToAllBytes as AllToAllBytes
    from labkit.plan.traffic import all_to_all_bytes as all_to_all_bytes
    from labkit.plan.traffic import dedup_factor as dedup_factor
    from labkit.plan.traffic import expected_destinations as expected_destinations
    from labkit.plan.traffic import extra_bytes as extra_bytes
    from labkit.plan.traffic import send_matrix as send_matrix
    from labkit.plan.traffic import send_matrix_without_copies as send_matrix_without_copies

__all__, __getattr__, __dir__ = public_names(__name__)
