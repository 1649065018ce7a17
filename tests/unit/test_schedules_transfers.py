"""Lowered programs, interpreted: on random schedules that can run, over each transport."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import PLACEMENTS, random_legal_schedule

from labkit.schedules import (
    Op,
    Schedule,
    ScheduleError,
    Timeline,
    communication,
    get_schedule_table,
    gpipe,
    interleaved,
    interpret,
    lower,
    lowering,
    one_f_one_b,
    simulate,
    verifier,
    verify,
    without_backward,
)
from labkit.schedules.verifier import certificate

SEEDS = {"seed": st.integers(0, 10**9), "placement": st.sampled_from(PLACEMENTS)}
INTERPRETED = {
    "posted": {"buffered": True},
    "batched": {},
    "even_odd": {"mirrored": True},
    "blocking": {"mirrored": True},
}


@given(**SEEDS, forward_only=st.booleans())
def test_what_can_run_is_accepted_and_its_programs_end(seed, placement, forward_only):
    schedule = random_legal_schedule(seed, placement=placement, forward_only=forward_only)
    for transport in ("posted", "batched", "even_odd"):
        assert verify(schedule, transport).makespan > 0
        outcome = interpret(communication(schedule, transport), **INTERPRETED[transport])
        assert str(outcome) == "finished", f"{transport}: {outcome}\n{schedule}"


@given(**SEEDS)
def test_blocking_is_accepted_where_the_interpreter_ends(seed, placement):
    schedule = random_legal_schedule(seed, placement=placement)
    outcome = interpret(communication(schedule, "blocking"), mirrored=True)
    if str(outcome) == "finished":
        verify(schedule, "blocking")
    else:
        with pytest.raises(ScheduleError, match="wait for each other" if outcome.circle else "cross"):
            verify(schedule, "blocking")


@given(**SEEDS)
def test_every_message_has_its_two_ends(seed, placement):
    schedule = random_legal_schedule(seed, placement=placement)
    wanted = Counter()
    for stage in range(schedule.num_stages - 1):
        here, there = schedule.placement(stage), schedule.placement(stage + 1)
        if here != there:
            for m in range(schedule.num_microbatches):
                wanted[f"{stage}F{m}>{stage + 1}", here, there] += 1
                wanted[f"{stage + 1}B{m}>{stage}", there, here] += 1
    for transport in ("batched", "even_odd", "blocking"):
        sent, received = Counter(), Counter()
        for rank in range(schedule.pp):
            for transfer in (t for slot in lower(schedule, rank, transport).slots for t in slot):
                message = transfer.message
                assert rank == (message.source if transfer.operation == "send" else message.target)
                assert transfer.peer == (message.target if transfer.operation == "send" else message.source)
                assert transfer.channel == (transport == "even_odd" and schedule.pp == 2 and message.source == 1)
                ends = sent if transfer.operation == "send" else received
                ends[str(message), message.source, message.target] += 1
        assert sent == received == wanted


@given(**SEEDS, ahead=st.integers(0, 4))
def test_posted_receives_come_in_the_order_of_the_sends(seed, placement, ahead):
    schedule = random_legal_schedule(seed, placement=placement)
    programs = [lower(schedule, rank, receives_ahead=ahead) for rank in range(schedule.pp)]
    assert all(slot == () for program in programs for slot in program.slots)
    for target, program in enumerate(programs):
        for source, messages in program.incoming.items():
            sent = [t.message for t in _transfers(programs[source], "send") if t.peer == target]
            posted = [t.message for t in _transfers(program, "post") if t.peer == source]
            assert messages == sent == posted


@given(**SEEDS, ahead=st.integers(0, 4))
def test_posted_programs_start_and_end_every_transfer_and_open_few_ahead(seed, placement, ahead):
    schedule = random_legal_schedule(seed, placement=placement)
    for rank in range(schedule.pp):
        opened, sends, here = [], [], set()
        program = lower(schedule, rank, receives_ahead=ahead)
        furthest, posted = Counter(), Counter()
        for instruction in program.instructions:
            for transfer in getattr(instruction, "transfers", ()):
                if instruction.verb == "post":
                    opened.append(transfer)
                    posted[transfer.peer] += 1
                elif instruction.verb == "send":
                    assert transfer.message in here
                    sends.append(transfer)
                elif instruction.verb == "recv":
                    number = 1 + program.incoming[transfer.peer].index(transfer.message)
                    furthest[transfer.peer] = max(furthest[transfer.peer], number)
                    assert posted[transfer.peer] <= furthest[transfer.peer] + ahead
                    opened.remove(transfer)
                    here.add(transfer.message)
                else:
                    sends.remove(transfer)
            if instruction.verb in "FBIW":
                assert instruction.needs is None or instruction.needs.is_local or instruction.needs in here
                here.add(instruction.gives)
        assert not sends and not opened


def _transfers(program, verb):
    return [t for i in program.instructions if i.verb == verb for t in i.transfers]


@given(**SEEDS)
def test_sends_follow_their_action_and_receives_come_before_theirs(seed, placement):
    schedule = random_legal_schedule(seed, placement=placement)
    for rank in range(schedule.pp):
        for transport in ("batched", "even_odd", "blocking"):
            for number, slot in enumerate(lower(schedule, rank, transport).slots):
                for transfer in slot:
                    if transfer.operation == "send":
                        assert number == transfer.message.produced + 1
                    else:
                        assert number <= transfer.message.consumed
                        assert transport != "blocking" or number == transfer.message.consumed


@given(**SEEDS, delay=st.integers(1, 3))
@settings(max_examples=50)
def test_a_time_line_that_is_not_the_schedules_own_has_no_certificate(seed, placement, delay):
    """The certificate is asked of numbers, not of the way they were made: put one producer's end off."""
    schedule = random_legal_schedule(seed, pp=3, placement=placement)
    timeline = simulate(schedule)
    assert certificate(schedule, timeline)
    sends = [m for rank in range(3) for step in lower(schedule, rank).steps if (m := step.gives) and not m.is_local]
    message = sends[seed % len(sends)]
    end = timeline.end.copy()
    reader = schedule.offsets[message.target] + message.consumed
    end[schedule.offsets[message.source] + message.produced] = timeline.start[reader] + delay
    assert not certificate(schedule, Timeline(schedule, timeline.start, end))


def test_what_a_slot_holds_in_1f1b():
    """Rank 2 of 4 runs 2F0 from 2 to 3, 2F1 from 3 to 4 and 2B0 from 6, when the last rank has ended 3B0.

    1F0, 1F1, 1F2 end at 2, 3, 4: each falls into the slot that the rank reaches then, with what it sends itself.
    """
    program = lower(one_f_one_b(4, 4), 2, "batched")
    assert str(program).splitlines()[:7] == [
        "    gather parameters of chunk 0",
        "    recv 1F0>2 from rank 1",
        "2F0",
        "    recv 1F1>2 from rank 1 + send 2F0>3 to rank 3",
        "2F1",
        "    recv 1F2>2 from rank 1 + send 2F1>3 to rank 3 + recv 3B0>2 from rank 3",
        "2B0",
    ]
    assert [str(t) for t in program.slots[-1]] == ["send 2B3>1 to rank 1"]


def test_where_the_sends_are_when_receives_are_posted():
    """Rank 0 of 2 sends each activation right after its forward, and the gradient that comes back shows it was read."""
    assert str(lower(one_f_one_b(2, 3), 0)).splitlines() == [
        "    gather parameters of chunk 0",
        "0F0",
        "    send 0F0>1 to rank 1",
        "0F1",
        "    send 0F1>1 to rank 1",
        "    post 1B0>0 from rank 1",
        "    recv 1B0>0 from rank 1",
        "    post 1B1>0, 1B2>0 from rank 1",
        "0B0",
        "    sent 0F0>1 to rank 1",
        "0F2",
        "    send 0F2>1 to rank 1",
        "    recv 1B1>0 from rank 1",
        "0B1",
        "    sent 0F1>1 to rank 1",
        "    recv 1B2>0 from rank 1",
        "0B2",
        "    synchronise gradients of chunk 0",
        "    sent 0F2>1 to rank 1",
    ]


def test_even_ranks_send_first_and_two_ranks_use_two_channels():
    four = [lower(one_f_one_b(4, 4), rank, "even_odd").slots for rank in (1, 2)]
    both_ways = [
        [t for t in slot if {t.message.source, t.message.target} == {1, 2}] for slots in four for slot in slots
    ]
    assert {len(slot) for slot in both_ways} == {0, 1, 2}
    odd, even = ([str(t) for slot in slots for t in slot] for slots in four)
    assert even[:3] == ["recv 1F0>2 from rank 1", "send 2F0>3 to rank 3", "recv 1F1>2 from rank 1"]
    assert odd[:3] == ["recv 0F0>1 from rank 0", "recv 0F1>1 from rank 0", "send 1F0>2 to rank 2"]
    two = [t for rank in (0, 1) for slot in lower(one_f_one_b(2, 3), rank, "even_odd").slots for t in slot]
    assert {(t.message.source, t.channel) for t in two} == {(0, 0), (1, 1)}
    assert next(str(t) for t in two if t.channel) == "recv 1B0>0 from rank 1, second channel"


def _in_megatrons_order(schedule):
    """The slots of even/odd with Megatron's order alone, whatever the moments."""
    even = [("send", "F"), ("recv", "F"), ("send", "B"), ("recv", "B")]
    odd = [("recv", "F"), ("send", "F"), ("recv", "B"), ("send", "B")]
    return [
        [
            [Op(t.operation, t.peer, str(t.message), t.channel) for t in sorted(slot, key=lambda t: place(rank, t))]
            for slot in lower(schedule, rank, "even_odd").slots
        ]
        for rank in range(schedule.pp)
        for place in [lambda rank, t: (odd if rank % 2 else even).index((t.operation, t.message.kind))]
    ]


@given(builder=st.sampled_from([gpipe, one_f_one_b]), pp=st.integers(1, 6), microbatches=st.integers(1, 8))
def test_megatrons_order_is_enough_for_gpipe_and_1f1b(builder, pp, microbatches):
    assert interpret(_in_megatrons_order(builder(pp, microbatches)), mirrored=True).finished


def test_megatrons_order_would_hang_nccl_in_a_v_where_the_moments_do_not():
    v = Schedule.from_csv("0F0,5F0,5B0,0B0\n1F0,4F0,4B0,1B0\n2F0,3F0,3B0,2B0")
    assert interpret(_in_megatrons_order(v), mirrored=True).circle == [
        "rank 1 waits: recv 3F0>4 from rank 2",
        "rank 2 waits: recv 1F0>2 from rank 1",
    ]
    assert interpret(_in_megatrons_order(v)).finished, "gloo, which matches by direction, forgives it"
    assert verify(v, "even_odd").makespan == 6 * 1 + 6 * 2


def test_verify_refuses_even_odd_that_would_hang_nccl(monkeypatch):
    """With Megatron's order alone put in place of the moments, the V of three ranks must no longer pass."""
    v = Schedule.from_csv("0F0,5F0,5B0,0B0\n1F0,4F0,4B0,1B0\n2F0,3F0,3B0,2B0", "V")
    verify(v, "even_odd")
    order = {("send", "F"): 0, ("recv", "F"): 1, ("send", "B"): 2, ("recv", "B"): 3}
    monkeypatch.setattr(
        lowering,
        "_even_odd",
        lambda slot, rank: sorted(slot, key=lambda t: order[t.operation, t.message.kind] ^ (rank % 2)),
    )
    with pytest.raises(ScheduleError) as caught:
        verify(v, "even_odd")
    assert str(caught.value).splitlines() == [
        "V stops over even_odd transfers, these wait for each other: rank 1 -> rank 2 -> rank 1",
        "rank 0 | 0F0  5F0  5B0  0B0",
        "rank 1 | 1F0 [4F0] 4B0  1B0",
        "rank 2 |[2F0] 3F0  3B0  2B0",
        "rank 1, position 1: before this action it waits: recv 3F0>4 from rank 2",
        "rank 2, position 0: before this action it waits: recv 1F0>2 from rank 1",
    ]


@pytest.mark.parametrize("slots_early", [1, -1])
def test_verify_asks_for_the_certificate_of_batches(monkeypatch, slots_early):
    """Every receive a slot too early, which hangs, or too late, which reads what has not come: no schedule passes."""
    schedule, true_slots = one_f_one_b(3, 4), lowering.receive_slots
    verify(schedule, "batched")

    def shifted(*arguments):
        positions, slots, moments = true_slots(*arguments)
        return positions, np.maximum(slots - slots_early, 0), moments

    for module in (lowering, verifier):
        monkeypatch.setattr(module, "receive_slots", shifted)
    if slots_early > 0:
        assert not interpret(communication(schedule, "batched")).finished
    with pytest.raises(RuntimeError, match="1F1B has no certificate"):
        verify(schedule, "batched")


def test_an_unknown_transport_is_refused():
    for call in (lambda: lower(one_f_one_b(2, 2), 0, "pigeon"), lambda: verify(one_f_one_b(2, 2), "pigeon")):
        with pytest.raises(ValueError, match="'pigeon'; choose one of posted, batched, even_odd, blocking"):
            call()


def test_a_schedule_with_a_circle_has_no_slots():
    stuck = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError, match="wait for each other"):
        lower(stuck, 0, "batched")
    assert np.array_equal([len(slot) for slot in lower(stuck, 0, "blocking").slots], [0, 2, 0, 2, 0])


# ---- gradients and parameters ----
def _around(program):
    """Of each action: the chunks gathered before it, and those synchronised after it."""
    around, gathered = [], ()
    for instruction in program.instructions:
        if instruction.verb == "gather":
            gathered += (instruction.chunk,)
        elif instruction.verb == "synchronise":
            step, before, after = around[-1]
            around[-1] = (step, before, (*after, instruction.chunk))
        elif instruction.verb in "FBIW":
            around.append((instruction, gathered, ()))
            gathered = ()
    return around


@given(pp=st.integers(2, 5), chunks=st.integers(2, 4), groups=st.integers(1, 3))
def test_synchronisation_is_aligned_as_in_megatron(pp, chunks, groups):
    """Backward k of rank r starts the synchronisation of the chunk whose last microbatch is entry k - r of the table;
    forward k the gathering of the chunk after the one whose first microbatch is entry k + r; chunks count from 0."""
    microbatches = pp * groups
    schedule, table = interleaved(pp, chunks, microbatches), get_schedule_table(microbatches, chunks, pp)
    for rank in range(pp):
        around = _around(lower(schedule, rank))
        backwards = [after for step, _, after in around if step.verb == "B"]
        forwards = [before for step, before, _ in around if step.verb == "F"]
        left = set(range(chunks))
        for k, launched in enumerate(backwards):
            m, chunk = table[k - rank] if k >= rank else (None, None)
            due = (chunks - 1 - chunk,) if m == microbatches - 1 else ()
            left -= set(due)
            if k + 1 == len(backwards):
                due += tuple(sorted(left))
            assert set(launched) == set(due) and len(launched) == len(due), (rank, k)
        for k, gathered in enumerate(forwards):
            m, chunk = table[k + rank] if k + rank < len(table) else (None, None)
            following = (chunk + 1,) if m == 0 and 1 < chunk + 1 < chunks else ()
            assert gathered == ((0, 1, *following) if k == 0 else following), (rank, k)
        assert all(after == () for step, _, after in around if step.verb == "F")


@given(**SEEDS)
def test_every_chunk_is_synchronised_once_after_its_gradients_and_gathered_once_before_its_forwards(seed, placement):
    schedule = random_legal_schedule(seed, placement=placement)
    for rank in range(schedule.pp):
        around = _around(lower(schedule, rank))
        steps = [step for step, _, _ in around]
        synchronised = [(chunk, i) for i, (_, _, after) in enumerate(around) for chunk in after]
        gathered = [(chunk, i) for i, (_, before, _) in enumerate(around) for chunk in before]
        chunks = list(range(len(schedule.stages_of(rank))))
        assert sorted(chunk for chunk, _ in synchronised) == sorted(chunk for chunk, _ in gathered) == chunks
        for chunk, i in synchronised:
            assert max(j for j, s in enumerate(steps) if s.chunk == chunk and s.action.kind in "BW") <= i
        for chunk, i in gathered:
            assert i <= min(j for j, s in enumerate(steps) if s.chunk == chunk)


def test_a_v_is_synchronised_when_its_slowest_rank_is():
    """Up the V the last rank has the lowest stage and gets its gradient last, so the others wait for it."""
    v = Schedule.from_csv("0F0,3F0,0F1,3F1,3B0,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,2B1,1B0,1B1")
    first, second = ([after for step, _, after in _around(lower(v, rank)) if step.verb == "B"] for rank in (0, 1))
    assert first == [(), (), (), (0, 1)]  # chunk 1, stage 3: its last backward is number 2, the lowest stage one later
    assert second == [(), (1,), (), (0,)]  # chunk 1 is stage 2, the lowest; chunk 0 is stage 1, one above stage 0


def test_without_backward_nothing_is_synchronised():
    around = _around(lower(without_backward(interleaved(2, 2, 2)), 1))
    assert all(before == after == () for _, before, after in around)


@given(**SEEDS)
def test_of_varying_lengths_slots_go_by_moment_on_channels_of_one_direction(seed, placement):
    """A receive then waits for its sizes while it is posted: by Megatron's order 37 of 2,382 random schedules stop."""
    schedule = random_legal_schedule(seed, placement=placement)
    for rank in range(schedule.pp):
        batched, even_odd = (lower(schedule, rank, kind, receives_ahead=0) for kind in ("batched", "even_odd"))
        assert even_odd.slots == batched.slots
        channels = {(t.operation, t.peer): t.channel for slot in even_odd.slots for t in slot}
        for (operation, peer), channel in channels.items():
            other = channels.get(("recv" if operation == "send" else "send", peer))
            assert other != channel
