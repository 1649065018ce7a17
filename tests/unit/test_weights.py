"""Weights depend on (seed, name, shape) and on nothing else; parts and wholes are each other's inverse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.config import presets
from labkit.models import build_model_chunks
from labkit.parallel import Group, initialize_model_parallel, single_process_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import (
    DeviceSeed,
    Replicated,
    draw,
    gather_expert_parameter,
    gather_parameter,
    make_expert_parameter,
    make_parameter,
    parameter_seed,
    tensor_part,
)
from labkit.train.parity.assemble import join_replicated

FAMILIES = pytest.mark.parametrize(
    "preset", ["tiny", "llama_tiny", "mixtral_tiny", "bert_tiny", "t5_tiny", "mamba_tiny"]
)


@FAMILIES
def test_biases_begin_at_zero_and_norms_at_one(preset: str) -> None:
    """Of all families, apart from Mamba's `dt_bias` and T5's table of relative positions."""
    found = {"weight": 0, "bias": 0}
    for chunk in build_model_chunks(presets.get(preset), single_process_groups()):
        for name, parameter in chunk.named_parameters():
            *_, owner, kind = f".{name}".replace("output_bias", "output.bias").split(".")
            if "relative" in name or (kind == "weight" and "norm" not in owner) or kind not in found:
                continue
            assert (parameter == (0.0 if kind == "bias" else 1.0)).all(), name
            found[kind] += 1
    assert found["weight"] > 4


@FAMILIES
def test_gradients_of_what_each_rank_holds_whole_are_partial_sums_under_sequence_parallelism(preset: str) -> None:
    """Each rank sees its own positions; BERT's head of the sentence order sees the first position on every rank."""
    for sequence_parallel in (True,) if preset == "mixtral_tiny" else (True, False):  # experts need it
        config = presets.get(preset).override({"tp": 2, "sequence_parallel": sequence_parallel})
        (chunk,) = build_model_chunks(config, initialize_model_parallel(config.parallel, rank=1, world_size=2))
        records = {name: record_of(parameter) for name, parameter in chunk.named_parameters()}
        marked = {name for name, record in records.items() if record.sequence_parallel}
        whole = {name for name, record in records.items() if record.partition_dim < 0 and "binary_head" not in name}
        assert whole and marked == (whole if sequence_parallel else set())


def member(rank: int, size: int) -> Group:
    return Group("tp", tuple(range(size)), rank)


@given(
    size=st.sampled_from([1, 2, 3, 4]), stride=st.sampled_from([1, 2, 3]), rows=st.integers(1, 3), dim=st.integers(0, 1)
)
def test_the_parts_of_all_ranks_hold_every_element_once(size: int, stride: int, rows: int, dim: int) -> None:
    shape = [5, 5]
    shape[dim] = rows * size * stride
    full = torch.arange(shape[0] * shape[1]).view(shape)
    parts = [tensor_part(full, rank, size, dim, stride) for rank in range(size)]
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == full.flatten().tolist()
    # Each of the stacked blocks is cut by itself: rank r's part consists of the blocks' r-th slices, in their order.
    for rank, part in enumerate(parts):
        slices = [block.chunk(size, dim=dim)[rank] for block in full.chunk(stride, dim=dim)]
        assert torch.equal(part, torch.cat(slices, dim=dim))


def test_swiglu_halves_stay_halves_on_each_rank() -> None:
    gate, up = torch.zeros(4, 1), torch.ones(4, 1)
    part = tensor_part(torch.cat([gate, up]), 1, 2, 0, stride=2)
    assert part.flatten().tolist() == [0, 0, 1, 1]


def test_neighbours_hold_a_head_alike_and_share_its_queries_out() -> None:
    q0, q1, q2, q3, kv0, q4, q5, q6, q7, kv1 = range(10)
    full = torch.tensor([q0, q1, q2, q3, kv0, q4, q5, q6, q7, kv1])
    parts = [tensor_part(full, rank, 4, 0, replicated=Replicated(2, 1)).tolist() for rank in range(4)]
    assert parts == [[q0, q1, kv0], [q2, q3, kv0], [q4, q5, kv1], [q6, q7, kv1]]
    parts = [tensor_part(full[:5], rank, 4, 0, replicated=Replicated(4, 1)).tolist() for rank in range(4)]
    assert parts == [[q0, kv0], [q1, kv0], [q2, kv0], [q3, kv0]]


@given(
    blocks=st.integers(1, 3), ranks=st.integers(2, 4), cut=st.integers(1, 3), rows=st.integers(1, 3),
    shape=st.sampled_from([(), (2,)]),
)  # fmt: skip
def test_a_part_with_replicated_rows_finds_its_way_back(
    blocks: int, ranks: int, cut: int, rows: int, shape: tuple[int, ...]
) -> None:
    size, alike = blocks * ranks, Replicated(ranks, rows)
    full_shape = (blocks * (ranks * cut + rows), *shape)
    whole = make_parameter("qkv", full_shape, seed=3, std=1.0).detach()
    named = {"seed": 3, "std": 1.0, "partition_dim": 0, "replicated": alike}
    parts = [make_parameter("qkv", full_shape, group=member(rank, size), **named) for rank in range(size)]
    assert all(part.shape == (cut + rows, *shape) and record_of(part).replicated == alike for part in parts)
    joined, agree = join_replicated([part.detach() for part in parts], ranks, rows)
    assert torch.equal(joined, whole) and agree
    with torch.no_grad():
        parts[-1].view(-1)[-1] += 1.0
    joined, agree = join_replicated([part.detach() for part in parts], ranks, rows)
    assert torch.equal(joined, whole) and not agree, "the first of the copies is taken, and the other noticed"


def test_ranks_hold_slices_of_the_tensor_that_one_process_draws() -> None:
    whole = make_parameter("a.weight", (8, 6), seed=3, std=0.5)
    for dim in (0, 1):
        parts = [
            make_parameter("a.weight", (8, 6), seed=3, std=0.5, group=member(r, 2), partition_dim=dim) for r in (0, 1)
        ]
        assert torch.equal(torch.cat([p.detach() for p in parts], dim=dim), whole.detach())
        assert all(
            r.tensor_model_parallel and r.partition_dim == dim and r.full_shape == (8, 6) for r in map(record_of, parts)
        )
    assert not record_of(whole).tensor_model_parallel
    assert record_of(whole).partition_dim == -1


def test_name_and_seed_choose_the_numbers_and_precision_only_rounds_them() -> None:
    a = draw("a", (1000,), seed=0, std=1.0)
    assert torch.equal(a, draw("a", (1000,), seed=0, std=1.0))
    assert not torch.equal(a, draw("b", (1000,), seed=0, std=1.0))
    assert not torch.equal(a, draw("a", (1000,), seed=1, std=1.0))
    assert parameter_seed(1, "2/a") != parameter_seed(12, "a")
    half = make_parameter("a", (1000,), seed=0, std=1.0, dtype=torch.bfloat16)
    assert torch.equal(half.detach(), a.bfloat16())
    assert abs(float(a.mean())) < 0.15 and abs(float(a.std()) - 1.0) < 0.1
    state = torch.get_rng_state()
    draw("a", (10,), seed=0, std=1.0)
    assert torch.equal(state, torch.get_rng_state())


def test_padding_is_zero_and_moves_no_real_row() -> None:
    whole = make_parameter("e", (10, 3), seed=0, std=1.0)
    last = make_parameter("e", (10, 3), seed=0, std=1.0, group=member(1, 2), partition_dim=0, padded_rows=16)
    assert torch.equal(last.detach()[:2], whole.detach()[8:])
    assert not last.detach()[2:].any()
    assert record_of(last).full_shape == (10, 3)
    padded = make_parameter("e", (10, 3), seed=0, std=1.0, padded_rows=16)
    assert torch.equal(gather_parameter(padded, padded, member(0, 1)), whole.detach())


@given(
    ep=st.sampled_from([1, 2, 3]), etp=st.sampled_from([1, 2]), each=st.integers(1, 2), dim=st.sampled_from([1, 2]),
    stride=st.sampled_from([1, 2]),
)  # fmt: skip
def test_an_expert_has_the_same_weights_wherever_it_is(ep: int, etp: int, each: int, dim: int, stride: int) -> None:
    shape = (ep * each, 4, 8)
    cut = {"partition_dim": dim, "partition_stride": stride, "seed": 3, "std": 0.5}
    alone = {"ep": member(0, 1), "etp": member(0, 1)}
    whole = make_expert_parameter("layers.0.mlp.experts", "fc1.weight", shape, **alone, **cut)
    record = record_of(whole)
    assert record.allreduce is False and record.expert_parallel is True and not record.tensor_model_parallel
    assert torch.equal(gather_expert_parameter(whole, whole, **alone), whole.detach())
    for expert in range(shape[0]):
        drawn = draw(f"layers.0.mlp.experts.{expert}.fc1.weight", shape[1:], seed=3, std=0.5)
        assert torch.equal(whole.detach()[expert], drawn)
    for one in range(ep):
        for other in range(etp):
            groups = {"ep": member(one, ep), "etp": member(other, etp)}
            part = make_expert_parameter("layers.0.mlp.experts", "fc1.weight", shape, **groups, **cut)
            own = whole.detach()[one * each : (one + 1) * each]
            assert torch.equal(part.detach(), tensor_part(own, other, etp, dim, stride))
            assert part.full_name == "layers.0.mlp.experts.fc1.weight" and record_of(part).full_shape == shape
            assert record_of(part).partition_dim == (dim if etp > 1 else -1)
            assert record_of(part).partition_stride == stride


HERE = {"seed": DeviceSeed(3), "std": 0.5, "device": "cpu"}
"""Draws of a rank's own part, on its device: here the host's generator, on the path of every device."""
CUTS: dict[str, tuple[tuple[int, ...], int, dict]] = {
    "columns": ((240, 100), 4, {"partition_dim": 0}),
    "rows": ((100, 240), 4, {"partition_dim": 1}),
    "gate and up": ((240, 100), 3, {"partition_dim": 0, "partition_stride": 2}),
    "heads with copies": ((2 * (2 * 30 + 40), 100), 4, {"partition_dim": 0, "replicated": Replicated(2, 40)}),
    "vocabulary": ((230, 100), 4, {"partition_dim": 0, "padded_rows": 240}),
    "a rank of padding alone": ((130, 100), 4, {"partition_dim": 0, "padded_rows": 240}),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_device_seed_draws_parts_of_the_same_form_by_seed_name_and_part(name: str) -> None:
    shape, size, cut = CUTS[name]
    parts = [make_parameter("w", shape, group=member(rank, size), **cut, **HERE) for rank in range(size)]
    by_host = [make_parameter("w", shape, seed=3, std=0.5, group=member(rank, size), **cut) for rank in range(size)]
    for part, expected in zip(parts, by_host, strict=True):
        assert part.shape == expected.shape and vars(part) == vars(expected)
        assert torch.equal(part.detach().any(dim=1), expected.detach().any(dim=1)), "the same rows of padding"
    real = gather_rows(parts, cut).detach()
    assert abs(float(real.mean())) < 4 * 0.5 / real.numel() ** 0.5
    assert abs(float(real.std()) / 0.5 - 1) < 4 / (2 * real.numel()) ** 0.5
    again = [make_parameter("w", shape, group=member(rank, size), **cut, **HERE) for rank in range(size)]
    assert all(map(torch.equal, parts, again)), "as on the ranks of another replica, or another stage"
    others = [("v", HERE), ("w", HERE | {"seed": DeviceSeed(4)})]
    draws = [make_parameter(own, shape, group=member(0, size), **cut, **made) for own, made in others]
    for x in (*draws, *parts[1:]):
        rows = slice(None) if "replicated" not in cut else slice(0, -40)
        if x[rows].any():
            assert abs(correlation(x[rows], parts[0][rows])) < 0.1, "another name, seed or part: unrelated numbers"


def gather_rows(parts: list, cut: dict) -> torch.Tensor:
    """Every number that is drawn, once."""
    alike: Replicated | None = cut.get("replicated")
    rows = [row for part in parts for row in (part if alike is None else part[: -alike.rows]) if row.any()]
    return torch.cat([row.flatten() for row in rows])


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    both = a.detach().flatten(), b.detach().flatten()
    rows = min(map(len, both))
    return float(torch.corrcoef(torch.stack([x[:rows] for x in both]))[0, 1])


def test_a_device_seed_draws_alike_what_ranks_hold_alike() -> None:
    shape, size, cut = CUTS["heads with copies"]
    parts = [make_parameter("qkv", shape, group=member(rank, size), **cut, **HERE).detach() for rank in range(size)]
    heads = [part[-40:] for part in parts]
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[2], heads[3])
    assert abs(correlation(heads[0], heads[2])) < 0.1, "heads of another block"
    for group in (None, member(0, 1)):  # a router, a table of positions; a layer of one rank
        whole = make_parameter("router", (30, 40), group=group, partition_dim=0, **HERE).detach()
        assert torch.equal(whole, draw("router", (30, 40), seed=3, std=0.5))
    half = make_parameter("router", (30, 40), dtype=torch.bfloat16, **HERE)
    assert torch.equal(half.detach(), whole.bfloat16())


@pytest.mark.parametrize("etp", [1, 2])
def test_an_expert_is_drawn_the_same_on_every_ep(etp: int) -> None:
    cut = {"partition_dim": 1, "partition_stride": 2, **HERE}

    def stack(ep: int, other: int) -> torch.Tensor:
        groups = ({"ep": member(rank, ep), "etp": member(other, etp)} for rank in range(ep))
        parts = [make_expert_parameter("experts", "fc1.weight", (6, 8, 5), **both, **cut) for both in groups]
        return torch.cat([part.detach() for part in parts])

    alone = [stack(1, other) for other in range(etp)]
    for other, experts in enumerate(alone):
        assert torch.equal(stack(2, other), experts) and torch.equal(stack(3, other), experts)
    assert len(set(torch.cat(alone)[:, 0, 0].tolist())) == 6 * etp, "no two experts alike, and no two parts of one"


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is really allocated."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type != "meta":
            self.elements = max(self.elements, made.numel())
        return made


def test_a_device_seed_never_makes_the_whole() -> None:
    for seed, expected in ((DeviceSeed(3), 400 * 10 // 4), (3, 400 * 10)):
        with Largest() as seen:
            make_parameter("w", (400, 10), group=member(1, 4), partition_dim=0, seed=seed, std=1.0)
        assert seen.elements == expected


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="either std or fill, got std=None, fill=None"):
        make_parameter("a", (2,))
    with pytest.raises(ValueError, match="7 must be a multiple of 2"):
        make_parameter("a", (7, 4), std=1.0, group=member(0, 2), partition_dim=0)
    with pytest.raises(ValueError, match="7 must be a multiple of 2"):
        make_parameter("a", (7, 4), group=member(0, 2), partition_dim=0, **HERE)
    cut = {"partition_dim": 1, "partition_stride": 2}
    with pytest.raises(ValueError, match="experts: 5 experts cannot be divided over ep=2; choose a multiple of it"):
        make_expert_parameter("experts", "fc1.weight", (5, 4, 4), ep=member(0, 2), etp=member(0, 1), **cut)
    with pytest.raises(ValueError, match=r"experts.fc1.weight: dimension 1 of \(4, 6, 4\) cannot be cut over etp=2"):
        make_expert_parameter("experts", "fc1.weight", (4, 6, 4), ep=member(0, 2), etp=member(0, 2), **cut)
