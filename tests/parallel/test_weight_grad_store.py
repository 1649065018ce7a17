"""Split backward: input gradients (I), then the weight gradients that were put off (W), against one whole backward (B).

Both do the same arithmetic in the same order, so gradients are compared bit by bit, for every kind of layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.config import ModelConfig, ParallelConfig
from labkit.models import GPTModel
from labkit.parallel import (
    ColumnParallelLinear,
    CommLedger,
    Group,
    NaiveDataParallel,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightGradStore,
    initialize_model_parallel,
    linear_cross_entropy,
    parallel_lm_logits,
    single_process_groups,
)

S, B, H, V = 4, 2, 6, 20
ALONE = Group("tp", (0,), 0)
MICROBATCHES = 3


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ids(seed: int) -> Tensor:
    return torch.randint(0, V, (S, B), generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """A module, and the scalar that it makes of microbatch m."""

    module: nn.Module
    loss: Callable[[int], Tensor]
    inputs: list[Tensor]
    """Leaves that the losses start from; their gradients are what I is for."""


def linear(kind: str, group: Group, fusion: bool) -> Case:
    """One linear layer or an MLP; `kind` holds its options."""
    options: dict[str, Any] = {"group": group, "gradient_accumulation_fusion": fusion, "std": 0.5}
    options["sequence_parallel"] = "sequence" in kind
    options |= {"skip_bias_add": True} if "skip" in kind else {}
    if kind.startswith("column"):
        module: nn.Module = ColumnParallelLinear("fc", H, 8, gather_output="gather" in kind, **options)
    elif kind.startswith("row"):
        module = RowParallelLinear(
            "fc", H, 8, input_is_parallel="whole" not in kind, bias="plain" not in kind, **options
        )
    else:
        module = ParallelMLP("mlp", H, 8, activation="swiglu", **options)
    parallel_input = kind.startswith("row") and "whole" not in kind
    shape = [S, B, H // group.size if parallel_input else H]
    if "sequence" in kind and not kind.startswith("row"):
        shape[0] //= group.size
    inputs = [random(*shape, seed=m + 17 * group.rank).requires_grad_() for m in range(MICROBATCHES)]

    def loss(m: int) -> Tensor:
        returned = module(inputs[m])
        y, bias = returned if isinstance(returned, tuple) else (returned, None)
        return (y if bias is None else y + bias).square().sum()

    return Case(module, loss, inputs)


class Ends(nn.Module):
    """Embedding and output layer of one weight or two, with the loss fused to it or after it."""

    def __init__(self, kind: str, group: Group, fusion: bool) -> None:
        super().__init__()
        self.sequence_parallel = "sequence" in kind
        table: dict[str, Any] = {"group": group, "divisible_by": 1, "std": 0.5}
        self.embedding = VocabParallelEmbedding("word", V, H, reduce_scatter_embeddings=self.sequence_parallel, **table)
        self.output = None if "tied" in kind else VocabParallelEmbedding("out", V, H, group=group, divisible_by=1)
        self.kind, self.group, self.fusion = kind, group, fusion

    def forward(self, m: int) -> Tensor:
        x = self.embedding(ids(m)).tanh()
        weight = (self.output or self.embedding).weight
        if "logits" in self.kind:
            logits = parallel_lm_logits(x, weight, self.group, sequence_parallel=self.sequence_parallel)
            return logits.square().sum()
        options: dict[str, Any] = {"vocab_size": V, "gradient_accumulation_fusion": self.fusion}
        options["sequence_parallel"] = self.sequence_parallel
        return linear_cross_entropy(x, weight, ids(m + 50), self.group, **options).sum()


def ends(kind: str, group: Group, fusion: bool) -> Case:
    module = Ends(kind, group, fusion)
    return Case(module, module, [])


def gpt(kind: str, group: Group, fusion: bool) -> Case:
    """A whole model: every parameter a reader's model has, norms and positions among them."""
    llama = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "untie_embeddings_and_output_weights": True}
    config = ModelConfig(
        layers=2, hidden=8, heads=2, vocab_size=V, make_vocab_size_divisible_by=1, seq_length=S,
        **(llama if "llama" in kind else {}),
    )  # fmt: skip
    parallel = ParallelConfig(tp=group.size, sequence_parallel="sequence" in kind)
    groups = initialize_model_parallel(parallel) if group.size > 1 else single_process_groups()
    module = GPTModel(config, groups, layers=range(2), seed=3, gradient_accumulation_fusion=fusion)
    return Case(module, lambda m: module(ids(m).t(), labels_BS=ids(m + 50).t()).mean(), [])


MAKERS: dict[str, Callable[[str, Group, bool], Case]] = {
    "column": linear,
    "column gather": linear,
    "column skip": linear,
    "column sequence": linear,
    "row": linear,
    "row plain": linear,
    "row whole": linear,
    "row sequence": linear,
    "mlp": linear,
    "mlp sequence": linear,
    "fused loss": ends,
    "logits": ends,
    "tied fused loss": ends,
    "tied logits": ends,
    "fused loss sequence": ends,
    "tied fused loss sequence": ends,
    "logits sequence": ends,
    "gpt": gpt,
    "gpt llama": gpt,
    "gpt sequence": gpt,
}


def make(kind: str, group: Group, fusion: bool, wrapped: bool) -> Case:
    case = MAKERS[kind](kind, group, fusion)
    if wrapped:
        NaiveDataParallel(case.module, ALONE)
    return case


def deferred_parameters(module: nn.Module) -> set[str]:
    """What must wait for W: all but norms, the position table, and a bias that the layer handed on."""
    names = {name for name, _ in module.named_parameters() if "norm" not in name and "position" not in name}
    return names - {"bias"} if getattr(module, "skip_bias_add", False) else names


def gradients(module: nn.Module, wrapped: bool) -> dict[str, Tensor | None]:
    return {name: p.main_grad if wrapped else p.grad for name, p in module.named_parameters()}


def is_untouched(gradient: Tensor | None) -> bool:
    return gradient is None or not gradient.any()


def split_equals_whole(kind: str, fusion: bool, wrapped: bool, group: Group | None = None) -> None:
    if group is None:
        size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        group = Group("tp", tuple(range(size)), rank, torch.distributed.group.WORLD)
    whole, split = make(kind, group, fusion, wrapped), make(kind, group, fusion, wrapped)
    for m in range(MICROBATCHES):
        whole.loss(m).backward()

    store = WeightGradStore()
    for m in range(2):
        with store.collecting((0, m)):
            split.loss(m).backward()
    assert store.pending == ((0, 0), (0, 1)) and len(store) == 2
    late = deferred_parameters(split.module)
    for name, gradient in gradients(split.module, wrapped).items():
        assert is_untouched(gradient) == (name in late), f"{name} after I"
    store.run((0, 0))
    with store.collecting((0, 2)):
        split.loss(2).backward()
    store.run((0, 1))
    store.run((0, 2))
    assert len(store) == 0 and store.pending == ()

    for mine, reference in zip(split.inputs, whole.inputs, strict=True):
        assert torch.equal(mine.grad, reference.grad), "the input gradient of I"
    expected = gradients(whole.module, wrapped)
    for name, gradient in gradients(split.module, wrapped).items():
        assert gradient is not None and not is_untouched(gradient), name
        assert torch.equal(gradient, expected[name]), name
        assert not wrapped or split.module.get_parameter(name).grad is None, f"{name}: its hook did not run"


@pytest.mark.parametrize(("fusion", "wrapped"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_i_and_w_equal_b_bit_by_bit(kind: str, fusion: bool, wrapped: bool) -> None:
    split_equals_whole(kind, fusion, wrapped, ALONE)


def every_kind(fusion: bool, wrapped: bool) -> None:
    for kind in MAKERS:
        split_equals_whole(kind, fusion, wrapped)


@pytest.mark.parametrize(("fusion", "wrapped"), [(False, False), (False, True), (True, True)])
def test_i_and_w_equal_b_bit_by_bit_on_two_ranks(on_ranks, fusion: bool, wrapped: bool) -> None:
    on_ranks(every_kind, 2, fusion, wrapped)


# ---- what W costs and frees ----


class Gemms(TorchDispatchMode):
    """Multiply-adds of the matrix products that run inside, and how many products there were."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.work = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            a, b = (args[0], args[1]) if name == "mm" else (args[1], args[2])
            self.calls += 1
            self.work += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["column", "row", "mlp", "fused loss", "logits"])
@pytest.mark.parametrize("fusion", [False, True])
def test_w_is_half_of_the_matrix_products_of_a_backward(kind: str, fusion: bool) -> None:
    case, store = make(kind, ALONE, fusion, wrapped=fusion), WeightGradStore()
    loss = case.loss(0)
    with Gemms() as whole:
        loss.backward(retain_graph=True)
    with Gemms() as first, store.collecting(0):
        loss.backward()
    with Gemms() as second:
        store.run(0)
    assert whole.calls >= 2, "the mode sees the products"
    assert second.calls == first.calls == whole.calls / 2
    assert second.work == first.work == whole.work / 2


@contextmanager
def storages(found: dict[int, tuple[StorageWeakRef, int]], keep: set[int]) -> Iterator[None]:
    """Note every storage that the forwards inside save for backward, `keep` (weights) left out."""

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in keep:
            found[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@pytest.mark.parametrize("kind", ["gpt", "gpt llama", "tied fused loss"])
def test_activations_die_with_w(kind: str) -> None:
    case, store = make(kind, ALONE, fusion=False, wrapped=True), WeightGradStore()
    found: dict[int, tuple[StorageWeakRef, int]] = {}
    kept = [*case.module.parameters(), *case.module.buffers()]
    with storages(found, {tensor.untyped_storage().data_ptr() for tensor in kept}):
        loss = case.loss(0)

    def alive() -> int:
        return sum(size for reference, size in found.values() if not reference.expired())

    before = alive()
    with store.collecting(0):
        loss.backward()
    del loss
    between = alive()
    store.run(0)
    assert before >= between > 0, "W needs the inputs of the linear layers"
    assert "gpt" not in kind or between < 0.8 * before, "what only I needed (attention, activations) goes with I"
    assert alive() == 0


# ---- whose communication it is ----


def booked(kind: str) -> tuple[Counter[Any], Counter[Any], Counter[Any]]:
    """Collectives of a whole backward, of I and of W."""
    group = Group("tp", (0, 1), torch.distributed.get_rank(), torch.distributed.group.WORLD)
    store, counts = WeightGradStore(), []
    for split in (False, True):
        case = make(kind, group, fusion=True, wrapped=True)
        loss = case.loss(0)
        with CommLedger() as ledger:
            if split:
                with store.collecting(0):
                    loss.backward()
            else:
                loss.backward()
        counts.append(Counter((r.operation, r.layer, r.phase, r.bytes) for r in ledger.records))
    with CommLedger() as ledger:
        store.run(0)
    counts.append(Counter((r.operation, r.layer, r.phase, r.bytes) for r in ledger.records))
    return counts[0], counts[1], counts[2]


@pytest.mark.parametrize("kind", ["mlp", "mlp sequence", "row sequence", "tied fused loss", "gpt"])
def test_splitting_adds_no_communication_and_keeps_its_layer_and_phase(on_ranks, kind: str) -> None:
    for whole, first, second in on_ranks(booked, 2, kind):
        assert first + second == whole
        assert {phase for _, _, phase, _ in whole} == {"backward"}
        gathered = {("all_gather", "mlp.fc1", "backward", S // 2 * B * H * 4): 1} if kind == "mlp sequence" else {}
        assert second == gathered, "W communicates only to gather the input that was not kept"


# ---- what goes wrong ----


def test_w_before_i_and_twice_are_refused() -> None:
    case, store = make("mlp", ALONE, fusion=False, wrapped=False), WeightGradStore()
    with pytest.raises(ValueError, match=r"\(W\) of \(1, 0\) runs once, after its input gradient \(I\).*W: none"):
        store.run((1, 0))
    for m in range(2):
        with store.collecting((1, m)):
            case.loss(m).backward()
    store.run((1, 0))
    with pytest.raises(ValueError, match=r"\(W\) of \(1, 0\) runs once.*waiting for W: \(1, 1\)"):
        store.run((1, 0))
    already = r"the input gradient of \(1, 1\) was computed already"
    with pytest.raises(ValueError, match=already), store.collecting((1, 1)):
        pass


def test_a_failed_backward_leaves_nothing_and_the_next_is_whole_again() -> None:
    case, store = make("mlp", ALONE, fusion=False, wrapped=False), WeightGradStore()
    with pytest.raises(ZeroDivisionError), store.collecting(0):
        case.loss(0).backward()
        raise ZeroDivisionError
    assert len(store) == 0
    case.loss(0).backward()
    assert all(p.grad is not None for p in case.module.parameters())
    with pytest.raises(ValueError, match="inside that of another"), store.collecting(0), store.collecting(1):
        pass
    assert len(store) == 0


def test_a_weight_that_is_computed_gets_its_gradient_through_the_graph_in_i() -> None:
    """Put off, it would never reach what the weight was computed from."""
    source, store = random(8, H, seed=1).requires_grad_(), WeightGradStore()
    with store.collecting(0):
        parallel_lm_logits(random(S, B, H, seed=2), source * 2, ALONE).sum().backward()
    assert source.grad is not None and source.grad.any()
    store.run(0)


def test_frozen_weights_have_nothing_to_put_off() -> None:
    case, store = make("mlp", ALONE, fusion=False, wrapped=False), WeightGradStore()
    for parameter in case.module.parameters():
        parameter.requires_grad_(False)
    with store.collecting(0), Gemms() as first:
        case.loss(0).backward()
    with Gemms() as second:
        store.run(0)
    assert case.inputs[0].grad is not None and first.calls > 0 and second.calls == 0
