"""`labkit finetune mnli|qqp|race|squad`: fine-tune a BERT on a task's files, with Table 6 of Megatron-LM's paper."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.checkpoints.model_options import (
    MODEL_OPTIONS,
    Bars,
    checkpoint_of,
    launch,
    option_problems,
    refusing,
    task_problems,
    tokenizer_of,
)
from labkit.cli.output import show
from labkit.cli.rank_options import first_rank, started_by_torchrun
from labkit.config.errors import counted, shown
from labkit.finetune.table6 import DROPOUT, LENGTH, SIZES, WARMUP, Row
from labkit.finetune.task_files import TASKS, VERSIONS
from labkit.train.checkpoint.inventory import is_export

SETTINGS = (
    "path", "checkpoint", "step", "size", "batch", "lr", "epochs", "warmup", "seq_length", "dropout", "precision",
    "micro_batch_size", "tp", "pp", "sequence_parallel", "distributed_optimizer", "save",
)  # fmt: skip
"""Options that are fields of `labkit.finetune.Settings` under the same name."""


def execute(arguments: Arguments) -> int:
    """Check words and options, train with every seed, and print a line for each run and one for all."""
    options = arguments.options
    arguments.refuse(problems_of(arguments))
    [task] = arguments.words
    settings = {name: options[name] for name in SETTINGS} | {"task": task}
    settings |= {"version": options["squad_version"], "tokenizer": _tokenizer(arguments)}
    seeds = [options["seed"] + number for number in range(options["seeds"])]
    many = {"seeds": seeds, "sweep": options["sweep"], "ensemble": options["ensemble"]}
    from labkit.train import interruption

    with Bars(shown=first_rank() and not options["json"]) as bar, interruption.passing_on():
        rows = launch(
            finetune_on_rank, arguments, settings, many, options["out"],
            progress=bar.update, world_size=_ranks(options["nproc"]),
        )  # fmt: skip
    if isinstance(rows, str):  # the run was asked to stop
        if first_rank():
            show(rows, stream=sys.stderr)
        return interruption.EXIT_CODE
    for row in rows if first_rank() else []:
        print(json.dumps(row, allow_nan=False), flush=True) if options["json"] else show(line_of(row))
    return 0


def problems_of(arguments: Arguments) -> list[str]:
    """Return a sentence for everything that is wrong with the words and options."""
    options, words = arguments.options, arguments.words
    problems = [*option_problems(arguments), *task_problems(words, TASKS)]
    if options["path"] is None:
        problems.append("--path: give the folder with the task's files")
    elif not Path(options["path"]).is_dir():
        problems.append(f"--path {shown(options['path'], 200)}: no such folder")
    if options["squad_version"] is not None and words != ["squad"]:
        problems.append("--squad-version: only squad reads it; leave it out")
    if options["ensemble"] and options["seeds"] < 2:
        problems.append("--ensemble: needs the runs of several seeds; give --seeds 5")
    if options["nproc"] is not None and options["nproc"] % (options["tp"] * options["pp"]):
        problems.append(f"--nproc {options['nproc']}: must be a multiple of tp {options['tp']} x pp {options['pp']}")
    return problems


def _ranks(asked: int | None) -> int | None:
    """Return the number of ranks: torchrun's, or the requested one; None is tp x pp."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else asked


def _tokenizer(arguments: Arguments) -> str | None:
    """Return the tokenizer's file. A model in Hugging Face's form does not name it here, so --tokenizer must."""
    path, given = Path(arguments.options["checkpoint"]), arguments.options["tokenizer"]
    if not is_export(path):
        return tokenizer_of(arguments, checkpoint_of(arguments))
    if given is None:
        arguments.refuse([f"--tokenizer: {path} names no tokenizer; give the model's vocab.txt"])
    return given


def finetune_on_rank(settings: dict[str, Any], many: dict[str, Any], out: str | None) -> Any:
    """Fine-tune on a rank: return the rows, a `Refused`, or the sentence of a run that was asked to stop."""
    from labkit.evaluate.records import Records
    from labkit.finetune.finetuning import Settings
    from labkit.finetune.repeated_runs import finetune
    from labkit.train import RunInterrupted

    def work() -> list[dict[str, Any]] | str:
        try:
            return finetune(Settings(**settings), **many, records=Records(out) if out is not None else None)
        except RunInterrupted as stop:
            return str(stop)

    return refusing(work)


def line_of(row: dict[str, Any]) -> str:
    """Return a result in words."""
    numbers = Row(row["batch"], row["lr"], row["epochs"]).words
    if "scores" in row:
        left_out = f"; {counted(row['left_out'], 'row')} left out" if row["left_out"] else ""
        return f"{row['task']}, seed {row['seed']}, {numbers}: {_percent(row['scores'])}{left_out}"
    lines = [f"{row['task']}, median of {len(row['seeds'])}, {numbers}: {_percent(row['median'])}"]
    if "ensemble" in row:
        lines.append(f"{row['task']}, ensemble of {len(row['seeds'])}: {_percent(row['ensemble'])}")
    return "\n".join(lines)


def _percent(scores: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {100 * value:.1f}" for name, value in scores.items())


_TABLE_6 = "default: as in Table 6"
COMMAND = Command(
    name="finetune",
    summary="Fine-tune a BERT on the files of a task, as Megatron-LM's paper does (arXiv 1909.08053, section 5.3). "
    "Table 6 gives batch, learning rate and epochs for the size of the model.",
    options=(
        Option(
            "path", "str", "folder with the task's files, as their authors publish them", path="any", unset="required"
        ),
        *MODEL_OPTIONS,
        Option("nproc", "int", "ranks to start, a multiple of tp x pp", ge=1, unset="default: tp x pp"),
        Option("sequence-parallel", "bool", "split activations along the sequence over tp", False),
        Option("distributed-optimizer", "bool", "shard the optimizer's state over data-parallel ranks", False),
        Option("size", "str", "row of Table 6", choices=SIZES, unset="default: that of the model's size"),
        Option("batch", "int", "samples per step", ge=1, unset=_TABLE_6),
        Option("lr", "float", "peak learning rate", gt=0, unset=_TABLE_6),
        Option("epochs", "float", "passes over the training samples", gt=0, unset=_TABLE_6),
        Option("warmup", "float", "share of the steps that warm up the learning rate", WARMUP, ge=0, lt=1),
        Option("dropout", "float", "dropout in the model and before the head", DROPOUT, ge=0, lt=1),
        Option("seq-length", "int", "tokens per sample, at most the model's", LENGTH, ge=8),
        Option(
            "micro-batch-size",
            "int",
            "samples per forward pass",
            ge=1,
            unset="default: as many as divide the batch, up to 8",
        ),
        Option("seed", "int", "seed of the head, dropout and order; with --seeds, the first one", 1234, ge=0),
        Option("seeds", "int", "runs, each with the next seed; the last line has their median", 1, ge=1),
        Option("sweep", "bool", "try each row of the task in Table 6 first, and continue with the best", False),
        Option("ensemble", "bool", "also score an ensemble, which sums the logits of all seeds", False),
        Option("squad-version", "str", "version of SQuAD", choices=VERSIONS, unset="default: that of the folder"),
        Option("save", "str", "folder for the weights of each run, as checkpoints", path="folder"),
        Option(
            "out", "str", "add rows to this file of JSON lines; a run whose row is there is not repeated", path="any"
        ),
    ),
    execute=execute,
    example="labkit finetune mnli --path MNLI --checkpoint runs/bert --tp 2 --nproc 8 --seeds 5 --out mnli.jsonl",
    words="TASK",
)
