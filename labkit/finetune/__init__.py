"""Fine-tuning of BERT on the tasks of Megatron-LM's paper, under tp x dp x pp, with Table 6 as presets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.finetune.finetuning import Settings as Settings
    from labkit.finetune.repeated_runs import finetune as finetune
    from labkit.finetune.task_files import read_task as read_task

__all__, __getattr__, __dir__ = public_names(__name__)
