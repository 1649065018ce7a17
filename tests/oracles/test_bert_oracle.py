"""Our BERT against Hugging Face's with the same weights, in both layouts of its norms: `BertForPreTraining` (post) and
`MegatronBertForPreTraining` (pre). Logits, loss and gradients, on one rank, tp 2 and pp 2; weights there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from their_weights import ours_from, read_of
from torch import Tensor

from labkit.config import ParallelConfig, RunConfig, TrainConfig
from labkit.launch import run
from labkit.models import (
    BertModel,
    build_model_chunks,
    config_to_hugging_face,
    full_state_from_hugging_face,
    full_state_to_hugging_face,
    gather_full_state,
    load_full_state,
    model_config_from_hugging_face,
)
from labkit.models.bert.hugging_face_bert import DECODER
from labkit.parallel import initialize_model_parallel
from labkit.train.bert_step import bert_forward_step

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.oracle

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 32, "vocab_size": 99, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", ["bert", "megatron-bert"])
CASES = [
    ("bert", {}),
    ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
    ("bert", {"tie_word_embeddings": False}),
    ("megatron-bert", {}),
    ("megatron-bert", {"layer_norm_eps": 0.1}),
]


def hugging_face(kind: str, **options: Any) -> Any:
    """A small model with random weights, large enough that every term matters."""
    torch.manual_seed(3)
    classes = {
        "bert": (transformers.BertForPreTraining, transformers.BertConfig),
        "megatron-bert": (transformers.MegatronBertForPreTraining, transformers.MegatronBertConfig),
    }
    model_class, config_class = classes[kind]
    model = model_class(config_class(**SHAPE | options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def batch() -> dict[str, Tensor]:
    """Four samples of 32; two of them end in padding. Without the id 0, whose embedding theirs never trains."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(1, 99, (4, 32), generator=generator) for _ in range(2))
    padding = torch.ones(4, 32, dtype=torch.int64)
    padding[1, 20:] = padding[2, 31:] = 0
    return {
        "tokens_BS": tokens,
        "types_BS": (torch.arange(32) > 12).long().expand(4, 32).contiguous(),
        "labels_BS": labels,
        "loss_mask_BS": (torch.rand(4, 32, generator=generator) < 0.15) * padding.float(),
        "padding_mask_BS": padding,
        "is_random_B": torch.tensor([0, 1, 1, 0]),
    }


def their_inputs(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "input_ids": given["tokens_BS"],
        "token_type_ids": given["types_BS"],
        "attention_mask": given["padding_mask_BS"],
    }


def their_loss(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Their own loss: -100 marks positions that are not predicted."""
    labels = given["labels_BS"].masked_fill(given["loss_mask_BS"] == 0, -100)
    if model.config.model_type == "bert":
        return model(**their_inputs(given), labels=labels, next_sentence_label=given["is_random_B"]).loss  # type: ignore[no-any-return]
    out = model(**their_inputs(given))
    words = torch.nn.functional.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    return words + torch.nn.functional.cross_entropy(out.seq_relationship_logits, given["is_random_B"])


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_logits_equal_hugging_face(kind: str, options: dict[str, Any]) -> None:
    theirs, given = hugging_face(kind, **options), batch()
    expected = theirs(**their_inputs(given))
    logits, order = ours_from(theirs, BertModel)(given["tokens_BS"], given["types_BS"], given["padding_mask_BS"])
    assert expected.prediction_logits.abs().max() > 1  # the weights are not so small that anything would agree
    real = given["padding_mask_BS"].bool()
    found = logits.transpose(0, 1)[..., :99]
    torch.testing.assert_close(found[real], expected.prediction_logits[real], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(order, expected.seq_relationship_logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_loss_and_gradients_equal_hugging_face(kind: str, options: dict[str, Any]) -> None:
    theirs, given = hugging_face(kind, **options), batch()
    ours = ours_from(theirs, BertModel)
    expected = their_loss(theirs, given)
    expected.backward()
    output, loss_of = bert_forward_step(iter([given]), ours)
    loss, _ = loss_of(output)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    full = full_state_from_hugging_face(ours.config, gradients)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        grad = (
            parameter.grad[:99]
            if name in ("embedding.word.weight", "output.weight", "lm_head.bias")
            else parameter.grad
        )
        torch.testing.assert_close(grad, full[name], rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def on_a_rank(read: dict[str, Any], state: dict[str, Tensor], given: dict[str, Tensor], layout: dict[str, Any]) -> Any:
    """Of our model from their tensors over all ranks: what the last stage makes, and the weights of this stage."""
    from labkit.schedules import PipelineRuntime, one_f_one_b

    model, parallel = model_config_from_hugging_face(read), ParallelConfig(**layout)
    config = RunConfig(model=model, parallel=parallel, train=TrainConfig(global_batch_size=1)).override(
        {"precision": "fp64"}
    )
    groups = initialize_model_parallel(parallel)
    (chunk,) = chunks = build_model_chunks(config, groups)
    load_full_state(chunks, full_state_from_hugging_face(model, state), groups)

    def forward_step(iterator: Any, model: Any) -> Any:
        one = next(iterator)
        output = model(one["tokens_BS"], one["types_BS"], one["padding_mask_BS"])
        return output, lambda made, non_loss_data: made

    length = 32 // (groups.tp.size if parallel.sequence_parallel else 1)
    runtime = PipelineRuntime(
        one_f_one_b(groups.pp.size, 1), [chunk], groups, forward_step_func=forward_step, dtype=torch.float64,
        tensor_shape=(length, 4, model.hidden),
    )  # fmt: skip
    made = runtime.run([iter([given])], forward_only=True, collect_non_loss_data=True)
    made = [] if not made else [x.detach() for x in made[0]]
    return made, full_state_to_hugging_face(model, gather_full_state(chunks, groups))


LAYOUTS = [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"tp": 2, "pp": 2}]


@KINDS
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_give_their_logits_and_their_weights_back(kind: str, layout: dict[str, Any]) -> None:
    theirs, given = hugging_face(kind), batch()
    expected, state = theirs(**their_inputs(given)), theirs.state_dict()
    ranks = run(on_a_rank, layout.get("tp", 1) * layout.get("pp", 1), read_of(theirs), state, given, layout)
    last = [made for made, _ in ranks if made]
    logits = torch.cat([logits for logits, _ in last], dim=-1).transpose(0, 1)[..., :99]
    real = given["padding_mask_BS"].bool()
    torch.testing.assert_close(logits[real], expected.prediction_logits[real], rtol=1e-9, atol=1e-9)
    for _, order in last:
        torch.testing.assert_close(order, expected.seq_relationship_logits, rtol=1e-9, atol=1e-9)
    back: dict[str, Tensor] = {}
    for _, weights in ranks:
        back |= weights
    assert set(back) == set(state) - set(DECODER)
    assert all(torch.equal(back[name], state[name]) for name in back)


@KINDS
def test_files_of_a_checkpoint_there_and_back(kind: str, there_and_back: Callable[[Any], Any]) -> None:
    theirs = hugging_face(kind).float()
    again = there_and_back(theirs)
    assert not again.config.is_decoder
    given = their_inputs(batch())
    assert torch.equal(theirs(**given).prediction_logits, again(**given).prediction_logits)


def test_the_oldest_files_call_a_norms_weight_gamma() -> None:
    theirs = hugging_face("bert")
    state = theirs.state_dict()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
    } | {"bert.embeddings.position_ids": torch.arange(32)[None]}
    config = model_config_from_hugging_face(read_of(theirs))
    new, read = full_state_from_hugging_face(config, state), full_state_from_hugging_face(config, old)
    assert new.keys() == read.keys() and all(torch.equal(new[name], read[name]) for name in new)
    assert "bert.embeddings.LayerNorm.gamma" in old


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type_vocab_size": 3}, "type_vocab_size = 3 has no counterpart"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' has no counterpart"),
        ({"is_decoder": True}, "is_decoder = True has no counterpart"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' has no counterpart"),
    ],
)
def test_options_without_counterpart_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config_from_hugging_face({"model_type": "bert", **SHAPE, **change})


def test_a_model_that_they_have_no_class_for_is_refused() -> None:
    config = model_config_from_hugging_face({"model_type": "bert", **SHAPE})
    assert config_to_hugging_face(config)["architectures"] == ["BertForPreTraining"]
    for change in ({"bert_binary_head": False}, {"position": "rope"}, {"norm": "rmsnorm"}, {"kv_heads": 2}):
        (name,) = change
        with pytest.raises(ValueError, match=rf"model\.{name}"):
            config_to_hugging_face(replace(config, **change))


def test_a_missing_tensor_is_named() -> None:
    theirs = hugging_face("bert")
    config, state = model_config_from_hugging_face(read_of(theirs)), dict(theirs.state_dict())
    del state["cls.seq_relationship.weight"]
    with pytest.raises(ValueError, match=r"no tensor 'cls\.seq_relationship\.weight'"):
        full_state_from_hugging_face(config, state)
