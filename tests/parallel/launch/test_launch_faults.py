"""Faults are injected into real ranks: each gives a named error in time, and no process stays."""

import contextlib
import ctypes
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import on_this_machine

from labkit.launch import RankError, Ranks, forkserver, run, waiting
from labkit.launch import rank_pool as pool

pytestmark = pytest.mark.usefixtures("no_rank_left")


@contextlib.contextmanager
def refused_within(seconds, kind):
    """A RankError of this kind, after at most so long (the fork server's start, once a session, not counted)."""
    forkserver.ensure_running()
    run(ready, 1)
    caught = {}
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        yield caught
    assert time.monotonic() - start < on_this_machine(seconds)
    assert error.value.kind == kind, error.value
    caught["error"], caught["text"], caught["ranks"] = error.value, str(error.value), error.value.ranks


def ready():
    return True


def in_collective(text="all_reduce tp #12 (4, 8) float32"):
    with waiting(text):
        dist.all_reduce(torch.ones(4, 8))


def one_raises():
    if dist.get_rank() == 2:
        raise ValueError("boom on two")
    in_collective()


def test_one_rank_raising_ends_the_wait_of_the_others():
    with refused_within(3.0, "raised") as caught:
        run(one_raises, 4)
    assert caught["ranks"] == [2]
    assert caught["error"].summary == "rank 2 of 4 raised ValueError: boom on two"
    assert 'raise ValueError("boom on two")' in caught["text"]
    assert caught["text"].count("waiting in all_reduce tp #12 (4, 8) float32") == 3
    assert "in_collective (test_launch_faults.py:" in caught["text"]


def one_dies(number):
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_ended_by_a_signal_is_named_at_once(number):
    with refused_within(2.0, "died") as caught:
        run(one_dies, 3, number)
    assert caught["ranks"] == [1]
    assert f"rank 1 was ended by {number.name}" in caught["error"].summary


def test_a_rank_killed_from_outside_while_all_compute(rank_pids):
    with Ranks(2, timeout=120) as ranks:
        pids = ranks.run(os.getpid)
        threading.Timer(0.3, lambda: os.kill(pids[0], signal.SIGKILL)).start()
        with refused_within(2.5, "died") as caught:
            ranks.run(time.sleep, 20)
        assert caught["ranks"] == [0]
        assert ranks.run(ready) == [True, True]


def exits():
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_a_rank_that_exits_is_not_a_success():
    with refused_within(2.0, "died") as caught:
        run(exits, 2)
    assert "rank 0 ended with exit code 3 before it returned" in caught["error"].summary


def sys_exits():
    sys.exit(0)


def test_sys_exit_is_an_error_with_a_name():
    with refused_within(3.0, "raised") as caught:
        run(sys_exits, 2)
    assert "SystemExit" in caught["error"].summary


def hangs_in_four_ways():
    rank = dist.get_rank()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 2:
        ctypes.PyDLL(None).sleep(60)  # PyDLL: the GIL stays held
    if rank == 3:
        return
    in_collective()


def test_a_hang_is_explained_rank_by_rank():
    """Waiting in a collective, stopped by a signal, holding the GIL, and one that has returned."""
    with refused_within(3.0, "timeout") as caught:
        run(hangs_in_four_ways, 4, timeout=2.0)
    text = caught["text"]
    assert caught["ranks"] == [1, 2], "those that do not wait"
    assert caught["error"].summary == "rank 0 of 4 waited for ranks 1, 2 longer than 2 s"
    assert "timeout=20" in text
    assert "rank 0: waiting in all_reduce tp #12 (4, 8) float32 for " in text
    assert "rank 1: stopped by a signal (process state T)" in text
    assert "rank 2: running, at hangs_in_four_ways (test_launch_faults.py:" in text
    assert "rank 3: had returned" in text
    assert text.count("innermost call first") == 3
    assert "worker.py" not in text


def test_a_loader_asleep_is_found():
    with refused_within(2.0, "timeout") as caught:
        run(time.sleep, 2, 60, timeout=1.0)
    assert caught["ranks"] == [0, 1]
    assert caught["error"].summary == "ranks 0, 1 of 2 did nothing for 1 s"


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def steps(count):
    """Computes for longer than the limit, and waits for the others for moments."""
    for _ in range(count):
        compute(0.1)
        in_collective()
        dist.barrier()
    return "done"


def test_ranks_that_compute_longer_than_the_limit_are_not_hung():
    assert run(steps, 2, 25, timeout=2.0) == ["done"] * 2


def one_computes():
    compute(4.0)
    return "done"


def waits_for_a_child():
    return subprocess.run(["sh", "-c", "while :; do :; done & sleep 4; kill $!"], check=False).returncode


@pytest.mark.parametrize(("fn", "result"), [(one_computes, "done"), (waits_for_a_child, 0)])
def test_a_rank_alone_may_work_for_as_long_as_it_likes(fn, result):
    assert run(fn, 1, timeout=1.5) == [result]


def receives():
    dist.recv(torch.ones(1), 1)


def waits_for_a_receive():
    work = dist.irecv(torch.ones(1), 1)
    work.wait()


def waits_for(wait, meanwhile):
    """Rank 0 waits past labkit's status slot, and rank 1 does something else."""
    wait() if dist.get_rank() == 0 else meanwhile(60.0)


@pytest.mark.parametrize(
    ("wait", "meanwhile", "words"),
    [
        (receives, compute, "waiting in torch.distributed.recv, at receives (test_launch_faults.py:"),
        (receives, time.sleep, "waiting in torch.distributed.recv, at receives (test_launch_faults.py:"),
        (waits_for_a_receive, compute, "waiting in wait() of torch.distributed, at waits_for_a_receive ("),
        (in_collective, time.sleep, "waiting in all_reduce tp #12 (4, 8) float32 for "),
    ],
)
def test_the_rank_is_named_for_which_another_waits(wait, meanwhile, words):
    with refused_within(8.0, "timeout") as caught:
        run(waits_for, 2, wait, meanwhile, timeout=1.5)
    assert caught["ranks"] == [1]
    assert caught["error"].summary == "rank 0 of 2 waited for rank 1 longer than 1.5 s"
    assert f"rank 0: {words}" in caught["text"]
    assert "rank 1: running" in caught["text"]
    assert "timeout=15" in caught["text"]


def one_stops():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    compute(60.0)


def test_a_stopped_rank_is_named_while_the_others_compute():
    with refused_within(8.0, "timeout") as caught:
        run(one_stops, 2, timeout=1.5)
    assert caught["ranks"] == [1]
    assert caught["error"].summary == "rank 1 of 2 made no progress for 1.5 s, stopped by a signal"
    assert "rank 1: stopped by a signal (process state T)" in caught["text"]


def test_the_limit_of_one_call_replaces_that_of_the_ranks():
    with Ranks(2, timeout=math.inf) as ranks:
        ranks.run(ready)
        with refused_within(8.0, "timeout") as caught:
            ranks.run(waits_for, in_collective, time.sleep, timeout=1.5)
        assert caught["ranks"] == [1]


def test_a_rank_that_never_starts_is_named(monkeypatch):
    """F12: rank 2 is forked but never comes to itself; the others wait for it in the rendezvous."""

    def start(*, target, args, **settings):
        if args[1] == 2:
            target, args = time.sleep, (60,)
        return forkserver.RankProcess(target=target, args=args, **settings)

    forkserver.ensure_running()
    run(ready, 1)
    monkeypatch.setattr(pool, "RankProcess", start)
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        run(ready, 4, timeout=2.0)
    assert time.monotonic() - start < on_this_machine(3.0)
    assert error.value.kind == "start"
    assert error.value.ranks == [2]
    assert error.value.summary == "rank 2 of 4 never joined within 2 s; the others could not start"
    assert "rank 0: waiting in rendezvous of all ranks" in str(error.value)


def test_a_fork_that_fails_names_the_rank(monkeypatch):
    def refuse(self):
        if self.rank == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        original(self)

    original = pool.RankHandle.start
    monkeypatch.setattr(pool.RankHandle, "start", refuse)
    with pytest.raises(RankError, match=r"rank 1 of 3 could not be started: BlockingIOError") as error:
        run(ready, 3)
    assert (error.value.kind, error.value.ranks) == ("start", [1])


def test_too_few_descriptors_for_the_ranks_are_refused_before_one_starts():
    """Ten descriptors are free, eight ranks need three each."""
    run(ready, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(10):
            os.close(taken.pop())
        with pytest.raises(RankError, match=r"8 ranks need about 36 open files, and \d+ of 512 are left; .*ulimit -n"):
            run(ready, 8)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert run(ready, 2) == [True, True]


def test_an_interrupt_in_the_middle_of_a_fork_leaves_no_rank(monkeypatch, rank_pids, wait_until):
    """The rank is forked, but the launcher never learns its process id."""

    def interrupted(sentinel):
        pid = original(sentinel)
        seen.append(pid)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return pid

    seen = []
    run(ready, 1)
    original = forkserver.read_signed
    monkeypatch.setattr(forkserver, "read_signed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(ready, 3)
    assert len(seen) == 2
    assert wait_until(lambda: not set(seen) & set(rank_pids()), 5.0)


def wrong_backend():
    return None


def test_ranks_that_could_not_join_are_not_used_again():
    """nccl on a machine without a GPU for each rank: every rank says so, twice."""
    with Ranks(2, backend="nccl", timeout=10) as ranks:
        for _ in range(2):
            with pytest.raises(RankError, match="backend = nccl: needs a GPU for each of the 2 ranks"):
                ranks.run(wrong_backend)


def result_that_cannot_travel():
    return threading.Lock() if dist.get_rank() == 1 else 0


def test_an_unpicklable_result_is_a_clear_error():
    with refused_within(3.0, "raised") as caught:
        run(result_that_cannot_travel, 2)
    assert caught["ranks"] == [1]
    assert "the result, of type lock, cannot be sent back" in caught["text"]


class Unreadable:
    def __reduce__(self):
        return (os.chdir, ("/nowhere/at/all",))


def result_that_cannot_be_read():
    return Unreadable()


def test_a_result_that_cannot_be_read_here_is_a_clear_error():
    with refused_within(3.0, "raised") as caught:
        run(result_that_cannot_be_read, 1)
    assert "the result of rank 0 arrived but cannot be read here: FileNotFoundError" in caught["text"]


class Locked(Exception):
    def __init__(self):
        super().__init__("held")
        self.lock = threading.Lock()


def raise_unpicklable():
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise Locked from error


def test_an_unpicklable_exception_arrives_with_its_cause():
    with refused_within(3.0, "raised") as caught:
        run(raise_unpicklable, 1)
    assert caught["error"].summary.endswith("Locked: held")
    assert "KeyError: 'cause'" in caught["text"]


def remove_folder_and_sleep():
    dist.barrier()  # both have read their payload
    if dist.get_rank() == 0:
        shutil.rmtree(os.path.dirname(os.readlink("/proc/self/fd/1")))
    time.sleep(30)


def test_a_folder_that_somebody_removes_does_not_hide_the_failure():
    """Cleaners of temporary directories exist."""
    with refused_within(6.0, "timeout") as caught:
        run(remove_folder_and_sleep, 2, timeout=1.5)
    assert caught["ranks"] == [0, 1]


def test_ranks_whose_folder_was_removed_are_started_anew(capsys):
    with Ranks(2) as ranks:
        ranks.run(ready)
        shutil.rmtree(ranks._pool.spec.folder)
        assert ranks.run(ready) == [True, True]
    assert "new ranks started" in capsys.readouterr().out


# F10: shapes, types and operations that differ between ranks


def other_shape():
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def other_dtype():
    dist.all_reduce(torch.ones(3, dtype=torch.float64 if dist.get_rank() else torch.float32))


def other_operation():
    dist.broadcast(torch.ones(3), 0) if dist.get_rank() else dist.barrier()


@pytest.mark.parametrize(
    ("fn", "calls"),
    [
        (other_shape, "rank 0 called ALLREDUCE [3] Float, rank 1 called ALLREDUCE [4] Float"),
        (other_dtype, "rank 0 called ALLREDUCE [3] Float, rank 1 called ALLREDUCE [3] Double"),
        (other_operation, "rank 0 called BARRIER, rank 1 called BROADCAST [3] Float"),
    ],
)
def test_debug_turns_a_mismatch_into_a_named_error(fn, calls):
    with refused_within(2.0, "raised") as caught:
        run(fn, 2, debug=True)
    assert caught["ranks"] in ([0, 1], [1, 0])
    assert f"the ranks disagree on a collective: {calls}" in caught["error"].summary


@pytest.mark.parametrize("fn", [other_shape, other_dtype, other_operation])
def test_without_debug_the_caller_survives_a_mismatch(fn):
    """gloo hangs, aborts the process or mixes up data; whatever it does, it does not do it to the caller."""
    with contextlib.suppress(RankError):
        run(fn, 2, timeout=1.5)
    assert run(ready, 2) == [True, True]


def test_debug_is_off_again_in_the_next_launch():
    assert run(lambda: str(dist.get_debug_level()), 1, debug=True) == ["DebugLevel.DETAIL"]
    assert run(lambda: str(dist.get_debug_level()), 1) == ["DebugLevel.OFF"]


def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(30)


def falls_asleep():
    if dist.get_rank() == 1:
        time.sleep(60)
    in_collective()


def test_a_hang_without_a_limit_of_the_call_shows_every_ranks_stack():
    """The collective's own limit ends it, as in a training job: those that waited raise, the culprit is alive."""
    with refused_within(8.0, "raised") as caught:
        run(falls_asleep, 3, timeout=math.inf, distributed_timeout_minutes=0.04)
    text = caught["text"]
    assert 1 not in caught["ranks"]
    assert "rank 1: running, at falls_asleep (test_launch_faults.py:" in text
    assert re.search(
        r"Stack of rank 1, innermost call first:\n  .*\n +File .*test_launch_faults.py.* in falls_asleep", text
    )
    assert re.search(r"Traceback of rank [02], which waited in all_reduce tp #12 \(4, 8\) float32:", text)
    assert text.count("all_reduce tp #12 (4, 8) float32") == 2, "both that waited say in what"


def test_ranks_left_in_a_collective_by_one_that_raised_show_their_stacks():
    with refused_within(3.0, "raised") as caught:
        run(one_raises, 4, timeout=math.inf)
    text = caught["text"]
    assert "Stack of ranks 0, 1, 3, innermost call first:" in text
    assert text.count("in in_collective") == 1, "equal stacks are printed once"
    assert "waiting in all_reduce tp #12 (4, 8) float32" in text


def test_the_limit_of_a_single_collective():
    with refused_within(8.0, "raised") as caught:
        run(wait_for_nobody, 2, timeout=20, distributed_timeout_minutes=0.02)
    assert caught["ranks"] == [0]
    assert "distributed_timeout_minutes= of run() and Ranks()" in caught["text"]
