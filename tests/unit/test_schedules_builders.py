"""Every builder's program, bubble and memory as its docstring gives them, held against the simulator; refusals."""

import gc
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import ScheduleConfig
from labkit.config.choices import SCHEDULES
from labkit.schedules import (
    Action,
    Costs,
    Schedule,
    build_schedule,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    split_backward,
    verify,
    without_backward,
    zbv,
    zero_bubble_h1,
)
from labkit.schedules.tables import from_programs

TIMES = st.integers(1, 30)
BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": lambda pp, microbatches: interleaved(pp, 3, microbatches),
    "zero_bubble_h1": zero_bubble_h1,
    "zbv": zbv,
    "dualpipe_v": dualpipe_v,
}


@st.composite
def interleaved_sizes(draw, pp=6, vpp=5, microbatches=24):
    """(pp, vpp, microbatches, group size) of a legal interleaved schedule."""
    pp, vpp = draw(st.integers(2, pp)), draw(st.integers(2, vpp))
    microbatches = draw(st.integers(pp, microbatches))
    legal = [n for n in range(pp, microbatches + 1) if microbatches % n == 0 or microbatches % n >= pp]
    return pp, vpp, microbatches, draw(st.sampled_from(legal))


def _bubble(schedule, forward, input_grad, weight_grad):
    """Makespan less the work of a rank, which is the same on all."""
    timeline = simulate(schedule, Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad))
    per_rank = schedule.num_stages // schedule.pp * schedule.num_microbatches
    return timeline.makespan - per_rank * (forward + input_grad + weight_grad)


@given(sizes=interleaved_sizes(), forward=TIMES, backward=TIMES)
@settings(max_examples=60)
def test_interleaved_bubble_and_peak_whatever_the_group_size(sizes, forward, backward):
    pp, vpp, microbatches, group = sizes
    timeline = simulate(interleaved(*sizes), Costs(forward=forward, backward=backward))
    assert timeline.makespan == (microbatches * vpp + pp - 1) * (forward + backward)
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (microbatches * vpp + pp - 1))
    assert timeline.bubble_ratio == pytest.approx((pp - 1) / (microbatches * vpp))
    peaks = [min(2 * (pp - r - 1) + (vpp - 1) * group + 1, microbatches * vpp) for r in range(pp)]
    assert timeline.peak_in_flight == peaks


@given(sizes=interleaved_sizes())
def test_interleaved_program_and_placement(sizes):
    pp, vpp, microbatches, group = sizes
    schedule, total = interleaved(*sizes), vpp * microbatches
    for rank in range(pp):
        warmup = min(2 * (pp - rank - 1) + (vpp - 1) * group, total)
        kinds = "".join(action.kind for action in schedule.actions(rank))
        assert kinds == "F" * warmup + "FB" * (total - warmup) + "B" * warmup
        assert schedule.stages_of(rank) == list(range(rank, pp * vpp, pp))


def test_interleaved_defaults_and_one_chunk():
    assert interleaved(3, 2, 6) == interleaved(3, 2, 6, 3)
    assert interleaved(3, 1, 2) == one_f_one_b(3, 2)
    assert interleaved(1, 1, 4) == one_f_one_b(1, 4)


def _warmup_of_2023(num_microbatches, num_model_chunks, pp_size, pp_rank):
    """Megatron-LM's formula in July 2023, as an article of that month quotes it."""
    total = num_microbatches * num_model_chunks
    if num_microbatches == pp_size:
        return total
    return min((pp_size - pp_rank - 1) * 2 + (num_model_chunks - 1) * pp_size, total)


@given(pp=st.integers(2, 6), vpp=st.integers(2, 5), groups=st.integers(1, 3))
def test_all_warmup_is_the_order_of_megatron_in_2023(pp, vpp, groups):
    """With more microbatches than ranks its warm-up was that of today."""
    microbatches = groups * pp
    schedule = interleaved(pp, vpp, microbatches, all_warmup=groups == 1)
    for rank in range(pp):
        warmup, total = _warmup_of_2023(microbatches, vpp, pp, rank), microbatches * vpp
        actions = schedule.actions(rank)
        assert "".join(a.kind for a in actions) == "F" * warmup + "FB" * (total - warmup) + "B" * warmup
        if groups == 1:
            forwards = [Action(chunk * pp + rank, "F", m) for chunk in range(vpp) for m in range(pp)]
            backwards = [Action(chunk * pp + rank, "B", m) for chunk in reversed(range(vpp)) for m in range(pp)]
            assert actions == [*forwards, *backwards]


@given(pp=st.integers(2, 6), vpp=st.integers(2, 5), forward=TIMES, backward=TIMES)
@settings(max_examples=30)
def test_all_warmup_takes_as_long_and_keeps_more(pp, vpp, forward, backward):
    costs = Costs(forward=forward, backward=backward)
    older, newer = (simulate(interleaved(pp, vpp, pp, all_warmup=rule), costs) for rule in (True, False))
    assert older.makespan == newer.makespan == (pp * vpp + pp - 1) * (forward + backward)
    assert older.peak_in_flight == [pp * vpp] * pp
    assert newer.peak_in_flight == [min(2 * (pp - r - 1) + (vpp - 1) * pp + 1, pp * vpp) for r in range(pp)]
    for transport in ("posted", "batched", "even_odd"):
        verify(older.schedule, transport)


@given(pp=st.integers(1, 9), extra=st.integers(0, 20), forward=TIMES, input_grad=TIMES, weight_grad=TIMES)
def test_zero_bubble_h1_bubble_peak_and_what_it_beats(pp, extra, forward, input_grad, weight_grad):
    microbatches = pp + extra
    times, hops = (forward, input_grad, weight_grad), pp - 1
    schedule = zero_bubble_h1(pp, microbatches)
    full = one_f_one_b(pp, microbatches)
    assert _bubble(schedule, *times) == hops * max(forward + input_grad - weight_grad, forward, input_grad)
    assert _bubble(full, *times) == hops * sum(times)
    assert _bubble(split_backward(full, weight="after"), *times) == hops * (forward + input_grad)
    assert simulate(schedule).peak_in_flight == [pp] * pp


@given(pp=st.integers(1, 9), microbatches=st.integers(1, 20))
def test_zero_bubble_h1_program(pp, microbatches):
    schedule = zero_bubble_h1(pp, microbatches)
    assert simulate(schedule).peak_in_flight == [min(pp, microbatches)] * pp
    for rank in range(pp if microbatches >= pp else 0):
        w, m = pp - rank - 1, microbatches
        kinds = "".join(action.kind for action in schedule.actions(rank))
        assert kinds == "F" * w + "FI" * rank + "FIW" * (m - pp + 1) + "IW" * w + "W" * rank


@given(pp=st.integers(1, 9), microbatches=st.integers(1, 30), time=TIMES)
def test_zbv_bubble_and_peak_for_equal_times(pp, microbatches, time):
    schedule = zbv(pp, microbatches)
    assert _bubble(schedule, time, time, time) == max(pp - 1, 2 * (2 * pp - 1 - microbatches)) * time
    timeline = simulate(schedule)
    assert timeline.peak_in_flight == [min(2 * pp, microbatches + r + 1, 2 * microbatches) for r in range(pp)]
    if microbatches >= 2 * pp - 1:
        assert timeline.bubble_fraction == pytest.approx((pp - 1) / (6 * microbatches + pp - 1))
        assert timeline.bubble_ratio == pytest.approx((pp - 1) / (6 * microbatches))


@given(pp=st.integers(1, 9), extra=st.integers(0, 20), data=st.data())
def test_zbv_bubble_for_other_times(pp, extra, data):
    input_grad = data.draw(TIMES)
    forward = data.draw(st.integers(1, input_grad))
    weight_grad = data.draw(st.integers((input_grad + 1) // 2, input_grad))
    assert _bubble(zbv(pp, 2 * pp - 1 + extra), forward, input_grad, weight_grad) == (pp - 1) * input_grad


@given(pp=st.integers(1, 9), extra=st.integers(0, 20), data=st.data())
def test_dualpipe_v_bubble_and_peak(pp, extra, data):
    input_grad = data.draw(TIMES)
    weight_grad = data.draw(st.integers(1, input_grad))
    forward = data.draw(st.integers(input_grad, input_grad + weight_grad))
    microbatches = 2 * pp + extra
    schedule = dualpipe_v(pp, microbatches)
    assert _bubble(schedule, forward, input_grad, weight_grad) == (pp - 1) * (forward + input_grad - weight_grad)
    timeline = simulate(schedule)
    assert timeline.makespan == 6 * microbatches + (pp - 1)
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (6 * microbatches + pp - 1))
    assert timeline.bubble_ratio == pytest.approx((pp - 1) / (6 * microbatches))
    assert timeline.peak_in_flight == [2 * pp + 1] * pp


@given(
    builder=st.sampled_from([gpipe, one_f_one_b, zero_bubble_h1]),
    pp=st.integers(1, 9),
    microbatches=st.integers(1, 30),
    time=TIMES,
)
def test_without_backward_program_and_bubble_with_one_stage_a_rank(builder, pp, microbatches, time):
    schedule = without_backward(builder(pp, microbatches))
    timeline = simulate(schedule, Costs(forward=time))
    for rank in range(pp):
        assert schedule.actions(rank) == [Action(rank, "F", m) for m in range(microbatches)]
    assert timeline.makespan == (microbatches + pp - 1) * time
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert timeline.peak_in_flight == [0] * pp


@given(sizes=interleaved_sizes(), time=TIMES)
@settings(max_examples=60)
def test_without_backward_bubble_interleaved(sizes, time):
    pp, vpp, microbatches, _ = sizes
    schedule = without_backward(interleaved(*sizes))
    timeline = simulate(schedule, Costs(forward=time))
    assert [len(schedule.actions(rank)) for rank in range(pp)] == [microbatches * vpp] * pp
    assert timeline.makespan == (microbatches * vpp + pp - 1) * time
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (microbatches * vpp + pp - 1))
    assert timeline.peak_in_flight == [0] * pp


@given(builder=st.sampled_from([zbv, dualpipe_v]), pp=st.integers(1, 9), extra=st.integers(0, 20), time=TIMES)
def test_without_backward_bubble_of_a_v(builder, pp, extra, time):
    microbatches = 2 * pp + extra if builder is dualpipe_v else 1 + extra
    timeline = simulate(without_backward(builder(pp, microbatches)), Costs(forward=time))
    assert timeline.makespan == 2 * (microbatches + pp - 1) * time
    assert timeline.bubble_fraction == pytest.approx((pp - 1) / (microbatches + pp - 1))


@pytest.mark.parametrize("builder", [zbv, dualpipe_v])
def test_a_v_has_both_ends_of_the_model_on_rank_0(builder):
    schedule = builder(4, 9)
    assert [schedule.placement(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (3, 7), (4, 8), (5, 10)])
def test_every_schedule_verifies_and_has_a_forward_only_form(name, pp, microbatches):
    schedule = BUILDERS[name](pp, 2 * pp if name == "interleaved" else microbatches)
    verify(schedule)
    forwards = without_backward(schedule)
    assert [forwards.actions(rank) for rank in range(pp)] == [
        [action for action in schedule.actions(rank) if action.kind == "F"] for rank in range(pp)
    ]
    verify(forwards)
    assert simulate(forwards).peak_in_flight == [0] * pp


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_run_no_python_line_per_action(name):
    """Row C2 of millions of actions in a tenth of a second stands on this."""
    few, many = (_lines_run(BUILDERS[name], 4, microbatches) for microbatches in (16, 256))
    assert few == many > 0


def _lines_run(builder, pp, microbatches):
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what it finds may run Python lines of others
    sys.settrace(trace)
    try:
        builder(pp, microbatches)
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize(
    ("call", "needle"),
    [
        (lambda: gpipe(0, 4), "pp is 0: give a whole number of at least 1"),
        (lambda: one_f_one_b(2, True), "microbatches is True"),
        (lambda: zero_bubble_h1(2, -1), "microbatches is -1"),
        (lambda: zbv(2.0, 4), "pp is 2.0"),
        (lambda: dualpipe_v(4, 7), "7 microbatches on 4 pipeline ranks: .* at least 8, .* to 8, or use zbv"),
        (lambda: interleaved(4, 2, 3), "3 microbatches on 4 pipeline ranks: .* at least 4; raise microbatches to 4"),
        (lambda: interleaved(4, 2, 9), "leaves a last group of 1 .* choose one of 5, 9, or take 12 microbatches$"),
        (lambda: interleaved(2, 2, 8, 16), "group size is 16; .* choose one of 2, 3, 4, 5, 6, 8$"),
        (lambda: interleaved(1, 2, 8), "pp is 1 and vpp is 2: .* set vpp to 1, or raise pp"),
        (lambda: interleaved(2, 0, 8), "vpp is 0"),
        (lambda: interleaved(2, 2, 4, all_warmup=True), "4 microbatches on 2 pipeline ranks; .* as many microbatches"),
        (lambda: interleaved(4, 1, 4, all_warmup=True), "all_warmup: vpp is 1; it is a rule of interleaving"),
    ],
)
def test_refusals_say_what_is_allowed(call, needle):
    with pytest.raises(ValueError, match=needle):
        call()


@pytest.mark.parametrize(
    ("name", "vpp", "expected"),
    [
        ("auto", 1, one_f_one_b(2, 4)),
        ("auto", 2, interleaved(2, 2, 4)),
        ("gpipe", 1, gpipe(2, 4)),
        ("1f1b", 1, one_f_one_b(2, 4)),
        ("interleaved", 3, interleaved(2, 3, 4)),
        ("zero_bubble_h1", 1, zero_bubble_h1(2, 4)),
        ("zbv", 1, zbv(2, 4)),
        ("zbv", 2, zbv(2, 4)),
        ("dualpipe_v", 2, dualpipe_v(2, 4)),
    ],
)
def test_a_config_names_its_schedule(name, vpp, expected):
    built = build_schedule(ScheduleConfig(name=name), pp=2, vpp=vpp, microbatches=4)
    assert built == expected and built.name == expected.name


@pytest.mark.parametrize(("name", "row"), SCHEDULES.items())
def test_a_row_says_what_its_schedule_is(name, row):
    vpp, least = 3 if row.chunks is None else 1, max(1, 4 * row.least_microbatches)
    schedule = build_schedule(ScheduleConfig(name=name), pp=4, vpp=vpp, microbatches=8)
    assert schedule.num_stages == 4 * (row.chunks or vpp)
    assert ("W" in str(schedule)) == row.splits_backward
    if row.chunks is not None:
        assert build_schedule(ScheduleConfig(name=name), pp=4, microbatches=least).num_microbatches == least
    if least > 1:
        with pytest.raises(ValueError, match=f"at least {least}"):
            build_schedule(ScheduleConfig(name=name), pp=4, microbatches=least - 1)


def test_a_config_gives_group_size_and_file(tmp_path):
    config = ScheduleConfig(name="interleaved", microbatch_group_size=4)
    assert build_schedule(config, pp=2, vpp=2, microbatches=4) == interleaved(2, 2, 4, 4)
    early = build_schedule(ScheduleConfig(all_warmup=True), pp=4, vpp=2, microbatches=4)
    assert early == interleaved(4, 2, 4, all_warmup=True) != interleaved(4, 2, 4)
    for name in ("auto", "interleaved"):
        assert build_schedule(ScheduleConfig(name=name), pp=1, microbatches=4) == one_f_one_b(1, 4)
    path = tmp_path / "mine.csv"
    path.write_text(zbv(2, 4).to_csv())
    mine = build_schedule(ScheduleConfig(path=str(path)), pp=2, microbatches=4)
    assert mine == zbv(2, 4) and mine.name == "mine" and isinstance(mine, Schedule)


@pytest.mark.parametrize(
    ("config", "sizes", "needle"),
    [
        (
            ScheduleConfig(name="2f2b"),
            {},
            f"'2f2b'; choose one of auto, {', '.join(SCHEDULES)}, or give schedule.path",
        ),
        (ScheduleConfig(name="gpipe"), {"vpp": 2}, "'gpipe', which has 1 stage per rank, but vpp is 2: leave .* at 1"),
        (ScheduleConfig(name="zbv"), {"vpp": 3}, "'zbv', which has 2 stages per rank, but vpp is 3"),
        (ScheduleConfig(name="interleaved"), {}, "vpp is 1: give parallel.vpp at least 2, or choose 1f1b"),
        (ScheduleConfig(name="dualpipe_v"), {"microbatches": 3}, "needs at least 4"),
        (ScheduleConfig(name="zbv", all_warmup=True), {}, "all_warmup is a rule of interleaving, .* is 'zbv'"),
        (ScheduleConfig(all_warmup=True), {}, "all_warmup is a rule of interleaving, .* is 'auto'"),
        (ScheduleConfig(path="nowhere.csv"), {}, "nowhere.csv: no such file"),
    ],
)
def test_a_config_that_names_no_possible_schedule_is_refused(config, sizes, needle):
    with pytest.raises(ValueError, match=needle):
        build_schedule(config, **({"pp": 2, "microbatches": 4} | sizes))


def test_a_builder_that_forgot_its_return_is_named(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "gpipe", SCHEDULES["gpipe"]._replace(builder="builtins:print"))
    with pytest.raises(ValueError, match=r"^builtins:print returned NoneType; a builder returns a labkit"):
        build_schedule(ScheduleConfig(name="gpipe"), pp=2, microbatches=4)


def test_a_file_for_another_run_is_refused(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(gpipe(2, 4).to_csv())
    for sizes, needle in (
        ({"pp": 3, "microbatches": 4}, "2 ranks, the run has 3; set parallel.pp to 2"),
        ({"pp": 2, "microbatches": 5}, "4 microbatches, the run has 5; set train.global_batch_size to 4 x"),
    ):
        with pytest.raises(ValueError, match=needle):
            build_schedule(ScheduleConfig(path=str(path)), **sizes)


def test_a_phase_of_negative_times_is_refused_by_rank_and_words():
    """The likeliest slip of an own schedule: a warm-up that is longer than the microbatches."""
    program = [(5, "F"), (4 - 5, "F B"), (5, "B")]
    with pytest.raises(ValueError, match=r"mine: the program of rank 0 has a phase of -1 times `F B`; .* at most 4"):
        from_programs("mine", 4, [program], lambda rank, _: rank)


def test_a_word_of_no_kind_is_refused_by_rank():
    with pytest.raises(ValueError, match="mine: the program of rank 0 has `Q`; words begin with F, B, I, W"):
        from_programs("mine", 4, [[(4, "F Q")]], lambda rank, _: rank)
