"""Pipeline schedules as data: build, print, verify, simulate and lower them. Only `runtime` imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.schedules.bubble import BubbleSplit as BubbleSplit
    from labkit.schedules.bubble import Gap as Gap
    from labkit.schedules.bubble import bubble_split as bubble_split
    from labkit.schedules.bubble import explain_gap as explain_gap
    from labkit.schedules.bubble import split_timeline as split_timeline
    from labkit.schedules.builders import build_schedule as build_schedule
    from labkit.schedules.builders import gpipe as gpipe
    from labkit.schedules.builders import interleaved as interleaved
    from labkit.schedules.builders import merged_interleaved as merged_interleaved
    from labkit.schedules.builders import merged_one_f_one_b as merged_one_f_one_b
    from labkit.schedules.builders import one_f_one_b as one_f_one_b
    from labkit.schedules.builders import without_backward as without_backward
    from labkit.schedules.entry_points import forward_backward_no_pipelining as forward_backward_no_pipelining
    from labkit.schedules.entry_points import (
        forward_backward_pipelining_with_interleaving as forward_backward_pipelining_with_interleaving,
    )
    from labkit.schedules.entry_points import (
        forward_backward_pipelining_without_interleaving as forward_backward_pipelining_without_interleaving,
    )
    from labkit.schedules.entry_points import get_forward_backward_func as get_forward_backward_func
    from labkit.schedules.ir import Action as Action
    from labkit.schedules.ir import Schedule as Schedule
    from labkit.schedules.ir import ScheduleError as ScheduleError
    from labkit.schedules.lowering import Compute as Compute
    from labkit.schedules.lowering import Program as Program
    from labkit.schedules.lowering import StageMessage as StageMessage
    from labkit.schedules.lowering import Transfer as Transfer
    from labkit.schedules.lowering import Transport as Transport
    from labkit.schedules.lowering import lower as lower
    from labkit.schedules.merging import LayerTimes as LayerTimes
    from labkit.schedules.merging import pair_order as pair_order
    from labkit.schedules.runtime import PipelineRuntime as PipelineRuntime
    from labkit.schedules.simulator import Costs as Costs
    from labkit.schedules.simulator import Timeline as Timeline
    from labkit.schedules.simulator import simulate as simulate
    from labkit.schedules.tables import convert_schedule_table_to_order as convert_schedule_table_to_order
    from labkit.schedules.tables import get_model_chunk_id as get_model_chunk_id
    from labkit.schedules.tables import (
        get_overlap_moe_expert_parallel_comm_order as get_overlap_moe_expert_parallel_comm_order,
    )
    from labkit.schedules.tables import get_pp_rank_microbatches as get_pp_rank_microbatches
    from labkit.schedules.tables import get_schedule_table as get_schedule_table
    from labkit.schedules.tables import is_first_microbatch_for_model_chunk as is_first_microbatch_for_model_chunk
    from labkit.schedules.tables import is_last_microbatch_for_model_chunk as is_last_microbatch_for_model_chunk
    from labkit.schedules.verifier import Op as Op
    from labkit.schedules.verifier import communication as communication
    from labkit.schedules.verifier import interpret as interpret
    from labkit.schedules.verifier import verify as verify
    from labkit.schedules.zero_bubble import dualpipe_v as dualpipe_v
    from labkit.schedules.zero_bubble import merged_dualpipe_v as merged_dualpipe_v
    from labkit.schedules.zero_bubble import split_backward as split_backward
    from labkit.schedules.zero_bubble import zbv as zbv
    from labkit.schedules.zero_bubble import zero_bubble_h1 as zero_bubble_h1

__all__, __getattr__, __dir__ = public_names(__name__)
