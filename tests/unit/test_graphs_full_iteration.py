"""`FullIterationGraph` by itself: whose memory the data is in, and what makes it start over."""

import pytest
import torch
from torch import Tensor, nn

from labkit.graphs import FullIterationGraph
from labkit.train.cuda_graphs import FullIterationGraphs

MICROBATCHES = 2


class Toy:
    """Sums of squares of a linear layer's outputs, with gradients; counts how often Python ran it."""

    def __init__(self, **options) -> None:
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(4, 3), 0
        self.graph = FullIterationGraph(
            self.iteration, num_microbatches=MICROBATCHES, impl="emulated", warmup_steps=1, **options
        )

    def iteration(self, batches) -> list[Tensor]:
        self.calls += 1
        for parameter in self.layer.parameters():
            parameter.grad = None
        losses = [self.layer(batch["x"].to(torch.float32) * batch.get("scale", 1)).square().sum() for batch in batches]
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses]


def batches(step: int, dtype=torch.float32, **more) -> list[dict]:
    return [{"x": torch.full((2, 4), step + m / 4).to(dtype), **more} for m in range(MICROBATCHES)]


def expected(*step, **more) -> list[Tensor]:
    toy = Toy()
    return toy.iteration(iter(batches(*step, **more)))


def test_the_caller_may_write_over_its_own_batches():
    """A loader often hands out the same pinned memory again and again."""
    toy, owned = Toy(), batches(0)
    for step in range(5):
        for mine, new in zip(owned, batches(step), strict=True):
            mine["x"].copy_(new["x"])
        found = toy.graph(iter(owned))
        assert torch.equal(torch.stack(found), torch.stack(expected(step)))
        for mine in owned:  # a loader ahead of its reader
            mine["x"].fill_(float("nan"))
    assert toy.calls == 2, "a warm-up step and the capture"


def test_slots_are_not_the_memory_of_any_batch():
    toy, first = Toy(), batches(1)
    for step in range(3):
        toy.graph(iter(first if step == 0 else batches(step)))
    assert [batch["x"].mean() for batch in first] == [batch["x"].mean() for batch in batches(1)], "nobody wrote there"


CHANGES = {
    "dtype": (1, torch.float64),
    "what is no tensor": (1, torch.float32, {"scale": 3}),
    "a new key": (1, torch.float32, {"scale": torch.tensor(2.0)}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_it_starts_over_where_batches_are_of_another_kind(what):
    step, dtype, *rest = CHANGES[what]
    more = rest[0] if rest else {}
    toy = Toy()
    for _ in range(3):
        toy.graph(iter(batches(step)))
    assert toy.calls == 2 and toy.graph.graph is not None
    toy.graph(iter(batches(step, dtype, **more)))
    assert toy.calls == 3 and toy.graph.graph is None, "eager again"
    for _ in range(2):
        found = toy.graph(iter(batches(step, dtype, **more)))
    assert toy.calls == 4 and torch.equal(torch.stack(found), torch.stack(expected(step, dtype, **more)))


def test_what_it_returned_stays_and_too_few_batches_are_refused():
    toy = Toy()
    toy.graph(iter(batches(0)))
    first, second = (toy.graph(iter(batches(step))) for step in (1, 2))
    assert torch.equal(torch.stack(first), torch.stack(expected(1)))
    assert torch.equal(torch.stack(second), torch.stack(expected(2)))
    with pytest.raises(ValueError, match="1 batches for the 2 microbatches of a step"):
        toy.graph(iter(batches(3)[:1]))
    with pytest.raises(ValueError, match="Transformer Engine captures layers"):
        FullIterationGraph(toy.iteration, num_microbatches=1, impl="transformer_engine")


def test_captures_are_counted_and_not_the_graphs_that_are_left():
    """Without a warm-up, a step of another shape drops one graph and makes the next: a run says what that one holds."""
    toy, counts = Toy(), []
    toy.graph.warmup_steps = 0
    for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
        toy.graph(iter(batches(1, dtype)))
        counts.append(toy.graph.num_captures)
    assert counts == [1, 1, 2, 3]
    both = FullIterationGraphs(toy.graph, Toy().graph)
    toy.graph.reset()
    assert both.num_captures == 3
