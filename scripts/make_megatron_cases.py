"""Write labkit/plan/megatron_cases.json: what Megatron-LM's functional tests say beyond a table of their results.

For each test the flags and variables that decide its memory, and for each of its golden files the month in which it was
recorded, by which `labkit.plan.golden_rows` knows the software. No result of a test is read.

    python scripts/make_megatron_cases.py path/to/Megatron-LM
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

TESTS = "tests/functional_tests/test_cases"
TARGET = Path(__file__).parents[1] / "labkit" / "plan" / "megatron_cases.json"
WITHOUT_MEMORY = {"93ebf8d72f"}
"""Commits that rewrote golden files without recording them anew (leading nan of iteration times removed)."""
FLAGS = re.compile(
    r"--(attention-dropout|hidden-dropout|disable-bias-linear|group-query-attention|no-bias-gelu-fusion|"
    r"no-gradient-accumulation-fusion|cross-entropy-loss-fusion|qk-layernorm|(q|kv)-lora-rank|qk-head-dim|qk-pos-emb-head-dim|v-head-dim|"
    r"make-vocab-size-divisible-by|tokenizer-type|vocab-extra-ids|max-position-embeddings|grad-reduce-in-bf16|"
    r"accumulate-allreduce-grads-in-fp32|num-distributed-optimizer-instances|use-tp-pp-dp-mapping|moe-aux-loss-coeff|"
    r"moe-grouped-gemm|moe-router-(dtype|load-balancing-type|score-function)|moe-shared-expert-overlap|moe-z-loss-coeff|"
    r"first-last-layers-bf16|fp8-param-gather|tp-comm-overlap|encoder-.*|decoder-.*|account-for-.*|"
    r"defer-embedding-wgrad-compute|wgrad-deferral-limit|hybrid-.*|mamba-.*|mtp-use-repeated-layer|no-create-attention-mask-in-dataloader|"
    r"microbatch-group-size-per-virtual-pipeline-stage|perform-rl-step|flextron|fine-grained-activation-offloading|"
    r"bert-no-binary-head|use-precision-aware-optimizer)"
)
VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN",
             "PYTORCH_CUDA_ALLOC_CONF")  # fmt: skip


def git(repository: str, *words: str) -> str:
    """Return what git prints."""
    return subprocess.run(["git", "-C", repository, *words], capture_output=True, text=True, check=True).stdout


def cases(repository: str) -> dict[str, Any]:
    """Return family/test -> its flags and variables, and the month of each golden file."""
    found: dict[str, Any] = {}
    names = git(repository, "ls-tree", "-r", "HEAD", "--name-only", TESTS).split()
    for name in (name for name in names if name.endswith("/model_config.yaml")):
        contents = yaml.safe_load(git(repository, "show", f"HEAD:{name}"))
        if not any(flag in (contents.get("MODEL_ARGS") or {}) for flag in ("--train-iters", "--train-samples")):
            continue
        said = (contents.get("MODEL_ARGS") or {}) | (contents.get("ENV_VARS") or {})
        kept = {key: value for key, value in said.items() if FLAGS.fullmatch(key) or key in VARIABLES}
        found["/".join(name.split("/")[-3:-1])] = kept
    for name, month in months(repository, {name for name in names if "/golden_values_" in name}).items():
        *_, family, case, golden = name.split("/")
        if (key := f"{family}/{case}") in found:
            found[key].setdefault("recorded", {})[golden.removeprefix("golden_values_").removesuffix(".json")] = month
    return {key: said for key, said in found.items() if "recorded" in said}


def months(repository: str, names: set[str]) -> dict[str, str]:
    """Return golden file -> month of the last commit that recorded it."""
    found: dict[str, str] = {}
    commit = month = ""
    for line in git(repository, "log", "--format=@%h %cs", "--abbrev=10", "--name-only", "HEAD", "--", TESTS).split(
        "\n"
    ):
        if line.startswith("@"):
            commit, month = line[1:].split()
        elif line in names and commit not in WITHOUT_MEMORY:
            found.setdefault(line, month[:7])
    return found


if __name__ == "__main__":
    source = sys.argv[1]
    table = {"commit": git(source, "rev-parse", "HEAD").strip(), "cases": cases(source)}
    lines = [f'  "{key}": {json.dumps(table["cases"][key], sort_keys=True)}' for key in sorted(table["cases"])]
    TARGET.write_text(f'{{"commit": "{table["commit"]}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n")
