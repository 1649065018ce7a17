"""Pipeline schedules as data: built, printed, simulated; only `runtime` touches torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.schedules.bubble import BubbleSplit, Gap, bubble_split, explain_gap, split_timeline
    from labkit.schedules.builders import build_schedule, gpipe, interleaved, one_f_one_b, without_backward
    from labkit.schedules.entry_points import (
        forward_backward_no_pipelining,
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
        get_forward_backward_func,
    )
    from labkit.schedules.ir import Action, Schedule, ScheduleError
    from labkit.schedules.lowering import Program, StageMessage, Step, Transfer, Transport, lower
    from labkit.schedules.runtime import PipelineRuntime
    from labkit.schedules.simulator import Costs, Timeline, simulate
    from labkit.schedules.tables import (
        convert_schedule_table_to_order,
        get_model_chunk_id,
        get_overlap_moe_expert_parallel_comm_order,
        get_pp_rank_microbatches,
        get_schedule_table,
        is_first_microbatch_for_model_chunk,
        is_last_microbatch_for_model_chunk,
    )
    from labkit.schedules.verifier import Op, communication, interpret, verify
    from labkit.schedules.zero_bubble import dualpipe_v, merge_backward, split_backward, zbv, zero_bubble_h1

_WHERE = {
    "BubbleSplit": "bubble",
    "Gap": "bubble",
    "bubble_split": "bubble",
    "explain_gap": "bubble",
    "split_timeline": "bubble",
    "build_schedule": "builders",
    "gpipe": "builders",
    "interleaved": "builders",
    "one_f_one_b": "builders",
    "without_backward": "builders",
    "forward_backward_no_pipelining": "entry_points",
    "forward_backward_pipelining_with_interleaving": "entry_points",
    "forward_backward_pipelining_without_interleaving": "entry_points",
    "get_forward_backward_func": "entry_points",
    "Action": "ir",
    "Schedule": "ir",
    "ScheduleError": "ir",
    "Program": "lowering",
    "StageMessage": "lowering",
    "Step": "lowering",
    "Transfer": "lowering",
    "Transport": "lowering",
    "lower": "lowering",
    "merge_backward": "zero_bubble",
    "split_backward": "zero_bubble",
    "Op": "verifier",
    "communication": "verifier",
    "interpret": "verifier",
    "PipelineRuntime": "runtime",
    "Costs": "simulator",
    "Timeline": "simulator",
    "simulate": "simulator",
    "verify": "verifier",
    "convert_schedule_table_to_order": "tables",
    "get_model_chunk_id": "tables",
    "get_overlap_moe_expert_parallel_comm_order": "tables",
    "get_pp_rank_microbatches": "tables",
    "get_schedule_table": "tables",
    "is_first_microbatch_for_model_chunk": "tables",
    "is_last_microbatch_for_model_chunk": "tables",
    "dualpipe_v": "zero_bubble",
    "zbv": "zero_bubble",
    "zero_bubble_h1": "zero_bubble",
}
__all__ = [
    "Action",
    "BubbleSplit",
    "Costs",
    "Gap",
    "Op",
    "PipelineRuntime",
    "Program",
    "Schedule",
    "ScheduleError",
    "StageMessage",
    "Step",
    "Timeline",
    "Transfer",
    "Transport",
    "bubble_split",
    "build_schedule",
    "communication",
    "convert_schedule_table_to_order",
    "dualpipe_v",
    "explain_gap",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "get_model_chunk_id",
    "get_overlap_moe_expert_parallel_comm_order",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "gpipe",
    "interleaved",
    "interpret",
    "is_first_microbatch_for_model_chunk",
    "is_last_microbatch_for_model_chunk",
    "lower",
    "merge_backward",
    "one_f_one_b",
    "simulate",
    "split_backward",
    "split_timeline",
    "verify",
    "without_backward",
    "zbv",
    "zero_bubble_h1",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
