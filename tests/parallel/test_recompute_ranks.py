"""Recomputation over ranks: same losses and weights to the bit, the bytes of the closed form, what is sent again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.config import ModelConfig, ParallelConfig, RunConfig, presets
from labkit.models import GPTModel
from labkit.models.saved_tensors import SavedTensors
from labkit.parallel import CommLedger, checkpoint, initialize_model_parallel
from labkit.plan.activations import (
    Share,
    end_activation_bytes,
    layer_activation_bytes,
    layer_input_bytes,
    layers_activation_bytes,
)
from labkit.schedules import PipelineRuntime, build_schedule
from labkit.schedules.simulator import kept_whole
from labkit.train import pretrain

GPT2 = ModelConfig(layers=2, hidden=64, heads=4, vocab_size=301, make_vocab_size_divisible_by=32, seq_length=32)
LLAMA = replace(
    GPT2, position="rope", norm="rmsnorm", activation="swiglu", bias=False, untie_embeddings_and_output_weights=True
)
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")}
BATCH = 3


def ids(config: ModelConfig, seed: int = 5) -> Tensor:
    return torch.randint(0, 301, (BATCH, config.seq_length), generator=torch.Generator().manual_seed(seed))


# ---- saved bytes ----


def saved_on_a_rank(config: ModelConfig, parallel: dict[str, Any]) -> list[tuple[int, int]]:
    """(measured, closed form) of the layers, and of embedding with loss."""
    groups = initialize_model_parallel(ParallelConfig(**parallel))
    sequence_parallel = parallel.get("sequence_parallel", False)
    on = Share(samples=BATCH, tp=groups.tp.size, sequence_parallel=sequence_parallel)
    found = []
    for layers in (0, 2):
        model = GPTModel(config, groups, layers=range(layers), seed=7)
        with SavedTensors(model) as saved:
            loss = model(ids(config), labels_BS=ids(config))
        found.append(saved.bytes)
        del loss
    ends, whole = found
    expected = end_activation_bytes(config, on)
    return [(whole - ends, layers_activation_bytes(config, on, 2)), (ends, expected)]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("config", [GPT2, LLAMA, replace(GPT2, kv_heads=1)], ids=["gpt2", "llama", "one kv head"])
def test_saved_bytes_of_a_rank_to_one_percent(config: ModelConfig, sequence_parallel: bool, on_ranks: Any) -> None:
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    dropped = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "embedding_dropout": 0.1}
    for choice in ({}, dropped | {"attention_backend": "unfused"}, SELECTIVE | dropped, FULL):
        for pairs in on_ranks(saved_on_a_rank, 2, replace(config, **choice), layout):
            for measured, expected in pairs:
                assert measured == pytest.approx(expected, rel=0.01), choice


def layer_under_context_parallelism(config: ModelConfig, layout: dict[str, Any]) -> tuple[int, int]:
    """(measured, closed form) of one layer."""
    groups = initialize_model_parallel(ParallelConfig(**layout))
    model = GPTModel(config, groups, layers=range(1), pre_process=False, post_process=False, seed=7)
    length = config.seq_length // groups.cp.size
    model.set_input_tensor(torch.randn(length, BATCH, config.hidden, requires_grad=True) * 1)
    with SavedTensors(model) as saved:
        _alive = model(None)
        return saved.bytes, layer_activation_bytes(config, Share(samples=BATCH, cp=groups.cp.size))


@pytest.mark.parametrize("how", ["p2p", "all_gather"])
def test_context_parallelism_keeps_its_part_of_everything(how: str, on_ranks: Any) -> None:
    """Neither the keys and values of others nor the output twice."""
    for config in (GPT2, replace(GPT2, kv_heads=2, position="rope"), replace(GPT2, attention_backend="unfused")):
        layout = {"cp": 2, "cp_comm_type": how}
        for measured, expected in on_ranks(layer_under_context_parallelism, 2, config, layout):
            assert measured == pytest.approx(expected, rel=0.01)


def test_sequence_parallelism_leaves_nothing_whole(on_ranks: Any) -> None:
    """All of a layer over t: the paper's point, measured."""
    one = layer_activation_bytes(GPT2, Share(samples=BATCH))
    for pairs in on_ranks(saved_on_a_rank, 4, GPT2, {"tp": 4, "sequence_parallel": True}):
        assert pairs[0][0] == pytest.approx(2 * one / 4, rel=0.01)


# ---- bit-equal training ----


def trained(config: RunConfig) -> tuple[list[float], list[float], Tensor]:
    """Losses, gradient norms and all weights of this rank after two steps."""
    seen: list[Any] = []

    class Watch:
        def on_model(self, groups: Any, chunks: Any, schedule: Any) -> None:
            seen.extend(chunks)

        def on_gradients(self, step: int, chunks: Any) -> None: ...

        def on_update(self, step: int, chunks: Any) -> None: ...

    result = pretrain(config, observer=Watch())
    weights = torch.cat([p.detach().flatten() for chunk in seen for p in chunk.parameters()])
    return result.losses, [line["grad_norm"] for line in result.metrics], weights


CHOICES: dict[str, dict[str, Any]] = {
    "full": FULL,
    "uniform 3": FULL | {"recompute_num_layers": 3},
    "block": FULL | {"recompute_method": "block"},
    "selective": SELECTIVE,
    "all parts": SELECTIVE | {"recompute_modules": ("core_attn", "mlp", "layernorm")},
    "some in flight": FULL | {"num_microbatches_with_partial_activation_checkpoints": 1},
    "some in flight, selective": SELECTIVE | {"num_microbatches_with_partial_activation_checkpoints": 1},
}


def tiny(**changes: Any) -> RunConfig:
    base = {
        "model.layers": 4, "model.seq_length": 16, "model.hidden": 32, "model.heads": 4, "train.steps": 2,
        "train.eval_steps": 0, "train.global_batch_size": 8, "train.record_events": False,
        "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1, "model.embedding_dropout": 0.1,
    }  # fmt: skip
    return presets.tiny().override(base | changes)


def same_bits(world_size: int, choices: dict[str, dict[str, Any]], layout: dict[str, Any], on_ranks: Any) -> None:
    kept = on_ranks(trained, world_size, tiny(**layout))
    for name, choice in choices.items():
        changed = tiny(**layout, **{f"model.{field}": value for field, value in choice.items()})
        for (losses, norms, weights), again in zip(kept, on_ranks(trained, world_size, changed), strict=True):
            assert (losses, norms) == again[:2], name
            assert torch.equal(weights, again[2]), name


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sp": (2, {"tp": 2, "sequence_parallel": True, "train.global_batch_size": 4}),
    "1f1b": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "vpp": 2}),
    "zero bubble": (2, {"pp": 2, "schedule.name": "zero_bubble_h1"}),
    "zbv": (2, {"pp": 2, "schedule.name": "zbv"}),
    "tp": (2, {"tp": 2}),
    "dp": (2, {}),
    "zero": (2, {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True}),
    "cp": (2, {"cp": 2, "model.attention_dropout": 0.0}),
    "cp by gathering": (2, {"cp": 2, "model.attention_dropout": 0.0, "cp_comm_type": "all_gather"}),
    "gpipe": (2, {"pp": 2, "schedule.name": "gpipe"}),
    "dualpipe, sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule.name": "dualpipe_v"}),
}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [("sp", "selective"), ("sp", "full"), ("1f1b", "some in flight"), ("zbv", "all parts"), ("zero bubble", "full")],
)
def test_training_is_bit_equal_with_dropout(layout: str, choice: str, on_ranks: Any) -> None:
    world_size, changes = LAYOUTS[layout]
    same_bits(world_size, {choice: CHOICES[choice]}, changes, on_ranks)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_bit_equal_in_every_layout_and_choice(layout: str, on_ranks: Any) -> None:
    world_size, changes = LAYOUTS[layout]
    same_bits(world_size, CHOICES, changes, on_ranks)


# ---- what is sent again ----


def sent(config: ModelConfig, sequence_parallel: bool) -> dict[tuple[str, str], int]:
    """(phase, operation) -> calls per layer, over tp."""
    groups = initialize_model_parallel(ParallelConfig(tp=2, sequence_parallel=sequence_parallel))
    model = GPTModel(config, groups, layers=range(2), pre_process=False, post_process=False, seed=7)
    length = config.seq_length // (2 if sequence_parallel else 1)
    model.set_input_tensor(torch.randn(length, BATCH, config.hidden, requires_grad=True))
    with CommLedger() as ledger:
        model(None).sum().backward()
    calls: dict[tuple[str, str], int] = {}
    for record in ledger.select(layer="layers.1"):
        key = str(record.phase), record.operation
        calls[key] = calls.get(key, 0) + 1
    return calls


def test_the_second_forward_communicates_as_the_first(on_ranks: Any) -> None:
    plain = {("forward", "all_reduce"): 2, ("backward", "all_reduce"): 2}
    assert on_ranks(sent, 2, GPT2, False) == [plain] * 2
    assert on_ranks(sent, 2, replace(GPT2, **SELECTIVE), False) == [plain] * 2  # nothing selected communicates
    again = {("recompute", "all_reduce"): 2}
    assert on_ranks(sent, 2, replace(GPT2, **FULL), False) == [plain | again] * 2
    both = [("all_gather", 2), ("reduce_scatter", 2)]
    split = {(phase, name): n for phase in ("forward", "recompute") for name, n in both}
    # backward gathers the gradient twice and the inputs of both column-parallel layers again
    split |= {("backward", "all_gather"): 4, ("backward", "reduce_scatter"): 2}
    assert on_ranks(sent, 2, replace(GPT2, **FULL), True) == [split] * 2


def distributed(shape: tuple[int, ...], distribute: bool) -> tuple[int, Tensor, Tensor]:
    """Bytes kept, and the gradients of input and weight, of a checkpointed function that all ranks run alike."""
    groups = initialize_model_parallel(ParallelConfig(tp=2))
    torch.manual_seed(3)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], 5, requires_grad=True)
    with SavedTensors() as saved:
        inner = x * 1
        y = checkpoint(
            lambda t: (t @ weight).tanh(), inner, distribute_saved_activations=groups.tp if distribute else None
        )
        del inner
        kept = saved.bytes
    y.square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    return kept, x.grad, weight.grad


def test_an_input_may_be_shared_out_over_the_ranks_that_all_hold_it(on_ranks: Any) -> None:
    whole, parts = on_ranks(distributed, 2, (4, 6), False), on_ranks(distributed, 2, (4, 6), True)
    for (kept, dx, dw), (fewer, same_dx, same_dw) in zip(whole, parts, strict=True):
        assert (kept, fewer) == (4 * 6 * 4, 4 * 6 * 4 // 2)
        assert torch.equal(dx, same_dx) and torch.equal(dw, same_dw)
    with pytest.raises(RuntimeError, match="15 elements, which the 2 ranks of tp cannot share equally"):
        on_ranks(distributed, 2, (3, 5), True)


# ---- some of the microbatches in flight ----


def live_bytes(count: int | None, name: str) -> tuple[list[int], list[int]]:
    """Bytes alive after each forward of this rank's row, measured and by the closed form."""
    config = tiny(**{"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0, "model.embedding_dropout": 0.0})
    model = replace(config.model, recompute_granularity="full")
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    schedule = build_schedule(replace(config.schedule, name=name), pp=2, vpp=1, microbatches=6)
    chunks = [
        GPTModel(model, groups, layers=range(2 * stage, 2 * stage + 2), pre_process=False, post_process=False, seed=7)
        for stage in schedule.stages_of(groups.pp.rank)
    ]
    shape, on, measured = (model.seq_length, BATCH, model.hidden), Share(samples=BATCH), []

    def forward_step(_: Any, chunk: Any) -> Any:
        if groups.pp.rank == 0 and chunk is chunks[0]:  # the first stage, whose embedding is left out
            chunk.set_input_tensor(torch.randn(shape, requires_grad=True))
        output = chunk(None)
        chunk.set_input_tensor(None)  # or it is held until the next
        measured.append(saved.bytes)
        return output, lambda y: (y.square().mean(), {})

    options = {"num_microbatches_with_partial_activation_checkpoints": count}
    runtime = PipelineRuntime(schedule, chunks, groups, forward_step_func=forward_step, tensor_shape=shape, **options)  # type: ignore
    with SavedTensors(*chunks) as saved:
        runtime.run([None] * len(chunks))
    kept = kept_whole(schedule, groups.pp.rank, count or 0)
    each = {True: 2 * layer_activation_bytes(model, on), False: 2 * layer_input_bytes(model, on)}
    alive: set[tuple[int, int]] = set()
    waiting: set[tuple[int, int]] = set()  # outputs that are the next stage's input, where that is on this rank too
    expected = []
    for action in schedule.actions(groups.pp.rank):
        key = action.stage, action.microbatch
        if action.kind == "F":
            alive.add(key)
            beside = sum((stage + 1, m) not in alive for stage, m in waiting) * layer_input_bytes(model, on)
            expected.append(sum(each[k in kept] for k in alive) + beside)
            if action.stage + 1 in schedule.stages_of(groups.pp.rank):
                waiting.add(key)
        elif action.kind in "BI":
            waiting.discard(key)
        if action.kind in "BW":
            alive.discard(key)
    return measured, expected


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_as_many_in_flight_keep_everything_as_asked(name: str, on_ranks: Any) -> None:
    """What is alive after every forward, to the byte."""
    for count in (None, 0, 1, 2):
        for measured, expected in on_ranks(live_bytes, 2, count, name):
            assert measured == expected, count
