"""Rows of Megatron-LM's functional tests (a table in the form of `megatron_golden.csv`) as workloads. No torch.

A row has Megatron's flags as columns, which `megatron_workload.py` reads. `megatron_cases.json` has the flags and
variables of each test that the columns leave out, and the month in which each golden file was recorded; Megatron-LM's
repository says both (tests/functional_tests/test_cases). `RULES` fills in the rest.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from labkit.config import ConfigError
from labkit.plan.megatron_workload import NotExpressibleError, megatron_workload, whole
from labkit.plan.rows import measured
from labkit.plan.workload import Gpu, Workload

FIRST_FLAG, LAST_FLAG = "num-layers", "normalization"
"""The first and last column that is a flag of Megatron-LM."""
GPUS: dict[str, Gpu] = {"a100": "a100", "h100": "h100", "gb200": "b200", "lts": "a100"}
"""Word in the name of a golden file -> GPU; `lts` alone ran on A100, and `dev` alone on A100 or on H100."""
COLUMNS = ("family", "test_case", "golden", "test_type", "nodes", "gpus_per_node", FIRST_FLAG, LAST_FLAG)
"""Columns that a table must have; others may be left out or be empty."""
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
    "any other flag": "an empty cell gives none, so Megatron-LM's default holds",
    "a test that megatron_cases.json does not know": "the defaults of Megatron-LM",
}
"""What a row leaves out -> what it is filled in by."""
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
    allocated, peak = (int(measured(row, f"mem_{name}_bytes_last") or 0) for name in ("allocated", "max_allocated"))
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

    @property
    def group(self) -> str:
        """The group whose errors are reported together, such as `dense` or `experts, local layers`."""
        config, family = self.workload.config, self.rows[0].family
        words = [_GROUPS.get(family, family)]
        if family == "gpt" and config.model.hidden == _WIDTH_OF_7B:
            words = ["dense, 7B"]
        if family in _ENGINES and config.model.transformer_impl == "local":
            words.append("local layers")
        words += ["fp16"] if family in _ENGINES and config.optim.precision == "fp16" else []
        if config.optim.fp8 != "none":
            words.append("fp8 parameters" if self.workload.libraries.float8_parameters else "fp8")
        words += [f"fully sharded, {self.workload.libraries.gpu.upper()}"] if self.workload.fsdp else []
        return ", ".join(words)


_GROUPS = {"gpt": "dense", "moe": "experts", "hybrid": "Mamba with attention", "bert": "BERT", "t5": "T5"}
"""Family of a test -> its models in words."""
_ENGINES = ("gpt", "moe")
"""Families whose layers are Transformer Engine's unless a test asks for local ones."""
_WIDTH_OF_7B = 4096
"""Hidden size of the tests of a 7B model; all others are small."""


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
    return repr((parts, workload.world_size, workload.fsdp, workload.extras, workload.libraries))


def workload_of(row: Mapping[str, str]) -> Workload:
    """Return what a line of the table ran. Raises NotExpressibleError."""
    case = dict(_cases().get(f"{row['family']}/{row['test_case']}", {}))
    month = case.pop("recorded", {}).get(row["golden"], "")
    variables = {name: str(case.pop(name)) for name in list(case) if not name.startswith("--")}
    gpu = gpu_of(row["golden"])
    return megatron_workload(
        case | _columns(row),
        _world_size(row, gpu),
        gpu=gpu,
        family=row["family"],
        variables=variables,
        before_te_2=row["golden"].startswith("lts") and bool(month) and month < "2025-11",
        small_blackwell_workspace=gpu == "b200" and bool(month) and month < "2026-05",
    )


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
    return {f"--{name}": value for name in inside if (value := _value(row[name])) is not None}


def _value(cell: str) -> str | bool | None:
    """Return a cell as Megatron-LM reads it: None gives no flag. `8.0` is 8, as a table of floats writes it."""
    word = cell.strip()
    if word.lower() in ("true", "false", ""):
        return True if word.lower() == "true" else None
    return re.sub(r"^(\d+)\.0+$", r"\1", word)


def _world_size(row: Mapping[str, str], gpu: Gpu) -> int:
    usual = 4 if gpu == "b200" else 8
    if row["nodes"]:
        count = _count(row, "nodes") * (_count(row, "gpus_per_node") if row["gpus_per_node"] else usual)
        if not 0 < count <= _MOST_GPUS:
            raise NotExpressibleError(f"{count} GPUs; a row has from 1 to {_MOST_GPUS:,}")
        return count
    if row["test_type"] == "release":
        raise NotExpressibleError("the number of nodes of a release run is not public")
    return usual


_MOST_GPUS = 10**6


def _count(row: Mapping[str, str], name: str) -> int:
    return whole(name, _value(row[name]))
