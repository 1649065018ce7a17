"""`labkit train`: train one configuration on N ranks of this machine, or on the ranks that torchrun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.command_line import CommandFailedError, exit_code, run_command
from labkit.cli.output import readers_may_leave, show
from labkit.cli.rank_options import DEVICE, TIMEOUT, first_rank, on_first_rank, refusing_arguments, started_by_torchrun
from labkit.cli.written_files import output_problems
from labkit.config import ConfigError, RunConfig
from labkit.config.errors import counted
from labkit.events import Event

MOST_READ_TWICE = 1_000_000
"""Most bytes of a text that is tokenised here as well as in the ranks, to see whether it is long enough to train on; a
longer one is taken to be."""


class Refusal(NamedTuple):
    """A user's mistakes that only the ranks could see, such as a tokenizer larger than the vocabulary."""

    problems: list[str]


class NoCheckpoint(NamedTuple):
    """A checkpoint could not be saved or loaded; all ranks say the same."""

    error: str


class Stopped(NamedTuple):
    """The run was asked to end before its last step."""

    said: str


class Trained(NamedTuple):
    """The part of a rank's result that the command needs."""

    losses: list[float]
    metrics: list[dict[str, Any]]
    events: Sequence[Event] = ()
    """The recorded events, for --trace."""
    resumed_after: int = 0
    """Steps that were finished in the checkpoint from which the run resumed; 0 without one."""


def train_script(doc: str, *, preset: str | None = None, families: Sequence[str] = (), **providers: Any) -> NoReturn:
    """Run the command line of a script that trains: that of `labkit train`, with the same checks and the same progress.

        if __name__ == "__main__":
            train_script(__doc__, preset="tiny", model_provider=model_provider)

    doc: the docstring of the script; its first line is in `--help`.
    preset: used if the command line has neither `--preset` nor `--config`.
    families: values of `model.family` that the script trains; empty for all.
    providers: arguments of `labkit.train.pretrain`.

    Ends the process with the exit code.
    """
    from labkit.models.chunks import check_provider  # it imports torch, as a script has done already

    check_provider(providers.get("model_provider", lambda *_, **__: None))

    def checked(arguments: Arguments) -> int:
        if families and (family := arguments.config.model.family) not in families:
            arguments.problems.append(f"model.family = {family}: {name} trains {' and '.join(families)}")
        return execute(arguments, **providers)

    name, extra = sys.argv[0], providers.get("extra_args_provider")
    command = replace(
        COMMAND, program="python", name=name, summary=doc.strip().partition("\n")[0], preset=preset,
        execute=checked, example=f"python {name} --nproc 4 --tp 2 --pp 2 --steps 20",
        extra_args_provider=extra,
    )  # fmt: skip
    with readers_may_leave():
        code = exit_code(lambda: run_command(command, sys.argv[1:]), command.called)
    sys.exit(code)


def execute(arguments: Arguments, **providers: Any) -> int:
    """Check everything, launch, show progress, and print the final losses. providers: arguments of `pretrain`."""
    config = arguments.config
    if "model_type" in providers:
        config = config.override({"model.model_type": providers["model_type"]})
    world_size = ranks_to_use(arguments)
    device, timeout = arguments.options["device"], arguments.options["timeout"]
    made = [config.train.output_dir, config.checkpoint.dir]
    arguments.problems += output_problems("--trace", arguments.options["trace"], made)
    arguments.refuse(config.problems(world_size))
    assert world_size is not None, "a sound layout has a smallest world"
    from labkit.launch import info
    from labkit.train import interruption, preflight
    from labkit.train.parity.layout_words import layout_words
    from labkit.train.reporting.progress_bar import ProgressBar

    if started_by_torchrun():
        info.take_variables(info.variables_of([config]))  # the checks ask for GPUs, which may start CUDA
    own_model, own_data = "model_provider" in providers, "datasets_provider" in providers
    found = preflight.problems(config, world_size, device, own_model=own_model)
    arguments.refuse([*found, "" if own_data else data_problem(config)])
    trace = arguments.options["trace"]
    microbatches = config.num_microbatches(world_size)
    if arguments.options["config"] is None and arguments.options["preset"] is None:
        on_first_rank("neither a preset nor a file: other fields have labkit's defaults (--print-config shows them)")
    on_first_rank(
        f"{layout_words(config, world_size)}, {counted(config.train.steps, 'step')} of "
        f"{counted(config.train.global_batch_size, 'sample')}, {counted(microbatches, 'microbatch')} each"
    )
    recorded = config.override({"train.record_events": trace is not None})
    train = partial(train_on_rank, **providers)
    try:
        with ProgressBar(config.train.steps, shown=first_rank()) as bar, interruption.passing_on():
            results = launch(train, world_size, recorded, timeout, device, bar.update)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"{str(stop) or 'interrupted'}{saved_words(config)}") from None
    refuse_if_any(results, arguments.source)
    if failed := [result.error for result in results if isinstance(result, NoCheckpoint)]:
        raise CommandFailedError(failed[0])
    if isinstance(results[0], Stopped):  # and then every rank is
        on_first_rank(results[0].said)
        return interruption.EXIT_CODE
    for line in final_lines(results[0], config):
        on_first_rank(line)
    if trace is not None and results[0].losses and first_rank():
        write_trace_of(results, Path(trace))
    return 0


def saved_words(config: RunConfig) -> str:
    """Return `; the same command continues from ...` for an interrupt's message; empty if the run saves nothing."""
    from labkit.train.checkpoint.manifest import CheckpointError
    from labkit.train.checkpoint.resume import to_try
    from labkit.train.run_folder.contents import saves_into

    if saves_into(config) is None or not first_rank():
        return ""
    try:
        found = to_try(config)
    except CheckpointError:  # the same command would be rejected, for example with checkpoint.load = none
        return f"; checkpoints: {saves_into(config)}"
    return f"; the same command continues from {found[0]}" if found else "; nothing was saved"


def data_problem(config: RunConfig) -> str:
    """Return why the run could not train on its data, or an empty string."""
    from labkit.data.datasets import build_datasets
    from labkit.data.gpt_data import check_vocabulary

    data = config.data
    try:
        if data.path is not None and not data.sources and os.path.getsize(data.path) > MOST_READ_TWICE:
            check_vocabulary(data, config.model.vocab_size)
        else:
            build_datasets(config)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def ranks_to_use(arguments: Arguments) -> int | None:
    """Return --nproc, or torchrun's number of ranks, or the fewest that the layout allows; None if it has problems."""
    asked = arguments.options["nproc"]
    if started_by_torchrun():
        from labkit.launch import info

        started = info.launchers_numbers()[1]
        if asked is not None and asked != started:
            words = counted(started, "rank")
            arguments.problems.append(
                f"--nproc {asked}: torchrun started {words}; leave it out{info.leftover_advice()}"
            )
        return started
    if asked is not None:
        return asked
    return None if arguments.config.problems() else arguments.config.parallel.smallest_world_size


def launch(
    fn: Callable[..., Any],
    world_size: int,
    config: RunConfig,
    timeout: float | None,
    device: str,
    progress: Callable[[dict[str, Any]], None],
) -> list[Any]:
    """Call `labkit.launch.run` with the backend and the time limit of a collective that `config` has.

    timeout: replaces that limit, in seconds. Raises ConfigError for arguments that the launcher rejects.
    """
    from labkit.launch import run

    if timeout is not None:
        config = config.override({"parallel.distributed_timeout_minutes": timeout / 60})
    with refusing_arguments():
        return run(
            fn,
            world_size,
            config,
            device=device,
            backend=config.parallel.distributed_backend,
            distributed_timeout_minutes=config.parallel.distributed_timeout_minutes,
            progress=progress,
        )


def train_on_rank(config: RunConfig, **providers: Any) -> Trained | Refusal | NoCheckpoint | Stopped:
    """Train on a rank. The data come first: what is wrong with them is so on every rank, so all of them return."""
    from labkit.data.datasets import build_datasets
    from labkit.launch import report_progress
    from labkit.train import RunInterrupted, pretrain
    from labkit.train.checkpoint.manifest import CheckpointError

    report_progress({"stage": "reading the data"})
    try:
        datasets = providers.get("datasets_provider", build_datasets)(config)
    except (ValueError, OSError) as error:
        return Refusal([str(error)])

    def provided(_: RunConfig) -> Any:  # called once the model has been built
        report_progress({"stage": "first step"})
        return datasets

    report_progress({"stage": "building the model"})
    try:
        result = pretrain(config, **{**providers, "datasets_provider": provided})
    except ConfigError as error:  # what a machine cannot do is the same on every rank, too
        return Refusal(error.problems)
    except CheckpointError as error:
        return NoCheckpoint(str(error))
    except RunInterrupted as stop:
        return Stopped(str(stop))
    return Trained(result.losses, result.metrics, result.events, result.resumed_after)


def refuse_if_any(results: list[Any], source: str = "labkit train") -> None:
    """Raise ConfigError with the mistakes that the ranks found, if there are any."""
    problems = list(dict.fromkeys(p for r in results if isinstance(r, Refusal) for p in r.problems))
    if problems:
        raise ConfigError(problems, source=source)


def final_lines(result: Trained, config: RunConfig) -> list[str]:
    """Return lines with the final losses, the load of experts, and where the files are."""
    from labkit.train.reporting.progress_line import FIELDS
    from labkit.train.run_folder.contents import saves_into

    done = result.resumed_after + len(result.losses)
    lines = [f"step {done:,} of {config.train.steps:,}: training loss {loss:.4f}" for loss in result.losses[-1:]]
    lines = lines or [f"nothing to do: the checkpoint has all {done:,} steps; to continue, raise train.steps"]
    if not (result.losses or result.metrics):
        return lines
    skipped = [(line["skipped_steps"], line.get("skipped_because")) for line in result.metrics if "loss_scale" in line]
    if skipped and (count := skipped[-1][0]):
        because = [reason for _, reason in skipped if reason][-1]
        lines.append(f"skipped {counted(count, 'step')} without changing a weight, the last because {because}")
    for name in ("validation", "test"):
        last = next((line for line in reversed(result.metrics) if f"{name}_loss" in line), {})
        fields = [field for field in (f"{name}_loss", f"{name}_perplexity") if field in last]
        lines += [", ".join(FIELDS[field](last[field]) for field in fields)] if fields else []
    worst = [line["moe/max_over_mean"] for line in result.metrics if "moe/max_over_mean" in line]
    lines += [f"the fullest expert has {worst[-1]:.2f} times the mean load"] if worst else []
    lines += [graph_words(line["graphs"]) for line in result.metrics if "graphs" in line][-1:]
    lines += never_captured(config)
    if config.train.output_dir is not None:
        files = "metrics and events" if config.train.write_events else "metrics"
        lines.append(f"{files}: {config.train.output_dir}")
    if (saved := saves_into(config)) is not None:
        lines.append(f"checkpoints: {saved}")
    return lines


def write_trace_of(results: Sequence[Trained], path: Path) -> None:
    """Write all ranks' Events into a file for ui.perfetto.dev, and print a line that says which steps it has."""
    from labkit.viz.pipeline.trace import write_trace

    events = [event for result in results for event in result.events]
    steps = sorted({event.step for event in events if event.step is not None})
    write_trace(events, path)
    show(f"trace of steps {steps[0]:,} to {steps[-1]:,} for ui.perfetto.dev: {path}")


def graph_words(held: Mapping[str, tuple[int, int]]) -> str:
    """Return `CUDA graphs per rank: 4 to 8; static inputs 16,384 to 32,768 bytes; pool peak 65,536 bytes`.

    A single number means that it is the same on all ranks."""
    shown = {name: f"{least:,}" if least == most else f"{least:,} to {most:,}" for name, (least, most) in held.items()}
    return (
        f"CUDA graphs per rank: {shown['graphs']}; static inputs {shown['static_input_bytes']} bytes; pool peak "
        f"{shown['pool_peak_bytes']} bytes"
    )


def never_captured(config: RunConfig) -> list[str]:
    """Return a line that says so if CUDA graphs were requested but every training step was a warm-up step."""
    steps, eager = config.train.steps, config.graph.cuda_graph_warmup_steps
    if config.graph.cuda_graph_impl == "none" or eager < steps:
        return []
    said = "the only step was warm-up" if steps == 1 else f"all {steps:,} steps were warm-up"
    return [f"no training step ran in a CUDA graph: {said} (graph.cuda_graph_warmup_steps = {eager})"]


COMMAND = Command(
    name="train",
    summary="Train a model under a parallel layout, on ranks of this machine or on those that torchrun started "
    "(python -m torch.distributed.run --nproc-per-node 4 -m labkit.cli train --config f.yaml).",
    options=(
        Option(
            "nproc",
            "int",
            "ranks to start on this machine",
            aliases=("world_size",),
            unset="default: as few as the layout allows",
        ),
        DEVICE,
        TIMEOUT,
        Option(
            "trace",
            "str",
            "write a timeline of the last steps (train.keep_event_steps) into this JSON file, for ui.perfetto.dev",
            path="any",
        ),
    ),
    execute=execute,
    example="labkit train --preset tiny --nproc 4 --tp 2 --pp 2 --steps 50\n"
    "labkit train --tensor-model-parallel-size 2 --num-layers 12 --hidden-size 256\n"
    "labkit train --config f.yaml --lr 1e-4 --output-dir runs/a",
    configurable=True,
)
