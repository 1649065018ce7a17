"""Merged pairs: as text, in the builders, in the proof that they can run, and the time of a pair."""

import itertools
import random

import pytest

from labkit.config import ConfigError, ScheduleConfig, presets
from labkit.schedules import (
    Action,
    Costs,
    LayerTimes,
    Schedule,
    ScheduleError,
    bubble_split,
    build_schedule,
    communication,
    dualpipe_v,
    get_overlap_moe_expert_parallel_comm_order,
    interleaved,
    interpret,
    lower,
    merged_dualpipe_v,
    merged_interleaved,
    merged_one_f_one_b,
    one_f_one_b,
    pair_order,
    simulate,
    split_backward,
    split_timeline,
    verify,
    without_backward,
)
from labkit.schedules.lowering import Pair
from labkit.schedules.merging import DENSE_PARTS, MOE_PARTS, pair_lanes, pair_seconds

TWO = [["0F0", "0F1&0B0", "0B1"], ["1F0", "1F1&1B0", "1B1"]]


# ---- cells ----


def test_a_pair_is_one_cell_that_prints_and_parses():
    schedule = merged_one_f_one_b(2, 4)
    assert schedule.to_text().splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0F3&0B0 0B1 0B2 0B3",
        "rank 1: 1F0 1F1&1B0 1F2&1B1 1F3&1B2 1B3",
    ]
    assert Schedule.from_text(str(schedule)) == schedule == Schedule.from_csv(schedule.to_csv())
    plain = Schedule(schedule.name, 2, 4, [schedule.actions(0), schedule.actions(1)])
    assert plain != schedule and plain.checksum != schedule.checksum
    assert not plain.has_pairs and schedule.has_pairs and not without_backward(schedule).has_pairs
    assert schedule.cells(1)[1] == (Action(1, "F", 1), Action(1, "B", 0))


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ("0B0&0F1", "2: 0F1 is merged with 0B0; merged are a forward and a full backward, in this order"),
        ("0F1&0I0", "2: 0I0 is merged with 0F1; merged are a forward and a full backward"),
        ("0F1&0B0&0B1", "'0F1&0B0&0B1' merges 3 actions: merge two, as in 2F5&2B3"),
        ("0F1&", "'' is not an action"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(cell, sentence):
    with pytest.raises(ScheduleError, match=f"rank 0, position .*{sentence}"):
        Schedule.from_csv(f"0F0,{cell}\n")


def test_a_row_does_not_begin_with_the_second_half_of_a_pair():
    with pytest.raises(ScheduleError, match="rank 1, position 0: 1B0 is merged with nothing"):
        Schedule.from_columns(
            "broken", 2, 1, stages=[0, 1], kinds=[0, 1], microbatches=[0, 0], offsets=[0, 1, 2], merged=[False, True]
        )


# ---- builders ----


@pytest.mark.parametrize("pp", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 12])
def test_merged_1f1b_takes_as_long_as_1f1b_and_keeps_twice_as_much(pp, microbatches):
    timeline = verify(merged_one_f_one_b(pp, microbatches))
    assert timeline.makespan == simulate(one_f_one_b(pp, microbatches)).makespan
    assert timeline.bubble_ratio == pytest.approx((pp - 1) / microbatches)
    assert timeline.peak_in_flight == [min(2 * (pp - rank), microbatches) for rank in range(pp)]


@pytest.mark.parametrize(("pp", "vpp", "microbatches"), [(2, 2, 4), (3, 2, 6), (4, 3, 8)])
def test_merged_interleaving_has_one_more_warm_up(pp, vpp, microbatches):
    schedule, plain = merged_interleaved(pp, vpp, microbatches), interleaved(pp, vpp, microbatches)
    timeline, usual = verify(schedule), simulate(plain)
    assert timeline.makespan == usual.makespan
    for rank in range(pp):
        first = [action.kind for action in schedule.actions(rank)].index("B")
        assert first == 2 + min(2 * (pp - rank - 1) + (vpp - 1) * pp, vpp * microbatches - 2)
        assert timeline.peak_in_flight[rank] == min(usual.peak_in_flight[rank] + 1, vpp * microbatches)
    assert merged_interleaved(pp, 1, microbatches) == merged_one_f_one_b(pp, microbatches)
    with pytest.raises(ValueError, match="nothing to interleave"):
        merged_interleaved(1, 2, 4)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 4), (2, 4), (4, 9)])
def test_the_pairs_of_dualpipe_v_merge(pp, microbatches):
    schedule, plain = merged_dualpipe_v(pp, microbatches), dualpipe_v(pp, microbatches)
    assert verify(schedule).peak_in_flight == simulate(plain).peak_in_flight
    assert schedule.merged.sum() == sum(2 * (microbatches - 2 * pp + r + 1) + pp - r - 1 for r in range(pp))
    for rank in range(pp):
        whole = [a if a.kind != "B" else Action(a.stage, "I", a.microbatch) for a in schedule.actions(rank)]
        assert [a for a in whole if a.kind != "W"] == [a for a in plain.actions(rank) if a.kind != "W"]
        assert all(first.stage != second.stage for first, second in filter(_two, schedule.cells(rank)))


def _two(cell):
    return len(cell) == 2


def test_a_configuration_names_the_merged_form(tmp_path):
    merges = {"overlap_moe_expert_parallel_comm": True}
    assert build_schedule(ScheduleConfig(**merges), pp=2, microbatches=4) == merged_one_f_one_b(2, 4)
    assert build_schedule(ScheduleConfig(**merges), pp=2, vpp=2, microbatches=4) == merged_interleaved(2, 2, 4)
    named = ScheduleConfig(name="dualpipe_v", **merges)
    assert build_schedule(named, pp=2, microbatches=4) == merged_dualpipe_v(2, 4)
    with pytest.raises(ValueError, match="'zbv' has no such pairs: choose one of 1f1b, interleaved, dualpipe_v"):
        build_schedule(ScheduleConfig(name="zbv", **merges), pp=2, microbatches=4)
    path = tmp_path / "own.csv"
    path.write_text(merged_one_f_one_b(2, 4).to_csv())
    own = ScheduleConfig(path=str(path), **merges)
    assert build_schedule(own, pp=2, microbatches=4) == merged_one_f_one_b(2, 4)
    with pytest.raises(ValueError, match=r"own.csv has merged pairs; set schedule\.overlap_moe"):
        build_schedule(ScheduleConfig(path=str(path)), pp=2, microbatches=4)


MERGES = {"schedule.overlap_moe_expert_parallel_comm": True, "ep": 2}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ep": 1}, r"has no effect with parallel\.ep = 1"),
        ({"dispatcher": "allgather"}, r"has no effect with moe\.dispatcher = allgather"),
        ({"schedule.name": "zbv", "pp": 2}, "no form with merged pairs; set schedule.name to one of auto, 1f1b"),
        ({"pp": 2, "vpp": 2, "all_warmup": True, "global_batch_size": 8}, "no forward follows a backward"),
        ({"pp": 2, "batch_p2p_comm": True}, "receives for two actions at once"),
        ({"shared_expert_ffn_hidden": 32, "shared_expert_overlap": True}, "the other side of a pair hides"),
        ({"recompute_granularity": "full"}, "cannot be recomputed part by part"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "recomputes moe, whose all-to-alls would",
        ),
        ({"recompute_granularity": "selective", "num_microbatches_with_partial_activation_checkpoints": 1}, "alike"),
        ({"transformer_impl": "transformer_engine"}, "run local layers"),
        (
            {"cuda_graph_impl": "emulated"},
            r"and the whole layer \(no module named\) reaches beyond it; name attn, moe_rou",
        ),
        ({"global_batch_size": 2, "micro_batch_size": 1}, "backward of another microbatch, but a step has 1"),
    ],
    ids=str,
)
def test_the_field_is_refused_by_name_where_it_cannot_serve(changes, sentence):
    config = presets.tiny_moe().override(MERGES | changes)
    with pytest.raises(ConfigError, match=sentence) as error:
        config.validate(4 if config.parallel.pp > 1 else 2)
    assert "schedule.overlap_moe_expert_parallel_comm" in str(error.value)


@pytest.mark.parametrize("changes", [{}, {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}])
def test_the_field_is_allowed(changes):
    presets.tiny_moe().override(MERGES | changes).validate(2)


def test_delayed_weight_gradients_need_pairs():
    with pytest.raises(ConfigError, match=r"delay_wgrad_compute = .*: has no effect with schedule\.overlap_moe"):
        presets.tiny_moe().override({"schedule.delay_wgrad_compute": True}).validate(1)


# ---- the proof ----


def test_a_table_whose_pairs_wait_for_each_other_is_refused_with_its_picture():
    with pytest.raises(ScheduleError) as error:
        verify(Schedule("circle", 2, 2, TWO))
    assert str(error.value).splitlines() == [
        "circle cannot run, these wait for each other: rank 0 -> rank 1 -> rank 0",
        "rank 0 |   0F0   [0F1&0B0]   0B1",
        "rank 1 |   1F0   [1F1&1B0]   1B1",
        "rank 0, position 2: 0B0 waits for 1B0, which rank 1 itself waits to run",
        "rank 1, position 1: 1F1 waits for 0F1, which rank 0 itself waits to run",
    ]
    verify(Schedule("one pair is enough", 2, 2, [TWO[0], ["1F0", "1B0", "1F1", "1B1"]]))


def test_a_backward_does_not_merge_with_its_own_forward():
    with pytest.raises(ScheduleError, match="0B0 waits for 0F0, which rank 0 runs in the same pair"):
        verify(Schedule("own", 1, 2, [["0F0&0B0", "0F1", "0B1"]]))


@pytest.mark.parametrize("transport", ["batched", "even_odd", "blocking"])
def test_pairs_run_over_posted_transfers_alone(transport):
    schedule = merged_one_f_one_b(2, 4)
    for refuses in (verify, lambda s, t: lower(s, 0, t)):
        with pytest.raises(ScheduleError, match=f"run over posted transfers alone, not {transport}"):
            refuses(schedule, transport)
    assert interpret(communication(schedule, "posted"), buffered=True).finished


def runs(schedule):
    """Whether all cells of a schedule run: cell after cell, each when all that its actions need has run."""
    home = {action.stage: rank for rank in range(schedule.pp) for action in schedule.actions(rank)}
    rows = [schedule.cells(rank) for rank in range(schedule.pp)]
    done, heads = set(), [0] * schedule.pp

    def ready(action):
        s, m = action.stage, action.microbatch
        if action.kind == "F":
            return s == 0 or (s - 1, "F", m) in done
        return (s, "F", m) in done and (s + 1 not in home or (s + 1, "B", m) in done)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if heads[rank] < len(row) and all(map(ready, row[heads[rank]])):
                done |= {(a.stage, a.kind, a.microbatch) for a in row[heads[rank]]}
                heads[rank] += 1
                moved = True
    return all(head == len(row) for head, row in zip(heads, rows, strict=True))


def tables_of(stages, microbatches):
    """Every row of these stages: each order of its actions, with each forward merged with the next backward or not."""
    actions = [f"{s}{kind}{m}" for s in stages for kind in "FB" for m in range(microbatches)]
    for row in itertools.permutations(actions):
        pairs = [i for i in range(len(row) - 1) if "F" in row[i] and "B" in row[i + 1]]
        for merged in itertools.product([False, True], repeat=len(pairs)):
            at = {i for i, joins in zip(pairs, merged) if joins}
            yield ["&".join(row[i : i + 2]) if i in at else row[i] for i in range(len(row)) if i - 1 not in at]


def agrees(schedule):
    try:
        verify(schedule)
    except ScheduleError as error:
        assert not runs(schedule), f"refused, but it runs:\n{error}"
        return False
    assert runs(schedule), f"accepted, but it stops:\n{schedule}"
    return True


def test_brute_force_over_all_small_tables_agrees_with_the_verifier():
    """Two ranks and two microbatches: every order of every row, and every choice of pairs."""
    rows = [list(tables_of([stage], 2)) for stage in range(2)]
    found = [agrees(Schedule("table", 2, 2, pair)) for pair in itertools.product(*rows)]
    merged = [any("&" in cell for row in pair for cell in row) for pair in itertools.product(*rows)]
    good = sum(1 for ok, joins in zip(found, merged) if ok and joins)
    assert len(found) > 1500 and good >= 10 and not all(found)


def test_drawn_tables_on_a_v_agree_with_the_verifier():
    """Four stages on two ranks, two microbatches: orders near 1F1B's, with pairs drawn."""
    rng, found = random.Random(0), []
    for _ in range(300):
        rows = []
        for stages in ([0, 3], [1, 2]):
            row = [f"{s}{k}{m}" for k in "FB" for m in range(2) for s in (stages if k == "F" else stages[::-1])]
            for _ in range(rng.randrange(4)):
                i = rng.randrange(len(row) - 1)
                row[i : i + 2] = row[i + 1], row[i]
            pairs = [i for i in range(len(row) - 1) if "F" in row[i] and "B" in row[i + 1] and rng.random() < 0.6]
            rows.append(
                ["&".join(row[i : i + 2]) if i in pairs else row[i] for i in range(len(row)) if i - 1 not in pairs]
            )
        found.append(agrees(Schedule("drawn", 4, 2, rows)))
    assert 20 < sum(found) < 280


# ---- programs ----


def test_a_pair_receives_both_messages_before_and_sends_both_after():
    text = str(lower(merged_one_f_one_b(3, 6), 1))
    lines = text.splitlines()
    at = lines.index("1F3&1B0")
    assert lines[at + 1 : at + 3] == ["    send 1F3>2 to rank 2", "    send 1B0>0 to rank 0"]
    before = [line for line in lines[at - 8 : at] if "recv" in line]
    assert before[-2:] == ["    recv 0F3>1 from rank 0", "    recv 2B0>1 from rank 2"]


def test_the_row_of_a_program_is_that_of_the_schedule():
    schedule = merged_interleaved(2, 2, 4)
    for rank in range(2):
        program = lower(schedule, rank)
        assert [step.action for step in program.steps] == schedule.actions(rank)
        pairs = [i for i in program.instructions if isinstance(i, Pair)]
        assert [str(pair) for pair in pairs] == ["&".join(map(str, c)) for c in schedule.cells(rank) if len(c) == 2]
    assert not split_backward(schedule, weight="end").has_pairs


# ---- the order and the time of a pair ----


def words(runs):
    return " | ".join(map(str, runs))


def test_the_parts_of_two_layers_take_turns():
    layers = [MOE_PARTS, MOE_PARTS]
    assert words(pair_order(layers, layers)) == (
        "B 1 combine | F 0 attention | B 1 experts | F 0 experts | B 1 attention | F 0 combine | "
        "B 0 combine | F 1 attention | B 0 experts | F 1 experts | B 0 attention | F 1 combine"
    )
    assert words(pair_order(layers[:1], layers, delay_wgrad=True)) == (
        "B 1 combine | F 0 attention | B 1 experts | W 1 experts | F 0 experts | B 1 attention | W 1 attention | "
        "F 0 combine | B 0 combine | B 0 experts | W 0 experts | B 0 attention | W 0 attention"
    )
    assert words(pair_order([MOE_PARTS], [DENSE_PARTS])) == (
        "F 0 attention | B 0 mlp | F 0 experts | B 0 attention | F 0 combine"
    )
    assert words(pair_order([MOE_PARTS], [])) == "F 0 attention | F 0 experts | F 0 combine"
    assert words(pair_order([], [DENSE_PARTS], delay_wgrad=True)) == (
        "B 0 mlp | W 0 mlp | B 0 attention | W 0 attention"
    )


@pytest.mark.parametrize("ahead", range(4))
@pytest.mark.parametrize("back", range(4))
@pytest.mark.parametrize("delay", [False, True])
def test_layers_follow_megatrons_order(ahead, back, delay):
    """The first part of each layer, and the weight gradients of attention, in the order that graphs are captured in."""
    order = pair_order([DENSE_PARTS] * ahead, [DENSE_PARTS] * back, delay_wgrad=delay)
    if not ahead or not back:
        assert len(order) == 2 * (ahead + back * (1 + delay))
        return
    wanted = get_overlap_moe_expert_parallel_comm_order([-1, 2], [back, ahead], delay)
    number = {"F": lambda run: back + run.layer + 1, "B": lambda run: -run.layer - 1, "W": lambda run: -run.layer - 1.5}
    last = [run for run in order if (run.side, run.part) in (("F", "mlp"), ("B", "attention"), ("W", "attention"))]
    found = [number[run.side](run) for run in last]
    assert sorted(found) == sorted(wanted)
    for one, other in itertools.combinations([n for n in wanted if n != int(n) or n < 0], 2):
        assert found.index(one) < found.index(other)


SIX = LayerTimes(
    forward={"attention": 2.0, "experts": 2.0, "combine": 0.5},
    backward={"combine": 0.5, "experts": 2.0, "attention": 2.0},
    weight={"experts": 1.0, "attention": 1.0},
    dispatch=1.5,
    combine=1.5,
)


@pytest.mark.parametrize("delay", [False, True])
def test_a_pair_hides_every_all_to_all_behind_the_other_side(delay):
    layers = [SIX, SIX, SIX]
    lanes = pair_lanes(layers, layers, delay_wgrad=delay)
    compute = [lane for lane in lanes if lane.lane == "compute"]
    for lane in lanes:
        if lane.lane == "all_to_all":
            under = sum(max(0.0, min(lane.end, c.end) - max(lane.start, c.start)) for c in compute)
            assert under == pytest.approx(lane.end - lane.start), lane
    assert pair_seconds(layers, layers, delay_wgrad=delay) == 3 * 11.0
    assert pair_seconds(layers, []) == 3 * (4.5 + 3.0) and pair_seconds([], layers) == 3 * (6.5 + 3.0)


def test_a_transfer_longer_than_the_other_sides_part_shows():
    slow = LayerTimes(forward=SIX.forward, backward=SIX.backward, weight=SIX.weight, dispatch=4.0, combine=1.5)
    assert pair_seconds([slow], [slow]) == 11.0 + (4.0 - 3.0) + (4.0 - 2.0)
    # the weight gradients come between: the first dispatch has as much to hide behind, and the second one waits for it
    assert pair_seconds([slow], [slow], delay_wgrad=True) == 11.0 + (4.0 - 3.0) + (4.0 - 2.0)


def test_the_simulator_gives_all_to_alls_a_lane_of_their_own():
    """Layers of 4.5 and 6.5 with 6 of all-to-all: alone 7.5 and 9.5, in a pair 11."""
    schedule = merged_one_f_one_b(1, 4)
    costs = Costs(forward=0, input_grad=0, weight_grad=0, layers=[[SIX]])
    timeline = simulate(schedule, costs)
    assert timeline.makespan == 7.5 + 3 * 11.0 + 9.5
    assert simulate(one_f_one_b(1, 4), costs).makespan == 4 * (7.5 + 9.5)
    names = [event.name for event in timeline.events if event.kind != "collective"]
    sides = ("B0 0 combine", "F1 0 attention", "B0 0 experts", "F1 0 experts", "B0 0 attention", "F1 0 combine")
    assert names[:9] == ["0F0 0 attention", "0F0 0 experts", "0F0 0 combine", *(f"0{side}" for side in sides)]
    travels = [event for event in timeline.events if event.kind == "collective"]
    assert len(travels) == 4 * 4 and all(event.duration == 1.5 for event in travels)
    assert timeline.busy.tolist() == [timeline.makespan]
    split = simulate(split_backward(one_f_one_b(1, 1), weight="end"), costs)
    parts = ["combine", "combine", "experts", "dispatch", "attention"]
    assert [event.name for event in split.events[-6:]] == [*(f"0I0 0 {part}" for part in parts), "0W0"]
    assert split.events[-1].duration == 2.0 and split.makespan == 7.5 + 9.5


def test_the_bubble_of_merged_pairs_is_that_of_their_idle_time():
    timeline = simulate(merged_one_f_one_b(3, 6))
    split = split_timeline(timeline)
    assert split.idle.tolist() == (timeline.makespan - timeline.busy).tolist() == [6.0, 6.0, 6.0]
    assert split.steady.sum() == 0
    with pytest.raises(ValueError, match="have no times of their own"):
        bubble_split(timeline.events, timeline.schedule)


def test_without_parts_a_pair_takes_as_long_as_its_actions():
    timeline = simulate(merged_one_f_one_b(1, 2), Costs(forward=1, input_grad=1, weight_grad=1))
    assert [(e.name, e.start, e.end) for e in timeline.events] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 2, 4), ("0B1", 4, 6)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="layers has 2 stages: give the layers of each of the 1"):
        simulate(merged_one_f_one_b(1, 2), Costs(layers=[[SIX], [SIX]]))
