"""Bytes of a training rank against sums made by hand and the literature's formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.config import RunConfig, presets
from labkit.plan.activations import paper_layer_bytes
from labkit.plan.memory import RankMemory, rank_memory
from labkit.plan.stage_activations import share_of
from labkit.plan.stages import configured_schedule


def memory(config: RunConfig, world_size: int, place: int = 0, device: str = "cpu") -> RankMemory:
    config.validate(world_size)
    return rank_memory(config, world_size, configured_schedule(config, world_size), place, device)  # type: ignore[arg-type]


def test_gpt2_small_with_adam_in_mixed_precision() -> None:
    """124 million parameters and 47 rows of padding, 2 + 4 + 12 bytes each (arXiv 1910.02054, section 3.1)."""
    block = 12 * 768**2 + 13 * 768
    parameters = 50304 * 768 + 1024 * 768 + 12 * block + 2 * 768
    assert parameters == 124_439_808 + 47 * 768
    found = memory(presets.gpt2_124m(), 1)
    assert (found.weights, found.gradients, found.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", (4, 4, 8)), ("fp64", (8, 8, 16)), ("fp16", (2, 4, 12))])
def test_each_precision(precision: str, bytes_each: tuple[int, int, int]) -> None:
    config = presets.tiny().override({"precision": precision})
    parameters = 1024 * 64 + 64 * 64 + 8 * (12 * 64**2 + 13 * 64) + 2 * 64
    found = memory(config, 1)
    assert (found.weights, found.gradients, found.optimizer) == tuple(parameters * each for each in bytes_each)


def test_gradients_in_bf16_take_16_bytes_a_parameter_and_4_more_during_the_update() -> None:
    """2 + 2 + 12, and under the distributed optimizer 4 + 12 / d; AdamW reads this rank's gradients in fp32."""
    config = presets.gpt2_124m().override({"grad_reduce_in_bf16": True, "seq_length": 64, "micro_batch_size": 1})
    parameters = 50304 * 768 + 64 * 768 + 12 * (12 * 768**2 + 13 * 768) + 2 * 768
    for sharded, d in ((False, 1), (True, 4)):
        config = config.override({"distributed_optimizer": sharded})
        found, wide = (memory(config.override({"grad_reduce_in_bf16": on}), d, device="cuda") for on in (True, False))
        assert (found.weights, found.gradients) == (2 * parameters, 2 * parameters)
        assert found.optimizer == wide.optimizer == 12 * parameters // d
        assert found.activations == max(4 * parameters // d, wide.activations)


def test_the_distributed_optimizer_shards_over_dp_and_cp_of_an_instance() -> None:
    config = presets.tiny().override({"precision": "bf16", "parallel.cp": 2})
    whole = memory(config, 8)
    sharded = memory(config.override({"distributed_optimizer": True}), 8)
    halves = memory(config.override({"distributed_optimizer": True, "num_distributed_optimizer_instances": 2}), 8)
    assert (whole.weights, whole.gradients) == (sharded.weights, sharded.gradients)
    assert whole.optimizer == 8 * sharded.optimizer == 4 * halves.optimizer


def test_experts_are_sharded_over_their_own_replicas() -> None:
    """Mixtral on 64 ranks: dense parameters on dp = 16 of them, experts (ep 8) on edp = 2."""
    config = presets.mixtral_8x7b().override({"distributed_optimizer": True})
    hidden, ffn, layers = 4096, 14336, 8
    experts = layers * 3 * hidden * ffn  # 8 experts over ep = 8
    attention = hidden * (hidden + 2 * 1024) + hidden * hidden
    dense = layers * (attention + 8 * hidden + 2 * hidden) + 32000 * hidden  # router, two norms; the embedding
    found = memory(config, 64)
    assert found.weights == 2 * (dense + experts)
    assert found.optimizer == pytest.approx(12 * dense / 16 + 12 * experts / 2, abs=2)


def test_microbatches_in_flight_are_those_of_the_schedule() -> None:
    """1F1B keeps min(pp - r, m) microbatches on rank r, each of the paper's s b h (34 + 5 a s / h) bytes a layer."""
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "attention_backend": "unfused"}
    config = presets.tiny().override(
        {**dropout, "precision": "bf16", "hidden": 512, "seq_length": 512, "parallel.pp": 4}
    )
    first, second = (memory(config, 4, place, "cuda").activations for place in (1, 2))
    layer = paper_layer_bytes(config.model, share_of(config, "cuda"), "none")
    assert first - second == pytest.approx(2 * layer, rel=0.01)  # one microbatch more of a stage of 2 layers


def test_gpipe_keeps_every_microbatch() -> None:
    config = presets.tiny().override({"parallel.pp": 2, "schedule.name": "gpipe"})
    more = config.override({"global_batch_size": 32})
    per_microbatch = (memory(more, 2).activations - memory(config, 2).activations) / 16
    assert memory(config, 2).activations > 16 * per_microbatch > 0


def test_recomputation_keeps_inputs_and_the_chosen_microbatches_whole() -> None:
    deep = presets.tiny().override({"parallel.pp": 2, "hidden": 256, "micro_batch_size": 4})
    full = deep.override({"recompute_granularity": "full"})
    by_kept = [
        memory(full.override({"num_microbatches_with_partial_activation_checkpoints": count}), 2).activations
        for count in (0, 1, 2)
    ]
    assert by_kept[0] == memory(full, 2).activations < by_kept[1] < by_kept[2]
    nothing = replace(full.model, recompute_granularity="none")
    one = memory(replace(full, model=nothing), 2).activations
    assert by_kept[1] - by_kept[0] == by_kept[2] - by_kept[1]
    assert by_kept[2] > one, "two of two in flight are whole, and a recomputed piece is reserved beside them"


def test_a_capacity_counts_as_if_nothing_were_dropped() -> None:
    config = presets.tiny_moe()
    dropping = config.override({"capacity_factor": 1.0})
    assert memory(dropping, 1).activations == pytest.approx(memory(config, 1).activations, rel=0.01)
