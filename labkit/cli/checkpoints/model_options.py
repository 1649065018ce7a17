"""What the commands on the model of a checkpoint share: options for checkpoint and layout, the launch, progress bars.

None of them takes a configuration, because the checkpoint's manifest describes the model, and the layout is tp x pp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.cli.arguments import Arguments, Option
from labkit.cli.command_line import CommandFailedError
from labkit.cli.output import loading, show
from labkit.cli.rank_options import DEVICE, first_rank, refusing_arguments, started_by_torchrun
from labkit.cli.written_files import output_problems
from labkit.config import ConfigError, ParallelConfig
from labkit.config.errors import nearest, shown
from labkit.train.checkpoint.inventory import chosen
from labkit.train.checkpoint.manifest import CheckpointError, read_manifest

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
MODEL_OPTIONS = (
    Option("checkpoint", "str", "folder of a run or of its checkpoints, or one step", path="any", unset="required"),
    Option("step", "int", "the checkpoint of this step", ge=0, unset="default: the latest"),
    Option("tokenizer", "str", "the tokenizer's file", path="file", unset="default: that of the run"),
    Option("tp", "int", "tensor parallel size", 1, ge=1),
    Option("pp", "int", "pipeline parallel size", 1, ge=1),
    Option("precision", "str", "type of the computation", "fp32", choices=PRECISIONS),
    DEVICE,
    Option("json", "bool", "print results as JSON lines", False),
)
"""Options of `eval`, `finetune` and `generate`."""


class Refused(NamedTuple):
    """The problems that the ranks found, the same on all of them."""

    problems: list[str]
    failed: bool = False
    """True if the request was right but the checkpoint is not."""


def layout_of(arguments: Arguments) -> dict[str, int]:
    """Return the layout, as `CheckpointModel` takes it."""
    return {name: arguments.options[name] for name in ("tp", "pp")}


def option_problems(arguments: Arguments) -> list[str]:
    """Return a sentence if no checkpoint is named, and one if the file of results cannot be written."""
    problems = output_problems("--out", arguments.options.get("out"))
    if arguments.options["checkpoint"] is None:
        problems.append("--checkpoint: give the folder of a run or of its checkpoints, or one step")
    return problems


def task_problems(words: Sequence[str], tasks: Collection[str]) -> list[str]:
    """Return a sentence if the words of the command are not one of the tasks."""
    if len(words) == 1 and words[0] in tasks:
        return []
    given = shown(" ".join(words)) if words else "no task named"
    return [f"{given}: give one of {', '.join(tasks)}{nearest(words[0], tasks) if words else ''}"]


def checkpoint_of(arguments: Arguments) -> Path:
    """Return the checkpoint that the options name. Raises ConfigError if there is none."""
    try:
        return chosen(Path(arguments.options["checkpoint"]), arguments.options["step"])
    except CheckpointError as error:
        arguments.refuse([f"--checkpoint: {error}"])
        raise


def tokenizer_of(arguments: Arguments, checkpoint: Path) -> str | None:
    """Return the tokenizer's file: --tokenizer, or that of the run; None is the bundled one.

    Raises ConfigError for a checkpoint that names none, such as an imported one.
    """
    given = arguments.options["tokenizer"]
    if given is not None:
        return given
    try:
        config = read_manifest(checkpoint).config
    except CheckpointError as error:
        raise CommandFailedError(str(error)) from error
    if "data" not in config:
        arguments.refuse([f"--tokenizer: {checkpoint} names no tokenizer; give the file of the model's"])
    return config["data"].get("tokenizer")


def launch(
    fn: Callable[..., Any],
    arguments: Arguments,
    *args: Any,
    progress: Callable[[dict[str, Any]], None],
    world_size: int | None = None,
) -> Any:
    """Run `fn` on `world_size` ranks (tp x pp), or on torchrun's, and return rank 0's result.

    Raises ConfigError or CommandFailedError with the problems that the ranks found."""
    from labkit.launch import run

    tp, pp, device = (arguments.options[name] for name in ("tp", "pp", "device"))
    layout = ParallelConfig(tp=tp, pp=pp)
    if first_rank():
        loading(arguments.options["checkpoint"])
    with refusing_arguments():
        [result, *_] = run(_call, world_size or tp * pp, layout, fn, *args, device=device, progress=progress)
    if isinstance(result, Refused):
        if result.failed:
            raise CommandFailedError("; ".join(result.problems))
        arguments.refuse(result.problems)
    return result


def _call(_: ParallelConfig, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` on a rank. The layout is an argument only for `labkit.launch.info.variables_of`."""
    return fn(*args)


def refusing(work: Callable[[], Any]) -> Any:
    """On a rank, return the result of `work`, or a `Refused` with the errors that all ranks have in common."""
    try:
        return work()
    except ConfigError as error:
        return Refused(error.problems)
    except CheckpointError as error:
        return Refused([str(error)], failed=True)
    except (ValueError, OSError) as error:
        if started_by_torchrun():
            raise
        return Refused([str(error)])


class Bars:
    """Progress bars on a terminal, one for each run that rank 0 reports: a checkpoint, a training, a prediction."""

    def __init__(self, *, shown: bool) -> None:
        self._shown, self._name = shown, ""
        self._bar: Any = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, values: dict[str, Any]) -> None:
        """Print a `message`; begin a bar of `steps` for a new `run`; show the last finished `step` of the run."""
        if not self._shown:
            return
        if "message" in values:
            show(values["message"], stream=sys.stderr)
        if values.get("run", self._name) != self._name:
            from tqdm.auto import tqdm

            self.__exit__()
            self._name = values["run"]
            self._bar = tqdm(total=values["steps"], desc=self._name, file=sys.stderr, disable=None)
        if "step" in values and self._bar is not None:
            if "loss" in values:
                self._bar.set_postfix(loss=f"{values['loss']:.3f}", refresh=False)
            self._bar.update(values["step"] - self._bar.n)
