"""Models whose ranks draw their own weights (`model.use_cpu_initialization: false`): copies are equal, all train."""

from __future__ import annotations

from typing import Any

import pytest

from labkit.config import RunConfig, presets
from labkit.parallel.data_parallel.gradients import is_expert
from labkit.parallel.parameters.parameter_record import record_of
from labkit.train import pretrain
from labkit.train.pretraining import initialize, setup_model_and_optimizer

SMALL = {
    "model.use_cpu_initialization": False,
    "model.kv_heads": 2,
    "model.layers": 2,
    "train.steps": 3,
    "train.global_batch_size": 4,
}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "tp2 pp2, tied": ({"tp": 2, "pp": 2}, "tiny"),
    "tp4, copies of heads, sequence parallel": ({"tp": 4, "sequence_parallel": True}, "tiny"),
    "tp2 dp2, distributed optimizer": ({"tp": 2, "optim.distributed_optimizer": True}, "tiny"),
    "ep2 tp2, experts": ({"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}, "tiny_moe"),
}
Found = dict[tuple[Any, ...], list[float]]


def config_of(name: str) -> RunConfig:
    changes, preset = LAYOUTS[name]
    return getattr(presets, preset)().override(SMALL | changes)


def weights(config: RunConfig) -> Found:
    """What this rank holds, under a key that two ranks share where they must hold the same."""
    run = initialize(config)
    chunks, *_ = setup_model_and_optimizer(run)
    groups, found = run.groups, {}
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        place = (groups.etp.rank, groups.ep.rank) if is_expert(parameter) else (groups.tp.rank,)
        if not record_of(parameter).tensor_model_parallel:  # whole on every rank, or on all of etp
            place = (groups.ep.rank,) if is_expert(parameter) else ()
        alike = record_of(parameter).replicated
        if alike is not None:
            block = groups.tp.rank // alike.ranks
            found[parameter.full_name, "alike", block] = parameter[-alike.rows :].flatten().tolist()
        found[parameter.full_name, *place] = parameter.flatten().tolist()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_hold_alike_what_is_one_tensor_and_train_as_one(on_ranks, name: str) -> None:
    config = config_of(name)
    by_rank: list[Found] = on_ranks(weights, 4, config)
    seen: Found = {}
    shared = 0
    for rank, found in enumerate(by_rank):
        for key, values in found.items():
            shared += key in seen
            assert seen.setdefault(key, values) == values, f"{key} on rank {rank}"
    assert shared
    for key in (k for k in seen if len(k) == 2 and k[1] == 0 and (k[0], 1) in seen):
        if any(seen[key]) and not all(value == 1 for value in seen[key]):  # no bias, no norm
            assert seen[key] != seen[key[0], 1], f"{key[0]}: ranks of tp drew the same part"
    losses = on_ranks(losses_of, 4, config)
    assert all(other == losses[0] for other in losses)
    host = on_ranks(losses_of, 4, config.override({"model.use_cpu_initialization": True}))
    assert losses[0] != host[0] and abs(losses[0][0] - host[0][0]) < 0.05, "other weights of the same kind"
    assert losses[0][2] < losses[0][0]


def losses_of(config: RunConfig) -> list[float]:
    return pretrain(config).losses
