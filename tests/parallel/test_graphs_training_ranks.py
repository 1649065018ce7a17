"""Pipelines, replicas and tensor parallelism by emulated CUDA graphs: the bits of training without."""

from collections import Counter

import pytest

from labkit.config import RunConfig, presets
from labkit.graphs import plan_buffers
from labkit.schedules import build_schedule
from labkit.train import pretrain

GRAPHS = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 1}
FULL = {"graph.cuda_graph_impl": "full_iteration"}
DISTRIBUTED = {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True}
VALIDATION = {"train.eval_steps": 1, "train.eval_interval": 2}
LAYERS, MICROBATCHES = 4, 4


def small(**changes) -> RunConfig:
    shape = {
        "model.layers": LAYERS, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16,
        "train.global_batch_size": MICROBATCHES, "train.steps": 4, "data.split": "90,10,0",
    }  # fmt: skip
    return presets.tiny().override(shape).override(changes)


def with_and_without(config: RunConfig, graphs: dict) -> tuple[list, list, Counter, int]:
    """Numbers of a run by graphs, of one without, how often each graph was replayed, layers of this rank."""
    runs = [pretrain(config.override(graphs)), pretrain(config)]
    numbers = [[repr(run.series(name)) for name in ("loss", "grad_norm", "validation_loss")] for run in runs]
    return *numbers, Counter(event.name for event in runs[0].events if event.kind == "graph_replay")


def assert_equal(found: list) -> None:
    for rank, (graphed, eager, _) in enumerate(found):
        assert graphed == eager, f"rank {rank}"


CASES = {
    "pp2, interleaved, validation": (2, {"pp": 2, "vpp": 2, **VALIDATION}, GRAPHS),
    "pp2, all forwards first, dropout": (2, {"pp": 2, "schedule.name": "gpipe", "hidden_dropout": 0.1}, GRAPHS),
    "pp2, a V with split backwards": (2, {"pp": 2, "schedule.name": "zbv"}, GRAPHS),
    "pp2 x dp2, distributed optimizer": (
        4, {"pp": 2, "global_batch_size": 8, **DISTRIBUTED, **VALIDATION}, GRAPHS,
    ),
    "dp2, distributed optimizer, several buckets": (
        2, {"global_batch_size": 8, "optim.bucket_size": 4000, **DISTRIBUTED}, GRAPHS,
    ),
    "tp2, sequence parallel, dropout": (
        2, {"tp": 2, "sequence_parallel": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}, GRAPHS,
    ),
    "dp2, distributed optimizer, full iteration": (
        2, {"global_batch_size": 8, **DISTRIBUTED, **VALIDATION}, GRAPHS | FULL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_are_bit_equal_to_those_without_graphs(on_ranks, name):
    world, changes, graphs = CASES[name]
    assert_equal(on_ranks(with_and_without, world, small(**changes), graphs))


def test_a_rank_of_a_pipeline_has_graphs_for_each_microbatch_and_replays_each_once_a_step(on_ranks):
    config = small(pp=2, vpp=2)
    for graphed, eager, replays in on_ranks(with_and_without, 2, config, GRAPHS):
        assert graphed == eager
        assert len(replays) == 2 * (LAYERS // 2) * MICROBATCHES
        assert set(replays.values()) == {config.train.steps - 1}


def buffers_of_the_rank(config: RunConfig) -> tuple[int, int]:
    """Distinct static inputs that training captured, and those that the plan has."""
    from labkit.train.forward_step import gpt_forward_step
    from labkit.train.pipeline import Pipeline
    from labkit.train.pretraining import initialize, setup_model_and_optimizer

    run = initialize(config)
    chunks, _, _ = setup_model_and_optimizer(run)
    helper = Pipeline(config, run.groups, chunks, gpt_forward_step, run.schedule).graphs.helper
    assert helper is not None
    helper.create_cudagraphs()
    graphs = [graph for layer in helper.layers for graph in layer.cuda_graphs]
    captured = len({x.data_ptr() for graph in graphs for x in graph.static_inputs})
    return captured, helper.plan.num_buffers


def test_static_inputs_grow_with_the_stages_and_not_with_the_microbatches(on_ranks):
    """Golden numbers of PP2 V2: layers a chunk x min(warm-up + 1, M V)."""
    for microbatches in (4, 8):
        config = small(**GRAPHS, pp=2, vpp=2, global_batch_size=microbatches)
        schedule = build_schedule(config.schedule, pp=2, vpp=2, microbatches=microbatches)
        found = on_ranks(buffers_of_the_rank, 2, config)
        planned = [plan_buffers(schedule.order(rank), 1).num_buffers for rank in range(2)]
        assert found == [(5, 5), (3, 3)] == [(n, n) for n in planned], microbatches


LAYOUTS = {
    "no pipeline": {},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp4 vpp2": {"pp": 4, "vpp": 2},
    "pp4 zero bubble": {"pp": 4, "schedule.name": "zero_bubble_h1"},
    "pp4 dualpipe": {"pp": 4, "schedule.name": "dualpipe_v"},
}
PIPELINES: dict[str, dict] = {
    "pp2": {"pp": 2},
    "pp2 gpipe": {"pp": 2, "schedule.name": "gpipe"},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "pp4": {"pp": 4},
}
REPLICAS = {"ddp": {}, "distributed optimizer": {**DISTRIBUTED}}


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_of_the_tiny_preset_are_bit_equal_in_every_layout(on_ranks, layout, replicas, dp):
    changes = LAYOUTS[layout] | REPLICAS[replicas]
    world = dp * changes.get("pp", 1)
    config = presets.tiny().override(
        {**changes, "train.global_batch_size": 8 * dp, **VALIDATION, "data.split": "90,10,0"}
    )
    assert config.train.steps == 20
    assert_equal(on_ranks(with_and_without, world, config, GRAPHS))


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [("attn",), ("mlp",)], ids=["attn", "mlp"])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("layout", PIPELINES)
def test_parts_of_layers_in_a_pipeline_are_bit_equal(on_ranks, layout, replicas, part):
    config = presets.tiny().override({**PIPELINES[layout], **REPLICAS[replicas], "train.global_batch_size": 8})
    assert config.train.steps == 20
    graphs = GRAPHS | {"graph.cuda_graph_modules": part}
    assert_equal(on_ranks(with_and_without, PIPELINES[layout]["pp"], config, graphs))
