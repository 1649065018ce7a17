"""Rows of tables in the form of `published.csv` as workloads, with what they leave out filled in by stated rules.

A row states a model, a machine, a layout and a step time, or a rate from which the time follows. What it leaves out is
filled in by `SOURCES`, which says for each source what its text or its code says elsewhere, and by `RULES`, which says
how the rest is chosen and why. A row that a `RunConfig` cannot express is named with the reason. No torch.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.config import RunConfig
from labkit.config.errors import shown
from labkit.plan.flops import paper_step_flops, step_flops
from labkit.plan.machine import load_machine
from labkit.plan.rows import PlannedRow, measured, too_large
from labkit.plan.workload import Libraries, Workload

RULES = {
    "one of each axis": "an axis that the row does not name has size 1: papers name the axes that they use",
    "one layer per chunk": "the source interleaves: Llama 3 says so, and the MFU of arXiv 2504.14960 falls less from "
    "128 to 1,024 GPUs than the bubble without interleaving would cost",
    "two experts per token": "Llama3-8x70B is upcycled as in arXiv 2410.07524, whose models with 8 experts use two",
    "experts of one rank": "folding gives experts a layout of their own (arXiv 2504.14960); its other rows have etp 1",
    "vpp 2": "interleaved without a number of chunks: two is the least, and torchtitan's default",
    "vpp 1": "interleaving that is not stated is not used: it is named where a table varies it",
    "micro batch 1": "large models run one sample at a time",
    "batch of one microbatch": "no global batch is stated; a step has one microbatch per data-parallel rank",
    "vocabulary 50304": "not stated; GPT-2's 50,257 words padded to a multiple of 128",
    "precision bf16": "not stated; large models have trained in bf16 since GPUs have it",
    "no recomputation": "not stated, and no sign of it in the text",
    "pipeline layout": "the text says that the first and the last stage have one layer less",
    "64 data-parallel ranks": "arXiv 1909.08053, section 4: batches of 512 on 64 groups of 8",
    "width of dense layers": "all layers have experts, so the width of a dense MLP is not used",
    "microbatches of torchtitan": "as many microbatches as stages, torchtitan's default in December 2024",
}
"""Name of a rule -> what it fills in, and why."""


_MEGATRON = Libraries(megatron=True)


@dataclass(frozen=True)
class Source:
    """What a source says outside of its tables."""

    software: str
    """Generation of its training code."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that all its rows have."""
    causal_flops: bool = False
    """Its TFLOP/s and MFU count half of attention."""
    specified: bool = True
    """The rows and the text say enough for a comparison."""
    one_layer_chunks: bool = False
    """Its pipelines interleave, with one layer in each chunk, where the row states no number of chunks."""
    why: str = ""
    """Where the fields are from."""
    libraries: Libraries = _MEGATRON
    """Libraries of its runs, which decide their memory; the GPU is the row's."""


_UNFUSED = {"model.attention_backend": "unfused", "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
_DISTRIBUTED = {"optim.distributed_optimizer": True, "optim.overlap_grad_reduce": True,
                "optim.overlap_param_gather": True, "model.transformer_impl": "transformer_engine"}  # fmt: skip
SOURCES = {
    "arXiv 2104.04473": Source(
        "megatron_2021", _UNFUSED | {"optim.overlap_grad_reduce": False},
        why="examples/academic_paper_scripts/sc21: fp16, dropout, DDP local (torch where pp is 1), no flash attention",
    ),
    "arXiv 2205.05198": Source(
        "megatron_2022", _UNFUSED | {"optim.overlap_grad_reduce": False},
        why="section 6: attention dropout; data parallelism is not overlapped",
    ),
    "arXiv 1909.08053": Source(
        "megatron_2019", _UNFUSED | {"optim.overlap_grad_reduce": True, "model.recompute_granularity": "full"},
        why="section 4: dropout 0.1, activation checkpointing of every layer, fp16 with dynamic loss scale",
    ),
    "Megatron-LM README, September 2020": Source(
        "megatron_2021", _UNFUSED | {"optim.overlap_grad_reduce": True, "model.recompute_granularity": "full"},
        specified=False, why="the README's command lines at that commit",
    ),
    "Megatron-Core README": Source(
        "megatron_tp_overlap", _DISTRIBUTED, specified=False,
        why="README: overlap of DP, TP and PP communication; micro batch, recomputation and interleaving not stated",
    ),
    "arXiv 2504.14960": Source(
        "megatron_core", _DISTRIBUTED, specified=False, one_layer_chunks=True,
        why="section 5: Megatron-Core 0.9, capacity factor 1; micro batch, interleaving, recomputation not stated",
    ),
    "torchtitan": Source(
        "torchtitan", {"optim.overlap_grad_reduce": True}, libraries=Libraries(),
        why="the README of benchmarks/: FSDP2, torch.compile",
    ),
    "arXiv 2407.21783": Source(
        "megatron_core", _DISTRIBUTED, specified=False, one_layer_chunks=True,
        why="section 3.3: one layer in each chunk, one less in the first and the last; parameters stay gathered",
    ),
    "arXiv 2401.10241": Source(
        "megatron_2023", {"model.attention_backend": "unfused"},
        why="section 5: a Megatron-LM of 2023 with fp16; attention kernels are not stated",
    ),
    "Megatron-Bridge": Source(
        "megatron_tp_overlap", _DISTRIBUTED, causal_flops=True, specified=False,
        why="recipes in src/megatron/bridge/perf_recipes: recomputation and graphs are not in the table; its recipes "
        "overlap tensor-parallel communication",
    ),
    "Megatron-MoE-ModelZoo": Source("megatron_core", _DISTRIBUTED, causal_flops=True, specified=False, why="readme"),
    "SimuMax": Source(
        "megatron_core",
        _DISTRIBUTED | {"optim.overlap_grad_reduce": False, "optim.overlap_param_gather": False},
        libraries=Libraries(megatron=True, fused_cross_entropy=True),
        why="Megatron-LM 0.14; communication not overlapped, cross entropy fused (its notes)",
    ),
    "MosaicML": Source(
        "foundry_2023", {"model.bias": False}, libraries=Libraries(),
        why="scripts/train/yamls/pretrain: FSDP, PURE mixed precision, flash attention, ALiBi, no biases",
    ),
}  # fmt: skip
"""Beginning of a source's name -> what it says outside of its tables."""

_MACHINES = (
    (r"A100.*?\b40 ?GB", "a100_40gb"),
    (r"A100", "a100"),
    (r"V100.*?\b16 ?GB", None),
    (r"V100", "v100"),
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"(?<!G)H200", "h200"),
    (r"H100.*(500 W|96 ?GB)", "h100_96gb"),
    (r"H100.*(PCIe|NVL(?!ink))", None),
    (r"H100", "h100"),
)
"""Pattern of the column `hardware` -> machine; the first that is found. None is a GPU without a machine in labkit."""


def machine_for(hardware: str) -> str | None:
    """Return the name of the machine that words such as `A100-SXM4-40GB` mean; None if there is none."""
    text = hardware.replace("_", " ")
    return next((name for pattern, name in _MACHINES if re.search(pattern, text, re.IGNORECASE)), None)


_GPT = {"model.bias": True}
_LLAMA = {
    "model.activation": "swiglu", "model.norm": "rmsnorm", "model.position": "rope", "model.bias": False,
    "model.untie_embeddings_and_output_weights": True,
}  # fmt: skip
_QWEN2_MOE = {"moe.shared_expert_ffn_hidden": 20480, "moe.shared_expert_gate": True}
"""Qwen2-57B-A14B has a shared expert, which tables of its sizes leave out (arXiv 2407.10671, table 1: 8 shared
experts of 2,560; from memory, unverified)."""
_WIDE_HEADS = r"Qwen3"
"""Models whose heads are wider than hidden / heads, which `ModelConfig` cannot say."""
_MODELS = (
    (r"GPT OSS|DeepSeek|Nemotron|Moonlight|Kimi", None),
    (r"GPT|MPT|BERT", _GPT),
    (r"Qwen2-57B-A14B", _LLAMA | _QWEN2_MOE),
    (r"Llama|LLAMA|Mixtral|Qwen", _LLAMA),
)
"""Pattern of the column `model` -> fields; None is a family that labkit has not (MLA, Mamba with experts)."""

_SCHEDULES = {"ZB-1p": "zero_bubble_h1", "ZB-V": "zbv", "DualPipeV": "dualpipe_v", "1F1B-I": "interleaved"}
_FP8 = re.compile(r"fp8|float8|FP8", re.IGNORECASE)


_ONLY_TO_RUN = ("tokenizer", "Transformer Engine's experts want")
"""Words of rules that keep labkit from running a configuration, but not from planning it."""


class _NotExpressible(Exception):
    """Why a row has no workload."""


def read_published(path: str | Path) -> list[PlannedRow]:
    """Return the rows of a CSV file in the form of `published.csv`."""
    with open(path, encoding="utf-8", newline="") as file:
        return planned(csv.DictReader(file))


def planned(rows: Iterable[Mapping[str, str]]) -> list[PlannedRow]:
    """Return every row with its workload, or with the reason that it has none."""
    return [_planned_row(_complete(row)) for row in rows]


def _complete(row: Mapping[str, str | None]) -> dict[str, str]:
    """Return the row with a text in every column; a column that the file does not have is not stated."""
    return defaultdict(str, {key: (value or "").strip() for key, value in row.items() if isinstance(key, str)})


def _planned_row(row: dict[str, str]) -> PlannedRow:
    source = next((value for name, value in SOURCES.items() if row["source"].startswith(name)), None)
    filled: list[str] = []
    names = row["id"], row["source"], row["model"]
    machine = machine_for(row["hardware"])
    try:
        _traits(row)
        if "LoRA" in row["id"] + row["note"]:
            raise _NotExpressible("LoRA trains small matrices next to frozen weights, which labkit does not have")
        if source is None:
            raise _NotExpressible("the source is unknown, so the generation of its software is, too")
        if machine is None:
            raise _NotExpressible(f"no machine for the hardware {row['hardware']!r}")
        workload = _workload(row, source, filled)
        seconds = measured_seconds(row, workload, source, machine)
    except _NotExpressible as reason:
        return PlannedRow(*names, workload=None, machine=machine, not_expressible=str(reason))
    specified = source.specified and _is_specified(row)
    return PlannedRow(*names, workload, machine, measured_seconds=seconds, filled=tuple(filled), specified=specified)


def _is_specified(row: Mapping[str, str]) -> bool:
    """MosaicML's rows count from hidden sizes of 2,560 and sequences of 2,048 on: below, the host decides."""
    if "MosaicML" not in row["source"]:
        return True
    return int(float(row["hidden"])) >= 2560 and int(float(row["seq"])) >= 2048


def _workload(row: dict[str, str], source: Source, filled: list[str]) -> Workload:
    values = _model_fields(row, filled)
    world = _number(row, "gpus")
    if world is None:
        raise _NotExpressible("the number of GPUs is not stated")
    sharding = row["fsdp_or_zero"]
    fsdp = ("FSDP" in sharding or "ZeRO-3" in sharding) and "not resharded" not in sharding
    values |= _layout_fields(row, world, fsdp, filled)
    values |= _step_fields(row, values, world, filled)
    if source.one_layer_chunks and not row["vpp"] and _may_interleave(values, world):
        values["parallel.vpp"] = -(-values["model.layers"] // values["parallel.pp"])
        filled[:] = [rule for rule in filled if rule != "vpp 1"] + ["one layer per chunk"]
    values |= _recomputation(row, filled)
    values |= _precision(row, filled)
    values |= _schedule(row, values, filled)
    for name, value in source.fields.items():
        values.setdefault(name, value)
    if values["parallel.tp"] > 1 and _uses_sequence_parallelism(row, source):
        values["parallel.sequence_parallel"] = True
    if source.software == "torchtitan" and values["parallel.cp"] > 1:
        values["parallel.cp_comm_type"] = "all_gather"  # its default
    if row["source"].startswith("arXiv 2104.04473 Table 1") and values["parallel.pp"] == 1:
        values["optim.overlap_grad_reduce"] = True  # the launch script takes torch's DDP there
    if fsdp or values.get("optim.distributed_optimizer") is False:
        values.pop("optim.distributed_optimizer", None)
        values.pop("optim.overlap_param_gather", None)
    config = RunConfig().replaced(values)
    _require_sound(config, world)
    software = source.software
    if "DeepSpeed" in row["fsdp_or_zero"]:
        software = "zero_2021"
    elif software == "torchtitan" and re.search("async ?TP", row["id"] + row["note"]):
        software = "torchtitan_async"
    reshards = "SHARD_GRAD_OP" not in sharding
    return Workload(config, world, fsdp=fsdp, reshard_after_forward=reshards, software=software,
                    libraries=source.libraries)  # fmt: skip


def _may_interleave(values: Mapping[str, Any], world: int) -> bool:
    """Return True if the microbatches of a step are a multiple of pp, as interleaving needs."""
    pp = values["parallel.pp"]
    dp = world // (values["parallel.tp"] * values["parallel.cp"] * pp)
    microbatches = values["train.global_batch_size"] // max(1, values["train.micro_batch_size"] * dp)
    return pp > 1 and microbatches > 0 and microbatches % pp == 0


def _require_sound(config: RunConfig, world: int) -> None:
    parallel, train = config.parallel, config.train
    shape = parallel.tp * parallel.cp * parallel.pp
    if large := too_large(config, world):
        raise _NotExpressible(large)
    if world % shape:
        raise _NotExpressible(f"tp x cp x pp = {shape} does not divide {world} GPUs")
    batch = train.micro_batch_size * (world // shape)
    if train.global_batch_size % batch:
        raise _NotExpressible(
            f"the global batch {train.global_batch_size} is not a multiple of micro batch x dp = {batch}"
        )
    if config.moe.num_experts and (world // parallel.pp) % (parallel.ep * parallel.expert_tp):
        raise _NotExpressible("ep x etp does not divide the ranks of a stage")
    problems = [text for text in config.problems(world) if not any(words in text for words in _ONLY_TO_RUN)]
    if problems:
        raise _NotExpressible("; ".join(problems))


def _number(row: Mapping[str, str], name: str) -> int | None:
    """Return a size; None for an empty cell. `8.0` is 8, as a table of floats writes it."""
    text = row[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise _NotExpressible(f"{name} is {shown(text)}, which is not a number") from None
    if not (value.is_integer() and _LEAST.get(name, 1) <= value <= _MOST):
        raise _NotExpressible(
            f"{name} is {shown(text)}, which is not a whole number from {_LEAST.get(name, 1)} to {_MOST:,}"
        )
    return int(value)


_LEAST = {"experts": 0, "topk": 0, "moe_ffn": 0}
"""Columns that may say 0, as a model without experts has."""
_MOST = 10**9


def _traits(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that the name of a model stands for."""
    model = row["model"]
    if model.startswith("one layer"):
        raise _NotExpressible("forward and backward of one layer alone, without embedding, loss and optimizer")
    if re.search(_WIDE_HEADS, model):
        raise _NotExpressible(f"the heads of {model} are wider than hidden / heads")
    found = next((fields for pattern, fields in _MODELS if re.search(pattern, model)), None)
    if found is None:
        raise _NotExpressible(f"labkit has no model like {model!r}")
    return dict(found)


def _model_fields(row: dict[str, str], filled: list[str]) -> dict[str, Any]:
    values = _traits(row)
    for column, name in (
        ("layers", "layers"), ("hidden", "hidden"), ("heads", "heads"), ("kv_heads", "kv_heads"), ("seq", "seq_length"),
        ("ffn", "ffn_hidden"), ("vocab", "vocab_size"),
    ):  # fmt: skip
        number = _number(row, column)
        if number is not None:
            values[f"model.{name}"] = number
        elif column in ("layers", "hidden", "heads", "seq"):
            raise _NotExpressible(f"the column {column} is empty")
    if "model.vocab_size" not in values:
        values["model.vocab_size"] = 50304
        filled.append("vocabulary 50304")
    experts = _number(row, "experts")
    if experts:
        top_k = _number(row, "topk")
        if top_k is None and "Llama3-8x70B" in row["model"]:
            filled.append("two experts per token")
            top_k = 2
        if top_k is None:
            raise _NotExpressible("the experts of a token (topk) are not stated")
        values |= {"moe.num_experts": experts, "moe.top_k": top_k, "moe.ffn_hidden": _number(row, "moe_ffn")}
    return values


def _layout_fields(row: dict[str, str], world: int, fsdp: bool, filled: list[str]) -> dict[str, Any]:
    if not row["tp"] and row["source"].startswith("arXiv 1909.08053"):
        filled.append("64 data-parallel ranks")
        return {"parallel.tp": max(1, world // 64), "parallel.pp": 1, "parallel.cp": 1, "parallel.vpp": 1}
    if not row["tp"] and not fsdp:
        raise _NotExpressible("tp is not stated")
    values: dict[str, Any] = {}
    for axis in ("tp", "pp", "cp", "ep"):
        size = _number(row, axis)
        if size is None:
            filled.append("one of each axis")
        values[f"parallel.{axis}"] = size or 1
    if row["etp"]:
        values["parallel.etp"] = _number(row, "etp")
    elif "folding" in row["id"] + row["note"] and values["parallel.ep"] > 1:
        filled.append("experts of one rank")
        values["parallel.etp"] = 1
    vpp = _number(row, "vpp")
    if vpp is None and row["schedule"].startswith("interleaved"):
        filled.append("vpp 2")
        vpp = 2
    if vpp is None and values["parallel.pp"] > 1 and not row["schedule"]:
        filled.append("vpp 1")
    values["parallel.vpp"] = vpp or 1
    if values["parallel.pp"] == 1:
        values["parallel.vpp"] = 1
    return values


def _step_fields(row: dict[str, str], values: Mapping[str, Any], world: int, filled: list[str]) -> dict[str, Any]:
    micro = _number(row, "mbs")
    dp = max(1, world // (values["parallel.tp"] * values.get("parallel.pp", 1) * values.get("parallel.cp", 1)))
    batch = _number(row, "gbs")
    if row["source"].startswith("arXiv 1909.08053") and micro is None:
        micro = 8
    if row["source"].startswith("torchtitan") and values.get("parallel.pp", 1) > 1 and micro is not None:
        filled.append("microbatches of torchtitan")
        batch = batch or micro * dp
        micro = max(1, micro // values["parallel.pp"])
    if micro is None:
        filled.append("micro batch 1")
        micro = 1
    if batch is None:
        filled.append("batch of one microbatch")
        batch = micro * dp
    return {"train.micro_batch_size": micro, "train.global_batch_size": batch}


def _recomputation(row: dict[str, str], filled: list[str]) -> dict[str, Any]:
    text = row["recompute"].lower()
    if text.startswith("full"):
        return {"model.recompute_granularity": "full"}
    if "core attention" in text or "core_attn" in text or "per op" in text or text.startswith("selective"):
        return {"model.recompute_granularity": "selective", "model.recompute_modules": ("core_attn",)}
    if not text:
        filled.append("no recomputation")
    return {}


def _precision(row: dict[str, str], filled: list[str]) -> dict[str, Any]:
    text = row["precision"]
    if "FP4" in text.upper():
        raise _NotExpressible("products in fp4")
    if _FP8.search(text):
        if "rowwise" in text:
            raise _NotExpressible("fp8 with a scale for each row")
        return {"optim.precision": "bf16", "optim.fp8": "hybrid", "optim.fp8_recipe": "current"}
    if found := re.search("fp16|bf16", text, re.IGNORECASE):
        return {"optim.precision": found[0].lower()}
    if text:
        raise _NotExpressible(f"the precision {shown(text)} is unknown; known are bf16, fp16 and fp8")
    filled.append("precision bf16")
    return {"optim.precision": "bf16"}


def _schedule(row: dict[str, str], values: Mapping[str, Any], filled: list[str]) -> dict[str, Any]:
    name = row["schedule"]
    if name.startswith("ZB-2p"):
        raise _NotExpressible(f"labkit builds no {name}; its table can be given as schedule.path")
    if name == "DualPipe":
        raise _NotExpressible("DualPipe keeps two copies of the weights; labkit builds DualPipeV")
    result: dict[str, Any] = {}
    if name in _SCHEDULES:
        result["schedule.name"] = _SCHEDULES[name]
    elif name not in ("", "1F1B", "interleaved", "interleaved 1F1B"):
        known = ", ".join(["1F1B", "interleaved 1F1B", *_SCHEDULES])
        raise _NotExpressible(f"the schedule {shown(name)} is unknown; known are {known}")
    pp, vpp = values.get("parallel.pp", 1), values.get("parallel.vpp", 1)
    chunks = 2 if result.get("schedule.name") in ("zbv", "dualpipe_v") else vpp
    stages, layers = pp * chunks, values["model.layers"]
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        filled.append("pipeline layout")
        middle = "|".join("t" * each for _ in range(stages - 2))
        result["parallel.pipeline_layout"] = f"E{'t' * (each - 1)}|{middle}|{'t' * (each - 1)}L"
    elif layers % stages and pp > 1:
        result["parallel.pipeline_layout"] = _uneven_layout(layers, stages)
    return result


def _uneven_layout(layers: int, stages: int) -> str:
    """Return a layout whose first and last stages have the missing layers less."""
    each = -(-layers // stages)
    missing = each * stages - layers
    counts = [each] * stages
    for turn in range(missing):
        counts[-1 - turn // 2 if turn % 2 == 0 else turn // 2] -= 1
    parts = ["t" * count for count in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(parts)


def _uses_sequence_parallelism(row: Mapping[str, str], source: Source) -> bool:
    if source.software in ("megatron_2019", "megatron_2021"):
        return False
    if source.software in ("megatron_2022", "megatron_2023"):
        if "no SP" in row["note"] or row["recompute"].startswith("full"):
            return False
        return "SP" in row["note"] or row["recompute"].startswith("selective")  # table 5 compares the two together
    return True


def measured_seconds(row: Mapping[str, str], workload: Workload, source: Source, machine: str) -> float | None:
    """Return the step that a row states, or that follows from its rate; None if neither is a positive number."""
    if seconds := measured(row, "step_s"):
        return seconds
    config, world = workload.config, workload.world_size
    model, batch = config.model, config.train.global_batch_size
    if rate := measured(row, "tokens_s_gpu"):
        return batch * model.seq_length / (rate * world)
    paper = paper_step_flops(model, samples=batch) / 39e12
    for pattern, seconds in (
        (r"scaling efficiency ([0-9.]+) %", paper / world * 100),
        (r"strong scaling speed-up ([0-9.]+)", paper),
    ):
        found = re.search(pattern, row["note"])
        if found and (rate := measured({"note": found[1]}, "note")):
            return seconds / rate
    flops = step_flops(model, samples=batch, causal=source.causal_flops, moe=config.moe).total
    if rate := measured(row, "tflops_gpu"):
        return flops / (world * rate * 1e12)
    if rate := measured(row, "mfu_pct"):
        return flops / (world * load_machine(machine).peak_flops["bf16"] * rate / 100)
    return None
