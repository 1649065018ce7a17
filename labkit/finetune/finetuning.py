"""One fine-tuning: train the pre-trained model on a task with one row of numbers and one seed, and predict.

The loop is `pretrain`'s, with the task's model, samples and loss. So every step has the optimizer, the linear warm-up
and decay, the clipping and the layouts of a training run. A prediction runs the pipeline forward over whole global
batches, and the ranks exchange the scores.

Shapes: N samples, L labels of a sample, n scores of one label.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.comm.collectives import gather_objects
from labkit.comm.groups import ParallelGroups
from labkit.config import ConfigError, RunConfig
from labkit.config.errors import counted
from labkit.data.batches import data_iterator
from labkit.finetune.scores import scores_of
from labkit.finetune.starting_weights import Weights, load_weights, weights_at
from labkit.finetune.table6 import DROPOUT, LENGTH, TABLE_6, WARMUP, WEIGHT_DECAY, Row, size_of
from labkit.finetune.task_files import TaskFiles, read_task
from labkit.finetune.task_model import task_forward_step, task_provider
from labkit.finetune.task_samples import Packer, TaskSamples, Windows, samples_of, windows_of
from labkit.launch import info
from labkit.train.evaluation import collect_non_loss_data
from labkit.train.interruption import RunInterrupted, listening
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import Data, Run, initialize, setup_model_and_optimizer, train

MOST_OF_MICROBATCH = 8
"""Most samples of a microbatch if the user gives no number."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything about a fine-tuning but its row and seed; picklable, so that a launcher can send it to ranks."""

    task: str
    """`mnli`, `qqp`, `race` or `squad`."""
    path: str
    """Folder with the task's files."""
    checkpoint: str
    """Folder of checkpoints, one of its steps, or a model in Hugging Face's safetensors."""
    step: int | None = None
    """Step of the checkpoint; None is the latest."""
    version: str | None = None
    """Version of SQuAD; None is the one whose files are in the folder."""
    tokenizer: str | None = None
    """File of the model's tokenizer; None is the bundled one."""
    size: str | None = None
    """Model size whose row of Table 6 is used; None is the size of the model."""
    batch: int | None = None
    """Samples of a step; None is the row's number."""
    lr: float | None = None
    """Peak learning rate; None is the row's."""
    epochs: float | None = None
    """Passes over the training samples; None is the row's number."""
    warmup: float = WARMUP
    """Share of the steps over which the learning rate rises."""
    seq_length: int = LENGTH
    """Tokens of a sample, at most the model's."""
    dropout: float = DROPOUT
    """Probability of dropout in the three places of `table6.DROPOUT`, and before the pair head's dense layer."""
    precision: str = "fp32"
    """Type of the computation."""
    micro_batch_size: int | None = None
    """Samples of one forward pass on one rank; None is the largest number up to 8 that divides the rank's share."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline ranks."""
    sequence_parallel: bool = False
    """Whether activations are sharded along the sequence between tensor-parallel regions."""
    distributed_optimizer: bool = False
    """Whether the optimizer's state is sharded over the data-parallel ranks."""
    save: str | None = None
    """Folder for the weights of each run, in a folder of its own (`saved_at`); None saves nothing."""

    def own(self, row: Row) -> Row:
        """Return a row of Table 6, with the numbers that these settings give in place of its own."""
        given = {"batch": self.batch, "lr": self.lr, "epochs": self.epochs}
        return row._replace(**{name: value for name, value in given.items() if value is not None})

    def saved_at(self, row: Row, seed: int) -> str | None:
        """Return the folder of a run's checkpoint; None if nothing is saved."""
        words = f"seed_{seed}-batch_{row.batch}-lr_{row.lr:g}-epochs_{row.epochs:g}"
        return None if self.save is None else str(Path(self.save) / words)


@dataclass(frozen=True)
class Prepared:
    """What several runs have in common: weights, examples and samples."""

    settings: Settings
    weights: Weights
    files: TaskFiles
    packer: Packer
    windows: dict[str, Windows | None]
    """SQuAD's windows by split; None for other tasks. The training split is `train`."""

    @property
    def row(self) -> Row:
        """The row of Table 6 for this task and model, with the numbers that the settings give."""
        size = self.settings.size or size_of(self.weights.model)
        return self.settings.own(TABLE_6[self.files.row][size])

    def samples(self, split: str, seed: int | None = None) -> TaskSamples:
        """Return the samples of a split, in the order of its file or in the one that a seed gives."""
        return samples_of(self.files, self.packer, split, self.windows[split], seed)

    def scores(self, logits: dict[str, np.ndarray]) -> dict[str, float]:
        """Return all scores of predictions, by `split_name`, such as `dev_accuracy`."""
        found: dict[str, float] = {}
        for split, logits_NLn in logits.items():
            found |= scores_of(self.files, split, logits_NLn, self.windows[split])
        return found


@dataclass(frozen=True)
class Trained:
    """The result of one run, the same on all ranks."""

    losses: list[float]
    """Mean loss of each step."""
    grad_norms: list[float]
    """Global norm of each step's gradient, before clipping."""
    logits: dict[str, np.ndarray]
    """Split -> scores [N, L, n] of its samples, in the order of the file."""


def prepare(settings: Settings) -> Prepared:
    """Read the headers of the weights, and the task's files.

    Raises:
        CheckpointError, ConfigError: there are no weights, or they are not those of a BERT.
        FileNotFoundError, ValueError: a file is missing or of another form, or the tokenizer does not fit the model.
    """
    weights = weights_at(Path(settings.checkpoint), settings.step)
    files = read_task(settings.task, settings.path, settings.version)
    length = min(settings.seq_length, weights.model.seq_length)
    packer = Packer(settings.tokenizer, length, weights.model.vocab_size)
    splits = {"train": files.train, **files.splits}
    windows = {split: windows_of(files, packer, examples) for split, examples in splits.items()}
    return Prepared(settings, weights, files, packer, windows)


def configuration(prepared: Prepared, row: Row, seed: int, world_size: int) -> RunConfig:
    """Return the configuration of a run. Raises ConfigError for numbers that do not fit each other or the ranks.

    The model is marked as untied, because it has no output layer.
    """
    given, samples = prepared.settings, len(prepared.samples("train"))
    steps = math.ceil(row.epochs * samples / row.batch)
    dp = world_size // (given.tp * given.pp)
    problems = []
    if dp * given.tp * given.pp != world_size:
        problems.append(f"{counted(world_size, 'rank')}: must be a multiple of tp {given.tp} x pp {given.pp}")
    elif row.batch % dp:
        problems.append(f"a batch of {row.batch} cannot be divided over dp = {dp}; give a multiple of it in --batch")
    if given.sequence_parallel and prepared.packer.length % given.tp:
        problems.append(
            f"samples of {prepared.packer.length} tokens cannot be split over tp = {given.tp}; change --seq-length"
        )
    if problems:
        raise ConfigError(problems, source="the fine-tuning")
    part = row.batch // dp
    micro = given.micro_batch_size or max(n for n in range(1, MOST_OF_MICROBATCH + 1) if part % n == 0)
    dropout = dict.fromkeys(("embedding_dropout", "attention_dropout", "hidden_dropout"), given.dropout)
    model = replace(
        prepared.weights.model, untie_embeddings_and_output_weights=True, attention_backend="fused", **dropout
    )
    folder = given.saved_at(row, seed)
    saving = {} if folder is None else {"dir": folder, "interval": steps, "load": "none"}  # nothing but the last step
    return (
        RunConfig(model=model)
        .override(
            {
                "parallel": {"tp": given.tp, "pp": given.pp, "sequence_parallel": given.sequence_parallel},
                "schedule.variable_seq_lengths": given.pp > 1,  # a microbatch of RACE has four pairs for each sample
                "optim": {
                    "lr": row.lr,
                    "lr_schedule": "linear",
                    "warmup_steps": min(round(given.warmup * steps), steps - 1),
                    "weight_decay": WEIGHT_DECAY[prepared.files.row],
                    "beta2": 0.999,
                    "precision": given.precision,
                    "distributed_optimizer": given.distributed_optimizer,
                },
                "data": {"tokenizer": given.tokenizer},  # for readers of the saved weights
                "checkpoint": saving,
                "train": {
                    "steps": steps,
                    "micro_batch_size": micro,
                    "global_batch_size": row.batch,
                    "seed": seed,
                    "record_events": False,
                },
            }
        )
        .validate(world_size)
    )


def train_and_predict(prepared: Prepared, row: Row, seed: int) -> Trained:
    """Fine-tune with one row and one seed, and predict every split. All ranks call this together.

    With `Settings.save` the last step has a checkpoint, head and optimizer included. A run that SIGTERM ends leaves
    none.

    Raises ConfigError and CheckpointError on all ranks, also for a run that is saved already, and whatever `pretrain`
    raises.
    """
    config = configuration(prepared, row, seed, info.rank_info().world_size)
    info.report_progress({"run": f"seed {seed}, {row.words}", "steps": config.train.steps})
    run = initialize(config, own_model=True)  # RACE has four pairs for a sample, which no prediction of memory counts
    fresh = task_provider(prepared.files.outputs)

    def provider(config: RunConfig, groups: ParallelGroups, **stage: Any) -> torch.nn.Module:
        made = fresh(config, groups, **stage)
        load_weights([made], groups, prepared.weights)
        return made

    with run.groups, listening():
        wrapped, optimizer, learning_rate = setup_model_and_optimizer(run, provider)
        samples = prepared.samples("train", seed)
        batches = partial(data_iterator, samples, config, run.groups)
        data = Data(lambda consumed: batches(consumed_samples=consumed), batches, None)
        try:
            result = train(run, wrapped, optimizer, learning_rate, data, task_forward_step)
        except RunInterrupted as ended:  # half a fine-tuning is no result, and would block the same command
            if config.checkpoint.dir is not None and info.rank_info().rank == 0:
                shutil.rmtree(config.checkpoint.dir)
            raise RunInterrupted(ended.step, ended.steps) from None
        pipeline = Pipeline(config, run.groups, wrapped, task_forward_step, run.schedule)
        logits = {split: predict(run, pipeline, prepared.samples(split)) for split in prepared.files.splits}
    return Trained(result.losses, [norm for _, norm in result.series("grad_norm")], logits)


def predict(run: Run, pipeline: Pipeline, samples: TaskSamples) -> np.ndarray:
    """Return the scores [N, L, n] of all samples, in order; the same on all ranks, which call this together."""
    batches: Iterator[dict[str, torch.Tensor]] = data_iterator(samples, run.config, run.groups)
    own: list[dict[str, Any]] = []
    rounds = math.ceil(len(samples) / run.config.train.global_batch_size)
    info.report_progress({"run": f"predicting {samples.name}", "steps": rounds})
    for done in range(1, rounds + 1):
        own += collect_non_loss_data(pipeline, batches)
        info.report_progress({"step": done})
    speaks = run.groups.tp.rank == 0  # the others of the group have the same scores
    found = [(each["index_B"].cpu().numpy(), each["logits_BLn"].cpu().numpy()) for each in own if speaks]
    parts = [part for of_rank in gather_objects(found, run.groups.world) for part in of_rank]
    logits_NLn = np.empty((len(samples), *parts[0][1].shape[1:]), dtype=parts[0][1].dtype)
    for index_B, logits_BLn in parts:
        logits_NLn[index_B] = logits_BLn
    return logits_NLn
