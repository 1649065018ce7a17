"""Named random states on a GPU: the numbers of their seeds, outside graphs and inside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from labkit.parallel import RngTracker

pytestmark = pytest.mark.gpu


def tracker() -> RngTracker:
    made = RngTracker("cuda")
    made.add("model-parallel-rng", 7)
    made.add("expert-parallel-rng", 8)
    return made


def draw(rng: RngTracker) -> Tensor:
    """Two numbers from outside, two from each named state."""
    found = [torch.rand(2, device="cuda")]
    for name in ("model-parallel-rng", "expert-parallel-rng"):
        with rng.fork(name):
            found.append(torch.rand(2, device="cuda"))
    return torch.stack(found)


def test_a_named_state_draws_the_numbers_of_its_seed_and_the_outer_one_goes_on() -> None:
    torch.cuda.manual_seed(1)
    rng = tracker()
    found = torch.stack([draw(rng) for _ in range(3)])
    for column, seed in enumerate((1, 7, 8)):
        generator = torch.Generator("cuda").manual_seed(seed)
        expected = torch.stack([torch.rand(2, device="cuda", generator=generator) for _ in range(3)])
        assert torch.equal(found[:, column], expected)


def test_states_are_taken_and_set_back() -> None:
    rng = tracker()
    draw(rng)
    states, outer = rng.get_states(), torch.cuda.get_rng_state()
    first = draw(rng)
    rng.set_states(states)
    torch.cuda.set_rng_state(outer)
    assert torch.equal(draw(rng), first)


def test_a_graph_draws_on_from_named_states() -> None:
    eager, graphed = tracker(), tracker()
    torch.cuda.manual_seed(1)
    expected = [draw(eager) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    for generator in graphed.generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        y = draw(graphed)
    torch.cuda.manual_seed(1)
    for step in range(3):
        graph.replay()
        assert torch.equal(y, expected[step])
    with graphed.fork():
        after_graph = torch.rand(2, device="cuda")
    with eager.fork():
        assert torch.equal(torch.rand(2, device="cuda"), after_graph)  # both have drawn three times
