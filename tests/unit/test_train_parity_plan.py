"""`compare` plans every sound configuration, or refuses it in the user's own terms; nothing is launched."""

import re
from typing import Any

import pytest

from labkit.config import ConfigError, presets
from labkit.config.fields import SPECS
from labkit.train.parity.comparison import compare
from labkit.train.parity.snapshots import Snapshot

BASE = presets.tiny()
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"model.recompute_granularity": "selective"},
    {"model.recompute_granularity": "full"},
    {"optim.distributed_optimizer": True},
    {"optim.precision": "fp16"},
    {"optim.precision": "bf16"},
    {"optim.fp8": "hybrid"},
    {"optim.lr_schedule": "wsd"},
    {"model.position": "rope"},
    {"parallel.cp": 2},
    {"parallel.pp": 2},
    {"parallel.pp": 4},
    {"parallel.pp": 2, "parallel.vpp": 2},
    {"parallel.tp": 2},
    {"train.eval_steps": 1},
    {"train.profile": "nsys"},
    {"train.output_dir": "/tmp/nothing-is-written"},
    {"train.output_dir": "/tmp/nothing-is-written", "train.write_events": True},
    {"checkpoint.dir": "/tmp/nothing-is-written"},
    {"moe.num_experts": 4},
    {"moe.num_experts": 4, "parallel.ep": 2},
    {"moe.num_experts": 4, "parallel.ep": 2, "schedule.overlap_moe_expert_parallel_comm": True},
    {"moe.num_experts": 4, "parallel.tp": 2, "parallel.sequence_parallel": True},
    {"moe.num_experts": 4, "moe.capacity_factor": 1.0},
    {"moe.num_experts": 4, "moe.aux_loss_coeff": 0.01},
    {"moe.num_experts": 4, "moe.num_groups": 2, "moe.group_topk": 1},
    {"moe.num_experts": 4, "moe.score_function": "sigmoid"},
    {"moe.num_experts": 4, "moe.score_function": "sigmoid", "moe.expert_bias": True},
    {"moe.num_experts": 4, "moe.shared_expert_ffn_hidden": 64},
    {"graph.cuda_graph_impl": "local"},
    {"data.blend": ("1", "PATH")},
    {"model.family": "bert"},
    {"model.family": "mamba", "model.mamba_num_groups": 1},
    {"model.family": "mamba", "model.mamba_head_dim": 8},
    {"model.family": "t5"},
    {"model.family": "t5", "model.position": "relative"},
    {"model.family": "t5", "parallel.pp": 2},
)
"""What makes a field count for something: one of these goes with every field."""
GIVEN = {
    "parallel.order": ["tp-cp-ep-pp-dp"],
    "parallel.pipeline_layout": ["E t*4|t*4 L"],
    "parallel.etp": [1],
    "model.hybrid_override_pattern": ["MM*-MM*-"],
    "moe.layer_freq": [(1, 0)],
    "moe.num_groups": [4, 1],
    "moe.group_topk": [2],
    "graph.cuda_graph_modules": [("attn",)],
    "model.recompute_modules": [("mlp",), ("core_attn", "layernorm")],
    "optim.min_lr": [1e-4],
    "data.split": ["80,10,10"],
    "data.blend": [("1", "PATH")],
    "data.cache": ["/tmp/nothing-is-written"],
    "train.output_dir": ["/tmp/nothing-is-written"],
    "checkpoint.dir": ["/tmp/nothing-is-written"],
    "checkpoint.load": ["none"],
    "train.profile_ranks": [(), (0, 1)],
    "train.loggers": [("wandb",), ("mlflow", "wandb")],
    "train.tensorboard_dir": ["/tmp/nothing-is-written"],
}
FILES = ("schedule.path", "data.path", "data.tokenizer")
NEVER = ("schedule.use_ring_exchange_p2p", "parallel.rank_offset")
"""Have no sound value besides their defaults."""


def candidates(name: str) -> list[Any]:
    spec, value = SPECS[name], getattr(getattr(BASE, name.partition(".")[0]), name.partition(".")[2])
    if name in GIVEN:
        return GIVEN[name]
    if spec.choices:
        return [word for word in spec.choices if word != value]
    if spec.kind == "bool":
        return [not value] if value is not None else [True, False]
    if spec.kind == "int":
        return [2 * value, value + 1] if value else [1, 2, 4]
    return [value / 2] if value else [0.125, 2.0]


def sound_changes(name: str, path: str) -> list[dict[str, Any]]:
    values = [path] if name in FILES else candidates(name)
    tried = [{**context, name: value} for value in values for context in CONTEXTS]
    for changes in tried:
        if blend := changes.get("data.blend"):
            changes["data.blend"] = tuple(path if word == "PATH" else word for word in blend)
    return [changes for changes in tried if not BASE.replaced(changes).problems()]


@pytest.fixture
def launched(monkeypatch):
    configs = []

    def launch(fn, world_size, config, *args, **options):
        configs.append((config, world_size))
        return [(Snapshot(losses=[1.0], gradients={0: {}}, parameters={0: {}}), 0)] * world_size

    monkeypatch.setattr("labkit.launch.run", launch)
    return configs


@pytest.mark.parametrize(
    ("dtype", "every"),
    [
        ("float64", 4),
        pytest.param("float64", 1, marks=pytest.mark.sweep),
        pytest.param("float32", 1, marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", [name for name in SPECS if name not in NEVER])
def test_every_sound_value_of_a_field_is_planned_or_refused_in_the_users_terms(name, dtype, every, launched, tmp_path):
    path = tmp_path / "file"
    path.write_text("0F0\n")
    (tmp_path / "file.idx").touch()
    changes = sound_changes(name, str(path))
    assert changes, f"no context makes {name} sound: add one"
    for changed in changes[len(name) % min(every, len(changes)) :: every]:
        config = BASE.replaced(changed)
        launched.clear()
        try:
            compare(config, [{}], steps=2, dtype=dtype)
        except ConfigError as error:
            assert not launched
            for problem in error.problems:
                quoted(problem, config)
        else:
            assert [run.problems(world_size) for run, world_size in launched] == [[], []]
            assert launched[0][1] == 1


def quoted(problem: str, config) -> None:
    """Every value that a sentence gives to a field is the configuration's own."""
    found = re.match(r"([a-z]+\.[a-z0-9_]+)(?: = | is )(\S+?)[:;,]? ", problem)
    assert found and found[1] in SPECS, problem
    section, _, field = found[1].partition(".")
    assert repr(getattr(getattr(config, section), field)).startswith(found[2]), problem
    assert "has no effect" not in problem and "fp64" not in problem, problem


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"precision": "fp16", "loss_scale": 1024.0},
        {"precision": "fp16", "initial_loss_scale": 64.0, "hysteresis": 3, "loss_scale_window": 10},
        {"precision": "bf16", "grad_reduce_in_bf16": True},
    ],
)
def test_recomputation_and_what_a_precision_brings_are_no_reason_to_refuse(changes, launched):
    compare(BASE.override(changes), [{"world_size": 2}], steps=2)
    assert [world_size for _, world_size in launched] == [1, 2]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"optim.precision": "bf16"}, "optim.precision = 'bf16': dtype = float64 decides"),
        ({"loss_scale": 8.0}, "optim.loss_scale = 8.0: is the same in every run"),
        ({"train.steps": 9}, "train.steps = 9: is the same in every run"),
        ({"hidden_dropout": 0.1}, "model.hidden_dropout is 0.1; masks differ"),
        ({"use_cpu_initialization": False}, "model.use_cpu_initialization is False; layouts then start from different"),
        ({"transformer_impl": "transformer_engine"}, "which has no float64; compare in float32"),
    ],
)
def test_a_layout_changes_how_is_computed_not_what(layout, message, launched):
    with pytest.raises(ConfigError, match=message):
        compare(BASE, [layout])
    assert not launched


EXPERTS = {"num_experts": 4, "dispatcher": "alltoall"}
DROPS = {**EXPERTS, "capacity_factor": 1.0}


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({**EXPERTS, "input_jitter": 0.1}, {}, "moe.input_jitter is 0.1; each rank draws its own factors"),
        (DROPS, {"cp": 2}, "capacity_factor = 1.0: depends on the tokens that one rank holds, 1/2 of a micro"),
        (DROPS, {"tp": 2, "sequence_parallel": True, "cp": 2}, "1/4 of a micro batch here and 1/1 in the reference"),
        ({**EXPERTS, "load_balancing": "sinkhorn"}, {"cp": 2}, "load_balancing = 'sinkhorn': depends on the tokens"),
        (
            {**EXPERTS, "load_balancing": "global_aux_loss", "aux_loss_coeff": 0.01},
            {"world_size": 2},
            "'global_aux_loss': depends on the micro batches seen so far, 2 at once here and 1 in the ref",
        ),
    ],
)
def test_a_routing_that_goes_by_who_holds_which_token_is_not_compared(changes, layout, message, launched):
    with pytest.raises(ConfigError, match=re.escape(message)):
        compare(BASE.override(changes), [layout])
    assert not launched


@pytest.mark.parametrize(
    ("changes", "layout", "reference"),
    [
        (DROPS, {"ep": 2, "world_size": 4}, None),
        (DROPS, {"cp": 2, "ep": 2}, {"cp": 2, "dispatcher": "local"}),
        ({**EXPERTS, "load_balancing": "sinkhorn"}, {"world_size": 2}, None),
        ({**EXPERTS, "load_balancing": "global_aux_loss", "aux_loss_coeff": 0.01}, {"pp": 2, "cp": 2}, None),
    ],
)
def test_it_is_compared_where_the_same_ranks_hold_the_same_tokens(changes, layout, reference, launched):
    report = compare(BASE.override(changes), [layout], reference=reference)
    first, first_size = launched[0]
    assert first_size == (1 if reference is None else 2)
    assert first.moe.dispatcher == "local"
    assert report.reference == ("one process" if reference is None else "tp1 cp2 pp1 dp1 local capacity 1")
    assert report.reference in report.sentence


def test_the_one_process_computes_experts_one_after_the_other_and_sends_nothing(launched):
    shared = {"shared_expert_ffn_hidden": 64, "shared_expert_overlap": True, "pad_to_capacity": True}
    compare(BASE.override(DROPS | shared), [{"ep": 2}], steps=2)
    alone, layout = (config for config, _ in launched)
    assert (alone.moe.dispatcher, alone.moe.grouped_gemm, alone.moe.shared_expert_overlap) == ("local", False, False)
    assert not alone.moe.pad_to_capacity and alone.parallel.ep == 1
    assert (layout.moe.dispatcher, layout.moe.grouped_gemm, layout.moe.pad_to_capacity) == ("alltoall", True, True)


def test_in_float32_only_one_process_can_say_which_experts_are_chosen(launched):
    with pytest.raises(ConfigError, match="layouts replay the choice of experts of one process"):
        compare(BASE.override(EXPERTS), [{"ep": 2}], dtype="float32", reference={"world_size": 2})
    assert not launched


def test_the_one_process_has_no_graphs_and_a_layout_captures_them_before_its_last_step(launched):
    compare(BASE.override({"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 9}), [{}], steps=3)
    alone, layout = (config.graph for config, _ in launched)
    assert alone.cuda_graph_impl == "none"
    assert (layout.cuda_graph_impl, layout.cuda_graph_warmup_steps) == ("emulated", 2)
