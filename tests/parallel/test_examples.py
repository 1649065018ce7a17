"""The scripts in examples/ train what `labkit train` trains, in labkit's ranks and in torchrun's."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.config import RunConfig, presets
from labkit.launch import run
from labkit.train import pretrain

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
SCRIPTS = {"gpt": "pretrain_gpt", "mamba": "pretrain_gpt", "bert": "pretrain_bert", "t5": "pretrain_t5"}
V = {"pp": 2, "schedule.name": "zbv"}

# ---- the same numbers ----


def both(configs: list[RunConfig]) -> list[tuple[list[float], list[float]]]:
    """In a rank: losses of each configuration as `pretrain` trains it by itself, and by the providers of the script."""
    found = []
    for config in configs:
        script = runpy.run_path(str(EXAMPLES / f"{SCRIPTS[config.model.family]}.py"))
        given = {
            "datasets_provider": script["train_valid_test_datasets_provider"],
            "model_provider": script["model_provider"],
            "forward_step": script["forward_step"],
            "extra_args_provider": script.get("Options"),
        }
        found.append((pretrain(config).losses, pretrain(config, **given).losses))
    return found


def small(preset: str, **changes: object) -> RunConfig:
    """The preset at a size for two ranks of a CPU; what is said of the model beside its size stays."""
    config = presets.get(preset)
    fits = {"vocab_size": 1152, "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 8, "train.steps": 3}
    fits |= {"train.record_events": False, "tp": 1, "pp": 1, "ep": 1, "train.eval_steps": 0, "optim.warmup_steps": 0}
    if config.model.hidden > 64:
        fits |= {"hidden": 64, "heads": 8, "model.layers": 4, "model.ffn_hidden": None, "model.init_std": 0.02}
        fits |= {"kv_heads": config.model.kv_heads and 4, "moe.layer_freq": config.moe.layer_freq[:4]}
    if config.moe.num_experts > 16:
        fits |= {"moe.num_experts": 8, "moe.ffn_hidden": 32, "moe.top_k": 2}
    if config.moe.shared_expert_ffn_hidden:
        fits |= {"moe.shared_expert_ffn_hidden": 64}
    if config.optim.precision == "fp16":
        fits |= {"optim.initial_loss_scale": 16.0}
    return config.override(fits).override(changes)


CHANGED = [
    ("tiny_moe", {"pp": 2, "vpp": 2, "precision": "bf16", "label_smoothing": 0.1, "hidden_dropout": 0.1}),
    ("tiny", {**V, "label_smoothing": 0.1, "gradient_accumulation_fusion": True}),
    ("mamba_tiny", {"tp": 2, "sequence_parallel": True}),
    ("t5_tiny", {"pp": 2, "split_rank": 1, "precision": "bf16"}),
    ("bert_tiny", {"pp": 2, "bert_binary_head": False, "precision": "fp64", "hidden_dropout": 0.1}),
    ("llama_tiny", {"pp": 2, "pipeline_layout": "E ttt | ttttt L", "optim.fp8": "hybrid"}),
]
"""The fields that a provider of its own left out before, each in some case."""


def test_the_providers_of_the_examples_train_what_pretrain_trains() -> None:
    configs = [small(preset, **changes) for preset, changes in CHANGED]
    for ranks in run(both, 2, configs, timeout=300):
        for case, (alone, by_providers) in zip(CHANGED, ranks, strict=True):
            assert by_providers == alone and len(alone) == 3, case


@pytest.mark.sweep
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, V, {}], ids=["tp", "pp", "zbv", "dp"]
)
def test_the_providers_of_the_examples_train_every_preset(layout: dict[str, object]) -> None:
    names = [name for name in presets.names() if layout is not V or presets.get(name).model.family != "t5"]
    splits = [layout == {"pp": 2} and presets.get(name).model.family == "t5" for name in names]
    configs = [small(name, **layout, split_rank=1 if split else None) for name, split in zip(names, splits)]
    for ranks in run(both, 2, [config.validate(2) for config in configs], timeout=600):
        for name, (alone, by_providers) in zip(names, ranks, strict=True):
            assert by_providers == alone and len(alone) == 3, name


# ---- the command line ----


def called(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("launcher", "script", "preset", "words"),
    [
        pytest.param(TORCHRUN, "pretrain_gpt", "tiny", "", id="gpt by torchrun", marks=pytest.mark.sweep),
        pytest.param([], "pretrain_gpt", "tiny_moe", "--nproc 2 --precision bf16", id="gpt"),
        pytest.param([], "pretrain_t5", "t5_tiny", "--nproc 2 --split-rank 1", id="t5", marks=pytest.mark.sweep),
        pytest.param([], "pretrain_bert", "bert_tiny", "--nproc 2", id="bert", marks=pytest.mark.sweep),
    ],
)
def test_an_example_has_the_command_line_and_the_screen_of_labkit_train(launcher, script, preset, words, tmp_path):
    words = f"--preset {preset} --pp 2 --steps 2 --global-batch-size 8 --train.output_dir OUT {words}"
    shown, losses = [], []
    for number, program in enumerate((["-m", "labkit.cli", "train"], [str(EXAMPLES / f"{script}.py")])):
        out = tmp_path / str(number)
        command = [sys.executable, *launcher, *program, *words.replace("OUT", str(out)).split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0 and "step 2 of 2: loss" in done.stderr, done.stderr
        shown.append([line for line in done.stdout.splitlines() if str(tmp_path) not in line])
        losses.append([json.loads(line).get("loss") for line in (out / "metrics.jsonl").read_text().splitlines()])
    assert shown[0] == shown[1] and losses[0] == losses[1] and len(losses[0]) == 2


def test_a_layout_that_cannot_be_is_refused_in_a_sentence():
    done = called(
        "pretrain_gpt", "--nproc", "3", "--tp", "2", "--pp", "2", "--frozen-layers", "-1", "--frozen-layer", "1"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "launch 4 ranks" in done.stderr
    assert "--frozen-layers -1: must be at least 0" in done.stderr
    assert '--frozen-layer: unknown option; did you mean "--frozen-layers"?' in done.stderr


def test_an_example_refuses_a_family_that_it_does_not_train():
    done = called("pretrain_bert", "--preset", "tiny")
    assert done.returncode == 2 and "model.family = gpt: " in done.stderr and "trains bert" in done.stderr


# ---- fields of a script ----


def test_an_option_of_a_script_trains_is_written_and_survives_a_resume(tmp_path: Path) -> None:
    """Frozen layers keep their weights: so does a run that goes on, and labkit train refuses what it cannot read."""
    from safetensors import safe_open

    options = f"--pp 2 --nproc 2 --global-batch-size 4 --dir {tmp_path / 'ck'} --train.output_dir {tmp_path / 'out'}"
    words = [*options.split(), "--extra.frozen_layers", "5"]
    for steps, said in ((1, "step 1 of 1: training loss"), (2, "step 2 of 2: training loss")):
        done = called("pretrain_gpt", *words, "--steps", str(steps))
        assert done.returncode == 0 and said in done.stdout, done.stderr
    stored = RunConfig.from_yaml(tmp_path / "out" / "config.yaml")
    assert stored.extra.frozen_layers == 5

    def weights(step: int) -> dict[str, object]:
        found = {}
        for file in (tmp_path / "ck" / f"step_{step:08}").glob("*.safetensors"):
            with safe_open(file, "np") as opened:
                found |= {key: opened.get_tensor(key) for key in opened.keys() if key.startswith("layers.")}  # noqa: SIM118
        return found

    one, two = weights(1), weights(2)
    moved = {int(key.split(".")[1]) for key in one if (one[key] != two[key]).any()}
    assert {int(key.split(".")[1]) for key in one} == set(range(8)) and moved == {5, 6, 7}

    done = called("pretrain_gpt", *words[:-1], "6", "--steps", "3")
    assert done.returncode == 0 and "extra.frozen_layers 5 -> 6" in done.stderr + done.stdout
    command = [sys.executable, "-m", "labkit.cli", "train", "--config", str(tmp_path / "out" / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "extra.frozen_layers = 6: not a field of labkit" in done.stderr


def test_the_help_of_a_script_has_its_fields_and_a_file_may_set_them(tmp_path: Path) -> None:
    said = called("pretrain_gpt", "--help").stdout
    assert said.startswith(f"usage: python {EXAMPLES / 'pretrain_gpt.py'} [options]")
    row = "--extra.frozen_layers INT How many of the first layers keep their initial weights. (default: 0) [>= 0]"
    assert row in " ".join(said.split())
    assert "extra." not in called("pretrain_t5", "--help").stdout
    (tmp_path / "own.yaml").write_text("extra: {frozen_layers: 3}\nmodel: {layers: 4}\n", encoding="utf-8")
    printed = called("pretrain_gpt", "--config", str(tmp_path / "own.yaml"), "--print-config").stdout
    assert "  # How many of the first layers keep their initial weights. [>= 0]\n  frozen_layers: 3\n" in printed
    over = called(
        "pretrain_gpt", "--config", str(tmp_path / "own.yaml"), "--frozen-layers", "2", "--print-config"
    ).stdout
    assert "  frozen_layers: 2\n" in over
