"""`labkit why`: where the time of a run's step went, from the peak of the hardware to what was measured.

It reads the files in the folder of the run. It needs no GPU and starts no rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import room, show
from labkit.cli.why_output import as_json, report
from labkit.cli.written_files import output_problems, plot_problems
from labkit.config import ConfigError, RunConfig
from labkit.config.errors import shown
from labkit.plan.machine import Machine, known_machines, load_machine
from labkit.plan.machine_names import machine_of_gpu
from labkit.plan.nearest_run import nearest_run
from labkit.plan.rank_steps import RankStep, axis_of, rank_step
from labkit.plan.remedies import headline
from labkit.plan.waterfall import Waterfall, waterfall
from labkit.plan.workload import Workload
from labkit.train.reporting.recorded_steps import recorded_steps
from labkit.train.run_folder.contents import CONFIG, STATE
from labkit.train.run_folder.earlier_run import state_in

EVENTS = "events.jsonl"
RECORD = "--train.write_events true --train.timing_log_level 1"
"""Options of `labkit train` with which a run keeps what is needed here."""
WARM_UP = 2
"""First steps of a run that do not count: libraries load, and memory is allocated."""


@dataclass(frozen=True)
class RunOfFolder:
    """What the folder of a run says about it."""

    folder: Path
    config: RunConfig
    world_size: int
    device: str
    """`cpu`, the name of a GPU, or empty for a run of an earlier version."""
    steps: dict[int, list[RankStep]]
    notes: list[str]
    """Sentences on what is missing, and what was done about it."""


def execute(arguments: Arguments) -> int:
    """Print the waterfall of one run."""
    _check(arguments)
    run = _read(Path(arguments.words[0]))
    machine = _machine(arguments, run)
    workload = Workload(run.config, run.world_size, software=machine.default_software)
    try:
        found = waterfall(workload, machine, run.steps, sees_waits=_sees_waits(run.device))
    except ValueError as error:
        raise ConfigError([f"{run.folder}: {error}"], source="labkit why") from None
    said = headline(workload, machine, found)
    near = nearest_run(workload, machine)
    notes = [*run.notes, *_doubts(run, machine, found)]
    written = _draw(arguments, found, run)
    if arguments.options["json"]:
        print(json.dumps(as_json(workload, machine, found, said, near, notes)))
    else:
        show("\n".join([*report(run.folder, workload, machine, found, said, near, notes, room()), *written]))
    return 0


def _check(arguments: Arguments) -> None:
    """Reject what can be seen before anything is read."""
    problems, plot = [], arguments.options["plot"]
    if len(arguments.words) != 1 and not arguments.problems:
        problems.append("RUN: give the folder of one run (its train.output_dir)")
    arguments.refuse([*problems, *plot_problems(plot), *output_problems("--plot", plot)])


def _read(folder: Path) -> RunOfFolder:
    """Return the run of a folder. Raises ConfigError for a folder without a run, without Events or without steps."""
    _require(folder.is_dir(), f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; give the "
             "train.output_dir of a run")  # fmt: skip
    state = state_in(folder)
    world_size = state.get("world_size")
    if not ((folder / CONFIG).is_file() and isinstance(world_size, int)):
        rule = f"holds no run, which has {CONFIG} and {STATE}; give the train.output_dir of a run"
        raise ConfigError([f"{folder}: {rule}"], source="labkit why")
    _require((folder / EVENTS).is_file(), f"{folder}: the run kept no Events ({EVENTS}); repeat some of its steps "
             f"with {RECORD}")  # fmt: skip
    config, device = RunConfig.from_yaml(folder / CONFIG), str(state.get("device", ""))
    axis, sees_waits = axis_of(config.parallel, world_size), _sees_waits(device)
    steps: dict[int, list[RankStep]] = {}
    for number, by_rank in recorded_steps(folder / EVENTS, world_size).items():
        ranks = [rank_step(by_rank[rank], axis, sees_waits=sees_waits) for rank in range(world_size)]
        steps[number] = [rank for rank in ranks if rank is not None]
    _require(bool(steps), f"{folder}: {EVENTS} has no whole step of {world_size} ranks; let the run make one")
    acts = all(rank.actions for ranks in steps.values() for rank in ranks)
    _require(acts, f"{folder}: its Events have no actions such as 0F0, because a CUDA graph replays whole steps; set "
             "graph.cuda_graph_impl to none for some steps")  # fmt: skip
    notes = [] if state.get("state") == "finished" else ["the run is not finished; this is about the steps it has made"]
    return RunOfFolder(folder, config, world_size, device, *_warm(steps, notes))


def _require(held: bool, problem: str) -> None:
    if not held:
        raise ConfigError([problem], source="labkit why")


def _warm(steps: dict[int, list[RankStep]], notes: list[str]) -> tuple[dict[int, list[RankStep]], list[str]]:
    """Return the steps after the first ones, and what to say if there are too few."""
    kept = {number: ranks for number, ranks in steps.items() if number > WARM_UP}
    if not kept:
        return steps, [*notes, f"the run has only its first {len(steps)} steps, which also warm up"]
    if len(kept) < 4:
        notes = [*notes, f"only {len(kept)} steps after the first {WARM_UP}: one disturbed step changes the result"]
    return kept, notes


def _machine(arguments: Arguments, run: RunOfFolder) -> Machine:
    """Return the machine that is given, or that of the run's GPU."""
    given = arguments.options["machine"]
    if given is not None:
        return load_machine(given)
    if (known := machine_of_gpu(run.device)) is not None:
        return load_machine(known)
    if run.device == "cpu":
        rule = "labkit calibrate --out my_laptop.yaml measures it, then give --machine my_laptop.yaml"
        raise ConfigError([f"--machine: is missing, and the run was on a CPU; {rule}"], source="labkit why")
    of = f"labkit has no machine with the GPU {shown(run.device)}" if run.device else "the run does not name its device"
    rule = f"choose one of {', '.join(known_machines())}, or give a YAML file"
    raise ConfigError([f"--machine: is missing, and {of}; {rule}"], source="labkit why")


def _sees_waits(device: str) -> bool:
    """Return True if the Events of the run know how long a rank was blocked; NCCL waits on the GPU, unseen."""
    return device in ("", "cpu")


def _doubts(run: RunOfFolder, machine: Machine, found: Waterfall) -> list[str]:
    """Return sentences on what limits the comparison."""
    said = []
    if not _sees_waits(run.device):
        rule = "communication inside actions is measured with them, and gaps of the host as idle time of the pipeline"
        said.append(f"on a GPU Events do not show how long NCCL waits: {rule}")
    if machine.node.measured and run.world_size > 2:
        ranks = f"{machine.name} was measured with 2 ranks at once, and the run has {run.world_size}"
        said.append(f"{ranks}; if they share cores, all of it takes longer than predicted")
    if not all(rank.has_phases for ranks in run.steps.values() for rank in ranks):
        said.append("without --train.timing_log_level 1 the optimizer cannot be told from the host")
    if len(found.slowest) == 0 and run.config.parallel.pp > 1:
        said.append("each stage has one rank, so a slow rank cannot be told from a stage with more work")
    return said


def _draw(arguments: Arguments, found: Waterfall, run: RunOfFolder) -> list[str]:
    path = arguments.options["plot"]
    if path is None:
        return []
    from labkit.viz.step_waterfall import step_waterfall

    step_waterfall(found, run.folder.resolve().name).save(path)
    return ["", f"written: {path}"]


COMMAND = Command(
    name="why",
    summary="Say where the time of a run's step went: rows from the peak of the hardware to the measured step, each "
    "predicted and measured; the largest loss, what to try, and the nearest published run. The run must have kept its "
    f"Events: {RECORD}.",
    options=(
        Option("machine", "str", "name of a machine (labkit/plan/machines), or the YAML file that `labkit calibrate` "
               "wrote", path="any", unset="default: that of the run's GPU; required for a CPU"),
        Option("plot", "str", "draw the rows, predicted over measured, into this file (png, svg, pdf)", path="any"),
        Option("json", "bool", "print JSON", False),
    ),
    execute=execute,
    example="labkit why runs/first --machine my_laptop.yaml",
    words="RUN",
    paths=True,
)  # fmt: skip
