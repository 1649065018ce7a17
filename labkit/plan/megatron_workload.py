"""Flags of a run of Megatron-LM as a workload. No torch.

`labkit.config.foreign` reads the flags that have a field of ours. Here are the others that decide memory, and those for
which there is no formula (`LACKING`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.config import RunConfig
from labkit.config.errors import shown
from labkit.config.fields import SPECS
from labkit.config.foreign.conversion import Conversion
from labkit.config.foreign.megatron import STACK
from labkit.config.megatron_flags import derived
from labkit.config.pipeline_layout import parse_layout
from labkit.plan.latent_attention import Latent
from labkit.plan.rows import too_large, too_many_layers
from labkit.plan.stages import configured_schedule, stage_contents
from labkit.plan.workload import Extras, Gpu, Libraries, Workload

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
}
"""Tokenizer -> tokens, of those that a test names without a number: GPT-2, bert-large-cased, Llama 2, Nemotron's."""
FAMILIES_OF_IMAGES = ("multimodal-llava", "mimo")
"""Families of Megatron-LM's tests whose models labkit has not."""
PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "hybrid": "pretrain_mamba.py"}
"""Family of a test -> its program; any other runs pretrain_gpt.py."""
LACKING = {
    "--mtp-use-repeated-layer": "depths of multi-token prediction that share a layer are not modelled",
    "--perform-rl-step": "reinforcement learning keeps a second model for inference",
    "--flextron": "an elastic model is not modelled",
    "--fine-grained-activation-offloading": "activations that move to the host are not modelled",
    "--first-last-layers-bf16": "layers in two precisions are not modelled",
    "--cuda-graph-impl": "buffers of CUDA graphs are not modelled",
}
"""Flag -> why a row that gives it has no workload."""


class NotExpressibleError(ValueError):
    """A row that no workload describes; the message says why."""


def megatron_workload(
    flags: Mapping[str, Any],
    world_size: int,
    *,
    gpu: Gpu = "h100",
    family: str = "gpt",
    variables: Mapping[str, str] | None = None,
    before_te_2: bool = False,
    small_blackwell_workspace: bool = False,
) -> Workload:
    """Return the workload of a run with these flags (`--num-layers`: 12). Raises NotExpressibleError.

    family: `bert`, `t5` or `hybrid` for their programs; any other is a GPT.
    variables: environment variables of the run, such as CUBLAS_WORKSPACE_CONFIG.
    before_te_2, small_blackwell_workspace: older libraries, see `attention_kernel` and `Libraries`.
    """
    if missing := _missing(flags, family):
        raise NotExpressibleError(missing)
    given, config = variables or {}, _config(flags, family)
    _check(config, world_size)
    deterministic = given.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    kernel = attention_kernel(_chosen_kernel(flags), gpu, deterministic=deterministic, before_te_2=before_te_2)
    return Workload(
        config.replaced({"model.attention_backend": kernel}),
        world_size,
        fsdp=bool(flags.get("--use-megatron-fsdp")),
        extras=_extras(flags),
        libraries=_libraries(flags, given, gpu, small_blackwell_workspace),
    )


def whole(name: str, value: Any) -> int:
    """Return a value as a whole number. Raises NotExpressibleError for another."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise NotExpressibleError(f"{name} is {shown(value)}, which is not a whole number") from None


def _missing(flags: Mapping[str, Any], family: str) -> str:
    """Return why no workload describes these flags; empty if one does."""
    for flag, why in LACKING.items():
        if flags.get(flag):
            return why
    if family in FAMILIES_OF_IMAGES:
        return "a model of images and text is not modelled"
    if many := too_many_layers(whole("--num-layers", flags.get("--num-layers") or 0)):
        return many
    optimizer = flags.get("--optimizer", "adam")
    if optimizer not in ("adam", "muon") or (optimizer == "muon" and flags.get("--use-distributed-optimizer")):
        return f"the optimizer {optimizer}{' over several ranks' if optimizer == 'muon' else ''} is not modelled"
    sharding = flags.get("--data-parallel-sharding-strategy", "no_shard")
    if flags.get("--use-megatron-fsdp") and (sharding != "optim_grads_params" or flags.get("--num-experts")):
        experts = " and experts" if flags.get("--num-experts") else ""
        return f"Megatron FSDP with the sharding strategy {sharding}{experts} is not modelled"
    return ""


def _check(config: RunConfig, world_size: int) -> None:
    """Raise NotExpressibleError for a layout that does not fit the ranks, or has no schedule."""
    if world_size % config.parallel.smallest_world_size or not config.num_microbatches(world_size):
        raise NotExpressibleError(f"its global batch and layout do not fit {world_size} GPUs")
    if large := too_large(config, world_size):
        raise NotExpressibleError(large)
    try:
        schedule = configured_schedule(config, world_size)
        stage_contents(config, schedule.num_stages)
    except ValueError as error:
        raise NotExpressibleError(str(error)) from None


def _config(flags: Mapping[str, Any], family: str) -> RunConfig:
    """Return the configuration that flags give, without a check by the rules of labkit's own layers."""
    given = {name: " ".join(value) if isinstance(value, list) else value for name, value in flags.items()}
    _uneven(given)
    _layout(given)
    tokenizer = given.get("--tokenizer-type", "BertWordPieceCase" if family in ("bert", "t5") else "GPT2BPETokenizer")
    if tokenizer in VOCABULARIES and "--vocab-size" not in given:
        given["--vocab-size"] = VOCABULARIES[tokenizer] + whole("--vocab-extra-ids", given.get("--vocab-extra-ids", 0))
    given["the program"] = PROGRAMS.get(family, "pretrain_gpt.py")
    given.setdefault("--transformer-impl", "transformer_engine")
    found = Conversion(given)
    STACK.derive(found)
    found.read(STACK.table)
    broken = [f"{name} = {shown(value)}: {rule}" for name, value in found.values.items()
              if (rule := SPECS[name].broken(value))]  # fmt: skip
    if problems := found.problems or broken:
        raise NotExpressibleError(problems[0])
    config = RunConfig().replaced(found.values)
    values, _ = derived({"swiglu": bool(flags.get("--swiglu"))}, config)
    if config.optim.precision == "fp16" and not flags.get("--accumulate-allreduce-grads-in-fp32"):
        values["optim.grad_reduce_in_bf16"] = True  # only bf16 implies gradients in fp32
    return config.replaced(values)


def _layout(given: dict[str, Any]) -> None:
    """Remove the letter of multi-token prediction from a layout, as it is where the loss is, and count its stages."""
    layout, pp = given.get("--pipeline-model-parallel-layout"), given.get("--pipeline-model-parallel-size") or 1
    if not layout:
        return
    given["--pipeline-model-parallel-layout"] = str(layout).replace("m", "")
    try:
        stages = len(parse_layout(given["--pipeline-model-parallel-layout"]))
    except ValueError as error:
        raise NotExpressibleError(str(error)) from None
    given["--num-virtual-stages-per-pipeline-rank"] = max(1, stages // whole("--pipeline-model-parallel-size", pp))


def _uneven(given: dict[str, Any]) -> None:
    """Write the flags of uneven stages as a layout, and the stages in the pattern of a hybrid model."""
    layers, pp = (
        whole(name, given.get(name) or default)
        for name, default in (("--num-layers", 0), ("--pipeline-model-parallel-size", 1))
    )
    pattern = str(given.get("--hybrid-layer-pattern", ""))
    if other := set(pattern) - set("M*-|"):
        raise NotExpressibleError(f"a hybrid pattern with the layers {' '.join(sorted(other))} is not modelled")
    if "|" in pattern:
        stages = ["t" * len(stage) for stage in pattern.split("|")]
        given["--pipeline-model-parallel-layout"] = f"E{'|'.join(stages)}L"
        given["--hybrid-layer-pattern"] = pattern.replace("|", "")
    ends = [f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    first, last = (whole(end, given.pop(end, 0)) for end in ends)
    if first or last:
        inner = (layers - first - last) // max(1, pp - 2)
        given["--pipeline-model-parallel-layout"] = "|".join(
            ["E" + "t" * first, *["t" * inner] * (pp - 2), "t" * last + "L"]
        )
    counted = [given.pop(f"--account-for-{end}-in-pipeline-split", False) for end in ("embedding", "loss")]
    if any(counted):
        parts = ["E"] * counted[0] + ["t"] * layers + ["L"] * counted[1]
        vpp = whole("--num-virtual-stages-per-pipeline-rank", given.get("--num-virtual-stages-per-pipeline-rank", 1))
        each = max(1, len(parts) // (pp * vpp))
        given["--pipeline-model-parallel-layout"] = "|".join(
            "".join(parts[i : i + each]) for i in range(0, len(parts), each)
        )


def _extras(flags: Mapping[str, Any]) -> Extras:
    learned = flags.get("--position-embedding-type", "learned_absolute") == "learned_absolute"
    rows = flags.get("--max-position-embeddings") if learned else None
    return Extras(
        deferred_gradients=_deferred(flags),
        muon=flags.get("--optimizer") == "muon",
        depths=whole("--mtp-num-layers", flags.get("--mtp-num-layers") or 0),
        latent=_latent(flags) if flags.get("--multi-latent-attention") else None,
        qk_norm=bool(flags.get("--qk-layernorm")),
        position_rows=whole("--max-position-embeddings", rows) if rows else None,
        attention_mask=not flags.get("--no-create-attention-mask-in-dataloader"),
    )


def _deferred(flags: Mapping[str, Any]) -> int | None:
    if not flags.get("--defer-embedding-wgrad-compute"):
        return None
    return whole("--wgrad-deferral-limit", flags.get("--wgrad-deferral-limit") or 0)


def _latent(flags: Mapping[str, Any]) -> Latent:
    named = {"query_rank": "q-lora-rank", "rank": "kv-lora-rank", "head": "qk-head-dim",
             "position_head": "qk-pos-emb-head-dim", "value_head": "v-head-dim"}  # fmt: skip
    given = {field: flags.get(f"--{flag}") for field, flag in named.items()}
    return Latent(**{field: whole(field, value) for field, value in given.items() if value is not None})


def _libraries(flags: Mapping[str, Any], variables: Mapping[str, str], gpu: Gpu, small_workspace: bool) -> Libraries:
    setting = variables.get("CUBLAS_WORKSPACE_CONFIG")
    return Libraries(
        megatron=True,
        gpu=gpu,
        cublas_workspace=_cublas_bytes(setting),
        small_blackwell_workspace=small_workspace and not setting,
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
