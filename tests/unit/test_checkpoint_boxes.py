"""Boxes of a checkpoint against plain indexing: the parts of all ranks make up the whole tensor, each element once."""

from __future__ import annotations

import math
from itertools import chain, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.parallel import Group
from labkit.parallel.parameters.parameter_record import ParameterRecord, Replicated
from labkit.parallel.parameters.weights import tensor_part
from labkit.train.checkpoint.boxes import Box, boxes_of_run, placements, whole


def counted(*shape: int) -> Tensor:
    """A tensor whose elements are their places."""
    return torch.arange(math.prod(shape)).view(shape)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (3, 1), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_the_boxes_of_a_run_hold_its_elements_in_their_order(shape: tuple[int, ...]) -> None:
    """Of every run; along each dimension at most the end of a row, whole rows and the start of a row."""
    everything, full = whole(shape), counted(*shape)
    for end in range(full.numel() + 1):
        for start in range(end + 1):
            run = [*boxes_of_run(shape, start, end)]
            parts = [everything.view(full, box).flatten().tolist() for box, _ in run]
            assert [*chain(*parts)] == [*range(start, end)]
            assert [first for _, first in run] == [part[0] for part in parts], "no box is empty"
            assert len(run) <= max(1, 2 * len(shape) - 1)


CUT: dict[str, Any] = {"tensor_model_parallel": True, "partition_dim": 0}
EXPERTS: dict[str, Any] = {"expert_parallel": True, "allreduce": False}
RECORDS: dict[str, tuple[ParameterRecord, tuple[int, ...], int, int]] = {
    "a scalar": (ParameterRecord(), (), 1, 2),
    "uncut": (ParameterRecord(full_shape=(3, 2)), (3, 2), 1, 2),
    "rows": (ParameterRecord((8, 3), **CUT), (8, 3), 1, 4),
    "rows of a user's module": (ParameterRecord(**CUT), (8, 3), 1, 4),
    "columns": (ParameterRecord((3, 8), True, 1), (3, 8), 1, 4),
    "gate and up": (ParameterRecord((12, 2), partition_stride=2, **CUT), (12, 2), 1, 3),
    "padding": (ParameterRecord((5, 2), **CUT), (8, 2), 1, 4),
    "queries, and keys of two ranks": (ParameterRecord((26, 2), replicated=Replicated(2, 7), **CUT), (26, 2), 1, 4),
    "queries, and keys of all ranks": (ParameterRecord((9,), replicated=Replicated(4, 1), **CUT), (9,), 1, 4),
    "experts": (ParameterRecord((6, 2, 2), **EXPERTS), (6, 2, 2), 3, 1),
    "experts, their rows cut": (ParameterRecord((4, 12, 2), True, 1, 2, **EXPERTS), (4, 12, 2), 2, 3),
    "experts of a user's module": (ParameterRecord((4, 2, 6), True, 2, **EXPERTS), (4, 2, 6), 2, 3),
}  # fmt: skip
"""Record, shape with padding, ranks of ep, ranks of the group that cuts."""


@pytest.mark.parametrize("name", RECORDS)
def test_the_parts_of_all_ranks_cover_the_tensor_and_one_rank_writes_each_element(name: str) -> None:
    record, padded, experts, ranks = RECORDS[name]
    full, written = counted(*padded), []
    inside = whole(padded).view(full, whole(record.full_shape or padded)).flatten().tolist()
    for expert, rank in product(range(experts), range(ranks)):
        part = full.chunk(experts)[expert] if experts > 1 else full
        if record.tensor_model_parallel:
            stride, shared = record.partition_stride, record.replicated
            part = tensor_part(part, rank, ranks, record.partition_dim, stride, shared)
        cuts, others = Group("cut", tuple(range(ranks)), rank), Group("other", (0, 1, 2, 3, 4), 4)
        by = {"tp": cuts, "etp": others} if record.allreduce else {"tp": others, "etp": cuts}
        groups: Any = SimpleNamespace(ep=Group("ep", tuple(range(experts)), expert), **by)
        held = []
        for place in placements(record, tuple(part.shape), groups):
            values = whole(part.shape).view(part, place.local)
            assert torch.equal(values, whole(padded).view(full, place.box))
            held += values.flatten().tolist()
            if not place.copied:
                written += values.flatten().tolist()
        assert sorted(held) == sorted(set(part.flatten().tolist()) & set(inside))
    times = 1 if record.tensor_model_parallel else ranks  # of what every rank holds, `RankState` chooses one
    assert sorted(written) == sorted([*inside] * times)


def test_a_run_that_a_rank_holds_of_its_part_has_places_in_the_whole() -> None:
    """Two ranks with five rows of queries each, and two rows of keys that both have. The run is rows 3 to 5."""
    record = ParameterRecord((12, 4), replicated=Replicated(2, 2), **CUT)
    full, held = counted(12, 4), Box((3, 0), (3, 4))
    run = tensor_part(full, 1, 2, 0, 1, record.replicated)[3:6]
    groups: Any = SimpleNamespace(tp=Group("tp", (0, 1), 1))
    places = [place.of(held) for place in placements(record, (7, 4), groups)]
    found = [(place.offset, place.copied, held.view(run, place.local).tolist()) for place in places if place]
    assert found == [((8, 0), False, full[8:10].tolist()), ((10, 0), True, full[10:11].tolist())]
