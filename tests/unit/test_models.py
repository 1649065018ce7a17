"""Blocks and GPT on one process: stages, placement, attention, dropout, refusals."""

from __future__ import annotations

import inspect
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit.config import ModelConfig, ParallelConfig, presets
from labkit.models import ChunkSpec, GPTModel, build_model_chunk, build_model_chunks, stage_layers
from labkit.models.attention import ParallelAttention
from labkit.models.build import Build, LayerSpec
from labkit.models.core_attention import CoreAttention, attention_by_kernel
from labkit.models.embedding import rotary_table, rotate
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.random import RngTracker
from labkit.schedules import Schedule

GROUPS = single_process_groups()
SMALL = ModelConfig(layers=2, hidden=32, heads=4, vocab_size=61, seq_length=16)
LLAMA = replace(
    SMALL,
    kv_heads=2,
    ffn_hidden=48,
    position="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    untie_embeddings_and_output_weights=True,
)


def model(config: ModelConfig = SMALL, **options) -> GPTModel:
    options = {"layers": range(config.layers), "seed": 5, "dtype": torch.float64} | options
    return GPTModel(config, GROUPS, **options)


def tokens(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(0))


# ---- attention ----


def plain_attention(layer: ParallelAttention, mixed: torch.Tensor, rotary=None) -> torch.Tensor:
    """Head by head, sample by sample, from the definition."""
    length, batch, _ = mixed.shape
    d, g, r = layer.head_dim, layer.kv_heads, layer.queries_per_kv
    output = mixed.new_empty(length, batch, g, r, d)
    mask = torch.ones(length, length).tril().bool()
    for b in range(batch):
        for j in range(g):
            block = mixed[:, b].view(length, g, r + 2, d)[:, j]
            if rotary is not None:
                block = torch.cat([rotate(block[:, None, : r + 1], rotary)[:, 0], block[:, r + 1 :]], dim=1)
            for i in range(r):
                scores = (block[:, i] @ block[:, r].T / math.sqrt(d)).masked_fill(~mask, -math.inf)
                output[:, b, j, i] = scores.softmax(-1) @ block[:, r + 1]
    return output.view(length, batch, -1)


@pytest.mark.parametrize("backend", ["fused", "flash", "math", "unfused"])
@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "grouped queries"])
def test_attention_is_softmax_of_scaled_scores_times_values(config: ModelConfig, backend: str) -> None:
    config = replace(config, attention_backend=backend)
    layer = ParallelAttention("a", Build(config=config, group=GROUPS.tp, seed=1, dtype=torch.float64))
    columns = (config.heads + 2 * (config.kv_heads or config.heads)) * 8
    mixed = torch.randn(16, 3, columns, dtype=torch.float64, requires_grad=True)
    angles = rotary_table(16, 8, 100.0)
    rotary = (angles.cos()[:, None, None], angles.sin()[:, None, None]) if config.position == "rope" else None
    found, expected = layer.attend(mixed, rotary), plain_attention(layer, mixed, rotary)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, mixed, weights)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["fused", "flash", "math"])
@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_every_kernel_gives_the_same_loss_and_gradients(config: ModelConfig, backend: str) -> None:
    found: list[list[torch.Tensor]] = []
    for each in (backend, "unfused"):
        gpt = model(replace(config, attention_backend=each))
        loss = gpt(tokens(), labels_BS=tokens().roll(-1, 1)).mean()
        found.append([loss, *torch.autograd.grad(loss, list(gpt.parameters()))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


KERNEL_OF = {"flash": "ScaledDotProductFlashAttentionForCpuBackward0", "math": "UnsafeViewBackward0"}


@pytest.mark.parametrize("backend", KERNEL_OF)
def test_a_demanded_kernel_computes_even_where_torch_has_another_choice(backend: str) -> None:
    core = CoreAttention(replace(SMALL, attention_backend=backend), None)
    q, k, v = torch.randn(3, 1, 8, 16, 8, requires_grad=True).unbind()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        node = core(q, k, v).grad_fn
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
    assert node is not None and node.name() == KERNEL_OF[backend]


@pytest.mark.parametrize(
    ("backend", "dropout", "reason"),
    [
        ("cudnn", 0.0, "torch has no such kernel for cpu"),
        ("efficient", 0.0, "torch has no such kernel for cpu"),
        (
            "flash",
            0.1,
            "torch's reasons: Flash attention kernel not used because: Both fused kernels do not support",
        ),
    ],
)
def test_a_kernel_that_cannot_run_says_why(backend: str, dropout: float, reason: str) -> None:
    core = CoreAttention(replace(SMALL, attention_backend=backend, attention_dropout=dropout), RngTracker())
    core.rng.add("model-parallel-rng", 1)
    q, k = torch.randn(1, 8, 16, 8), torch.randn(1, 4, 16, 8)
    said = rf"attention_backend is {backend}.*q \[1, 8, 16, 8\], k and v \[1, 4, 16, 8\], float32 on cpu"
    for _ in range(2):  # a second time, too
        with warnings.catch_warnings(), pytest.raises(ValueError, match=rf"{said}.*dropout_p {dropout}.*; {reason}"):
            warnings.simplefilter("error")
            core(q, k, k)


def test_a_mask_with_a_gradient_is_named_where_torch_gives_no_reason() -> None:
    q, mask = torch.randn(1, 2, 8, 16), torch.zeros(1, 1, 8, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"mask \[1, 1, 8, 8\] with a gradient.*flash kernel gives a mask no gradient"):
        attention_by_kernel("flash", q, q, q, mask, is_causal=False)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_a_token_sees_none_that_comes_later(config: ModelConfig) -> None:
    gpt, first = model(config), tokens()
    second = first.clone()
    second[:, 9:] = (second[:, 9:] + 1) % 61
    a, b = gpt(first), gpt(second)
    assert torch.equal(a[:9], b[:9])
    assert not torch.allclose(a[9], b[9])


@given(shift=st.integers(0, 40), seed=st.integers(0, 9))
def test_rotated_scores_depend_on_distance_alone(shift: int, seed: int) -> None:
    angles = rotary_table(64, 8, 10000.0)
    table = (angles.cos()[:, None, None], angles.sin()[:, None, None])
    q, k = torch.randn(2, 64, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    at_zero = rotate(q[:1].expand(64, 1, 1, 8), table)[10, 0, 0] @ rotate(k[:1].expand(64, 1, 1, 8), table)[3, 0, 0]
    moved = (
        rotate(q[:1].expand(64, 1, 1, 8), table)[10 + shift, 0, 0]
        @ rotate(k[:1].expand(64, 1, 1, 8), table)[3 + shift, 0, 0]
    )
    torch.testing.assert_close(at_zero, moved)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_position_ids_of_ones_own(config: ModelConfig) -> None:
    gpt, ids = model(config), tokens()
    counted = torch.arange(16).expand(2, 16)
    torch.testing.assert_close(gpt(ids, counted), gpt(ids))
    # Two packed documents: without a mask between them only the positions tell; sample 1 keeps its own.
    packed = torch.stack([torch.cat([torch.arange(8), torch.arange(8)]), torch.arange(16)])
    again = gpt(ids, packed)
    torch.testing.assert_close(again[:, 1], gpt(ids)[:, 1])
    assert not torch.allclose(again[8:, 0], gpt(ids)[8:, 0])


# ---- the model ----


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_loss_is_the_cross_entropy_of_the_logits(config: ModelConfig) -> None:
    gpt, ids, labels = model(config), tokens(), tokens().roll(-1, 1)
    logits = gpt(ids)
    assert logits.shape == (16, 2, 128)  # 61 tokens padded
    expected = F.cross_entropy(logits[..., :61].permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(gpt(ids, labels_BS=labels), expected)


def test_label_smoothing_reaches_the_loss_of_training_alone() -> None:
    smooth, ids = model(label_smoothing=0.1), tokens()
    logits = smooth(ids)[..., :61].permute(1, 2, 0)
    expected = F.cross_entropy(logits, ids, reduction="none", label_smoothing=0.1 * 61 / 60)
    torch.testing.assert_close(smooth(ids, labels_BS=ids), expected)
    plain = F.cross_entropy(logits, ids, reduction="none")
    torch.testing.assert_close(smooth.eval()(ids, labels_BS=ids), plain)


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt2", "llama"])
def test_stages_one_after_the_other_are_the_whole_model(config: ModelConfig) -> None:
    ids = tokens()
    first = model(config, layers=range(1), post_process=False)
    last = model(config, layers=range(1, 2), pre_process=False)
    hidden = first(ids)
    assert hidden.shape == (16, 2, 32)
    last.set_input_tensor(hidden)
    assert torch.equal(last(None), model(config)(ids))
    names = {name for stage in (first, last) for name, _ in stage.named_parameters()}
    tied = not config.untie_embeddings_and_output_weights
    assert names - ({"output.weight"} if tied else set()) == {n for n, _ in model(config).named_parameters()}


def test_the_tied_copy_starts_equal_and_is_marked() -> None:
    last = model(layers=range(1, 2), pre_process=False)
    first = model(layers=range(1), post_process=False)
    assert last.output is not None and first.embedding is not None
    copy, original = last.output.weight, first.embedding.word.weight
    assert torch.equal(copy, original)
    assert record_of(copy).shared and not record_of(original).shared
    assert record_of(copy).shared_embedding and record_of(original).shared_embedding
    untied = model(LLAMA)
    assert untied.output is not None and untied.embedding is not None
    assert not torch.equal(untied.output.weight, untied.embedding.word.weight)
    assert not record_of(untied.output.weight).shared


def test_initial_weights_have_the_papers_spread() -> None:
    gpt = GPTModel(replace(SMALL, hidden=256, layers=8), GROUPS, layers=range(8), seed=1)
    spread = {name: p.std().item() for name, p in gpt.named_parameters() if p.ndim == 2}
    for name, std in spread.items():
        residual = name.endswith(("proj.weight", "fc2.weight"))
        if name != "embedding.word.weight":  # 67 of its 128 rows are padding
            assert std == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
    assert gpt.embedding is not None
    assert gpt.embedding.word.weight[:61].std().item() == pytest.approx(0.02, rel=0.05)
    assert not gpt.embedding.word.weight[61:].any()


def test_dropout_acts_in_training_only_and_repeats() -> None:
    config = replace(SMALL, embedding_dropout=0.1, attention_dropout=0.1, hidden_dropout=0.1)
    ids = tokens()
    a, b = model(config)(ids), model(config)(ids)
    assert torch.equal(a, b)  # seeded when the model is built
    gpt = model(config)
    assert not torch.equal(gpt(ids), gpt(ids))
    torch.testing.assert_close(gpt.eval()(ids), model()(ids))


@pytest.mark.parametrize("where", ["embedding_dropout", "attention_dropout", "hidden_dropout"])
def test_each_dropout_keeps_the_mean(where: str) -> None:
    gpt, ids = model(replace(SMALL, init_std=0.1, **{where: 0.2})), tokens(1)
    expected = model(replace(SMALL, init_std=0.1))(ids)
    drawn = torch.stack([gpt(ids) for _ in range(400)])
    assert drawn.std(0).mean() > 0.01
    error = (drawn.mean(0) - expected).norm() / expected.norm()
    assert error < 0.15  # noise of 400 draws, and the norms are not linear


def test_rounding_to_bf16_is_the_only_difference() -> None:
    ids = tokens()
    exact, rounded = model(dtype=torch.float32), model(dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in rounded.parameters())
    for name, p in exact.named_parameters():
        assert torch.equal(p.bfloat16(), dict(rounded.named_parameters())[name]), name
    loss = rounded(ids, labels_BS=ids)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact(ids, labels_BS=ids), rtol=0.05, atol=0.05)


# ---- placement ----


@given(pp=st.integers(1, 6), vpp=st.integers(1, 4), per=st.integers(1, 4))
def test_every_layer_has_one_place_and_chunks_are_in_order(pp: int, vpp: int, per: int) -> None:
    layers = pp * vpp * per
    visited = [
        index for chunk in range(vpp) for rank in range(pp)
        for index in stage_layers(layers, pp=pp, pp_rank=rank, vpp=vpp, chunk=chunk)
    ]  # fmt: skip
    assert visited == list(range(layers))


def test_placement_by_the_formula() -> None:
    # v (L / V) + r L / (P V) with L = 16, P = 4, V = 2, r = 3, v = 1: 8 + 6
    assert stage_layers(16, pp=4, pp_rank=3, vpp=2, chunk=1) == range(14, 16)
    with_own = [stage_layers(6, pp=3, pp_rank=r, standalone_embedding_stage=True) for r in range(3)]
    assert with_own == [range(0), range(3), range(3, 6)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"pp": 4, "pp_rank": 0},
            "6 layers cannot be shared evenly by 4 stages; take a multiple of 4 layers, or set parallel",
        ),
        ({"pp": 2, "pp_rank": 2}, "pipeline rank 2 of 2"),
        ({"pp": 2, "pp_rank": 0, "chunk": 1}, "chunk 1 of 1"),
        ({"pp": 1, "pp_rank": 0, "standalone_embedding_stage": True}, "needs a second stage"),
    ],
)
def test_placements_that_do_not_exist_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_layers(6, **kwargs)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 2)])
def test_chunks_of_all_ranks_are_the_whole_model(pp: int, vpp: int) -> None:
    config = presets.tiny().override({"parallel.pp": pp, "parallel.vpp": vpp, "model.hidden": 16})
    whole = dict(build_model_chunks(presets.tiny().override({"model.hidden": 16}), GROUPS)[0].named_parameters())
    found = {}
    for rank in range(pp):
        groups = initialize_model_parallel(config.parallel, rank=rank, world_size=pp)
        chunks = build_model_chunks(config, groups)
        assert len(chunks) == vpp
        found |= {n: p for chunk in chunks for n, p in chunk.named_parameters() if not record_of(p).shared}
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


V = Schedule("V", 4, 1, [["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
"""Stages 0 and 3 on rank 0, 1 and 2 on rank 1."""
CROSSED = Schedule("crossed", 2, 1, [["1F0", "1B0"], ["0F0", "0B0"]])
"""Stage 0 on rank 1."""


def chunks_at(rank: int, schedule: Schedule, ends: tuple[int, int] | None = None, **changes) -> list[GPTModel]:
    config = presets.tiny().override({"parallel.pp": 2, "model.hidden": 16, **changes})
    groups = initialize_model_parallel(config.parallel, rank=rank, world_size=2, ends=ends)
    return build_model_chunks(config, groups, schedule)


@pytest.mark.parametrize(
    ("schedule", "layout"), [(V, None), (CROSSED, None), (V, "Et|ttt|tttt|L"), (V, "E|ttt|ttttt|L")]
)
def test_chunks_of_any_placement_are_the_whole_model(schedule: Schedule, layout: str | None) -> None:
    whole = dict(build_model_chunks(presets.tiny().override({"model.hidden": 16}), GROUPS)[0].named_parameters())
    chunks = [chunk for rank in (0, 1) for chunk in chunks_at(rank, schedule, **{"parallel.pipeline_layout": layout})]
    held = {name: p for chunk in chunks for name, p in chunk.named_parameters() if not record_of(p).shared}
    assert held.keys() == whole.keys()
    assert all(torch.equal(held[name], whole[name]) for name in whole)


def test_chunks_hold_what_the_layout_says_of_their_stage() -> None:
    layout = {"parallel.pipeline_layout": "Et|ttt|tttt|L"}
    first, last = chunks_at(0, V, **layout)
    assert [list(chunk.layers) for chunk in (first, last)] == [["0"], []]
    assert (first.pre_process, first.post_process, last.pre_process, last.post_process) == (True, False, False, True)
    assert [list(chunk.layers) for chunk in chunks_at(1, V, **layout)] == [["1", "2", "3"], ["4", "5", "6", "7"]]


def test_a_v_shares_one_weight_between_its_first_and_last_stage() -> None:
    first, last = chunks_at(0, V)
    assert first.embedding is not None
    assert last.output_weight_VH is first.embedding.word.weight
    assert not any("word" in name or "output" in name for name, _ in last.named_parameters())
    assert not record_of(first.embedding.word.weight).shared_embedding, "nothing is summed over other ranks"
    first, last = chunks_at(0, V, **{"model.untie_embeddings_and_output_weights": True})
    assert last.output is not None and last.output_weight_VH is last.output.weight


def test_no_argument_of_a_model_is_forgotten_when_a_chunk_is_built() -> None:
    """A parameter that the constructor gets later must come from the configuration, or a field would do nothing."""
    config = presets.tiny_moe().override({"precision": "bf16", "label_smoothing": 0.1, "hidden_dropout": 0.1})
    passed: dict[str, Any] = {}
    chunk = ChunkSpec(0, 0, range(8), rng=RngTracker("cpu"), spec=LayerSpec())
    ends = {"pre_process": True, "post_process": True, "chunk": chunk}
    build_model_chunk(config, GROUPS, **ends, kind=lambda *_, **options: passed.update(options))
    keywords = {p.name for p in inspect.signature(GPTModel).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert passed.keys() == keywords - {"device"}, "the groups have the device"
    assert (passed["moe"], passed["dtype"], passed["label_smoothing"]) == (config.moe, torch.bfloat16, 0.1)
    assert passed["rng"] is chunk.rng and passed["spec"] is chunk.spec


def test_tied_weights_on_ranks_that_no_group_joins_are_refused() -> None:
    rows = [["1F0", "1B0"], ["0F0", "0B0"], ["3F0", "3B0"], ["2F0", "2B0"]]
    turned = Schedule("turned", 4, 1, rows)
    config = presets.tiny().override({"parallel.pp": 4, "model.hidden": 16})
    groups = initialize_model_parallel(config.parallel, rank=1, world_size=4)
    with pytest.raises(ValueError, match="on pipeline ranks 1 and 2, and groups"):
        build_model_chunks(config, groups, turned)
    groups = initialize_model_parallel(config.parallel, rank=1, world_size=4, ends=(1, 2))
    assert build_model_chunks(config, groups, turned)[0].pre_process
    with pytest.raises(ValueError, match=r"V is for 2 pipeline ranks, but parallel\.pp is 4"):
        build_model_chunks(config, groups, V)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads 5 must divide hidden 32"),
        ({"norm": "batchnorm"}, "layernorm or rmsnorm"),
        ({"position": "alibi"}, "learned or rope"),
        ({"activation": "tanh"}, "tanh"),
        ({"family": "bert"}, "no family 'bert'"),
        ({"position": "rope", "hidden": 36}, "a head needs an even number, not 9"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(replace(SMALL, **change))


def test_key_value_heads_that_ranks_can_neither_share_out_nor_share_are_refused() -> None:
    groups = initialize_model_parallel(ParallelConfig(tp=4), rank=0, world_size=4)
    with pytest.raises(ValueError, match=r"12 heads and 3 key/value heads cannot be shared by tp=4 ranks"):
        GPTModel(replace(LLAMA, hidden=48, heads=12, kv_heads=3), groups, layers=range(2), seed=1)


def test_wrong_inputs_are_refused() -> None:
    gpt = model()
    with pytest.raises(ValueError, match=r"17 tokens is longer than model\.seq_length = 16"):
        gpt(torch.zeros(1, 17, dtype=torch.long))
    bad = torch.tensor([[3, 61]])
    with pytest.raises(ValueError, match=r"token id 61 at position \(0, 1\) .*0\.\.60"):
        gpt(bad)
    with pytest.raises(ValueError, match=r"label id 61 at position \(0, 1\)"):
        gpt(torch.zeros_like(bad), labels_BS=bad)
    with pytest.raises(ValueError, match="needs tokens_BS"):
        gpt(None)
    with pytest.raises(ValueError, match="set_input_tensor"):
        model(layers=range(1, 2), pre_process=False)(tokens())
