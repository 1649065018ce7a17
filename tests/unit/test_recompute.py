"""Recomputation in one process: gradients bit-equal to those without it, random numbers replayed, nothing kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from labkit.parallel import (
    CheckpointWithoutOutput,
    ColumnParallelLinear,
    Group,
    RngTracker,
    WeightGradStore,
    checkpoint,
    once,
    will_run_again,
)

ALONE = Group("tp", (0,), 0)
WIDTH = 6


class Block(nn.Module):
    """Draws from torch's own generator and from a named state; two linear layers whose weight gradients can wait."""

    def __init__(self, rng: RngTracker, seed: int = 0) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": ALONE, "std": 0.5, "seed": seed}
        self.first = ColumnParallelLinear("first", WIDTH, 4 * WIDTH, **options)
        self.second = ColumnParallelLinear("second", 4 * WIDTH, WIDTH, **options)
        self.rng, self.calls = rng, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        inner = torch.nn.functional.dropout(self.first(x)[0], 0.3)
        with self.rng.fork("inside"):
            inner = torch.nn.functional.dropout(inner, 0.3)
        return x + self.second(inner)[0]


def seeded() -> RngTracker:
    torch.manual_seed(7)
    rng = RngTracker()
    rng.add("inside", 11)
    return rng


def trained(how: str, split: bool, blocks: int = 3, microbatches: int = 2) -> tuple[list[Tensor], list[int], Tensor]:
    """Gradients of all parameters and inputs, how often each block ran, and where the generator ends."""
    rng = seeded()
    model = [Block(rng, seed) for seed in range(blocks)]
    inputs = [torch.randn(4, 2, WIDTH).requires_grad_() for _ in range(microbatches)]
    store, losses = WeightGradStore(), []
    for x in inputs:
        y: Tensor = x
        for block in model:
            y = checkpoint(block, y, rng=rng) if how == "labkit" else block(y)
        losses.append(y.square().sum())
    for m, loss in enumerate(losses):
        if split:
            with store.collecting(m):
                loss.backward()
        else:
            loss.backward()
    for m in store.pending:
        store.run(m)
    gradients = [x.grad for x in inputs] + [p.grad for block in model for p in block.parameters()]
    assert all(g is not None for g in gradients)
    return gradients, [block.calls for block in model], torch.get_rng_state()  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "I and W"])
def test_gradients_are_those_without_recomputation_to_the_bit(split: bool) -> None:
    kept, once, end = trained("kept", split)
    again, twice, same_end = trained("labkit", split)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert (once, twice) == ([2] * 3, [4] * 3)  # every microbatch once more
    assert torch.equal(end, same_end), "the recomputation must not advance the generator"


@given(layers=st.integers(1, 4), nested=st.booleans(), seed=st.integers(0, 2**16))
def test_nesting_and_depth_change_no_bit(layers: int, nested: bool, seed: int) -> None:
    def gradients(recompute: bool) -> list[Tensor]:
        rng = seeded()
        blocks = [Block(rng, seed + i) for i in range(layers)]
        x = torch.randn(2, 1, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()

        def inner(y: Tensor) -> Tensor:
            for block in blocks:
                y = checkpoint(block, y, rng=rng) if nested and recompute else block(y)
            return y

        (checkpoint(inner, x, rng=rng) if recompute else inner(x)).sum().backward()
        return [x.grad, *(p.grad for block in blocks for p in block.parameters())]  # pyright: ignore[reportReturnType]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_the_same_as_torchs_own_checkpoint() -> None:
    """Of a function that draws from torch's generator alone, since torch knows no named states."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x @ weight, 0.5).tanh()

    def gradient(call: Any) -> Tensor:
        torch.manual_seed(3)
        weight.grad = None
        call(torch.ones(4, WIDTH, requires_grad=True)).sum().backward()
        assert weight.grad is not None
        return weight.grad

    ours = gradient(lambda x: checkpoint(function, x))
    assert torch.equal(ours, gradient(lambda x: torch_checkpoint(function, x, use_reentrant=False)))
    assert torch.equal(ours, gradient(function))


def test_only_inputs_are_kept() -> None:
    rng = seeded()
    block, x = Block(rng), torch.randn(4, 2, WIDTH, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        checkpoint(block, x, rng=rng)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_several_inputs_and_outputs_of_which_some_are_no_tensors_or_not_used() -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)

    def function(x: Tensor, factor: float, y: Tensor, how: str) -> tuple[Tensor, Tensor, Tensor]:
        assert how == "named"
        return x * factor + y, (x * y).exp(), y * 2

    first, _unused, constant = checkpoint(function, a, 2.5, b, "named")
    (first.sum() + constant.sum()).backward()
    assert torch.equal(a.grad, torch.full((3,), 2.5)) and b.grad is None  # pyright: ignore[reportArgumentType]


def test_parameters_inside_get_gradients_where_no_input_wants_one() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    checkpoint(layer, x).sum().backward()
    assert torch.equal(layer.weight.grad, x.sum(0).expand(2, 3))  # pyright: ignore[reportArgumentType]


def test_outside_grad_mode_it_is_a_plain_call() -> None:
    rng = seeded()
    block = Block(rng)
    with torch.no_grad():
        y = checkpoint(block, torch.randn(4, 2, WIDTH), rng=rng)
    assert y.grad_fn is None and block.calls == 1


def test_autocast_is_the_same_the_second_time() -> None:
    """Gradients of a float32 layer in bfloat16, though backward runs outside the block."""
    seen: list[torch.dtype] = []

    def gradient(recompute: bool) -> Tensor:
        torch.manual_seed(0)
        layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

        def function(x: Tensor) -> Tensor:
            y = layer(x)
            seen.append(y.dtype)
            return y.tanh()

        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(function, x) if recompute else function(x)
        y.float().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    assert torch.equal(gradient(False), gradient(True))
    assert seen == [torch.bfloat16] * 3


def test_autograd_grad_is_refused_in_one_sentence() -> None:
    x = torch.randn(3, requires_grad=True)
    y = checkpoint(torch.sin, x).sum()
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad and backward\(inputs=...\) forbid"):
        torch.autograd.grad(y, x)


# ---- the form that drops an output ----


def normed(how: str, split: bool) -> tuple[list[Tensor], int]:
    """Gradients of a norm followed by a linear layer, and the bytes of the norm's output after the forward."""
    torch.manual_seed(1)
    norm, x = nn.LayerNorm(WIDTH), torch.randn(4, 2, WIDTH, requires_grad=True)
    linear = ColumnParallelLinear("fc", WIDTH, 8, group=ALONE, std=0.5)
    dropped, store = CheckpointWithoutOutput(), WeightGradStore()
    y = dropped.checkpoint(norm, x) if how == "dropped" else norm(x)
    z = linear(y)[0]
    if how == "dropped":
        dropped.discard_output_and_register_recompute(z)
    size = y.untyped_storage().nbytes()
    if split:
        with store.collecting(0):
            z.square().sum().backward()
        store.run(0)
    else:
        z.square().sum().backward()
    return [p.grad for p in (x, *norm.parameters(), *linear.parameters())], size  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "I and W"])
def test_a_dropped_output_is_back_for_its_consumer(split: bool) -> None:
    kept, size = normed("kept", split)
    dropped, nothing = normed("dropped", split)
    assert (size, nothing) == (4 * 2 * WIDTH * 4, 0)
    assert all(torch.equal(a, b) for a, b in zip(kept, dropped, strict=True))


def test_a_dropped_output_is_kept_outside_grad_mode_and_a_shared_one_is_refused() -> None:
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        dropped = CheckpointWithoutOutput()
        y = dropped.checkpoint(nn.LayerNorm(WIDTH), x)
        dropped.discard_output_and_register_recompute(y * 2)
    assert y.untyped_storage().nbytes() == 4 * WIDTH * 4
    for shares in (nn.Identity(), lambda t: t[:2]):
        with pytest.raises(ValueError, match="shares its memory with another tensor"):
            CheckpointWithoutOutput().checkpoint(shares, x)


# ---- what happens once ----


def numbered(made: list[int], seen: list[tuple[int, bool]]) -> Any:
    """A part that takes the next number each time it is called, and writes down which, and whether it runs again."""

    def take() -> int:
        made.append(len(made))
        return made[-1]

    def part(x: Tensor) -> Tensor:
        seen.append((once(take), will_run_again()))
        return x * 2

    return part


@given(parts=st.lists(st.sampled_from(["plain", "recomputed", "nested"]), min_size=1, max_size=5), data=st.data())
def test_a_second_run_gets_what_its_own_first_run_made_whatever_the_order(parts, data) -> None:
    """Some parts are recomputed, some in a recomputed part, and backwards come in any order."""
    made: list[int] = []
    seen: list[tuple[int, bool]] = []
    part, x = numbered(made, seen), torch.ones(2, requires_grad=True)
    calls = {"plain": part, "recomputed": lambda x: checkpoint(part, x)}
    calls["nested"] = lambda x: checkpoint(lambda y: checkpoint(part, y), x)
    outputs = [calls[kind](x) for kind in parts]
    assert seen == [(number, kind != "plain") for number, kind in enumerate(parts)]
    for number in data.draw(st.permutations(range(len(parts)))):
        seen.clear()
        outputs[number].sum().backward()
        again = {"plain": [], "recomputed": [(number, False)], "nested": [(number, True), (number, False)]}
        assert seen == again[parts[number]]
    assert made == list(range(len(parts)))


def test_evaluation_leaves_nothing_to_repeat_and_a_second_backward_repeats_the_same() -> None:
    made: list[int] = []
    seen: list[tuple[int, bool]] = []
    part, x = numbered(made, seen), torch.ones(2, requires_grad=True)
    with torch.no_grad():
        checkpoint(part, x)
    checkpoint(part, x)  # a graph that nobody goes back through
    output = checkpoint(part, x).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert seen == [(0, False), (1, True), (2, True), (2, False), (2, False)] and made == [0, 1, 2]


def test_a_second_run_that_asks_for_more_than_the_first_is_stopped() -> None:
    calls: list[int] = []

    def part(x: Tensor) -> Tensor:
        for _ in calls:
            once(int)
        calls.append(0)
        return x * 2

    with pytest.raises(AssertionError, match="asks for what the first did not"):
        checkpoint(part, torch.ones(2, requires_grad=True)).sum().backward()
