"""`labkit eval wikitext|lambada`: perplexity or accuracy of checkpoints, one row each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.checkpoints.model_options import (
    MODEL_OPTIONS,
    Bars,
    checkpoint_of,
    launch,
    layout_of,
    option_problems,
    refusing,
    task_problems,
    tokenizer_of,
)
from labkit.cli.output import show
from labkit.cli.rank_options import first_rank
from labkit.config.errors import counted
from labkit.train.checkpoint.inventory import checkpoints_at
from labkit.train.checkpoint.manifest import CheckpointError

_ONLY = {"stride": "wikitext", "raw": "wikitext", "loose": "lambada"}
"""Options that one task alone reads."""


def execute(arguments: Arguments) -> int:
    """Check words and options, evaluate each checkpoint, and print its row."""
    from labkit.evaluate.tasks import TASKS

    options, words = arguments.options, arguments.words
    problems = [*option_problems(arguments), *task_problems(words, TASKS)]
    if options["path"] is None:
        problems.append("--path: give the file to score")
    for name, task in _ONLY.items():
        if words and words[0] != task and options[name] not in (None, False):
            problems.append(f"--{name}: only {task} reads it; leave it out")
    if options["all"] and options["step"] is not None:
        problems.append("--all and --step: give one of the two")
    arguments.refuse(problems)
    checkpoints = _checkpoints(arguments)
    task = {
        "name": words[0],
        "path": options["path"],
        "tokenizer": tokenizer_of(arguments, Path(checkpoints[-1])),
        "stride": options["stride"] or 32,
        "detokenize": not options["raw"],
        "strict": not options["loose"],
        "micro_batch_size": options["micro_batch_size"],
        "precision": options["precision"],
    }
    with Bars(shown=first_rank() and not options["json"]) as bar:
        rows = launch(
            evaluate_on_rank, arguments, checkpoints, layout_of(arguments), task, options["out"], progress=bar.update
        )
    for row in rows if first_rank() else []:
        print(json.dumps(row, allow_nan=False), flush=True) if options["json"] else show(line_of(row))
    return 0


def _checkpoints(arguments: Arguments) -> list[str]:
    """Return the checkpoints to evaluate, oldest first."""
    if not arguments.options["all"]:
        return [str(checkpoint_of(arguments))]
    try:
        return [str(path) for path in checkpoints_at(Path(arguments.options["checkpoint"]))]
    except CheckpointError as error:
        arguments.refuse([f"--checkpoint: {error}"])
        raise


def evaluate_on_rank(checkpoints: list[str], layout: dict[str, int], task: dict[str, Any], out: str | None) -> Any:
    """Evaluate on a rank: return the row of each checkpoint, or a `Refused`."""
    from labkit.evaluate.model import CheckpointModel
    from labkit.evaluate.records import Records, agreed
    from labkit.evaluate.tasks import Task, evaluate

    def work() -> list[dict[str, Any]]:
        records, settings = Records(out) if out is not None else None, Task(**task)
        rows = []
        for path in checkpoints:
            key = settings.key(Path(path))
            row = None if records is None else agreed(lambda key=key: records.finished(key))
            if row is None:
                row = evaluate(CheckpointModel(path, layout, precision=settings.precision), settings, records)
            rows.append(row)
        return rows

    return refusing(work)


def line_of(row: dict[str, Any]) -> str:
    """Return a result in words."""
    if row["task"] == "lambada":
        share = f"{100 * row['accuracy']:.2f}% right (95%: {100 * row['low']:.2f} to {100 * row['high']:.2f})"
        return f"{row['checkpoint']}: {share}, {row['right']:,} of {counted(row['passages'], 'passage')}"
    names = ("perplexity", "low", "high", "adjusted_perplexity", "token_perplexity")
    by_word, low, high, adjusted, by_token = (
        f"{row[name]:,.0f}" if row[name] >= 999.95 else f"{row[name]:#.4g}" for name in names
    )
    interval = "" if row["low"] == row["high"] else f" (95%: {low} to {high})"  # a text of one window has no interval
    return (
        f"{row['checkpoint']}: perplexity {by_word}{interval} by {counted(row['original_words'], 'word')}; Megatron's "
        f"adjusted perplexity {adjusted}; perplexity per token {by_token}, {counted(row['tokens'], 'token')}"
    )


COMMAND = Command(
    name="eval",
    summary="Score checkpoints: perplexity of WikiText-103's test text, or accuracy on LAMBADA (arXiv 1909.08053, "
    "section 5.2).",
    options=(
        Option(
            "path", "str", "the text (wikitext), or passages as JSON lines (lambada)", path="file", unset="required"
        ),
        *MODEL_OPTIONS,
        Option("all", "bool", "every checkpoint of the folder", False),
        Option(
            "out",
            "str",
            "add rows to this file of JSON lines; an interrupted evaluation continues, a finished one is not repeated",
            path="any",
        ),
        Option("micro-batch-size", "int", "windows or passages per forward pass", 4, ge=1),
        Option(
            "stride", "int", "wikitext: tokens by which the window moves", ge=1, unset="default: 32, as in the paper"
        ),
        Option("raw", "bool", "wikitext: the text as it is, not detokenised", False),
        Option("loose", "bool", "lambada: only the last token of the last word counts", False),
    ),
    execute=execute,
    example="labkit eval wikitext --path wiki.test.tokens --checkpoint runs/a --tp 2 --out results.jsonl",
    words="TASK",
)
