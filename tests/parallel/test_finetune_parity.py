"""Fine-tuning under tp with the sequence cut, dp and pp equals one process: losses, norms of gradients, predictions."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.config import presets
from labkit.evaluate import Records
from labkit.finetune import Settings, finetune
from labkit.finetune.finetuning import Trained, prepare, train_and_predict
from labkit.launch import info
from labkit.train import pretrain

sys.path.insert(0, str(Path(__file__).parents[1]))
from task_folders import write_task

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
}


def fine_tuned(settings: Settings) -> Trained:
    prepared = prepare(settings)
    return train_and_predict(prepared, prepared.row, seed=3)


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
        for trained in on_ranks(fine_tuned, 2, Settings(**common, **layout)):
            np.testing.assert_allclose(trained.losses, alone.losses, rtol=1e-10, err_msg=name)
            np.testing.assert_allclose(trained.grad_norms, alone.grad_norms, rtol=1e-10, err_msg=name)
            for split, expected in alone.logits.items():
                np.testing.assert_allclose(trained.logits[split], expected, rtol=1e-8, atol=1e-9, err_msg=name)


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
