"""Our Mamba-2 against Hugging Face's slow forward with the same weights: logits, loss and gradients in float64; weights
there and back.

Theirs computes the scan and the norms in float32, whatever the type of the weights. The fixture `double` has `float()`
and `torch.float32` mean float64 inside their module, so that rounding does not hide a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from their_weights import ours_from
from torch import Tensor

from labkit.models import (
    config_to_hugging_face,
    full_state_from_hugging_face,
    full_state_to_hugging_face,
    gather_full_state,
    model_config_from_hugging_face,
)
from labkit.models.mamba.mamba_model import MambaModel
from labkit.parallel import single_process_groups

transformers = pytest.importorskip("transformers", reason="needs transformers")
from transformers.models.mamba2 import modeling_mamba2 as modeling  # noqa: E402

pytestmark = pytest.mark.oracle

SHAPE: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "state_size": 6,
    "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "expand": 2, "residual_in_fp32": False, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group, tied, biases": {"n_groups": 1, "tie_word_embeddings": True, "use_bias": True, "conv_kernel": 3},
    "norms whose eps counts": {"layer_norm_epsilon": 0.1},
}


class _Wide:
    """torch, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling, "torch", _Wide())
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def hugging_face(**options: Any) -> Any:
    """Theirs with random weights; norms and rates away from their first values."""
    torch.manual_seed(1)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**SHAPE | options)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_hugging_face(case: str, double: None) -> None:
    """Of 150 tokens: two of our chunks of 128, ten of theirs of 16."""
    theirs = hugging_face(**CASES[case])
    ours = ours_from(theirs, MambaModel)
    tokens, labels = torch.randint(0, 99, (2, 2, 150), generator=torch.Generator().manual_seed(5))
    expected = theirs(input_ids=tokens, use_cache=False).logits
    assert expected.dtype == torch.float64 and expected.abs().max() > 1
    torch.testing.assert_close(ours(tokens).transpose(0, 1)[..., :99], expected, rtol=1e-9, atol=1e-9)
    their_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    their_loss.backward()
    loss = ours(tokens, labels_BS=labels).mean()
    loss.backward()
    torch.testing.assert_close(loss, their_loss, rtol=1e-12, atol=0)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    full = full_state_from_hugging_face(ours.config, gradients)
    assert set(full) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and full[name].abs().max() > 0, name
        grad = parameter.grad[:99] if name in ("embedding.word.weight", "output.weight") else parameter.grad
        torch.testing.assert_close(grad, full[name], rtol=1e-8, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_weights_there_and_back(case: str) -> None:
    theirs = hugging_face(**CASES[case])
    ours, state = ours_from(theirs, MambaModel), theirs.state_dict()
    back = full_state_to_hugging_face(ours.config, gather_full_state([ours], single_process_groups()))
    tied = {"lm_head.weight"} if theirs.config.tie_word_embeddings else set()
    assert set(back) == set(state) - tied
    assert all(torch.equal(back[name], state[name]) for name in back)


def test_files_of_a_checkpoint_there_and_back(there_and_back: Callable[[Any], Any]) -> None:
    theirs = hugging_face(chunk_size=128).float()
    again = there_and_back(theirs)
    tokens = torch.randint(0, 99, (2, 20))
    assert torch.equal(theirs(tokens).logits, again(tokens).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu' has no counterpart"),
        ({"use_conv_bias": False}, "use_conv_bias = False has no counterpart"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\] has no counterpart"),
    ],
)
def test_options_without_counterpart_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config_from_hugging_face({"model_type": "mamba2", **SHAPE, **change})


def test_a_model_that_they_have_no_class_for_is_refused() -> None:
    config = model_config_from_hugging_face({"model_type": "mamba2", **SHAPE})
    assert config_to_hugging_face(config)["architectures"] == ["Mamba2ForCausalLM"]
    changes: tuple[dict[str, Any], ...] = (
        {"hybrid_override_pattern": "M*-"},
        {"position": "rope"},
        {"norm": "layernorm"},
    )
    for change in changes:
        (name,) = change
        with pytest.raises(ValueError, match=rf"model\.{name}"):
            config_to_hugging_face(replace(config, **change))
    with pytest.raises(ValueError, match=r"a multiple of model\.hidden = 32"):
        config_to_hugging_face(replace(config, mamba_num_heads=6))
