"""`labkit why`: steps made of known parts come back part by part, rows add up, and bad folders are named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_files import write_events

from labkit.cli.command_line import main
from labkit.config import RunConfig
from labkit.events import Event
from labkit.plan.flops import step_flops
from labkit.plan.machine import load_machine
from labkit.plan.machine_names import machine_of_gpu
from labkit.plan.nearest_run import FURTHEST, nearest_run
from labkit.plan.rank_steps import axis_of, rank_step
from labkit.plan.remedies import headline
from labkit.plan.step_causes import step_causes
from labkit.plan.step_time import schedule_of
from labkit.plan.waterfall import COMPUTE, ROWS, middle_half, pipelines_of, waterfall
from labkit.plan.workload import Workload
from labkit.schedules import Costs, simulate
from labkit.schedules.ir import EVENT_KINDS
from labkit.schedules.simulator import earliest

H100 = load_machine("h100")
F, B = 1.0, 2.0
UPDATE, HOST = 0.5, 0.25
"""Seconds of the optimizer, and of the host before the end of a step."""


def workload(world: int, batch: int, **fields) -> Workload:
    changes = {name.replace("__", "."): value for name, value in fields.items()}
    sizes = {"model.layers": 8, "model.hidden": 64, "model.heads": 4, "train.global_batch_size": batch}
    return Workload(RunConfig().replaced(sizes | changes), world)


def events_of(work: Workload, costs: Costs, *, slow: dict[int, float] | None = None, step: int = 3) -> list[Event]:
    """What the ranks of a run would record: a simulated pipeline, then gradients, the optimizer and the host.

    slow: rank -> factor on its computing. Ranks of tp wait for it inside the action, stages and replicas after it.
    """
    slow = slow or {}
    parallel, schedule = work.config.parallel, schedule_of(work.config, work.microbatches)
    chains, in_step = pipelines_of(work)
    factors = np.array([[slow.get(int(rank), 1.0) for rank in chain] for chain in chains])
    worst = np.stack([factors[in_step == number].max(0) for number in in_step])  # over ranks that share collectives
    table = costs.table(parallel.pp * parallel.vpp)
    places = [schedule.placement(stage) for stage in range(schedule.num_stages)]
    lines = []
    for rates in worst[:, places]:
        slower = [(table[kind] * rates).tolist() for kind in (0, 2, 3)]
        made = Costs(forward=slower[0], input_grad=slower[1], weight_grad=slower[2], latency=costs.latency)
        lines.append(simulate(schedule, made))
    finish, found = max(line.makespan for line in lines), []
    for number, (chain, line) in enumerate(zip(chains, lines, strict=True)):
        for place, rank in enumerate(map(int, chain)):
            own = [replace(event, rank=rank) for event in line.events if event.rank == place]
            waits = worst[number, place] / factors[number, place]
            found += recorded(rank, own, waits, finish, work.dp > 1, step)
    return found


def recorded(rank: int, actions: list[Event], waits: float, finish: float, replicas: bool, step: int) -> list[Event]:
    """Return the Events of one rank: waits inside actions, for stages between them, and for replicas at the end."""
    at = {"rank": rank, "step": step}
    events, clock = [], 0.0
    for action in sorted(actions, key=lambda event: event.start):
        if action.start > clock:
            events.append(Event(name="wait recv pp", kind="wait", start=clock, end=action.start, **at))
        events.append(replace(action, step=step))
        computing = action.duration / waits
        if waits > 1:
            events.append(Event(name="all_reduce tp", kind="collective", start=action.start + computing, end=action.end,
                                **at))  # fmt: skip
        clock = action.end
    group = "dp" if replicas else "mp"
    events.append(Event(name=f"all_reduce {group}", kind="collective", start=clock, end=finish, **at))
    events.append(Event(name="finalize-grads", kind="timer", start=clock, end=finish, **at))
    events.append(Event(name="optimizer", kind="timer", start=finish, end=finish + UPDATE, **at))
    events.append(Event(name="step", kind="timer", start=0.0, end=finish + UPDATE + HOST, **at))
    return events


def causes(work: Workload, costs: Costs, *, sees_waits: bool = True, **more) -> dict[str, float]:
    events = events_of(work, costs, **more)
    axis = axis_of(work.config.parallel, work.world_size)
    ranks = [
        rank_step([event for event in events if event.rank == rank], axis, sees_waits=sees_waits)
        for rank in range(work.world_size)
    ]
    schedule = schedule_of(work.config, work.microbatches)
    found = step_causes(ranks, schedule, pipelines_of(work), sees_waits=sees_waits)
    assert sum(found.values()) == pytest.approx(max(rank.total for rank in ranks))
    assert found["update"] == pytest.approx(UPDATE) and found["after"] == pytest.approx(HOST)
    return {cause: round(seconds, 9) for cause, seconds in found.items() if abs(seconds) > 1e-9}


def equal(pp: int) -> Costs:
    return Costs(forward=[F] * pp, input_grad=[B / 2] * pp, weight_grad=[B / 2] * pp)


@pytest.mark.parametrize("sees_waits", [True, False])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8)])
def test_fill_and_drain_are_p_minus_1_over_m_of_the_computation(pp, m, sees_waits):
    """Also where the host does not see waits, as on a GPU."""
    found = causes(workload(pp, m, parallel__pp=pp), equal(pp), sees_waits=sees_waits)
    assert found["compute"] == pytest.approx(m * (F + B))
    assert found["fill"] == pytest.approx((pp - 1) / m * found["compute"])
    assert set(found) == {"compute", "fill", "update", "after"}


def test_messages_are_what_no_computation_explains():
    free = causes(workload(2, 4, parallel__pp=2), equal(2))
    late = causes(workload(2, 4, parallel__pp=2), replace(equal(2), latency=0.25))
    assert late["fill"] == pytest.approx(free["fill"]) and late["compute"] == pytest.approx(free["compute"])
    assert late["pp"] == pytest.approx(sum(late.values()) - sum(free.values())) and late["pp"] > 0.25


def test_a_longer_stage_is_no_fill():
    """A last stage of twice the work: the other rank waits for it, m - 1 times the difference in the steady phase."""
    m, costs = 8, Costs(forward=[F, 2 * F], input_grad=[B / 2, B], weight_grad=[B / 2, B])
    found = causes(workload(2, m, parallel__pp=2), costs)
    mean = 1.5 * (F + B)
    assert found["compute"] == pytest.approx(m * mean)
    assert found["fill"] == pytest.approx(mean)
    assert found["stages"] == pytest.approx(m * 2 * (F + B) + (F + B) - (m + 1) * mean)


@pytest.mark.parametrize(
    "work",
    [
        workload(2, 4, parallel__tp=2),
        workload(2, 8),
        workload(4, 4, parallel__tp=2, parallel__pp=2),
        workload(4, 8, parallel__tp=2),
    ],
    ids=["tp", "dp", "tp x pp", "tp x dp"],
)
def test_a_rank_that_is_30_percent_slower_costs_30_percent(work):
    """Wherever its peers wait for it: inside actions, at the reduction of gradients, or on another stage."""
    pp = work.config.parallel.pp
    plain, found = causes(work, equal(pp)), causes(work, equal(pp), slow={1: 1.3})
    longer = sum(found.values()) - sum(plain.values())
    assert found["stragglers"] == pytest.approx(longer)
    if pp == 1:
        assert longer == pytest.approx(0.3 * work.microbatches * (F + B))
    assert {cause: seconds for cause, seconds in found.items() if cause != "stragglers"} == pytest.approx(plain)


def test_single_slow_actions_and_gaps_have_rows_of_their_own():
    """Rank 0 pauses before its first action, so rank 1 begins later, too; then one backward of each takes longer."""
    work, pause, more = workload(2, 4, parallel__pp=2), 0.125, 0.75
    schedule, axis = schedule_of(work.config, work.microbatches), axis_of(work.config.parallel, 2)

    def step(durations: np.ndarray, delay: float) -> dict[str, float]:
        start, end = (times + delay for times in earliest(schedule, durations))
        last, ranks = float(end.max()), []
        for rank in range(2):
            events, clock = [Event(rank, "step", "timer", 0.0, last)], delay * (rank == 0)
            for index in range(*schedule.offsets[rank : rank + 2]):
                action = schedule.action(index)
                events.append(Event(rank, "wait recv pp", "wait", clock, float(start[index])))
                events.append(
                    Event(rank, str(action), EVENT_KINDS[action.kind], float(start[index]), float(end[index]))
                )
                clock = float(end[index])
            events.append(Event(rank, "all_gather mp", "collective", clock, last))
            ranks.append(rank_step(events, axis, sees_waits=True))
        return step_causes(ranks, schedule, pipelines_of(work))

    durations = np.where(schedule.kinds == 0, F, B)
    plain, late = step(durations, 0.0), step(durations, pause)
    assert late["host"] == pytest.approx(pause) and late["fill"] == pytest.approx(plain["fill"])
    names = [str(schedule.action(index)) for index in range(len(schedule))]
    durations[[names.index("1B0"), names.index("0B3")]] += more  # one after the other: both are on the critical path
    slow = step(durations, 0.0)
    assert slow["compute"] == pytest.approx(plain["compute"] + more)
    assert slow["fill"] == pytest.approx(plain["fill"] + more / 4) and slow["stages"] == pytest.approx(0.0)
    assert slow["actions"] == pytest.approx(more * (1 - 1 / 4)) and slow["pp"] == pytest.approx(0.0)


def test_every_moment_belongs_to_one_cause():
    """A wait inside a call counts once; the call itself, which runs beside computation, does not."""
    axis = axis_of(RunConfig().replaced({"parallel.tp": 2}).parallel, 2)
    events = [
        Event(0, "step", "timer", 0.0, 10.0), Event(0, "0F0", "forward", 1.0, 5.0),
        Event(0, "all_reduce tp", "collective", 2.0, 4.0), Event(0, "wait all_reduce tp", "wait", 3.5, 4.0),
        Event(0, "all_gather tp", "collective", 4.25, 4.5), Event(0, "0B0", "backward", 5.5, 8.0),
        Event(0, "layers.0.mlp.fc1 weight_grad", "weight_grad", 6.0, 7.0),
        Event(0, "optimizer", "timer", 8.5, 9.5), Event(0, "all_reduce dp", "collective", 9.0, 9.25),
    ]  # fmt: skip
    found = rank_step(events, axis, sees_waits=True)
    assert found.computing.tolist() == pytest.approx([3.25, 2.5]) and found.gaps.tolist() == pytest.approx([1.0, 0.5])
    assert found.blocked["tp"] == found.blocked_inside["tp"] == pytest.approx(0.75)
    assert (found.blocked["dp"], found.update, found.after) == pytest.approx((0.25, 0.75, 1.0))
    blind = rank_step(events, axis, sees_waits=False)
    assert (found.products, blind.products) == (pytest.approx(1.0), 0.0)
    assert blind.computing.tolist() == pytest.approx([4.0, 2.5]) and not any(blind.blocked.values())
    assert rank_step(events[1:], axis, sees_waits=True) is None


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ({"tp": 2, "pp": 2}, 8, {"tp": "tp", "pp": "pp", "mp": "pp", "dp_cp": "dp", "world": "pp", "embd": "pp"}),
        ({"tp": 2, "cp": 2}, 8, {"cp": "cp", "mp": "tp", "tp_cp": "cp", "world": "dp", "etp": "tp"}),
        ({"ep": 4}, 4, {"ep": "ep", "tp_ep": "ep", "edp": "dp"}),
    ],
)
def test_axis_of_a_group(parallel, world, expected):
    config = RunConfig().replaced({f"parallel.{axis}": size for axis, size in parallel.items()})
    axis = axis_of(config.parallel, world)
    assert {group: axis(group) for group in expected} == expected


# ---- waterfalls ----

LAYOUTS = [
    workload(2, 4, parallel__pp=2),
    workload(4, 4, parallel__tp=2, parallel__pp=2, model__recompute_granularity="full"),
    workload(4, 8, parallel__tp=2),
    workload(4, 8, parallel__pp=2, parallel__vpp=2),
]


def steps_of(work: Workload, *, sees_waits: bool = True, latency: float = 0.0, **more):
    parallel, found = work.config.parallel, {}
    axis = axis_of(parallel, work.world_size)
    costs = replace(equal(parallel.pp * parallel.vpp), latency=latency)
    for number in (3, 4, 5, 6):
        events = events_of(work, costs, step=number, **more)
        found[number] = [rank_step([e for e in events if e.rank == rank], axis, sees_waits=sees_waits)
                         for rank in range(work.world_size)]  # fmt: skip
    return found


@pytest.mark.parametrize("work", LAYOUTS, ids=["pp", "tp x pp", "tp x dp", "pp x dp, two chunks"])
@pytest.mark.parametrize("sees_waits", [True, False])
def test_both_columns_add_up_to_their_step(work, sees_waits):
    found = waterfall(work, H100, steps_of(work, sees_waits=sees_waits), sees_waits=sees_waits)
    assert [row.key for row in found.rows] == list(ROWS)
    assert found.predicted == pytest.approx(found.prediction.seconds)
    assert found.measured == pytest.approx(found.median)
    inside = [row.measured for row in found.rows if row.key in ("ideal", *found.joint[0])]
    assert sum(inside) == pytest.approx(work.microbatches * work.config.parallel.vpp * (F + B))
    predicted = {row.key: row.predicted for row in found.rows}
    if work.config.parallel.pp > 1:
        assert predicted["fill"] > 0


def test_products_are_measured_where_their_gradients_have_events():
    """The gradients are two of three equal products; the other rows of computation share what is left."""
    work = LAYOUTS[0]
    m, gradients = work.microbatches, 0.4 * B
    steps = {
        number: [rank._replace(products=m * gradients) for rank in ranks] for number, ranks in steps_of(work).items()
    }
    found = waterfall(work, H100, steps, sees_waits=True).rows
    rows = {row.key: row.measured for row in found}
    attention = step_flops(work.config.model, samples=4).attention / H100.peak_flops["fp32"] / 2
    assert rows["gemm"] + rows["ideal"] - attention == pytest.approx(1.5 * m * gradients)
    assert sum(rows[key] for key in ("ideal", *COMPUTE)) == pytest.approx(m * (F + B))
    whole = {row.key: np.array(row[1:]) + attention * (row.key == "attention") for row in found}
    ratios = [whole[key][1] / whole[key][0] for key in ("attention", "memory", "launch")]
    assert ratios == pytest.approx([ratios[0]] * 3)  # split in the proportions of whole times


def test_the_middle_half_leaves_out_the_disturbed_steps():
    assert middle_half({1: 9.0, 2: 1.0, 3: 1.1, 4: 1.2, 5: 0.1}) == [2, 3, 4]
    assert middle_half({7: 1.0}) == [7]


def test_the_headline_names_the_loss_and_a_remedy_that_is_predicted_to_help():
    work = workload(4, 4, parallel__pp=4, model__hidden=512, model__seq_length=512)
    said = headline(work, H100, waterfall(work, H100, steps_of(work), sees_waits=True))
    share = 3 / (7 + (UPDATE + HOST) / (F + B))
    assert said.startswith(
        f"{share:.0%} of the step is the pipeline's fill and drain, with 4 microbatches on pp 4; try "
    )
    assert "--train.global_batch_size 16 (16 microbatches)" in said
    late = waterfall(work, H100, steps_of(work, latency=9.0), sees_waits=True)
    assert late.largest.key == "pp" and "times as long as predicted, so look at links" in headline(work, H100, late)
    slow = workload(4, 8, parallel__tp=2)
    said = headline(slow, H100, waterfall(slow, H100, steps_of(slow, slow={2: 4.0}), sees_waits=True))
    assert "stragglers; compute longer than their peers: rank 2 (4.00); look at" in said


def test_the_nearest_published_run(tmp_path, capsys):
    published = {"model.layers": 24, "model.hidden": 2304, "model.heads": 24, "model.vocab_size": 51200,
                 "model.seq_length": 2048, "train.micro_batch_size": 16, "train.global_batch_size": 512,
                 "optim.precision": "bf16"}  # fmt: skip
    ours = Workload(RunConfig().replaced(published), 32)
    near = nearest_run(ours, load_machine("a100"))
    assert near.row.id == "sc21_t1_1.7B" and near.distance == pytest.approx(0.0, abs=0.01)
    assert 90e12 < near.flops_per_gpu < 137e12  # 137 count recomputation
    assert nearest_run(replace(ours, world_size=32 * 2**9), load_machine("a100")) is None and FURTHEST < 9
    assert nearest_run(ours, replace(load_machine("a100"), gpu="Some CPU")) is None

    folder_of(tmp_path, ours, world_size=32, device="NVIDIA A100-SXM4-80GB")
    assert main(["why", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "nearest published run: sc21_t1_1.7B, GPT 1.7B on 32 GPUs of a100" in said
    assert f"{near.flops_per_gpu / 1e12:.1f} there" in said
    assert "layout there: dp 32, micro batch 16, global batch 512, recomputation full, fp16, megatron_2021" in said
    assert said.count("not stated there") == len(near.not_stated) > 0


def test_machines_by_the_name_of_the_gpu():
    assert machine_of_gpu("NVIDIA H100 80GB HBM3") == "h100" and machine_of_gpu("NVIDIA A100-SXM4-40GB") == "a100_40gb"
    assert not any(map(machine_of_gpu, ("NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "cpu")))


# ---- the command ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of 4 ranks with the Events of six steps."""
    return folder_of(tmp_path, LAYOUTS[1], world_size=4)


def folder_of(folder: Path, work: Workload, **more) -> Path:
    (folder / "config.yaml").write_text(work.config.to_yaml())
    state(folder, **more)
    events = [event for step in range(1, 7) for event in events_of(work, equal(work.config.parallel.pp), step=step)]
    write_events(events, folder / "events.jsonl")
    return folder


def configure(folder: Path, **changes) -> None:
    (folder / "config.yaml").write_text(LAYOUTS[1].config.replaced(changes).to_yaml())


def state(folder: Path, **changes) -> None:
    (folder / "run.json").write_text(json.dumps({"state": "finished", "world_size": 4, "device": "cpu"} | changes))


def test_the_command_prints_a_table_that_adds_up(folder, capsys):
    plot = folder / "steps.png"
    assert main(["why", str(folder), "--machine", "h100", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert (
        "4 ranks, tp 2 x pp 2, 4 microbatches; predicted for H100 DGX" in said
        and "mean of steps 4 to 5, the middle half" in said
    )
    assert "~ only the sum of these is measured: " in said and "a part of GEMMs and attention is in" in said
    assert "no published run is near" in said
    assert plot.stat().st_size > 10_000
    assert main(["why", str(folder), "--machine", "h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(row["measured"] for row in found["rows"]) == pytest.approx(found["measured_seconds"])
    assert found["measured_seconds"] == pytest.approx(5 * (F + B) + UPDATE + HOST)
    assert np.isfinite([value for row in found["rows"] for value in (row["predicted"], row["measured"])]).all()


def test_a_gpu_that_is_known_needs_no_machine_and_an_unfinished_run_says_so(folder, capsys):
    state(folder, state="unfinished", device="NVIDIA H100 80GB HBM3")
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"rank": 0, "name": "0F0", "ki')
    assert main(["why", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "note: the run is not finished" in said and "how long NCCL waits" in said and "for H100 DGX" in said


def test_few_steps_are_used_and_said(folder, capsys):
    work = LAYOUTS[1]
    write_events(events_of(work, equal(2), step=1), folder / "events.jsonl")
    assert main(["why", str(folder), "--machine", "h100"]) == 0
    said = capsys.readouterr().out
    assert "measured: step 1\n" in said and "has only its first 1 steps" in said


@pytest.mark.parametrize(
    ("break_it", "words", "message"),
    [
        (
            lambda folder: (folder / "events.jsonl").unlink(),
            [],
            "kept no Events (events.jsonl); repeat some of its steps",
        ),
        (lambda folder: (folder / "events.jsonl").write_text(""), [], "has no whole step of 4 ranks"),
        (lambda folder: (folder / "run.json").unlink(), [], "holds no run, which has config.yaml and run.json"),
        (lambda folder: configure(folder, **{"optim.precision": "fp64"}), [], "H100 DGX has no peak for fp64"),
        (lambda folder: configure(folder, **{"model.family": "bert"}), [], "bert; times are known for gpt"),
        (
            lambda folder: configure(folder, **{"schedule.name": "gpipe"}),
            [],
            "the actions of GPipe in their order; Events and",
        ),
        (lambda folder: None, ["--machine", "h1000"], "no machine is called 'h1000'; choose one of"),
        (lambda folder: None, ["--plot", "x.gif"], "--plot 'x.gif': its name ends with one of .png"),
        (lambda folder: state(folder, world_size=8), [], "has no whole step of 8 ranks"),
    ],
)
def test_what_cannot_be_explained_is_said_in_one_error(folder, capsys, break_it, words, message):
    break_it(folder)
    assert main(["why", str(folder), *(words or ["--machine", "h100"])]) == 2
    assert message in capsys.readouterr().err


def test_a_cpu_needs_the_file_of_its_calibration(folder, capsys):
    assert main(["why", str(folder)]) == 2
    assert "the run was on a CPU; labkit calibrate --out my_laptop.yaml measures it" in capsys.readouterr().err
    state(folder, device="NVIDIA H100 PCIe")
    assert main(["why", str(folder)]) == 2
    assert "no machine with the GPU 'NVIDIA H100 PCIe'; choose one of a100" in capsys.readouterr().err
    assert main(["why", "no_such_folder", "--machine", "h100"]) == 2
    assert "no_such_folder: no such folder; give the train.output_dir" in capsys.readouterr().err
