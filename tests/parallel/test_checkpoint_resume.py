"""Checkpoints under every layout: what was saved comes back to the bit, and a cut run ends as one that was never cut.

Tensors are compared as the files have them, put together by safetensors alone, not by the code that loads.
"""

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open

from labkit.cli.train_command import train_on_rank
from labkit.config import ConfigError, RunConfig, presets
from labkit.data.datasets import build_datasets
from labkit.launch import RankError, info, run
from labkit.parallel.parameters.parameter_record import main_grad_of
from labkit.plan.memory_need import rank_memories
from labkit.plan.stages import configured_schedule
from labkit.train import pretrain
from labkit.train.checkpoint import checkpoints as checkpoints_module
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.manifest import CheckpointError, read_manifest, write_manifest
from labkit.train.checkpoint.rank_state import RankState
from labkit.train.interruption import RunInterrupted
from labkit.train.loss_scaler import build_loss_scaler
from labkit.train.pretraining import initialize, setup_model_and_optimizer

SMALL = {"hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 8, "layers": 4, "vocab_size": 1024}
DROPOUT = dict.fromkeys(("hidden_dropout", "attention_dropout", "embedding_dropout"), 0.1)
SIGMOID = {"moe.score_function": "sigmoid", "moe.expert_bias": True, "moe.shared_expert_ffn_hidden": 32}
PLAIN = presets.tiny().override(SMALL)
LLAMA = presets.llama_tiny().override(
    SMALL | {"kv_heads": 2, "model.ffn_hidden": 64, "make_vocab_size_divisible_by": 100}
)
EXPERTS = presets.tiny_moe().override(SMALL | SIGMOID | {"moe.num_experts": 4, "moe.ffn_hidden": 32})
ZERO = {"optim.distributed_optimizer": True}

CHAINS = {
    "dense": (
        PLAIN,
        [
            {"tp": 2, "pp": 2},
            {"pp": 4},
            {},
            {"tp": 4, "sequence_parallel": True},
            ZERO,
            {"cp": 2, "tp": 2},
            {"pp": 2, "vpp": 2},
            {"pp": 2, "tp": 2, **ZERO},
            {"pp": 4, "pipeline_layout": "Et|tt|t|L"},
            {"cp": 4, **ZERO, "optim.bucket_size": 1000},
            {"pp": 2, "schedule.name": "zbv"},
            {**ZERO, "optim.num_distributed_optimizer_instances": 2},
            {"optim.data_parallel": "naive"},
            {"optim.precision": "bf16", "tp": 2, **ZERO},
            {"optim.precision": "bf16", "pp": 2},
            {"optim.precision": "fp16", "cp": 2},
        ],
    ),
    "grouped heads, swiglu, padding": (
        LLAMA,
        [{"tp": 4}, {"pp": 2}, {"tp": 2, **ZERO}, {"tp": 4, **ZERO, "sequence_parallel": True}, {"tp": 2, "cp": 2}],
    ),
    "experts": (
        EXPERTS,
        [
            {"ep": 2},
            {"ep": 4, **ZERO},
            {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
            {"tp": 2, "pp": 2, "etp": 2, "sequence_parallel": True},
            {"pp": 2, "ep": 2, "vpp": 2, **ZERO},
            {"tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True, **ZERO},
            {"ep": 4, "pp": 1, "etp": 1, "cp": 2},
        ],
    ),
}
"""Name -> (configuration, layouts of four ranks). Each layout loads what the one before it saved; the first as well."""


def marked(names: Iterable[str], *long: str) -> list[Any]:
    """The names, those of `long` for `make sweep` alone."""
    return [pytest.param(name, marks=pytest.mark.sweep) if name in long else name for name in names]


def stored(step: Path) -> dict[str, np.ndarray]:
    """Every whole tensor of a checkpoint by its manifest; rows of no box would stay NaN or -1."""
    tensors = json.loads((step / "manifest.json").read_bytes())["tensors"]
    whole = {}
    for name, tensor in tensors.items():
        kind = np.dtype(tensor["dtype"])
        whole[name] = np.full(tensor["shape"], np.nan if kind.kind == "f" else -1 if kind.kind == "i" else 255, kind)
        for offset, shape, file, _ in tensor["boxes"]:
            with safe_open(step / file, "numpy") as opened:
                place = tuple(slice(first, first + size) for first, size in zip(offset, shape))
                whole[name][place] = opened.get_tensor(f"{name}@{','.join(map(str, offset))}")
    return whole


def differing(one: Path, other: Path, *, but: tuple[str, ...] = ()) -> list[str]:
    """Names of tensors that differ in a bit, or that one checkpoint has alone."""
    a, b = stored(one), stored(other)
    names = {name for name in a.keys() | b.keys() if not name.startswith(but)}
    return sorted(n for n in names if n not in a or n not in b or a[n].tobytes() != b[n].tobytes())


def convert(configs: list[RunConfig]) -> list[tuple[int, int]]:
    """In each layout after the other: build the model, load, and save what was loaded."""
    progress = []
    for config in configs:
        begun = initialize(config)
        with begun.groups:
            chunks, optimizer, _ = setup_model_and_optimizer(begun)
            scaler = build_loss_scaler(config.optim)
            with Checkpoints(config, begun.groups, chunks, optimizer, say=info.announce) as checkpoints:
                found = checkpoints.load(scaler)
                checkpoints.last = None  # save although the step is the loaded one
                checkpoints.save(found, scaler)
                progress.append((found.step, found.consumed_samples))
    return progress


@pytest.mark.parametrize("name", marked(CHAINS, "grouped heads, swiglu, padding"))
def test_parameters_and_moments_pass_through_every_layout_unchanged(name, tmp_path, on_ranks):
    config, layouts = CHAINS[name]
    trained = config.override({**layouts[0], "steps": 2, "checkpoint.dir": str(tmp_path / "0")})
    on_ranks(pretrain, 4, trained)
    chain = [
        config.override(
            {**layout, "checkpoint.dir": str(tmp_path / str(i)), "checkpoint.load": str(tmp_path / str(i - 1))}
        )
        for i, layout in enumerate([*layouts[1:], layouts[0]], start=1)
    ]
    assert set(on_ranks(convert, 4, chain)[0]) == {(2, 16)}
    first = tmp_path / "0" / "step_00000002"
    assert len([n for n in stored(first) if n.startswith("exp_avg_sq.")]) > 10
    for i, step in enumerate(chain, start=1):
        assert differing(first, tmp_path / str(i) / "step_00000002", but=("rng.",)) == [], step.parallel


def test_evaluations_that_an_end_cut_off_are_made_up_for(tmp_path, one_thread):
    folder = tmp_path / "run"
    config = PLAIN.override(
        {"steps": 4, "eval_interval": 2, "eval_steps": 1, "checkpoint.interval": 2, "output_dir": str(folder)}
    ).override({"checkpoint.dir": str(tmp_path / "saved")})
    pretrain(config)
    metrics = folder / "metrics.jsonl"

    def evaluations() -> list[tuple[int, dict[str, float]]]:
        lines = map(json.loads, metrics.read_text().splitlines())
        return [(line["step"], {k: v for k, v in line.items() if k.endswith("_loss")}) for line in lines]

    whole = evaluations()
    assert [list(values) for _, values in whole] == [
        [],
        [],
        ["validation_loss"],
        [],
        [],
        ["validation_loss"],
        ["test_loss"],
    ]
    lines = metrics.read_text().splitlines(keepends=True)
    for kept in (6, 5, 2):  # the end came before the test, before the last validation, before the first
        metrics.write_text("".join(lines[:kept]))
        if kept == 2:
            shutil.rmtree(tmp_path / "saved" / "step_00000004")
        pretrain(config)
        assert evaluations() == whole, kept


RESUMED = {
    "tp2 pp2, dropout": PLAIN.override({"tp": 2, "pp": 2, **DROPOUT}),
    "zero, dropout, bf16": PLAIN.override({**ZERO, "optim.precision": "bf16", **DROPOUT, "overlap_param_gather": True}),
    "fp16 with a moving scale": PLAIN.override({"cp": 2, "precision": "fp16", "loss_scale_window": 2}),
    "fp8 with a history": PLAIN.override({"tp": 2, "optim.fp8": "hybrid"}),
    "experts": EXPERTS.override({"ep": 2, "tp": 2, "etp": 1, "sequence_parallel": True, "moe.input_jitter": 0.01}),
    "experts in fp8": EXPERTS.override({"ep": 2, "optim.fp8": "hybrid"}),
    "vpp, asynchronous": PLAIN.override(
        {"pp": 2, "vpp": 2, **DROPOUT, "checkpoint.dir": "x", "checkpoint.asynchronous": True}
    ),
}


class Draws:
    """An observer that draws a Gaussian a step: code of the user, whose generators keep the second of a pair."""

    def on_model(self, groups, chunks, schedule): ...
    def on_update(self, step, chunks): ...
    def on_gradients(self, step, chunks):
        random.gauss(0.0, 1.0)
        np.random.standard_normal()  # noqa: NPY002 (as a user may)


def training(step: Path) -> dict[str, Any]:
    """The state of the loop in a manifest."""
    return json.loads((step / "manifest.json").read_text())["training"]


@pytest.mark.parametrize("name", marked(RESUMED, "zero, dropout, bf16", "fp8 with a history", "experts in fp8"))
def test_a_run_that_was_cut_twice_ends_as_one_that_was_never_cut(name, tmp_path, on_ranks):
    config = RESUMED[name].override({"steps": 6, "interval": 1, "keep": 9, "decay_steps": 6, "warmup_steps": 3})
    straight, cut = (config.override({"checkpoint.dir": str(tmp_path / folder)}) for folder in ("straight", "cut"))

    def drawing(config):
        return pretrain(config, observer=Draws())

    whole = on_ranks(drawing, 4, straight)
    parts = [on_ranks(drawing, 4, cut.override({"steps": steps})) for steps in (3, 4)]
    parts.append(on_ranks(drawing, 4, cut.override({"distributed_timeout_minutes": 9.0})))  # no part of the layout
    assert [part[3].resumed_after for part in parts] == [0, 3, 4]
    for rank, result in enumerate(whole):
        assert [loss for part in parts for loss in part[rank].losses] == result.losses
    steps = [f"step_0000000{n}" for n in range(1, 7)]
    for step in steps:
        assert differing(tmp_path / "straight" / step, tmp_path / "cut" / step) == [], step
        assert training(tmp_path / "straight" / step) == training(tmp_path / "cut" / step)
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == [".lock", "latest", *steps]
    if "fp16" in name:
        scales = [training(tmp_path / "cut" / step)["loss_scaler"]["scale"] for step in steps]
        assert scales[0] != scales[-1]


class Overflows:
    """An observer in whose steps a gradient is not finite."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_model(self, groups, chunks, schedule): ...
    def on_update(self, step, chunks): ...
    def on_gradients(self, step, chunks):
        if step in self.steps:
            main_grad_of(next(chunks[0].parameters())).fill_(float("inf"))


SKIPPING = {
    "fp16": {"precision": "fp16", "hysteresis": 3, "loss_scale_window": 2},
    "fp16, smallest scale": {"precision": "fp16", "initial_loss_scale": 64.0, "min_loss_scale": 64.0},
    "bf16, distributed optimizer": {"precision": "bf16", "on_not_finite": "skip", **ZERO},
    "fp8 with a history": {"optim.fp8": "hybrid", "on_not_finite": "skip"},
}


@pytest.mark.parametrize("name", SKIPPING)
def test_a_skipped_step_counts_as_none_whether_or_not_a_run_is_cut_after_it(name, tmp_path, one_thread):
    """The first two steps are skipped, so there are checkpoints without moments too; then good ones lie between."""
    config = PLAIN.override({**SKIPPING[name], "steps": 7, "decay_steps": 7, "warmup_steps": 3, "interval": 1})
    straight, cut = (config.override({"keep": 9, "checkpoint.dir": str(tmp_path / f)}) for f in ("straight", "cut"))
    skipped = Overflows(0, 1, 3, 6)
    whole = pretrain(straight, observer=skipped)
    assert [n for _, n in whole.series("skipped_steps")] == [1, 2, 2, 3, 3, 3, 4]
    updates = [0, 0, 0, 1, 1, 2, 3]  # before each step; the warm-up has three
    assert [lr for _, lr in whole.series("learning_rate")] == pytest.approx([config.optim.lr * n / 3 for n in updates])
    parts = [pretrain(cut.override({"steps": steps}), observer=skipped) for steps in range(1, 8)]
    for series in ("loss", "grad_norm", "learning_rate", "loss_scale", "skipped_steps"):
        assert [pair for part in parts for pair in part.series(series)] == whole.series(series), series
    for n in range(1, 8):
        step = f"step_0000000{n}"
        assert differing(tmp_path / "straight" / step, tmp_path / "cut" / step) == [], step
        assert training(tmp_path / "straight" / step) == training(tmp_path / "cut" / step)


class Stopped(Overflows):
    """An observer that lets the first step overflow and asks its process to stop in the second."""

    def on_gradients(self, step, chunks):
        super().on_gradients(step, chunks)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_was_asked_to_stop_goes_on_behind_the_step_that_it_finished(tmp_path, one_thread):
    config = PLAIN.override({**SKIPPING["fp16"], "steps": 4, "decay_steps": 4, "warmup_steps": 2, "interval": 2})
    straight, cut = (config.override({"checkpoint.dir": str(tmp_path / f)}) for f in ("straight", "cut"))
    whole = pretrain(straight, observer=Overflows(0))
    with pytest.raises(RunInterrupted, match=r"after step 2 of 4; checkpoint: .*/step_00000002$"):
        pretrain(cut, observer=Stopped(0))
    rest = pretrain(cut)
    assert (rest.resumed_after, rest.losses) == (2, whole.losses[2:])
    for step in ("step_00000002", "step_00000004"):
        assert differing(tmp_path / "straight" / step, tmp_path / "cut" / step) == []
        assert training(tmp_path / "straight" / step) == training(tmp_path / "cut" / step)


class Noted:
    """A dataset that notes what is read of it."""

    def __init__(self, dataset: Any, positions: list[int]) -> None:
        self.dataset, self.positions, self.name = dataset, positions, dataset.name

    def __len__(self) -> int:
        return len(self.dataset)

    def ordered(self, position: int) -> Any:
        self.positions.append(position)
        return self.dataset.ordered(position)


@pytest.mark.parametrize("preset", ["tiny", "bert_tiny", "t5_tiny"])
def test_every_sample_is_read_once_and_every_validation_reads_the_same(preset, tmp_path, one_thread):
    """Through changes of the batch, each in a run that goes on from the last one's checkpoint."""
    shape = {"layers": 2, "hidden": 16, "heads": 2, "seq_length": 32}
    config = presets.get(preset).override({**shape, "eval_interval": 1, "eval_steps": 2})
    read: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    expected: dict[str, list[int]] = {"valid": [], "test": []}
    steps = consumed = 0
    for batch, more in ((8, 1), (4, 2), (16, 1), (8, 2)):
        steps, consumed = steps + more, consumed + more * batch
        pretrain(
            config.override({"steps": steps, "global_batch_size": batch, "checkpoint.dir": str(tmp_path)}),
            datasets_provider=lambda config: tuple(Noted(split, read[split.name]) for split in build_datasets(config)),
            process_non_loss_data=lambda *_: None,  # reads a batch behind those of the validation
        )
        expected["valid"] += more * [*range(3 * batch)]
        expected["test"] += range(2 * batch)
        assert training(tmp_path / f"step_{steps:08d}")["consumed_samples"] == consumed
    assert read == expected | {"train": [*range(consumed)]}


def random_states(config: RunConfig) -> tuple[dict[str, bytes], list[str]]:
    """The random states with which this rank would go on, and what rank 0 says."""
    begun, said = initialize(config), []
    with begun.groups:
        chunks, optimizer, _ = setup_model_and_optimizer(begun)
        with Checkpoints(config, begun.groups, chunks, optimizer, say=said.append) as checkpoints:
            checkpoints.load(build_loss_scaler(config.optim))
        states = RankState(chunks, optimizer, begun.groups)._random_states()
    return {name: values.numpy().tobytes() for name, values in states.items()}, said


def test_random_states_of_more_fewer_and_other_ranks_follow_seed_step_and_rank(tmp_path, on_ranks):
    """Also where the configuration of the layout is the same and only the replicas are more or fewer."""
    config = PLAIN.override({**DROPOUT, "tp": 2})
    for ranks in (2, 4):
        saving = {"steps": 2, "interval": 1, "checkpoint.dir": str(tmp_path / f"{ranks}")}
        on_ranks(pretrain, ranks, config.override(saving))

    def resumed(ranks: int, saved_by: int, step: int, **changes: Any) -> list[dict[str, bytes]]:
        load = {"checkpoint.load": str(tmp_path / f"{saved_by}" / f"step_0000000{step}")}
        results = on_ranks(random_states, ranks, config.override({**load, **changes}))
        assert "derived from seed, step and rank, because the layout has changed" in results[0][1][-1]
        return [states for states, _ in results]

    more, fewer = resumed(4, 2, 1), resumed(2, 4, 1)
    assert more == fewer + fewer, "replicas draw alike, however many there are"
    first, second = fewer
    assert first["torch"] == second["torch"]
    assert first["tracker.model-parallel-rng"] != second["tracker.model-parallel-rng"]
    files = stored(tmp_path / "4" / "step_00000001")
    others = {
        "a fresh run": on_ranks(random_states, 2, config)[0][0],
        "the run that saved": {name: files[f"rng.00000.{name}"].tobytes() for name in first},
        "a later step": resumed(2, 4, 2)[0],
        "another seed": resumed(2, 4, 1, seed=7)[0],
    }
    for whose, states in others.items():
        assert [name for name in first if states[name] == first[name]] == [], whose
    assert first.keys() == states.keys() and len(first) == 6
    assert resumed(4, 4, 1, tp=1, pp=2)[0] == first, "as many ranks, cut otherwise"


def test_an_asynchronous_save_holds_the_state_of_its_step(tmp_path, monkeypatch, one_thread):
    """The file is written behind the next step; here not before that step has changed every weight, and the length of
    the random states of Python and numpy."""
    config = PLAIN.override({"steps": 2, "interval": 1})
    pretrain(config.override({"checkpoint.dir": str(tmp_path / "at once")}), observer=Draws())
    updated, write_shard = threading.Event(), checkpoints_module.write_shard

    class Updated(Draws):
        def on_update(self, step, chunks):
            if step == 1:
                updated.set()

    def late(*given):
        assert updated.wait(60)
        return write_shard(*given)

    monkeypatch.setattr(checkpoints_module, "write_shard", late)
    behind = {"checkpoint.dir": str(tmp_path / "behind"), "checkpoint.asynchronous": True}
    pretrain(config.override(behind), observer=Updated())
    for step in ("step_00000001", "step_00000002"):
        assert differing(tmp_path / "at once" / step, tmp_path / "behind" / step) == []


def test_a_run_goes_on_on_another_device_with_derived_random_states(tmp_path, monkeypatch, capfd):
    """A checkpoint of a GPU has states of 16 bytes, which no CPU can take; here they are made up."""
    config = PLAIN.override({**DROPOUT, "steps": 2, "checkpoint.dir": str(tmp_path), "record_events": False})
    own = RankState._random_states

    def as_on_a_gpu(state):
        of_gpu = {n: s[:16].clone() if n.startswith("tracker.") else s for n, s in own(state).items()}
        return of_gpu | {"cuda": torch.zeros(16, dtype=torch.uint8)}

    monkeypatch.setattr(RankState, "_random_states", as_on_a_gpu)
    pretrain(config)
    monkeypatch.setattr(RankState, "_random_states", own)
    result = pretrain(config.override({"steps": 4}))
    assert result.resumed_after == 2 and len(result.losses) == 2
    assert (
        "random states are derived from seed, step and rank, because the device has changed" in capfd.readouterr().err
    )


def blind(config: RunConfig, rank: int) -> int:
    """Steps after which the run goes on, where one rank finds an empty folder as on a machine that sees it late."""
    if info.rank_info().rank == rank:
        checkpoints_module.to_try = lambda _: []
    return pretrain(config).resumed_after


def test_all_ranks_go_on_from_the_checkpoint_that_rank_0_finds(tmp_path):
    config = PLAIN.override({"tp": 2, "steps": 1, "checkpoint.dir": str(tmp_path)})
    run(pretrain, 2, config)
    assert run(blind, 2, config.override({"steps": 2}), 1, distributed_timeout_minutes=0.5) == [1, 1]


def test_a_moment_that_one_stage_lacks_is_told_by_all_ranks(tmp_path):
    """A rank that raised alone would leave the others in their next collective."""
    config = PLAIN.override({"pp": 2, "steps": 1, "checkpoint.dir": str(tmp_path)})
    run(pretrain, 2, config)
    folder = tmp_path / "step_00000001"
    stored = read_manifest(folder)
    del stored.tensors["exp_avg.final_norm.weight"]
    write_manifest(folder, stored)
    results = run(train_on_rank, 2, config.override({"steps": 2}), distributed_timeout_minutes=0.5)
    said = f"{folder} does not fit the model: exp_avg.final_norm.weight is missing"
    assert [result.error[: len(said)] for result in results] == [said] * 2


def test_a_step_of_ones_own_folder_is_where_the_run_begins_but_not_where_it_begins_again(tmp_path):
    """`checkpoint.load` names an earlier step. Started again, the run goes on from its own checkpoints."""
    own = {"checkpoint.dir": str(tmp_path / "own"), "interval": 1, "keep": 9}
    config = PLAIN.override({**own, "steps": 3, "decay_steps": 9})
    pretrain(config)
    back = config.override({"lr": 0.5, "checkpoint.load": str(tmp_path / "link" / "step_00000001")})
    (tmp_path / "link").symlink_to(tmp_path / "own")
    assert pretrain(back.override({"steps": 2})).resumed_after == 1
    assert pretrain(back.override({"steps": 2})).resumed_after == 2, "the same command again"
    assert pretrain(back.override({"lr": 0.1, "steps": 2})).resumed_after == 1, "another command"
    base = tmp_path / "own" / "base"  # a folder of checkpoints of its own, below the run's
    shutil.copytree(tmp_path / "own" / "step_00000001", base / "step_00000001")
    assert pretrain(config.override({"checkpoint.load": str(base)})).resumed_after == 2


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (PLAIN, 1.01),
        (PLAIN.override({**ZERO, "precision": "bf16"}), 1.01),
        (PLAIN.override({"precision": "fp64", "tp": 2}), 1.03),  # norms and biases lie on both
        (LLAMA.override({"pp": 2, "vpp": 2}), 1.5),  # the last stage holds the embedding as well
        (EXPERTS.override({"ep": 2}), 1.01),
    ],
    ids=["dp4", "zero bf16", "tp2 fp64", "pp2", "ep2"],
)
def test_the_memory_check_counts_the_copy_of_an_asynchronous_save(tmp_path, on_ranks, config, most):
    """A rank copies what it writes, so all copies together are the parameters and moments of the checkpoint."""
    config = config.override({"steps": 1, "checkpoint.dir": str(tmp_path), "checkpoint.asynchronous": True})
    on_ranks(pretrain, 4, config)
    written = sum(t.nbytes for name, t in stored(tmp_path / "step_00000001").items() if not name.startswith("rng."))
    copies = [rank.checkpoint for rank in rank_memories(config, 4, configured_schedule(config, 4), "cpu")]
    assert written * 0.99 <= sum(copies) <= written * most
    synchronous = config.override({"checkpoint.asynchronous": False})
    assert {r.checkpoint for r in rank_memories(synchronous, 4, configured_schedule(config, 4), "cpu")} == {0}


MODEL_CHANGES = {"layers": 2, "hidden": 16, "kv_heads": 2, "activation": "gelu", "seq_length": 8, "num_experts": 4}


def test_another_model_is_refused_field_by_field_before_any_rank_starts(tmp_path, on_ranks):
    saved = PLAIN.override({"steps": 1, "checkpoint.dir": str(tmp_path)})
    on_ranks(pretrain, 4, saved)
    with pytest.raises(ConfigError) as refused:
        on_ranks(pretrain, 4, saved.override(MODEL_CHANGES))
    problems = refused.value.problems
    widths = {"model.ffn_hidden": 64, "moe.ffn_hidden": 64}  # they follow from the hidden size
    for name, value in (MODEL_CHANGES | widths).items():
        assert [p for p in problems if f"{name} = {value!r}: the checkpoint of step 1 has" in p], name
    assert len(problems) == len(MODEL_CHANGES | widths)


def test_what_differs_otherwise_is_said_and_used(tmp_path):
    said = []
    config = PLAIN.override({"steps": 1, "checkpoint.dir": str(tmp_path), "record_events": False})
    run(pretrain, 1, config)
    changed = config.override({"steps": 2, "lr": 0.5, "global_batch_size": 4, "tp": 2, "hidden_dropout": 0.1})
    run(pretrain, 2, changed, progress=said.append)
    sentence = said[0]["message"]
    assert sentence.startswith(f"resumed from {tmp_path}/step_00000001: model.hidden_dropout 0.0 -> 0.1; ")
    assert "parallel.tp 1 -> 2; optim.lr 0.001 -> 0.5; " in sentence
    assert "train.steps 1 -> 2" in sentence and "train.global_batch_size 8 -> 4" in sentence
    assert sentence.endswith("random states are derived from seed, step and rank, because the layout has changed")
    assert [line["learning_rate"] for line in said[1:] if "loss" in line] == [pytest.approx(0.25)]


def failing_in_step(number: int):
    """An observer that raises in this step, counted from 1."""

    class Failing:
        def on_model(self, groups, chunks, schedule): ...
        def on_update(self, step, chunks): ...
        def on_gradients(self, step, chunks):
            if step + 1 == number:
                raise KeyError("the rank dies")

    return Failing()


def test_a_run_that_died_before_its_first_checkpoint_begins_again_by_itself(tmp_path):
    said, folders = [], {"checkpoint.dir": str(tmp_path / "saved"), "output_dir": str(tmp_path / "out")}
    config = PLAIN.override({"steps": 5, "decay_steps": 5, **folders, "interval": 4})

    def dies(config, number):
        return pretrain(config, observer=failing_in_step(number))

    with pytest.raises(RankError, match="the rank dies"):
        run(dies, 2, config, 4)
    with pytest.raises(ConfigError, match="holds a run that did not finish"):
        run(pretrain, 2, config.override({"lr": 0.5}))
    with pytest.raises(RankError, match="the rank dies"):
        run(dies, 2, config, 5, progress=said.append)
    assert said[0]["message"] == f"{tmp_path}/out: the run had ended before its first checkpoint, so it begins again"
    result = run(pretrain, 2, config)[0]
    assert (result.resumed_after, len(result.losses)) == (4, 1)
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("failing", "error", "words"),
    [
        ("checkpoints.write_shard", OSError(28, "No space left on device"), "No space left on device"),
        ("shard_files.save_file", SafetensorError("the disk is gone"), "the disk is gone"),
        ("checkpoints.write_shard", RuntimeError("odd"), r"RuntimeError\('odd'\)"),
    ],
    ids=["the system", "the library", "labkit"],
)
def test_a_run_whose_last_checkpoint_fails_is_not_finished(failing, error, words, tmp_path, monkeypatch):
    """Asynchronously the last checkpoint is written behind the last step, and in a thread of its own."""
    folders = {"checkpoint.dir": str(tmp_path / "saved"), "output_dir": str(tmp_path / "out")}
    config = PLAIN.override({"steps": 2, **folders, "checkpoint.asynchronous": True})

    def fails(*_):
        raise error

    monkeypatch.setattr(f"labkit.train.checkpoint.{failing}", fails)
    with pytest.raises(CheckpointError, match=rf"step 2 could not be written \(rank 0: {words}\); there is no earlier"):
        pretrain(config)
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state"] == "unfinished"
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [".lock"]


def test_a_run_goes_on_in_its_output_folder_with_one_line_a_step(tmp_path):
    folders = {"checkpoint.dir": str(tmp_path / "saved"), "output_dir": str(tmp_path / "out"), "interval": 2}
    config = PLAIN.override({"steps": 6, "decay_steps": 6, "eval_steps": 1, "eval_interval": 2, **folders})
    run(pretrain, 2, config.override({"steps": 5}))
    metrics = tmp_path / "out" / "metrics.jsonl"
    before = metrics.read_text().splitlines()
    (tmp_path / "saved" / "step_00000005" / "manifest.json").unlink()  # as if the run had died in step 5
    result = run(pretrain, 2, config)[0]
    after = metrics.read_text().splitlines()
    assert result.resumed_after == 4
    kept = [line for line in before if json.loads(line)["step"] <= 4]
    assert after[: len(kept)] == kept
    assert [json.loads(line)["step"] for line in after if '"loss"' in line] == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["state"] == "finished"
    there = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert there == [
        ".lock",
        "latest",
        "step_00000004",
        "step_00000005",
        "step_00000006",
    ]  # the damaged one does not count
    again = run(pretrain, 2, config)[0]
    assert (again.resumed_after, again.losses) == (6, []) and metrics.read_text().splitlines() == after
