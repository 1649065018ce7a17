"""The predicted step with merged pairs and of experts in fp8: what they change, and the published runs of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from labkit.config import RunConfig
from labkit.plan.machine import load_machine
from labkit.plan.memory import rank_memory
from labkit.plan.pair_times import stage_layers
from labkit.plan.stages import configured_schedule
from labkit.plan.step_time import StepPrediction, predict_step, step_lower_bound
from labkit.plan.workload import Workload

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "plan.md").read_text()
QWEN = {"model.layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "model.ffn_hidden": 6144, "vocab_size": 151936,
        "seq_length": 4096, "num_experts": 128, "top_k": 8, "moe.ffn_hidden": 768, "ep": 16, "micro_batch_size": 1,
        "global_batch_size": 1024, "precision": "bf16", "activation": "swiglu", "norm": "rmsnorm", "position": "rope",
        "bias": False, "untie_embeddings_and_output_weights": True, "distributed_optimizer": True,
        "overlap_param_gather": True, "layer_freq": [1]}  # fmt: skip
LARGE: dict[str, Any] = {
    **QWEN, "model.layers": 96, "hidden": 4096, "heads": 64, "model.ffn_hidden": 12288, "moe.ffn_hidden": 1536,
    "ep": 32, "tp": 2, "etp": 1, "sequence_parallel": True, "pp": 8, "vpp": 4, "global_batch_size": 2048,
}  # fmt: skip
MERGES: dict[str, Any] = {"schedule.overlap_moe_expert_parallel_comm": True}
DELAYS = {**MERGES, "schedule.delay_wgrad_compute": True}


def workload(changes: dict[str, Any], ranks: int) -> Workload:
    return Workload(RunConfig().override(changes), ranks)


def predicted(changes: dict[str, Any], ranks: int) -> StepPrediction:
    return predict_step(workload(changes, ranks), load_machine("h100"))


@pytest.mark.parametrize(("base", "ranks"), [(QWEN, 16), (LARGE, 256)], ids=["30B", "235B"])
@pytest.mark.parametrize("merges", [MERGES, DELAYS], ids=["merged", "delayed"])
def test_pairs_hide_all_to_alls_and_nothing_else(base: dict[str, Any], ranks: int, merges: dict[str, Any]) -> None:
    plain, merged = predicted(base, ranks), predicted({**base, **merges}, ranks)
    assert plain.seconds > merged.seconds > plain.seconds - plain.parts["ep"]
    assert sum(merged.parts.values()) == pytest.approx(merged.seconds)
    for kind in ("gemm", "attention", "memory", "launch"):
        assert merged.parts[kind] == plain.parts[kind]
    assert 0 < merged.parts["ep"] < plain.parts["ep"]
    bound = step_lower_bound(workload({**base, **merges}, ranks), load_machine("h100"))
    assert bound <= merged.seconds * (1 + 1e-12)


def test_without_an_all_to_all_the_parts_are_those_of_the_layer() -> None:
    """The parts' seconds are all terms of the layer, and the transfers are the terms of ep."""
    from labkit.plan.layer_times import layer_passes
    from labkit.plan.layout import layout_of

    run, machine = workload({**QWEN, "layer_freq": [1, 0], "shared_expert_ffn_hidden": 768}, 16), load_machine("h100")
    layout = layout_of(run)
    ((experts, dense, *_),) = stage_layers(run.config, layout, machine, 1)
    for layer, moe in ((experts, run.config.moe), (dense, None)):
        passes = layer_passes(run.config.model, moe, layout, machine)
        sent = layer.dispatch + layer.combine
        assert sum(layer.forward.values()) + sent == pytest.approx(sum(term.seconds for term in passes.forward))
        assert sum(layer.backward.values()) + sent == pytest.approx(sum(term.seconds for term in passes.input_grad))
        assert sum(layer.weight.values()) == pytest.approx(sum(term.seconds for term in passes.weight_grad))
    assert dense.dispatch == dense.combine == 0.0 and min(experts.forward.values()) > 0
    assert set(dense.forward) == {"attention", "mlp"}


def test_memory_grows_with_the_microbatches_in_flight() -> None:
    """Merged 1F1B keeps 2 (p - r) - 1 microbatches, and a layer in a pair, where 1F1B keeps p - r."""
    shape = {**QWEN, "pp": 4, "ep": 4, "global_batch_size": 64}
    for rank in range(4):
        kept = []
        for merges in ({}, MERGES):
            config = RunConfig().override({**shape, **merges})
            kept.append(rank_memory(config, 16, configured_schedule(config, 16), rank, "cuda").activations)
        ahead = 4 - rank
        assert (2 * ahead - 1) / ahead < kept[1] / kept[0] < (2 * ahead - 1 + 0.2) / ahead, rank


def test_the_page_has_the_predicted_gains() -> None:
    number = r"\| ([\d.]+)"
    row = rf"^\| Qwen3 [^|]* {number} to ([\d.]+) s {number} {number} to ([\d.]+) s {number} \|"
    rows = re.findall(row, PAGE, re.MULTILINE)
    assert len(rows) == 3
    for (off, on, gain, *own), (base, ranks) in zip(rows, ((QWEN, 16), (QWEN, 16), (LARGE, 256)), strict=True):
        plain, merged = predicted(base, ranks).seconds, predicted({**base, **MERGES}, ranks).seconds
        assert [f"{plain:.1f}", f"{merged:.1f}", f"{plain / merged:.2f}"] == own
        assert float(off) / float(on) == pytest.approx(float(gain), abs=0.006)
    assert predicted({**QWEN, **DELAYS}, 16).seconds == pytest.approx(predicted({**QWEN, **MERGES}, 16).seconds)
    assert "predicted they change nothing" in PAGE


FLOAT8: dict[str, Any] = {"optim.fp8": "hybrid", "optim.fp8_recipe": "current"}


def test_experts_in_fp8_cast_and_fill_up_their_rows() -> None:
    """4096 tokens x 8 are 32768 rows for 8 experts, of which each gets 7 or 8 zeros; they travel in 16 bits."""
    from labkit.plan.layer_times import layer_passes
    from labkit.plan.layout import layout_of

    machine, found = load_machine("h100"), []
    for changes in ({}, FLOAT8):
        run = workload({**QWEN, **changes}, 16)
        passes = layer_passes(run.config.model, run.config.moe, layout_of(run), machine)
        found.append({term.name: dict(term.inputs) for term in (*passes.forward, *passes.input_grad)})
    wide, narrow = found
    more = {"experts fc1, cast to fp8", "experts fc2, cast to fp8", "rows filled up for fp8"}
    assert more <= narrow.keys() - wide.keys()
    assert narrow["rows filled up for fp8"]["elements"] == (32768 + 60) * 2048
    assert [each["experts fc1"]["m"] for each in found] == [4096, 4103]
    for name in ("dispatch of rows", "combine of rows"):
        assert narrow[name]["bytes"] == wide[name]["bytes"] == 32768 * 2048 * 2


def test_the_page_has_the_errors_of_experts_in_fp8() -> None:
    rows = re.findall(r"^\| (\w+) [^|]*\| ([\d.]+) s \| ([\d.]+) s \| ([-+][\d.]+) % \|$", PAGE, re.MULTILINE)
    stages = {**QWEN, "pp": 2, "vpp": 12, "ep": 8}
    older = {**stages, "vpp": 24, "micro_batch_size": 2, "global_batch_size": 512}
    large = {**LARGE, "global_batch_size": 8192}
    runs = ((QWEN, 16, 29.701), (stages, 16, 28.941), (large, 256, 76.561), (older, 16, 24.848))
    assert [name for name, *_ in rows] == ["Mixtral", *4 * ["Qwen3"]]
    for (_, *told), (base, ranks, published) in zip(rows[1:], runs, strict=True):
        seconds = predicted({**base, **FLOAT8}, ranks).seconds
        assert [f"{published:.1f}", f"{seconds:.1f}", f"{100 * (seconds / published - 1):+.1f}"] == told
