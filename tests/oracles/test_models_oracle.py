"""Our GPT against Hugging Face's GPT-2, Llama and Mixtral with the same weights: logits, loss and gradients; and
weights there and back, through the files of a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from labkit import plan
from labkit.config import MoEConfig, ParallelConfig, presets
from labkit.launch import run
from labkit.models import (
    GPTModel,
    full_state_from_hugging_face,
    full_state_to_hugging_face,
    gather_full_state,
    load_full_state,
    model_config_from_hugging_face,
    moe_config_from_hugging_face,
)
from labkit.models.hugging_face_config import FIELDS
from labkit.parallel import (
    NaiveDataParallel,
    finalize_model_grads,
    initialize_model_parallel,
    single_process_groups,
)

transformers = pytest.importorskip("transformers", reason="needs transformers")
StrictDataclassError = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
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
MIXTRAL: dict[str, Any] = LLAMA | {"num_local_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 3}


def hugging_face(kind: str, **options: Any) -> Any:
    """A small model with random weights, large enough that every term matters, and no dropout."""
    torch.manual_seed(3)
    if kind == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | drops | options))
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | options))
    else:
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL | options))
        model.set_experts_implementation("eager")  # its grouped product knows no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def ours_from(model: Any) -> GPTModel:
    """Our model with the same weights, by way of what a checkpoint folder holds: config.json and tensors."""
    read = json.loads(model.config.to_json_string(use_diff=False))
    config, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    groups = single_process_groups()
    dtype = next(model.parameters()).dtype
    ours = GPTModel(config, groups, layers=range(config.layers), moe=moe, seed=1, dtype=dtype)
    load_full_state([ours], full_state_from_hugging_face(config, model.state_dict(), moe), groups)
    return ours


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Mixtral", "Bert", "MegatronBert", "T5", "Mamba2"])
def test_a_key_that_config_json_leaves_out_has_the_value_that_transformers_gives_it(kind: str) -> None:
    """Files of older versions, and those that people write, have only what differs from the defaults. What has no
    default here is missed by name."""
    sizes = {"hidden_size": 768, "num_heads": 24} if kind == "Mamba2" else {}  # its own defaults contradict each other
    full = json.loads(getattr(transformers, f"{kind}Config")(**sizes).to_json_string(use_diff=False))
    expected, checked = model_config_from_hugging_face(full), 0
    of_heads = {"num_key_value_heads"} if kind == "Llama" else set()  # as many as the others
    kept = {name: full[name] for name in {*sizes, "model_type", *of_heads} & full.keys()}
    for key in full.keys() - kept:
        try:
            found = model_config_from_hugging_face({name: value for name, value in full.items() if name != key})
        except KeyError as missing:
            assert missing.args[0] == key
            kept[key] = full[key]
        else:
            assert found == expected, key
            checked += 1
    assert checked > 10 and model_config_from_hugging_face(kept) == expected


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Mixtral", "Bert", "MegatronBert", "T5", "Mamba2"])
@pytest.mark.parametrize("value", [None, 0, "", "4", True, []], ids=repr)
def test_a_value_that_transformers_refuses_is_refused_and_a_null_that_it_takes_is_its_default(
    kind: str, value: Any
) -> None:
    sizes = {"hidden_size": 768, "num_heads": 24} if kind == "Mamba2" else {}
    make = getattr(transformers, f"{kind}Config")
    full = json.loads(make(**sizes).to_json_string(use_diff=False))
    compared = 0
    for key in FIELDS.keys() & make.__dataclass_fields__.keys():
        try:
            taken = make(**sizes | {key: value})
        except (StrictDataclassError, ZeroDivisionError):
            with pytest.raises(ValueError, match=f"^{key} = "):
                model_config_from_hugging_face(full | {key: value})
            compared += 1
        else:
            if value is None:
                said = json.loads(taken.to_json_string(use_diff=False))
                ours, expected = (model_config_from_hugging_face(read) for read in (full | {key: None}, said))
                assert replace(ours, kv_heads=ours.kv_heads or ours.heads) == replace(
                    expected, kv_heads=expected.kv_heads or ours.heads
                ), key
    assert compared >= 2


CASES = [
    ("gpt2", {}),
    ("gpt2", {"activation_function": "gelu", "n_inner": 64, "layer_norm_epsilon": 0.1}),
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"num_key_value_heads": 2, "rope_theta": 500.0}),
    ("llama", {"num_key_value_heads": 3, "tie_word_embeddings": True, "rms_norm_eps": 0.1}),
    ("mixtral", {}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3}),
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


@pytest.mark.parametrize(("kind", "options"), [CASES[0], CASES[3], CASES[5]], ids=str)
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
    moe = moe_config_from_hugging_face(theirs.config.to_dict())
    full = full_state_from_hugging_face(ours.config, gradients, moe)  # type: ignore[arg-type]
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad[:99] if name in ("embedding.word.weight", "output.weight") else parameter.grad
        # Theirs keeps the rotary table in float32 even for a float64 model.
        torch.testing.assert_close(grad, full[name], rtol=1e-5, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def on_a_rank(read: dict[str, Any], state: dict[str, Tensor], tokens: Tensor) -> dict[str, Any]:
    """Of our model from their tensors over all ranks: loss, the gradients and the weights under their names."""
    config = replace(model_config_from_hugging_face(read), make_vocab_size_divisible_by=128)  # rank 0 has all tokens
    groups = initialize_model_parallel(ParallelConfig(tp=torch.distributed.get_world_size(), sequence_parallel=True))
    ours = GPTModel(config, groups, layers=range(config.layers), seed=1, dtype=torch.float64)
    load_full_state([ours], full_state_from_hugging_face(config, state), groups)
    wrapped = NaiveDataParallel(ours, groups.dp_cp)
    loss = wrapped(tokens[:, :-1], labels_BS=tokens[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([wrapped], groups)
    back = {
        name: tensor.clone()
        for name, tensor in full_state_to_hugging_face(config, gather_full_state([ours], groups)).items()
    }
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    gradients = full_state_to_hugging_face(config, gather_full_state([ours], groups))
    return {"loss": loss.item(), "weights": back, "gradients": gradients}


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(6, 1, 2), (8, 2, 4)])
def test_fewer_key_value_heads_than_ranks_train_as_hugging_face(heads: int, kv_heads: int, tp: int) -> None:
    theirs = hugging_face("llama", num_attention_heads=heads, num_key_value_heads=kv_heads).double()
    tokens = torch.randint(0, 99, (2, 33))
    logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    read, state = json.loads(theirs.config.to_json_string(use_diff=False)), theirs.state_dict()
    for found in run(on_a_rank, tp, read, state, tokens, device="cpu"):
        assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert all(torch.equal(found["weights"][name], weight) for name, weight in state.items())
        for name, parameter in theirs.named_parameters():
            # Theirs keeps the rotary table in float32 even for a float64 model.
            torch.testing.assert_close(
                found["gradients"][name], parameter.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"sliding_window": 16}, "sliding_window"),
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


@pytest.mark.parametrize(("kind", "options"), [CASES[1], CASES[3], CASES[4], CASES[5]], ids=str)
def test_hugging_face_reads_what_we_write_and_we_read_what_it_writes(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = hugging_face(kind, **options)
    config, moe = (
        model_config_from_hugging_face(theirs.config.to_dict()),
        moe_config_from_hugging_face(theirs.config.to_dict()),
    )
    groups = single_process_groups()
    ours = GPTModel(replace(config, init_std=0.2), groups, layers=range(config.layers), moe=moe, seed=7)
    full = gather_full_state([ours], groups)
    theirs.config.save_pretrained(tmp_path)
    safetensors.torch.save_file(
        full_state_to_hugging_face(config, full, moe), tmp_path / "model.safetensors", {"format": "pt"}
    )
    again = type(theirs).from_pretrained(tmp_path)
    tokens = torch.randint(0, 99, (2, 32))
    expected = again(tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours(tokens).transpose(0, 1)[..., :99], expected, rtol=1e-5, atol=1e-5)

    again.save_pretrained(tmp_path / "theirs")
    written = safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors")
    back = full_state_from_hugging_face(config, written, moe)
    assert back.keys() == full.keys()
    assert all(torch.equal(back[name], full[name]) for name in full)


def test_mixtral_8x7b_has_as_many_parameters_as_hugging_faces() -> None:
    """Whose MixtralConfig describes it by default; built without memory."""
    with torch.device("meta"):
        theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig())
    config = presets.mixtral_8x7b()
    assert plan.model_parameters(config.model, config.moe) == theirs.num_parameters() == 46_702_792_704
    read = theirs.config.to_dict()
    assert replace(model_config_from_hugging_face(read), seq_length=4096) == config.model
    assert moe_config_from_hugging_face(read) == replace(config.moe, aux_loss_coeff=0.0)


@pytest.mark.parametrize(
    ("model", "moe", "words"),
    [
        ({"position": "rope"}, {}, "neither a GPT-2 nor a Llama"),
        ({}, {"num_experts": 4}, "here it is a GPT-2"),
        (None, {"num_experts": 4, "layer_freq": (1, 0), "pre_softmax": True}, "moe.pre_softmax = True, moe.layer_freq"),
        (None, {"num_experts": 4, "shared_expert_ffn_hidden": 8}, "moe.shared_expert_ffn_hidden = 8"),
    ],
    ids=["mixed", "gpt2 with experts", "deepseek routing", "shared"],
)
def test_models_that_hugging_face_does_not_have_are_not_written(model: Any, moe: dict[str, Any], words: str) -> None:
    config = presets.llama_tiny().model if model is None else replace(presets.tiny().model, **model)
    with pytest.raises(ValueError, match=words):
        full_state_to_hugging_face(config, {}, MoEConfig(**moe))
