"""Embedding and cross-entropy cut along the vocabulary, against torch's own on the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import whole_world
from torch import Tensor

from labkit.parallel import CommLedger, Group, TokenIdError, all_gather, check_token_ids
from labkit.parallel.parameters.weights import gather_parameter
from labkit.parallel.vocab import cross_entropy as ce
from labkit.parallel.vocab import vocab_parallel as v

EXACT = {"rtol": 1e-12, "atol": 1e-13}
ALONE = Group("tp", (0,), 0)


def some_ids(vocab_size: int, seed: int) -> Tensor:
    ids = torch.randint(0, vocab_size, (5, 3), generator=torch.Generator().manual_seed(seed))
    ids[0, 0], ids[1, 1] = 0, vocab_size - 1  # both edges
    return ids


def fill_padding(weight_VH: Tensor, vocab_size: int, group: Group) -> Tensor:
    """Make this rank's padding rows large, so that their logits exceed all real ones, and return a view of them."""
    real = min(max(vocab_size - group.rank * len(weight_VH), 0), len(weight_VH))
    return weight_VH.data[real:].fill_(1e4)


def reference_loss(hidden: Tensor, table: Tensor, labels: Tensor, alpha: float) -> Tensor:
    vocab_size = table.shape[0]
    torch_smoothing = alpha * vocab_size / (vocab_size - 1)
    logits = (hidden @ table.t()).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=torch_smoothing).view(
        labels.shape
    )


def against_torch(vocab_size: int, divisible_by: int, alpha: float, fused: bool, accumulate: bool) -> None:
    group = whole_world()
    options: dict[str, Any] = {"group": group, "divisible_by": divisible_by, "std": 0.5, "dtype": torch.float64}
    embedding = v.VocabParallelEmbedding("embedding.word", vocab_size, 12, **options)
    table = gather_parameter(embedding.weight, embedding.weight, group).clone().requires_grad_()
    assert table.shape == (vocab_size, 12)
    own_padding = len(fill_padding(embedding.weight, vocab_size, group))
    tokens, labels = some_ids(vocab_size, 1), some_ids(vocab_size, 2)
    per_token = torch.rand(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    expected_hidden = F.embedding(tokens, table)
    expected = reference_loss(expected_hidden.tanh(), table, labels, alpha)
    (expected * per_token).sum().backward()

    hidden = embedding(tokens)
    torch.testing.assert_close(hidden.detach(), expected_hidden.detach(), rtol=0, atol=0)
    if accumulate:
        embedding.weight.main_grad = torch.zeros_like(embedding.weight)
    padded = embedding.weight.shape[0] * group.size
    common: dict[str, Any] = {"vocab_size": vocab_size, "padded_vocab_size": padded, "label_smoothing": alpha}
    if fused:
        loss = ce.linear_cross_entropy(
            hidden.tanh(), embedding.weight, labels, group, gradient_accumulation_fusion=accumulate, **common
        )
    else:
        logits = v.parallel_lm_logits(hidden.tanh(), embedding.weight, group)
        loss = ce.vocab_parallel_cross_entropy(logits, labels, group, **common)
    torch.testing.assert_close(loss.detach(), expected.detach(), **EXACT)
    (loss * per_token).sum().backward()
    grad = embedding.weight.grad
    if accumulate:
        grad = grad + embedding.weight.main_grad
    torch.testing.assert_close(gather_parameter(grad, embedding.weight, group), table.grad, **EXACT)
    assert own_padding <= padded - vocab_size
    if own_padding:
        assert not grad[-own_padding:].any(), "padding rows take no gradient"


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "alpha"),
    # 33 over 4 x 16: the last rank owns padding alone; 50 over 4 x 64: all but the first do.
    [(64, 16, 0.0), (50, 8, 0.0), (50, 8, 0.2), (33, 16, 0.1), (50, 64, 0.1)],
)
@pytest.mark.parametrize(("fused", "accumulate"), [(False, False), (True, False), (True, True)])
def test_embedding_and_loss_equal_those_of_one_process(
    on_ranks, world_size: int, vocab_size: int, divisible_by: int, alpha: float, fused: bool, accumulate: bool
) -> None:
    on_ranks(against_torch, world_size, vocab_size, divisible_by, alpha, fused, accumulate)


def in_chunks(half: bool, sequence_parallel: bool, divisible_by: int, elements: int) -> None:
    group = whole_world()
    usual, ce.CHUNKS["cpu"] = ce.CHUNKS["cpu"], ce.ChunkSizes(elements, elements, elements)
    dtype = torch.bfloat16 if half else torch.float64
    weight = v.make_vocab_parameter("w", 50, 12, group=group, divisible_by=divisible_by, std=0.5, dtype=dtype)
    fill_padding(weight, 50, group)
    hidden = torch.randn(300, 2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    labels = torch.randint(0, 50, (300, 2), generator=torch.Generator().manual_seed(1))
    with CommLedger() as ledger:
        part = hidden.chunk(2)[group.rank] if sequence_parallel else hidden
        a, b = part.clone().requires_grad_(), hidden.double().requires_grad_()
        options = {"vocab_size": 50, "padded_vocab_size": 2 * len(weight), "sequence_parallel": sequence_parallel}
        loss = ce.linear_cross_entropy(a, weight, labels, group, **options)
        loss.sum().backward()
    reduction = "reduce_scatter" if sequence_parallel else "all_reduce"
    # 600 tokens in chunks of 256, of 300, or in one.
    chunks = {1: 3, ce.CHUNKS["cuda"].gradient: 1}.get(elements, 2)
    assert ledger.count(operation=reduction, phase="backward") == chunks
    table = gather_parameter(weight, weight, group).double().requires_grad_()
    reference_loss(b, table, labels, 0.0).sum().backward()
    close = {"rtol": 2e-2, "atol": 2e-2} if half else EXACT
    torch.testing.assert_close(loss.double(), reference_loss(b, table, labels, 0.0), **close)
    scale = float(table.grad.abs().max()) if half else 1.0
    expected = b.grad.chunk(2)[group.rank] if sequence_parallel else b.grad
    torch.testing.assert_close(a.grad.double(), expected, rtol=close["rtol"], atol=close["atol"])
    gathered = gather_parameter(weight.grad, weight, group).double()
    torch.testing.assert_close(gathered, table.grad, rtol=close["rtol"], atol=close["atol"] * scale)
    with torch.no_grad():
        again = ce.linear_cross_entropy(part, weight, labels, group, **options)
    assert torch.equal(again, loss), "the same bits whether gradients are wanted or not"
    assert loss.dtype == (torch.float32 if half else torch.float64)
    ce.CHUNKS["cpu"] = usual


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("divisible_by", "elements"),
    [(8, 1), (8, 300 * 32), (64, 300 * 64), (8, ce.CHUNKS["cuda"].gradient)],
    ids=["smallest chunks", "a rank with less real columns", "a rank with none", "a GPU's"],
)
def test_chunks_change_no_result(
    on_ranks, half: bool, sequence_parallel: bool, divisible_by: int, elements: int
) -> None:
    on_ranks(in_chunks, 2, half, sequence_parallel, divisible_by, elements)


def bytes_of_the_loss() -> list[tuple[str, str, int]]:
    group = whole_world()
    weight = v.make_vocab_parameter("w", 64, 12, group=group, divisible_by=16)
    hidden, labels = torch.ones(5, 3, 12, requires_grad=True), some_ids(64, 1)
    with CommLedger() as ledger:
        ce.linear_cross_entropy(hidden, weight, labels, group, vocab_size=64).sum().backward()
    return [(r.operation, str(r.phase), r.bytes) for r in ledger.records]


def test_the_fused_loss_sends_three_numbers_a_token_instead_of_the_logits(on_ranks) -> None:
    tokens, hidden = 15, 12
    for calls in on_ranks(bytes_of_the_loss, 2):
        assert calls == [
            ("all_reduce", "forward", 4 * tokens),  # MAX
            ("all_reduce", "forward", 4 * tokens * 2),  # SUM of the label's logits and of the exponentials
            ("all_reduce", "backward", 4 * tokens * hidden),  # f
        ]


def same_bits() -> None:
    group = whole_world()

    def once() -> list[Tensor]:
        embedding = v.VocabParallelEmbedding("e", 50, 12, group=group, divisible_by=8)
        loss = ce.linear_cross_entropy(
            embedding(some_ids(50, 1)), embedding.weight, some_ids(50, 2), group, vocab_size=50
        )
        loss.sum().backward()
        return [loss.detach(), embedding.weight.grad]

    (loss, grad), (loss_again, grad_again) = once(), once()
    assert torch.equal(loss, loss_again) and torch.equal(grad, grad_again)
    assert all(torch.equal(other, loss) for other in all_gather(loss[None], group))


def test_loss_and_gradient_repeat_bit_by_bit_and_agree_over_ranks(on_ranks) -> None:
    on_ranks(same_bits, 4)


def error_for(bad: int, where: str) -> str:
    group = whole_world()
    embedding = v.VocabParallelEmbedding("e", 50, 12, group=group, divisible_by=16)
    ids = some_ids(50, 1)
    ids[2, 1] = bad
    try:
        if where == "embedding":
            embedding(ids)
        elif where == "loss":
            logits = torch.zeros(5, 3, embedding.weight.shape[0])
            ce.vocab_parallel_cross_entropy(logits, ids, group, vocab_size=50)
        else:
            ce.linear_cross_entropy(torch.zeros(5, 3, 12), embedding.weight, ids, group, vocab_size=50)
    except TokenIdError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("bad", [-1, 50, 63, 2**31 - 1])  # 50 and 63 are rows of the table, but padding
@pytest.mark.parametrize(("where", "what"), [("embedding", "token"), ("loss", "label"), ("fused", "label")])
def test_ids_out_of_range_are_the_same_named_error_at_every_tp(on_ranks, bad: int, where: str, what: str) -> None:
    messages = {message for world_size in (1, 2) for message in on_ranks(error_for, world_size, bad, where)}
    expected = f"{what} id {bad} at position (2, 1) of (5, 3) is outside the vocabulary 0..49; "
    assert messages == {expected + "check that the tokenizer and the model have the same vocabulary"}


def test_int32_ids_are_checked_too() -> None:
    check_token_ids(torch.tensor([0, 49], dtype=torch.int32), 50)
    check_token_ids(torch.empty(0, dtype=torch.int64), 50)
    with pytest.raises(TokenIdError, match=r"token id 2147483647 at position \(1,\)"):
        check_token_ids(torch.tensor([0, 2**31 - 1], dtype=torch.int32), 50)


@pytest.mark.parametrize(
    ("width", "options", "message"),
    [
        (24, {}, "24 columns on each of 2 ranks are fewer than the vocabulary's 50"),
        (64, {}, "this loss takes each rank's own columns, not gathered logits"),
        (64, {}, "say so: padded_vocab_size=128"),
        (64, {"padded_vocab_size": 64}, "64 columns on each of 2 ranks are not the padded vocabulary's 64"),
        (32, {"label_smoothing": 1.0}, "label_smoothing must be in [0, 1), got 1.0"),
    ],
)
def test_logits_that_are_no_shard_are_refused(width: int, options: dict[str, Any], message: str) -> None:
    pair = Group("tp", (0, 1), 0)
    with pytest.raises(ValueError) as refusal:
        ce.vocab_parallel_cross_entropy(torch.zeros(5, 3, width), some_ids(50, 1), pair, vocab_size=50, **options)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"), [(50257, 1, 50304), (50257, 2, 50432), (50257, 8, 51200), (30522, 4, 30720)]
)
def test_padded_sizes_are_those_of_megatron(vocab_size: int, tp: int, padded: int) -> None:
    assert v.padded_vocab_size(vocab_size, 128, tp) == padded


@given(vocab_size=st.integers(1, 10**6), divisible_by=st.integers(1, 512), tp=st.integers(1, 64))
def test_padding_is_the_least_that_divides(vocab_size: int, divisible_by: int, tp: int) -> None:
    padded = v.padded_vocab_size(vocab_size, divisible_by, tp)
    assert padded % (divisible_by * tp) == 0
    assert 0 <= padded - vocab_size < divisible_by * tp


@settings(max_examples=30)
@given(
    vocab_size=st.integers(2, 40),
    padding=st.integers(0, 9),
    held=st.sampled_from([0.0, 1e308, float("inf"), float("nan")]),
    alpha=st.sampled_from([0.0, 0.1, 0.5]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    shift=st.sampled_from([0.0, -1e4, 1e4]),
    seed=st.integers(0, 10**6),
)
def test_large_small_and_shifted_logits_give_torchs_loss(
    vocab_size: int, padding: int, held: float, alpha: float, scale: float, shift: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 1, vocab_size + padding, generator=generator, dtype=torch.float64) * scale + shift
    logits[..., vocab_size:] = held
    logits.requires_grad_()
    labels = torch.randint(0, vocab_size, (7, 1), generator=generator)
    loss = ce.vocab_parallel_cross_entropy(logits, labels, ALONE, vocab_size=vocab_size, label_smoothing=alpha)
    expected = F.cross_entropy(
        logits[:, 0, :vocab_size],
        labels[:, 0],
        reduction="none",
        label_smoothing=alpha * vocab_size / (vocab_size - 1),
    )
    torch.testing.assert_close(loss[:, 0], expected, rtol=1e-10, atol=1e-10)
    of_loss, of_expected = (torch.autograd.grad(found.sum(), logits)[0] for found in (loss, expected))
    torch.testing.assert_close(of_loss, of_expected, rtol=1e-10, atol=1e-10)
    assert not of_loss[..., vocab_size:].any()
