"""Import and export of weights, without transformers: the same bits there and back, memory, refusals.

tests/oracles/test_checkpoint_oracle.py has the other half: what transformers computes from the same files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from labkit.cli import main
from labkit.config import MoEConfig, RunConfig, presets
from labkit.models import (
    GPTModel,
    config_to_hugging_face,
    full_state_to_hugging_face,
    model_config_from_hugging_face,
    moe_config_from_hugging_face,
)
from labkit.models.full_shapes import full_shapes
from labkit.parallel import record_of, single_process_groups
from labkit.parallel.parameters.parameter_record import name_of
from labkit.train import pretrain
from labkit.train.checkpoint import exchange
from labkit.train.checkpoint.exchange import Import, import_weights
from labkit.train.checkpoint.manifest import read_manifest, write_manifest
from labkit.train.run_folder.lock import locked

SMALL = {"hidden": 32, "heads": 4, "layers": 3, "seq_length": 16, "vocab_size": 99}
GPT2 = presets.tiny().override(SMALL)
LLAMA = presets.llama_tiny().override(SMALL | {"kv_heads": 2, "model.ffn_hidden": 48})
MODELS = {
    "gpt2": GPT2,
    "gpt2, untied": GPT2.override({"untie_embeddings_and_output_weights": True, "activation": "gelu"}),
    "llama": LLAMA.override({"untie_embeddings_and_output_weights": True, "rope_theta": 5e5}),
    "llama, tied": LLAMA.override({"untie_embeddings_and_output_weights": False, "kv_heads": 4}),
    "mixtral": presets.mixtral_tiny().override(SMALL | {"num_experts": 3, "moe.ffn_hidden": 24, "top_k": 2}),
}


def weights(config: RunConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A random whole model under Hugging Face's names."""
    generator = torch.Generator().manual_seed(5)
    shapes = full_shapes(config.model, config.moe)
    ours = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return full_state_to_hugging_face(config.model, ours, config.moe)


def write_model(folder: Path, config: RunConfig, state: dict[str, Tensor], *, files: int = 1) -> Path:
    """A folder as transformers has it; with several files, their index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hugging_face(config.model, config.moe)))
    if files == 1:
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder
    place = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(state)}
    for file in set(place.values()):
        save_file({name: state[name] for name in state if place[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_of_the_whole_model_are_those_of_the_built_one(name: str) -> None:
    config = MODELS[name]
    built = GPTModel(config.model, single_process_groups(), layers=range(3), moe=config.moe, seed=1)
    shapes = {name_of(p): record_of(p).full_shape for p in built.parameters()}
    assert full_shapes(config.model, config.moe) == shapes


@pytest.mark.parametrize("name", MODELS)
def test_a_config_json_describes_the_model(name: str) -> None:
    config = MODELS[name]
    read = json.loads(json.dumps(config_to_hugging_face(config.model, config.moe)))
    model, moe = model_config_from_hugging_face(read), moe_config_from_hugging_face(read)
    assert full_shapes(model, moe) == full_shapes(config.model, config.moe)
    kept = ("rope_theta", "activation", "norm_eps", "heads", "layers", "untie_embeddings_and_output_weights")
    assert [getattr(model, field) for field in kept] == [getattr(config.model, field) for field in kept]
    assert (moe.num_experts, moe.top_k) == (config.moe.num_experts, config.moe.top_k)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "files"), [(torch.float32, 1), (torch.bfloat16, 3)], ids=["fp32", "bf16, 3 files"])
def test_an_imported_model_is_exported_bit_for_bit(
    name: str, dtype: torch.dtype, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = weights(MODELS[name], dtype)
    source = write_model(tmp_path / "theirs", MODELS[name], state, files=files)
    monkeypatch.setattr(exchange, "LARGEST_FILE", 20_000)
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "ours")]) == 0
    sizes = [path.stat().st_size for path in (tmp_path / "ours" / "step_00000000").glob("weights_*.safetensors")]
    assert len(sizes) > 1 and sum(sizes) > sum(tensor.nbytes for tensor in state.values())
    assert main(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert same(load_file(tmp_path / "back" / "model.safetensors"), state)
    word = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == word


def test_widths_in_one_model_may_differ(tmp_path: Path) -> None:
    """A norm of 6 bf16 elements has 12 bytes, so the order decides if the float64 routers lie at multiples of 8."""
    config = MODELS["mixtral"].override({"hidden": 6, "heads": 1, "kv_heads": 1, "vocab_size": 97, "moe.ffn_hidden": 5})
    config = config.override({"untie_embeddings_and_output_weights": False})
    state = {n: t.double() if ".gate." in n else t.bfloat16() for n, t in weights(config).items()}
    source = write_model(tmp_path / "theirs", config, state)
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back.safetensors")]) == 0
    assert same(load_file(tmp_path / "back.safetensors"), state)
    for file in (tmp_path / "back.safetensors", tmp_path / "ours" / "step_00000000" / "weights_00000.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        routers = [entry["data_offsets"][0] for entry in header.values() if entry["dtype"] == "F64"]
        assert len(routers) == 3 and all(start % 8 == 0 for start in routers)


def test_names_without_prefix_and_masks_of_old_files_are_read(tmp_path: Path) -> None:
    """As in the first GPT-2 of Hugging Face's hub."""
    state = weights(GPT2)
    old = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8) for i in range(3)}
    source = write_model(tmp_path / "theirs", GPT2, old)
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source / "model.safetensors")]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert same(load_file(tmp_path / "back" / "model.safetensors"), state)


def test_a_run_begins_with_imported_weights_and_refuses_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LLAMA.override({"vocab_size": 1024, "global_batch_size": 2, "steps": 1, "eval_steps": 0, "kv_heads": 4})
    source = write_model(tmp_path / "theirs", config, weights(config))
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 0
    pasted = tmp_path / "model.yaml"
    pasted.write_text(capsys.readouterr().out)
    start = {"checkpoint.load": str(tmp_path / "ours"), "checkpoint.dir": str(tmp_path / "run")}
    trained = RunConfig.from_yaml(
        pasted, overrides={"train.steps": 1, "optim.lr": 1e-30, "train.eval_steps": 0} | start
    )
    assert trained.model.kv_heads == 4 and trained.model.seq_length == 16
    first = pretrain(trained)
    assert first.resumed_after == 0 and len(first.losses) == 1
    assert capsys.readouterr().err.startswith(f"resumed from {tmp_path / 'ours' / 'step_00000000'}\n")  # no difference
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "back.safetensors")]) == 0
    assert same(load_file(tmp_path / "back.safetensors"), weights(config))
    plain = ["train", "--config", str(pasted), "--checkpoint.load", str(tmp_path / "ours"), "--train.steps", "1"]
    assert main([*plain, "--kv-heads", "2"]) == 2
    assert "--kv-heads 2: the checkpoint of step 0 has 4" in capsys.readouterr().err
    assert main([*plain, "--kv-heads", "null", "--train.eval-steps", "0"]) == 0  # None is `heads`: the same model


# ---- memory ----

MEASURED = """
import sys
from pathlib import Path
from labkit.train.checkpoint import exchange, weight_files
from labkit.train.checkpoint.exchange import Export, Import, export_weights, import_weights
from labkit.train.checkpoint.shard_files import Reader

def held():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

seen = []
def checksum(data, plain=weight_files.checksum):  # called while a tensor is being written
    seen.append(held())
    return plain(data)

weight_files.checksum = checksum
small, source, target = map(Path, sys.argv[1:])
import_weights(Import(small), target.parent / "small")  # torch imports much at its first meta tensor
before, seen = held(), []
import_weights(Import(source), target)
imported, seen = max(seen) - before, []
export = Export(Reader(target / "step_00000000"))
before = held()
export_weights(export, target.parent / "out.safetensors")
exported = max(seen) - before
before = held()
everything = dict(export.tensors())
print(imported, exported, held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc is Linux's")
def test_neither_direction_holds_the_model(tmp_path: Path) -> None:
    """A model of 101 MB, whose largest tensor has 4 MB."""
    config = GPT2.override({"hidden": 512, "heads": 4, "layers": 8, "vocab_size": 1024})
    state = weights(config)
    size, largest = sum(t.nbytes for t in state.values()), max(t.nbytes for t in state.values())
    assert size > 100e6 and largest < 4.3e6
    source, small = write_model(tmp_path / "theirs", config, state), write_model(tmp_path / "tiny", GPT2, weights(GPT2))
    del state
    command = [sys.executable, "-c", MEASURED, str(small), str(source), str(tmp_path / "ours")]
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # glibc gives freed memory back
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=at_once)
    imported, exported, everything = map(int, done.stdout.split())
    assert everything > 0.9 * size  # a leak would be seen
    assert imported < 6 * largest and exported < 6 * largest, (imported, exported)


# ---- refusals ----

Change = Callable[[Path], object]


def edit(**fields: Any) -> Change:
    """Change config.json; None removes a field."""

    def change(folder: Path) -> None:
        read = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps({k: v for k, v in read.items() if v is not None}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    def rewrite(folder: Path) -> None:
        state = dict(load_file(folder / "model.safetensors"))
        change(state)
        save_file(state, folder / "model.safetensors")

    return rewrite


def index(weight_map: Any) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def cut(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-5])


def field(text: str) -> Change:
    """Put text before the fields of config.json."""

    def change(folder: Path) -> None:
        read = (folder / "config.json").read_text()
        (folder / "config.json").write_text("{" + text + ", " + read.removeprefix("{"))

    return change


def once_more(name: str, copy: str, *, by: float = 0.0) -> Change:
    """A tensor under a second name. by: how much it differs."""
    return tensors(lambda state: state.update({copy: state[name] + by}))


def second_file(by: float, file: str = "model-2.safetensors") -> Change:
    """Its last tensor in a second file of the index. by: how much it differs."""

    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        name = max(state)
        save_file({name: state[name] + by}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: file}}))

    return change


WEIGHT = "model.layers.1.mlp.down_proj.weight"
RATES = ".self_attn.rotary_emb.inv_freq"
REFUSED: dict[str, tuple[Change, str]] = {
    "pickled": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin is pickled"),
    "empty": (
        lambda f: (f / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index",
    ),
    "cut": (cut, "model.safetensors is not a complete safetensors file"),
    "no config.json": (lambda f: (f / "config.json").unlink(), "there is no config.json in"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not the JSON"),
    "a byte too large": (lambda f: os.truncate(f / "config.json", 50_000_001), "is larger than 50,000,000 bytes"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), "config.json has no JSON object"),
    "deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not the JSON"),
    "another family": (edit(model_type="opt"), "model_type is 'opt'"),
    "no hidden_size": (edit(hidden_size=None), "has no field 'hidden_size'"),
    "text for a number": (edit(num_hidden_layers="3"), "num_hidden_layers = '3' must be an integer"),
    "no number": (edit(rms_norm_eps=math.nan), "rms_norm_eps = nan must be a finite number"),
    "no heads": (edit(num_attention_heads=0), "config.json describes a model that labkit"),
    "scaled rotary": (
        edit(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "rope_type = 'llama3' has no counterpart",
    ),
    "a layer too many": (edit(num_hidden_layers=10**9), "has no tensor 'layers.3.input_layernorm.weight'"),
    "a layer too few": (edit(num_hidden_layers=2), "no place for the tensors layers.2."),
    "another width": (
        edit(intermediate_size=40),
        (
            "layers.0.mlp.gate_proj.weight has shape [48, 32], and config.json says [40, 32]: hidden_size = 32, "
            "intermediate_size = 40"
        ),
    ),
    "other heads": (
        edit(num_key_value_heads=1),
        (
            "layers.0.self_attn.k_proj.weight has shape [16, 32], and config.json says [8, 32]: hidden_size = 32, "
            "num_attention_heads = 4, num_key_value_heads = 1"
        ),
    ),
    "heads without a share": (edit(num_key_value_heads=3), "attention heads = 4 cannot be divided among num_key_value"),
    "theta of nobody": (
        tensors(lambda s: s.update({f"model.layers.0{RATES}": 1e3 ** (-torch.arange(0, 8, 2) / 8)})),
        f"model.layers.0{RATES} is not that of heads of 8 and rope_theta = 10000",
    ),
    "a tensor too few": (tensors(lambda s: s.pop(WEIGHT)), "has no tensor 'layers.1.mlp.down_proj.weight'"),
    "a tensor too many": (tensors(lambda s: s.update(extra=torch.ones(2))), "no place for the tensors extra"),
    "another shape": (
        tensors(lambda s: s.update({WEIGHT: torch.ones(3, 5)})),
        "layers.1.mlp.down_proj.weight has shape [3, 5], and config.json says [32, 48]",
    ),
    "integers": (tensors(lambda s: s.update({WEIGHT: s[WEIGHT].to(torch.int8)})), f"'{WEIGHT}' has type I8"),
    "outside": (index({WEIGHT: "../theirs/model-1.safetensors"}), "names the file '../theirs/model-1.safetensors'"),
    "absolute": (index({WEIGHT: "/etc/model.safetensors"}), "names the file '/etc/model.safetensors'"),
    "an index of pickles": (index({WEIGHT: "model-1.bin"}), "names the file 'model-1.bin'"),
    "an index of numbers": (index({WEIGHT: 3}), "names the file 3"),
    "an index without files": (index([]), "has no weight_map"),
    "a file of 400 characters": (index({WEIGHT: f"{'m' * 400}.safetensors"}), "lacks 'mmm"),
    "a tensor in no file": (index({"nowhere": "model-1.safetensors"}), "no file has the tensor 'nowhere'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sources_that_cannot_be_imported(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = REFUSED[case]
    source = write_model(tmp_path / "theirs", LLAMA, weights(LLAMA))
    change(source)
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("labkit checkpoint: ") and err.count("\n") == 1 and words in err, err
    assert not (tmp_path / "ours").exists()


FAMILIES = MODELS | {
    "bert": presets.bert_tiny().override(SMALL | {"norm_placement": "post"}),
    "bert, untied": presets.bert_tiny().override(
        SMALL | {"norm_placement": "post", "untie_embeddings_and_output_weights": True}
    ),
    "megatron-bert": presets.bert_tiny().override(SMALL | {"norm_placement": "pre"}),
    "mamba2": presets.mamba_tiny().override(
        SMALL
        | {"untie_embeddings_and_output_weights": False, "hybrid_override_pattern": None, "position": "none"}
        | {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_state_dim": 4}
    ),
    "t5": presets.t5_tiny().override(
        SMALL
        | {"position": "relative", "norm": "rmsnorm", "bias": False, "relative_buckets": 8, "relative_max_distance": 16}
    ),
}
WORD = {
    "gpt2": "transformer.wte.weight",
    "llama, tied": "model.embed_tokens.weight",
    "bert": "bert.embeddings.word_embeddings.weight",
    "mamba2": "backbone.embeddings.weight",
    "t5": "shared.weight",
}
BIAS, DECODER = "cls.predictions.bias", "cls.predictions.decoder"
COPIES = [(name, WORD[name], "lm_head.weight") for name in ("gpt2", "llama, tied", "mamba2", "t5")] + [
    ("bert", WORD["bert"], f"{DECODER}.weight"),
    ("bert", BIAS, f"{DECODER}.bias"),
    ("megatron-bert", WORD["bert"], f"{DECODER}.weight"),
    ("megatron-bert", BIAS, f"{DECODER}.bias"),
    ("t5", WORD["t5"], "encoder.embed_tokens.weight"),
    ("t5", WORD["t5"], "decoder.embed_tokens.weight"),
    ("gpt2", WORD["gpt2"], "wte.weight"),
    ("llama", "model.norm.weight", "norm.weight"),
    ("mixtral", "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight"),
]
"""Model, a tensor of it, and the name under which files may have it once more."""
NORM = "bert.embeddings.LayerNorm"
THETA = "rope_parameters.rope_theta"
LINEAR = {"type": "linear", "factor": 2.0}
TWICE: list[tuple[str, Change, str]] = [
    *((name, once_more(*pair, by=1e-3), f"{pair[0]} and {pair[1]} differ") for name, *pair in COPIES),
    *((name, edit(**{copy: 48}), f"{copy} = 48") for name, copy in (
        ("gpt2", "hidden_size"), ("gpt2", "num_hidden_layers"), ("gpt2", "num_attention_heads"), ("gpt2", "n_ctx"),
        ("gpt2", "max_position_embeddings"), ("llama", "n_embd"), ("llama", "n_layer"), ("mixtral", "num_experts"),
        ("bert", "n_head"), ("mamba2", "d_model"), ("mamba2", "intermediate_size"), ("mamba2", "layer_norm_eps"),
        ("t5", "hidden_size"), ("t5", "num_attention_heads"), ("t5", "head_dim"), ("t5", "num_hidden_layers"),
        ("t5", "intermediate_size"),
    )),
    ("gpt2", edit(activation_function="gelu_new", hidden_act="gelu"), "hidden_act = 'gelu' and activation_function = "),
    ("bert", edit(dtype="bfloat16"), "dtype = 'bfloat16' and torch_dtype = 'float32' contradict"),
    ("bert", once_more(f"{NORM}.weight", f"{NORM}.gamma", by=1e-3), f"{NORM}.gamma and {NORM}.weight differ"),
    ("gpt2", field('"n_head": 2'), "has the field 'n_head' twice, as 2 and as 4"),
    ("llama", edit(architectures=["MistralForCausalLM"]), "model_type = 'llama' and architectures = ['Mistral"),
    ("mamba2", edit(expand=3), "num_heads * head_dim = 64 and expand * hidden_size = 96 contradict"),
    ("mamba2", edit(n_groups=4), "mixer.in_proj.weight has shape"),
    ("t5", edit(feed_forward_proj="relu", dense_act_fn="gelu"), "of feed_forward_proj 'relu' = 'relu' and dense_act"),
    ("t5", edit(feed_forward_proj="relu", is_gated_act=True), "of feed_forward_proj 'relu' = False and is_gated_act"),
    ("t5", edit(scale_decoder_outputs=True, tie_word_embeddings=False), "tie_word_embeddings = False and scale_dec"),
    (
        "llama",
        edit(rope_parameters={"rope_type": "default"}, rope_scaling=LINEAR),
        "rope_parameters.rope_type = 'default' and rope_scaling.type = 'linear' contradict each other",
    ),
    ("llama", edit(rope_scaling=LINEAR | {"rope_type": "default"}), "rope_scaling.rope_type = 'default' and rope_scal"),
    ("llama", edit(rope_parameters={"rope_theta": 1e6}), f"rope_theta = 500000.0 and {THETA} = 1000000.0 contradict"),
    ("mixtral", edit(rope_parameters={"full": LINEAR}), "rope_type = 'linear' has no counterpart"),
    ("llama", edit(rope_scaling={"factor": 2.0}), "factor = 2.0 has no counterpart"),
    ("llama", edit(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 has no counterpart"),
    ("llama", edit(rope_scaling="linear"), "rope_scaling = 'linear' has no counterpart"),
    ("gpt2", second_file(1e-3), "model.safetensors and model-2.safetensors have different tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), TWICE, ids=[f"{name}: {words}" for name, _, words in TWICE])
def test_what_files_say_twice_and_differently_is_refused(
    name: str, change: Change, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "theirs", FAMILIES[name], weights(FAMILIES[name]))
    change(source)
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err, err
    assert not (tmp_path / "ours").exists()


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"n_inner": [0, "48", 48.0], "n_head": ["4", True, 0, None], "n_positions": [None, -1, 2**31]}),
    ("gpt2", {"layer_norm_epsilon": [math.nan, math.inf, 0, "1e-5", None], "activation_function": ["", None, [], 0]}),
    ("gpt2", {"scale_attn_weights": [0, False, None, "true"], "scale_attn_by_inverse_layer_idx": [1, 0, None]}),
    ("gpt2", {"tie_word_embeddings": ["false", 0, None], "add_cross_attention": [True, "", None]}),
    ("gpt2", {"quantization_config": [{"bits": 4}, {}, 0, False], "architectures": ["", 0, [3], {}]}),
    ("llama", {"rope_theta": [0, False, "1e4", None], "hidden_act": ["", None, 0], "partial_rotary_factor": [0, "1"]}),
    ("llama", {"head_dim": [0, 16, "8"], "num_key_value_heads": [0, "2"], "attention_bias": [0, None, True]}),
    ("llama", {"rope_scaling": [False, 0, "", []], "rope_parameters": [0], "mlp_bias": [None, "false"]}),
    ("mixtral", {"sliding_window": [0, False, "8", 8], "num_local_experts": [None, "3"], "num_experts_per_tok": [0]}),
    ("bert", {"type_vocab_size": [0, None, 1], "position_embedding_type": ["", None, 0], "is_decoder": [None, 1]}),
    ("bert", {"hidden_act": ["", None], "layer_norm_eps": [None, math.nan], "add_cross_attention": [0]}),
    ("t5", {"num_decoder_layers": [0, "3"], "feed_forward_proj": ["", None, 0], "scale_decoder_outputs": [None, 0]}),
    ("t5", {"d_kv": [0, None, 16], "n_positions": [0, "16"], "relative_attention_num_buckets": [None, 0]}),
    ("mamba2", {"time_step_limit": [[], None, [0.0], [0.1, 1.0], 0], "use_conv_bias": [0, None, False]}),
    ("mamba2", {"n_groups": [0, None], "head_dim": [None], "expand": [0, None, 2.0], "conv_kernel": [0, None]}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [(name, option, value) for name, options in WRONG for option, values in options.items() for value in values],
    ids=str,
)
def test_a_value_that_our_model_does_not_have_is_refused_by_its_name(name: str, option: str, value: Any) -> None:
    read = config_to_hugging_face(FAMILIES[name].model, FAMILIES[name].moe)
    with pytest.raises(ValueError, match=rf"(^|\W){option} = "):
        model_config_from_hugging_face(read | {option: value})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("option", "value"), [("factor", 0), ("rope_theta", False), ("rope_theta", None), ("rope_type", None), ("type", "")]
)
def test_the_rotary_embedding_is_refused_by_its_place(place: str, option: str, value: Any) -> None:
    read = config_to_hugging_face(LLAMA.model)
    for options in ({option: value}, {"full_attention": {option: value}}):
        with pytest.raises(ValueError, match=option):
            model_config_from_hugging_face(read | {place: options})


ROPE = {"rope_type": "default", "type": "default", "rope_theta": 1e4, "factor": 1.0}
SAME: list[tuple[str, Change]] = [
    *((name, once_more(*pair)) for name, *pair in COPIES),
    ("bert, untied", tensors(lambda s: s.update({BIAS: s[f"{DECODER}.bias"] + 1}))),  # no layer reads it
    ("gpt2", edit(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, n_ctx=16, dtype="float32")),
    ("bert", once_more(f"{NORM}.weight", f"{NORM}.gamma")),
    ("gpt2", field('"n_head": 4')),
    ("gpt2", second_file(0.0)),
    ("llama, tied", edit(rope_parameters=ROPE, rope_scaling=ROPE, partial_rotary_factor=1.0, head_dim=8)),
    (
        "llama, tied",
        tensors(lambda s: s.update({f"model.layers.0{RATES}": (1e4 ** (-torch.arange(0, 8, 2) / 8)).bfloat16()})),
    ),
    ("mamba2", edit(intermediate_size=64)),
    ("t5", edit(head_dim=8, hidden_size=32, is_gated_act=False, scale_decoder_outputs=True)),
]


@pytest.mark.parametrize(("name", "change"), SAME, ids=[f"{name} {i}" for i, (name, _) in enumerate(SAME)])
def test_what_files_say_twice_and_alike_is_the_same_model(name: str, change: Change, tmp_path: Path) -> None:
    state = weights(FAMILIES[name])
    source = write_model(tmp_path / "theirs", FAMILIES[name], state)
    change(source)
    read = Import(source)
    back = full_state_to_hugging_face(read.model, read.tensors, read.moe)
    assert same(back, state)


def test_pickled_weights_beside_are_said_to_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "theirs", GPT2, weights(GPT2))
    (source / "pytorch_model.bin").write_bytes(b"anything")
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 0
    assert f"# {source / 'pytorch_model.bin'} is pickled: neither read nor compared" in capsys.readouterr().out


def test_a_name_of_a_pickle_is_refused_before_it_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(tmp_path / "pytorch_model.bin")]) == 2
    assert "pytorch_model.bin is pickled" in capsys.readouterr().err


def test_an_import_spares_other_checkpoints_and_leaves_nothing_after_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = write_model(tmp_path / "theirs", LLAMA, weights(LLAMA))
    words = ["checkpoint", "import", str(tmp_path / "ours"), str(source)]
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        assert main(words) == 1
    assert "No space left on device" in capsys.readouterr().err and not (tmp_path / "ours").exists()
    (tmp_path / "ours" / ".step_00000000.partial").mkdir(parents=True)  # of an import that was killed
    with locked(tmp_path / "ours"):
        assert main(words) == 2
    assert f"process {os.getpid()} on " in capsys.readouterr().err
    assert main(words) == 0
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == [".lock", "latest", "step_00000000"]
    before = sorted((tmp_path / "ours").rglob("*"))
    assert main(words) == 2
    assert "holds checkpoints already" in capsys.readouterr().err
    assert sorted((tmp_path / "ours").rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm": "rmsnorm"}, "is neither a GPT-2 nor a Llama"),
        ({"model.kv_heads": 2}, "a GPT-2 has as many key/value heads as query heads; here model.kv_heads = 2"),
    ],
)
def test_models_that_hugging_face_does_not_have_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = GPT2.override({"vocab_size": 1024, "global_batch_size": 2, "steps": 1, "eval_steps": 0} | change)
    pretrain(config.override({"checkpoint.dir": str(tmp_path / "run")}))
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "x.safetensors")]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: config["model"].update(depth=3), "model.depth"),
        (lambda config: config["model"].update(layers="three"), "model.layers"),
        (lambda config: config.pop("moe"), "moe"),
    ],
    ids=["a field of a newer labkit", "a word for a number", "no experts' section"],
)
def test_a_manifest_that_describes_no_model_is_refused(
    change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_weights(Import(write_model(tmp_path / "theirs", GPT2, weights(GPT2))), tmp_path / "ours")
    stored = read_manifest(tmp_path / "ours" / "step_00000000")
    change(stored.config)
    write_manifest(tmp_path / "ours" / "step_00000000", stored)
    assert main(["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 1
    err = capsys.readouterr().err
    assert (
        "the manifest of step 0 describes a model that this labkit does not have (" in err
        and words in err
        and err.count("\n") == 1
    )
    assert not (tmp_path / "back").exists()


def test_values_beyond_fp16_are_refused_and_others_rounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = weights(GPT2)
    source = write_model(tmp_path / "theirs", GPT2, state)
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 0
    words = ["checkpoint", "export", str(tmp_path / "ours"), str(tmp_path / "x.safetensors"), "--dtype"]
    for word, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert main([*words, word, "--overwrite"]) == 0
        assert same(load_file(tmp_path / "x.safetensors"), {name: t.to(dtype) for name, t in state.items()})
    state["transformer.wpe.weight"][3, 3] = 70_000.0
    source = write_model(tmp_path / "large", GPT2, state)
    assert main(["checkpoint", "import", str(tmp_path / "more"), str(source)]) == 0
    words[2:4] = str(tmp_path / "more"), str(tmp_path / "y.safetensors")
    assert main([*words, "fp16"]) == 1
    assert "embedding.position.weight has values up to 7e+04, and fp16 ends at 6.55e+04" in capsys.readouterr().err
    assert not (tmp_path / "y.safetensors").exists()


def test_one_large_tensor_gets_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LARGEST_FILE", 1)
    source = write_model(tmp_path / "theirs", GPT2, weights(GPT2))
    assert main(["checkpoint", "import", str(tmp_path / "ours"), str(source)]) == 0
    made = read_manifest(tmp_path / "ours" / "step_00000000")
    assert len(made.files) == len(made.tensors) == len(full_shapes(GPT2.model, MoEConfig()))
