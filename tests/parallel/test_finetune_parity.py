"""Fine-tuning under tp with the sequence cut, under dp and under pp equals one process: losses and predictions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.config import presets
from labkit.finetune import Settings
from labkit.finetune.finetuning import prepare, train_and_predict
from labkit.train import pretrain

sys.path.insert(0, str(Path(__file__).parents[1]))
from task_folders import write_task

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": True},
    "dp2": {},
    "pp2": {"pp": 2},
}


def fine_tuned(settings: Settings) -> tuple[list[float], dict[str, np.ndarray]]:
    prepared = prepare(settings)
    trained = train_and_predict(prepared, prepared.row, seed=3)
    return trained.losses, trained.logits


@pytest.mark.parametrize("task", ["race", "squad"])
def test_every_layout_computes_what_one_process_computes(task: str, tmp_path: Path, on_ranks: Any) -> None:
    folder = tmp_path / "bert"
    small = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 80, "global_batch_size": 2, "steps": 1}
    precise = {"optim.precision": "fp64", "checkpoint.dir": str(folder)}
    on_ranks(pretrain, 2, presets.bert_tiny().override({**small, **precise, "parallel.tp": 2}))
    common: dict[str, Any] = {
        "task": task, "path": str(write_task(task, tmp_path / task, train=16, dev=8)), "checkpoint": str(folder),
        "batch": 4, "lr": 1e-3, "epochs": 1, "dropout": 0.0, "precision": "fp64", "micro_batch_size": 2,
        "seq_length": 80,
    }  # fmt: skip
    losses, logits = fine_tuned(Settings(**common))
    assert losses[0] != losses[-1]
    for name, layout in LAYOUTS.items():
        for rank_losses, rank_logits in on_ranks(fine_tuned, 2, Settings(**common, **layout)):
            np.testing.assert_allclose(rank_losses, losses, rtol=1e-10, err_msg=name)
            for split, expected in logits.items():
                np.testing.assert_allclose(rank_logits[split], expected, rtol=1e-8, atol=1e-9, err_msg=name)
