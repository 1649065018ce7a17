"""Named random states: masks that all ranks share, masks that none shares, and fork's bookkeeping."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.config import ParallelConfig
from labkit.parallel import initialize_model_parallel, single_process_groups
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
