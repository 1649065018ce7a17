"""Named random states: masks that all ranks share, masks that none shares, and fork's bookkeeping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.config import ParallelConfig, presets
from labkit.models.gpt import GPTModel
from labkit.parallel import initialize_model_parallel, random, single_process_groups
from labkit.parallel.random import DATA_PARALLEL, EXPERT_PARALLEL, MODEL_PARALLEL, RngTracker, model_parallel_seed


@pytest.fixture(autouse=True)
def keep_the_default_state():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def masks() -> list[list[bytes]]:
    groups = initialize_model_parallel(ParallelConfig(tp=2, pp=2))
    tracker = model_parallel_seed(1234, groups)

    def mask() -> Tensor:
        return F.dropout(torch.ones(256), 0.5)

    with tracker.fork(MODEL_PARALLEL):
        inside = mask()
    residual = mask()
    with tracker.fork():
        inside_again = mask()
    with tracker.fork(EXPERT_PARALLEL):
        expert = mask()
    return [x.numpy().tobytes() for x in (residual, inside, inside_again, expert)]


def test_residual_masks_are_equal_over_tp_and_masks_inside_the_region_differ(on_ranks) -> None:
    first, second, third, fourth = on_ranks(masks, 4)  # tp pairs (0, 1) and (2, 3), two stages
    assert first[0] == second[0] and third[0] == fourth[0]
    assert first[0] != third[0], "stages must not repeat each other's masks"
    assert len({rank[1] for rank in (first, second, third, fourth)}) == 4
    assert all(rank[1] != rank[2] for rank in (first, second, third, fourth)), "the forked state must advance"
    assert [first, second, third, fourth] == on_ranks(masks, 4), "the same seed gives the same masks"


def test_seeds_follow_the_table() -> None:
    tracker = model_parallel_seed(7, single_process_groups(), device="cpu")
    for name, seed in ((DATA_PARALLEL, 7), (MODEL_PARALLEL, 7 + 2718), (EXPERT_PARALLEL, 7 + 1024)):
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        with tracker.fork(name):
            assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


SP = {"sequence_parallel": True}
DRAWS: list[tuple[str, str, dict[str, Any]]] = [
    # row of the module's table, words of it, and the part of a model that they speak of
    ("torch's default state", "dropout after embeddings", {"embedding_dropout": 0.5}),
    ("torch's default state", "and before residuals", {"hidden_dropout": 0.5}),
    ("`model-parallel-rng`", "dropout in attention", {"attention_dropout": 0.5}),
    ("`model-parallel-rng`", "jitter", {"num_experts": 2, "input_jitter": 0.1, **SP}),
    ("`model-parallel-rng`", "sequence parts", {"embedding_dropout": 0.5, **SP}),
    ("`model-parallel-rng`", "sequence parts", {"hidden_dropout": 0.5, "num_experts": 2, "ep": 2, "etp": 1, **SP}),
]


def drawn_from(cases: list[dict[str, Any]]) -> list[set[str]]:
    """The states that one forward of a model with experts or dropout moves, for each case."""
    moved = []
    for changes in cases:
        sizes = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 8, "parallel.tp": 2}
        config = presets.tiny().override({**sizes, **changes})
        groups = initialize_model_parallel(config.parallel)
        rng = model_parallel_seed(1, groups)
        model = GPTModel(config.model, groups, layers=range(2), moe=config.moe, seed=1, rng=rng)
        before, default = rng.get_states(), torch.get_rng_state()
        model(torch.arange(8)[None])
        after = rng.get_states()
        now = {f"`{name}`" for name in after if not torch.equal(before[name], after[name])}
        moved.append(now | ({"torch's default state"} if not torch.equal(default, torch.get_rng_state()) else set()))
    return moved


def test_every_dropout_draws_from_the_state_that_the_table_names(on_ranks) -> None:
    found = on_ranks(drawn_from, 2, [case for *_, case in DRAWS])
    rows = [line.split("|")[1:-1] for line in (random.__doc__ or "").splitlines() if line.startswith("| ")][1:]
    said = {state.strip(): who for state, _, who in rows}
    for rank in found:
        for (state, words, case), moved in zip(DRAWS, rank, strict=True):
            assert moved == {state}, case
            assert words in said[state]
    idle = {state for state, who in said.items() if "nothing of labkit's" in who}
    assert idle == set(said) - {state for state, *_ in DRAWS}


def test_experts_of_every_rank_draw_by_the_seed_of_the_table() -> None:
    """seed + 1024 + 100 ep_rank + etp_rank, with s = seed + 100 pp_rank: 8 ranks, of which no two draw the same."""
    parallel = ParallelConfig(tp=2, sequence_parallel=True, etp=2, ep=2, pp=2)
    drawn = []
    for rank in range(8):
        groups = initialize_model_parallel(parallel, rank=rank, world_size=8)
        tracker = model_parallel_seed(7, groups, device="cpu")
        seed = 7 + 100 * groups.pp.rank + 1024 + 100 * groups.ep.rank + groups.etp.rank
        with tracker.fork(EXPERT_PARALLEL):
            drawn.append(torch.rand(3))
        assert torch.equal(drawn[-1], torch.rand(3, generator=torch.Generator().manual_seed(seed)))
        for other in (at for at in range(rank) if (at ^ rank) in (1, 2)):  # of one stage, differing in etp or in ep
            assert not torch.equal(drawn[-1], drawn[other])


@given(draws=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=12), seed=st.integers(0, 10**6))
def test_forked_and_outer_draws_never_disturb_each_other(draws: list[tuple[bool, int]], seed: int) -> None:
    tracker = RngTracker()
    torch.manual_seed(seed)
    tracker.add("inner", seed + 1)
    outer, inner = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    for forked, count in draws:
        if forked:
            with tracker.fork("inner"):
                drawn = torch.rand(count)
        else:
            drawn = torch.rand(count)
        assert torch.equal(drawn, torch.rand(count, generator=inner if forked else outer))


def test_states_can_be_saved_and_restored_and_survive_an_exception() -> None:
    tracker = RngTracker()
    tracker.add("a", 1)
    saved, before = tracker.get_states(), torch.get_rng_state()
    with pytest.raises(KeyError), tracker.fork("a"):
        first = torch.rand(4)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(4), first)


def test_repeated_names_repeated_seeds_and_unknown_states_are_refused() -> None:
    tracker = RngTracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="'a' exists already"):
        tracker.add("a", 2)
    with pytest.raises(ValueError, match="seed 1 for 'b' is used"):
        tracker.add("b", 1)
    with pytest.raises(ValueError, match="no random state 'c'; known are a"), tracker.fork("c"):
        pass
