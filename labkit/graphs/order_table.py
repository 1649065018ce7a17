"""An order table read as passes. Each pass has a step, a direction, a chunk and a microbatch.

An order is the row of one rank as signed chunk numbers from 1; Transformer Engine takes it as `_order`. The number c is
a forward of chunk c, and -c its backward. The number -c - 0.5 is the weight gradients of an earlier backward
(c_id - 0.5 in Transformer Engine). An order does not name microbatches: each chunk runs its forwards, its backwards and
its weight gradients in ascending order. `1 1 -1 1 -1 -1` is a chunk with three microbatches, one of them in warm-up.

A rank captures its row of the schedule (`capture_order`), if every chunk runs its microbatches backward in the order in
which it ran them forward. A split backward has a separate graph of weight gradients. In a row with merged pairs every
captured layer is a chunk of its own (`merged_capture_order`). This module imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from labkit.schedules.ir import Action, Schedule
from labkit.schedules.tables import get_overlap_moe_expert_parallel_comm_order


class Pass(NamedTuple):
    """One entry of an order."""

    step: int
    """Place in the order, 0 first."""
    kind: str
    """F forward, B backward, W weight gradients of a backward that left them out."""
    chunk: int
    """Model chunk of the rank, 0 first."""
    microbatch: int
    """Microbatch, 0 first."""


def read_order(order: Sequence[float]) -> list[Pass]:
    """The passes of an order, one per entry.

    Raises:
        ValueError: an entry that is not a signed chunk number, a chunk left out, a backward before its forward, weight
            gradients before their backward, a forward without a backward, or unequal numbers of microbatches.
    """
    passes: list[Pass] = []
    seen: Counter[tuple[str, int]] = Counter()
    for step, entry in enumerate(order):
        kind, chunk = _kind_and_chunk(entry, step)
        before = {"F": None, "B": "F", "W": "B"}[kind]
        if before is not None and seen[kind, chunk] >= seen[before, chunk]:
            missing = {"F": "forward", "B": "backward"}[before]
            raise ValueError(
                f"order[{step}] is {entry}: chunk {chunk + 1} has had {seen[kind, chunk]} such entries and as many "
                f"{missing}s; a {missing} must come first. The order: {_shown(order)}"
            )
        passes.append(Pass(step, kind, chunk, seen[kind, chunk]))
        seen[kind, chunk] += 1
    _require_whole(seen, order)
    return passes


def order_sizes(passes: Sequence[Pass]) -> tuple[int, int]:
    """(number of model chunks, number of microbatches) of an order that `read_order` has read."""
    return 1 + max(one.chunk for one in passes), 1 + max(one.microbatch for one in passes)


def sample_index(layers_per_chunk: Sequence[int], microbatches: int, chunk: int, layer: int, microbatch: int) -> int:
    """Index of a layer's microbatch among the sample arguments and among the graphed callables.

    Transformer Engine's layout is prefix_layers[c] M + m L_c + l: chunk by chunk, then microbatch by microbatch, then
    layer by layer.
    """
    return sum(layers_per_chunk[:chunk]) * microbatches + microbatch * layers_per_chunk[chunk] + layer


def sample_places(layers_per_chunk: Sequence[int], microbatches: int) -> list[tuple[int, int, int]]:
    """(chunk, layer, microbatch) of every sample argument, in the layout of `sample_index`."""
    return [
        (chunk, layer, microbatch)
        for chunk, layers in enumerate(layers_per_chunk)
        for microbatch in range(microbatches)
        for layer in range(layers)
    ]


def layers_of_chunks(layers_per_chunk: int | Sequence[int], chunks: int) -> tuple[int, ...]:
    """Layers of each chunk; a single number holds for all.

    Raises:
        ValueError: the order has another number of chunks, or a number of layers is below 0.
    """
    layers = (layers_per_chunk,) * chunks if isinstance(layers_per_chunk, int) else tuple(layers_per_chunk)
    if len(layers) != chunks or any(count < 0 for count in layers):
        raise ValueError(
            f"layers_per_chunk is {layers_per_chunk!r}: the order has chunks 1 to {chunks}; give one number of layers "
            "for each, or one number for all"
        )
    return layers


def _kind_and_chunk(entry: float, step: int) -> tuple[str, int]:
    chunk = abs(math.ceil(entry))  # -1.5 is chunk 1, like -1
    whole = math.ceil(entry) == entry
    if chunk < 1 or not (whole or (entry < 0 and math.ceil(entry) - entry == 0.5)):
        raise ValueError(
            f"order[{step}] is {entry!r}: write c for a forward of chunk c (1 first), -c for its backward, "
            "-c - 0.5 for its weight gradients"
        )
    return ("F" if entry > 0 else "B" if whole else "W"), chunk - 1


def _require_whole(seen: Counter[tuple[str, int]], order: Sequence[float]) -> None:
    chunks = 1 + max((chunk for _, chunk in seen), default=-1)
    if not chunks:
        raise ValueError("the order is empty: give at least one forward and its backward, as in [1, -1]")
    forwards = [seen["F", chunk] for chunk in range(chunks)]
    backwards = [seen["B", chunk] for chunk in range(chunks)]
    weights = {seen["W", chunk] for chunk in range(chunks)}
    if len(set(forwards)) > 1 or forwards != backwards or weights - {0, forwards[0]}:
        raise ValueError(
            f"the order has {forwards} forwards and {backwards} backwards of chunks 1 to {chunks}: every chunk runs "
            f"every microbatch once forward and once backward. The order: {_shown(order)}"
        )


def _shown(order: Sequence[float]) -> str:
    text = " ".join(f"{entry:g}" for entry in order[:40])
    return text + (" .." if len(order) > 40 else "")


# ---- the order that a rank captures ----


def capture_order(schedule: Schedule, pp_rank: int, *, weight_gradients: bool = True) -> list[int | float]:
    """The order that a rank captures: its row, or one microbatch where each ends before the next begins.

    weight_gradients: allow separate graphs of weight gradients.

    Raises:
        ValueError: backwards of a stage that run in another order than its forwards, are partly split and partly whole,
            or are split without `weight_gradients`.
    """
    actions = schedule.actions(pp_rank)
    if not weight_gradients and any(action.kind == "W" for action in actions):
        raise ValueError(
            f"{schedule.name} splits backwards into input and weight gradients, and the engine's layers compute both "
            "together. Choose a schedule with whole backwards (1f1b, interleaved, gpipe), or set "
            "graph.cuda_graph_impl to local"
        )
    for stage in schedule.stages_of(pp_rank):
        runs = {kind: [a.microbatch for a in actions if a.stage == stage and a.kind == kind] for kind in "FBIW"}
        forwards = runs["F"]
        whole, split = runs["B"] == forwards and not runs["W"], runs["I"] == runs["W"] == forwards and not runs["B"]
        if forwards != sorted(forwards) or not (whole or split):
            backwards = ", ".join(f"{kind} {runs[kind]}" for kind in "BIW" if runs[kind])
            raise ValueError(
                f"{schedule.name} runs stage {stage} forward for microbatches {forwards} and backward for {backwards}: "
                "graphs that share memory need both in ascending order, and all backwards of one kind"
            )
    order = schedule.order(pp_rank)
    one = order[: len(order) // schedule.num_microbatches]
    return one if set(one) >= {1, -1} and order == one * schedule.num_microbatches else order


def merged_capture_order(
    schedule: Schedule,
    pp_rank: int,
    captured: Sequence[Sequence[bool]],
    *,
    weight_gradients: bool,
    delay_wgrad: bool,
) -> list[int | float]:
    """The order that a rank captures whose row has merged pairs: every captured layer is a chunk, from 1 on.

    It is Megatron's `get_overlap_moe_expert_parallel_comm_order`, in which a pair is its backward and then its forward,
    extended to rows that also split backwards. Layers that stay eager are left out after the two sides of a pair have
    been lined up, so captures come as the layers run.

    captured: by chunk, whether each of its layers has a graph.
    weight_gradients: the graphs hold weights whose gradients a backward can leave out. Those of merged pairs come apart
        with `delay_wgrad` (Megatron's `capture_wgrad_graph`), those of split backwards always.

    Raises:
        ValueError: backwards of a stage in another order than its forwards, or only some of them with weight gradients
            of their own.
    """
    counts, stages = [len(layers) for layers in captured], schedule.stages_of(pp_rank)
    _require_order_of_pairs(schedule, pp_rank, weight_gradients=weight_gradients, delay_wgrad=delay_wgrad)
    order: list[float] = []
    for cell in schedule.cells(pp_rank):
        numbers = [_signed(action, stages.index(action.stage)) for action in reversed(cell)]
        kind = cell[-1].kind
        if kind != "W":
            apart = weight_gradients and delay_wgrad and kind == "B"
            order += get_overlap_moe_expert_parallel_comm_order(numbers, counts, apart)
        elif weight_gradients:
            order += [n - 0.5 for n in get_overlap_moe_expert_parallel_comm_order(numbers, counts, False)]
    held = [number for number, has_graph in enumerate((has for layers in captured for has in layers), 1) if has_graph]
    new = {number: place for place, number in enumerate(held, 1)}
    kept = [(entry, new[abs(math.ceil(entry))]) for entry in order if abs(math.ceil(entry)) in new]
    return [place if entry > 0 else -place - (math.ceil(entry) - entry) for entry, place in kept]


def _signed(action: Action, chunk: int) -> int:
    return chunk + 1 if action.kind == "F" else -chunk - 1


def _require_order_of_pairs(schedule: Schedule, pp_rank: int, *, weight_gradients: bool, delay_wgrad: bool) -> None:
    """Raise ValueError for a row that `merged_capture_order` cannot follow."""
    actions = schedule.actions(pp_rank)
    apart = "BW" if delay_wgrad else "W"
    for stage in schedule.stages_of(pp_rank):
        forwards, backwards, weights = (
            [a.microbatch for a in actions if a.stage == stage and a.kind in kinds] for kinds in ("F", "BI", apart)
        )
        if weight_gradients and weights and sorted(weights) != sorted(forwards):
            raise ValueError(
                f"{schedule.name} splits some backwards of stage {stage} and merges others whole, and graphs need all "
                "of one kind: set schedule.delay_wgrad_compute, so that merged backwards are split as well"
            )
        orders = [forwards, backwards, *([weights] if weight_gradients and weights else [])]
        if any(order != sorted(forwards) for order in orders):
            raise ValueError(
                f"{schedule.name} runs stage {stage} for microbatches {', '.join(map(str, orders))}, forward, backward "
                "and where apart for weight gradients: graphs that share memory need all in ascending order"
            )
