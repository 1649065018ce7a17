"""Experts: grouped products are those of one expert after the other, in one call whatever the number of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import te_stub
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.config import ModelConfig, MoEConfig, presets
from labkit.moe.experts import Experts, GroupedExperts, SequentialExperts, StackedLinear
from labkit.moe.grouped_gemm import Segments, grouped_product, grouped_weight_gradient
from labkit.moe.weighted_activation import weighted_swiglu
from labkit.parallel import WeightGradStore, checkpoint, single_process_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.te.linear import GroupedLinear
from labkit.train import pretrain

ROUTINGS = {
    "skewed": [13, 1, 0, 2],
    "one takes all": [0, 0, 9, 0],
    "nothing": [0, 0, 0, 0],
    "equal": [4, 4, 4, 4],
    "single expert": [7],
    "single expert, nothing": [0],
}
HIDDEN, WIDTH = 16, 24
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def build(
    kind: type[Experts], experts: int, *, activation: str = "swiglu", impl: str = "local", **more: Any
) -> Experts:
    given: dict[str, Any] = {"seed": 3, "std": 0.3, "output_std": 0.2, "dtype": torch.float64} | more
    model = ModelConfig(layers=1, hidden=HIDDEN, heads=2, activation=activation)
    given["linear"] = GroupedLinear if impl == "transformer_engine" else StackedLinear
    moe = MoEConfig(num_experts=experts, ffn_hidden=WIDTH)
    return kind("layers.0.mlp.experts", model, moe, single_process_groups(), **given)


def rows(counts: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, tokens per expert and probabilities; both of the former want gradients."""
    random = torch.Generator().manual_seed(sum(counts))
    tokens = torch.randn(sum(counts), HIDDEN, generator=random, dtype=torch.float64).to(dtype)
    probs = torch.rand(sum(counts), generator=random, dtype=torch.float64).to(dtype)
    return tokens.requires_grad_(), torch.tensor(counts), probs.requires_grad_()


def direction(y: Tensor) -> Tensor:
    """A gradient that is not the same for all elements."""
    return torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)


def results(experts: Experts, counts: list[int], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Output and every gradient."""
    tokens, tokens_per_expert, probs = rows(counts, dtype)
    experts.zero_grad()
    y = experts(tokens, tokens_per_expert, probs)
    y.backward(direction(y))
    found = {"output": y.detach(), "tokens": tokens.grad, "probs": probs.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert all(tensor is not None for tensor in found.values())
    return found  # type: ignore[return-value]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **(tolerance or EXACT), msg=lambda m, n=name: f"{n}: {m}")


# ---- values ----


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "gelu_tanh"])
def test_each_row_goes_through_its_expert(activation: str) -> None:
    made = build(SequentialExperts, 4, activation=activation)
    counts = ROUTINGS["skewed"]
    tokens, tokens_per_expert, probs = rows(counts)
    y = made(tokens, tokens_per_expert, probs)
    first, second = made.fc1.weight, made.fc2.weight
    assert first.shape == (4, 2 * WIDTH if activation == "swiglu" else WIDTH, HIDDEN)
    expert_of = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for n, expert in enumerate(expert_of):
        inner = first[expert] @ tokens[n]
        if activation == "swiglu":
            inner = F.silu(inner[:WIDTH]) * inner[WIDTH:]
        else:
            inner = F.gelu(inner, approximate="tanh" if activation == "gelu_tanh" else "none")
        torch.testing.assert_close(y[n], probs[n] * (second[expert] @ inner), **EXACT)


@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_grouped_is_sequential(counts: list[int], activation: str) -> None:
    one_by_one = build(SequentialExperts, len(counts), activation=activation)
    at_once = build(GroupedExperts, len(counts), activation=activation)
    assert_same(results(at_once, counts), results(one_by_one, counts))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("counts", ROUTINGS.values(), ids=ROUTINGS)
def test_grouped_is_sequential_in_lower_precision(counts: list[int], dtype: torch.dtype, tolerance: float) -> None:
    made = [build(kind, len(counts), dtype=dtype) for kind in (GroupedExperts, SequentialExperts)]
    found, expected = (results(experts, counts, dtype) for experts in made)
    assert found["output"].dtype == dtype
    assert_same(found, expected, rtol=tolerance, atol=tolerance)


def test_a_state_dict_moves_between_the_implementations() -> None:
    at_once, one_by_one = build(GroupedExperts, 4), build(SequentialExperts, 4, seed=8)
    assert list(at_once.state_dict()) == ["fc1.weight", "fc2.weight"]
    one_by_one.load_state_dict(at_once.state_dict())
    assert_same(results(at_once, [3, 0, 4, 1]), results(one_by_one, [3, 0, 4, 1]))


def test_probabilities_of_higher_precision_leave_the_type_of_the_rows() -> None:
    made = build(GroupedExperts, 2, dtype=torch.bfloat16)
    tokens, counts, _ = rows([3, 5], torch.bfloat16)
    probs = torch.rand(8, requires_grad=True)
    y = made(tokens, counts, probs)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and probs.grad is not None and probs.grad.dtype == torch.float32


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    width=st.sampled_from([3, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_products_of_any_groups(counts: list[int], width: int, dtype: torch.dtype) -> None:
    """Any counts, and widths that `torch._grouped_mm` takes or refuses."""
    random = torch.Generator().manual_seed(width)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=random, dtype=dtype)  # noqa: E731
    a_NI, b_EIO, segments = draw(sum(counts), width), draw(len(counts), width, 2 * width), Segments(counts)
    torch.testing.assert_close(segments.rows(segments.blocks(a_NI)), a_NI, rtol=0, atol=0)
    product = grouped_product(a_NI, b_EIO, segments)
    parts = a_NI.split(counts)
    torch.testing.assert_close(product, torch.cat([a @ b for a, b in zip(parts, b_EIO, strict=True)]))
    gradient = grouped_weight_gradient(product, a_NI, segments)
    torch.testing.assert_close(
        gradient, torch.stack([y.t() @ a for y, a in zip(product.split(counts), parts, strict=True)])
    )


@pytest.mark.parametrize("rows_", [0, 1, 7])
def test_weighted_swiglu_has_the_gradients_of_its_formula(rows_: int) -> None:
    random = torch.Generator().manual_seed(rows_)
    x = torch.randn(rows_, 10, generator=random, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(rows_, generator=random, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(weighted_swiglu, (x, probs))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(weighted_swiglu(x, probs), F.silu(gate) * up * probs[:, None], **EXACT)


def test_gradients_of_weights_are_summed_in_their_own_type() -> None:
    """257 terms of silu(32) x 1 = 32 in bf16: their sum, 8224, lies between two bf16 numbers."""
    x = torch.cat([torch.full((2, 257), 32.0), torch.ones(2, 257)], dim=1).bfloat16()
    probs = torch.ones(2, requires_grad=True)
    weighted_swiglu(x, probs).backward(torch.ones(2, 257, dtype=torch.bfloat16))
    assert probs.grad is not None and probs.grad.tolist() == [8224.0, 8224.0]


# ---- how many products ----


class Gemms(TorchDispatchMode):
    """Counts the matrix products that reach torch's operators."""

    PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "matmul", "linear"})

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.PRODUCTS:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def gemms(experts: Experts, counts: list[int], dtype: torch.dtype) -> tuple[Counter[str], Counter[str]]:
    """Of forward, and of backward."""
    tokens, tokens_per_expert, probs = rows(counts, dtype)
    with Gemms() as forward:
        y = experts(tokens, tokens_per_expert, probs)
    with Gemms() as backward:
        y.backward(direction(y))
    return forward.calls, backward.calls


FORMS = {
    "grouped": (torch.float32, [3, 1, 0, 2], "_grouped_mm"),
    "batched": (torch.float32, [2, 2, 2, 2], "bmm"),
    "padded": (torch.float64, [3, 1, 0, 2], "bmm"),
}


@pytest.mark.parametrize("repeated", [1, 4, 16])
@pytest.mark.parametrize(("dtype", "counts", "operator"), FORMS.values(), ids=FORMS)
def test_one_product_a_projection_whatever_the_number_of_experts(
    dtype: torch.dtype, counts: list[int], operator: str, repeated: int
) -> None:
    experts = build(GroupedExperts, 4 * repeated, dtype=dtype)
    forward, backward = gemms(experts, counts * repeated, dtype)
    assert forward == {operator: 2}, "fc1 and fc2"
    assert backward == {operator: 4}, "of each the gradients of input and weight"


def test_one_expert_after_the_other_takes_a_product_for_each() -> None:
    forward, backward = gemms(build(SequentialExperts, 8), [2] * 8, torch.float64)
    assert (forward.total(), backward.total()) == (16, 32)


# ---- gradients in place, later, and again ----


@pytest.mark.parametrize(("dtype", "counts", "operator"), FORMS.values(), ids=FORMS)
def test_gradients_add_up_in_main_grad_and_the_first_replaces_what_is_there(
    dtype: torch.dtype, counts: list[int], operator: str
) -> None:
    expected = results(build(GroupedExperts, 4, dtype=dtype), counts, dtype)
    experts = build(GroupedExperts, 4, dtype=dtype, gradient_accumulation_fusion=True)
    for parameter in experts.parameters():
        parameter.main_grad = torch.full_like(parameter, torch.nan)  # type: ignore[attr-defined]
        record_of(parameter).has_gradient = False
    for times in (1, 2):
        tokens, tokens_per_expert, probs = rows(counts, dtype)
        y = experts(tokens, tokens_per_expert, probs)
        y.backward(direction(y))
        for name, parameter in experts.named_parameters():
            assert parameter.grad is None
            torch.testing.assert_close(parameter.main_grad, times * expected[name])  # type: ignore[attr-defined]


def test_main_grad_of_higher_precision() -> None:
    experts = build(GroupedExperts, 4, dtype=torch.bfloat16, gradient_accumulation_fusion=True)
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    expected = results(build(GroupedExperts, 4, dtype=torch.bfloat16), [3, 1, 0, 2], torch.bfloat16)
    tokens, tokens_per_expert, probs = rows([3, 1, 0, 2], torch.bfloat16)
    y = experts(tokens, tokens_per_expert, probs)
    y.backward(direction(y))
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter.main_grad, expected[name].float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
def test_weight_gradients_wait_for_their_action(fused: bool) -> None:
    counts = [5, 0, 1, 3]
    expected = results(build(GroupedExperts, 4), counts)
    experts = build(GroupedExperts, 4, gradient_accumulation_fusion=fused)
    told: list[str] = []
    for name, parameter in experts.named_parameters():
        if fused:
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            record_of(parameter).on_gradient = lambda _, n=name: told.append(n)
    tokens, tokens_per_expert, probs = rows(counts)
    y = experts(tokens, tokens_per_expert, probs)
    store = WeightGradStore()
    with store.collecting("mb 0"), Gemms() as input_gradients:
        y.backward(direction(y))
    assert input_gradients.calls.total() == 2, "only the gradients of the inputs"
    assert_same({"tokens": tokens.grad, "probs": probs.grad}, {k: expected[k] for k in ("tokens", "probs")})  # type: ignore[dict-item]
    where = "main_grad" if fused else "grad"
    for parameter in experts.parameters():
        held = getattr(parameter, where)
        assert held is None or not held.any()
    store.run("mb 0")
    assert told == (["fc2.weight", "fc1.weight"] if fused else [])
    assert_same({name: getattr(p, where) for name, p in experts.named_parameters()},
                {name: expected[name] for name, _ in experts.named_parameters()})  # fmt: skip


def test_one_expert_after_the_other_leaves_nothing_for_a_later_action() -> None:
    experts, store = build(SequentialExperts, 4), WeightGradStore()
    expected = results(build(SequentialExperts, 4), [5, 0, 1, 3])
    with store.collecting("mb 0"):
        assert_same(results(experts, [5, 0, 1, 3]), expected)
    store.run("mb 0")
    assert_same({name: p.grad for name, p in experts.named_parameters()},
                {name: expected[name] for name, _ in experts.named_parameters()})  # fmt: skip


@pytest.mark.parametrize("kind", [SequentialExperts, GroupedExperts])
def test_recomputed_experts_have_the_same_gradients(kind: type[Experts]) -> None:
    counts = [5, 0, 1, 3]
    expected = results(build(kind, 4), counts)
    experts = build(kind, 4)
    tokens, tokens_per_expert, probs = rows(counts)
    y = checkpoint(experts, tokens, tokens_per_expert, probs)
    y.backward(direction(y))
    found = {"output": y.detach(), "tokens": tokens.grad, "probs": probs.grad}
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SequentialExperts, GroupedExperts])
def test_without_a_token_everything_stays_connected(kind: type[Experts]) -> None:
    found = results(build(kind, 4), [0, 0, 0, 0])
    assert found["output"].shape == found["tokens"].shape == (0, HIDDEN)
    assert not found["fc1.weight"].any() and not found["fc2.weight"].any()


def test_twice_the_same_is_bit_equal() -> None:
    first, second = (results(build(GroupedExperts, 4), ROUTINGS["skewed"]) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- Transformer Engine ----


@pytest.fixture
def engine() -> Iterator[te_stub.Record]:
    with te_stub.installed() as record:
        yield record


def test_the_engines_grouped_linear_on_our_stacked_weights(engine: te_stub.Record) -> None:
    counts = [5, 0, 1, 3]
    theirs, ours = build(GroupedExperts, 4, impl="transformer_engine"), build(GroupedExperts, 4)
    assert list(theirs.state_dict()) == list(ours.state_dict()) == [name for name, _ in theirs.named_parameters()]
    assert_same(results(theirs, counts), results(ours, counts))
    shared = {"num_gemms": 4, "bias": False, "params_dtype": torch.float64, "tp_size": 1, "parallel_mode": None}
    sizes = {"fc1": (HIDDEN, 2 * WIDTH), "fc2": (WIDTH, HIDDEN)}
    for call, (part, (inputs, outputs)) in zip(engine.of("GroupedLinear"), sizes.items(), strict=True):
        named = {"in_features": inputs, "out_features": outputs, "name": f"layers.0.mlp.experts.{part}"}
        assert call.items() >= (shared | named).items()
    forwards = engine.of("GroupedLinear", "forward")
    assert [call["m_splits"].tolist() for call in forwards] == [counts, counts]
    theirs.load_state_dict(build(GroupedExperts, 4, seed=9).state_dict())
    assert_same(results(theirs, counts), results(build(GroupedExperts, 4, seed=9), counts))
    theirs.double().fc1.weight.data.zero_()
    assert not results(theirs, counts)["output"].any(), "the engine sees a weight that was moved and changed"


def test_the_engine_is_asked_nothing_for_no_row(engine: te_stub.Record) -> None:
    theirs, ours = build(GroupedExperts, 4, impl="transformer_engine"), build(GroupedExperts, 4)
    assert_same(results(theirs, [0, 0, 0, 0]), results(ours, [0, 0, 0, 0]))
    assert not engine.of("GroupedLinear", "forward")


def test_training_with_experts_on_the_engine_or_one_by_one_follows_training_on_ours(engine: te_stub.Record) -> None:
    small = {"model.layers": 2, "model.hidden": 32, "model.seq_length": 16, "train.global_batch_size": 4}
    config = presets.tiny_moe().override(small | {"train.steps": 3, "optim.lr": 1e-2})
    ours = pretrain(config).losses
    assert ours[-1] < ours[0]
    for change in ({"model.transformer_impl": "transformer_engine"}, {"moe.grouped_gemm": False}):
        assert pretrain(config.override(change)).losses == pytest.approx(ours, rel=1e-5)
    assert len(engine.of("GroupedLinear", "forward")) == 2 * 4 * 3, "projections, microbatches, steps"


def test_the_engines_module_keeps_no_graph(engine: te_stub.Record) -> None:
    theirs = build(GroupedExperts, 2, impl="transformer_engine")
    results(theirs, [1, 2])
    (layer,) = theirs.fc1.engine_layer
    assert [getattr(layer, name) for name in theirs.fc1.names] == [None, None]
    assert isinstance(build(SequentialExperts, 2, impl="transformer_engine").fc1, type(build(GroupedExperts, 2).fc1))


# ---- refusals ----


@pytest.mark.parametrize("kind", [SequentialExperts, GroupedExperts])
@pytest.mark.parametrize(
    ("shape", "counts", "probs", "words"),
    [
        ((8, HIDDEN), [2, 2, 2, 1], (8,), r"\[2, 2, 2, 1\] rows per expert for 8 rows"),
        ((8, HIDDEN), [3, -1, 3, 3], (8,), "none of them negative"),
        ((8, HIDDEN), [4, 4], (8,), "they must be 4 numbers"),
        ((8, HIDDEN), [2, 2, 2, 2], (8, 1), rf"rows are \[N, {HIDDEN}\] and their weights \[N\], got .* and \[8, 1\]"),
        ((8, HIDDEN + 1), [2, 2, 2, 2], (8,), rf"got \[8, {HIDDEN + 1}\]"),
    ],
    ids=["sum", "negative", "experts", "weights", "rows"],
)
def test_counts_that_are_not_those_of_the_rows_are_refused(
    kind: type[Experts], shape: tuple[int, ...], counts: list[Any], probs: tuple[int, ...], words: str
) -> None:
    experts = build(kind, 4)
    with pytest.raises(ValueError, match=rf"^layers\.0\.mlp\.experts: .*{words}"):
        experts(torch.randn(shape, dtype=torch.float64), torch.tensor(counts), torch.ones(probs, dtype=torch.float64))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation 'tanh' is unknown; choose gelu, gelu_tanh, swiglu"):
        build(GroupedExperts, 4, activation="tanh")
