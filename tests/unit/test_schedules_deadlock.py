"""The interpreter of sends and receives, and what it proves about the transports of GPipe and 1F1B."""

from hypothesis import given
from hypothesis import strategies as st

from labkit.schedules import Op, Schedule, communication, gpipe, interpret, lower, one_f_one_b

SIZES = {"pp": st.integers(1, 7), "microbatches": st.integers(1, 9)}


def _exchange(first_rank, second_rank):
    ops = {"s": lambda peer: Op("send", peer, f"from {1 - peer}"), "r": lambda peer: Op("recv", peer, f"from {peer}")}
    return [[[ops[c](1)] for c in first_rank], [[ops[c](0)] for c in second_rank]]


def test_both_sending_first_wait_for_ever_and_the_circle_is_named():
    outcome = interpret(_exchange("sr", "sr"))
    assert not outcome.finished
    assert outcome.circle == ["rank 0 waits: send from 0 to rank 1", "rank 1 waits: send from 1 to rank 0"]
    assert "wait for each other" in str(outcome)


def test_what_helps_buffers_parity_or_a_batch():
    assert interpret(_exchange("sr", "sr"), buffered=True).finished
    assert interpret(_exchange("sr", "rs")).finished
    batched = [[[op for step in program for op in step]] for program in _exchange("sr", "sr")]
    assert interpret(batched).finished


def test_everybody_receiving_first_is_stuck_even_with_buffers():
    assert not interpret(_exchange("rs", "rs"), buffered=True).finished


def test_a_neighbour_that_has_ended_is_named():
    outcome = interpret([[[Op("recv", 1, "x")]], []])
    assert outcome.circle == ["rank 0 waits: recv x from rank 1, which has reached its end"]


def test_messages_pair_in_posting_order_and_may_cross():
    """Two stages: both neighbours are the other rank (Megatron-LM pull request 5271)."""
    beside = [
        [Op("send", o, f"gradient of {r}"), Op("recv", o, f"activation of {o}"),
         Op("send", o, f"activation of {r}"), Op("recv", o, f"gradient of {o}")]
        for r, o in ((0, 1), (1, 0))
    ]  # fmt: skip
    assert interpret([[ops] for ops in beside]).crossed == [
        "gradient of 0 met the receive of activation of 0, rank 0 to rank 1",
        "activation of 0 met the receive of gradient of 0, rank 0 to rank 1",
        "gradient of 1 met the receive of activation of 1, rank 1 to rank 0",
        "activation of 1 met the receive of gradient of 1, rank 1 to rank 0",
    ]
    ours = [[ops[0], ops[3], ops[2], ops[1]] for ops in beside]
    assert interpret([[ops] for ops in ours]).crossed == []
    assert str(interpret([[ops] for ops in ours])) == "finished"
    assert str(interpret([[ops] for ops in beside])).splitlines()[:2] == [
        "finished",
        "crossed: gradient of 0 met the receive of activation of 0, rank 0 to rank 1",
    ]


@given(builder=st.sampled_from([gpipe, one_f_one_b]), **SIZES)
def test_gpipe_and_1f1b_end_batched_and_posted(builder, pp, microbatches):
    schedule = builder(pp, microbatches)
    for transport, buffered in (("batched", False), ("posted", True)):
        outcome = interpret(communication(schedule, transport), buffered=buffered)
        assert outcome.finished, f"{transport}: {outcome}"
        assert outcome.crossed == []


@given(pp=st.integers(2, 7), microbatches=st.integers(2, 9))
def test_blocking_sends_stop_1f1b_but_not_gpipe(pp, microbatches):
    assert not interpret(communication(one_f_one_b(pp, microbatches), "blocking")).finished
    assert interpret(communication(gpipe(pp, microbatches), "blocking")).finished


@given(builder=st.sampled_from([gpipe, one_f_one_b]), **SIZES)
def test_every_message_has_its_two_ends(builder, pp, microbatches):
    schedule = builder(pp, microbatches)
    programs = [lower(schedule, rank) for rank in range(pp)]
    given_ = {step.gives for program in programs for step in program.steps if step.gives}
    needed = {step.needs for program in programs for step in program.steps if step.needs}
    assert given_ == needed
    assert len(given_) == 2 * (pp - 1) * microbatches
    for rank, program in enumerate(programs):
        assert {message for queue in program.incoming.values() for message in queue} == {
            step.needs for step in program.steps if step.needs
        }
        assert [step.ends_chunk for step in program.steps] == [False] * (2 * microbatches - 1) + [True]
        assert [step.action for step in program.steps] == schedule.actions(rank)


def test_messages_within_a_rank_stay_there():
    v = Schedule.from_csv("0F0,3F0,3I0,0I0,3W0,0W0\n1F0,2F0,2I0,1I0,2W0,1W0")
    messages = [str(m) + (" local" if m.is_local else "") for step in lower(v, 1).steps for m in [step.gives] if m]
    assert messages == ["1F0>2 local", "2F0>3", "2B0>1 local", "1B0>0"]
    assert [str(m) for m in lower(v, 0).incoming[1]] == ["2F0>3", "1B0>0"]


def test_mirrored_operations_meet_whatever_they_are():
    """NCCL runs one communicator's operations in order: two sends that meet block it, in a batch and buffered, too."""
    x, y = "from 0", "from 1"
    first, same = [[Op("send", 1, x), Op("recv", 1, y)]], [[Op("send", 0, y), Op("recv", 0, x)]]
    mirror = [same[0][::-1]]
    assert interpret([first, same]).finished
    assert interpret([first, mirror], mirrored=True).finished
    for buffered in (False, True):
        outcome = interpret([first, same], mirrored=True, buffered=buffered)
        assert not outcome.finished
        assert outcome.stuck == {0: 0, 1: 0}
    one_direction_each = [
        [[op._replace(channel=int(op.name == y)) for op in step] for step in p] for p in (first, same)
    ]
    assert interpret(one_direction_each, mirrored=True).finished


def test_what_follows_a_blocked_operation_is_blocked_too():
    first = [[Op("send", 1, "x")], [Op("send", 1, "y")]]
    second = [[Op("send", 0, "z"), Op("recv", 0, "x")], [Op("recv", 0, "y")]]
    outcome = interpret([first, second], mirrored=True)
    assert outcome.circle == ["rank 0 waits: send x to rank 1", "rank 1 waits: send z to rank 0"]
    assert interpret([first, [second[0][1:], second[1]]], mirrored=True).finished
