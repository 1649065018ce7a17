"""Fine-tuning under tp with the sequence cut, dp and pp equals one process: losses, norms of gradients, predictions."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_folders import write_task

from labkit.comm.groups import ParallelGroups
from labkit.config import RunConfig, presets
from labkit.evaluate import Records
from labkit.finetune import Settings, finetune
from labkit.finetune.finetuning import Trained, configuration, predict, prepare, train_and_predict
from labkit.finetune.task_model import task_forward_step, task_provider
from labkit.launch import info
from labkit.train import pretrain
from labkit.train.checkpoint.inventory import chosen
from labkit.train.checkpoint.rank_state import RankWeights
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import initialize, setup_model_and_optimizer

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
    "dp2, distributed optimizer": {"distributed_optimizer": True},
}


def fine_tuned(settings: Settings) -> Trained:
    prepared = prepare(settings)
    return train_and_predict(prepared, prepared.row, seed=3)


def predicted(settings: Settings) -> dict[str, np.ndarray]:
    """The predictions of saved weights, without training."""
    prepared = prepare(settings)
    folder = settings.saved_at(prepared.row, 3)
    assert folder is not None
    config = configuration(prepare(replace(settings, save=None)), prepared.row, 3, info.rank_info().world_size)
    run = initialize(config, own_model=True)

    def provider(config: RunConfig, groups: ParallelGroups, **stage: Any) -> torch.nn.Module:
        made = task_provider(prepared.files.outputs)(config, groups, **stage)
        state, reader = RankWeights([made], groups), Reader(chosen(Path(folder), None))
        assert state.misfits(reader) == ""
        state.load_weights(reader)
        return made

    with run.groups:
        wrapped, *_ = setup_model_and_optimizer(run, provider)
        pipeline = Pipeline(config, run.groups, wrapped, task_forward_step, run.schedule)
        return {split: predict(run, pipeline, prepared.samples(split)) for split in prepared.files.splits}


@pytest.mark.parametrize("task", ["race", "squad"])
def test_every_layout_computes_what_one_process_computes(task: str, tmp_path: Path, on_ranks: Any) -> None:
    folder = tmp_path / "bert"
    small = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 80, "global_batch_size": 2, "steps": 1}
    precise = {"optim.precision": "fp64", "checkpoint.dir": str(folder)}
    on_ranks(pretrain, 2, presets.bert_tiny().override({**small, **precise, "parallel.tp": 2}))
    path = write_task(task, tmp_path / task, train=16, dev=8, words=45)
    common: dict[str, Any] = {
        "task": task, "path": str(path), "checkpoint": str(folder),
        "batch": 4, "lr": 1e-3, "epochs": 1, "dropout": 0.0, "precision": "fp64", "micro_batch_size": 2,
        "seq_length": 80,
    }  # fmt: skip
    alone = fine_tuned(Settings(**common))
    assert len(alone.grad_norms) == 4 and alone.losses[0] != alone.losses[-1]
    for name, layout in LAYOUTS.items():
        saved = Settings(**common, **layout, save=str(tmp_path / name))
        for trained in on_ranks(fine_tuned, 2, saved):
            np.testing.assert_allclose(trained.losses, alone.losses, rtol=1e-10, err_msg=name)
            np.testing.assert_allclose(trained.grad_norms, alone.grad_norms, rtol=1e-10, err_msg=name)
            for split, expected in alone.logits.items():
                np.testing.assert_allclose(trained.logits[split], expected, rtol=1e-8, atol=1e-9, err_msg=name)
        for split, found in predicted(replace(saved, tp=1, pp=1, sequence_parallel=False)).items():  # in this process
            np.testing.assert_allclose(found, alone.logits[split], rtol=1e-8, atol=1e-9, err_msg=f"{name}, saved")


def tuned_on_own_disks(settings: Settings, folder: Path, steps: tuple[int, int]) -> list[dict[str, Any]]:
    """Each rank has records of its own, and finds a latest checkpoint of its own."""
    rank = info.rank_info().rank
    own = Settings(**{**asdict(settings), "step": steps[rank]})
    return finetune(own, records=Records(folder / f"rank{rank}.jsonl"))


def test_all_ranks_do_what_rank_0_finds(tmp_path: Path, on_ranks: Any) -> None:
    small = {"layers": 1, "hidden": 32, "heads": 2, "seq_length": 80, "global_batch_size": 2, "steps": 2}
    on_ranks(pretrain, 2, presets.bert_tiny().override({**small, "checkpoint": {"dir": str(tmp_path), "interval": 1}}))
    data = str(write_task("qqp", tmp_path / "qqp", train=8, dev=4))
    settings = Settings(task="qqp", path=data, checkpoint=str(tmp_path), batch=4, epochs=1, seq_length=32)
    first = on_ranks(tuned_on_own_disks, 2, settings, tmp_path, (1, 2))
    assert first[0] == first[1] and first[0][0]["checkpoint"].endswith("step_00000001")
    assert len(Records(tmp_path / "rank0.jsonl").rows) == 2 and not (tmp_path / "rank1.jsonl").exists()
    assert on_ranks(tuned_on_own_disks, 2, settings, tmp_path, (1, 2)) == first, "rank 1, without rows, takes rank 0's"
