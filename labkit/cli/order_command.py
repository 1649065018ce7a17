"""`labkit order`: a pipeline schedule as every rank runs it, with its bubble and memory. Needs numpy and no torch.

Numbers are those of the simulator at unit costs: F, I and W take 1, B takes 2, messages nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.command_line import CommandFailedError
from labkit.config import ConfigError, ScheduleConfig
from labkit.config.errors import nearest, shown
from labkit.config.limits import CHOICES
from labkit.schedules.builders import build_schedule
from labkit.schedules.ir import KINDS, RANK_LINE, Schedule, ScheduleError
from labkit.schedules.lowering import Transport
from labkit.schedules.simulator import Timeline, simulate
from labkit.schedules.tables import get_pp_rank_microbatches
from labkit.schedules.verifier import interleaving_rules, verify

MOST_SHOWN = 8192
"""Schedules of more actions are told in numbers; --rank and --csv give their rows."""
MOST_BUILT = 2**24
"""Actions of the largest schedule that is built: 1.5 GB with its simulation."""
SUFFIXES = (".png", ".svg", ".pdf")
NAMES = CHOICES["schedule.name"]
TRANSPORTS = get_args(Transport)
_TABLES = ("auto", "1f1b", "interleaved")
"""Schedules whose warm-up follows from sizes alone."""


def execute(arguments: Arguments) -> int:
    """Print the schedule, or one rank's order, and write what was asked for."""
    options = arguments.options
    _check(arguments)
    try:
        schedule = _read(options) if options["verify"] else _build(options)
        _check_rank(arguments, schedule)
        lines = _verdicts(schedule, options) if options["verify"] else []
        timeline = simulate(schedule)
    except ConfigError:
        raise  # every problem is in it
    except ScheduleError as error:
        raise CommandFailedError(str(error)) from error
    except ValueError as error:  # sizes that do not go together
        arguments.refuse([str(error)])
        raise
    if options["rank"] is not None:
        print(_list(schedule.order(options["rank"])))
    else:
        print("\n".join([*lines, *_text(timeline, _warm_ups(options, schedule))]))
    _write(timeline, options)
    return 0


def _check(arguments: Arguments) -> None:
    """What can be said before there is a schedule."""
    options, problems = arguments.options, []
    written = {problem.partition(":")[0] for problem in arguments.problems}
    if options["verify"]:
        problems += [
            f"--{name}: the schedule comes from the file of --verify; leave it out"
            for name in ("name", "vpp", "group_size")
            if options[name] is not None
        ]
    else:
        for name, example in (("pp", 4), ("microbatches", 8)):
            if options[name] is None and f"--{name}" not in written:
                problems.append(f"--{name}: is missing; give it (--{name} {example}), or a file (--verify FILE.csv)")
    if options["name"] is not None and options["name"] not in NAMES:
        hint = nearest(options["name"], NAMES)
        problems.append(f"--name {shown(options['name'])}: choose one of {', '.join(NAMES)}{hint}")
    for transport in options["transport"] or ():
        if transport not in (*TRANSPORTS, "all"):
            hint = nearest(transport, TRANSPORTS)
            problems.append(f"--transport {shown(transport)}: choose from {', '.join(TRANSPORTS)}, or all{hint}")
    if options["transport"] and not options["verify"]:
        problems.append("--transport: says over which transport --verify FILE checks; there is no file")
    if options["plot"] and Path(options["plot"]).suffix not in SUFFIXES:
        problems.append(f"--plot {shown(options['plot'])}: its name ends with one of {', '.join(SUFFIXES)}")
    sizes = [options[name] or 1 for name in ("pp", "vpp", "microbatches")]
    if min(sizes) > 0 and 2 * math.prod(sizes) > MOST_BUILT:
        problems.append(f"{2 * math.prod(sizes):,} actions: more than the {MOST_BUILT:,} that are built; take fewer")
    arguments.refuse(problems)


def _check_rank(arguments: Arguments, schedule: Schedule) -> None:
    rank = arguments.options["rank"]
    if rank is not None and not 0 <= rank < schedule.pp:
        arguments.refuse([f"--rank {rank}: the schedule's ranks are 0 to {schedule.pp - 1}"])


def _build(options: dict[str, Any]) -> Schedule:
    config = ScheduleConfig(name=options["name"] or "auto", microbatch_group_size=options["group_size"])
    return build_schedule(config, pp=options["pp"], vpp=options["vpp"] or 1, microbatches=options["microbatches"])


def _read(options: dict[str, Any]) -> Schedule:
    """The schedule in a file: rows of a CSV, or the text that a Schedule prints."""
    path = Path(options["verify"])
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise ValueError(f"--verify {shown(str(path))}: {error.strerror}") from None
    is_text = any(RANK_LINE.match(line.strip()) for line in text.splitlines())
    schedule = Schedule.from_text(text) if is_text else Schedule.from_csv(text, name=path.stem)
    sizes = (("pp", schedule.pp, "ranks"), ("microbatches", schedule.num_microbatches, "microbatches"))
    for name, found, what in sizes:
        if options[name] not in (None, found):
            raise ValueError(f"--{name} {options[name]}: {path} is a schedule of {found} {what}")
    return schedule


def _verdicts(schedule: Schedule, options: dict[str, Any]) -> list[str]:
    """One line per transport. Raises CommandFailedError with every verdict where one is no."""
    asked = options["transport"] or ("batched",)
    verify(schedule, "posted")  # what it refuses runs over none
    lines, refused = [], False
    for transport in TRANSPORTS if "all" in asked else asked:
        try:
            verify(schedule, transport)
            lines.append(f"{transport}: yes, it runs")
        except ScheduleError as error:
            refused = True
            lines.append(f"{transport}: no, {error}")
    if refused:
        raise CommandFailedError("\n".join(lines))
    try:
        interleaving_rules(schedule)
    except ScheduleError as error:
        lines.append(f"in Megatron: no, {error}")
    return [*lines, ""]


def _warm_ups(options: dict[str, Any], schedule: Schedule) -> list[int] | None:
    """Megatron's number of warm-up microbatches of each rank; None for schedules that have no such number."""
    if options["verify"] or (options["name"] or "auto") not in _TABLES:
        return None
    chunks, pp, group = schedule.num_stages // schedule.pp, schedule.pp, options["group_size"]
    sizes = [
        get_pp_rank_microbatches(schedule.num_microbatches, chunks, group, pp_size=pp, pp_rank=rank)
        for rank in range(pp)
    ]
    return [warm_up for _, _, warm_up, _ in sizes]


def _text(timeline: Timeline, warm_ups: list[int] | None) -> list[str]:
    schedule = timeline.schedule
    sizes = ((schedule.pp, "rank", "s"), (schedule.num_stages, "stage", "s"))
    sizes += ((schedule.num_microbatches, "microbatch", "es"), (len(schedule), "action", "s"))
    bubble = f"bubble {timeline.bubble_fraction:.1%} of the makespan, {timeline.bubble_ratio:.1%} of the ideal time"
    lines = [
        f"{schedule.name}: {', '.join(_count(*size) for size in sizes)}",
        f"{bubble}; makespan {timeline.makespan:g} where F, I and W take 1 and B takes 2",
        str(timeline.bubble),
        "",
        *_table(timeline, warm_ups),
        "",
    ]
    if len(schedule) > MOST_SHOWN:
        return [
            *lines,
            f"more than {MOST_SHOWN:,} actions: --rank R prints one rank's order, --csv FILE writes all rows",
        ]
    orders = [schedule.order(rank) for rank in range(schedule.pp)]
    halves = "" if (schedule.kinds != KINDS.index("W")).all() else ", -c - 0.5 its weight gradient"
    return [
        *lines,
        f"order: c is a forward of model chunk c (counted from 1), -c its backward{halves}",
        *_rows([_order_words(order, warm_ups[r] if warm_ups else 0) for r, order in enumerate(orders)]),
        "",
        "actions: stage, direction, microbatch, counted from 0",
        *_rows([[str(action) for action in schedule.actions(rank)] for rank in range(schedule.pp)]),
    ]


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def _table(timeline: Timeline, warm_ups: list[int] | None) -> list[str]:
    """Stages, warm-up, peak and idle time of each rank."""
    schedule, peaks, idle = timeline.schedule, timeline.peak_in_flight, timeline.bubble.idle
    by_rank = np.split(schedule.kinds != KINDS.index("F"), schedule.offsets[1:-1])
    before = [int(backward.argmax()) if backward.any() else len(backward) for backward in by_rank]
    rows = [["", "stages", "warm-up", "forwards first", "peak in flight", "idle"]]
    for rank in range(schedule.pp):
        stages = " ".join(map(str, schedule.stages_of(rank)))
        warm_up = "" if warm_ups is None else str(warm_ups[rank])
        numbers = [str(before[rank]), str(peaks[rank]), f"{idle[rank]:g}"]
        rows.append([f"  rank {rank}", stages, warm_up, *numbers])
    if warm_ups is None:
        rows = [row[:2] + row[3:] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["   ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _order_words(order: list[int | float], warm_up: int) -> list[str]:
    """The numbers, with `|` round the steady phase."""
    words = [f"{number:g}" for number in order]
    if warm_up == 0 or warm_up * 2 == len(words):
        return words
    return [*words[:warm_up], "|", *words[warm_up : len(words) - warm_up], "|", *words[len(words) - warm_up :]]


def _rows(rows: list[list[str]]) -> list[str]:
    """One line per rank, cells aligned."""
    width, label = max(len(word) for words in rows for word in words), len(f"rank {len(rows) - 1}")
    return [
        f"  {f'rank {rank}':<{label}} " + "".join(f" {word:>{width}}" for word in words)
        for rank, words in enumerate(rows)
    ]


def _list(order: list[int | float]) -> str:
    """A list that Python and JSON read."""
    return f"[{', '.join(f'{number:g}' for number in order)}]"


def _write(timeline: Timeline, options: dict[str, Any]) -> None:
    """The files that were asked for."""
    written = []
    if options["csv"]:
        Path(options["csv"]).parent.mkdir(parents=True, exist_ok=True)
        Path(options["csv"]).write_text(timeline.schedule.to_csv())
        written.append(options["csv"])
    if options["plot"]:
        from labkit.viz.timeline import gantt

        try:
            written.append(gantt(timeline, memory=True).save(options["plot"]))
        except ValueError as error:  # too large a schedule
            raise CommandFailedError(f"--plot: {error}") from error
    if options["trace"]:
        from labkit.viz.trace import write_trace

        written.append(write_trace(timeline, options["trace"]))
    if written and options["rank"] is None:
        print("\n" + "\n".join(f"written: {path}" for path in written))


COMMAND = Command(
    name="order",
    summary="A pipeline schedule: each rank's order and actions, bubble and memory; or whether a file can run.",
    options=(
        Option("pp", "int", "number of pipeline ranks", aliases=("pipeline_model_parallel_size", "parallel.pp")),
        Option("vpp", "int", "model chunks a rank; 1 where not given", aliases=("num_model_chunks", "parallel.vpp")),
        Option("microbatches", "int", "microbatches of a step", aliases=("num_microbatches",)),
        Option("name", "str", f"one of {', '.join(NAMES)}", aliases=("schedule.name",)),
        Option(
            "group-size",
            "int",
            "microbatches on one chunk before the next (interleaved); pp where not given",
            aliases=("microbatch_group_size_per_vp_stage", "schedule.microbatch_group_size"),
        ),
        Option("rank", "int", "only the order of this rank, as one list"),
        Option("plot", "str", "draw timeline and memory into this file (png, svg, pdf)"),
        Option("trace", "str", "write a trace for ui.perfetto.dev into this file (json)"),
        Option("csv", "str", "write the schedule into this file, one row a rank"),
        Option("verify", "str", "check the schedule in this file (CSV, or as `str(schedule)` prints it)"),
        Option("transport", "tuple[str, ...]", f"check over these: {', '.join(TRANSPORTS)}, or all; batched if none"),
    ),
    execute=execute,
    example="labkit order --pp 4 --vpp 2 --microbatches 8",
)
