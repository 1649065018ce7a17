"""Rows of Megatron-LM's functional tests (a table in the form of `megatron_golden.csv`) as workloads. No torch.

A row has Megatron's flags as columns, which `labkit.config.foreign` reads. `megatron_cases.json` has the flags and
variables of each test that the columns leave out, and the month in which each golden file was recorded; Megatron-LM's
repository says both (tests/functional_tests/test_cases). `RULES` fills in the rest.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from labkit.config import ConfigError, RunConfig
from labkit.config.foreign.conversion import Conversion
from labkit.config.foreign.megatron import STACK
from labkit.config.megatron_flags import derived
from labkit.plan.latent_attention import Latent
from labkit.plan.stages import configured_schedule, stage_contents
from labkit.plan.workload import Extras, Gpu, Software, Workload

FIRST_FLAG, LAST_FLAG = "num-layers", "normalization"
"""The first and last column that is a flag of Megatron-LM."""
GPUS: dict[str, Gpu] = {"a100": "a100", "h100": "h100", "gb200": "b200", "lts": "a100"}
"""Word in the name of a golden file -> GPU; `lts` alone ran on A100, and `dev` alone on A100 or on H100."""
COLUMNS = ("family", "test_case", "golden", "test_type", "nodes", "gpus_per_node", FIRST_FLAG, LAST_FLAG)
"""Columns that a table must have; others may be left out or be empty."""
VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
}
"""Tokenizer -> tokens, of those that a test names without a number: GPT-2, bert-large-cased, Llama 2, Nemotron's."""
FAMILIES_OF_IMAGES = ("multimodal-llava", "mimo")
PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "hybrid": "pretrain_mamba.py"}
"""Family of a test -> its program; any other runs pretrain_gpt.py."""
RULES = {
    "nodes, gpus_per_node": "one node of 8 GPUs (GB200: 4), on which the tests outside today's recipes ran; none of a "
    "release run, whose nodes are not public",
    "vocab-size": "GPT-2's 50,257 tokens, Megatron-LM's default; of another tokenizer `VOCABULARIES`",
    "ffn-hidden-size": "4 x hidden-size, with swiglu 2/3 of that in multiples of 64, Megatron-LM's default",
    "transformer-impl": "transformer_engine, Megatron-LM's default",
    "the GPU": "the word in `golden`: a100, h100, gb200; `lts` alone ran on A100",
    "attention-backend": "what Transformer Engine chooses: see `attention_kernel`",
    "CUBLAS_WORKSPACE_CONFIG": "the test's own variable; without it torch's default for the GPU, which on Blackwell "
    "was that of older GPUs until April 2026",
    "a test that megatron_cases.json does not know": "the defaults of Megatron-LM",
}
"""What a row leaves out -> what it is filled in by."""
LACKING = {
    "--mtp-use-repeated-layer": "depths of multi-token prediction that share a layer are not modelled",
    "--perform-rl-step": "reinforcement learning keeps a second model for inference",
    "--flextron": "an elastic model is not modelled",
    "--defer-embedding-wgrad-compute": "deferred embedding gradients keep activations that are not modelled",
    "--fine-grained-activation-offloading": "activations that move to the host are not modelled",
    "--first-last-layers-bf16": "layers in two precisions are not modelled",
    "--cuda-graph-impl": "buffers of CUDA graphs are not modelled",
}
"""Flag -> why a row that gives it has no workload."""
MEMORY_OF_OPTIM = ("precision", "fp8", "grad_reduce_in_bf16", "distributed_optimizer", "overlap_param_gather",
                   "num_distributed_optimizer_instances")  # fmt: skip
"""Fields of the optimizer that decide memory."""
CONTRADICTIONS = {
    ("gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce", "lts_dgx_a100_2nd"): 4,
    ("gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce", "lts_dgx_a100_2nd"): 4,
    ("gpt3_mcore_te_tp2_pp2_resume_torch_dist_cp2_nondeterministic", "dev_dgx_h100_2nd"): 8,
    ("gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances", "lts_dgx_a100"): 0,
    ("hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G", "lts_dgx_a100"): 0,
}
"""(test, golden file) of rows whose bytes contradict their configuration. After a resumption some hold so many more
bytes per parameter than the same test's first run: what was loaded. 0: the file holds the numbers of another test."""


class NotExpressibleError(ValueError):
    """A row that no workload describes; the message says why."""


@dataclass(frozen=True)
class GoldenRow:
    """One recorded run."""

    family: str
    test: str
    golden: str
    excluded: str
    """Why its bytes are not compared; empty if they are."""
    workload: Workload | None
    """What ran; None if `not_expressible` says why there is none."""
    not_expressible: str
    allocated: int
    """Bytes allocated on the last rank after a step."""
    peak: int
    """Most bytes that were ever allocated on the last rank."""


def read_golden_rows(path: str | os.PathLike[str]) -> list[GoldenRow]:
    """Return the rows of a CSV file in the form of `megatron_golden.csv`.

    Raises ConfigError for a file without the columns of this form.
    """
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            rule = "a row is a test of Megatron-LM with its flags as columns, from num-layers to normalization"
            raise ConfigError([f"has no column {', '.join(missing)}; {rule}"], source=os.fspath(path))
        return [golden_row(row) for row in rows]


def golden_row(row: Mapping[str, str]) -> GoldenRow:
    """Return one line of the table."""
    try:
        workload, reason = workload_of(row), ""
    except NotExpressibleError as error:
        workload, reason = None, str(error)
    allocated, peak = (int(row.get(f"mem_{name}_bytes_last") or 0) for name in ("allocated", "max_allocated"))
    names = row["family"], row["test_case"], row["golden"]
    return GoldenRow(*names, _exclusion(row, peak), workload, reason, allocated, peak)


def _exclusion(row: Mapping[str, str], peak: int) -> str:
    """Return why the bytes of a row are not compared with the model's."""
    if row.get("repeats_of"):
        return f"repeats {row['repeats_of']}"
    if not peak:
        return "no bytes recorded"
    extra = CONTRADICTIONS.get((row["test_case"], row["golden"]))
    if extra is None:
        return ""
    return f"holds {extra} bytes per parameter of a loaded checkpoint" if extra else "has the numbers of another test"


@dataclass(frozen=True)
class Configuration:
    """One configuration on one GPU, and the medians of the bytes of its rows."""

    workload: Workload
    rows: tuple[GoldenRow, ...]
    allocated: float
    peak: float


def configurations(rows: Iterable[GoldenRow]) -> list[Configuration]:
    """Return each configuration of the rows that are expressible and not excluded once.

    Tests that differ in what decides no memory (steps, learning rates, names) are one configuration, and so are the
    golden files of one GPU. Their bytes differ by what Python has not collected yet, so the median stands for them.
    """
    found: dict[str, list[GoldenRow]] = {}
    for row in rows:
        if row.workload is not None and not row.excluded:
            found.setdefault(_same_memory(row.workload), []).append(row)
    return [
        Configuration(
            _workload(same[0]), tuple(same), median(row.allocated for row in same), median(row.peak for row in same)
        )
        for same in found.values()
    ]


def _workload(row: GoldenRow) -> Workload:
    assert row.workload is not None
    return row.workload


def _same_memory(workload: Workload) -> str:
    """Return a text that two workloads share if nothing that decides memory differs between them."""
    config = workload.config
    optim = {name: getattr(config.optim, name) for name in MEMORY_OF_OPTIM}
    batch = config.train.micro_batch_size, config.train.global_batch_size
    parts = config.model, config.parallel, config.schedule, config.moe, optim, batch
    return repr((parts, workload.world_size, workload.fsdp, workload.extras, workload.software))


def workload_of(row: Mapping[str, str]) -> Workload:
    """Return what a line of the table ran. Raises NotExpressibleError."""
    case = dict(_cases().get(f"{row['family']}/{row['test_case']}", {}))
    month = case.pop("recorded", {}).get(row["golden"], "")
    variables = {name: str(case.pop(name)) for name in list(case) if not name.startswith("--")}
    flags = case | _columns(row)
    if missing := _missing(flags, row["family"]):
        raise NotExpressibleError(missing)
    gpu = gpu_of(row["golden"])
    config, world_size = _config(flags, row["family"]), _world_size(row, gpu)
    _check(config, world_size)
    kernel = attention_kernel(
        _chosen_kernel(flags),
        gpu,
        deterministic=variables.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
        before_te_2=row["golden"].startswith("lts") and bool(month) and month < "2025-11",
    )
    return Workload(
        config.replaced({"model.attention_backend": kernel}),
        world_size,
        fsdp=bool(flags.get("--use-megatron-fsdp")),
        extras=_extras(flags),
        software=_software(flags, variables, gpu, month),
    )


def _missing(flags: Mapping[str, Any], family: str) -> str:
    """Return why no workload describes these flags; empty if one does."""
    for flag, why in LACKING.items():
        if flags.get(flag):
            return why
    if family in FAMILIES_OF_IMAGES:
        return "a model of images and text is not modelled"
    if flags.get("--fp8-format") and flags.get("--num-experts"):
        return "experts in fp8 are not modelled"
    if (optimizer := flags.get("--optimizer", "adam")) != "adam":
        return f"the optimizer {optimizer} is not modelled"
    sharding = flags.get("--data-parallel-sharding-strategy", "no_shard")
    if flags.get("--use-megatron-fsdp") and (sharding != "optim_grads_params" or flags.get("--num-experts")):
        experts = " and experts" if flags.get("--num-experts") else ""
        return f"Megatron FSDP with the sharding strategy {sharding}{experts} is not modelled"
    return ""


def _check(config: RunConfig, world_size: int) -> None:
    """Raise NotExpressibleError for a layout that does not fit the ranks, or has no schedule."""
    if world_size % config.parallel.smallest_world_size or not config.num_microbatches(world_size):
        raise NotExpressibleError(f"its global batch and layout do not fit {world_size} GPUs")
    try:
        schedule = configured_schedule(config, world_size)
        stage_contents(config, schedule.num_stages)
    except ValueError as error:
        raise NotExpressibleError(str(error)) from None


def gpu_of(golden: str) -> Gpu:
    """Return the GPU of a golden file by its name. Raises NotExpressibleError for a name without one."""
    for word, gpu in GPUS.items():
        if word in golden:
            return gpu
    raise NotExpressibleError(f"golden {golden!r} names no GPU; known are {', '.join(GPUS)}")


@cache
def _cases() -> dict[str, dict[str, Any]]:
    return json.loads(Path(__file__).with_name("megatron_cases.json").read_text())["cases"]


def _columns(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags that the columns give; an empty cell gives none."""
    names = list(row)
    inside = names[names.index(FIRST_FLAG) : names.index(LAST_FLAG) + 1]
    return {f"--{name}": True if row[name] == "True" else row[name] for name in inside if row[name]}


def _world_size(row: Mapping[str, str], gpu: Gpu) -> int:
    if row["nodes"]:
        return int(row["nodes"]) * int(row["gpus_per_node"])
    if row["test_type"] == "release":
        raise NotExpressibleError("the number of nodes of a release run is not public")
    return 4 if gpu == "b200" else 8


def _config(flags: dict[str, Any], family: str) -> RunConfig:
    """Return the configuration that flags give, without a check by the rules of labkit's own layers."""
    given = {name: " ".join(value) if isinstance(value, list) else value for name, value in flags.items()}
    _uneven(given)
    _without_depths(given)
    tokenizer = given.get("--tokenizer-type", "BertWordPieceCase" if family in ("bert", "t5") else "GPT2BPETokenizer")
    if tokenizer in VOCABULARIES and "--vocab-size" not in given:
        given["--vocab-size"] = VOCABULARIES[tokenizer] + int(given.get("--vocab-extra-ids", 0))
    given["the program"] = PROGRAMS.get(family, "pretrain_gpt.py")
    given.setdefault("--transformer-impl", "transformer_engine")
    found = Conversion(given)
    STACK.derive(found)
    found.read(STACK.table)
    if found.problems:
        raise NotExpressibleError(found.problems[0])
    config = RunConfig().replaced(found.values)
    values, _ = derived({"swiglu": bool(flags.get("--swiglu"))}, config)
    if config.optim.precision == "fp16" and not flags.get("--accumulate-allreduce-grads-in-fp32"):
        values["optim.grad_reduce_in_bf16"] = True  # only bf16 implies gradients in fp32
    return config.replaced(values)


def _without_depths(given: dict[str, Any]) -> None:
    """Remove the letter of multi-token prediction from a layout: it is where the loss is."""
    if layout := given.get("--pipeline-model-parallel-layout"):
        given["--pipeline-model-parallel-layout"] = str(layout).replace("m", "")


def _uneven(given: dict[str, Any]) -> None:
    """Write the flags of uneven stages as a layout, and the stages in the pattern of a hybrid model."""
    layers, pp = int(given.get("--num-layers", 0)), int(given.get("--pipeline-model-parallel-size", 1))
    if "|" in (pattern := str(given.get("--hybrid-layer-pattern", ""))):
        stages = ["t" * len(stage) for stage in pattern.split("|")]
        given["--pipeline-model-parallel-layout"] = f"E{'|'.join(stages)}L"
        given["--num-virtual-stages-per-pipeline-rank"] = len(stages) // pp
        given["--hybrid-layer-pattern"] = pattern.replace("|", "")
    first, last = (int(given.pop(f"--decoder-{end}-pipeline-num-layers", 0)) for end in ("first", "last"))
    if first or last:
        inner = (layers - first - last) // (pp - 2)
        given["--pipeline-model-parallel-layout"] = "|".join(
            ["E" + "t" * first, *["t" * inner] * (pp - 2), "t" * last + "L"]
        )
    counted = [given.pop(f"--account-for-{end}-in-pipeline-split", False) for end in ("embedding", "loss")]
    if any(counted):
        parts = ["E"] * counted[0] + ["t"] * layers + ["L"] * counted[1]
        each = len(parts) // (pp * int(given.get("--num-virtual-stages-per-pipeline-rank", 1)))
        given["--pipeline-model-parallel-layout"] = "|".join(
            "".join(parts[i : i + each]) for i in range(0, len(parts), each)
        )


def _extras(flags: Mapping[str, Any]) -> Extras:
    learned = flags.get("--position-embedding-type", "learned_absolute") == "learned_absolute"
    rows = flags.get("--max-position-embeddings") if learned else None
    return Extras(
        depths=int(flags.get("--mtp-num-layers") or 0),
        latent=_latent(flags) if flags.get("--multi-latent-attention") else None,
        qk_norm=bool(flags.get("--qk-layernorm")),
        position_rows=int(rows) if rows else None,
        attention_mask=not flags.get("--no-create-attention-mask-in-dataloader"),
    )


def _latent(flags: Mapping[str, Any]) -> Latent:
    named = {"query_rank": "q-lora-rank", "rank": "kv-lora-rank", "head": "qk-head-dim",
             "position_head": "qk-pos-emb-head-dim", "value_head": "v-head-dim"}  # fmt: skip
    given = {field: flags.get(f"--{flag}") for field, flag in named.items()}
    return Latent(**{field: int(value) for field, value in given.items() if value is not None})


def _software(flags: Mapping[str, Any], variables: Mapping[str, str], gpu: Gpu, month: str) -> Software:
    setting = variables.get("CUBLAS_WORKSPACE_CONFIG")
    return Software(
        megatron=True,
        gpu=gpu,
        cublas_workspace=_cublas_bytes(setting),
        small_blackwell_workspace=gpu == "b200" and not setting and bool(month) and month < "2026-05",
        expandable_segments="expandable_segments:True" in variables.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        user_buffers=bool(flags.get("--tp-comm-overlap")),
        float8_parameters=bool(flags.get("--fp8-param-gather")),
        fused_cross_entropy=bool(flags.get("--cross-entropy-loss-fusion")),
    )


def _chosen_kernel(flags: Mapping[str, Any]) -> str:
    """Return the kernel that flags choose. Megatron's local layers have no other than separate operations."""
    if flags.get("--transformer-impl") == "local":
        return "unfused"
    return str(flags.get("--attention-backend") or ("flash" if flags.get("--use-flash-attn") else "auto"))


def attention_kernel(chosen: str, gpu: Gpu, *, deterministic: bool, before_te_2: bool) -> str:
    """Return the kernel that Transformer Engine takes for --attention-backend `chosen`.

    Its own choice (`auto`) is FlashAttention on Ampere, and cuDNN's kernel on Hopper and Blackwell. Determinism
    excludes cuDNN's on Blackwell. Until November 2025 the container `lts` had a release (`before_te_2`) in which it
    excluded both, so that operations ran one by one. Source: `get_attention_backend` in
    transformer_engine/pytorch/attention/dot_product_attention/utils.py.
    """
    if chosen in ("unfused", "local"):
        return "unfused"
    if chosen in ("flash", "fused"):
        return "flash" if chosen == "flash" else "cudnn"
    if deterministic and before_te_2:
        return "unfused"
    return "flash" if gpu == "a100" or (gpu == "b200" and deterministic) else "cudnn"


def _cublas_bytes(setting: str | None) -> int | None:
    """Return the bytes of `:SIZE:COUNT` pairs, whose sizes are in KiB; None without a setting."""
    if not setting:
        return None
    numbers = [int(word) for word in setting.strip(":").split(":")]
    return sum(size * count << 10 for size, count in zip(numbers[::2], numbers[1::2]))
