"""`compare` plans every sound configuration, or refuses it in the user's own terms; nothing is launched."""

import re
from typing import Any

import pytest

from labkit.config import ConfigError, presets
from labkit.config.fields import SPECS
from labkit.config.limits import CHOICES
from labkit.train.parity import compare
from labkit.train.snapshots import Snapshot

BASE = presets.tiny()
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    {"model.recompute_granularity": "selective"},
    {"model.recompute_granularity": "full"},
    {"optim.distributed_optimizer": True},
    {"optim.precision": "fp16"},
    {"optim.fp8": "hybrid"},
    {"optim.lr_schedule": "wsd"},
    {"parallel.cp": 2},
    {"parallel.pp": 2},
    {"parallel.pp": 4},
    {"parallel.pp": 2, "parallel.vpp": 2},
    {"parallel.tp": 2},
    {"train.eval_steps": 1},
    {"moe.num_experts": 4},
    {"moe.num_experts": 4, "parallel.ep": 2},
    {"graph.cuda_graph_impl": "local"},
)
"""What makes a field count for something: one of these goes with every field."""
GIVEN = {
    "parallel.order": ["tp-cp-ep-pp-dp"],
    "parallel.pipeline_layout": ["E t*4|t*4 L"],
    "parallel.etp": [1],
    "graph.cuda_graph_scope": [("attn",)],
    "model.recompute_modules": [("mlp",), ("core_attn", "layernorm")],
    "optim.min_lr": [1e-4],
    "data.split": ["80,10,10"],
    "train.output_dir": ["/tmp/nothing-is-written"],
}
FILES = ("schedule.path", "data.path", "data.tokenizer")
NEVER = ("schedule.use_ring_exchange_p2p",)
"""Has no sound value besides its default."""


def candidates(name: str) -> list[Any]:
    spec, value = SPECS[name], getattr(getattr(BASE, name.partition(".")[0]), name.partition(".")[2])
    if name in GIVEN:
        return GIVEN[name]
    if name in CHOICES:
        return [word for word in CHOICES[name] if word != value]
    if spec.kind == "bool":
        return [not value] if value is not None else [True, False]
    if spec.kind == "int":
        return [2 * value, value + 1] if value else [1, 2, 4]
    return [value / 2] if value else [0.125, 2.0]


def sound_changes(name: str, path: str) -> list[dict[str, Any]]:
    values = [path] if name in FILES else candidates(name)
    tried = [{**context, name: value} for value in values for context in CONTEXTS]
    return [changes for changes in tried if not BASE.replaced(changes).problems()]


@pytest.fixture
def launched(monkeypatch):
    configs = []

    def launch(fn, world_size, config, *args, **options):
        configs.append((config, world_size))
        return [(Snapshot(losses=[1.0], gradients={0: {}}, parameters={0: {}}), 0)] * world_size

    monkeypatch.setattr("labkit.launch.run", launch)
    return configs


@pytest.mark.parametrize("name", [name for name in SPECS if name not in NEVER])
def test_every_sound_value_of_a_field_is_planned_or_refused_in_the_users_terms(name, launched, tmp_path):
    path = tmp_path / "file"
    path.write_text("0F0\n")
    changes = sound_changes(name, str(path))
    assert changes, f"no context makes {name} sound: add one"
    for changed in changes:
        config = BASE.replaced(changed)
        for dtype in ("float64", "float32"):
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
    ],
)
def test_recomputation_and_loss_scales_are_no_reason_to_refuse(changes, launched):
    compare(BASE.override(changes), [{"world_size": 2}], steps=2)
    assert [world_size for _, world_size in launched] == [1, 2]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"optim.precision": "bf16"}, "optim.precision = 'bf16': dtype = float64 decides"),
        ({"loss_scale": 8.0}, "optim.loss_scale = 8.0: is the same in every run"),
        ({"train.steps": 9}, "train.steps = 9: is the same in every run"),
        ({"hidden_dropout": 0.1}, "model.hidden_dropout is 0.1; masks differ"),
        ({"transformer_impl": "transformer_engine"}, "which has no float64; compare in float32"),
    ],
)
def test_a_layout_changes_how_is_computed_not_what(layout, message, launched):
    with pytest.raises(ConfigError, match=message):
        compare(BASE, [layout])
    assert not launched
