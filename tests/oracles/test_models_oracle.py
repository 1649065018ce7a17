"""Our GPT against Hugging Face's GPT-2 and Llama with the same random weights: logits, loss and gradients."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from labkit.models.convert import full_state_from_hugging_face, load_full_state, model_config_from_hugging_face
from labkit.models.gpt import GPTModel
from labkit.parallel import single_process_groups

transformers = pytest.importorskip("transformers", reason="the Hugging Face oracle needs transformers")
pytestmark = pytest.mark.oracle

GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 48, "n_head": 4, "n_positions": 32, "vocab_size": 99}
LLAMA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "max_position_embeddings": 32,
    "vocab_size": 99,
}


def hugging_face(kind: str, **options: Any) -> Any:
    """A small model with random weights, large enough that every term matters, and no dropout."""
    torch.manual_seed(3)
    if kind == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | drops | options))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def ours_from(model: Any) -> GPTModel:
    """Our model with the same weights, by way of what a checkpoint folder holds: config.json and tensors."""
    config = model_config_from_hugging_face(json.loads(model.config.to_json_string(use_diff=False)))
    groups = single_process_groups()
    dtype = next(model.parameters()).dtype
    ours = GPTModel(config, groups, layers=range(config.layers), seed=1, dtype=dtype)
    load_full_state([ours], full_state_from_hugging_face(config, model.state_dict()), groups.tp)
    return ours


CASES = [
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu", "n_inner": 64}),
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"num_key_value_heads": 2, "rope_theta": 500.0}),
    ("llama", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_logits_equal_hugging_face(kind: str, options: dict[str, Any]) -> None:
    theirs = hugging_face(kind, **options)
    ours = ours_from(theirs)
    tokens = torch.randint(0, 99, (2, 32))
    expected = theirs(tokens).logits
    got = ours(tokens).transpose(0, 1)[..., :99]
    assert expected.abs().max() > 1  # the weights are not so small that anything would agree
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "options"), [CASES[0], CASES[3]], ids=str)
def test_loss_and_gradients_equal_hugging_face(kind: str, options: dict[str, Any]) -> None:
    theirs = hugging_face(kind, **options).double()
    ours = ours_from(theirs)
    tokens = torch.randint(0, 99, (2, 33))
    logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    loss = ours(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    # Gradients pass through the same renaming as weights, which is linear.
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    if kind == "gpt2":
        gradients["lm_head.weight"] = gradients["transformer.wte.weight"]
    full = full_state_from_hugging_face(ours.config, gradients)  # type: ignore[arg-type]
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad[:99] if name in ("embedding.word.weight", "output.weight") else parameter.grad
        # Theirs keeps the rotary table in float32 even for a float64 model.
        torch.testing.assert_close(grad, full[name], rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_without_a_counterpart_are_refused(kind: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        ours_from(hugging_face(kind, **options))


def test_a_tensor_without_a_place_is_refused() -> None:
    theirs = hugging_face("gpt2")
    config = model_config_from_hugging_face(theirs.config.to_dict() | {"n_layer": 2})
    with pytest.raises(ValueError, match=r"no place for the tensors h\.2\."):
        full_state_from_hugging_face(config, theirs.state_dict())
    config = model_config_from_hugging_face(theirs.config.to_dict() | {"n_layer": 4})
    with pytest.raises(ValueError, match=r"no tensor 'h\.3\."):
        full_state_from_hugging_face(config, theirs.state_dict())
