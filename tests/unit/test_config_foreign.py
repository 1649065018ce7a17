"""`labkit config convert`: published configurations of other stacks train here, as the model that they describe.

Each excerpt is a few lines of a file that its stack publishes, and says which. The number of parameters is that of the
stack's own formula or library.
"""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from typing import Any

import pytest

from labkit.cli import main
from labkit.config import ConfigError, RunConfig, yaml_text
from labkit.config.fields import SPECS
from labkit.config.foreign import stacks
from labkit.config.foreign.shell_words import flags
from labkit.config.foreign.stacks import STACKS, convert
from labkit.plan.parameters import model_parameters
from labkit.train import pretrain
from labkit.train.lr_schedule import build_lr_schedule

SMALL = {"model.layers": 2, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16, "model.vocab_size": 1024}
SMALL |= {"train.steps": 1, "train.micro_batch_size": 1, "train.global_batch_size": 2, "train.eval_steps": 0}
SMALL |= {
    "train.eval_interval": 0,
    "optim.precision": "fp32",
    "optim.warmup_steps": 0,
    "optim.decay_steps": None,
    "data.split": "90,5,5",
}
ONE_RANK = {f"parallel.{name}": 1 for name in ("tp", "pp", "vpp", "cp", "ep")} | {"parallel.sequence_parallel": False}


@pytest.fixture
def converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function: name and text of a file -> the configuration in the printed YAML, the YAML, and the report."""

    def do(name: str, text: str, *options: str) -> tuple[RunConfig, str, str]:
        (tmp_path / name).write_text(text)
        code = main(["config", "convert", str(tmp_path / name), *options])
        out, report = capsys.readouterr()
        assert code == 0, report
        (tmp_path / "run.yaml").write_text(out)
        return RunConfig.from_yaml(tmp_path / "run.yaml"), out, report

    return do


def trains(config: RunConfig, **changes: Any) -> None:
    """One step of the configuration, shrunk to one process, ends with a finite loss."""
    small = {name: value for name, value in SMALL.items() if "warmup" not in name or config.optim.warmup_steps}
    lines = pretrain(config.override(small | ONE_RANK | changes)).metrics
    assert 4 < lines[-1]["loss"] < 12


# From Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh.
GPT3 = """\
GPUS_PER_NODE=8
CHECKPOINT_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --step-batch-size-schedule "0:16 2.4B:320 4.8B:624"
    --train-iters 500000
    --fp16
    --lr 6.0e-5
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]} \\
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --log-throughput --numlayers 3
"""

# From Megatron-LM's examples/mixtral/train_mixtral_8x7b_distributed.sh.
MIXTRAL = """\
MODEL_ARGS=(--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --attention-dropout 0.0 --hidden-dropout 0.0
    --normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --rotary-base 1000000)
MOE_ARGS=(--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall)
DATA_ARGS=(--tokenizer-type Llama2Tokenizer --tokenizer-model ${TOKENIZER_MODEL} --split 99990,8,2)
LOGGING_ARGS=( \\
    --save "runs/tensorboard" \\
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
else
    MOE_ARGS+=(--num-experts 16)
fi
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${DATA_ARGS[@]} ${LOGGING_ARGS[@]} --micro-batch-size 1 \\
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
"""


def test_a_megatron_script(converted: Any) -> None:
    config, text, report = converted("train_gpt3_175b_distributed.sh", GPT3)
    m = config.model
    n, h, v, s = 96, 12288, 50257, 2048
    # arXiv 2104.04473, equation 2, which leaves out the final norm
    assert model_parameters(m) == 12 * n * h**2 + 13 * n * h + (v + s) * h + 2 * h
    assert (config.parallel.tp, config.parallel.pp, config.optim.precision) == (8, 16, "fp16")
    assert (config.optim.warmup_steps, config.optim.decay_steps) == (430, 430_000)
    # defaults of megatron/training/arguments.py that are not ours
    assert (m.hidden_dropout, m.embedding_dropout, m.attention_dropout) == (0.1, 0.1, 0.1)
    assert (config.optim.beta2, config.optim.lr_schedule, m.activation) == (0.999, "linear", "gelu_tanh")
    assert "  layers: 96  # --num-layers\n" in text and "tp: 8  # --tensor-model-parallel-size" in text
    assert "--save: it is $1, which only the shell knows; set checkpoint.dir" in report
    assert "--step-batch-size-schedule: the global batch keeps its size" in report
    assert 'unknown to this converter:\n  --numlayers: did you mean "--num-layers"?' in report
    assert "nproc" not in report + text
    trains(config, **{"optim.initial_loss_scale": 65536.0})


def test_a_megatron_mixture_of_experts(converted: Any) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config, _, report = converted("train_mixtral.sh", MIXTRAL)
    assert "model.vocab_size: Megatron-LM asks Llama2Tokenizer for it" in report
    assert "if and case: conditions are not evaluated" in report and config.moe.num_experts == 8
    assert "--sequence-parallel: parallel.sequence_parallel has no effect with parallel.tp = 1" in report
    with torch.device("meta"):
        theirs = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=32000))
    ours = config.override({"model.vocab_size": 32000})
    assert model_parameters(ours.model, ours.moe) == sum(p.numel() for p in theirs.parameters())
    small = {"model.ffn_hidden": 48, "model.kv_heads": 2, "optim.distributed_optimizer": False}
    trains(config, **small, **{"checkpoint.dir": None, "checkpoint.interval": None})


def test_a_megatron_list_of_layers_with_experts(converted: Any) -> None:
    text = "--num-layers: 8\n--num-experts: 4\n--moe-layer-freq: ([0]*1+[1]*3)*2\n--vocab-size: 1024\n--fp16: true\n"
    text += "--train-iters: 70_000\n--split: 100,0,0\n--eval-iters: 10\n--recompute-granularity: selective\n"
    text += "--recompute-modules: core_attn mlp\n--swiglu: false\n--bf16: false\n--qk-layernorm: false\n"
    config, _, report = converted("model_config.yaml", f"MODEL_ARGS:\n{text}".replace("\n--", "\n  --"))
    assert config.moe.layer_freq == (0, 1, 1, 1, 0, 1, 1, 1)
    assert (config.train.steps, config.train.eval_steps) == (70_000, 0)
    assert "--eval-*: --split keeps nothing for validation" in report and "--global-batch-size: not given" in report
    assert config.model.recompute_modules == ("core_attn", "mlp") and config.optim.precision == "fp16"
    assert config.model.activation == "gelu_tanh" and "labkit lacks" not in report  # nothing that is switched off
    # without a word of the script: megatron/training/arguments.py and megatron-core's TransformerConfig
    assert (config.moe.dispatcher, config.moe.grouped_gemm, config.moe.router_dtype) == ("allgather", False, "model")
    assert config.optim.initial_loss_scale == 2.0**32


@pytest.mark.parametrize(("line", "fields"), [
    # int((4 * hidden_size * 2 / 3) / 64) * 64, and the default of --num-query-groups
    ("--swiglu", {"activation": "swiglu", "model.ffn_hidden": 2048}),
    ("--swiglu --ffn-hidden-size 96", {"activation": "swiglu", "model.ffn_hidden": 96}),
    ("--group-query-attention", {"kv_heads": 1}),
    ("--num-query-groups 4", {}),  # which Megatron-LM reads with --group-query-attention alone
    ("--openai-gelu --use-flash-attn", {"activation": "gelu_tanh", "attention_backend": "flash"}),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", {"pp": 2, "vpp": 3}),
    (
        "--pipeline-model-parallel-size 2 --no-overlap-p2p-communication",
        {"pp": 2, "overlap_p2p_comm": False, "batch_p2p_comm": True},
    ),
])  # fmt: skip
def test_megatron_flags_mean_what_they_mean_on_the_command_line(
    converted: Any, line: str, fields: dict[str, Any]
) -> None:
    model = "python pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --global-batch-size 16"
    config, _, report = converted("a.sh", f"{model} {line}")
    plain, _, shorter = converted("a.sh", model)
    assert config == plain.override(fields) and report == shorter


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/coming_from/converting.md").read_text()
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?\n)```$", page, re.M | re.S):
        Path(name).write_text(text)
    shown = re.findall(
        r"^`labkit config convert ([^`]+)`:\n\n```yaml\n(.*?)```\n\n```text\n(.*?)\n```$", page, re.M | re.S
    )
    assert len(shown) == 4
    for names, text, report in shown:
        assert convert(names.split()) == (text, report)


def test_the_report_goes_to_standard_error_and_the_file_to_out(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.sh").write_text("python pretrain_gpt.py --num-layers 3 --mock-data")
    assert main(["config", "convert", str(tmp_path / "a.sh"), "--out", str(tmp_path / "b.yaml")]) == 0
    assert RunConfig.from_yaml(tmp_path / "b.yaml").model.layers == 3
    out, err = capsys.readouterr()
    assert "labkit train --config" in out and "--mock-data" in err
    assert main(["config", "convert", str(tmp_path / "a.sh"), "--from", "megatron", "--out", str(tmp_path)]) == 2


def test_words_of_a_script() -> None:
    script = (
        'A=1\nB="--x $A ${C:-2}"\nL=(--y)\nL+=("--z \'3 4\'" ${B})\nN=$((A+1))\npython a/b.py ${L[@]} --n $N; ls --no'
    )
    found = flags(script)
    assert found.values == {"--y": True, "--z": "3 4", "--x": ["1", "2"], "--n": "$($A+1)"} | {"--n": "$(A+1)"}
    assert (found.program, found.skipped) == ("b.py", False)


# From https://huggingface.co/openai-community/gpt2 and https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0.
GPT2 = {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1}
GPT2 |= {"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768}
GPT2 |= {"n_head": 12, "n_layer": 12, "n_positions": 1024, "bos_token_id": 50256, "vocab_size": 50257}
LLAMA = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632}
LLAMA |= {"max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 22}
LLAMA |= {"num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_scaling": None, "torch_dtype": "bfloat16"}
LLAMA |= {"tie_word_embeddings": False, "use_cache": True, "vocab_size": 32000}


@pytest.mark.parametrize("given", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_model_of_hugging_face(given: dict[str, Any], converted: Any) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    config, text, report = converted("config.json", json.dumps(given))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**given))
    assert model_parameters(config.model) == sum(p.numel() for p in theirs.parameters())
    if given is GPT2:  # resid_pdrop is not given: transformers' default
        assert (config.model.hidden_dropout, config.model.embedding_dropout, config.optim.precision) == (
            0.1,
            0.1,
            "fp32",
        )
        assert (
            "hidden_dropout: 0.1  # the default of resid_pdrop in transformers" in text
            and "layers: 12  # n_layer" in text
        )
        assert "bos_token_id" in report
    else:
        assert config.optim.precision == "bf16" and "hidden: 2048  # hidden_size" in text
    trains(config, **{"model.ffn_hidden": 48, "model.kv_heads": 4})


@pytest.mark.parametrize(
    "name", ["BertForPreTraining", "T5ForConditionalGeneration", "Mamba2ForCausalLM", "MixtralForCausalLM"]
)
def test_the_other_models_of_hugging_face_with_their_defaults(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    model = getattr(transformers, name)
    described = model.config_class(architectures=[name])
    described.save_pretrained(tmp_path)
    found = convert([tmp_path / "config.json"])
    assert "unknown" not in found.report and "labkit lacks" not in found.report
    (tmp_path / "run.yaml").write_text(found.text)
    config = RunConfig.from_yaml(tmp_path / "run.yaml")
    with torch.device("meta"):
        theirs = model(described)
    assert model_parameters(config.model, config.moe) == sum(p.numel() for p in theirs.parameters())


def test_every_row_of_a_table_names_fields() -> None:
    """No row points to a field that is not there."""
    for word in STACKS:
        rows = resolve_name(STACKS[word]).table.values()
        assert [row for row in rows if isinstance(row, str) and set(row.split()) - set(SPECS)] == [], word


# From nanotron's examples/config_tiny_llama.yaml.
NANOTRON = """\
data_stages:
- data: {dataset: null, num_loading_workers: 1, seed: 42}
  name: Stable Training Stage
  start_training_step: 1
general: {project: debug, seed: 42, step: null}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method: {std: 0.025}
  make_vocab_size_divisible_by: 1
  model_config:
    hidden_act: silu
    hidden_size: 2048
    intermediate_size: 11008
    is_llama_config: true
    max_position_embeddings: 128256
    num_attention_heads: 16
    num_hidden_layers: 28
    num_key_value_heads: 2
    rms_norm_eps: 1.0e-05
    tie_word_embeddings: true
    vocab_size: 128256
optimizer:
  accumulate_grad_in_fp32: true
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_decay_starting_step: null
    lr_decay_steps: 13
    lr_decay_style: cosine
    lr_warmup_steps: 2
    min_decay_lr: 1.0e-05
  optimizer_factory: {adam_beta1: 0.9, name: adamW, torch_adam_is_fused: true}
  zero_stage: 1
parallelism: {dp: 4, pp: 2, pp_engine: 1f1b, tp: 2, tp_mode: REDUCE_SCATTER}
tokens: {batch_accumulation_per_replica: 1, micro_batch_size: 3, sequence_length: 4096, train_steps: 2000}
"""


def test_a_run_of_nanotron(converted: Any) -> None:
    config, text, report = converted("config.yaml", NANOTRON)
    h, f, d, kv = 2048, 11008, 2048 // 16, 2
    layer = h * (h + 2 * kv * d) + h * h + 3 * h * f + 2 * h  # nanotron's LlamaDecoderLayer: qkv, o, the MLP, two norms
    assert model_parameters(config.model) == 128256 * h + 28 * layer + h
    assert "--nproc 16" in text and config.data_parallel_size(16) == 4 and config.num_microbatches(16) == 1
    assert (config.parallel.sequence_parallel, config.schedule.name, config.train.seed) == (True, "1f1b", 42)
    # lr_scheduler_builder in nanotron's helpers.py: 13 steps of decay after 2 of warm-up
    assert (config.optim.lr_schedule, config.optim.warmup_steps, config.optim.decay_steps) == ("cosine", 2, 15)
    assert "model.ddp_bucket_cap_mb: optim.bucket_size counts elements" in report
    trains(config, **{"model.ffn_hidden": 48, "model.kv_heads": 2, "optim.distributed_optimizer": False})


def test_nanotrons_late_decay_experts_and_unknown_models(converted: Any) -> None:
    late = NANOTRON.replace("lr_decay_starting_step: null", "lr_decay_starting_step: 1500").replace("cosine", "1-sqrt")
    experts = "moe_config: {num_experts: 4, layers: [1, 3], enable_shared_expert: true, top_k: 1}"
    config, _, report = converted("a.yaml", late.replace("hidden_act: silu", f"hidden_act: silu\n    {experts}"))
    o, moe = config.optim, config.moe
    assert (o.lr_schedule, o.wsd_decay_style, o.wsd_decay_steps, o.decay_steps) == ("wsd", "minus-sqrt", 13, 1513)
    rate = build_lr_schedule(o, config.train.steps)
    for step in (1, 2, 1499, 1500, 1505, 1512, 1513, 1999):  # lr_scheduler_builder in nanotron's helpers.py
        tail = 1 - math.sqrt(min(1.0, max(0, step - 1500) / 13))
        assert rate(step) == pytest.approx(3e-4 * step / 2 if step <= 2 else 1e-5 + (3e-4 - 1e-5) * tail)
    assert [moe.is_moe_layer(index) for index in range(5)] == [False, True, False, True, False]
    assert (moe.ffn_hidden, moe.shared_expert_ffn_hidden, moe.pre_softmax) == (1408, 5632, True)  # models_config.py
    assert "unknown" not in report


# From torchtitan 0.2.2's torchtitan/models/llama3/train_configs/llama3_8b.toml.
TORCHTITAN = """\
[job]
description = "Llama 3 8B training"
[metrics]
log_freq = 10
enable_tensorboard = false
save_tb_folder = "tb"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
[checkpoint]
enable = false
folder = "checkpoint"
[activation_checkpoint]
mode = "selective"
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def test_a_job_of_torchtitan(converted: Any) -> None:
    config, _, report = converted("llama3_8b.toml", TORCHTITAN)
    assert model_parameters(config.model) == 8_030_261_248  # of meta-llama/Meta-Llama-3-8B
    o = config.optim
    assert (o.lr_schedule, o.warmup_steps, o.weight_decay, o.precision) == ("linear", 200, 0.1, "bf16")
    assert "FSDP also shards parameters and gradients" in report and "checkpoint.*: switched off" in report
    assert "multiply train.global_batch_size" in report and "unknown" not in report
    trains(config, **{"model.ffn_hidden": 48, "model.kv_heads": 2, "optim.distributed_optimizer": False})
    flat = TORCHTITAN.replace("warmup_steps = 200", "warmup_steps = 0\ndecay_ratio = 0.0")
    assert converted("flat.toml", flat)[0].optim.lr_schedule == "constant"


def test_torchtitans_pipeline_hsdp_fp8_and_late_decay(converted: Any) -> None:
    text = TORCHTITAN.replace('flavor = "8B"', 'flavor = "70B"\nconverters = ["float8"]')
    text = text.replace(
        "pipeline_parallel_degree = 1", 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "Interleaved1F1B"'
    )
    text = text.replace("replicate_degree = 1", "replicate_degree = 2").replace("shard_degree = -1", "shard_degree = 4")
    text = text.replace("local_batch_size = 1", "local_batch_size = 8").replace(
        "tensor_parallel_degree = 1", "tensor_parallel_degree = 2"
    )
    text = text.replace("[training]", 'decay_ratio = 0.25\ndecay_type = "sqrt"\nmin_lr_factor = 0.1\n[training]')
    config, out, _ = converted("a.toml", text)
    p, o = config.parallel, config.optim
    assert model_parameters(config.model) == 70_553_706_496  # of meta-llama/Meta-Llama-3-70B
    assert (p.tp, p.sequence_parallel, p.pp, p.vpp, config.schedule.name) == (2, True, 4, 2, "interleaved")
    assert "Launch 64 ranks" in out and o.num_distributed_optimizer_instances == 2
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (64, 1)
    assert (o.fp8, o.fp8_recipe, o.wsd_decay_style, o.wsd_decay_steps) == ("hybrid", "current", "minus-sqrt", 250)
    rate = build_lr_schedule(o, config.train.steps)
    for step in (200, 700, 749, 750, 800, 999):  # components/lr_scheduler.py: warm-up 200, stable 551, decay 250
        tail = math.sqrt(max(0, step + 1 - 751) / 250)
        assert rate(step) == pytest.approx(3e-4 * (0.1 + 0.9 * (1 - tail)))


# From DeepSpeedExamples' training/bf16_master_weight/configs/baseline.json, with a batch, a schedule and a typo.
DEEPSPEED = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 100,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e7, "contiguous_gradients": True},
    "gradient_clipping": "auto",
    "wall_clok_breakdown": False,
}


def test_an_engine_of_deepspeed_and_a_model_of_hugging_face(converted: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2 | {"torch_dtype": "float16"}))
    config, text, report = converted("ds_config.json", json.dumps(DEEPSPEED))
    o = config.optim
    assert config.data_parallel_size(4) == 4 and "Launch 4 replicas, each of" in text
    assert (config.train.global_batch_size, config.train.micro_batch_size, config.num_microbatches(4)) == (32, 4, 2)
    assert (o.precision, o.distributed_optimizer, o.bucket_size, o.beta2) == ("bf16", True, 50_000_000, 0.999)
    # deepspeed/runtime/lr_schedules.py: cos_min_ratio = 0.0001; ops/adam/fused_adam.py: weight_decay = 0
    assert (o.lr_schedule, o.warmup_steps, config.train.steps) == ("cosine", 10, 500) and o.weight_decay == 0
    assert o.min_lr == pytest.approx(1e-8)
    assert "zero_optimization.stage 3: labkit shards the optimizer's state" in report
    assert "gradient_clipping: is auto" in report and "fp16.*: not enabled" in report
    assert 'wall_clok_breakdown: did you mean "wall_clock_breakdown"?' in report
    both = convert([tmp_path / "config.json", tmp_path / "ds_config.json"])
    assert "torch_dtype: bf16.enabled of a later file overrides it" in both.report
    (tmp_path / "run.yaml").write_text(both.text)
    config = RunConfig.from_yaml(tmp_path / "run.yaml")
    assert (config.model.hidden, config.optim.precision, config.optim.lr) == (768, "bf16", 1e-4)
    trains(config, **{"optim.distributed_optimizer": False})


def test_optimizers_and_batches_of_deepspeed(converted: Any) -> None:
    given = {"train_batch_size": 256, "gradient_accumulation_steps": 4, "fp16": {"enabled": True, "loss_scale": 128}}
    lamb = {"type": "Lamb", "params": {"lr": 11e-3, "max_coeff": 0.3}}
    config, _, report = converted("a.json", json.dumps({**given, "optimizer": lamb, "sparse_attention": {"block": 16}}))
    assert (config.optim.lr, config.optim.lr_schedule, config.optim.loss_scale) == (1e-3, "constant", 128.0)
    assert "labkit has only AdamW, which Lamb's settings do not fit" in report and "sparse_attention.*" in report
    assert config.train.micro_batch_size == 64 and "divide train.micro_batch_size by dp" in report


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.sh", "python pretrain_gpt.py --num-layers 0", "--num-layers (here model.layers) = 0: must be at least 1"),
        ("a.sh", "python pretrain_gpt.py --num-layers x", "--num-layers = 'x': must be an integer (model.layers here)"),
        (
            "a.sh",
            "python pretrain_gpt.py --moe-layer-freq [2.5]",
            "--moe-layer-freq = [2.5]: is neither a number nor a list",
        ),
        ("a.sh", "a.py --b '", "cannot be read: No closing quotation"),
        ("a.txt", "hello", f"no configuration of {', '.join(STACKS)} was recognised"),
        ("a.json", '{"model_type": "qwen3"}', "describes a model that labkit does not have: model_type is 'qwen3'"),
        ("a.yaml", "parallelism: {dp: two}\ntokens: {}\nmodel: {}", "only models with is_llama_config"),
        ("a.yaml", NANOTRON.replace("dp: 4", "dp: two"), "parallelism.dp = 'two': must be a number"),
        ("a.yaml", NANOTRON.replace("size: 3,", "size: x,"), "tokens.micro_batch_size = 'x': must be an integer"),
        (
            "a.toml",
            TORCHTITAN.replace('"8B"', '"8C"'),
            "model.flavor = '8C' of 'llama3': labkit has llama3 with one of",
        ),
        ("a.json", '{"train_batch_size": "x"}', "train_batch_size = 'x': must be a number"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "zero_optimization.stage = 4: must be 0, 1, 2 or 3"),
        ("a.json", "{", "cannot be read: Expecting property name"),
    ],
)
def test_a_file_that_cannot_be_converted(name: str, text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        convert([tmp_path / name])


ODD = [None, [], {}, "x", "", -1, 0, True, [1, 2], {"a": 1}, 3.7, "auto", 10**30, "\x00", [{}]]
SAMPLES = {"DeepSpeed": DEEPSPEED, "Hugging Face": LLAMA, "nanotron": yaml_text.plain(NANOTRON)}
SAMPLES |= {"torchtitan": tomllib.loads(TORCHTITAN), "Megatron-LM": {"MODEL_ARGS": flags(MIXTRAL).values}}


@pytest.mark.parametrize("given", SAMPLES.values(), ids=SAMPLES)
def test_an_odd_value_is_an_error_or_a_configuration(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 values of another type or size in a random place each one ends as a ConfigError, or converts."""
    random, rejected = Random(0), 0
    for _ in range(60):
        contents = inside = copy.deepcopy(given)
        while isinstance(inside[key := random.choice(list(inside))], dict) and random.random() < 0.9:
            inside = inside[key]
        inside[key] = random.choice(ODD)
        monkeypatch.setattr(stacks, "_contents", lambda _path, contents=contents: contents)
        try:
            convert(["a file"])
        except ConfigError as error:
            rejected += 1
            assert error.problems
    assert rejected > 5
