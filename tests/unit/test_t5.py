"""T5 in one process: what a position sees, both forms, samples, learning, costs in closed form, refusals."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labkit import plan
from labkit.config import ConfigError, ModelConfig, ParallelConfig, RunConfig, TrainConfig, presets
from labkit.data.batches import data_iterator
from labkit.data.datasets import build_datasets
from labkit.models import Share, T5Model
from labkit.models.full_shapes import full_shapes
from labkit.models.saved_tensors import SavedTensors
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.parallel.parameters.parameter_record import name_of, record_of
from labkit.plan.stages import StageContents
from labkit.plan.t5_activations import t5_stage_bytes
from labkit.train import pretrain

GROUPS = single_process_groups()
MEGATRON = ModelConfig(
    family="t5", layers=2, decoder_layers=3, hidden=32, heads=4, vocab_size=99, seq_length=16, decoder_seq_length=8,
    activation="gelu", make_vocab_size_divisible_by=32,
)  # fmt: skip
PAPER = replace(
    MEGATRON, position="relative", relative_buckets=8, relative_max_distance=16, norm="rmsnorm", bias=False,
    activation="relu",
)  # fmt: skip
UNTIED = replace(PAPER, activation="geglu", untie_embeddings_and_output_weights=True)
FORMS = pytest.mark.parametrize("config", [MEGATRON, PAPER, UNTIED], ids=["learned", "relative", "untied"])


def built(config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> T5Model:
    """With weights large enough that every term matters; norms and biases are no ones and zeros."""
    options = {"layers": range(plan.all_layers(config)), "seed": 1, "dtype": dtype} | options
    model, generator = T5Model(config, GROUPS, **options), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Texts of encoder and decoder, two samples each, and the encoder's padding: five positions of the second."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 11:] = 0
    text_enc, text_dec = (torch.randint(0, 99, (2, length), generator=generator) for length in (16, 8))
    return text_enc, text_dec, mask


def with_another(text: Tensor, place: int) -> Tensor:
    changed = text.clone()
    changed[:, place] = (changed[:, place] + 1) % 99
    return changed


# ---- what a position sees ----


@FORMS
@pytest.mark.parametrize("backend", ["fused", "math", "unfused"])
def test_the_decoder_sees_all_of_the_encoder_and_nothing_behind_itself(config: ModelConfig, backend: str) -> None:
    model, (text_enc, text_dec, mask) = built(replace(config, attention_backend=backend)), batch()
    logits = model(text_enc, text_dec, mask)
    assert logits.shape == (8, 2, 128)
    others = model(with_another(text_enc, 15), text_dec, mask)
    assert not torch.allclose(logits[0, 0], others[0, 0]), "the first position sees the encoder's last"
    torch.testing.assert_close(logits[:, 1], others[:, 1], rtol=0, atol=0)  # there it is padding
    others = model(text_enc, with_another(text_dec, 5), mask)
    torch.testing.assert_close(logits[:5], others[:5], rtol=0, atol=0)
    assert not torch.isclose(logits[5:], others[5:]).all(dim=2).any()


@FORMS
def test_padding_is_as_if_it_were_not_there(config: ModelConfig) -> None:
    model, (text_enc, text_dec, mask) = built(config), batch()
    logits = model(text_enc, text_dec, mask)
    torch.testing.assert_close(logits[:, 1:], model(text_enc[1:, :11], text_dec[1:]))
    assert model(text_enc, text_dec, torch.zeros_like(mask)).isfinite().all(), "padding alone gives no NaN"


def test_names_shapes_and_parameters_are_those_of_the_closed_forms() -> None:
    for config in (MEGATRON, PAPER, UNTIED):
        model = built(config)
        made = {name_of(p): record_of(p).full_shape for p in model.parameters()}
        assert made == full_shapes(config) and set(dict(model.named_parameters())) == set(made)
        assert sum(np.prod(shape) for shape in made.values()) == plan.model_parameters(config)
        for tp in (1, 2):
            groups = initialize_model_parallel(ParallelConfig(tp=tp), rank=tp - 1, world_size=tp)
            held = sum(p.numel() for p in T5Model(config, groups, layers=range(5), seed=1).parameters())
            assert held == plan.stage_parameters(config, layers=range(5), tp=tp)


# ---- costs ----


RECOMPUTED: list[dict[str, Any]] = [
    {},
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_method": "block"},
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
]


@FORMS
@pytest.mark.parametrize("recomputed", RECOMPUTED, ids=["nothing", "uniform", "block", "selective"])
def test_operations_equal_torchs_counter(config: ModelConfig, recomputed: dict[str, Any]) -> None:
    config = replace(config, make_vocab_size_divisible_by=1, **recomputed)  # the closed forms leave padding out
    model, (text_enc, text_dec, mask) = built(config), batch()
    also = {torch.ops.aten.addmm_: lambda _, a, b, **__: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=also) as counter:
        loss = model(text_enc, text_dec, mask, text_dec).mean()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == plan.forward_flops(config, samples=2).total
    train = TrainConfig(micro_batch_size=2, global_batch_size=2)
    assert counter.get_total_flops() == plan.hardware_flops(RunConfig(model=config, train=train))
    halves = [plan.forward_flops(config, layers=range(*ends), logits=False).total for ends in ((0, 2), (2, 5))]
    assert sum(halves) + plan.forward_flops(config, layers=range(0)).total == plan.forward_flops(config).total


@FORMS
@pytest.mark.parametrize("recomputed", RECOMPUTED, ids=["nothing", "uniform", "block", "selective"])
def test_bytes_that_a_forward_keeps(config: ModelConfig, recomputed: dict[str, Any]) -> None:
    for backend, drop, dtype in product(("fused", "math", "unfused"), (0.0, 0.1), (torch.float32, torch.bfloat16)):
        drops = {"attention_dropout": drop, "hidden_dropout": drop, "embedding_dropout": drop}
        shape = replace(config, attention_backend=backend, **drops, **recomputed)
        model, (text_enc, text_dec, mask) = built(shape, dtype), batch()
        with SavedTensors(model) as saved:
            loss = model(text_enc, text_dec, mask, text_dec)
        share = Share(samples=2, element_bytes=dtype.itemsize)
        expected = t5_stage_bytes(shape, share, StageContents(range(5), embedding=True, loss=True))
        assert loss.shape == (2, 8) and saved.bytes == pytest.approx(expected, rel=0.01), (backend, drop, dtype)


# ---- stages ----


def test_stages_share_the_layers_of_each_half() -> None:
    model = replace(MEGATRON, decoder_layers=4)
    config = RunConfig(model=model, parallel=ParallelConfig(pp=3, split_rank=1))
    held = plan.stage_contents(config, 3)
    assert [stage.layers for stage in held] == [range(2), range(2, 4), range(4, 6)]
    assert [(stage.embedding, stage.loss) for stage in held] == [(True, False), (True, False), (False, True)]
    each = [
        plan.stage_parameters(model, layers=stage.layers, pre_process=stage.embedding, post_process=stage.loss)
        for stage in held
    ]
    made = []
    for rank, stage in enumerate(held):
        groups = initialize_model_parallel(config.parallel, rank=rank, world_size=3)
        ends = {"pre_process": stage.embedding, "post_process": stage.loss}
        chunk = T5Model(model, groups, layers=stage.layers, seed=1, **ends)
        made.append(sum(p.numel() for p in chunk.parameters()))
    assert made == each


@FORMS
@pytest.mark.parametrize(("pp", "split"), [(3, 1), (4, 2)])
def test_stages_one_after_the_other_give_the_logits_of_the_whole(config: ModelConfig, pp: int, split: int) -> None:
    """And what several stages hold is marked as copies. Norms and checkpoints leave out all but the first."""
    config = replace(config, decoder_layers=4)
    run, given = RunConfig(model=config, parallel=ParallelConfig(pp=pp, split_rank=split)), batch()
    whole, sent = built(config), None
    weights, records = {name_of(parameter): parameter for parameter in whole.parameters()}, defaultdict(list)
    for rank, stage in enumerate(plan.stage_contents(run, pp)):
        groups = initialize_model_parallel(run.parallel, rank=rank, world_size=pp)
        ends = {"pre_process": stage.embedding, "post_process": stage.loss}
        chunk = T5Model(config, groups, layers=stage.layers, seed=1, dtype=torch.float64, **ends)
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(weights[name_of(parameter)])
                records[name_of(parameter)].append(record_of(parameter))
        chunk.set_input_tensor(sent)
        sent = chunk(*given)
    torch.testing.assert_close(sent, whole(*given))
    for name, (first, *others) in records.items():
        assert first.has_copies == bool(others) and not first.shared, name
        assert all(other.has_copies and other.shared for other in others), name


def test_a_decoder_stage_without_its_input_says_so() -> None:
    groups = initialize_model_parallel(ParallelConfig(pp=2, split_rank=1), rank=1, world_size=2)
    stage = T5Model(MEGATRON, groups, layers=range(2, 5), seed=1)
    with pytest.raises(ValueError, match="reads the encoder's output; give it set_input_tensor"):
        stage(None, batch()[1])


# ---- samples and learning ----


def test_a_batch_has_the_tensors_that_the_forward_step_reads() -> None:
    config = presets.t5_tiny()
    given = next(data_iterator(build_datasets(config)[0], config, GROUPS))
    assert {name: (tuple(x.shape), x.dtype) for name, x in given.items()} == {
        "text_enc": ((1, 64), torch.int64),
        "text_dec": ((1, 32), torch.int64),
        "labels": ((1, 32), torch.int64),
        "loss_mask": ((1, 32), torch.float32),
        "enc_mask": ((1, 64), torch.int64),
    }


RELATIVE = {"position": "relative", "norm": "rmsnorm", "bias": False, "untie_embeddings_and_output_weights": True}


@pytest.mark.parametrize("form", [{}, RELATIVE], ids=["learned", "relative"])
def test_it_learns(form: dict[str, Any]) -> None:
    config = presets.t5_tiny().override(
        {"steps": 12, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, **form}
    )
    losses = pretrain(config).losses
    assert losses[0] == pytest.approx(np.log(1152), abs=0.1) and losses[-1] < losses[0] - 0.6


# ---- refusals ----


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cp": 2}, "parallel.cp = 2: ring attention has no padding mask"),
    ({"pp": 2, "vpp": 2}, "parallel.vpp = 2: an encoder-decoder is not interleaved"),
    ({"pp": 2}, "parallel.split_rank = None: with parallel.pp = 2 a T5 needs it"),
    ({"pp": 4, "split_rank": 3}, "model.layers = 2: must be a multiple of the encoder's ranks = 3"),
    ({"pp": 2, "split_rank": 1, "schedule.name": "zbv"}, "schedule.name = 'zbv': an encoder-decoder has one stage"),
    ({"num_experts": 4}, "moe.num_experts = 4: the layers of BERT and T5 are dense"),
    ({"cuda_graph_impl": "emulated"}, "graph.cuda_graph_impl = 'emulated': graphs of layers take no padding mask"),
    ({"optim.fp8": "hybrid"}, "optim.fp8 = 'hybrid': a T5 computes only in optim.precision"),
    ({"transformer_impl": "transformer_engine"}, "model.transformer_impl = 'transformer_engine': BERT and T5 run"),
    ({"kv_heads": 2}, "model.kv_heads = 2: a T5 has as many"),
    ({"position": "rope"}, "model.position = 'rope': a T5 has learned or relative positions"),
    ({"standalone_embedding_stage": True}, "both halves of a T5 embed tokens"),
    ({"decoder_seq_length": 65}, "model.decoder_seq_length = 65: must be at most model.seq_length = 64"),
    ({"decoder_seq_length": 9, "tp": 2, "sequence_parallel": True}, "must be a multiple of parallel.tp = 2 with"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_a_t5_does_not_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        presets.t5_tiny().override(changes).validate()
    assert message in str(caught.value)


def test_what_only_a_t5_has_is_refused_elsewhere() -> None:
    for name, value in {"decoder_layers": 2, "decoder_seq_length": 8}.items():
        with pytest.raises(ConfigError, match=rf"model\.{name} = {value}: has no effect .*as model\.family = t5 has"):
            RunConfig().override({name: value}).validate()
    for change in ({"position": "relative"}, {"activation": "geglu"}, {"activation": "relu"}):
        with pytest.raises(ConfigError, match="a T5 has"):
            RunConfig().override({f"model.{name}": value for name, value in change.items()}).validate()
