"""Our checkpoints in transformers, and its models in our runs: the same logits, loss and bits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from labkit.cli import main
from labkit.config import RunConfig, presets
from labkit.data import build_gpt_datasets
from labkit.launch import info, run
from labkit.models import GPTModel
from labkit.parallel import single_process_groups
from labkit.train import pretrain
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.loss_scaler import build_loss_scaler
from labkit.train.pretraining import initialize, setup_model_and_optimizer

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.oracle

SMALL = {
    "hidden": 48, "heads": 6, "layers": 4, "seq_length": 16, "init_std": 0.2, "global_batch_size": 8, "steps": 2,
    "eval_steps": 0, "optim.lr": 1e-2, "make_vocab_size_divisible_by": 100,
}  # fmt: skip
LLAMA = presets.llama_tiny().override(SMALL | {"kv_heads": 2, "model.ffn_hidden": 80, "rope_theta": 5e3})
MIXTRAL = presets.mixtral_tiny().override(SMALL | {"kv_heads": 2, "num_experts": 4, "moe.ffn_hidden": 40})
TRAINED = {
    "gpt2 under tp2 pp2": presets.tiny().override(SMALL | {"tp": 2, "pp": 2}),
    "gpt2 with an output of its own, distributed optimizer": presets.tiny().override(
        SMALL | {"untie_embeddings_and_output_weights": True, "activation": "gelu", "distributed_optimizer": True}
    ),
    "llama under tp2 pp2": LLAMA.override({"tp": 2, "pp": 2}),
    "llama with a tied output under pp4": LLAMA.override({"pp": 4, "untie_embeddings_and_output_weights": False}),
    "mixtral under ep2 tp2": MIXTRAL.override({"ep": 2, "tp": 2, "etp": 1, "sequence_parallel": True}),
    "mixtral under ep2 pp2, bf16": MIXTRAL.override({"ep": 2, "pp": 2, "optim.precision": "bf16"}),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_layer": 2, "n_embd": 48, "n_head": 4, "n_positions": 16}),
    "llama": ("Llama", {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "llama, tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
PLAIN = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40,
         "max_position_embeddings": 16}  # fmt: skip


def loaded(config: RunConfig, folder: Path) -> GPTModel:
    """Our model in one process, from a checkpoint of any layout, as a resuming run loads it; without dropout."""
    one = RunConfig(model=config.model, moe=config.moe, train=config.train).override({"checkpoint.load": str(folder)})
    begun = initialize(one)
    chunks, optimizer, _ = setup_model_and_optimizer(begun)
    Checkpoints(one, begun.groups, chunks, optimizer, say=info.announce).load(build_loss_scaler(one.optim))
    (chunk,) = chunks
    assert isinstance(chunk.module, GPTModel)
    return chunk.module


def theirs_from(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def compare_logits(ours: GPTModel, theirs: Any) -> None:
    """In float64: in float32 the rounding of large weights differs by 1.6e-5 on some processors."""
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, 1024, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = copy.deepcopy(theirs).double()
        theirs.config._experts_implementation = "eager"  # its grouped product knows no float64
        expected = theirs(tokens).logits
        got = copy.deepcopy(ours).double()(tokens).transpose(0, 1)[..., : expected.shape[-1]]
    assert expected.std() > 0.5
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_transformers_loads_what_a_run_saved(name: str, tmp_path: Path) -> None:
    config = TRAINED[name]
    saved = config.override({"checkpoint.dir": str(tmp_path / "run")})
    losses = run(pretrain, 4, saved, device="cpu")[0].losses
    assert len(losses) == 2
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    theirs = theirs_from(tmp_path / "hf")
    assert type(theirs).__name__ == json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"][0]
    compare_logits(loaded(config, tmp_path / "run"), theirs)
    fresh = GPTModel(config.model, single_process_groups(), layers=range(4), moe=config.moe, seed=config.train.seed)
    with pytest.raises(AssertionError, match="not close"):  # two steps have changed the weights
        compare_logits(fresh, theirs)


def batch(config: RunConfig) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the first step."""
    training, _, _ = build_gpt_datasets(config)
    rows = np.stack([training.ordered(i) for i in range(config.train.global_batch_size)])
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


EVERY_DAY = {("gpt2", None), ("llama, tied", None), ("mixtral", "30KB")}


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        pytest.param(name, shard, marks=[] if (name, shard) in EVERY_DAY else pytest.mark.sweep)
        for name in MODELS
        for shard in (None, "30KB")
    ],
)
def test_a_run_begins_with_a_model_of_transformers(
    name: str, shard: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, options = MODELS[name]
    options = {"vocab_size": 1024, "initializer_range": 0.2} | (options if kind == "GPT2" else PLAIN | options)
    torch.manual_seed(3)
    made = getattr(transformers, f"{kind}Config")(**options)
    theirs = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(made).eval()
    theirs.save_pretrained(tmp_path / "theirs", **({} if shard is None else {"max_shard_size": shard}))
    files = sorted((tmp_path / "theirs").glob("*.safetensors"))
    assert (len(files) > 2) == (shard is not None)

    capsys.readouterr()
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    (tmp_path / "model.yaml").write_text(capsys.readouterr().out)
    config = RunConfig.from_yaml(tmp_path / "model.yaml").override(
        {"steps": 1, "eval_steps": 0, "global_batch_size": 4}
    )
    compare_logits(loaded(config, tmp_path / "ours"), theirs)

    assert main(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back.safetensors")]) == 0
    back = load_file(tmp_path / "back.safetensors")
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert back.keys() == written.keys()
    assert all(back[name].dtype == written[name].dtype and torch.equal(back[name], written[name]) for name in back)

    layout = {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True} if kind == "Mixtral" else {"tp": 2, "pp": 2}
    start = config.override(layout | {"checkpoint.load": str(tmp_path / "ours")})
    tokens, labels = batch(config)
    with torch.no_grad():
        logits = theirs(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    for result in run(pretrain, 4, start, device="cpu"):
        assert result.resumed_after == 0 and result.losses == [pytest.approx(expected, rel=1e-5)]
