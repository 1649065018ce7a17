"""Bytes of a GPU rank against sums made by hand, and rows of Megatron-LM's tests as workloads."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labkit.config import ConfigError, RunConfig, presets
from labkit.plan.allocator import unused_bytes
from labkit.plan.device_memory import DeviceMemory, gpu_memory
from labkit.plan.golden_rows import golden_row, read_golden_rows, workload_of
from labkit.plan.latent_attention import Latent, latent_matrices, latent_parameters
from labkit.plan.megatron_workload import NotExpressibleError, attention_kernel
from labkit.plan.memory import rank_memory
from labkit.plan.multi_token import depth_parameters
from labkit.plan.parameters import attention_parameters, model_parameters
from labkit.plan.stage_activations import held_stages
from labkit.plan.stages import StageContents, configured_schedule
from labkit.plan.state_bytes import dense_and_experts
from labkit.plan.state_tensors import state_tensors
from labkit.plan.workload import Extras, Libraries, Workload

MIB = 1 << 20
TABLE = Path(__file__).parents[1] / "oracles" / "data" / "megatron_golden.csv"


def terms(need: DeviceMemory) -> dict[str, int]:
    return {term.name: term.bytes for term in (*need.held, *need.above)}


def test_a_block_keeps_a_remainder_of_up_to_one_mebibyte() -> None:
    """49.125 MiB get 50, and nothing can use the rest. 48.5 MiB get 50, and 1.5 are free for the next 1.25."""
    assert unused_bytes((49 * MIB + MIB // 8,)) == 7 * MIB // 8
    assert unused_bytes((48 * MIB + MIB // 2,)) == 0
    assert unused_bytes((48 * MIB + MIB // 2, 5 * MIB // 4)) == MIB // 4
    assert unused_bytes((7 * MIB,) * 2 + (5 * MIB,)) == MIB  # 20 MiB for all three
    assert unused_bytes((MIB,) * 100) == 0


@pytest.mark.parametrize("preset, world_size", [("gpt2_124m", 1), ("tiny_moe", 2), ("mixtral_8x7b", 64)])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_large_tensors_are_those_of_the_state(preset: str, world_size: int, sharded: bool) -> None:
    """Norms and biases apart, their bytes are the weights', the gradients' and the optimizer's."""
    config = presets.get(preset).override({"precision": "bf16", "distributed_optimizer": sharded})
    need = gpu_memory(Workload(config, world_size))
    schedule = configured_schedule(config, world_size)
    dense, experts = dense_and_experts(config, world_size, schedule, schedule.pp - 1)
    stages = list(held_stages(config, schedule, schedule.pp - 1).values())
    tensors = state_tensors(config, stages, (dense.replicas, experts.replicas))
    state = sum(terms(need)[name] for name in ("weights", "gradients", "optimizer"))
    assert 0.97 * state < sum(tensors) <= state


def test_workspaces_follow_the_gpu_and_the_variable() -> None:
    config = presets.gpt2_124m().override({"transformer_impl": "transformer_engine"})

    def libraries(config: RunConfig = config, **software: Any) -> int:
        found = terms(gpu_memory(Workload(config, 1, libraries=Libraries(**software))))
        return found["cuBLAS"] + found["Transformer Engine"]

    assert libraries(gpu="a100") == 2 * (8 * MIB + MIB // 8) + 4 * MIB
    assert libraries(gpu="a100", cublas_workspace=32 * MIB) == 68 * MIB
    assert libraries(gpu="h100") == libraries(gpu="b200") == 96 * MIB
    assert libraries(gpu="b200", small_blackwell_workspace=True) == 2 * (8 * MIB + MIB // 8) + 32 * MIB
    assert libraries(config.override({"transformer_impl": "local"}), gpu="h100") == 64 * MIB


def test_each_stage_but_the_first_keeps_its_last_input_and_its_gradient() -> None:
    config = presets.tiny().override({"precision": "bf16", "pp": 2, "vpp": 2, "micro_batch_size": 2})
    each = 2 * 2 * config.model.seq_length * config.model.hidden * 2  # both, 2 samples, 2 bytes
    first, last = (terms(gpu_memory(Workload(config, 2), place))["stage inputs"] for place in (0, 1))
    assert (first, last) == (each, 2 * each)


def test_a_loss_needs_six_bytes_per_logit() -> None:
    config = presets.gpt2_124m().override({"micro_batch_size": 1})
    wide = config.override({"vocab_size": 2 * 50304})
    small, large = (gpu_memory(Workload(each, 1)) for each in (config, wide))
    above = [need.peak - need.allocated for need in (small, large)]
    assert above[1] - above[0] == pytest.approx(6 * 1024 * 50304, abs=MIB)


def test_recomputation_and_logits_are_not_alive_together() -> None:
    """The loss is backward before the last layer is computed again, so the larger of the two counts."""
    config = presets.gpt2_124m().override({"recompute_granularity": "full", "micro_batch_size": 1})
    need, few_words = (gpu_memory(Workload(config.override({"vocab_size": words}), 1)) for words in (50257, 128))
    assert terms(need)["temporaries"] == 1024 * 50304 * 2  # only the logits
    assert terms(few_words)["temporaries"] > terms(need)["temporaries"] // 4


def test_fully_sharded_state_and_whole_units() -> None:
    config = presets.gpt2_124m()
    parameters = 50304 * 768 + 1024 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    found = terms(gpu_memory(Workload(config, 4, fsdp=True)))
    assert found["weights"] + found["gradients"] + found["optimizer"] == pytest.approx(18 * parameters / 4, abs=8)
    layers = 2 * (12 * 768**2 + 13 * 768)
    assert found["gathered weights"] == 2 * (50304 * 768 + 1024 * 768 + 2 * 768 + layers)


def test_the_attention_of_deepseek_v2_and_v3() -> None:
    """arXiv 2405.04434, section 3.1.2, has 60 layers, hidden 5120, 128 heads; 2412.19437, section 4.2, 61 and 7168."""
    model = replace(presets.tiny().model, hidden=5120, heads=128, layers=60, bias=False, norm="rmsnorm")
    latent = Latent(query_rank=1536)
    by_hand = 5120 * 1536 + 1536 * 128 * 192 + 5120 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 5120
    assert sum(latent_matrices(model, latent)) == by_hand
    assert latent_parameters(model, latent, norms=True) == by_hand + 1536 + 512
    assert latent_parameters(model, latent, 8) * 8 > by_hand, "every rank has the matrices that go down"
    config = presets.tiny().override(
        {"layers": 61, "hidden": 7168, "heads": 128, "vocab_size": 129280, "model.ffn_hidden": 18432,
         "position": "rope", "norm": "rmsnorm", "bias": False, "activation": "swiglu",
         "untie_embeddings_and_output_weights": True, "num_experts": 256, "top_k": 8, "moe.ffn_hidden": 2048,
         "shared_expert_ffn_hidden": 2048, "layer_freq": (0, 0, 0) + (1,) * 58}
    )  # fmt: skip
    more = latent_parameters(config.model, latent, norms=True) - attention_parameters(config.model)
    assert model_parameters(config.model, config.moe) + 61 * more == pytest.approx(671e9, rel=1e-3)
    workload = Workload(config, 1, extras=Extras(latent=latent, qk_norm=True, depths=1))
    depth = depth_parameters(workload, StageContents(range(60, 61), embedding=False, loss=True))
    table = 129280 * 7168
    assert sum(depth) - table == pytest.approx(11.5e9, rel=0.015)  # README_WEIGHTS.md of DeepSeek-V3
    assert sum(depth_parameters(workload, StageContents(range(30), embedding=True, loss=False))) == 0


@pytest.mark.parametrize("gpu, parameters, copies", [("h100", False, 2), ("h100", True, 0), ("b200", True, -1)])
def test_fp8_weights_are_added_or_replace_others(gpu: Any, parameters: bool, copies: int) -> None:
    config = presets.gpt2_124m().override({"transformer_impl": "transformer_engine", "fp8": "hybrid"})
    need = terms(gpu_memory(Workload(config, 1, libraries=Libraries(gpu=gpu, float8_parameters=parameters))))
    assert need["fp8 weights"] == pytest.approx(copies * 12 * 12 * 768**2, rel=0.01)


def test_a_depth_of_prediction_is_a_layer_and_a_loss_more_on_the_last_stage() -> None:
    config = presets.gpt2_124m().override({"pp": 2, "micro_batch_size": 1})
    plain, deeper = (
        [terms(gpu_memory(Workload(config, 2, extras=Extras(depths=depths)), place)) for place in (0, 1)]
        for depths in (0, 1)
    )
    assert plain[0] == deeper[0]
    layer, joined, norms, table = 12 * 768**2 + 13 * 768, 2 * 768**2, 3 * 2 * 768, 50304 * 768
    assert deeper[1]["weights"] - plain[1]["weights"] == 2 * (layer + joined + norms + table)
    assert deeper[1]["activations"] - plain[1]["activations"] > 4 * 1024 * 50304


def test_the_engine_keeps_a_placeholder_for_each_shape_of_a_weight_gradient() -> None:
    """proj and qkv have h x h and 3h x h, fc1 and fc2 one number of elements; every layer has the same."""
    config = presets.gpt2_124m().override({"transformer_impl": "transformer_engine"})
    fused, separate = (
        terms(gpu_memory(Workload(config.override({"gradient_accumulation_fusion": on}), 1))) for on in (True, False)
    )
    assert (fused["placeholders"], separate["placeholders"]) == (2 * (1 + 3 + 4) * 768**2, 0)


def test_the_output_layer_needs_its_weight_gradient_beside_the_logits() -> None:
    """With few tokens 2 V h bytes are more than the exponentials that its backward no longer needs."""
    config = presets.gpt2_124m().override({"micro_batch_size": 1, "seq_length": 64})
    words = 50304
    assert terms(gpu_memory(Workload(config, 1)))["temporaries"] == 64 * words * (2 - 4) + 2 * words * 768


def test_a_full_expert_keeps_more_rows() -> None:
    """Each further row keeps its input, gate and up, fc2's input, and an fp32 weight."""
    config = presets.mixtral_8x7b()
    mean, full = (terms(gpu_memory(Workload(config, 64, expert_load=load), 0))["activations"] for load in (1.0, 1.5))
    model, rows = config.model, config.train.micro_batch_size * config.model.seq_length * config.moe.top_k // 2
    in_flight, layers = config.parallel.pp, model.layers // config.parallel.pp
    row = 2 * (model.hidden + 3 * 14336) + 4
    assert full - mean == pytest.approx(in_flight * layers * rows * row, rel=0.01)


@pytest.mark.parametrize("limit, waiting", [(2, 2), (0, 4), (9, 4)])
def test_deferred_gradients_of_the_output_layer_wait_with_their_inputs(limit: int, waiting: int) -> None:
    config = presets.gpt2_124m().override({"pp": 2, "micro_batch_size": 1, "global_batch_size": 4})
    needs = [gpu_memory(Workload(config, 2, extras=Extras(deferred_gradients=limit)), place) for place in (0, 1)]
    first, last = map(terms, needs)
    assert "deferred gradients" not in first
    assert last["deferred gradients"] == waiting * 1024 * (50304 + 768) * 2


def test_muon_has_one_moment_for_matrices_of_layers() -> None:
    config = presets.gpt2_124m()
    adam, muon = (terms(gpu_memory(Workload(config, 1, extras=Extras(muon=on)))) for on in (False, True))
    assert adam["optimizer"] - muon["optimizer"] == 4 * 12 * 12 * 768**2


def test_fp8_keeps_inputs_in_one_byte() -> None:
    """Those of qkv, fc1 and fc2 lose a byte; proj's is an fp8 copy of what attention keeps."""
    config = presets.gpt2_124m().override({"transformer_impl": "transformer_engine", "micro_batch_size": 1})
    wide, narrow = (terms(gpu_memory(Workload(config.override({"fp8": on}), 1))) for on in ("none", "hybrid"))
    assert wide["activations"] - narrow["activations"] == 12 * 1024 * 768 * (1 + 1 + 4 - 1)


def test_experts_in_fp8() -> None:
    """Mixtral under tp 2 x ep 4: two copies of each matrix but the router's, and one byte less of each input.

    With scales of this step the shared experts cast what the router keeps again; with earlier ones they keep a copy.
    """
    engine = {"transformer_impl": "transformer_engine", "shared_expert_ffn_hidden": 4096, "kv_heads": 8, "ep": 4}
    config = presets.mixtral_8x7b().override({**engine, "tp": 2, "etp": 1, "sequence_parallel": True, "pp": 1})
    runs = [config, *(config.override({"fp8": "hybrid", "fp8_recipe": recipe}) for recipe in ("current", "delayed"))]
    wide, narrow, delayed = (terms(gpu_memory(Workload(run, 8, libraries=Libraries(megatron=True)))) for run in runs)
    attention, experts, shared = (4096 + 4096 + 2 * 1024) * 4096 // 2, 2 * 3 * 4096 * 14336, 3 * 4096 * 4096 // 2
    assert narrow["fp8 weights"] == delayed["fp8 weights"] == 2 * 32 * (attention + experts + shared)
    between = config.train.micro_batch_size * config.model.seq_length // 2
    rows, inside, padding = 2 * between, 2 * between, 15
    kept = inside * 2048 - between * 4096 - rows * (4096 + 14336) - inside * 4096 // 2
    kept += padding * (4096 + 14336 + 4 * 14336 + 4)  # inputs in one byte, gate and up in two, a weight
    assert narrow["activations"] - wide["activations"] == 32 * kept
    assert delayed["activations"] - narrow["activations"] == 32 * between * 4096


def test_the_recorded_run_of_experts_in_fp8_has_the_weights_of_its_twin_twice_in_one_byte() -> None:
    """The same model in bf16 and in fp8; the files differ by 684 MB after a step."""
    name = "gpt3_mcore_te_tp2_pp2_ep4_etp1_"
    tests = {name + "memory_speed": "dev_dgxh100_dgxc", name + "mtp_resume_torch_dist_fp8": "dev_dgx_h100"}
    with open(TABLE, newline="") as file:
        rows = [golden_row(row) for row in csv.DictReader(file) if tests.get(row["test_case"]) == row["golden"]]
    wide, narrow = rows
    more = [gpu_memory(row.workload).allocated for row in (narrow, wide)]
    assert more[0] - more[1] == pytest.approx(narrow.allocated - wide.allocated, rel=0.01)


def test_query_and_key_norms_keep_their_inputs() -> None:
    config = presets.gpt2_124m().override({"micro_batch_size": 1})
    plain, normed = (gpu_memory(Workload(config, 1, extras=Extras(qk_norm=on))) for on in (False, True))
    tokens = 1024
    expected = 12 * (tokens * 2 * 768 * 2 + tokens * 2 * 12 * 2 * 4)
    assert terms(normed)["activations"] - terms(plain)["activations"] == expected
    assert terms(normed)["weights"] - terms(plain)["weights"] == 2 * 12 * 4 * 64


def test_flash_attention_keeps_a_copy_of_its_result_only_for_several_samples() -> None:
    config = presets.gpt2_124m().override({"transformer_impl": "transformer_engine", "micro_batch_size": 2})
    for samples, copies in ((2, 1), (1, 0)):
        cudnn, flash = (
            terms(gpu_memory(Workload(config.replaced(
                {"model.attention_backend": kernel, "train.micro_batch_size": samples}), 1)))["activations"]
            for kernel in ("cudnn", "flash")
        )  # fmt: skip
        assert flash - cudnn == copies * 12 * samples * 1024 * 768 * 2


def test_the_check_before_a_run_counts_the_same_bytes() -> None:
    config = presets.gpt2_124m().override({"parallel.pp": 2})
    schedule = configured_schedule(config, 2)
    for place in (0, 1):
        need = gpu_memory(Workload(config, 2), place, schedule)
        assert rank_memory(config, 2, schedule, place, "cuda").total == need.peak


@pytest.mark.parametrize(
    "chosen, gpu, deterministic, old, kernel",
    [
        ("unfused", "h100", False, False, "unfused"),
        ("auto", "a100", False, False, "flash"),
        ("auto", "h100", True, False, "cudnn"),
        ("auto", "b200", True, False, "flash"),
        ("auto", "b200", False, False, "cudnn"),
        ("auto", "a100", True, True, "unfused"),
        ("flash", "a100", True, True, "flash"),
    ],
)
def test_the_kernel_that_the_engine_takes(chosen: str, gpu: Any, deterministic: bool, old: bool, kernel: str) -> None:
    assert attention_kernel(chosen, gpu, deterministic=deterministic, before_te_2=old) == kernel


def line(**changes: str) -> dict[str, str]:
    with TABLE.open(newline="") as file:
        found = next(row for row in csv.DictReader(file) if row["test_case"] == "gpt3_mcore_te_tp1_pp2_rope_embeddings")
    return found | changes


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"golden": "dev"}, "names no GPU"),
        ({"test_type": "release", "nodes": ""}, "number of nodes"),
        ({"pipeline-model-parallel-size": "16"}, "do not fit 8 GPUs"),
        ({"num-layers": "7"}, "7 layers cannot be shared evenly"),
        ({"cuda-graph-impl": "local"}, "CUDA graphs"),
        ({"optimizer": "sgd"}, "optimizer sgd"),
        ({"optimizer": "muon", "use-distributed-optimizer": "True"}, "muon over several ranks"),
        ({"use-megatron-fsdp": "True", "data-parallel-sharding-strategy": "optim"}, "sharding strategy optim"),
        ({"hidden-size": "wide"}, "wide"),
        ({"pipeline-model-parallel-layout": "Et|tx|L"}, "'x' at position 4 is not a part of a stage"),
        ({"nodes": "two"}, "nodes is 'two', which is not a whole number"),
    ],
)
def test_a_row_without_a_workload_says_why(changes: dict[str, str], words: str) -> None:
    with pytest.raises(NotExpressibleError, match=words):
        workload_of(line(**changes))


def test_a_row_of_an_unknown_test_has_the_defaults_of_megatron() -> None:
    workload = workload_of(line(test_case="a_new_one"))
    assert workload.libraries.cublas_workspace is None
    assert workload.config.model.vocab_size == 50257
    assert (workload.config.model.hidden_dropout, workload.config.parallel.pp) == (0.1, 2)


def test_a_table_of_another_form_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("model,tp\ngpt,2\n")
    with pytest.raises(ConfigError, match="has no column family, test_case"):
        read_golden_rows(path)
