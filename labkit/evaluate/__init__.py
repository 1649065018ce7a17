"""Evaluation of checkpoints: perplexity, the LAMBADA cloze, and generation, on tp x pp ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.evaluate.generation import generate as generate
    from labkit.evaluate.model import CheckpointModel as CheckpointModel
    from labkit.evaluate.records import Records as Records
    from labkit.evaluate.sampling import Sampling as Sampling
    from labkit.evaluate.tasks import Task as Task
    from labkit.evaluate.tasks import evaluate as evaluate

__all__, __getattr__, __dir__ = public_names(__name__)
