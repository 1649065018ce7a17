"""`labkit plan`: the fastest layouts of a model on a machine, why the others lose, and predictions of tables of runs.

It needs no GPU and starts no rank.
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.command_line import CommandFailedError
from labkit.cli.output import room, show
from labkit.cli.plan_goodput import PlannedGoodput, goodput_json, goodput_lines, planned_goodput
from labkit.cli.plan_output import as_json, calibration, explanation, report
from labkit.cli.written_files import output_problems, plot_problems
from labkit.config import RunConfig
from labkit.config.errors import shown
from labkit.config.foreign.megatron_arguments import (
    CONNECTIONS,
    NOT_WRITTEN,
    SCHEDULES_OF_MEGATRON,
    megatron_arguments,
)
from labkit.config.foreign.stacks import convert, keys_of
from labkit.output_files import appearing
from labkit.plan.cluster import Cluster, parse_cluster
from labkit.plan.fitting import RESERVE
from labkit.plan.layouts import NEUTRAL, SCHEDULE_NAMES, in_words, matching, parse_words, pinned
from labkit.plan.machine import Machine, load_machine
from labkit.plan.ranking import GB, losers
from labkit.plan.search import Ranked, Search
from labkit.plan.software import MEGATRON_OF_TODAY, SOFTWARE, software_of
from labkit.plan.workload import Workload


class _Bar:
    """A progress bar on a terminal, for one thing after the other."""

    def __init__(self) -> None:
        self.what, self.bar = "", None

    def __call__(self, what: str, done: int, total: int) -> None:
        from tqdm.auto import tqdm

        if what != self.what:
            self.close()
            self.bar = tqdm(desc=what, total=total, file=sys.stderr, disable=None, leave=False, delay=0.5)
            self.what = what
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()


def execute(arguments: Arguments) -> int:
    """Print a plan, or the predictions of a table."""
    if arguments.options["rows"] is not None:
        from labkit.cli.plan_rows import predict_rows

        return predict_rows(arguments)
    _check(arguments)
    cluster = _cluster(arguments)
    machine = load_machine(arguments.options["machine"])
    columns = _columns(arguments)
    started = time.perf_counter()
    config = _config(arguments)
    software = _software(arguments, machine)
    if arguments.options["write_megatron"] is not None and software not in MEGATRON_OF_TODAY:
        rule = f"no arguments make Megatron-LM run so; plan with --software {' or '.join(MEGATRON_OF_TODAY)}"
        arguments.refuse([f"--write-megatron: the plan is for {software}, and {rule}"])
    base = Workload(config, arguments.options["gpus"], software=software)
    with closing(_Bar()) as bar:
        reserve = arguments.options["reserve"]
        search = Search(base, machine, RESERVE if reserve is None else reserve * GB, bar)
        only = matching(search.rows, columns)
        if arguments.options["write_megatron"] is not None:
            only &= np.isin(search.rows["schedule"], [SCHEDULE_NAMES.index(name) for name in SCHEDULES_OF_MEGATRON])
        if not only.any():
            arguments.refuse([explanation(search, columns, None)])
        told = _calibrated(arguments, search)
        best = search.best(only=only)
        counts, seconds = search.counts.line(), time.perf_counter() - started
        if arguments.options["why"] is not None:
            asked = columns | parse_words(arguments.options["why"])
            show(told + explanation(search, asked, best[0] if best else None))
            goodput = _goodput(cluster, search.best(1, matching(search.rows, asked)))
            show("\n".join(["", *goodput_lines(goodput, room())]) if goodput else "")
            return 0
        if not best:
            raise CommandFailedError(_nothing_fits(search, only))
        goodput = _goodput(cluster, best)
        written = _write(arguments, search, best)
        lost = losers(search, best[0], only, columns)
    if arguments.options["json"]:
        more = {"goodput": goodput_json(goodput)} if goodput else {}
        print(json.dumps(as_json(search, best, lost, seconds) | more))
    else:
        lines = report(search, best, lost, counts, seconds, room(), every=arguments.options["all"])
        lines += ["", *goodput_lines(goodput, room())] if goodput else []
        show(told + "\n".join([*lines, *written]))
    return 0


def _check(arguments: Arguments) -> None:
    """Reject options whose problems can be seen without a search."""
    options, problems = arguments.options, []
    for name, example in (("machine", "--machine h100"), ("gpus", "--gpus 512")):
        if options[name] is None and not any(problem.startswith(f"--{name}") for problem in arguments.problems):
            problems.append(f"--{name}: is missing; give it, as in {example}")
    problems += plot_problems(options["plot"])
    for name in ("out", "plot", "write_megatron"):
        problems += output_problems(f"--{name.replace('_', '-')}", options[name])
    arguments.refuse(problems)


def _cluster(arguments: Arguments) -> Cluster | None:
    """Return the cluster whose goodput is asked for, by --goodput or by --cluster; None if neither is given."""
    words = arguments.options["cluster"]
    return parse_cluster(words or "") if arguments.options["goodput"] or words is not None else None


def _goodput(cluster: Cluster | None, layouts: list[Ranked]) -> PlannedGoodput | None:
    """Return the goodput of the first layout, if it is asked for and there is one."""
    return planned_goodput(layouts[0], cluster) if cluster is not None and layouts else None


def _calibrated(arguments: Arguments, search: Search) -> str:
    """Take the measured step of --measured, if it is given, and return what it changes."""
    given = arguments.options["measured"]
    if given is None:
        return ""
    layout, _, seconds = given.rpartition(":")
    try:
        measured = float(seconds.strip().removesuffix("s"))
    except ValueError:
        measured = math.nan
    if not layout or not 0 < measured < math.inf:
        arguments.refuse([f"--measured {shown(given)}: give a layout and its seconds, as in tp=8,pp=4:5.3"])
    columns = parse_words(layout)
    only = matching(search.rows, columns)
    if not only.any():
        arguments.refuse([f"--measured: {explanation(search, columns, None)}"])
    found = search.calibrate(only, measured)
    if found is None:
        rule = "the plan says that it does not fit, so there is no prediction to compare with; look at --reserve"
        arguments.refuse([f"--measured {shown(given)}: {rule}"])
    assert found is not None
    return calibration(found, search.ratio) + "\n"


def _columns(arguments: Arguments) -> dict[str, int]:
    """Return the columns that the command line sets, by --only or by the names of fields."""
    columns, problems = pinned(arguments.given)
    arguments.refuse(problems)
    return columns | parse_words(arguments.options["only"] or "")


def _config(arguments: Arguments) -> RunConfig:
    """Return the configuration: of a file of another stack, if one is given, with the fields of the command line."""
    options = arguments.options
    files = [options["megatron_args"], str(Path(options["hf"]) / "config.json") if options["hf"] else None]
    config = arguments.config
    for path, stack in zip(files, ("megatron", "huggingface"), strict=True):
        if path is None:
            continue
        from labkit.config import yaml_text

        converted = convert([path], stack)
        config = config.override(yaml_text.plain(converted.text) or {}).replaced(arguments.given)
        if converted.report:
            show(f"not in the plan, from {path}:\n{converted.report}\n", stream=sys.stderr)
    return config


def _software(arguments: Arguments, machine: Machine) -> str:
    """Return the generation of software: as given, or as arguments of Megatron-LM imply, or the machine's."""
    given, path = arguments.options["software"], arguments.options["megatron_args"]
    if given is None and path is not None and keys_of(path, "megatron").get("--tp-comm-overlap"):
        show("--tp-comm-overlap: planned with --software megatron_tp_overlap\n", stream=sys.stderr)
        return "megatron_tp_overlap"
    return given or machine.default_software


def _nothing_fits(search: Search, only: Any) -> str:
    row, need = search.smallest(only)
    lacking = need.bytes - search.available
    return (
        f"none of {int(only.sum()):,} legal layouts fits: the smallest, {in_words(row)}, needs {need.bytes / GB:.1f} "
        f"GB on the ranks at place {need.place} of the pipeline, {lacking / GB:.1f} GB more than the "
        f"{search.available / GB:.1f} GB that a GPU of {search.machine.name} has besides the reserve; take more GPUs, "
        "a smaller model or a larger GPU"
    )


def _write(arguments: Arguments, search: Search, best: list[Ranked]) -> list[str]:
    """Write the requested files, and return a line for each."""
    options, winner, written = arguments.options, best[0], []
    if options["out"] is not None:
        with appearing(options["out"]) as draft:
            draft.write_text(_yaml(winner), encoding="utf-8")
        written.append(f"{options['out']}: train with it: labkit train --config {options['out']} on "
                       f"{winner.workload.world_size} ranks")  # fmt: skip
    if options["write_megatron"] is not None:
        with appearing(options["write_megatron"]) as draft:
            draft.write_text(_megatron(winner), encoding="utf-8")
        written += _about_megatron(winner, options["write_megatron"])
    if options["plot"] is not None:
        from labkit.plan.ranking import pareto_front
        from labkit.viz.plan_layouts import ranked_layouts

        ranked_layouts(best, search.simulated, pareto_front(search, winner)).save(options["plot"])
        written.append(f"written: {options['plot']}")
    return ["", *written] if written else []


def _megatron(winner: Ranked) -> str:
    """Return the winner as arguments of Megatron-LM, with those that its software generation assumes."""
    overlaps = software_of(winner.workload.software).overlaps_tensor_parallel
    return megatron_arguments(winner.workload.config, overlaps_tensor_parallel=overlaps)


def _about_megatron(winner: Ranked, path: str) -> list[str]:
    """Return what a run needs beside the written arguments."""
    parallel = winner.workload.config.parallel
    lines = [f"{path}: torchrun ... pretrain_gpt.py $(cat {path}), and add what a plan does not decide:"]
    lines += [f"  {words}" for words in NOT_WRITTEN]
    if parallel.tp > 1 or parallel.cp > 1:
        lines.append(f"  {CONNECTIONS} in the environment, on GPUs before Blackwell: the plan counts on its overlap")
    return lines


def _yaml(winner: Ranked) -> str:
    """Return the winner's configuration as YAML; fields with labkit's defaults are left out."""
    from labkit.config.foreign.conversion import Conversion, as_yaml

    step = winner.prediction
    head = [
        f"labkit plan: {in_words(winner.row)} on {winner.workload.world_size} GPUs of {winner.machine.name}.",
        f"Predicted step: {step.seconds:.4g} s, 80 % interval {step.low:.4g} to {step.high:.4g} s; not measured.",
    ]
    origin = dict.fromkeys(NEUTRAL, "chosen by labkit plan")
    return as_yaml(winner.workload.config, Conversion({}, head=head, origin=origin)).replace("  # \n", "\n")


COMMAND = Command(
    name="plan",
    summary="Rank every legal layout of a model on a machine by its predicted step time, and say why the others lose: "
    "tp, cp, pp, chunks, ep, etp, dp, sequence parallelism, micro batch, recomputation, distributed optimizer and "
    "schedule. Fields of a layout that you give are fixed. With --rows it predicts each row of a table of runs. It is "
    "arithmetic, so it needs no GPU.",
    options=(
        Option("machine", "str", "name of a machine (labkit/plan/machines), or the YAML file of one, as `labkit "
               "calibrate` writes it", path="any", unset="required, but not with --rows"),
        Option("gpus", "int", "number of GPUs", aliases=("nproc", "world_size"), ge=1,
               unset="required, but not with --rows"),
        Option("only", "str", "search only layouts with these values, as in tp=8,recompute=full,sp=false"),
        Option("why", "str", "explain one layout, as in tp=4,pp=8: the rule that forbids it, or what it lacks, or its "
               "time term by term next to the winner's; what you leave out is chosen as the best"),
        Option("measured", "str", "a step that you measured, as in tp=8,pp=4,micro_batch=1:5.3 (seconds): predicted "
               "times are multiplied by measured / predicted, and their intervals are then those of differences"),
        Option("software", "str", "generation of the training software, which decides overlap and efficiency",
               choices=tuple(SOFTWARE), unset="default: the machine's, megatron_core for a GPU"),
        Option("reserve", "float", "GB of each GPU that stay free", ge=0, unset=f"default: {RESERVE / GB:.1f}"),
        Option("goodput", "bool", "simulate two weeks of the winner, or of the layout of --why, on a cluster whose "
               "GPUs fail as often as Llama 3's did: what checkpoints, failures, stragglers and jitter cost", False),
        Option("cluster", "str", "what differs on your cluster, as in gpu_mtbf_hours=20000,asynchronous; also "
               "restart_seconds, storage_gb_s, copy_gb_s, interval_minutes, straggler_share, straggler_factor, jitter "
               "and days. Implies --goodput"),
        Option("megatron-args", "str", "plan the run of these arguments of Megatron-LM (a script, a list or YAML)",
               path="any"),
        Option("hf", "str", "plan the model of this Hugging Face folder (its config.json)", path="any"),
        Option("rows", "str", "predict every row of this CSV file, in the form of published.csv or megatron_golden.csv",
               path="any"),
        Option("out", "str", "write the winner as YAML for `labkit train --config` into this file; with --rows the "
               "table with its predictions (CSV)", path="any"),
        Option("write-megatron", "str", "write the winner as arguments of Megatron-LM into this file; only its "
               "schedules are searched then", path="any"),
        Option("plot", "str", "draw the best layouts, and memory against time, into this file (png, svg, pdf)",
               path="any"),
        Option("all", "bool", "say of every value of every column why it loses, with its best layout", False),
        Option("json", "bool", "print JSON", False),
    ),
    execute=execute,
    example="labkit plan --machine h100 --gpus 512 --preset table1_8_3b --global-batch-size 512\n"
    "labkit plan --machine h100 --gpus 512 --preset table1_8_3b --global-batch-size 512 --why tp=16\n"
    "labkit plan --rows published.csv --out predicted.csv",
    configurable=True,
    sources=("rows", "megatron_args", "hf"),
)  # fmt: skip
