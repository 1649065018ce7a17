"""Training: the loop in four steps, the optimizer and its schedule, metrics, and the parity microscope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.parallel.data_parallel.optimizer import MegatronOptimizer as MegatronOptimizer
    from labkit.parallel.data_parallel.optimizer import Optimizer as Optimizer
    from labkit.parallel.data_parallel.optimizer import parameter_groups as parameter_groups
    from labkit.train.interruption import RunInterrupted as RunInterrupted
    from labkit.train.lr_schedule import LearningRate as LearningRate
    from labkit.train.lr_schedule import build_lr_schedule as build_lr_schedule
    from labkit.train.parity.comparison import ParityReport as ParityReport
    from labkit.train.parity.comparison import ParityRow as ParityRow
    from labkit.train.parity.comparison import compare as compare
    from labkit.train.parity.layer_runs import all_tensor_parallel as all_tensor_parallel
    from labkit.train.parity.layer_runs import earliest_events as earliest_events
    from labkit.train.parity.layer_runs import errors_by_name as errors_by_name
    from labkit.train.parity.layer_runs import float64_layer as float64_layer
    from labkit.train.parity.layer_runs import run_cut_mlp as run_cut_mlp
    from labkit.train.parity.layer_runs import run_sublayer as run_sublayer
    from labkit.train.pretraining import TrainResult as TrainResult
    from labkit.train.pretraining import build_optimizer as build_optimizer
    from labkit.train.pretraining import layer_spec as layer_spec
    from labkit.train.pretraining import pretrain as pretrain
    from labkit.train.reporting.measured import follows as follows
    from labkit.train.reporting.measured import judge_prediction as judge_prediction
    from labkit.train.reporting.measured import pipeline_events as pipeline_events
    from labkit.train.reporting.measured import stage_costs as stage_costs
    from labkit.train.reporting.metrics import JsonLines as JsonLines
    from labkit.train.reporting.metrics import Timers as Timers
    from labkit.train.reporting.metrics import min_max_over_ranks as min_max_over_ranks

__all__, __getattr__, __dir__ = public_names(__name__)
