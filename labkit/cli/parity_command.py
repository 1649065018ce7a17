"""`labkit parity`: compare layouts with a single process, and name the first tensor that differs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import room, show, table
from labkit.cli.rank_options import DEVICE, TIMEOUT, refusing_arguments
from labkit.cli.train_command import data_problem
from labkit.config import RunConfig
from labkit.config.errors import counted, shown
from labkit.config.field_spec import BadValueError
from labkit.config.fields import SPECS, Given, resolve

if TYPE_CHECKING:
    from labkit.train.parity import ParityRow

STANDARD_LAYOUTS = "tp=2;pp=2;dp=2;tp=2,pp=2"
"""The layouts that are compared if neither --layouts nor the configuration names one."""
STANDARD_EXPERT_LAYOUTS = "ep=2;tp=2,sp;pp=2;dp=2;ep=4,tp=2,etp=1,sp"
"""The same for a mixture of experts, which tp shards only under sequence parallelism."""
_SHORT = {"sp": "parallel.sequence_parallel"}
"""Words of a layout that are not the name of a field -> the field, which the word alone switches on."""
_COUNTS = ("dp", "world_size")
"""Numbers of a layout that are not fields: both say how many ranks it has."""
_HOW_TO_NAME = "write axis=size, as in tp=2,pp=2;dp=2, or leave --layouts out"
_FAULT_KEYS = ("operation", "group", "phase", "layer")


def execute(arguments: Arguments) -> int:
    """Compare the layouts, print each verdict as soon as it is known, then the table. The exit code is 1 if a layout
    has a fault."""
    options, config = arguments.options, arguments.config
    problems = config.problems()
    text = options["layouts"]
    if text is None:
        named = config.parallel.smallest_world_size > 1 or options["world_size"] is not None
        text = None if named else STANDARD_EXPERT_LAYOUTS if config.moe.num_experts else STANDARD_LAYOUTS
    sound = not (problems or arguments.problems)
    layouts, bad_layouts = read_layouts(text, config, options["world_size"]) if sound else ([], [])
    fault, bad_fault = _read_fault(options["drop"])
    arguments.refuse(problems + bad_layouts + bad_fault)
    arguments.refuse(_input_problems(layouts, config, options["device"]))
    how = f"{counted(options['steps'], 'step')} in {options['dtype']}"
    show(f"comparing {counted(len(layouts), 'layout')} with one process, {how}", stream=sys.stderr)
    from labkit.train import compare
    from labkit.train.reporting.progress_bar import ProgressBar

    bar = ExitStack()  # the progress bar of the current run

    def begin(name: str, ranks: int) -> Callable[[dict[str, Any]], None]:
        bar.close()
        show(f"running {name} ({counted(ranks, 'rank')})", stream=sys.stderr)
        return bar.enter_context(ProgressBar(options["steps"])).update

    def tell(row: ParityRow) -> None:
        bar.close()
        show(f"compared {row.name} ({counted(row.world_size, 'rank')}): {row.verdict}")

    with refusing_arguments(), bar:
        report = compare(
            config,
            layouts,
            steps=options["steps"],
            dtype=options["dtype"],
            fault=fault,
            timeout=options["timeout"],
            device=options["device"],
            on_row=tell,
            on_run=begin,
        )
    show("\n".join([*table(report.cells(), range(1, 5), room(), below=True), "", report.sentence]))
    return 0 if report.ok else 1


def _input_problems(layouts: list[dict[str, Any]], config: RunConfig, device: str) -> list[str]:
    """Return the problems of the files that the configuration and its layouts name, and of the devices they need."""
    from labkit.train.device_rules import machine_problems
    from labkit.train.run_schedule import schedule_problem

    problems = []
    for layout in layouts:
        changed = config.replaced({name: value for name, value in layout.items() if name != "world_size"})
        ranks = layout["world_size"]
        problems += [
            schedule_problem(changed, ranks),
            *machine_problems(changed, ranks, device),
            data_problem(changed),
        ]
    return problems


def read_layouts(
    text: str | None, config: RunConfig, default_world_size: int | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the layouts written as `tp=2,pp=2;dp=2`, and what is wrong with them; None is the layout of `config`.

    Each is a dict of changes to `config`; `dp` becomes a world size, and what is not named stays as it is. A layout
    that names neither dp nor world_size runs on `default_world_size` ranks, or on as few as it can.
    """
    layouts: list[dict[str, Any]] = []
    problems: list[str] = []
    parts = [""] if text is None else text.split(";")
    if text is not None and not all(part.strip(" ,") for part in parts):
        where = "a layout between semicolons is empty" if text.strip(" ,;") else "names no layout"
        return [], [f"--layouts {shown(text)}: {where}; {_HOW_TO_NAME}"]
    for part in parts:
        layout, bad = _read_layout(part, config, default_world_size)
        if not bad:
            layouts.append(layout)
        name = part.strip() or "of the configuration"
        problems += [f"layout {name}: {problem}" for problem in bad]
    return layouts, problems


def _read_layout(text: str, config: RunConfig, default_world_size: int | None) -> tuple[dict[str, Any], list[str]]:
    layout, problems = _read_items(text)
    if problems:
        return layout, problems
    dp, world_size = (layout.pop(name, None) for name in _COUNTS)
    changed = config.replaced(layout)
    if problems := changed.problems():
        return layout, problems
    parallel = changed.parallel
    made = dp and dp * parallel.tp * parallel.cp * parallel.pp
    if made and world_size not in (None, made):
        return layout, [f"world_size = {world_size}: dp and the other sizes make {made}; keep one of them"]
    layout["world_size"] = world_size or made or default_world_size or parallel.smallest_world_size
    return layout, changed.problems(layout["world_size"])


def _read_items(text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of one layout by dotted name, `dp` or `world_size`, and what is wrong with them."""
    given = Given()
    problems: list[str] = []
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals and key in _SHORT:
            equals, value = "=", "true"
        count = key.replace("-", "_")
        if not equals:
            problems.append(f"{shown(item)}: write axis=size, as in tp=2,pp=2;dp=2")
        elif count in _COUNTS:
            if not value.isdecimal() or not 1 <= int(value[:10]) < 2**31:
                problems.append(f"{key} = {shown(value)}: must be an integer of at least 1")
            else:
                problems += given.add(count, int(value), item)
        else:
            dotted, why = resolve(_SHORT.get(key, key))
            if dotted is None:
                problems.append(why)
                continue
            try:
                problems += given.add(dotted, SPECS[dotted].convert(value, text=True), item)
            except BadValueError as rule:
                problems.append(f"{dotted} = {shown(value)}: {rule}")
    return given.values, problems


def _read_fault(text: str | None) -> tuple[dict[str, str] | None, list[str]]:
    """Return `operation=all_reduce,group=tp` as arguments of `labkit.comm.fault_injection.dropped`, and problems."""
    if text is None:
        return None, []
    from labkit.train.parity.comparison_plan import fault_problems

    given = Given()
    problems: list[str] = []
    for item in text.split(","):
        key, _, value = (word.strip() for word in item.partition("="))
        problems += given.add(key, value, item.strip())
    pairs = given.values
    if not set(pairs) <= set(_FAULT_KEYS) or not all(pairs.values()):
        return None, [f"--drop {shown(text)}: write operation=all_reduce,group=tp,phase=forward,layer=layers.1.mlp"]
    return pairs, [f"--drop {shown(text)}: {problem}" for problem in [*problems, *fault_problems(pairs)]]


COMMAND = Command(
    name="parity",
    summary="Compare layouts with a single process: loss, gradients and updated parameters; name what differs first.",
    options=(
        Option(
            "layouts",
            "str",
            "layouts to compare, separated by semicolons, such as tp=2,pp=2;dp=2",
            unset=f"default: that of the configuration, or {STANDARD_LAYOUTS} if it has none",
        ),
        Option("steps", "int", "optimizer steps", 3, ge=1),
        Option(
            "dtype",
            "str",
            "type of all numbers; float64 must agree to 1e-10 and float32 to 1e-5, or within rounding",
            "float64",
            choices=("float64", "float32"),
        ),
        TIMEOUT,
        Option(
            "world-size",
            "int",
            "ranks of each layout that names no dp",
            aliases=("nproc",),
            ge=1,
            unset="default: as few as the layout allows",
        ),
        DEVICE,
        Option("drop", "str", "leave out one communication, to see parity find it: operation=all_reduce,group=tp,..."),
    ),
    execute=execute,
    example='labkit parity --preset tiny --layouts "tp=2,pp=2;dp=2"',
    configurable=True,
)
