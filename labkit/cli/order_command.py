"""`labkit order`: print a pipeline schedule, with the order of each rank, its bubble and memory. It needs no torch.

The numbers come from the simulator. Unless --costs says otherwise, F, I and W take 1, B takes 2, and messages take no
time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import numpy as np

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.command_line import CommandFailedError
from labkit.cli.order_output import ELSEWHERE, legend, listed, report
from labkit.cli.output import folded, room, show
from labkit.cli.written_files import plot_problems
from labkit.config import ConfigError, ScheduleConfig
from labkit.config.choices import NamedSchedule, named_schedule
from labkit.config.errors import counted, nearest, shown
from labkit.config.fields import SPECS
from labkit.output_files import appearing
from labkit.schedules.builders import build_schedule, without_backward
from labkit.schedules.ir import Schedule, ScheduleError, read_schedule
from labkit.schedules.lowering import DEFAULT_TRANSPORT, Transport
from labkit.schedules.simulator import Costs, Timeline, simulate
from labkit.schedules.tables import get_pp_rank_microbatches
from labkit.schedules.verifier import interleaving_rules, verify

MOST_BUILT = 2**24
"""Most actions of a schedule (1.3 GB with its simulation), and most pairs of a rank and a stage."""
SCREEN = 60
"""Most rows of a terminal for a schedule."""
NAMES = SPECS["schedule.name"].choices
TRANSPORTS = get_args(Transport)
MERGES = "overlap_moe_expert_parallel_comm"
_TABLES = ("auto", "1f1b", "interleaved")
"""Schedules whose warm-up follows from the sizes alone."""


def execute(arguments: Arguments) -> int:
    """Print the schedule, or one rank's order, and write the requested files."""
    options = arguments.options
    _check(arguments)
    try:
        schedule = _read(arguments) if options["verify"] else _build(options)
        _check_rank(arguments, schedule)
        lines = _verdicts(schedule, options) if options["verify"] or options["transport"] else []
        timeline = simulate(schedule, Costs(**_costs(options)[0]))
    except ConfigError:
        raise  # it lists every problem
    except ScheduleError as error:
        raise CommandFailedError(str(error)) from error
    except ValueError as error:  # sizes that do not fit each other
        arguments.refuse([str(error)])
        raise
    written = _write(timeline, arguments)  # before any text, so that a failure to write is all that is printed
    if options["rank"] is not None:
        # stdout has the list alone, to paste
        show("\n".join([f"rank {options['rank']}, {legend(schedule)}", *written]), stream=sys.stderr)
        show(listed(schedule.order(options["rank"])))
    else:
        text = _screenful(report(timeline, _warm_ups(options, schedule), options["costs"]))
        show("\n".join([*lines, *text, *(["", *written] if written else [])]))
    return 0


def _check(arguments: Arguments) -> None:
    """Reject options whose problems can be seen without a schedule."""
    options = arguments.options
    problems = [*_missing_or_idle(arguments), *_words(options), *_costs(options)[1], *_files(options)]
    if not arguments.problems and options["verify"] is None:
        problems += _too_large(options)
    arguments.refuse(problems)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _missing_or_idle(arguments: Arguments) -> list[str]:
    """Return the problems of missing options, and of options without effect."""
    options, problems = arguments.options, []
    if options["verify"] is not None:
        return [
            f"--{_dashed(name)}: the schedule comes from the file of --verify; leave it out"
            for name in ("name", "vpp", "group_size", "all_warmup", MERGES)
            if options[name] not in (None, False)
        ]
    written = {re.split("[ :]", problem)[0].lstrip("-").replace("-", "_") for problem in arguments.problems}
    for option in COMMAND.options:
        if option.name in _EXAMPLES and options[option.key] is None and not written & {option.key, *option.aliases}:
            example = f"--{option.name} {_EXAMPLES[option.name]}"
            problems.append(f"--{option.name}: is missing; give it ({example}), or a file (--verify FILE.csv)")
    if not _interleaves(options) and "vpp" not in written:
        rule = "has no effect: only the interleaved schedule, with --vpp above 1,"
        if options["group_size"] is not None:
            given = f"--group-size {shown(options['group_size'])}"
            problems.append(f"{given}: {rule} runs microbatches in groups; leave it out")
        if options["all_warmup"]:
            problems.append(f"--all-warmup: {rule} has this rule; leave it out")
    return problems


def _interleaves(options: dict[str, Any]) -> bool:
    return (options["vpp"] or 1) > 1 and _row(options).chunks is None


def _row(options: dict[str, Any]) -> NamedSchedule:
    """Return what is known of the named schedule; for an unknown name, which `_words` rejects, that of `auto`."""
    return named_schedule(options["name"] if options["name"] in NAMES else "auto", options["vpp"] or 1)


def _words(options: dict[str, Any]) -> list[str]:
    """Return the problems of unknown names."""
    problems = []
    if options["name"] is not None and options["name"] not in NAMES:
        hint = nearest(options["name"], NAMES)
        problems.append(f"--name {shown(options['name'])}: choose one of {', '.join(NAMES)}{hint}")
    for transport in options["transport"] or ():
        if transport not in (*TRANSPORTS, "all"):
            hint = nearest(transport, TRANSPORTS)
            problems.append(f"--transport {shown(transport)}: choose from {', '.join(TRANSPORTS)}, or all{hint}")
    return problems


def _costs(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return --costs as arguments of `Costs`, and its problems; numbers between slashes are those of the stages."""
    costs: dict[str, Any] = {}
    problems = []
    for item in options["costs"] or ():
        name, _, value = item.partition("=")
        try:
            numbers = [float(number) for number in value.split("/")]
        except ValueError:
            numbers = []
        known = name in _COSTS and not (name == "latency" and len(numbers) > 1)
        if not known or name in costs or not all(0 <= number < np.inf for number in numbers or [-1]):
            rule = f"write each of {', '.join(_COSTS)} at most once, with a number that is not negative"
            problems.append(f"--costs {shown(item)}: {rule}, or with one for each stage: forward=1/1/1/1.5")
        costs[name] = numbers[0] if len(numbers) == 1 else numbers
    return costs, problems


def _files(options: dict[str, Any]) -> list[str]:
    """Return the problems of file names."""
    problems = plot_problems(options["plot"])
    for name in (name for name, write in _FILES.items() if write and options[name]):
        path, given = Path(options[name]), f"--{name} {shown(options[name], 200)}"
        if not path.parent.is_dir():
            why = "is not a folder" if path.parent.exists() else "does not exist"
            rule = f"{shown(str(path.parent), 200)} {why}; make the folder, or name another"
            problems.append(f"{given}: {rule}")
        elif path.is_file() and not options["overwrite"]:
            problems.append(f"{given}: exists; --overwrite replaces it")
    return problems


def _too_large(options: dict[str, Any]) -> list[str]:
    """Return the problems of sizes that would take too much memory or time."""
    row, pp = _row(options), options["pp"] or 1
    stages = pp * (row.chunks or options["vpp"] or 1)
    actions = stages * (options["microbatches"] or 1) * (3 if row.splits_backward else 2)
    counts = ((actions, "actions"), (pp * stages, "pairs of a rank and a stage"))
    return [
        f"{count:,} {what}: more than labkit's limit of {MOST_BUILT:,}; take fewer"
        for count, what in counts
        if count > MOST_BUILT
    ]


def _check_rank(arguments: Arguments, schedule: Schedule) -> None:
    rank = arguments.options["rank"]
    if rank is not None and not 0 <= rank < schedule.pp:
        arguments.refuse([f"--rank {rank}: the schedule's ranks are 0 to {schedule.pp - 1}"])


def _build(options: dict[str, Any]) -> Schedule:
    sizes = {"microbatch_group_size": options["group_size"], "all_warmup": options["all_warmup"]}
    sizes[MERGES] = options[MERGES]
    config = ScheduleConfig(name=options["name"] or "auto", **sizes)
    return build_schedule(config, pp=options["pp"], vpp=options["vpp"] or 1, microbatches=options["microbatches"])


def _read(arguments: Arguments) -> Schedule:
    """Read the schedule in the file of --verify."""
    options, path = arguments.options, Path(arguments.options["verify"])
    try:
        schedule = read_schedule(path)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    except ValueError as rule:
        raise ValueError(f"--verify {shown(str(path), 200)}: {rule}") from None
    schedule.name = options["verify"]
    pairs = schedule.pp * schedule.num_stages
    if pairs > MOST_BUILT:
        raise ValueError(f"{path}: {pairs:,} pairs of a rank and a stage: more than labkit's limit of {MOST_BUILT:,}")
    sizes = (("pp", schedule.pp, "rank"), ("microbatches", schedule.num_microbatches, "microbatch"))
    arguments.refuse([
        f"--{name} {options[name]}: {path} is a schedule of {counted(found, what)}; leave it out"
        for name, found, what in sizes
        if options[name] not in (None, found)
    ])  # fmt: skip
    return schedule


def _verdicts(schedule: Schedule, options: dict[str, Any]) -> list[str]:
    """Return one line per transport, and one on which of them training uses.

    Raises CommandFailedError if the schedule does not run over one of them, with every verdict and a picture of each
    failure."""
    asked = options["transport"] or (DEFAULT_TRANSPORT,)
    verify(schedule, DEFAULT_TRANSPORT)  # a schedule that fails over posted transfers runs over none
    verdicts, pictures = [], []
    for transport in TRANSPORTS if "all" in asked else asked:
        try:
            verify(schedule, transport)
            verify(without_backward(schedule), transport)  # this is what validation runs
            verdicts.append(f"{transport}: yes, it runs")
        except ScheduleError as error:
            sentence, _, picture = str(error).partition("\n")
            verdicts.append(f"{transport}: no, {sentence}")
            pictures += ["", f"over {transport} transfers:", picture]
    if pictures:
        raise CommandFailedError("\n".join([*verdicts, _TRANSPORT_OF_A_RUN, *pictures, _MARKS]))
    try:
        interleaving_rules(schedule)
    except ScheduleError as error:
        verdicts.append(f"in Megatron: no, {error}")
    return [*verdicts, _TRANSPORT_OF_A_RUN, ""]


def _warm_ups(options: dict[str, Any], schedule: Schedule) -> list[int] | None:
    """Return Megatron's number of warm-up microbatches of each rank; None for schedules without such a number."""
    if options["verify"] or options[MERGES] or (options["name"] or "auto") not in _TABLES:
        return None
    chunks, pp, group = schedule.num_stages // schedule.pp, schedule.pp, options["group_size"]
    if options["all_warmup"]:
        return [schedule.num_microbatches * chunks] * pp
    sizes = [
        get_pp_rank_microbatches(schedule.num_microbatches, chunks, group, pp_size=pp, pp_rank=rank)
        for rank in range(pp)
    ]
    return [warm_up for _, _, warm_up, _ in sizes]


def _screenful(lines: list[str]) -> list[str]:
    """Return the lines that fit `SCREEN` rows of the terminal, and how to see the others; a file or pipe gets all."""
    width = room()
    rows = accumulate(len(folded(line, "", width)) for line in lines)
    fitting = sum(width is None or row <= SCREEN for row in rows)
    left = len(lines) - fitting
    return lines if not left else [*lines[:fitting], "", f"... {counted(left, 'more row')}: {ELSEWHERE}"]


def _write(timeline: Timeline, arguments: Arguments) -> list[str]:
    """Write the requested files, and return a line for each."""
    written = []
    for name, write in _FILES.items():
        path = arguments.options[name]
        if path is None or write is None:
            continue
        try:
            write(timeline, Path(path))
        except OSError as error:
            rule = f"{error.strerror or error}; give a path that can be written"
            arguments.refuse([f"--{name} {shown(path, 200)}: {rule}"])
        except ValueError as error:  # too large a schedule
            raise CommandFailedError(f"--{name}: {error}") from error
        written.append(f"written: {path}")
    return written


def _write_csv(timeline: Timeline, path: Path) -> None:
    with appearing(path) as draft:
        draft.write_text(timeline.schedule.to_csv(), encoding="utf-8")


def _write_plot(timeline: Timeline, path: Path) -> None:
    from labkit.viz.pipeline.timeline import gantt

    gantt(timeline, memory=True).save(path)


def _write_trace(timeline: Timeline, path: Path) -> None:
    from labkit.viz.pipeline.trace import write_trace

    write_trace(timeline, path)


_FILES: dict[str, Callable[[Timeline, Path], None] | None] = {
    "csv": _write_csv,
    "plot": _write_plot,
    "trace": _write_trace,
    "verify": None,
}
"""Option that names a file -> function that writes it; None for --verify, which is read."""
_TRANSPORT_OF_A_RUN = (
    "training uses posted transfers, and this schedule runs over them; schedule.batch_p2p_comm = true makes them "
    "batched, false even_odd"
)
_MARKS = "[ ] marks where a rank waits; 2F1>3 is the output of 2F1, sent to stage 3; 3B1>2 is its gradient, sent back"
_COSTS = ("forward", "backward", "input_grad", "weight_grad", "latency")
_EXAMPLES = {"pp": 4, "microbatches": 8}
"""Sizes that every schedule needs, with an example."""

COMMAND = Command(
    name="order",
    summary="Print a pipeline schedule, with each rank's order, bubble and memory; or check a schedule in a file.",
    options=(
        Option(
            "pp",
            "int",
            "number of pipeline ranks",
            aliases=("pipeline_model_parallel_size", "parallel.pp"),
            ge=1,
            unset="required, but not with --verify",
        ),
        Option(
            "vpp",
            "int",
            "model chunks per rank",
            aliases=("num_model_chunks", "parallel.vpp"),
            ge=1,
            unset="default: 1",
        ),
        Option(
            "microbatches",
            "int",
            "microbatches of a step",
            aliases=("num_microbatches",),
            ge=1,
            unset="required, but not with --verify",
        ),
        Option(
            "name", "str", f"schedule: one of {', '.join(NAMES)}", aliases=("schedule.name",), unset="default: auto"
        ),
        Option(
            "group-size",
            "int",
            "microbatches that a rank runs on one chunk before the next (interleaved)",
            aliases=("microbatch_group_size_per_vp_stage", "schedule.microbatch_group_size"),
            ge=1,
            unset="default: that of pp",
        ),
        Option(
            "all-warmup",
            "bool",
            "run all forwards first, as Megatron-LM did in 2023 (interleaved, as many microbatches as ranks)",
            False,
            aliases=("schedule.all_warmup",),
        ),
        Option(
            "overlap-moe-expert-parallel-comm",
            "bool",
            "merge forwards with backwards of other microbatches, as in 2F5&2B3 (1f1b, interleaved, dualpipe_v)",
            False,
            aliases=(f"schedule.{MERGES}",),
        ),
        Option(
            "rank",
            "int",
            "print only the order of this rank, as one list; its legend goes to stderr",
            unset="default: all ranks",
        ),
        Option(
            "costs",
            "tuple[str, ...]",
            f"times in any unit, of each stage or of all: {', '.join(_COSTS)}, as in forward=1/1/1/1.5,latency=0.1",
            unset="default: backward 2, latency 0, others 1",
        ),
        Option("plot", "str", "draw the timeline and the memory into this file (png, svg, pdf)", path="any"),
        Option("trace", "str", "write a trace for ui.perfetto.dev into this file (json)", path="any"),
        Option("csv", "str", "write the schedule into this file, one row per rank", path="any"),
        Option("overwrite", "bool", "replace existing files of --plot, --trace and --csv", False),
        Option("verify", "str", "check the schedule in this file (CSV, or as `str(schedule)` prints it)", path="any"),
        Option(
            "transport",
            "tuple[str, ...]",
            f"check the schedule over these transports: {', '.join(TRANSPORTS)}, or all",
            unset=f"default: {DEFAULT_TRANSPORT}, as in training",
        ),
    ),
    execute=execute,
    example="labkit order --pp 4 --vpp 2 --microbatches 8",
)
