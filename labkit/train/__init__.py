"""Training: the loop in four steps, the optimizer and its schedule, metrics, and the parity microscope."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.train.layer_specs import layer_spec
    from labkit.train.lr_schedule import LearningRate, build_lr_schedule
    from labkit.train.optimizer import MegatronOptimizer, Optimizer, build_optimizer, parameter_groups
    from labkit.train.parity.comparison import ParityReport, ParityRow, compare
    from labkit.train.pretraining import TrainResult, pretrain
    from labkit.train.reporting.measured import follows, judge_prediction, pipeline_events, stage_costs
    from labkit.train.reporting.metrics import JsonLines, Timers, min_max_over_ranks

_MODULES = {
    "layer_spec": "layer_specs",
    "LearningRate": "lr_schedule",
    "build_lr_schedule": "lr_schedule",
    "follows": "reporting.measured",
    "judge_prediction": "reporting.measured",
    "pipeline_events": "reporting.measured",
    "stage_costs": "reporting.measured",
    "JsonLines": "reporting.metrics",
    "Timers": "reporting.metrics",
    "min_max_over_ranks": "reporting.metrics",
    "MegatronOptimizer": "optimizer",
    "Optimizer": "optimizer",
    "build_optimizer": "optimizer",
    "parameter_groups": "optimizer",
    "ParityReport": "parity.comparison",
    "ParityRow": "parity.comparison",
    "compare": "parity.comparison",
    "TrainResult": "pretraining",
    "pretrain": "pretraining",
}

__all__ = [
    "JsonLines",
    "LearningRate",
    "MegatronOptimizer",
    "Optimizer",
    "ParityReport",
    "ParityRow",
    "Timers",
    "TrainResult",
    "build_lr_schedule",
    "build_optimizer",
    "compare",
    "follows",
    "judge_prediction",
    "layer_spec",
    "min_max_over_ranks",
    "parameter_groups",
    "pipeline_events",
    "pretrain",
    "stage_costs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
