"""What the ranks of a pipeline must have been given alike: a first run of each kind asks (`parallel.agreement`)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from labkit.parallel.agreement import Agreement
from labkit.schedules.ir import Schedule
from labkit.schedules.lowering import Program

if TYPE_CHECKING:
    from labkit.schedules.runtime import PipelineRuntime


def pipeline_agreement(runtime: PipelineRuntime, program: Program, forward_only: bool) -> Agreement:
    """What `runtime` was given, to be compared with the ranks that `program` exchanges messages with."""
    schedule, form = runtime.schedule, runtime.form
    messages = [message for step in program.steps for message in (step.needs, step.gives) if message is not None]
    peers = {rank for message in messages for rank in (message.source, message.target)} - {runtime.groups.pp.rank}
    given = {
        "the schedule": f"{schedule.name} of {schedule.num_stages} stages and {schedule.num_microbatches} "
        f"microbatches (checksum {schedule.derived('checksum', _checksum):08x})",
        "transport": runtime.transport,
        "dtype": str(form.dtype),
        "forward_only": str(forward_only),
        "variable_seq_lengths": str(form.variable_lengths),
    }
    for stage, shapes in enumerate(runtime.shapes):
        text = f"{len(shapes)} tensors" if form.variable_lengths else ", ".join(map(str, shapes))
        given[f"tensor_shape of what stage {stage} sends"] = text
    return Agreement(runtime.groups, given, peers)


def _checksum(schedule: Schedule) -> int:
    columns = (schedule.stages, schedule.kinds, schedule.microbatches, schedule.offsets)
    total = 0
    for column in columns:
        total = zlib.crc32(column.tobytes(), total)
    return total
