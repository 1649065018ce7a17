"""Bad configurations: each is refused with field, value and rule, without a traceback, and at once."""

from __future__ import annotations

import atexit
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.cli.command_line import COMMANDS as COMMAND_LINE
from labkit.config import ConfigError, RunConfig, presets
from labkit.config.field_spec import BadValueError, FieldSpec
from labkit.config.fields import SPECS
from labkit.config.sections import SECTIONS

AT_ONCE = 5.0
"""Seconds of processor time: a refusal takes milliseconds, and a text that makes the reader run away takes minutes."""
FOLDER = Path(tempfile.mkdtemp(prefix="labkit-bad-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def _file(name: str, text: str) -> str:
    (FOLDER / name).write_text(text)
    return str(FOLDER / name)


TWO_BY_TWO = _file("own.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
CIRCLE = _file("circle.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
SHORT_TEXT = _file("short.txt", "a few words")
LABKIT = str(Path(sys.executable).with_name("labkit"))

LONG = "a" * 256

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
ZERO = {"distributed_optimizer": True}
FP16 = {"precision": "fp16"}
ENGINE = {"transformer_impl": "transformer_engine"}
COMPILED = {"compile": "layers"}
MOE = {"num_experts": 8}
SP = {"tp": 2, "sequence_parallel": True}
GROUPS = {**MOE, "num_groups": 4, "group_topk": 2}
SINKHORN = {**MOE, "load_balancing": "sinkhorn"}
SHARED = {**MOE, "shared_expert_ffn_hidden": 64}


def _beyond(spec: FieldSpec) -> Iterator[tuple[object, str]]:
    """A value just beyond each limit of a field, and a word that is none of its words, with the rule that it breaks."""
    if spec.ge is not None:
        yield spec.ge - 1, f"must be at least {spec.ge:g}"
    if spec.gt is not None:
        yield spec.gt, f"must be greater than {spec.gt:g}"
    if spec.lt is not None:
        yield spec.lt, f"must be below {spec.lt:g}"
    if spec.kind in ("int", "float") and spec.lt is None:
        most = spec.le or {"int": 2**31 - 1, "float": 1e30}[spec.kind]
        yield (most + 1 if spec.kind == "int" else 2.0 * most), "must be at most "
    if spec.choices:
        yield "nonsense", f"must be one of {', '.join(spec.choices)}"


# (changes to presets.tiny(), ranks or None, field that is named, part of the rule)
RULES: list[tuple[dict, object, str, str]] = [
    # numbers out of range, and words that are none
    *[({name: value}, None, name, rule) for name, spec in SPECS.items() for value, rule in _beyond(spec)],
    ({"model.activation": "gelu_tan"}, None, "model.activation", 'did you mean "gelu_tanh"?'),
    ({"optim.lr_schedule": "cosin"}, None, "optim.lr_schedule", 'did you mean "cosine"?'),
    ({"parallel.distributed_backend": "NCCL"}, None, "parallel.distributed_backend", 'did you mean "nccl"?'),
    ({"optim.precision": "fp12"}, None, "optim.precision", "must be one of fp32, bf16, fp16, fp64"),
    # the model's shape
    ({"model.hidden": 60}, None, "model.hidden", "multiple of model.heads = 8; choose heads from 1, 2, 3, 4"),
    ({"model.kv_heads": 3}, None, "model.kv_heads", "must divide model.heads = 8; choose 1, 2, 4 or 8"),
    ({"model.kv_heads": 16}, None, "model.kv_heads", "must divide model.heads = 8"),
    ({"model.position": "rope", "model.hidden": 24}, None, "model.position", "must be even"),
    ({"tp": 3}, None, "model.heads", "multiple of parallel.tp = 3"),
    ({"tp": 16}, None, "model.heads", "choose tp from 1, 2, 4 or 8"),
    ({"tp": 4, "heads": 24, "hidden": 48, "kv_heads": 6}, None, "model.kv_heads",
     "multiple or a divisor of parallel.tp = 4"),
    ({"tp": 4, "heads": 24, "hidden": 48, "kv_heads": 3}, None, "model.kv_heads",
     "choose kv_heads from 1, 2 or 4, or tp from 1 or 3"),
    ({"rope_theta": 5e5}, None, "model.rope_theta", "no effect with model.position = learned; set that to rope"),
    ({"sequence_parallel": True}, None, "parallel.sequence_parallel", "no effect with parallel.tp = 1; set that above"),
    ({"cp_comm_type": "all_gather"}, None, "parallel.cp_comm_type", "no effect with parallel.cp = 1; set that above"),
    *[({"family": "mamba", "mamba_head_dim": 16, "hybrid_override_pattern": pattern, name: value}, None,
       "model." + name.removeprefix("model."), f"no effect: {part} is in no layer of model.hybrid_override_pattern")
      for part, pattern, name, value in (
        ("*", None, "kv_heads", 4), ("*", "MMMM-M-M", "position", "rope"), ("*", "MMMM-M-M", "attention_dropout", 0.1),
        ("*", None, "attention_backend", "math"), ("-", "M*M*M*M*", "model.ffn_hidden", 64),
        ("-", None, "activation", "gelu"))],
    ({"tp": 4, "model.ffn_hidden": 30}, None, "model.ffn_hidden", "multiple of parallel.tp = 4"),
    ({"cp": 2, "seq_length": 66}, None, "model.seq_length", "2 x cp = 4"),
    ({"cp": 3}, None, "model.seq_length", "2 x cp = 6: context parallelism cuts"),
    ({"tp": 8, "sequence_parallel": True, "seq_length": 20}, None, "model.seq_length", "parallel.tp = 8; try 24"),
    ({"tp": 8, "sequence_parallel": True, "cp": 2, "seq_length": 24}, None, "model.seq_length", "seq_length / cp = 12"),
    # the layout
    ({"tp": 2, "pp": 2}, 6, "world_size", "tp x cp x pp = 2 x 1 x 2 = 4; launch 4 or 8 ranks"),
    ({"tp": 8}, 4, "world_size", "= 8; launch 8"),
    ({"tp": 8, "ep": 0}, 4, "parallel.ep", "must be at least 1"),
    ({"tp": 2}, 7919, "world_size", "multiple of tp x cp x pp"),
    ({"etp": 2, "ep": 4, "num_experts": 8}, 4, "world_size", "etp x ep x pp = 2 x 4 x 1 = 8"),
    ({}, 0, "world_size", "must be at least 1"),
    ({}, -1, "world_size", "must be at least 1"),
    ({}, "8", "world_size", "must be an integer, not text; write it without quotes"),
    ({}, 8.0, "world_size", "must be an integer, not a number; write it without a decimal"),
    ({}, True, "world_size", "must be an integer, not true/false"),
    ({}, 2**31, "world_size", "must be at most 2,147,483,647"),
    ({"order": ""}, None, "parallel.order", "an axis is empty"),
    ({"order": "tp-cp--dp-pp"}, None, "parallel.order", "an axis is empty"),
    ({"order": "tp-cp-ep-dp-pp-"}, None, "parallel.order", "an axis is empty"),
    ({"order": "tp,cp,ep,dp,pp"}, None, "parallel.order", "is not an axis"),
    ({"order": "tp-cp-ep-dp-ppp"}, None, "parallel.order", 'did you mean "pp"?'),
    ({"order": "tp-tp-cp-ep-dp-pp"}, None, "parallel.order", "tp is named 2 times"),
    ({"order": "cp-ep-dp-pp", "tp": 2}, None, "parallel.order", "tp is missing although its size is 2"),
    ({"order": "tp-cp-ep-dp", "pp": 2}, None, "parallel.order", "pp is missing although its size is 2"),
    ({"order": "tp-ep-dp-pp", "cp": 2}, None, "parallel.order", "cp is missing although its size is 2"),
    ({"order": "tp-cp-dp-pp", "ep": 2, "num_experts": 4}, None, "parallel.order", "ep is missing although"),
    ({"order": "tp-cp-ep-pp"}, 4, "parallel.order", "dp is missing although its size is 4"),
    ({"order": "tp-pp-cp-ep-dp", "tp": 2, "pp": 2, "etp": 1, "ep": 2, "num_experts": 4}, 8, "parallel.order",
     "2 ranks apart in one and 1 in the other"),
    ({"order": "ep-pp-tp-cp-dp", "pp": 2, "ep": 2, "num_experts": 4}, 4, "parallel.order", "pipeline groups"),
    ({"family": "t5", "split_rank": 1}, None, "parallel.split_rank", "must be below parallel.pp = 1"),
    ({"family": "t5", "split_rank": 4, "pp": 4}, None, "parallel.split_rank", "choose 1 to 3"),
    ({"ep": 2}, None, "parallel.ep", "splits experts, but moe.num_experts = 0"),
    # the pipeline
    ({"pp": 3}, None, "model.layers", "multiple of parallel.pp = 3; try 9"),
    ({"pp": 16}, None, "model.layers", "multiple of parallel.pp = 16; try 16"),
    ({"pp": 2, "vpp": 3}, None, "model.layers", "pp x vpp = 2 x 3 = 6; try 12"),
    ({"vpp": 2}, None, "parallel.vpp", "needs parallel.pp above 1"),
    ({"standalone_embedding_stage": True}, None, "parallel.standalone_embedding_stage", "parallel.pp above 1"),
    ({"standalone_embedding_stage": True, "pp": 4}, None, "model.layers", "pp - 1 = 3"),
    ({"standalone_embedding_stage": True, "pp": 4, "vpp": 2}, None, "model.layers", "pp x vpp = 4 x 2 - 1 = 7"),
    ({"overlap_p2p_comm": True}, None, "schedule.overlap_p2p_comm", "only the interleaved schedule"),
    ({"overlap_p2p_comm": True, "pp": 2}, None, "schedule.overlap_p2p_comm", "set parallel.vpp above 1"),
    ({"overlap_p2p_comm": True, "batch_p2p_comm": True, "pp": 2, "vpp": 2}, None, "schedule.overlap_p2p_comm",
     "schedule.batch_p2p_comm to false"),
    *[({"pp": 2, "variable_seq_lengths": True, "batch_p2p_comm": batched}, None, "schedule.batch_p2p_comm",
       "no effect with schedule.variable_seq_lengths = true, where sizes are sent before every tensor, so nothing")
      for batched in (True, False)],
    *[({name: value}, None, f"schedule.{name}", "no effect with parallel.pp = 1") for name, value in (
        ("batch_p2p_comm", True), ("batch_p2p_comm", False), ("deallocate_pipeline_outputs", False))],
    ({"schedule.name": "gpipe", "schedule.path": TWO_BY_TWO, "pp": 2}, None, "schedule.name",
     "no effect with schedule.path = " + TWO_BY_TWO + ", which takes the place of the name; set that to null"),
    ({"use_ring_exchange_p2p": True}, None, "schedule.use_ring_exchange_p2p", "torch has no ring exchange"),
    ({"schedule.name": "gpipe", "pp": 2, "vpp": 2}, None, "schedule.name", "runs one model chunk per rank"),
    ({"schedule.name": "zbv", "pp": 4, "vpp": 4, "layers": 16}, None, "schedule.name", "2 model chunks per rank"),
    ({"schedule.name": "interleaved", "pp": 2}, None, "schedule.name", "set parallel.vpp above 1"),
    ({"schedule.name": "zbv", "pp": 8}, None, "model.layers", "pp x chunks of zbv = 8 x 2 = 16; try 16"),
    ({"schedule.name": "dualpipe_v", "pp": 4, "global_batch_size": 7}, 4, "schedule.name", "at least 2 x pp = 8"),
    ({"microbatch_group_size": 4, "pp": 2}, None, "schedule.microbatch_group_size", "has no effect"),
    ({"microbatch_group_size": 4, "pp": 2, "schedule.name": "zbv"}, None, "schedule.microbatch_group_size",
     "has no effect"),
    ({"overlap_p2p_comm": True, "pp": 2, "schedule.name": "zbv"}, None, "schedule.overlap_p2p_comm",
     "only the interleaved schedule"),
    ({"pp": 2, "pipeline_layout": "Et*4|x|t*4L"}, None, "parallel.pipeline_layout", "'x' at position 5"),
    ({"pp": 2, "pipeline_layout": "Et*3|t*3L"}, None, "parallel.pipeline_layout", "6 layers (t), but model.layers = 8"),
    ({"pp": 2, "pipeline_layout": "Et|t*3|t*3|tL"}, None, "parallel.pipeline_layout", "set parallel.vpp = 2"),
    ({"pp": 2, "vpp": 2, "pipeline_layout": "|Et*8||L"}, None, "parallel.pipeline_layout", "stage 0 of 4 is empty"),
    ({"pp": 2, "vpp": 2, "pipeline_layout": "Et*8||L|"}, None, "parallel.pipeline_layout", "stage 3 of 4 is empty"),
    ({"pp": 2, "pipeline_layout": "Et|t*6|tL"}, None, "parallel.pipeline_layout", "there must be pp = 2"),
    ({"pp": 2, "schedule.name": "zbv", "pipeline_layout": "Et*4|t*4L"}, None, "parallel.pipeline_layout",
     "pp x 2 model chunks per rank = 2 x 2 = 4"),
    ({"pp": 2, "pipeline_layout": "E|t*8L", "standalone_embedding_stage": True}, None,
     "parallel.standalone_embedding_stage", "says where the embedding is"),
    ({"family": "t5", "split_rank": 1, "pp": 2, "vpp": 2}, None, "parallel.split_rank",
     "an encoder-decoder is not interleaved"),
    ({"schedule.path": "/nowhere/s.csv"}, None, "schedule.path", "no such file"),
    ({"all_warmup": True, "pp": 2}, None, "schedule.all_warmup", "= 1, and only the interleaved schedule reads"),
    ({"all_warmup": True, "pp": 2, "schedule.name": "zbv"}, None, "schedule.all_warmup", "set that above 1, or"),
    ({"all_warmup": True, "pp": 2, "vpp": 2}, 2, "schedule.all_warmup", "parallel.pp = 2, but a step has 16; leave it"),
    ({"pp": 4, "vpp": 2, "microbatch_group_size": 2}, 4, "schedule.microbatch_group_size", "at least pp = 4"),
    ({"pp": 2, "vpp": 2, "microbatch_group_size": 17}, 2, "schedule.microbatch_group_size", "16 microbatches"),
    ({"pp": 2, "vpp": 2, "microbatch_group_size": 5}, 2, "schedule.microbatch_group_size", "a last group of 1 of 16"),
    ({"pp": 4, "vpp": 2, "global_batch_size": 2}, 4, "schedule.microbatch_group_size", "raise train.global_batch_size"),
    # experts
    ({"top_k": 4}, None, "moe.top_k", "no effect with moe.num_experts = 0; set that above 0, or leave this"),
    ({"etp": 2}, None, "parallel.etp", "splits experts, but moe.num_experts = 0; set the number of experts, or leave"),
    ({"tp": 2, "etp": 1}, 2, "parallel.etp", "splits experts, but moe.num_experts = 0; set the number of experts, or"),
    ({**SELECTIVE, "recompute_modules": ["foo"], "cuda_graph_impl": "emulated"}, None, "model.recompute_modules",
     "foo"),
    *[({**SELECTIVE, "recompute_modules": [part]}, None, "model.recompute_modules",
       f"names {part}, but moe.num_experts = 0; set the number of experts") for part in ("moe", "shared_experts")],
    *[({**MOE, f"moe.{name}": 0}, None, f"moe.{name}", "must be at least 1") for name in (
        "ffn_hidden", "num_groups", "group_topk", "shared_expert_ffn_hidden")],
    *[({**MOE, f"moe.{name}": -0.1}, None, f"moe.{name}", "must be at least 0") for name in (
        "aux_loss_coeff", "z_loss_coeff", "input_jitter")],
    *[({**MOE, f"moe.{name}": 0.0}, None, f"moe.{name}", "must be greater than 0") for name in (
        "topk_scaling_factor", "capacity_factor", "expert_bias_update_rate")],
    ({**MOE, "input_jitter": 1.0}, None, "moe.input_jitter", "must be below 1"),
    *[({**MOE, f"moe.{name}": "nonsense"}, None, f"moe.{name}", "must be one of") for name in (
        "score_function", "router_dtype", "load_balancing", "drop_policy")],
    ({"num_experts": 4, "top_k": 5}, None, "moe.top_k", "at most moe.num_experts = 4; choose 1 to 4"),
    ({"num_experts": 6, "ep": 4}, None, "moe.num_experts", "choose ep from 1, 2, 3 or 6"),
    ({**MOE, "ep": 3}, None, "moe.num_experts", "must be a multiple of parallel.ep = 3, which distributes the experts"),
    ({**MOE, "ep": 4, "etp": 2}, 4, "world_size", "etp x ep x pp = 2 x 4 x 1 = 8; launch 8 ranks"),
    ({**MOE, "ep": 4, "pp": 2}, 12, "world_size", "multiple of etp x ep x pp = 1 x 4 x 2 = 8; launch 8 or 16 ranks"),
    ({**MOE, "tp": 2}, None, "parallel.sequence_parallel", "must be true with experts and parallel.tp = 2"),
    ({**MOE, "moe.ffn_hidden": 30, "etp": 4}, None, "moe.ffn_hidden", "multiple of parallel.etp = 4, which cuts"),
    ({**MOE, "model.ffn_hidden": 30, "etp": 4}, None, "model.ffn_hidden", "multiple of parallel.etp = 4, which cuts"),
    ({**MOE, "etp": 3}, None, "parallel.etp", "4 x model.hidden = 256; set another, or moe.ffn_hidden = 258"),
    ({**MOE, "layer_freq": [2]}, None, "moe.layer_freq", "Megatron's integer 2, one layer with experts in 2, is 1,0"),
    ({**MOE, "layer_freq": []}, None, "moe.layer_freq", "must be a list of 1 (a layer with experts) and 0 (a dense"),
    ({**MOE, "layer_freq": [1, 3]}, None, "moe.layer_freq", "as in 1,0"),
    ({**MOE, "layer_freq": [1, 0, 0]}, None, "moe.layer_freq", "model.layers = 8; give 1, 2, 4 or 8 entries"),
    ({**MOE, "layer_freq": [0, 0]}, None, "moe.layer_freq", "makes every layer dense; give at least one 1, or set"),
    ({**MOE, "top_k": 1}, None, "moe.pre_softmax", "must be true with moe.top_k = 1: a softmax over one chosen expert"),
    ({**MOE, "score_function": "sigmoid", "pre_softmax": True}, None, "moe.pre_softmax", "no effect with moe.score"),
    ({**MOE, "num_groups": 4}, None, "moe.group_topk", "must be given together with moe.num_groups; set both, or none"),
    ({**MOE, "group_topk": 1}, None, "moe.num_groups", "must be given together with moe.group_topk; set both, or none"),
    ({**GROUPS, "num_groups": 3}, None, "moe.num_groups", "divide moe.num_experts = 8; choose 1, 2, 4 or 8"),
    ({**GROUPS, "group_topk": 5}, None, "moe.group_topk", "at most moe.num_groups = 4; choose fewer"),
    ({**GROUPS, "top_k": 3}, None, "moe.group_topk", "must divide moe.top_k = 3, as a group is judged by its best"),
    ({**GROUPS, "top_k": 6}, None, "moe.group_topk", "groups of 2 experts have only 4, and moe.top_k = 6; raise it"),
    *[({**MOE, "load_balancing": kind}, None, "moe.load_balancing", "set moe.aux_loss_coeff above 0, as in 0.01")
      for kind in ("seq_aux_loss", "global_aux_loss")],
    *[({**MOE, "load_balancing": kind, "aux_loss_coeff": 0.1}, None, "moe.aux_loss_coeff",
       f"no effect with moe.load_balancing = {kind}; set that to aux_loss") for kind in ("sinkhorn", "none")],
    ({**MOE, "expert_bias": True}, None, "moe.expert_bias", "as the bias moves sigmoid scores; set that to sigmoid"),
    ({**MOE, "expert_bias_update_rate": 0.1}, None, "moe.expert_bias_update_rate", "with moe.expert_bias = false"),
    *[({**SINKHORN, **changes}, None, f"moe.{name}", "sinkhorn, which assigns experts itself; set that to aux_loss or")
      for name, changes in (
        ("score_function", {"score_function": "sigmoid"}), ("pre_softmax", {"pre_softmax": True}),
        ("topk_scaling_factor", {"topk_scaling_factor": 2.5}), ("num_groups", {"num_groups": 4, "group_topk": 2}),
        ("group_topk", {"num_groups": 4, "group_topk": 2}), ("expert_bias", {"expert_bias": True}),
        ("capacity_factor", {"capacity_factor": 1.0}))],
    ({**MOE, "capacity_factor": 1.0, "dispatcher": "allgather"}, None, "moe.capacity_factor",
     "needs a dispatcher that drops before it sends, and allgather gives every rank all tokens; set moe.dispatcher"),
    *[({**MOE, **changes}, None, f"moe.{name}", "no effect without moe.capacity_factor; set that, or leave")
      for name, changes in (("drop_policy", {"drop_policy": "position"}),
                            ("pad_to_capacity", {"pad_to_capacity": True}))],
    ({**MOE, "optim.fp8": "hybrid", "moe.grouped_gemm": False}, None, "optim.fp8",
     "experts one after the other do not compute in fp8; set moe.grouped_gemm to true, or this to none"),
    ({**MOE, "optim.fp8": "hybrid", "transformer_impl": "transformer_engine"}, None, "optim.fp8",
     "Transformer Engine's experts want a multiple of 16 rows each for fp8, and labkit gives them as many as"),
    ({**MOE, "ep": 2, "dispatcher": "local"}, None, "moe.dispatcher", "parallel.ep = 2 and etp = 1; set it to"),
    ({**MOE, **SP, "dispatcher": "local"}, None, "moe.dispatcher", "parallel.ep = 1 and etp = 2; set it to alltoall"),
    *[({**MOE, name: True}, None, f"moe.{name}", "no effect without moe.shared_expert_ffn_hidden; set that, or leave")
      for name in ("shared_expert_gate", "shared_expert_overlap")],
    ({**SHARED, **SP, "shared_expert_ffn_hidden": 33}, None, "moe.shared_expert_ffn_hidden", "parallel.tp = 2, which"),
    ({**SHARED, "shared_expert_overlap": True, "dispatcher": "allgather"}, None, "moe.shared_expert_overlap",
     "with moe.dispatcher = allgather, which has no all-to-all to hide; set that to alltoall, or leave this out"),
    ({**MOE, **SELECTIVE, "recompute_modules": ["shared_experts"]}, None, "model.recompute_modules", "model has none"),
    ({**SHARED, **SELECTIVE, "recompute_modules": ["moe", "shared_experts"]}, None, "model.recompute_modules",
     "moe contains shared_experts; name one of them"),
    ({**SHARED, **SELECTIVE, "shared_expert_overlap": True, "recompute_modules": ["shared_experts"]}, None,
     "model.recompute_modules", "while they are spread over the steps of the dispatch; set moe.shared_expert_overlap"),
    ({**MOE, **SELECTIVE, "recompute_modules": ["mlp"]}, None, "model.recompute_modules", "name moe instead"),
    ({**MOE, **ZERO, "ep": 4, "num_distributed_optimizer_instances": 2}, 4,
     "optim.num_distributed_optimizer_instances", "must divide edp = world size / (etp x ep x pp) = 1"),
    # graphs
    ({"cuda_graph_warmup_steps": 1}, None, "graph.cuda_graph_warmup_steps", "no effect with graph.cuda_graph_impl = n"),
    ({"cuda_graph_modules": ["attn"]}, None, "graph.cuda_graph_modules", "nothing is captured"),
    ({"cuda_graph_modules": ["attention"]}, None, "graph.cuda_graph_modules", 'did you mean "attn"?'),
    ({"cuda_graph_modules": ["attn", "attn"]}, None, "graph.cuda_graph_modules", "names a part twice"),
    ({"cuda_graph_modules": ["attn", "full_iteration"]}, None, "graph.cuda_graph_modules", "it must be the only name"),
    ({"cuda_graph_modules": ["moe", "moe_router"]}, None, "graph.cuda_graph_modules", "moe contains moe_router"),
    ({"cuda_graph_modules": ["moe_preprocess"]}, None, "graph.cuda_graph_modules", "add moe_router"),
    # sequence and context parallelism, recomputation
    ({"cp": 2, "attention_dropout": 0.1}, None, "model.attention_dropout", "must be 0 with parallel.cp above 1"),
    ({"cp_comm_type": "a2a"}, None, "parallel.cp_comm_type", "must be one of p2p, all_gather"),
    ({"recompute_granularity": "partial"}, None, "model.recompute_granularity", "must be one of none, selective, full"),
    ({**FULL, "recompute_method": "blok"}, None, "model.recompute_method", 'did you mean "block"?'),
    ({**FULL, "recompute_num_layers": 0}, None, "model.recompute_num_layers", "must be at least 1"),
    ({**FULL, "recompute_num_layers": 9}, None, "model.recompute_num_layers", "at most model.layers = 8"),
    ({**SELECTIVE, "recompute_modules": ["core_atn"]}, None, "model.recompute_modules", 'did you mean "core_attn"?'),
    ({**SELECTIVE, "recompute_modules": []}, None, "model.recompute_modules", "name one or more of core_attn, mlp"),
    ({**SELECTIVE, "recompute_modules": ["mlp", "mlp"]}, None, "model.recompute_modules", "each once"),
    ({**SELECTIVE, "recompute_method": "block"}, None, "model.recompute_method", "no effect with model.recompute_gran"),
    ({**SELECTIVE, "recompute_num_layers": 2}, None, "model.recompute_num_layers", "selective; set that to full"),
    ({**FULL, "recompute_modules": ["mlp"]}, None, "model.recompute_modules", "full; set that to selective"),
    ({"recompute_modules": ["mlp"]}, None, "model.recompute_modules", "none; set that to selective, or leave"),
    ({"recompute_method": "block"}, None, "model.recompute_method", "none; set that to full, or leave this out"),
    ({"recompute_num_layers": 2}, None, "model.recompute_num_layers", "none; set that to full, or leave this out"),
    ({"num_microbatches_with_partial_activation_checkpoints": 1}, None,
     "model.num_microbatches_with_partial_activation_checkpoints", "none, which recomputes nothing; set that"),
    ({**FULL, "num_microbatches_with_partial_activation_checkpoints": -1}, None,
     "model.num_microbatches_with_partial_activation_checkpoints", "must be at least 0"),
    # data parallelism and the distributed optimizer
    ({"data_parallel": "ddp"}, None, "optim.data_parallel", "must be one of bucketed, naive"),
    ({"data_parallel": "naive", "distributed_optimizer": True}, None, "optim.distributed_optimizer", "to bucketed"),
    ({"data_parallel": "naive", "average_in_collective": True}, None, "optim.average_in_collective", "to bucketed"),
    ({"data_parallel": "naive", "bucket_size": 100}, None, "optim.bucket_size", "with optim.data_parallel = naive"),
    ({"overlap_grad_reduce": False, "bucket_size": 100}, None, "optim.bucket_size", "which leaves one bucket; set"),
    ({"bucket_size": 0}, None, "optim.bucket_size", "must be at least 1"),
    ({"overlap_param_gather": True}, None, "optim.overlap_param_gather", "= false, which leaves parameters"),
    ({"num_distributed_optimizer_instances": 2}, None, "optim.num_distributed_optimizer_instances",
     "no effect with optim.distributed_optimizer = false, which leaves parameters and their states whole on every"),
    ({**ZERO, "num_distributed_optimizer_instances": 3}, 4, "optim.num_distributed_optimizer_instances",
     "must divide dp x cp = 4; choose 1, 2 or 4"),
    ({**ZERO, "num_distributed_optimizer_instances": 0}, None, "optim.num_distributed_optimizer_instances",
     "must be at least 1"),
    *[({"precision": precision, "grad_reduce_in_bf16": True}, None, "optim.grad_reduce_in_bf16",
       f"no effect with optim.precision = {precision}, which has no gradients in bf16; set that to bf16")
      for precision in ("fp32", "fp16", "fp64")],
    ({"precision": "bf16", "grad_reduce_in_bf16": True, "data_parallel": "naive"}, None, "optim.grad_reduce_in_bf16",
     "no effect with optim.data_parallel = naive"),
    ({"average_in_collective": True, "calculate_per_token_loss": True}, None, "optim.average_in_collective",
     "excludes optim.calculate_per_token_loss"),
    # precision
    ({"loss_scale": 128.0}, None, "optim.loss_scale", "optim.precision = fp32, which scales no loss; set that"),
    ({"precision": "bf16", "loss_scale": 128.0}, None, "optim.loss_scale", "= bf16, which scales no loss; set"),
    *[({**FP16, "loss_scale": scale}, None, "optim.loss_scale", "must be at least 1") for scale in (0.0, 0.5)],
    ({**FP16, "loss_scale": 1e38}, None, "optim.loss_scale", "must be at most 1e+30"),
    ({**FP16, "initial_loss_scale": -1.0}, None, "optim.initial_loss_scale", "must be greater than 0"),
    ({**FP16, "min_loss_scale": 1e6}, None, "optim.min_loss_scale", "at most optim.initial_loss_scale = 65536"),
    ({**FP16, "loss_scale_window": 0}, None, "optim.loss_scale_window", "must be at least 1"),
    ({**FP16, "hysteresis": 0}, None, "optim.hysteresis", "must be at least 1"),
    *[({**FP16, "loss_scale": 128.0, name: 4}, None, f"optim.{name}", "a constant that never moves") for name in (
        "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")],
    *[({"precision": precision, name: 4}, None, f"optim.{name}", f"no effect with optim.precision = {precision}")
      for precision in ("fp32", "bf16", "fp64")
      for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")],
    ({**FP16, "fp8": "hybrid"}, None, "optim.fp8", "not fp16"),
    ({"fp8": "e5m2"}, None, "optim.fp8", "must be one of none, e4m3, hybrid"),
    ({"fp8": "hybrid", "fp8_recipe": "block"}, None, "optim.fp8_recipe", "must be one of delayed, current, blockwise"),
    ({"fp8": "hybrid", "fp8_amax_history_len": 0}, None, "optim.fp8_amax_history_len", "must be at least 1"),
    ({"fp8": "hybrid", "fp8_amax_compute_algo": "mean"}, None, "optim.fp8_amax_compute_algo", "max, most_recent"),
    ({"fp8": "hybrid", "fp8_margin": -1}, None, "optim.fp8_margin", "must be at least 0"),
    ({"fp8_recipe": "current"}, None, "optim.fp8_recipe", "no effect with optim.fp8 = none"),
    *[({"fp8": "hybrid", "fp8_recipe": recipe, name: value}, None, f"optim.{name}", f"recipe = {recipe}; set that to")
      for recipe in ("current", "blockwise")
      for name, value in (("fp8_margin", 1), ("fp8_amax_history_len", 4), ("fp8_amax_compute_algo", "most_recent"))],
    ({"fp8": "e4m3", "fp8_amax_compute_algo": "most_recent", "fp8_amax_history_len": 4}, None,
     "optim.fp8_amax_history_len", "algo = most_recent; set that to max"),
    *[({**COMPILED, **other}, None, "model.compile", rule) for other, rule in [
        (ENGINE, "cannot look into Transformer Engine"),
        ({"family": "mamba", "position": "none"}, "only the layers of a GPT"),
        ({"fp8": "hybrid"}, "fp8 products keep scales"),
        ({"cuda_graph_impl": "emulated"}, "captured or compiled, not both"),
        ({"schedule.name": "zbv", "pp": 2}, "this schedule splits them"),
        ({"variable_seq_lengths": True, "pp": 2}, "every new length"),
        ({"attention_backend": "math"}, "choose fused or unfused"),
        ({"attention_dropout": 0.1}, "attention dropout draws"),
        ({"hidden_dropout": 0.1, **SP}, "model.hidden_dropout to 0"),
    ]],
    ({**COMPILED, **SELECTIVE}, None, "model.recompute_modules", "core_attn is in a region of model.compile"),
    ({**ENGINE, "precision": "fp64"}, None, "model.transformer_impl", "Transformer Engine has no fp64"),
    *[({**ENGINE, "attention_backend": kernel}, None, "model.attention_backend", "Transformer Engine chooses")
      for kernel in ("unfused", "flash", "cudnn", "efficient", "math")],
    *[({"precision": "bf16", "cp": 2, "attention_backend": kernel}, 2, "model.attention_backend", "only flash gives")
      for kernel in ("cudnn", "efficient", "math")],
    *[({"precision": precision, "attention_backend": "cudnn"}, None, "model.attention_backend", "takes 16-bit types")
      for precision in ("fp32", "fp64")],
    ({"precision": "fp64", "attention_backend": "efficient"}, None, "model.attention_backend", "no 64-bit type"),
    ({**ENGINE, **SELECTIVE, "recompute_modules": ["layernorm"]}, None, "model.recompute_modules", "no output to drop"),
    # optimizer, batches, data
    ({"min_lr": 1.0}, None, "optim.min_lr", "must be at most optim.lr = 0.001"),
    ({"warmup_steps": 21}, None, "optim.warmup_steps", "must be below train.steps = 20"),
    ({"warmup_steps": 6, "decay_steps": 5}, None, "optim.warmup_steps", "must be below optim.decay_steps = 5"),
    ({"warmup_steps": 20}, None, "optim.warmup_steps", "must be below train.steps = 20"),
    ({"lr_schedule": "wsd", "warmup_steps": 19}, None, "optim.wsd_decay_steps", "a tenth of the decay, 2 steps"),
    ({"lr_schedule": "wsd", "warmup_steps": 10, "wsd_decay_steps": 11}, None, "optim.wsd_decay_steps", "at most 10"),
    *[({"lr_schedule": "constant", name: value}, None, f"optim.{name}",
       "no effect with optim.lr_schedule = constant, which does not decay; set that to cosine")
      for name, value in (("min_lr", 1e-4), ("decay_steps", 10))],
    ({"eval_interval": 4}, None, "train.eval_interval", "no effect with train.eval_steps = 0; set that above 0"),
    ({"wsd_decay_steps": 2}, None, "optim.wsd_decay_steps", "no effect with optim.lr_schedule = cosine; set that to"),
    ({"wsd_decay_style": "linear"}, None, "optim.wsd_decay_style", "no effect with optim.lr_schedule = cosine"),
    ({"loggers": ["wandb", "tensorbord"]}, None, "train.loggers", "no logger 'tensorbord'; choose from tensorboard"),
    ({"loggers": ["tensorboard"]}, None, "train.loggers", "set train.output_dir or train.tensorboard_dir"),
    ({"profile": "pytorch"}, None, "train.profile", "pytorch writes traces into train.output_dir; set"),
    ({"profile_step_end": 4}, None, "train.profile_step_end", "no effect with train.profile = none"),
    ({"profile": "nsys", "profile_step_start": 12}, None, "train.profile_step_start", "below train.profile_step_end"),
    ({"profile": "nsys", "steps": 10}, None, "train.profile_step_start", "must be below train.steps = 10"),
    ({"profile": "nsys", "profile_ranks": (2,)}, 2, "train.profile_ranks", "no rank 2; name ranks from 0 to 1"),
    ({"profile": "nsys", "profile_ranks": (-1,)}, None, "train.profile_ranks", "no rank -1; name ranks from 0, or"),
    ({"micro_batch_size": 3}, None, "train.global_batch_size", "= 3; choose micro_batch_size from 1, 2"),
    ({"micro_batch_size": 32}, None, "train.global_batch_size", "or train.global_batch_size = 32"),
    ({}, 3, "train.global_batch_size", "micro_batch_size x dp = 1 x 3 = 3; try 18"),
    ({"micro_batch_size": 4}, 8, "train.global_batch_size", "4 x 8 = 32; try 32"),
    *[({"data.split": split}, None, "data.split", "three shares") for split in (
        "90", "90,10", "a,b,c", "90,5,5,0", "-1,1,1", "0,0,0", "nan,1,1", "inf,1,1", "", "1e308,1e308,1", "1_0,5,5")],
    ({"data.split": "0,50,50"}, None, "data.split", "the training text and must be above 0"),
    ({"data.split": "100,0,0", "eval_steps": 1}, None, "data.split", "feeds the validations"),
    ({"data.path": "/nowhere/text.txt"}, None, "data.path", "no such file"),
    ({"data.path": "/tmp"}, None, "data.path", "is a folder; give a file"),
    ({"data.tokenizer": "/nowhere/t.json"}, None, "data.tokenizer", "no such file"),
    *[({name: sys.executable}, None, f"train.{name}", "is a file; name a folder") for name in (
        "output_dir", "tensorboard_dir")],
    ({"write_events": True}, None, "train.write_events", "no effect without train.output_dir; set that"),
    ({"overwrite": True}, None, "train.overwrite", "no effect without train.output_dir; set that"),
    ({"interval": 9}, None, "checkpoint.interval", "no effect without checkpoint.dir or train.output_dir; set one"),
    ({"output_dir": "runs", "keep": 3}, None, "checkpoint.keep", "without checkpoint.dir or checkpoint.interval; set"),
]  # fmt: skip

# (YAML text, part of the message)
TEXTS: list[tuple[str, str]] = [
    ("paralel: {tp: 2}", "line 1: 'paralel': unknown field; did you mean \"parallel\"?"),
    ("parallel: {tpp: 2}", "line 1: 'parallel.tpp': unknown field; did you mean \"tp\"?"),
    ("parallel: {layers: 2}", 'belongs to another section: "model.layers"'),
    ("tensor_model_paralel_size: 2", 'did you mean "tensor_model_parallel_size"?'),
    ("path: a.txt", "several sections have this field; write one of schedule.path, data.path"),
    ("world_size: 8", "the world size is that of the launch"),
    ("parallel: {dp: 2}", "data parallelism takes the remaining ranks"),
    ("parallel: 2", ": a section holds fields, as in `parallel: {field: value}`"),
    ("parallel: [tp, 2]", ": a section holds fields, as in `parallel: {field: value}`"),
    ("- parallel", "a configuration is a mapping"),
    ("just text", "a configuration is a mapping"),
    ("parallel: {tp: 2, tp: 4}", "'parallel.tp': given twice, first in line 1"),
    ("parallel: {tp: 2}\nparallel: {pp: 2}", "line 2: 'parallel': given twice, first in line 1"),
    ("parallel: {tp: 2}\ntensor_model_parallel_size: 2", "line 2: parallel.tp: given twice"),
    ('parallel: {tp: "2"}', "parallel.tp = '2': must be an integer, not text; write it without quotes"),
    ("parallel: {tp: 2.0}", "must be an integer, not a number; write it without a decimal point"),
    ("parallel: {tp: 1e1}", "must be an integer, not a number"),
    *(
        (
            f"parallel: {{tp: {word}}}",
            f"parallel.tp = '{word}': must be an integer, not text; write a decimal number without",
        )
        for word in ("0x10", "0o10", "0b1", "08", "1_000", "1:30", "-0o7", "01e3")
    ),
    ("parallel: {tp: 010}", "not text; a leading 0 is octal in YAML 1.1 and not in YAML 1.2: write 10 or 8"),
    ('parallel: {tp: "010"}', "not text; a leading 0 is octal in YAML 1.1 and not in YAML 1.2: write 10 or 8"),
    ("parallel: {tp: true}", "must be an integer, not true/false"),
    ("parallel: {tp: null}", "must be an integer, not nothing (null)"),
    ("parallel: {tp: }", "must be an integer, not nothing (null)"),
    ("parallel: {tp: [2]}", "must be an integer, not a list"),
    ("parallel: {tp: {a: 2}}", "must be an integer, not a mapping"),
    (f"parallel: {{tp: {'9' * 5000}}}", "not valid YAML"),
    ("parallel: {sequence_parallel: yes}", "must be true or false, not text; write true"),
    ("parallel: {sequence_parallel: Off}", "must be true or false, not text; write false"),
    ("optim: {lr: 01.5}", "optim.lr = '01.5': must be a number, not text; write a decimal number without a leading 0"),
    ("parallel: {sequence_parallel: 1}", "must be true or false, not an integer"),
    ('parallel: {sequence_parallel: "true"}', "must be true or false, not text; write it without quotes"),
    ("parallel: {order: 5}", "parallel.order = 5: must be text, not an integer; put it in quotes"),
    ("parallel: {order: [tp, pp]}", "must be text, not a list"),
    ("optim: {lr: fast}", "optim.lr = 'fast': must be a number, not text"),
    ('optim: {lr: "1e-4"}', "write it without quotes"),
    ("optim: {lr: .nan}", "must be a finite number"),
    ("optim: {lr: .inf}", "must be a finite number"),
    ("optim: {lr: 1e999}", "must be a finite number"),
    ("optim: {lr: true}", "must be a number, not true/false"),
    ("data: {path: 5}", "data.path = 5: must be text, not an integer; put it in quotes"),
    ("graph: {cuda_graph_modules: attn}", "must be a list of words, not text"),
    ("moe: {layer_freq: 2}", "must be a list of integers, not an integer; 1 is a layer with experts and 0 a dense one"),
    ("moe_layer_freq: 2", "Megatron's N = 2, one such layer in 2, is [1, 0]"),
    ("moe_layer_freq: '([0]*1+[1]*3)'", "its '[0]*1+[1]*3' is [0, 1, 1, 1]"),
    ("moe: {layer_freq: [1, yes]}", "must be a list of integers, not a list"),
    ("graph: {cuda_graph_modules: [1]}", "must be a list of words, not a list"),
    ("1: 2", "a key must be a name, not an integer"),
    ("null: 2", "a key must be a name"),
    ("? [a, b]\n: 2", "unknown field"),
    ("optim: {? {a: b} : 2}", "unknown field"),
    ("optim: {lr: 1e-3", "line 1: not valid YAML"),
    ("optim: {lr: 1e-3}}", "not valid YAML"),
    ("optim:\n\tlr: 1", "line 2: not valid YAML"),
    ("a: b: c", "not valid YAML"),
    ("optim: {lr: 1}\n---\noptim: {lr: 2}", "not valid YAML"),
    ("optim: {lr: \x07}", "not valid YAML"),
    ("optim: &x {lr: 1}", "an anchor or alias is not allowed here"),
    ("optim: *x", "an anchor or alias is not allowed here"),
    ("optim: {<<: {lr: 1}}", "'optim.<<': unknown field"),
    ("optim: !!python/object/apply:os.system ['true']", "a tag is not allowed here"),
    ("optim: !!map {lr: 1}", "a tag is not allowed here"),
    ("optim: {lr: !!float 1}", "a tag is not allowed here"),
    ("[" * 3000, "nested too deeply"),
    ("{a: " * 3000, "nested too deeply"),
]

# (arguments of labkit, part of the message)
COMMANDS: list[tuple[list[str], str]] = [
    (
        ["grops"],
        f"unknown command 'grops'; commands: {', '.join(COMMAND_LINE)}; did you mean \"groups\"?",
    ),
    (["--worldsize"], "unknown option '--worldsize'"),
    (["groups"], "--world-size: is missing"),
    (["groups", "--world-size"], "--world-size: needs a value after it"),
    (["groups", "--world-size", "eight"], "--world-size 'eight': must be an integer"),
    (["groups", "--world-size", "8.0"], "--world-size '8.0': must be an integer"),
    (["groups", "--world-size", "8", "--tp", "-1"], "groups: --tp -1: must be at least 1"),
    (
        ["train", "--preset", "tiny", "--tp", "-1", "--nproc", "0"],
        "1. --tp -1: must be at least 1\n  2. --nproc 0: must",
    ),
    (["train", "--config", str(FOLDER)], ": is a folder; give a file"),
    (["groups", "--world-size", "0"], "--world-size 0: must be at least 1"),
    (["groups", "--world-size", "-1"], "--world-size -1: must be at least 1"),
    (["groups", "--world-size", "2147483648"], "--world-size 2147483648: must be at most"),
    (["groups", "--world-size", "2147483647"], "add --rank r for the groups of one rank"),
    (["groups", "--world-size", "8", "--tp", "3"], "tp x cp x pp = 3 x 1 x 1 = 3; launch 6 or 9 ranks"),
    (["groups", "--world-size", "8", "--rank", "8"], "--rank 8: this layout's ranks are 0 to 7"),
    (["groups", "--world-size", "8", "--order", "tp-pp", "--pp", "2"], "dp is missing although its size is 4"),
    (["groups", "--worldsize", "8"], '--worldsize: unknown option; did you mean "--world-size"?'),
    (["groups", "--world", "8"], "--world: unknown option"),
    (["groups", "8"], "labkit groups takes only options"),
    (["groups", "-tp", "8"], "-tp: unknown option"),
    (["train"], "--config: nothing to run; give a preset (--preset tiny), a file (--config f.yaml) or fields"),
    (["train", "--nproc", "2"], "--config: nothing to run"),
    (["train", "--num-layer", "12"], 'labkit train: --num-layer: unknown option; did you mean "--num-layers"?'),
    (["train", "--config", "/nowhere.yaml"], "no such file"),
    (["train", "--preset", "tiney"], 'did you mean "tiny"?'),
    (["train", "--preset", "tiny", "--tensor-paralel-size", "2"], "--tensor-paralel-size: unknown option"),
    (
        ["train", "--preset", "tiny", "--parallel.tpp", "2"],
        '--parallel.tpp: unknown option; did you mean "--parallel.tp"?',
    ),
    (["train", "--preset", "tiny", "--parallel.tp", "two"], "--parallel.tp 'two': must be"),
    (["train", "--preset", "tiny", "--parallel.tp"], "--parallel.tp: needs a value after it"),
    (["train", "--preset", "tiny", "--lr", "nan"], "must be a finite number"),
    (["train", "--preset", "tiny", "--nproc", "3"], "train.global_batch_size = 16"),
    (
        ["train", "--preset", "tiny", "--tp", "3", "--nproc", "3"],
        "model.heads = 8: must be a multiple of parallel.tp = 3",
    ),
    (["train", "--preset", "tiny", "--ep", "2"], "splits experts, but moe.num_experts = 0"),
    (["train", "--preset", "tiny", "--num-experts", "6", "--ep", "4", "--nproc", "4"], "--num-experts 6: must be"),
    (["train", "--preset", "tiny", "--num-moe-experts", "8", "--ep", "4", "--nproc", "6"], "--nproc 6: must be a"),
    (
        ["train", "--preset", "tiny", "--num-experts", "8", "--moe-layer-freq", "[1]*8"],
        "must be a list of integers, as",
    ),
    (
        ["train", "--preset", "tiny", "--num-experts", "8", "--moe-layer-freq", "2"],
        "integer 2, one layer with",
    ),
    (["train", "--preset", "tiny", "--path", "x"], "several sections have this field"),
    (["train", "--preset", "tiny", "--dp", "2"], "data parallelism takes the remaining ranks"),
    (["parity", "--preset", "tiny", "--layouts", "tp=3"], "layout tp=3: model.heads = 8"),
    (["parity", "--preset", "tiny", "--layouts", "tp:2"], "write axis=size"),
    (["parity", "--preset", "tiny", "--layouts", "dp=0"], "must be an integer of at least 1"),
    (["parity", "--preset", "tiny", "--layouts", "tq=2"], "'tq': unknown field"),
    (
        ["parity", "--preset", "tiny", "--layouts", "pp=2,schedule=gpipe"],
        "'schedule': is a section; write one of its fields, such as schedule.name",
    ),
    (
        ["train", "--preset", "tiny", "--device", "cud"],
        "--device 'cud': must be one of auto, cpu, cuda; did you mean \"cuda\"?",
    ),
    (["train", "--preset", "tiny", "--timeout", "0"], "--timeout 0.0: must be greater than 0"),
    (["train", "--preset", "tiny", "--timeout", "604801"], "--timeout 604801.0: must be at most 604,800"),
    (["parity", "--preset", "tiny", "--timeout", "inf"], "--timeout 'inf': must be a finite number"),
    (["train", "--preset", "tiny", "--trace", "/nowhere/run.json"], "--trace '/nowhere/run.json': there is no folder"),
    (["train", "--preset", "tiny", "--trace", "/"], "--trace '/': is a folder; give a file"),
    (["train", "--preset", "tiny", "--trace", "/dev/null"], "--trace '/dev/null': is not a regular file"),
    (["train", "--preset", "tiny", "--trace", ""], "--trace '': a path must not be empty"),
    (["train", "--preset", "tiny", "--trace", "/proc/run.json"], "give a path that can be written"),
    (["parity", "--preset", "tiny", "--timeout", "-1"], "--timeout -1.0: must be greater than 0"),
    (["run", "--timeout", "0"], "--timeout 0.0: must be at least 1"),
    (["parity", "--preset", "tiny", "--steps", "0"], "--steps 0: must be at least 1"),
    (["parity", "--preset", "tiny", "--dtype", "fp8"], "must be one of float64, float32"),
    (
        ["parity", "--preset", "tiny", "--device", "cud"],
        "--device 'cud': must be one of auto, cpu, cuda; did you mean \"cuda\"?",
    ),
    (["parity", "--preset", "tiny", "--world-size", "0"], "--world-size 0: must be at least 1"),
    (["parity", "--preset", "tiny", "--world-size", "3"], "micro_batch_size x dp = 1 x 3 = 3"),
    (["parity", "--preset", "tiny", "--drop", "operation=allreduce"], 'did you mean "all_reduce"?'),
    (["parity", "--preset", "tiny", "--drop", "operation=all_reduce,group=tpp"], 'did you mean "tp"?'),
    (["parity", "--preset", "tiny", "--drop", "phase=forwards"], 'did you mean "forward"?'),
    (
        ["train", "--preset", "tiny", "--schedule.path", "/etc/hostname"],
        "schedule.path = '/etc/hostname': rank 0, position 0",
    ),
    (
        ["parity", "--preset", "tiny", "--schedule.path", "/etc/hostname"],
        "schedule.path = '/etc/hostname': rank 0, position 0",
    ),
    (["train", "--preset", "tiny", "--schedule.path", TWO_BY_TWO, "--pp", "2"], "2 microbatches, the run has 16"),
    (
        ["train", "--preset", "tiny", "--schedule.path", TWO_BY_TWO, "--global-batch-size", "2"],
        "2 ranks, the run has 1",
    ),
    (
        ["train", "--preset", "tiny", "--schedule.path", CIRCLE, "--pp", "2", "--global-batch-size", "2"],
        "these wait for each other",
    ),
    (["train", "--preset", "tiny", "--vocab-size", "512"], "tokenizer mismatch"),
    (["parity", "--preset", "tiny", "--vocab-size", "512"], "tokenizer mismatch"),
    (
        ["train", "--preset", "table4_336m", "--layers", "1", "--nproc", "1"],
        "model.vocab_size = 30522: data.tokenizer is not",
    ),
    (["train", "--preset", "tiny", "--data.path", SHORT_TEXT], "one sample needs model.seq_length + 1 = 65"),
    (["train", "--preset", "tiny", "--data.tokenizer", SHORT_TEXT], "is not a tokenizer in the JSON format"),
    (["parity", "--preset", "tiny", "--drop", "all_reduce"], "--drop 'all_reduce': write operation=all_reduce"),
    (["run"], "no chapter named"),
    (["run", "99"], "'99': no such chapter; chapters in "),
    (["run", "tours"], "'tours': no such chapter; chapters in "),
    (["run", "10", "-p", "world_size", "3"], "-p world_size '3': must be 2, 4 or 8 in 10_p2p_and_1f1b"),
    (["run", "10", "--out", f"{__file__}/below"], "test_config_bad.py/below': cannot be written; name another folder"),
    (["run", "nowhere.ipynb"], "no such file"),
    (["run", "-p", "steps"], "needs a name and a value"),
    (["train", "--preset", "tiny", "--output-dir", f"{SHORT_TEXT}/run"], "cannot be written (Not a directory); name a"),
    (
        ["train", "--preset", "tiny", "--device", "cpu", "--cuda-graph-impl", "local"],
        "--cuda-graph-impl local: it captures on cuda, but this run is on cpu; set it to emulated or none",
    ),
    (
        ["parity", "--preset", "tiny", "--layouts", "tp=2", "--device", "cpu", "--cuda-graph-impl", "local"],
        "--cuda-graph-impl local: it captures on cuda, but this run is on cpu; set it to emulated or none",
    ),
    (["train", "--preset", "mixtral_8x7b", "--device", "cpu", "--layers", "3200"], "32 ranks need"),
    (
        ["parity", "--preset", "tiny", "--device", "cpu", "--hidden", "65536", "--layouts", "tp=2"],
        "one process: 1 rank",
    ),
    *[
        (words, "'': a path must not be empty; name one")
        for words in (
            ["watch", ""],
            ["checkpoint", "list", ""],
            ["checkpoint", "export", ".", ""],
            ["run", ""],
            ["run", "00", "--notebooks="],
            ["data", "show", ""],
            ["data", "prepare", SHORT_TEXT, ""],
            ["data", "prepare", SHORT_TEXT, "x", "--tokenizer", ""],
            ["train", "--config", ""],
        )
    ],
    *[
        (words, "...: a name in it has 256 bytes, but at most 255 are allowed; shorten it")
        for words in (
            ["watch", LONG],
            ["data", "show", LONG],
            ["train", "--config", LONG],
        )
    ],
    (["data", "prepare", SHORT_TEXT, "/nowhere/x"], "PREFIX '/nowhere/x.bin': there is no folder '/nowhere'"),
    (["data", "clean", SHORT_TEXT, str(FOLDER), "--overwrite"], f"OUT.jsonl {str(FOLDER)!r}: is a folder; give a file"),
    (["data", "prepare", SHORT_TEXT, LONG[6:]], "its name has 254 bytes, but at most 225 are allowed; shorten it"),
]


OPTIONS_WITH_PATHS = [
    (command, option.name)
    for command, (module, _) in COMMAND_LINE.items()
    for option in import_module(f"labkit.cli.{module}").COMMAND.options
    if option.path and command != "data"  # whose options belong to an action
]

# changes to presets.tiny() in which every field has an effect
SOUND: list[dict] = [
    {**FP16, "initial_loss_scale": 4, "min_loss_scale": 2, "loss_scale_window": 7, "hysteresis": 3},
    {**FP16, "loss_scale": 1.0},
    {"fp8": "hybrid", "fp8_margin": 1, "fp8_amax_history_len": 4},
    {"fp8": "e4m3", "fp8_amax_compute_algo": "most_recent"},
    {"lr_schedule": "wsd", "wsd_decay_steps": 2, "wsd_decay_style": "linear"},
    {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
    {**SELECTIVE, "recompute_modules": ["mlp"]},
    {**MOE, "ep": 4, "aux_loss_coeff": 0.01, "z_loss_coeff": 1e-3, "input_jitter": 0.01},
    {**MOE, "ep": 2, "etp": 2, "dispatcher": "allgather", "layer_freq": [1, 0]},
    {**MOE, **SP, "etp": 1, "ep": 4, "capacity_factor": 1.0, "drop_policy": "position", "pad_to_capacity": True},
    {**GROUPS, "top_k": 4, "score_function": "sigmoid", "expert_bias": True, "expert_bias_update_rate": 0.01},
    {**MOE, "top_k": 1, "pre_softmax": True, "topk_scaling_factor": 2.5},
    {**SINKHORN, "top_k": 1},
    {**SHARED, "shared_expert_gate": True, "shared_expert_overlap": True, "layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]},
    {**SHARED, **SELECTIVE, "recompute_modules": ["shared_experts", "layernorm"], "dispatcher": "local"},
    {**MOE, **SELECTIVE, "recompute_modules": ["moe", "core_attn"], "grouped_gemm": False},
    {**MOE, **SELECTIVE, "recompute_modules": ["moe", "mlp"], "layer_freq": [1, 0]},
    {"num_experts": 1, "top_k": 1},
]


PATHS = [name for name, spec in SPECS.items() if spec.path]
BAD_PATHS: dict[str, str] = {
    "": "a path must not be empty",
    " \t": "a path must not be empty",
    LONG: "a name in it has 256 bytes, but at most 255 are allowed",
    "\u20ac" * 86: "a name in it has 258 bytes",
    "b/" * 2100: "has 4,200 bytes, but a path can have at most 3,840",
    "a\0b": "a file name cannot contain a NUL",
    "\ud800": "a file name cannot contain a NUL or half of a surrogate pair",
    "~nobody-has-this-name/a": "~nobody-has-this-name is not the home folder of any user",
}


@pytest.mark.parametrize("field", PATHS)
@pytest.mark.parametrize(("path", "rule"), BAD_PATHS.items(), ids=range(len(BAD_PATHS)))
def test_a_path_that_no_file_can_have_is_refused_by_its_field(field: str, path: str, rule: str) -> None:
    """However it is given: as a change, on the command line, or to the section itself."""
    section, _, name = field.partition(".")
    value = (path,) if SPECS[field].kind.startswith("tuple") else path
    with pytest.raises(ConfigError) as caught:
        presets.tiny().override({field: value})
    [problem] = caught.value.problems
    assert problem.startswith(f"{field} = ") and rule in problem
    made = RunConfig(**{section: SECTIONS[section](**{name: value})})
    assert any(problem.startswith(f"{field} = ") and rule in problem for problem in made.problems())
    if value == path and "\0" not in path:
        with pytest.raises(BadValueError, match=re.escape(rule)):
            SPECS[field].convert(path, text=True)


@pytest.mark.parametrize("field", [name for name in PATHS if SPECS[name].path == "folder"])
def test_a_folder_is_no_file_and_no_link_to_nothing(tmp_path: Path, field: str) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for path, rule in ((SHORT_TEXT, "is a file"), (str(tmp_path / "link"), "is a dangling symbolic link")):
        [problem] = presets.tiny().override({field: path}).problems()
        assert problem.startswith(f"{field} = ") and problem.endswith(f": {rule}; name a folder")


@pytest.mark.parametrize("changes", SOUND, ids=str)
def test_what_has_an_effect_is_allowed(changes: dict) -> None:
    presets.tiny().override(changes).validate(4)


def test_there_are_enough() -> None:
    assert len(RULES) + len(TEXTS) + len(COMMANDS) >= 150 and len(COMMANDS[::2]) >= 20


@pytest.mark.parametrize(("changes", "world_size", "field", "rule"), RULES)
def test_rule(changes: dict, world_size, field: str, rule: str) -> None:
    start = time.process_time()
    config = presets.tiny().override(changes)
    with pytest.raises(ConfigError) as caught:
        config.validate(world_size)
    assert time.process_time() - start < AT_ONCE
    value = world_size if field == "world_size" else config.to_dict()[field.split(".")[0]][field.split(".")[1]]
    mine = [p for p in caught.value.problems if p.startswith(f"{field} = {value!r}: ") or isinstance(value, list)]
    assert any(rule in p for p in mine), caught.value.problems


@pytest.mark.parametrize(("text", "message"), TEXTS)
def test_text(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(path)
    assert time.process_time() - start < AT_ONCE
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("words", "message"), COMMANDS)
def test_command(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert message in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize(("command", "option"), OPTIONS_WITH_PATHS)
def test_a_path_that_no_file_can_have_is_refused_by_its_option(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, rule in (("", "a path must not be empty; name one"), (LONG, "a name in it has 256 bytes, but at most")):
        assert main([command, f"--{option}", path]) == 2
        assert re.search(rf"--{option} '{path[:5]}.*{re.escape(rule)}", capsys.readouterr().err)


@pytest.mark.parametrize(("words", "message"), COMMANDS[::2])
def test_process(words: list[str], message: str) -> None:
    """The same through a process: message on stderr, code 2, no traceback."""
    done = subprocess.run([LABKIT, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == "" and message in done.stderr and "Traceback" not in done.stderr


def test_a_process_refuses_at_once() -> None:
    """At most 0.5 s, start of Python and imports included: processor time, which other processes do not lengthen."""
    for words in (COMMANDS[0][0], COMMANDS[22][0], COMMANDS[30][0]):
        best = float("inf")
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([LABKIT, *words], capture_output=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert 0.0 < best <= 0.5


def test_a_bad_file_and_bad_options_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("parallel: {tpp: 2}\nmodel: {hidden: 60, heads: 8}\noptim: {lr: -1}\n")
    words = [
        "train",
        "--config",
        str(path),
        "--nproc",
        "4",
        "--seeed",
        "1",
        "--steps",
        "x",
        "--model.layers",
        "7",
        "--pp",
        "2",
    ]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("labkit train: 6 problems\n")
    for part in ("--seeed", "line 1: 'parallel.tpp'", "--steps 'x'", "model.hidden = 60", "optim.lr = -1",
                 "model.layers = 7"):  # fmt: skip
        assert part in err


def test_without_a_number_of_ranks_a_bad_layout_is_one_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "tiny", "--parallel.tp", "3"]) == 2
    err = capsys.readouterr().err
    assert "model.heads = 8: must be a multiple of parallel.tp = 3" in err and "world_size" not in err
