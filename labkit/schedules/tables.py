"""Short forms of a schedule: tables of interleaved 1F1B, orders made from them, and programs of phases.

Tables and orders have the names that Megatron-LM gives them.

A rank with V model chunks runs M x V virtual microbatches: virtual microbatch k is one microbatch through one chunk.
The schedule table lists both, and is the same on every rank. PP2, M 5, V 2, group size N 3:

    virtual microbatch   0 1 2 3 4 5 6 7 8 9
    microbatch           0 1 2 0 1 2 3 4 3 4
    model chunk          0 0 0 1 1 1 0 0 1 1

The backward of virtual microbatch k reads the same column with the chunks counted from the end, V - 1 - c. Ranks differ
only in the warm-up, the number of forwards before the first backward.

An order is the row of one rank as signed chunk numbers; Transformer Engine takes it as `_order`. c + 1 is a forward of
chunk c, and -(c + 1) its backward. An order needs no microbatches: every chunk runs them in ascending order.

A program is a list of phases `(times, "F0 I1 W1")`: the rank repeats the words `times` times. A word is a kind and a
model chunk of the rank; `F` alone means chunk 0. Every kind runs the microbatches of a chunk in ascending order, so a
program needs no microbatches. `W` alone is the oldest open weight gradient of any chunk. A program has either such W or
numbered ones. B and I of a chunk share its microbatches. `F0&B1` are two merged actions.

Sources: arXiv 2104.04473 section 2.2; megatron-core 0.16.1, which tests hold these functions to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from labkit.config.errors import counted
from labkit.config.pipeline_rules import group_size_rule
from labkit.schedules.ir import KINDS, Schedule

ScheduleTable = Sequence[tuple[int, int]]
"""(microbatch, model chunk) of every virtual microbatch."""
Phase = tuple[int, str]
"""(times, words)."""

_F, _B, _I, _W = (KINDS.index(kind) for kind in "FBIW")
_OLDEST = -1


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int | None = None,
    forward_only: bool = False,
    *,
    pp_size: int,
    pp_rank: int,
    overlap_moe_expert_parallel_comm: bool = False,
) -> tuple[int, bool, int, int]:
    """Count the virtual microbatches of a rank, and the forwards that come before its first backward.

    With one model chunk (1F1B) the warm-up is p - r - 1. With more chunks it is 2 (p - r - 1) + (V - 1) N.
    `overlap_moe_expert_parallel_comm` adds 1: communication of experts overlaps the other direction's computation.
    The warm-up is never more than M V. One pipeline rank has no warm-up; forward-only, everything is warm-up. The group
    size N matters only for V > 1; None means pp_size.

    Returns (total, all is warm-up, warm-up, remaining).

    Raises:
        ValueError: sizes below 1, a rank outside pp_size, and the group sizes that `legal_group_size` rejects.
    """
    require_positive(num_microbatches=num_microbatches, num_model_chunks=num_model_chunks, pp_size=pp_size)
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pp_rank is {pp_rank}: with pp_size {pp_size} it is 0 to {pp_size - 1}")
    total = num_microbatches * num_model_chunks
    if forward_only:
        warmup = total
    elif pp_size == 1:
        warmup = 0
    elif num_model_chunks == 1:
        warmup = pp_size - pp_rank - 1
    else:
        group_size = legal_group_size(microbatch_group_size_per_vp_stage, pp_size, num_microbatches)
        warmup = 2 * (pp_size - pp_rank - 1) + (num_model_chunks - 1) * group_size + overlap_moe_expert_parallel_comm
    warmup = min(warmup, total)
    return total, warmup == total, warmup, total - warmup


def legal_group_size(group_size: int | None, pp: int, microbatches: int) -> int:
    """Return the group size of an interleaved schedule; pp if `group_size` is None.

    Raises:
        ValueError: fewer microbatches than ranks, and a size that `labkit.config.pipeline_rules.group_size_rule` gives
            a rule for.
    """
    size = pp if group_size is None else group_size
    require_positive(microbatch_group_size=size, pp=pp, microbatches=microbatches)
    if microbatches < pp:
        raise ValueError(
            f"{counted(microbatches, 'microbatch')} on {pp} pipeline ranks: an interleaved schedule needs at least "
            f"{pp}; raise microbatches to {pp}, or set vpp to 1 (1f1b)"
        )
    if rule := group_size_rule(size, pp, microbatches):
        raise ValueError(f"the microbatch group size is {size}; it {rule}")
    return size


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return (microbatch, model chunk) of every virtual microbatch, M V of them.

    Microbatches go in groups of N; the last group may be short. A group passes all chunks before the next group starts.
    """
    columns = table_columns(num_microbatches, num_model_chunks, microbatch_group_size_per_vp_stage)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def table_columns(num_microbatches: int, num_model_chunks: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `get_schedule_table` as two columns (M V,): microbatches and model chunks."""
    require_positive(num_microbatches=num_microbatches, num_model_chunks=num_model_chunks, group_size=group_size)
    groups, left = divmod(num_microbatches, group_size)
    grid = (groups, num_model_chunks, group_size)  # of the full groups
    numbers = np.arange(groups * group_size).reshape(groups, 1, group_size)
    chunks = np.arange(num_model_chunks)
    last = np.arange(groups * group_size, num_microbatches)
    return (
        np.concatenate([np.broadcast_to(numbers, grid).ravel(), np.tile(last, num_model_chunks)]),
        np.concatenate([np.broadcast_to(chunks[:, None], grid).ravel(), np.repeat(chunks, left)]),
    )


def get_model_chunk_id(virtual_microbatch_id: int, forward: bool, schedule_table: ScheduleTable) -> int:
    """Return the model chunk that the virtual microbatch passes, forward or backward. Numbers from M V on start again
    at 0."""
    chunk = schedule_table[virtual_microbatch_id % len(schedule_table)][1]
    last_chunk = schedule_table[-1][1]
    return chunk if forward else last_chunk - chunk


def is_first_microbatch_for_model_chunk(virtual_microbatch_id: int, schedule_table: ScheduleTable) -> bool:
    """Return True for microbatch 0 of its chunk; False from M V on."""
    return virtual_microbatch_id < len(schedule_table) and schedule_table[virtual_microbatch_id][0] == 0


def is_last_microbatch_for_model_chunk(virtual_microbatch_id: int, schedule_table: ScheduleTable) -> bool:
    """Return True for microbatch M - 1 of its chunk; False from M V on."""
    last_microbatch = schedule_table[-1][0]
    return virtual_microbatch_id < len(schedule_table) and schedule_table[virtual_microbatch_id][0] == last_microbatch


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: ScheduleTable
) -> list[int]:
    """Return the order of one rank: warm-up forwards, then a forward and a backward by turns, then the last backwards.

    The table of the module's docstring gives, with a warm-up of 5:

        1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1

    Raises:
        ValueError: a warm-up that the table does not have, or a table with another number of chunks.
    """
    chunks = [chunk for _, chunk in schedule_table]
    if not 0 <= num_warmup_microbatches <= len(chunks):
        raise ValueError(
            f"num_warmup_microbatches is {num_warmup_microbatches}: the table has {len(chunks)} virtual microbatches; "
            "take the warm-up from get_pp_rank_microbatches"
        )
    if set(chunks) != set(range(num_model_chunks)):
        raise ValueError(
            f"num_model_chunks is {num_model_chunks}, but the table has chunks {sorted(set(chunks))}: they must agree"
        )
    forward = [chunk + 1 for chunk in chunks]
    backward = [chunk - num_model_chunks for chunk in chunks]
    steady = len(chunks) - num_warmup_microbatches
    order = forward[:num_warmup_microbatches]
    for pair in zip(forward[num_warmup_microbatches:], backward[:steady], strict=True):
        order += pair
    return order + backward[steady:]


def get_overlap_moe_expert_parallel_comm_order(
    order: Sequence[int], num_layers_per_chunk: Sequence[int], capture_wgrad_graph: bool
) -> list[float]:
    """Return the order with every layer as a chunk of its own, so that the layers of two chunks can overlap.

    Warm-up and cool-down go layer by layer. In between, a backward and the forward after it run together: the forward
    from its first layer, the backward from its last. In each step the forward comes before the backward.

    With `capture_wgrad_graph` each backward of a layer is followed by its weight gradient, whose number is smaller by
    one half. The last weight gradient of a pair waits for the end of the pair. With layers [1, 2], `1 2 -2 1 -1 -1`
    becomes `1 2 3 1 -3 -3.5 -2 -2.5 -1 -1.5 -1 -1.5`.

    Raises:
        ValueError: a chunk without its number of layers, and an order whose steady part does not alternate.
    """
    if len(num_layers_per_chunk) < max(map(abs, order), default=0) or min(num_layers_per_chunk, default=0) < 0:
        raise ValueError(
            f"num_layers_per_chunk is {list(num_layers_per_chunk)}: give the layers of each chunk of the order, which "
            f"has chunks 1 to {max(map(abs, order), default=0)}"
        )
    first_backward = next((i for i, chunk in enumerate(order) if chunk < 0), len(order))
    last_forward = max((i for i, chunk in enumerate(order) if chunk > 0), default=-1)
    steady = order[first_backward : last_forward + 1]
    backwards, forwards = steady[::2], steady[1::2]
    if len(steady) % 2 or any(chunk > 0 for chunk in backwards) or any(chunk < 0 for chunk in forwards):
        raise ValueError(
            f"the order is {list(order)}: after the first backward, forwards and backwards must take turns until the "
            "last forward, as convert_schedule_table_to_order makes them"
        )
    expanded: list[float] = []
    for chunk in order[:first_backward]:
        expanded += _layer_by_layer(chunk, num_layers_per_chunk, capture_wgrad_graph)
    for backward, forward in zip(backwards, forwards, strict=True):
        expanded += _side_by_side(backward, forward, num_layers_per_chunk, capture_wgrad_graph)
    for chunk in order[last_forward + 1 :]:
        expanded += _layer_by_layer(chunk, num_layers_per_chunk, capture_wgrad_graph)
    return expanded


def _layers(chunk: int, num_layers_per_chunk: Sequence[int]) -> list[int]:
    """Return signed layer numbers of a chunk in the order they run: 3 4 5 forward, -5 -4 -3 backward."""
    before = sum(num_layers_per_chunk[: abs(chunk) - 1])
    numbers = range(before + 1, before + num_layers_per_chunk[abs(chunk) - 1] + 1)
    return list(numbers) if chunk > 0 else [-number for number in reversed(numbers)]


def _layer_by_layer(chunk: int, num_layers_per_chunk: Sequence[int], weights: bool) -> list[float]:
    layers = _layers(chunk, num_layers_per_chunk)
    if chunk > 0 or not weights:
        return list(layers)
    return [number for layer in layers for number in (layer, layer - 0.5)]


def _side_by_side(backward: int, forward: int, num_layers_per_chunk: Sequence[int], weights: bool) -> list[float]:
    down, up = _layers(backward, num_layers_per_chunk), _layers(forward, num_layers_per_chunk)
    mixed: list[float] = []
    for step, (back, ahead) in enumerate(zip_longest(down, up)):
        mixed += [] if ahead is None else [ahead]
        mixed += [] if back is None else [back]
        mixed += [down[step] - 0.5] if weights and step < len(down) - 1 else []
    return mixed + ([down[-1] - 0.5] if weights and down else [])


# ---- programs ----


def from_programs(
    name: str, microbatches: int, programs: Sequence[Sequence[Phase]], stage_of: Callable[[int, int], int]
) -> Schedule:
    """Return the schedule of these programs, one for each rank; `stage_of(rank, chunk)` is the stage of a rank's model
    chunk.

    Phases with 0 times are left out. The function drops actions of microbatches from `microbatches` on, so a program
    for more microbatches serves too.

    Raises:
        ValueError: a phase with a negative number of times, or a word that begins with another letter.
    """
    rows = []
    for rank, program in enumerate(programs):
        if short := [f"{times} times `{words}`" for times, words in program if times < 0]:
            raise ValueError(
                f"{name}: the program of rank {rank} has a phase of {short[0]}; a phase has 0 times or more, so with "
                f"{counted(microbatches, 'microbatch')} a warm-up is at most {microbatches}"
            )
        if bad := [word for _, words in program for word in words.replace("&", " ").split() if word[0] not in KINDS]:
            raise ValueError(f"{name}: the program of rank {rank} has `{bad[0]}`; words begin with {', '.join(KINDS)}")
        kinds, chunks, numbers, merged = _row(program)
        stages = np.array([stage_of(rank, chunk) for chunk in range(1 + int(chunks.max()))])
        kept = numbers < microbatches
        rows.append((stages[chunks[kept]], kinds[kept], numbers[kept], merged[kept]))
    stages, kinds, numbers, merged = (np.concatenate(columns) for columns in zip(*rows, strict=True))
    return Schedule.from_columns(
        name,
        1 + int(stages.max()),
        microbatches,
        stages=stages,
        kinds=kinds,
        microbatches=numbers,
        offsets=np.cumsum([0, *(len(row[0]) for row in rows)]),
        merged=merged,
    )


def _row(program: Sequence[Phase]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (kinds, chunks, microbatches, merged) of one rank's actions."""
    phases = [(times, words.replace("&", " &").split()) for times, words in program if times]
    joins = np.concatenate([np.tile([word[0] == "&" for word in words], times) for times, words in phases])
    phases = [(times, [word.removeprefix("&") for word in words]) for times, words in phases]
    kinds = np.concatenate([np.tile([KINDS.index(word[0]) for word in words], times) for times, words in phases])
    chunks = np.concatenate([np.tile([_chunk(word) for word in words], times) for times, words in phases])
    numbers = np.zeros_like(kinds)
    for alike in ((_F,), (_B, _I), (_W,)):
        for chunk in range(1 + int(chunks.max())):
            here = np.isin(kinds, alike) & (chunks == chunk)
            numbers[here] = np.arange(np.count_nonzero(here))
    if (chunks == _OLDEST).any():
        inputs, weights = kinds == _I, kinds == _W
        chunks[weights], numbers[weights] = chunks[inputs], numbers[inputs]
    return kinds, chunks, numbers, joins


def _chunk(word: str) -> int:
    if word == "W":
        return _OLDEST
    return int(word[1:] or 0)


def require_positive(**sizes: int) -> None:
    """Raise ValueError unless every size is a whole number of at least 1. The message names the keyword."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is {size!r}: give a whole number of at least 1")
