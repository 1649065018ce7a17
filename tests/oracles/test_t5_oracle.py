"""Our T5 against Hugging Face's `T5ForConditionalGeneration` with the same weights: logits, loss and gradients, on one
rank, tp 2 and pp 2 (`split_rank` 1); weights there and back. And against megatron-core's `T5Model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from their_weights import ours_from, read_of
from torch import Tensor

from labkit.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.launch import run
from labkit.models import (
    T5Model,
    build_model_chunks,
    config_to_hugging_face,
    full_state_from_hugging_face,
    full_state_to_hugging_face,
    gather_full_state,
    load_full_state,
    model_config_from_hugging_face,
)
from labkit.models.core_attention import CoreAttention
from labkit.models.t5.hugging_face_t5 import WORDS
from labkit.models.t5.t5_layers import relative_buckets
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.train.forward_step import t5_forward_step

transformers = pytest.importorskip("transformers", reason="needs transformers")
from transformers.models.t5.modeling_t5 import T5Attention, T5LayerNorm  # noqa: E402

pytestmark = pytest.mark.oracle

SHAPE: dict[str, Any] = {
    "num_layers": 2, "num_decoder_layers": 3, "d_model": 48, "d_kv": 12, "num_heads": 4, "d_ff": 80, "vocab_size": 99,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "dropout_rate": 0.0,
    "n_positions": 32, "decoder_start_token_id": 0,
}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {},
    {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 32, "layer_norm_epsilon": 0.1},
]


def hugging_face(**options: Any) -> Any:
    """A small model with random weights, large enough that every term matters; T5 1.1's output is no copy of words."""
    torch.manual_seed(3)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SHAPE | options)).double()
    if options.get("tie_word_embeddings") is False:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 1.0))
    for module in model.modules():
        if isinstance(module, T5LayerNorm):  # theirs takes the mean square in float32, whatever the model's type
            module.forward = partial(in_float64, module)
    return model.eval()


def in_float64(norm: Any, x: Tensor) -> Tensor:
    """T5's norm in the type of x."""
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def batch() -> dict[str, Tensor]:
    """Four samples; the texts of two end in padding, and the decoder's of one."""
    generator = torch.Generator().manual_seed(5)
    given = {"text_enc": torch.randint(1, 99, (4, 32), generator=generator)}
    given |= {name: torch.randint(1, 99, (4, 16), generator=generator) for name in ("text_dec", "labels")}
    given["enc_mask"] = torch.ones(4, 32, dtype=torch.int64)
    given["enc_mask"][1, 20:] = given["enc_mask"][2, 31:] = 0
    given["loss_mask"] = torch.ones(4, 16)
    given["loss_mask"][3, 9:] = 0
    return given


def their_output(model: Any, given: dict[str, Tensor]) -> Any:
    labels = given["labels"].masked_fill(given["loss_mask"] == 0, -100)
    inputs = {"input_ids": given["text_enc"], "attention_mask": given["enc_mask"]}
    return model(**inputs, decoder_input_ids=given["text_dec"], labels=labels)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_logits_loss_and_gradients_equal_hugging_face(options: dict[str, Any]) -> None:
    theirs, given = hugging_face(**options), batch()
    ours, expected = ours_from(theirs, T5Model, layers=5), their_output(theirs, given)
    logits = ours(given["text_enc"], given["text_dec"], given["enc_mask"])
    assert expected.logits.abs().max() > 1  # the weights are not so small that anything would agree
    torch.testing.assert_close(logits.transpose(0, 1)[..., :99], expected.logits, rtol=1e-9, atol=1e-9)
    expected.loss.backward()
    output, loss_of = t5_forward_step(iter([given]), ours)
    loss_sum, tokens, _ = loss_of(output)
    (loss_sum / tokens).backward()
    torch.testing.assert_close(loss_sum / tokens, expected.loss, rtol=1e-12, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    full = full_state_from_hugging_face(ours.config, gradients)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad[:99] if name in ("embedding.word.weight", "output.weight") else parameter.grad
        torch.testing.assert_close(grad, full[name], rtol=1e-8, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("backend", ["fused", "unfused"])
def test_both_kernels_give_their_logits(backend: str) -> None:
    theirs, given = hugging_face(), batch()
    ours = ours_from(theirs, T5Model, layers=5)
    for module in ours.modules():
        if isinstance(module, CoreAttention):
            module.backend = backend
    with torch.no_grad():
        logits = ours(given["text_enc"], given["text_dec"], given["enc_mask"])
    expected = their_output(theirs, given).logits
    torch.testing.assert_close(logits.transpose(0, 1)[..., :99], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (9, 9), (4, 4)])
def test_buckets_are_theirs(both_ways: bool, buckets: int, most: int) -> None:
    ahead = torch.arange(300)[None, :] - torch.arange(200)[:, None]
    expected = T5Attention._relative_position_bucket(ahead, both_ways, buckets, most)
    assert torch.equal(relative_buckets(200, 300, both_ways=both_ways, buckets=buckets, max_distance=most), expected)


def on_a_rank(read: dict[str, Any], state: dict[str, Tensor], given: dict[str, Tensor], layout: dict[str, Any]) -> Any:
    """Of our model from their tensors over all ranks: logits of the last stage, and the weights of this stage."""
    from labkit.schedules import PipelineRuntime, one_f_one_b
    from labkit.train.pipeline import shapes_between_stages

    model = replace(model_config_from_hugging_face(read), decoder_seq_length=16)
    config = RunConfig(model=model, parallel=ParallelConfig(**layout), train=TrainConfig(micro_batch_size=4))
    config = config.override({"precision": "fp64", "global_batch_size": 4})
    groups = initialize_model_parallel(config.parallel)
    (chunk,) = chunks = build_model_chunks(config, groups)
    load_full_state(chunks, full_state_from_hugging_face(model, state), groups)

    def forward_step(iterator: Any, model: Any) -> Any:
        one = next(iterator)
        output = model(one["text_enc"], one["text_dec"], one["enc_mask"])
        return output, lambda made, non_loss_data: made

    runtime = PipelineRuntime(
        one_f_one_b(groups.pp.size, 1), [chunk], groups, forward_step_func=forward_step, dtype=torch.float64,
        tensor_shape=shapes_between_stages(config),
    )  # fmt: skip
    made = runtime.run([iter([given])], forward_only=True, collect_non_loss_data=True)
    return [x.detach() for x in made], full_state_to_hugging_face(model, gather_full_state(chunks, groups))


LAYOUTS = [{"tp": 2, "sequence_parallel": True}, {"pp": 2, "split_rank": 1}, {"tp": 2, "pp": 2, "split_rank": 1}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_give_their_logits_and_their_weights_back(layout: dict[str, Any]) -> None:
    theirs, given = hugging_face(), batch()
    expected, state = their_output(theirs, given).logits, theirs.state_dict()
    ranks = run(on_a_rank, layout.get("tp", 1) * layout.get("pp", 1), read_of(theirs), state, given, layout)
    last = [made for made, _ in ranks if made]
    logits = torch.cat([logits for (logits,) in last], dim=-1).transpose(0, 1)[..., :99]
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    back: dict[str, Tensor] = {}
    for _, weights in ranks:
        back |= weights
    assert set(back) == set(state) - {*WORDS, "lm_head.weight"}
    assert all(torch.equal(back[name], state[name]) for name in back)


@pytest.mark.parametrize("options", CASES[:2], ids=str)
def test_files_of_a_checkpoint_there_and_back(options: dict[str, Any], there_and_back: Callable[[Any], Any]) -> None:
    theirs = hugging_face(**options).float()
    again = there_and_back(theirs)
    assert torch.equal(their_output(theirs, batch()).logits, their_output(again, batch()).logits)


def test_options_without_counterpart_and_forms_they_have_no_class_for_are_refused() -> None:
    read = {"model_type": "t5", **SHAPE}
    for change in ({"feed_forward_proj": "gated-relu"}, {"d_kv": 16}):
        ((name, value),) = change.items()
        with pytest.raises(ValueError, match=f"{name} = {value!r} has no counterpart"):
            model_config_from_hugging_face(read | change)
    config = model_config_from_hugging_face(read)
    assert config_to_hugging_face(config)["architectures"] == ["T5ForConditionalGeneration"]
    for change in ({"position": "learned"}, {"norm": "layernorm"}, {"bias": True}):
        with pytest.raises(ValueError, match=rf"model\.{next(iter(change))}"):
            config_to_hugging_face(replace(config, **change))


# ---- megatron-core's T5 ----


THEIR_PARTS = {
    "input_layernorm": "attention.norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.proj",
    "pre_cross_attn_layernorm": "cross_attention.norm",
    "cross_attention.linear_q": "cross_attention.q",
    "cross_attention.linear_kv": "cross_attention.kv",
    "cross_attention.linear_proj": "cross_attention.proj",
    "pre_mlp_layernorm": "mlp.norm",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "final_layernorm": "final_norm",
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "lm_head.output_layer.bias": "output_bias",
}
"""Part of megatron-core's name -> ours; no name has two of them."""


def beside_megatron(config: ModelConfig) -> dict[str, float]:
    """Relative differences of the loss and of each gradient between their T5 and ours with the same weights."""
    import megatron_peer

    mcore = megatron_peer.load()
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model as TheirT5
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as Block

    mcore.parallel_state.initialize_model_parallel(1, 1)
    groups = single_process_groups()
    ours = T5Model(config, groups, layers=range(5), seed=1)
    encoder, decoder = (
        megatron_peer.transformer_config(mcore, RunConfig(model=replace(config, layers=n))) for n in (2, 3)
    )
    specs = (t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec())
    blocks = [Block([spec] * n, layer_norm=t5_spec.LNImpl) for spec, n in zip(specs, (2, 3))]
    vocabulary = ours.padded_vocab
    theirs = TheirT5(decoder, encoder, *blocks, vocabulary, 32, share_embeddings_and_output_weights=True)
    own, names = {p.full_name: p for p in ours.parameters()}, {}  # type: ignore[attr-defined]
    for name, parameter in theirs.named_parameters():
        (part,) = [part for part in THEIR_PARTS if part in name]
        names[name] = name.replace(part, THEIR_PARTS[part])
        parameter.data.copy_(own[names[name]])
    assert sorted(names.values()) == sorted(own)
    given = batch()
    hidden = given["enc_mask"][:, None, None, :] == 0
    later = torch.ones(16, 16).triu(1).bool()[None, None]
    masks = hidden.expand(-1, -1, 32, -1), later, hidden.expand(-1, -1, 16, -1)
    counted = given["loss_mask"]
    expected = (theirs(given["text_enc"], given["text_dec"], *masks, lm_labels=given["labels"]) * counted).sum()
    output, loss_of = t5_forward_step(iter([given]), ours)
    loss_sum, _, _ = loss_of(output)
    expected.backward()
    loss_sum.backward()
    found = {"loss": (loss_sum - expected).abs().item() / expected.item()}
    for name, parameter in theirs.named_parameters():
        grad = own[names[name]].grad
        assert grad is not None, names[name]
        found[name] = ((grad - parameter.grad).norm() / parameter.grad.norm()).item()
    return found


def test_loss_and_gradients_equal_megatron_core() -> None:
    """In their form, float32. The padded columns of the vocabulary are tokens there, so there are none."""
    config = ModelConfig(
        family="t5", layers=2, decoder_layers=3, hidden=48, heads=4, vocab_size=128, seq_length=32,
        decoder_seq_length=16, activation="gelu", init_std=0.2,
    )  # fmt: skip
    [found] = run(beside_megatron, 1, config, timeout=120)
    assert len(found) > 60 and found["loss"] < 1e-6
    assert max(found.values()) < 1e-5, found
