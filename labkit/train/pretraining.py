"""`pretrain`: a training run on one rank, from its configuration to its last step, in the order in which it happens.

`pretrain` has the four steps of Megatron's `megatron/training/training.py`. Each is a function below, in this order:

1. `initialize` joins the other ranks, checks the configuration, and makes the schedule and the process groups. The
   ranks then compare what the run needs with what their machines have, because afterwards they allocate.
2. `setup_model_and_optimizer` makes the model chunks of this rank, wraps them for data parallelism, and makes AdamW
   over their gradient buffers. The learning rate is a function of the step.
3. `build_data_iterators` opens the samples. Every data-parallel rank reads its own microbatches of one global batch.
4. `train` restores a checkpoint if there is one, and runs the steps, validations and saves.

`pretrain` runs inside a rank: by `labkit.launch.run(pretrain, 4, config)`, or by a plain call in a script of torchrun.
A plain call elsewhere trains on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from labkit.comm.groups import ParallelGroups, initialize_model_parallel, single_process_groups
from labkit.config import ModelConfig, OptimConfig, RunConfig
from labkit.data.batches import data_iterator
from labkit.data.datasets import build_datasets
from labkit.events import Event, recording
from labkit.fp8.recipe import Float8Recipe, float8_recipe
from labkit.fp8.scaling import Float8Spec
from labkit.launch import before_launch, info, torchrun
from labkit.models.build import LOCAL, LayerSpec
from labkit.models.chunks import (
    ModelProvider,
    build_model_chunk,
    build_model_chunks,
    check_provider,
    embedding_ends,
)
from labkit.parallel.data_parallel.distributed_data_parallel import DataParallel, wrap_model_chunks
from labkit.parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from labkit.parallel.data_parallel.optimizer import (
    Condition,
    MegatronOptimizer,
    Optimizer,
    named_parameters,
    parameter_groups,
)
from labkit.parallel.data_parallel.param_gather import finish_param_sync
from labkit.parallel.random import seed_default_generators
from labkit.plan.stages import configured_schedule
from labkit.schedules.ir import Schedule
from labkit.te.spec import EngineSpec
from labkit.train.checkpoint.resume import Progress
from labkit.train.evaluation import Evaluations, ProcessNonLossData
from labkit.train.forward_step import Batch, ForwardStep, forward_step_of, gpt_forward_step
from labkit.train.interruption import RunInterrupted, listening
from labkit.train.lr_schedule import LearningRate, build_lr_schedule
from labkit.train.pipeline import Pipeline
from labkit.train.preflight import check_machines, problems, refuse
from labkit.train.reporting.metrics import Timers
from labkit.train.reporting.report import Report
from labkit.train.run_folder.claim import run_folder
from labkit.train.run_folder.contents import saves_into
from labkit.train.run_schedule import check_schedule
from labkit.train.stepping import Observer, train_step

if TYPE_CHECKING:
    from labkit.train.checkpoint.checkpoints import Checkpoints

DatasetsProvider = Callable[[RunConfig], tuple[Any, Any, Any]]


@dataclass
class TrainResult:
    """Result of `pretrain` on one rank."""

    losses: list[float]
    """Training loss of each step of this call; the same on every rank."""
    events: list[Event]
    """Events of this rank in the last `train.keep_event_steps` steps; empty without `train.record_events`."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl; the same on every rank."""
    skipped_steps: int = 0
    """Steps that changed no weight because a number was not finite."""
    resumed_after: int = 0
    """Steps that the checkpoint had finished from which this call went on."""

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of every metrics line with `name`, such as `validation_loss`; steps count from 1."""
        return [(line["step"], line[name]) for line in self.metrics if name in line]


@dataclass
class Run:
    """The checked configuration, groups and schedule of a rank, made by `initialize`. Inner code only asserts."""

    config: RunConfig
    """The whole configuration."""
    groups: ParallelGroups
    """The process groups of this rank."""
    schedule: Schedule
    """The schedule of each training step."""
    timers: Timers
    """Named timers of this rank."""


def _check_before_launch(
    world_size: int, device: str, config: RunConfig, *, schedule: Schedule | None = None,
    model_provider: ModelProvider | None = None, model_type: str | None = None,
    extra_args_provider: type | None = None, **_: Any,
) -> None:  # fmt: skip
    """Raise ConfigError in the launching process for problems at which every rank would fail."""
    config = declared(config, model_provider, model_type, extra_args_provider)
    refuse(problems(config, world_size, device, schedule=schedule, own_model=model_provider is not None))


def declared(
    config: RunConfig, model_provider: ModelProvider | None, model_type: str | None, extra_args_provider: type | None
) -> RunConfig:
    """Return the configuration with what a script says of its model and adds to the fields.

    Raises ValueError for a `model_provider` that cannot be called for a stage, or fields that cannot be added.
    """
    if model_provider is not None:
        check_provider(model_provider)
    if model_type is not None:
        config = config.override({"model.model_type": model_type})
    return config.with_extra(extra_args_provider)


@before_launch(_check_before_launch)
def pretrain(
    config: RunConfig,
    *,
    datasets_provider: DatasetsProvider | None = None,
    model_provider: ModelProvider | None = None,
    model_type: str | None = None,
    forward_step: ForwardStep | None = None,
    extra_args_provider: type | None = None,
    process_non_loss_data: ProcessNonLossData | None = None,
    process_non_loss_data_func: ProcessNonLossData | None = None,
    schedule: Schedule | None = None,
    no_wd_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    observer: Observer | None = None,
) -> TrainResult:
    """Train `config` on the ranks of this world, or on this process alone.

    datasets_provider: config -> (train, validation, test); default: datasets of the configured text.
    model_provider: (config, groups, *, pre_process, post_process, chunk) -> the module of one stage; called once for
        each stage that the schedule runs on this rank. Default: `labkit.models.build_model_chunk`, which has the
        arguments. A module of your own has `set_input_tensor`, which gets what the stage before it has sent.
    model_type: what the provider's model is, as `model.model_type`.
    forward_step: (data iterator, chunk) -> (output, loss function); default: that of `model.family`. The loss function
        takes the output of the last stage and returns `(sum of losses, number of tokens, metrics)`, or `(mean loss,
        metrics)`. Two items are rejected for cp > 1: a rank then holds a part of each sample and cannot compute the
        mean. The dict `metrics` has `loss_sum`, the sum of the losses of this rank's tokens, and `tokens`, the number
        of these tokens. The reported loss is the quotient of both over the global batch.
    extra_args_provider: a dataclass whose fields, made by `labkit.config.field`, join the configuration as
        `config.extra`. They are checked, saved and resumed as all others; `labkit.cli.train_script` reads them from a
        command line.
    process_non_loss_data: called after each validation with a list and the number of finished steps (Megatron's
        iteration), on the last of the ranks that compute the loss. The validation runs one more global batch, and calls
        the loss function of `forward_step` with `non_loss_data=True`. The list has the results by microbatch; the
        default loss function returns `loss_BS` and `loss_mask_BS`. Megatron's name `process_non_loss_data_func` is the
        same argument.
    schedule: your own pipeline schedule. You can also name a CSV file in the config: `schedule.path`.
    no_wd_decay_cond, scale_lr_cond, lr_mult: see `labkit.parallel.data_parallel.optimizer.parameter_groups`.
    observer: its methods get model, gradients and parameters; the parity microscope is an observer.

    If `train.output_dir` is given, the run writes metrics.jsonl, scalars.jsonl and, with `train.write_events`,
    events.jsonl there during the run (`labkit.train.reporting.report`). The configuration, the state of the run and its
    checkpoints are in the same folder (`labkit.train.run_folder.contents`).

    `pretrain` closes the process groups at the end, also after an error. A model that you keep can then compute only if
    it needs no other rank.

    SIGTERM to any rank ends the run after the current step (`labkit.train.interruption`).

    Raises ValueError for a configuration that cannot be trained, and for functions whose result the loop cannot use.
    `run(pretrain, ...)` raises a ConfigError with all problems of the configuration before any process starts. Raises
    FloatingPointError for a number that is not finite, by `train.on_not_finite`, and RunInterrupted after SIGTERM.
    """
    if process_non_loss_data is not None and process_non_loss_data_func is not None:
        raise ValueError("process_non_loss_data is another name of process_non_loss_data_func; give only one")
    config = declared(config, model_provider, model_type, extra_args_provider)
    run = initialize(config, schedule=schedule, own_model=model_provider is not None)
    with run.groups, listening():
        chunks, optimizer, lr_schedule = setup_model_and_optimizer(
            run, model_provider, no_wd_decay_cond=no_wd_decay_cond, scale_lr_cond=scale_lr_cond, lr_mult=lr_mult
        )
        data = build_data_iterators(run, datasets_provider)
        return train(
            run, chunks, optimizer, lr_schedule, data, forward_step or forward_step_of(config.model.family),
            process_non_loss_data or process_non_loss_data_func, observer,
        )  # fmt: skip


def initialize(config: RunConfig, *, schedule: Schedule | None = None, own_model: bool = False) -> Run:
    """Step 1: check configuration and schedule against the world, create the groups, and check the machine.

    own_model: true for a model that labkit did not build, whose memory it cannot predict.
    """
    world_size = _world_size(config)
    config.validate(world_size)
    info.announce_connections(config.parallel)
    if schedule is None:
        schedule = configured_schedule(config, world_size)
    check_schedule(schedule, config, world_size)
    groups = _process_groups(config, schedule, world_size)
    try:
        check_machines(config, groups, schedule, own_model=own_model)
    except BaseException:
        groups.close()
        raise
    seed_default_generators(config.train.seed, groups)  # for code of the user that draws
    timers = Timers(config.train.timing_log_level, profiled=config.train.profile != "none")
    return Run(config, groups, schedule, timers)


def _process_groups(config: RunConfig, schedule: Schedule, world_size: int) -> ParallelGroups:
    """Return the groups of the layout; the schedule says which pipeline ranks share a word embedding."""
    ends = embedding_ends(config, schedule)
    device = info.rank_info().device  # of a process on its own: a GPU if there is one
    if world_size == 1 and not torch.distributed.is_initialized():
        return single_process_groups(config.parallel, device=device)
    return initialize_model_parallel(config.parallel, device=device, ends=ends)


def _world_size(config: RunConfig) -> int:
    """Return the number of ranks of this world. A rank of torchrun joins the others first."""
    if info.under_torchrun():
        backend, minutes = config.parallel.distributed_backend, config.parallel.distributed_timeout_minutes
        info.take_variables(info.variables_of([config]))
        return torchrun.join(backend=backend, distributed_timeout_minutes=minutes).world_size
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def setup_model_and_optimizer(
    run: Run,
    model_provider: ModelProvider | None = None,
    *,
    no_wd_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> tuple[Sequence[DataParallel], MegatronOptimizer, LearningRate]:
    """Step 2: make this rank's model chunks with gradient buffers, the optimizer and the learning rate."""
    config, optim, provider = run.config, run.config.optim, model_provider or build_model_chunk
    spec = layer_spec(config.model, optim)
    built = build_model_chunks(config, run.groups, run.schedule, spec=spec, model_provider=provider)
    if config.model.compile == "layers":
        from labkit.models.compilation import compile_layers

        compile_layers(built)
    chunks = wrap_model_chunks(built, run.groups, optim)
    optimizer = build_optimizer(
        chunks,
        optim,
        layout=run.groups,
        no_wd_decay_cond=no_wd_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
    )
    return chunks, optimizer, build_lr_schedule(optim, run.config.train.steps)


def layer_spec(model: ModelConfig, optim: OptimConfig) -> LayerSpec:
    """Return the parts and the precision of a model's layers, by `model.transformer_impl` and `optim.fp8`."""
    return layer_spec_with(model, float8_recipe(optim) if optim.fp8 != "none" else None)


def layer_spec_with(model: ModelConfig, recipe: Float8Recipe | None) -> LayerSpec:
    """Return the same as `layer_spec` for an fp8 recipe; None computes without fp8."""
    if model.transformer_impl == "transformer_engine":
        return EngineSpec(recipe)
    return LOCAL if recipe is None else Float8Spec(recipe)


def build_optimizer(
    chunks: Sequence[nn.Module],
    optim: OptimConfig,
    *,
    layout: ParallelGroups | None = None,
    no_wd_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> MegatronOptimizer:
    """Return AdamW for all model chunks of this rank, sharded with `optim.distributed_optimizer`.

    `layout` is as for `Optimizer`, the other arguments as for `parameter_groups`. Raises ValueError if no parameter
    needs a gradient. A rank of a pipeline may have no parameter at all: its stages are empty.
    """
    groups = parameter_groups(chunks, no_wd_decay_cond=no_wd_decay_cond, scale_lr_cond=scale_lr_cond, lr_mult=lr_mult)
    if not groups and (layout is None or layout.pp.size == 1 or named_parameters(chunks)):
        raise ValueError("the optimizer has no parameters: no parameter of this rank's model chunks needs a gradient")
    if not optim.distributed_optimizer:
        return Optimizer(groups, optim, layout=layout)
    return DistributedOptimizer(groups, chunks, layout or single_process_groups(), optim)


@dataclass(frozen=True)
class Data:
    """The sources of a rank's batches."""

    train: Callable[[int], Iterator[Batch]]
    """Makes the endless microbatches of this rank that follow so many consumed samples."""
    validation: Callable[[], Iterator[Batch]]
    """Makes a new iterator, so that every validation sees the same batches."""
    test: Callable[[], Iterator[Batch]] | None
    """The same for the test split; None without a test split (a share of 0 in `data.split`)."""


def build_data_iterators(run: Run, datasets_provider: DatasetsProvider | None = None) -> Data:
    """Step 3: make the training iterator, and functions that make validation and test iterators.

    Raises ValueError for a needed split without samples now, not after the last training step.
    """
    config, groups = run.config, run.groups
    train, validation, test = (datasets_provider or build_datasets)(config)
    tested = config.data.shares[2] > 0
    if config.train.eval_steps > 0:
        for needed in (validation, test) if tested else (validation,):
            data_iterator(needed, config, groups)
    data_iterator(train, config, groups)
    return Data(
        lambda consumed: data_iterator(train, config, groups, consumed_samples=consumed),
        partial(data_iterator, validation, config, groups),
        partial(data_iterator, test, config, groups) if tested else None,
    )


def train(
    run: Run,
    chunks: Sequence[DataParallel],
    optimizer: MegatronOptimizer,
    lr_schedule: LearningRate,
    data: Data,
    forward_step: ForwardStep = gpt_forward_step,
    process_non_loss_data: ProcessNonLossData | None = None,
    observer: Observer | None = None,
) -> TrainResult:
    """Step 4: run `train.steps` optimizer steps, a validation every `eval_interval`, validation and test at the end.

    The steps begin after the checkpoint that `checkpoint.load` names, if there is one.
    """
    config, timers, steps = run.config, run.timers, run.config.train.steps
    pipeline = Pipeline(config, run.groups, chunks, forward_step, run.schedule)
    if observer is not None:
        observer.on_model(run.groups, chunks, run.schedule)

    with run_folder(config, run.groups) as begin, checkpoints_of(run, chunks, optimizer) as checkpoints:
        resumed = Progress() if checkpoints is None else checkpoints.load(pipeline.loss_scaler)
        continues = checkpoints is not None and checkpoints.continues
        begin(resumed.step if continues else None)
        batches = data.train(resumed.consumed_samples)
        with watched(run, pipeline, resumed, continues=continues) as (report, profiled):
            evaluations = Evaluations(pipeline, data.validation, data.test, report, process_non_loss_data)
            evaluations.make_up_for_missing(resumed.step)
            for step in range(resumed.step + 1, steps + 1):  # as metrics, messages and the screen count, from 1
                report.begin_step(step)
                lr = lr_schedule(step - 1 - report.skipped_steps)  # a skipped step does not advance the learning rate
                with profiled(step), report.recorded(step), timers("step"):
                    result = train_step(
                        pipeline, optimizer, timers, batches,
                        step=step - 1, lr=lr, clip_grad=config.optim.clip_grad, observer=observer,
                    )  # fmt: skip
                if pipeline.graphs is not None:
                    report.graphs(step, pipeline.graphs)
                report.step(step, result, lr)
                progress = resumed.after(step, config.train.global_batch_size, report.skipped_steps)

                if result.stop and step < steps:  # SIGTERM leaves no time for a validation
                    finish_param_sync(chunks)
                    saved = None if checkpoints is None else checkpoints.save_now(progress, pipeline.loss_scaler)
                    raise RunInterrupted(step, steps, saved)
                evaluations.validate_if_due(step)
                if checkpoints is not None:
                    checkpoints.poll()  # an asynchronous save may have been written
                    if checkpoints.due(step):
                        checkpoints.save(progress, pipeline.loss_scaler)

            evaluations.test()
            if config.optim.distributed_optimizer:
                finish_param_sync(chunks)
    return TrainResult(report.losses, report.events, report.metrics, report.skipped_steps, resumed.step)


def checkpoints_of(
    run: Run, chunks: Sequence[DataParallel], optimizer: MegatronOptimizer
) -> AbstractContextManager[Checkpoints | None]:
    """Return the checkpoints of a run; None for one that neither saves nor loads any."""
    if saves_into(run.config) is None and run.config.checkpoint.load is None:
        return nullcontext()
    from labkit.train.checkpoint.checkpoints import Checkpoints  # needs libraries that other runs do without

    return Checkpoints(run.config, run.groups, chunks, optimizer, say=info.announce)


@contextmanager
def watched(
    run: Run, pipeline: Pipeline, resumed: Progress, *, continues: bool
) -> Iterator[tuple[Report, Callable[[int], AbstractContextManager[None]]]]:
    """Open all that accompanies the steps and changes none of their numbers, and close it after the last one.

    The recorder collects Events if the configuration asks for them, and CUDA graphs are released at the end. Yields the
    report of the run, and a context for each step that profiles the chosen ones.

    continues: the run appends to the files of the run that saved the checkpoint `resumed`.
    """
    config, groups = run.config, run.groups
    with (
        nullcontext() if pipeline.graphs is None else closing(pipeline.graphs),
        recording(groups.rank) if _records(config) else nullcontext() as recorder,
        _profile(run) as profiled,
        Report(
            config, groups, run.timers, recorder, pipeline.router_metrics, run.schedule,
            resumed_after=resumed.step, skipped_steps=resumed.skipped_steps, append=continues,
        ) as report,
    ):  # fmt: skip
        yield report, profiled


@contextmanager
def _profile(run: Run) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
    """Yield the context of a step; it does nothing without `train.profile`."""
    if run.config.train.profile == "none":
        yield lambda step: nullcontext()
        return
    from labkit.train.reporting.profiling import Profile  # imports a part of torch that other runs do without

    with Profile(run.config.train, run.groups.rank, run.groups.device) as profile:
        yield profile.step


def _records(config: RunConfig) -> bool:
    """True if the config asks for Events. On a GPU each Event costs a synchronisation, so others are not made."""
    train = config.train
    return train.record_events or train.write_events or train.timing_log_level == 2
