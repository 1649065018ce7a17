"""Experts over ep and etp, and shared experts over tp, against one process that holds everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from inputs import random
from torch import Tensor

from labkit.config import ModelConfig, MoEConfig, ParallelConfig
from labkit.moe.experts import Experts, GroupedExperts, SequentialExperts
from labkit.moe.shared_experts import SharedExpertMLP
from labkit.parallel import (
    CommLedger,
    all_gather,
    all_reduce,
    gather_expert_parameter,
    gather_parameter,
    initialize_model_parallel,
    single_process_groups,
)
from labkit.parallel.parameters.parameter_record import record_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
HIDDEN, WIDTH, EXPERTS = 8, 12, 4
KINDS = {"sequential": SequentialExperts, "grouped": GroupedExperts}
COUNTS = [5, 0, 7, 1]


# ---- routed experts ----


def build(kind: str, groups: Any, activation: str) -> Experts:
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation=activation)
    moe = MoEConfig(num_experts=EXPERTS, ffn_hidden=WIDTH)
    made: dict[str, Any] = {"seed": 5, "std": 0.4, "dtype": torch.float64}
    return KINDS[kind]("layers.0.mlp.experts", model, moe, groups, **made)


def of_experts(counts: list[int], first: int, last: int) -> dict[str, Tensor]:
    """Inputs of experts first..last, as leaves, and the gradient of their output: slices of those of all experts."""
    rows = slice(sum(counts[:first]), sum(counts[:last]))
    names = {"tokens": random(sum(counts), HIDDEN, seed=1), "probs": random(sum(counts), seed=2).sigmoid()}
    leaves = {name: tensor[rows].clone().requires_grad_() for name, tensor in names.items()}
    return leaves | {"grad": random(sum(counts), HIDDEN, seed=3)[rows]}


def experts_of_a_rank(kind: str, activation: str, etp: int, ep: int, counts: list[int]) -> dict[str, Tensor]:
    """Everything that one process also has: etp sums joined, the experts of ep laid end to end."""
    groups = initialize_model_parallel(ParallelConfig(tp=etp, ep=ep, etp=etp, sequence_parallel=etp > 1))
    experts, local = build(kind, groups, activation), EXPERTS // ep
    first = groups.ep.rank * local
    own = of_experts(counts, first, first + local)
    with CommLedger() as ledger:
        y = experts(own["tokens"], torch.tensor(counts[first : first + local]), own["probs"])
        y.backward(own["grad"])
    assert ledger.count() == 0, "the dispatcher communicates, experts do not"
    found = {"output": y.detach(), "tokens": own["tokens"].grad, "probs": own["probs"].grad}
    found = {name: all_reduce(tensor, groups.etp) for name, tensor in found.items()}  # type: ignore[arg-type]
    for name, parameter in experts.named_parameters():
        record = record_of(parameter)
        assert record.allreduce is False and record.expert_parallel is True
        both = {"etp": groups.etp, "ep": groups.ep}
        found[f"weight {name}"] = gather_expert_parameter(parameter, parameter, **both)
        found[f"gradient {name}"] = gather_expert_parameter(parameter.grad, parameter, **both)
    return found | {"rows": torch.tensor([sum(counts[:first]), sum(counts[: first + local])])}


def experts_of_one_process(kind: str, activation: str, counts: list[int]) -> dict[str, Tensor]:
    experts, own = build(kind, single_process_groups(), activation), of_experts(counts, 0, EXPERTS)
    y = experts(own["tokens"], torch.tensor(counts), own["probs"])
    y.backward(own["grad"])
    found = {"output": y.detach(), "tokens": own["tokens"].grad, "probs": own["probs"].grad}
    for name, parameter in experts.named_parameters():
        found |= {f"weight {name}": parameter.detach(), f"gradient {name}": parameter.grad}
    return found  # type: ignore[return-value]


LAYOUTS = [(2, 1, 2), (1, 2, 2), (2, 2, 4), (1, 4, 4)]
"""etp, ep, ranks."""


@pytest.mark.parametrize(("etp", "ep", "ranks"), LAYOUTS, ids=lambda value: str(value))
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_over_ranks_are_those_of_one_process(
    on_ranks: Callable[..., list[Any]], kind: str, activation: str, etp: int, ep: int, ranks: int
) -> None:
    expected = experts_of_one_process(kind, activation, COUNTS)
    for found in on_ranks(experts_of_a_rank, ranks, kind, activation, etp, ep, COUNTS):
        rows = slice(*found.pop("rows").tolist())
        for name, tensor in expected.items():
            whole = tensor[rows] if name in ("output", "tokens", "probs") else tensor
            torch.testing.assert_close(found[name], whole, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
            if name.startswith("weight"):
                assert torch.equal(found[name], tensor), f"{name} is drawn by its name alone"


def test_twice_the_same_is_bit_equal(on_ranks: Callable[..., list[Any]]) -> None:
    runs = [on_ranks(experts_of_a_rank, 4, "grouped", "swiglu", 2, 2, COUNTS) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_rank_without_a_token_has_zero_gradients(on_ranks: Callable[..., list[Any]]) -> None:
    counts = [0, 0, 6, 2]  # nothing for the first rank of ep
    expected = experts_of_one_process("grouped", "swiglu", counts)
    for found in on_ranks(experts_of_a_rank, 2, "grouped", "swiglu", 1, 2, counts):
        for name in ("gradient fc1.weight", "gradient fc2.weight"):
            torch.testing.assert_close(found[name], expected[name], **EXACT)
            assert not found[name][:2].any() and found[name][2:].any()


# ---- shared experts ----

LENGTH, BATCH = 8, 2


def shared(groups: Any, *, gate: bool, sequence_parallel: bool) -> SharedExpertMLP:
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation="swiglu")
    moe = MoEConfig(num_experts=EXPERTS, shared_expert_ffn_hidden=WIDTH, shared_expert_gate=gate)
    made: dict[str, Any] = {"seed": 5, "std": 0.4, "dtype": torch.float64, "sequence_parallel": sequence_parallel}
    return SharedExpertMLP("layers.0.mlp.shared_experts", model, moe, groups, **made)


def in_stages(experts: SharedExpertMLP, x_SBH: Tensor) -> Tensor:
    """As the dispatcher calls them."""
    stage = experts.pre_forward_comm(x_SBH)
    stage = experts.linear_fc1_forward_and_act(stage)
    stage = experts.linear_fc2_forward(stage)
    return experts.get_output(experts.post_forward_comm(stage))


@contextmanager
def forward_and_backward(
    experts: SharedExpertMLP, x: Tensor, grad: Tensor, staged: bool
) -> Iterator[dict[str, Tensor]]:
    leaf = x.clone().requires_grad_()
    y = in_stages(experts, leaf) if staged else experts(leaf)
    y.backward(grad)
    yield {"output": y.detach(), "x": leaf.grad}  # type: ignore[dict-item]


def shared_on_a_rank(gate: bool, sequence_parallel: bool, staged: bool) -> tuple[dict[str, Tensor], list[str]]:
    """What one process has, and the operations in the order in which they were called."""
    groups = initialize_model_parallel(ParallelConfig(tp=2, sequence_parallel=sequence_parallel))
    experts = shared(groups, gate=gate, sequence_parallel=sequence_parallel)
    x, grad = random(LENGTH, BATCH, HIDDEN, seed=1), random(LENGTH, BATCH, HIDDEN, seed=2)
    if sequence_parallel:
        x, grad = (tensor.chunk(2)[groups.tp.rank] for tensor in (x, grad))
    with CommLedger() as ledger, forward_and_backward(experts, x, grad, staged) as found:
        operations = [record.operation for record in ledger.records]
        assert {record.layer.split(".")[3] for record in ledger.records if record.layer} == {"shared_experts"}
    if sequence_parallel:
        found = {name: all_gather(tensor, groups.tp) for name, tensor in found.items()}
    for name, parameter in experts.named_parameters():
        assert record_of(parameter).allreduce, "shared experts are reduced as dense layers are"
        grad = parameter.grad
        if record_of(parameter).sequence_parallel:
            grad = all_reduce(grad, groups.tp)  # as finalize_model_grads does
        found[f"gradient {name}"] = gather_parameter(grad, parameter, groups.tp)
    return found, operations


@pytest.mark.parametrize("staged", [False, True], ids=["at once", "in stages"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
def test_shared_experts_are_those_of_one_process(
    on_ranks: Callable[..., list[Any]], gate: bool, sequence_parallel: bool, staged: bool
) -> None:
    alone = shared(single_process_groups(), gate=gate, sequence_parallel=False)
    x, grad = random(LENGTH, BATCH, HIDDEN, seed=1), random(LENGTH, BATCH, HIDDEN, seed=2)
    with forward_and_backward(alone, x, grad, staged=False) as expected:
        expected |= {f"gradient {name}": parameter.grad for name, parameter in alone.named_parameters()}  # type: ignore[misc]
    assert sorted(alone.state_dict()) == ["fc1.weight", "fc2.weight"] + ["gate.weight"] * gate
    for found, operations in on_ranks(shared_on_a_rank, 2, gate, sequence_parallel, staged):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, **EXACT, msg=lambda m, n=name: f"{n}: {m}")
        if not sequence_parallel:
            assert operations == ["all_reduce"] * 2, "g forward, f backward"
        elif staged:
            assert operations == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
        else:
            assert sorted(operations) == ["all_gather"] * 3 + ["reduce_scatter"] * 2, "the input is gathered again"


# ---- refusals ----


def uneven(experts: int, width: int) -> str:
    groups = initialize_model_parallel(ParallelConfig(tp=2, etp=2, ep=2, sequence_parallel=True))
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation="swiglu")
    try:
        GroupedExperts("layers.0.mlp.experts", model, MoEConfig(num_experts=experts, ffn_hidden=width), groups)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_what_does_not_divide_is_refused(on_ranks: Callable[..., list[Any]]) -> None:
    for message in on_ranks(uneven, 4, 3, 4):
        assert "layers.0.mlp.experts: 3 experts cannot be divided over ep=2" in message
    for message in on_ranks(uneven, 4, 4, 5):
        assert "layers.0.mlp.experts.fc1.weight: dimension 1 of (4, 10, 8) cannot be cut over etp=2 in 2" in message
