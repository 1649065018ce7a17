"""Schedules broken at random, run by real ranks over gloo: what hangs, fails or leaves something over is refused.

The executor is this test's own. A rank has one thread per schedule that runs its row: it receives a token over gloo
before an action that needs one, and sends one after. Every schedule has a tag of its own, so that all run beside each
other over one process group. When no thread of any rank has moved for a while, those that are not at their end hang,
and that one silence is all the waiting that hundreds of hanging schedules cost.

Each schedule runs twice. Once sends run behind, and every message has a tag. Once the sender waits (gloo's send ends
when the other side receives) and messages are told apart by their order alone: the `blocking` transport.
"""

from collections import Counter

from broken_schedules import Rank, all_there, broken_schedule, can_run, can_run_blocking, has_backward, parse

from labkit.launch import run
from labkit.schedules import Schedule, ScheduleError, verify

QUIET_S, LIMIT_S, MOST_SCHEDULES = 4.0, 120.0, 1000


class RealRank:
    """One row of one schedule, with its messages over gloo."""

    def __init__(self, number, rows, stages, rank, group, blocking):
        self.number, self.rows, self.rank, self.group, self.blocking = number, rows, rank, group, blocking
        self.state = Rank(stages, has_backward(rows))
        self.local, self.under_way = set(), []
        self.moves, self.ended, self.left_over = 0, False, False
        self.makers, self.takers = {}, {}
        for where, row in enumerate(rows):
            for stage, kind, m in map(parse, row):
                if kind != "W":
                    letter, step = ("a", 1) if kind == "F" else ("g", -1)
                    self.makers.setdefault(f"{letter}{stage + step}.{m}", where)
                    self.takers.setdefault(f"{letter}{stage}.{m}", where)

    def token(self, name):
        """A number for each message of each schedule."""
        stage, microbatch = map(int, name[1:].split("."))
        return ((self.number * 2 + (name[0] == "g")) * 32 + stage) * 32 + microbatch

    def tag(self, name):
        """What gloo matches by."""
        return self.number if self.blocking else MOST_SCHEDULES + self.token(name)

    def receive(self, name):
        """Take a message, from this rank or over gloo; a message that nobody makes is waited for in vain."""
        import torch
        import torch.distributed as dist

        source = self.makers.get(name, (self.rank + 1) % dist.get_world_size(self.group))
        if source == self.rank:
            self.local.remove(name)
            return
        token = torch.zeros(1, dtype=torch.int64)
        dist.recv(token, source, group=self.group, tag=self.tag(name))
        if token.item() != self.token(name):
            raise LookupError(f"{name} is another message")

    def send(self, name):
        """Hand a message over; one that nobody takes is left over."""
        import torch
        import torch.distributed as dist

        target = self.takers.get(name)
        if target is None:
            self.left_over = True
        elif target == self.rank:
            self.local.add(name)
        else:
            token = torch.tensor([self.token(name)])
            work = dist.isend(token, target, group=self.group, tag=self.tag(name))
            self.under_way.append((work, token))
            if self.blocking:
                work.wait()

    def walk(self):
        """Run the row; where something is not there it ends, and where a message never comes, with its connection."""
        try:
            for cell in self.rows[self.rank]:
                made = self.state.run(cell, self.receive)
                if made is not None:
                    self.send(made[1])
                self.moves += 1
            self.ended = not self.local
        except (LookupError, RuntimeError):
            self.ended = False


def run_rows(cases):
    """Inside a rank: walk all schedules both ways until no rank moves any more; returns (ended, state) of each."""
    import threading
    import time

    import torch
    import torch.distributed as dist

    me, group = dist.get_rank(), dist.new_group(backend="gloo")
    walkers = {
        (n, blocking): RealRank(n, rows, stages, me, group, blocking)
        for n, (rows, stages, _) in enumerate(cases)
        for blocking in (False, True)
        if me < len(rows)
    }
    threads = [threading.Thread(target=walker.walk, daemon=True) for walker in walkers.values()]
    for thread in threads:
        thread.start()
    seen, quiet, pause = -1, 0.0, 0.1
    started = time.monotonic()
    while quiet < QUIET_S and time.monotonic() - started < LIMIT_S:
        time.sleep(pause)
        moves = torch.tensor([sum(w.moves for w in walkers.values()), sum(thread.is_alive() for thread in threads)])
        dist.all_reduce(moves)  # all ranks see the same sums, and so stop in the same round
        if moves[1] == 0:
            break
        quiet = quiet + pause if moves[0] == seen else 0.0
        seen = int(moves[0])
    return {key: (w.ended and not w.left_over, w.state) for key, w in walkers.items()}


def _real_verdicts(cases):
    """For each case, whether it runs where sends run behind, and where they are waited for."""
    results = run(run_rows, 4, cases, device="cpu", backend="gloo", timeout=LIMIT_S + 60)
    verdicts = []
    for n, (rows, stages, microbatches) in enumerate(cases):
        both = []
        for blocking in (False, True):
            mine = [results[rank][n, blocking] for rank in range(len(rows))]
            both.append(all(e for e, _ in mine) and all_there([s for _, s in mine], stages, microbatches))
        verdicts.append(tuple(both))
    return verdicts


def _accepts(rows, stages, microbatches, transport):
    try:
        verify(Schedule("broken", stages, microbatches, rows), transport)
    except ScheduleError:
        return False
    return True


def test_what_real_ranks_cannot_run_is_refused_and_what_they_can_is_not():
    stories, *parts = zip(*map(broken_schedule, range(200)), strict=True)
    cases = list(zip(*parts, strict=True))
    verdicts = Counter()
    for story, case, runs in zip(stories, cases, _real_verdicts(cases), strict=True):
        judged = can_run(*case), can_run_blocking(*case)
        assert runs == judged, f"{story}: real ranks say {runs}, the token-passing judge {judged}"
        verified = _accepts(*case, "batched"), _accepts(*case, "blocking")
        assert runs == verified, f"{story}: real ranks say {runs}, verify {verified}"
        verdicts[runs] += 1
    assert verdicts[False, False] > 100 and verdicts[True, False] > 40 and verdicts[True, True] > 20, verdicts
