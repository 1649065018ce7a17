"""Megatron-LM's flags on the command line: each sets what it means there, or says what to write instead.

Meanings are those of `megatron/training/arguments.py` (core_v0.16.1); the lines of `validate_args` that turn several
flags into one value are named next to their rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from labkit.cli import main
from labkit.cli.arguments import read
from labkit.cli.train_command import COMMAND as TRAIN
from labkit.cli.train_command import Stopped
from labkit.config import RunConfig, presets
from labkit.config.fields import KNOWN_NAMES, resolve
from labkit.config.megatron_flags import DIFFERENT, IGNORED, LACKING, NEEDLESS, SWITCHES, advice

MEANINGS: list[tuple[str, dict[str, Any]]] = [
    ("--num-layers 12 --hidden-size 768 --num-attention-heads 12", {"layers": 12, "hidden": 768, "heads": 12}),
    ("--seq-length 128 --ffn-hidden-size 96", {"seq_length": 128, "model.ffn_hidden": 96}),
    ("--group-query-attention --num-query-groups 4", {"kv_heads": 4}),
    ("--group-query-attention", {"kv_heads": 1}),  # the default of --num-query-groups
    # ffn_hidden_size = int((4 * hidden_size * 2 / 3) / 64) * 64
    ("--swiglu --hidden-size 96", {"activation": "swiglu", "hidden": 96, "model.ffn_hidden": 256}),
    ("--swiglu --ffn-hidden-size 100", {"activation": "swiglu", "model.ffn_hidden": 100}),
    ("--normalization RMSNorm --norm-epsilon 1e-6", {"norm": "rmsnorm", "norm_eps": 1e-6}),
    ("--position-embedding-type rope --rotary-base 500000", {"position": "rope", "rope_theta": 5e5}),
    ("--position-embedding-type learned_absolute", {"position": "learned"}),
    ("--use-rotary-position-embeddings", {"position": "rope"}),
    ("--disable-bias-linear", {"bias": False}),
    ("--openai-gelu", {"activation": "gelu_tanh"}),
    ("--use-flash-attn", {"attention_backend": "flash"}),
    ("--untie-embeddings-and-output-weights", {"untie_embeddings_and_output_weights": True}),
    ("--attention-dropout 0.1 --hidden-dropout 0.2", {"attention_dropout": 0.1, "hidden_dropout": 0.2}),
    ("--init-method-std 0.01", {"init_std": 0.01}),
    ("--make-vocab-size-divisible-by 64 --vocab-size 2048", {"make_vocab_size_divisible_by": 64, "vocab_size": 2048}),
    ("--attention-backend unfused", {"attention_backend": "unfused"}),
    ("--transformer-impl local", {"transformer_impl": "local"}),
    ("--tensor-model-parallel-size 2", {"tp": 2}),
    ("--pipeline-model-parallel-size 2", {"pp": 2}),
    ("--context-parallel-size 2 --cp-comm-type allgather", {"cp": 2, "cp_comm_type": "all_gather"}),
    ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2, "sequence_parallel": True}),
    ("--use-tp-pp-dp-mapping", {"parallel.order": "tp-cp-ep-pp-dp"}),  # RankGenerator's order in initialize.py
    # virtual_pipeline_model_parallel_size = num_layers / pp / num_layers_per_virtual_pipeline_stage
    (
        "--num-layers 12 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
        {"layers": 12, "pp": 2, "vpp": 3},
    ),
    ("--num-virtual-stages-per-pipeline-rank 2", {"vpp": 2}),
    ("--pipeline-model-parallel-layout Ettt|tttttL", {"pipeline_layout": "Ettt|tttttL"}),
    (
        "--pipeline-model-parallel-size 2 --no-overlap-p2p-communication",  # batch_p2p_comm = not overlap_p2p_comm
        {"pp": 2, "overlap_p2p_comm": False, "batch_p2p_comm": True},
    ),
    ("--bf16", {"precision": "bf16"}),
    ("--fp16 --initial-loss-scale 1024", {"precision": "fp16", "initial_loss_scale": 1024.0}),
    ("--bf16 --accumulate-allreduce-grads-in-fp32", {"precision": "bf16", "grad_reduce_in_bf16": False}),
    ("--bf16 --grad-reduce-in-bf16", {"precision": "bf16", "grad_reduce_in_bf16": True}),
    ("--fp8-format hybrid --fp8-recipe tensorwise", {"optim.fp8": "hybrid", "fp8_recipe": "current"}),
    (
        "--use-distributed-optimizer --overlap-param-gather",
        {"distributed_optimizer": True, "overlap_param_gather": True},
    ),
    ("--overlap-grad-reduce --ddp-bucket-size 1000", {"overlap_grad_reduce": True, "bucket_size": 1000}),
    ("--no-gradient-accumulation-fusion", {"gradient_accumulation_fusion": False}),
    ("--no-check-for-nan-in-loss-and-grad", {"check_for_nan_in_grad": False}),
    ("--calculate-per-token-loss", {"calculate_per_token_loss": True}),
    ("--micro-batch-size 2 --global-batch-size 32", {"micro_batch_size": 2, "global_batch_size": 32}),
    ("--train-iters 7", {"steps": 7}),
    ("--lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 3", {"lr": 3e-4, "min_lr": 3e-5, "warmup_steps": 3}),
    ("--lr-decay-style inverse-square-root", {"lr_schedule": "inverse-square-root"}),
    ("--lr-decay-iters 9", {"decay_steps": 9}),
    (
        "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 5",
        {"lr_schedule": "wsd", "wsd_decay_style": "minus-sqrt", "wsd_decay_steps": 5},
    ),
    ("--weight-decay 0.1 --clip-grad 0.5", {"weight_decay": 0.1, "clip_grad": 0.5}),
    ("--adam-beta1 0.8 --adam-beta2 0.99 --adam-eps 1e-6", {"beta1": 0.8, "beta2": 0.99, "eps": 1e-6}),
    ("--seed 7 --log-interval 5", {"seed": 7, "log_interval": 5}),
    ("--save runs/a --save-interval 50", {"checkpoint.dir": "runs/a", "checkpoint.interval": 50}),
    ("--load runs/b", {"checkpoint.load": "runs/b"}),
    ("--eval-interval 10 --eval-iters 2", {"eval_interval": 10, "eval_steps": 2}),
    ("--split 949,50,1", {"split": "949,50,1"}),
    ("--data-path corpus", {"data.path": "corpus"}),
    ("--data-path 0.3 books 0.7 news --seed 7", {"blend": ("0.3", "books", "0.7", "news"), "seed": 7}),
    ("--vocab-file vocab.json", {"tokenizer": "vocab.json"}),
    (
        "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2",
        {"num_experts": 8, "top_k": 2, "grouped_gemm": True, "aux_loss_coeff": 1e-2},
    ),
    ("--expert-model-parallel-size 2 --expert-tensor-parallel-size 1", {"ep": 2, "etp": 1}),
    ("--moe-token-dispatcher-type alltoall", {"dispatcher": "alltoall"}),
    ("--moe-router-load-balancing-type seq_aux_loss", {"load_balancing": "seq_aux_loss"}),
    ("--moe-expert-capacity-factor 1.5", {"capacity_factor": 1.5}),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ),
    (
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
    ),
    ("--recompute-activations", {"recompute_granularity": "selective"}),
    (
        "--cuda-graph-impl local --cuda-graph-scope attn mlp",
        {"cuda_graph_impl": "local", "cuda_graph_modules": ("attn", "mlp")},
    ),
    ("--enable-cuda-graph", {"cuda_graph_impl": "local"}),
    ("--external-cuda-graph", {"cuda_graph_impl": "transformer_engine"}),
    ("--profile-ranks 0 1", {"profile_ranks": (0, 1)}),
    ("--bert-no-binary-head", {"bert_binary_head": False}),
]


@pytest.mark.parametrize(("line", "fields"), MEANINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_flag_sets_what_it_means_in_megatron(line: str, fields: dict[str, Any]) -> None:
    """Starts from a configuration in which no flag of the line is in force, and nothing but these fields may change."""
    off = {"grouped_gemm": False, "overlap_grad_reduce": False, "activation": "gelu"}
    off |= {"dispatcher": "allgather", "checkpoint.load": "none"}
    start = presets.tiny().override({name: value for name, value in off.items() if name in fields})
    arguments = read(dataclasses.replace(TRAIN, preset="tiny"), line.split())
    assert arguments.problems == []
    assert start.override(fields) == arguments.config


def test_every_switch_has_a_row() -> None:
    words = {word[2:].replace("-", "_") for line, _ in MEANINGS for word in line.split() if word.startswith("--")}
    assert SWITCHES.keys() <= words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--bf16 --fp16", "optim.precision: given twice, as --bf16 'bf16' and as --fp16 'fp16'; keep one"),
        ("--swiglu --activation gelu", "model.activation: given twice"),
        ("--num-layers-per-virtual-pipeline-stage 3", "3: times parallel.pp = 1 must divide model.layers = 8"),
        ("--num-layers-per-virtual-pipeline-stage 2 --vpp 2", "parallel.vpp: a flag of Megatron-LM sets it as well"),
        ("--no-overlap-p2p-communication", "--no-overlap-p2p-communication, so schedule.batch_p2p_comm = True: has no"),
        ("--num-layers-per-virtual-pipeline-stage 2 --pp 0", "--pp 0: must be at least 1"),
        ("--swiglu --hidden 16", "model.ffn_hidden = 0: must be at least 1"),
        ("--profile", "--profile: needs a value after it: none, pytorch, nsys"),
        (
            "--train-samples 1000",
            "--train-samples: labkit counts steps; set train.steps to samples / global batch size",
        ),
        ("--max-position-embeddings 128", "has model.seq_length = 64 rows; leave it out, or set --seq-length"),
        ("--kv-channels 64", "a head is model.hidden / model.heads wide"),
        ("--moe-token-dispatcher-type flex", "must be one of alltoall, allgather, local"),
        ("--num-experts 8 --moe-layer-freq 2", "one layer with experts in 2, is 1,0"),
        (
            "--qk-layernorm --tp 3",
            "--qk-layernorm: this flag of Megatron-LM has no counterpart here: labkit has only multi-",
        ),
        ("--rotary-percent 0.5", "rotary positions rotate whole heads"),
        ("--wandb-project p", "--wandb-project: this flag of Megatron-LM has no counterpart here: train.loggers sends"),
        ("--use-nccl-ub", "--use-nccl-ub: this flag of Megatron-LM has no counterpart here; leave it out"),
        ("--use-nccl-un", "--use-nccl-un: unknown option"),
        ("--bf61", 'did you mean "--bf16"?'),
    ],
)
def test_a_flag_that_means_something_else_says_what_to_write(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--preset", "tiny", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_file_is_told_the_field_of_a_switch() -> None:
    assert resolve("bf16")[1] == "'bf16': is a flag of the command line; here set optim.precision = bf16"
    assert resolve("group_query_attention", "model")[1].endswith("here set model.kv_heads")
    assert (
        "virtual_pipeline_stage': is a flag of the command line; here set parallel.vpp"
        in (resolve("num_layers_per_virtual_pipeline_stage")[1])
    )


def test_no_name_has_two_meanings() -> None:
    names = [name for names in (*LACKING.values(), *NEEDLESS.values(), *IGNORED.values()) for name in names.split()]
    assert len(names) == len(set(names)) and not set(names) & {*SWITCHES, *DIFFERENT}
    assert [name for name in KNOWN_NAMES if advice(name) or name in DIFFERENT] == []


def test_flags_that_change_nothing_are_taken_and_named(monkeypatch, capsys) -> None:
    words = "--preset tiny --use-mcore-models --log-throughput --num-workers 2 --moe-permute-fusion --tp 2 --nproc 2"
    words += " --max-position-embeddings 64"
    arguments = read(TRAIN, words.split())
    assert arguments.problems == [] and arguments.config.parallel.tp == 2
    monkeypatch.setattr("labkit.cli.train_command.launch", lambda *_: [Stopped("stopped")])
    main(["train", *words.split()])
    flags = "--use-mcore-models, --log-throughput, --num-workers, --moe-permute-fusion"
    assert capsys.readouterr().err == f"ignored, since labkit trains the same without: {flags}\n"


def test_flags_without_a_preset_change_the_defaults_and_train_says_so(monkeypatch, capsys) -> None:
    arguments = read(TRAIN, ["--tensor-model-parallel-size", "2", "--num-layers", "12", "--bf16"])
    assert arguments.problems == []
    assert arguments.config == RunConfig().override({"tp": 2, "layers": 12, "precision": "bf16"})
    monkeypatch.setattr("labkit.cli.train_command.launch", lambda *_: [Stopped("stopped")])
    said = "neither a preset nor a file: other fields have labkit's defaults (--print-config shows them)\n"
    for words, first in ((["--num-layers", "1"], said), (["--preset", "tiny", "--num-layers", "1"], "")):
        main(["train", *words])
        assert capsys.readouterr().out.startswith(f"{first}1 rank: tp 1")
