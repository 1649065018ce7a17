"""When a call is hung, on a clock of its own: ranks that compute are never taken for hung, others in time."""

import math

import pytest

from labkit.launch import processes, status
from labkit.launch.failure_report import Outcome
from labkit.launch.watch import HangWatch

LIMIT = 60.0
RECV = 'Thread 0x1:\n  File "/venv/torch/distributed/distributed_c10d.py", line 2799 in recv\n'
SLEEP = 'Thread 0x1:\n  File "/home/me/mine.py", line 3 in load\n'


class Rank:
    """A rank as the system and its status slot show it."""

    def __init__(self, number, slot, phase="joined", answer=SLEEP):
        self.outcome, self.pid, self.finished = Outcome(number, phase), 1000 + number, False
        self.slot, self.answer, self.asked = slot, answer, 0
        self.usage, self.children = processes.Usage("S", 0, 0.0), 0.0

    def ask_for_stack(self):
        self.asked += 1
        self.runs(seconds=0.0)  # the signal wakes it

    def stack(self):
        return self.answer

    def runs(self, seconds=0.1, state="S"):
        """It comes back from a wait, uses some CPU and waits again, or is still at it."""
        self.usage = processes.Usage(state, self.usage.switches + (state == "S"), self.usage.seconds + seconds)


class Machine:
    """Some ranks, a clock, and the watch."""

    def __init__(self, path, monkeypatch, count):
        self.now = 1000.0
        status.create_slots(path, count)
        self.ranks = [Rank(n, status.StatusSlot(path, n)) for n in range(count)]
        self.path, self.watch = path, HangWatch(LIMIT, path, self.now)
        monkeypatch.setattr(status.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(processes, "usage", lambda pid: self.ranks[pid - 1000].usage)
        monkeypatch.setattr(processes, "children_seconds", lambda: {r.pid: r.children for r in self.ranks})

    def hung_after(self, seconds, each_look=lambda: None):
        """Seconds until the watch says hung, None if it does not within `seconds`."""
        begin = self.now
        while self.now < begin + seconds:
            self.now += self.watch.period
            each_look()
            if self.watch.look(self.ranks, self.now):
                return self.now - begin
        return None


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return lambda count=3: Machine(tmp_path / "status", monkeypatch, count)


def test_ranks_that_compute_and_meet_for_moments_have_no_limit(machine):
    here = machine()

    def step():
        for rank in here.ranks:
            if here.now % 50 < 45:  # a wait of nearly a minute is allowed, again and again
                rank.runs()
                rank.slot.leave(None)
            elif not status.read_slot(here.path, rank.outcome.rank).inside:
                rank.slot.enter("all_reduce tp #1")

    assert here.hung_after(3600, step) is None


def test_a_loop_that_never_calls_anything_has_no_limit(machine):
    here = machine(1)
    assert here.hung_after(3600, lambda: here.ranks[0].runs(0.5, state="R")) is None


def test_one_wait_beyond_the_limit_is_a_hang_though_others_compute(machine):
    here = machine()
    here.ranks[0].slot.enter("all_reduce tp #1")
    found = here.hung_after(3600, lambda: [rank.runs() for rank in here.ranks[1:]])
    assert LIMIT < found <= LIMIT + 1.0


def test_a_record_read_while_it_is_written_is_not_believed(machine):
    """Python writes zeros first: inside, since the beginning of the world."""
    here, looks = machine(1), []

    def garble():
        here.ranks[0].runs()
        looks.append(here.now)
        record = status._RECORD.pack(len(looks) % 2, 0.0, b"")
        here.path.write_bytes(record)

    assert here.hung_after(300, garble) is None


def test_a_stopped_rank_is_a_hang_though_nobody_waits_for_it(machine):
    here = machine()
    here.ranks[2].runs(state="T")
    assert LIMIT < here.hung_after(3600, lambda: [rank.runs() for rank in here.ranks[:2]]) <= LIMIT + 1.0
    assert here.ranks[2].asked == 0, "it could not answer"


def test_a_rank_that_calls_torch_itself_is_found_by_its_stack(machine):
    here = machine()
    here.ranks[1].answer = RECV
    others = (here.ranks[0], here.ranks[2])
    assert LIMIT < here.hung_after(3600, lambda: [rank.runs() for rank in others]) <= LIMIT + 1.5
    assert [rank.asked for rank in here.ranks] == [0, 1, 0]


def test_a_sleep_beside_ranks_that_compute_is_none_but_a_sleep_of_all_is(machine):
    here = machine()
    assert here.hung_after(1000, lambda: [rank.runs() for rank in here.ranks[1:]]) is None
    assert here.ranks[0].asked == 1, "once, not at every look"
    found = here.hung_after(1000)
    assert LIMIT < found <= LIMIT + 1.0, "that the first was asked is no work of its own"


def test_what_waits_for_its_children_is_not_idle(machine):
    here = machine(1)

    def compile():
        here.ranks[0].children += 0.01

    assert here.hung_after(1000, compile) is None
    assert LIMIT / 2 < here.hung_after(1000) <= LIMIT + 1.0


def test_threads_that_poll_are_no_work(machine):
    here = machine(1)

    def poll():
        here.ranks[0].usage = here.ranks[0].usage._replace(seconds=0.001 * here.now)

    assert LIMIT < here.hung_after(1000, poll) <= LIMIT + 1.0


def test_a_rank_that_never_begins_is_a_hang_and_gets_no_signal(machine):
    here = machine()
    here.ranks[1].outcome.phase = "starting"
    assert LIMIT < here.hung_after(1000, lambda: here.ranks[0].runs()) <= LIMIT + 1.0
    assert here.ranks[1].asked == 0


def test_a_machine_that_slept_starts_anew(machine):
    here = machine()
    here.ranks[0].slot.enter("all_reduce tp #1")
    assert here.hung_after(10) is None
    here.now += 3600.0
    assert LIMIT < here.hung_after(1000) <= LIMIT + 1.0


def test_where_the_system_does_not_tell_what_a_process_uses_the_slot_does(machine, monkeypatch):
    here = machine()
    monkeypatch.setattr(processes, "usage", lambda pid: None)
    assert here.hung_after(300) is None
    here.ranks[0].slot.enter("all_reduce tp #1")
    assert LIMIT < here.hung_after(300) <= LIMIT + 1.0


def test_without_a_limit_nothing_is_looked_at(tmp_path):
    watch = HangWatch(math.inf, tmp_path / "nowhere", 0.0)
    assert watch.period is None
    assert not watch.look([Rank(0, None)], 1e9)
