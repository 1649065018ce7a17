"""What `verify` refuses, in which words, and that it leaves in peace what can run."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.cli import main
from labkit.schedules import (
    Schedule,
    ScheduleError,
    dualpipe_v,
    get_schedule_table,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    verify,
    without_backward,
    zbv,
    zero_bubble_h1,
)

ALL = [gpipe(4, 6), one_f_one_b(4, 6), interleaved(4, 2, 8), zero_bubble_h1(4, 6), zbv(4, 8), dualpipe_v(4, 8)]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("transport", ["posted", "batched", "even_odd"])
def test_every_builder_is_accepted_forward_only_too(schedule, transport):
    verified, simulated = verify(schedule, transport), simulate(schedule)
    assert np.array_equal(verified.start, simulated.start)
    assert np.array_equal(verified.end, simulated.end)
    assert verify(without_backward(schedule), transport).peak_in_flight == [0] * 4


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_of_the_builders_only_gpipe_survives_blocking_transfers(schedule):
    if schedule.name == "GPipe":
        verify(schedule, "blocking")
    else:
        with pytest.raises(
            ScheduleError, match=r"stops over blocking transfers, these wait for each other: rank \d -> "
        ):
            verify(schedule, "blocking")


def test_a_deadlock_names_the_circle_with_its_transfers_and_marks_the_cells():
    with pytest.raises(ScheduleError) as caught:
        verify(one_f_one_b(2, 3), "blocking")
    assert str(caught.value).splitlines() == [
        "1F1B stops over blocking transfers, these wait for each other: rank 0 -> rank 1 -> rank 0",
        "rank 0 | 0F0  0F1 [0B0] 0F2  0B1  0B2",
        "rank 1 | 1F0  1B0 [1F1] 1B1  1F2  1B2",
        "rank 0, position 2: before this action it waits: send 0F1>1 to rank 1",
        "rank 1, position 2: before this action it waits: send 1B0>0 to rank 0",
    ]


def test_messages_that_cross_are_named():
    """Rank 1 wants microbatch 1 first; blocking transfers carry no names, and nothing would notice."""
    crossed = Schedule.from_csv("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0")
    with pytest.raises(ScheduleError, match="messages cross:\n0F0>1 met the receive of 0F1>1, rank 0 to rank 1"):
        verify(crossed, "blocking")
    for transport in ("posted", "batched", "even_odd"):
        verify(crossed, transport)


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("0F0,0B0,0F1\n1F0,1B0,1F1,1B1", ["0B1 is missing"]),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", ["rank 0 -> rank 1 -> rank 0", "[0B0]", "[1F1]", "0B0 waits for 1B0"]),
        ("0F0,0B0,0B1,0F1\n1F0,1B0,1F1,1B1", ["[0B1]", "rank 0, position 2", "0B1 is backward number 2 of"]),
        ("0F0,2B0,2F0,0B0\n1F0,3F0,3B0,1B0", ["[2B0]", "2B0 is backward number 1 of chunk 2 after 0 forwards"]),
        ("0F0,0I0,0W0,0W0", ["0W0 appears more than once"]),
        ("0F0,0W0,0I0", ["0W0 waits for 0I0"]),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_with_its_picture(text, needles):
    with pytest.raises(ScheduleError) as caught:
        verify(Schedule.from_csv(text))
    for needle in needles:
        assert needle in str(caught.value)


def test_a_circle_says_of_each_rank_whether_it_is_busy_or_waits_itself():
    """Rank 1 has its two forwards the wrong way round: 4F0 needs 3F0, which needs 2F0, which needs 1F0. Ranks 0 and 2
    would run next what the others want; rank 1 alone has something before it."""
    swapped = Schedule.from_csv("0F0,3F0,3B0,0B0\n4F0,1F0,4B0,1B0\n2F0,5F0,5B0,2B0", "swapped")
    with pytest.raises(ScheduleError) as caught:
        verify(swapped)
    assert str(caught.value).splitlines() == [
        "swapped cannot run, these wait for each other: rank 0 -> rank 2 -> rank 1 -> rank 0",
        "rank 0 | 0F0 [3F0] 3B0  0B0",
        "rank 1 |[4F0] 1F0  4B0  1B0",
        "rank 2 |[2F0] 5F0  5B0  2B0",
        "rank 0, position 1: 3F0 waits for 2F0, which rank 2 itself waits to run",
        "rank 1, position 0: 4F0 waits for 3F0, which rank 0 itself waits to run",
        "rank 2, position 0: 2F0 waits for 1F0, which rank 1 runs after 4F0",
    ]


# ---- memory ----
@given(pp=st.integers(1, 6), microbatches=st.integers(1, 9))
def test_a_limit_at_the_peak_is_kept_and_one_below_it_is_not(pp, microbatches):
    schedule = one_f_one_b(pp, microbatches)
    peaks = [min(pp - rank, microbatches) for rank in range(pp)]
    assert verify(schedule, memory_limit=peaks).peak_in_flight == peaks
    verify(schedule, memory_limit=max(peaks))
    if max(peaks) > 1:
        with pytest.raises(ScheduleError, match="needs more memory than it may"):
            verify(schedule, memory_limit=max(peaks) - 1)


def test_the_action_that_goes_over_the_limit_is_marked():
    with pytest.raises(ScheduleError) as caught:
        verify(one_f_one_b(3, 4), memory_limit=[2, 2, 1])
    assert str(caught.value).splitlines() == [
        "1F1B needs more memory than it may:",
        "rank 0 | 0F0  0F1 [0F2] 0B0  0F3  0B1  0B2  0B3",
        "rank 1 | 1F0  1F1  1B0  1F2  1B1  1F3  1B2  1B3",
        "rank 2 | 2F0  2B0  2F1  2B1  2F2  2B2  2F3  2B3",
        "rank 0, position 2: 0F2 puts 3 activations in flight, the limit is 2",
    ]


def test_a_split_backward_frees_its_activation_with_the_weight_gradient():
    late = Schedule.from_csv("0F0,0I0,0F1,0I1,0W0,0W1")
    verify(late, memory_limit=2)
    with pytest.raises(ScheduleError, match=r"position 2: 0F1 puts 2 activations in flight"):
        verify(late, memory_limit=1)


@pytest.mark.parametrize("limit", [0, -1, [2, 2], [2, 2, 0], [[2, 2, 2]]])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ValueError, match="one for each of the 3 ranks"):
        verify(one_f_one_b(3, 4), memory_limit=limit)


def test_forwards_alone_keep_nothing():
    verify(without_backward(gpipe(2, 8)), memory_limit=1)


# ---- Megatron's rules ----
def _by_table(pp, chunks, microbatches, group):
    """All forwards of Megatron's table, then all backwards, whatever the sizes; it can run."""
    table = get_schedule_table(microbatches, chunks, group)
    rows = [
        [f"{chunk * pp + rank}F{m}" for m, chunk in table]
        + [f"{(chunks - 1 - chunk) * pp + rank}B{m}" for m, chunk in table]
        for rank in range(pp)
    ]
    return Schedule("mine", pp * chunks, microbatches, rows)


@given(pp=st.integers(2, 4), chunks=st.integers(2, 3), microbatches=st.integers(1, 9), data=st.data())
def test_rules_on_m_n_and_pp(pp, chunks, microbatches, data):
    """Megatron: PP <= N <= M, and M mod N is 0 or at least PP. labkit itself runs them all."""
    group = data.draw(st.integers(1, microbatches))
    schedule = _by_table(pp, chunks, microbatches, group)
    verify(schedule)
    if group >= pp and (microbatches % group == 0 or microbatches % group >= pp):
        verify(schedule, megatron_rules=True)
    else:
        with pytest.raises(
            ScheduleError, match=rf"M = {microbatches} microbatches in groups of N = {group} on PP = {pp}"
        ):
            verify(schedule, megatron_rules=True)


@pytest.mark.parametrize(
    ("sizes", "needle"),
    [
        ((4, 2, 3, 3), "M = 3 microbatches are fewer than the ranks"),
        ((4, 2, 8, 2), "a group is smaller than the pipeline"),
        ((3, 2, 7, 5), "M mod N = 2"),
    ],
)
def test_the_broken_rule_is_named_at_the_end_of_the_first_group(sizes, needle):
    with pytest.raises(ScheduleError) as caught:
        verify(_by_table(*sizes), megatron_rules=True)
    assert needle in str(caught.value)
    assert f"rank 0, position {sizes[3]}: " in str(caught.value)


def test_what_is_no_table_is_not_held_to_the_rules():
    backwards = Schedule.from_csv("0F1,2F1,0F0,2F0,2B1,0B1,2B0,0B0\n1F1,3F1,3B1,1F0,1B1,3F0,3B0,1B0", "from the last")
    v = Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    for schedule in (backwards, v, one_f_one_b(4, 2), *ALL):
        verify(schedule, megatron_rules=True)


def test_the_command_says_what_megatron_would_refuse(tmp_path, capsys):
    table = tmp_path / "table.csv"
    table.write_text(_by_table(4, 2, 3, 3).to_csv())
    assert main(["order", "--verify", str(table)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(
        f"posted: yes, it runs\nin Megatron: no, {table} is interleaved with M = 3 microbatches in groups"
    )
    assert "M = 3 microbatches are fewer than the ranks" in told


def test_verifying_many_actions_takes_columns_not_objects():
    schedule = interleaved(16, 4, 512)
    assert len(schedule) == 65_536
    tracemalloc.start()
    verify(schedule)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(schedule), f"{peak / len(schedule):.0f} bytes an action; one Python object takes more"
