"""GPT under sequence parallelism: the numbers of one process, what each rank holds, drops, keeps and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.comm.collectives import all_gather
from labkit.config import ModelConfig, ParallelConfig, presets
from labkit.events import recording
from labkit.launch import RankError
from labkit.models import GPTModel, build_model_chunks
from labkit.models.build import Build
from labkit.models.embedding import PositionEmbedding
from labkit.parallel import (
    ColumnParallelLinear,
    CommLedger,
    Group,
    NaiveDataParallel,
    finalize_model_grads,
    initialize_model_parallel,
    linear_cross_entropy,
    record_of,
    single_process_groups,
)
from labkit.parallel.parameters.weights import gather_parameter
from labkit.parallel.vocab.cross_entropy import _chunks, _rows_of_parts
from labkit.schedules import PipelineRuntime, build_schedule
from labkit.train import compare

GPT2 = ModelConfig(layers=2, hidden=32, heads=4, vocab_size=333, make_vocab_size_divisible_by=8, seq_length=12)
LLAMA = replace(
    GPT2,
    kv_heads=2,
    ffn_hidden=48,
    position="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    untie_embeddings_and_output_weights=True,
)
B = 3
DROPOUT = dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), 0.5)


def data(config: ModelConfig, length: int = 0, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.vocab_size, (B, (length or config.seq_length) + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def make(config: ModelConfig, tp: int, sequence_parallel: bool = True) -> tuple[GPTModel, Any]:
    parallel = ParallelConfig(tp=tp, sequence_parallel=sequence_parallel)
    groups = initialize_model_parallel(parallel) if tp > 1 else single_process_groups()
    return GPTModel(config, groups, layers=range(config.layers), seed=7, dtype=torch.float64), groups


def step(config: ModelConfig, tp: int, positions_BS: Tensor | None, fusion: bool = False) -> dict[str, Tensor]:
    """One forward and backward, gradients finalised; everything gathered to its full, unpadded form."""
    model, groups = make(config, tp)
    model.fusion = fusion
    wrapped = NaiveDataParallel(model, groups.dp_cp)
    tokens, labels = data(config)
    with torch.no_grad():
        logits = all_gather(model(tokens, positions_BS), groups.tp, dim=2)[..., : config.vocab_size]
    loss = wrapped(tokens, positions_BS, labels)
    loss.mean().backward()
    finalize_model_grads([wrapped], groups)
    found = {"logits": logits, "loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        found[name] = gather_parameter(parameter.main_grad, parameter, groups.tp).clone()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(
    ("config", "tp", "own_positions"),
    [(GPT2, 2, False), (GPT2, 4, True), (LLAMA, 2, True)],
    ids=["gpt2-tp2", "gpt2-tp4-own-positions", "llama-tp2-own-positions"],
)
def test_equals_one_process(on_ranks, config: ModelConfig, tp: int, own_positions: bool) -> None:
    positions = torch.stack([torch.arange(12).roll(shift) for shift in range(B)]) if own_positions else None
    alone = step(config, 1, positions)
    for found in on_ranks(step, tp, config, tp, positions, tp == 4):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# ---- every layout of the loop ----

LAYOUTS = [
    {"tp": 2, "pp": 2, "schedule.name": "zbv"},
    {"tp": 2, "pp": 2, "schedule.name": "zero_bubble_h1", "pipeline_layout": "Ettt|tL"},
    {"tp": 2, "pp": 2, "standalone_embedding_stage": True, "variable_seq_lengths": True, "world_size": 8},
]


def test_pretrain_equals_one_process_on_a_v_with_split_backwards_uneven_stages_and_variable_shapes() -> None:
    config = presets.tiny().override({"layers": 4, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 8})
    report = compare(config, [layout | {"sequence_parallel": True} for layout in LAYOUTS], steps=2, dtype="float64")
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


LENGTHS = (12, 4, 8)


def losses_of_lengths(layout: dict[str, Any], split: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and finalised gradients of three microbatches of different lengths, over two stages or one."""
    config = presets.tiny().override({"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "precision": "fp64"})
    config = config.override({"global_batch_size": 3, "schedule.name": "zero_bubble_h1" if split else "1f1b"} | layout)
    groups = initialize_model_parallel(config.parallel) if layout else single_process_groups()
    schedule = build_schedule(config.schedule, pp=groups.pp.size, vpp=1, microbatches=3)
    chunks = [NaiveDataParallel(chunk, groups.dp_cp) for chunk in build_model_chunks(config, groups, schedule)]
    losses: list[Tensor] = []

    def forward_step(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
        tokens, labels = next(batches)

        def loss(loss_BS: Tensor) -> Any:
            losses.append(loss_BS.detach().clone())
            return loss_BS.mean(), {}

        return model(tokens, labels_BS=labels), loss

    runtime = PipelineRuntime(schedule, chunks, groups, forward_step_func=forward_step)
    runtime.run([iter([data(config.model, length, seed=length) for length in LENGTHS])])
    finalize_model_grads(chunks, groups)
    gradients = {
        parameter.full_name: gather_parameter(parameter.main_grad, parameter, groups.tp).clone()
        for chunk in chunks
        for parameter in chunk.parameters()
    }
    return losses, gradients


@pytest.mark.parametrize("split", [False, True], ids=["1f1b", "zero_bubble_h1"])
def test_microbatches_of_different_lengths(on_ranks, split: bool) -> None:
    losses, gradients = losses_of_lengths({}, split=False)
    assert [tuple(loss.shape) for loss in losses] == [(B, length) for length in LENGTHS]
    found = on_ranks(losses_of_lengths, 4, {"tp": 2, "pp": 2, "sequence_parallel": True}, split)
    for rank, (own_losses, own) in enumerate(found):
        assert len(own_losses) == (3 if rank >= 2 else 0), "the last stage computes the loss"
        for loss, expected in zip(own_losses, losses):
            torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-14, msg=lambda m, n=name: n + m)
    assert {name for _, own in found for name in own} == gradients.keys()


# ---- what a rank holds ----


def flagged(config: ModelConfig, tp: int) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    """Parameters whose gradients are parts of a sum; shapes of what every block returns."""
    model, _ = make(config, tp)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if name.endswith(("norm", "attention", "mlp", "embedding")):
            module.register_forward_hook(lambda _, __, y, name=name: shapes.update({name: tuple(y.shape)}))
    tokens, labels = data(config)
    model(tokens, labels_BS=labels)
    return {n for n, p in model.named_parameters() if record_of(p).sequence_parallel}, shapes


def test_blocks_return_parts_of_the_sequence_and_what_saw_only_a_part_is_marked(on_ranks) -> None:
    for names, shapes in on_ranks(flagged, 4, GPT2, 4):
        assert set(shapes.values()) == {(3, B, 32)}, "12 positions over 4 ranks"
        layer = {"attention.norm.weight", "attention.norm.bias", "attention.proj.bias"}
        layer |= {"mlp.norm.weight", "mlp.norm.bias", "mlp.fc2.bias"}
        ends = {"embedding.position.weight", "final_norm.weight", "final_norm.bias"}
        assert names == ends | {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert flagged(GPT2, 1)[0] == set()


def kept_and_sent(config: ModelConfig, sequence_parallel: bool) -> tuple[set[tuple[int, ...]], CommLedger]:
    """Shapes of the activations of width H that are kept for backward, and the ledger of one step."""
    model, _ = make(config, 2, sequence_parallel)
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: set[tuple[int, ...]] = set()

    def keep(x: Tensor) -> Tensor:
        if x.shape[-1:] == (config.hidden,) and x.untyped_storage().data_ptr() not in own:
            kept.add((x.shape[:-1].numel(), config.hidden))
        return x

    tokens, labels = data(config)
    with CommLedger() as ledger:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens, labels_BS=labels).mean()
        loss.backward()
    return kept, ledger


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_no_whole_sequence_is_kept_and_each_all_reduce_becomes_its_two_halves(on_ranks, config: ModelConfig) -> None:
    whole = 12 * B * 32 * 8
    for (parts, split), (wholes, plain) in zip(
        on_ranks(kept_and_sent, 2, config, True), on_ranks(kept_and_sent, 2, config, False), strict=True
    ):
        assert parts == {(6 * B, 32)} and wholes == {(12 * B, 32)}
        for name in ("layers.0", "layers.1"):
            assert plain.count(layer=name) == plain.count(layer=name, operation="all_reduce") == 4
            assert split.count(layer=name, operation="all_reduce") == 0
            counted = {
                (operation, phase): (
                    split.count(operation=operation, phase=phase, layer=name),
                    split.bytes(operation=operation, phase=phase, layer=name),
                )
                for operation in ("all_gather", "reduce_scatter")
                for phase in ("forward", "backward")
            }
            # On the wire an all-gather of parts and a reduce-scatter of wholes are the two halves of an all-reduce.
            assert counted == {
                ("all_gather", "forward"): (2, 2 * whole // 2),  # into qkv and fc1
                ("reduce_scatter", "forward"): (2, 2 * whole),  # out of proj and fc2
                ("all_gather", "backward"): (2 + 2, 4 * whole // 2),  # of dy, and again of the two inputs not kept
                ("reduce_scatter", "backward"): (2, 2 * whole),
            }
        assert [r.operation for r in split.select(layer="embedding")] == ["reduce_scatter", "all_gather"]
        ends = [(r.operation, r.phase) for r in split.select(layer="loss")]
        assert ends[:3] == [("all_gather", "forward"), ("all_reduce", "forward"), ("all_reduce", "forward")]
        assert sorted(ends[3:]) == [("all_gather", "backward"), ("reduce_scatter", "backward")]


def order_of_a_backward(kind: str) -> list[str]:
    """What the backward of a layer that gathers its input begins, and what it waits for, in this order."""
    group = initialize_model_parallel(ParallelConfig(tp=2)).tp
    x = torch.ones(2, 1, 8, requires_grad=True)
    if kind == "column":
        made, _ = ColumnParallelLinear("fc", 8, 8, group=group, sequence_parallel=True)(x)
    else:
        weight, labels = torch.ones(8, 8, requires_grad=True), torch.zeros(4, 1, dtype=torch.long)
        made = linear_cross_entropy(x, weight, labels, group, vocab_size=16, sequence_parallel=True)
    with recording(group.rank) as recorder:
        made.sum().backward()
    named = [(e.start, e.kind if e.kind.endswith("_grad") else e.name) for e in recorder.events]
    return [name for _, name in sorted(named)]


@pytest.mark.parametrize("kind", ["column", "fused loss"])
def test_the_second_gather_hides_behind_dgrad_and_the_reduce_scatter_behind_wgrad(on_ranks, kind: str) -> None:
    for order in on_ranks(order_of_a_backward, 2, kind):
        assert order == [
            "all_gather tp", "input_grad", "reduce_scatter tp", "wait all_gather tp", "weight_grad",
            "wait reduce_scatter tp",
        ]  # fmt: skip


# ---- dropout ----


def dropped(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the embedding's and a layer's dropout, and the default random state after a whole forward."""
    model, _ = make(replace(config, **DROPOUT), 2)
    ones = torch.ones(6, B, 32, dtype=torch.float64)
    masks = model.embedding.dropout(ones), model.layers["0"].dropout(ones)  # type: ignore[operator,union-attr]
    before = torch.get_rng_state()
    tokens, labels = data(config)
    model(tokens, labels_BS=labels).mean().backward()
    assert torch.equal(before, torch.get_rng_state()), "nothing may be drawn from the state that ranks share"
    model.eval()
    assert torch.equal(model.layers["0"].dropout(ones), ones)  # type: ignore[operator]
    return *masks, before


def test_each_rank_drops_its_own_positions_and_leaves_the_common_state_alone(on_ranks) -> None:
    first, second = on_ranks(dropped, 2, GPT2)
    for mask, other in zip(first[:2], second[:2]):
        assert not torch.equal(mask, other)
        assert 0.3 < (mask == 0).double().mean() < 0.7
    assert torch.equal(first[2], second[2])


def twice(config: ModelConfig) -> None:
    first, second = (step(config, 2, None) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_repeats_bit_for_bit_with_dropout(on_ranks, config: ModelConfig) -> None:
    on_ranks(twice, 2, replace(config, **DROPOUT))


# ---- properties ----


@given(parts=st.integers(1, 8), each=st.integers(1, 400), columns=st.integers(1, 50), elements=st.integers(1, 5000))
def test_chunks_of_the_loss_take_every_token_once_and_the_same_tokens_of_every_part(parts, each, columns, elements):
    tokens = torch.arange(parts * each)
    picked = [
        _rows_of_parts(rows, parts)(tokens) for rows in _chunks(each, parts * columns, elements, -(-256 // parts))
    ]
    for chunk in picked:
        assert torch.equal(chunk, chunk[:1] + each * torch.arange(parts)[:, None])
    assert torch.equal(torch.cat(picked, dim=1).flatten(), tokens), "joined along a part's tokens they are all of it"


position_table = partial(PositionEmbedding, "position")


@given(tp=st.integers(1, 16), each=st.integers(1, 64))
def test_own_positions_tile_the_sequence(tp: int, each: int) -> None:
    ranks = [Group("tp", tuple(range(tp)), rank) for rank in range(tp)]
    tables = [position_table(Build(config=GPT2, group=group, seed=0, sequence_parallel=True)) for group in ranks]
    positions = list(range(tp * each))
    assert [p for table in tables for p in positions[table.own_positions(tp * each)]] == positions
    whole = position_table(Build(config=GPT2, group=ranks[-1], seed=0))
    assert positions[whole.own_positions(tp * each)] == positions


# ---- refusals ----


def odd_length() -> None:
    model, _ = make(GPT2, 2)
    model(torch.zeros(1, 7, dtype=torch.long))


def test_a_sequence_that_the_ranks_do_not_divide_is_refused_with_what_to_do(on_ranks) -> None:
    with pytest.raises(RankError, match="over tp = 2 ranks, and 7 tokens are not a multiple of it; pad them to 8"):
        on_ranks(odd_length, 2)
