"""A failed launch in words: the right rank is blamed, and the others are described."""

import pytest

from labkit.launch.failure_report import Outcome, activity, compose, innermost, mismatched_call, torch_call, trim
from labkit.launch.status import Status
from labkit.launch.worker import Failure, describe

STACK = """Current thread 0x00007fb6cd03eb80 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/tmp/ipykernel_17/3021.py", line 13 in hang
  File "/venv/labkit/launch/worker.py", line 161 in _answer
  File "/venv/labkit/launch/worker.py", line 99 in rank_main
  File "<string>", line 1 in <module>"""
MISMATCH = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, TensorShape=[4, 2], TensorDtypes=Float, "
    "TensorDeviceTypes=TensorOptions(dtype=float)), but Rank 0 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)."
)


def raised(rank, summary, when):
    return Outcome(rank, "failed", failure=Failure(summary, f"Traceback ...\n{summary}"), when=when)


def test_the_first_to_raise_is_quoted():
    error = compose([raised(0, "KeyError: late", 2.0), raised(1, "ValueError: early", 1.0), Outcome(2, "returned")], 60)
    assert (error.kind, error.ranks) == ("raised", [1, 0])
    assert error.summary == "2 of 3 ranks raised, first rank 1: ValueError: early"
    assert "Traceback of rank 1" in str(error)
    assert "rank 0: raised KeyError: late" in str(error)
    assert "rank 2: had returned" in str(error)


def test_a_death_is_the_cause_of_the_broken_connections_that_follow():
    outcomes = [raised(0, "RuntimeError: Connection closed by peer", 1.0), Outcome(1, "died", exit_code=-9)]
    error = compose(outcomes, 60)
    assert (error.kind, error.ranks) == ("died", [1])
    assert "rank 1 was ended by SIGKILL" in error.summary


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Outcome(0, "died", exit_code=-6), "ranks 0, 1 of 2 could not connect: too many open files in a rank; "),
        (Outcome(0, "died", exit_code=-9), "1 of 2 ranks died: rank 0 was ended by SIGKILL"),
        (raised(0, "RuntimeError: Connection closed by peer", 2.0), "ranks 0, 1 of 2 could not connect: "),
        (raised(0, "ValueError: early", 1.0), "2 of 2 ranks raised, first rank 0: ValueError: early"),
    ],
)
def test_too_few_files_are_said_whether_gloo_raises_or_aborts(other, said):
    full = raised(1, "RuntimeError: [enforce fail at gloo/transport/tcp/loop.cc:48] pipe: Too many open files", 1.5)
    assert compose([other, full], 60).summary.startswith(said)


def test_exit_codes_in_words():
    assert "ended with exit code 3 before it returned" in compose([Outcome(0, "died", exit_code=3)], 1).summary
    assert "vanished" in compose([Outcome(0, "died", exit_code=255)], 1).summary
    assert "signal 40" in compose([Outcome(0, "died", exit_code=-40)], 1).summary


def test_silence_names_the_silent_and_shows_their_stacks():
    stuck = Outcome(1, "joined", stack=trim(STACK), status=Status("all_reduce tp #3", True, 0.0), state="T")
    error = compose([Outcome(0, "returned"), stuck], 2.0)
    assert (error.kind, error.ranks) == ("timeout", [1])
    assert error.summary == "rank 1 of 2 made no progress for 2 s, stopped by a signal"
    assert "stopped by a signal (process state T), waiting in all_reduce tp #3" in str(error)
    assert "at hang (3021.py:13)" in str(error)
    assert "line 5356 in barrier" in str(error)


def waiting_since(rank, seconds, **others):
    return Outcome(rank, "joined", status=Status("all_reduce tp #3", True, 100.0 - seconds), seen=100.0, **others)


@pytest.mark.parametrize(
    ("last", "ranks", "summary"),
    [
        (Outcome(2, "joined"), [2], "ranks 0, 1 of 3 waited for rank 2 longer than 4 s"),
        (waiting_since(2, 5.0, state="T"), [2], "ranks 0, 1 of 3 waited for rank 2 longer than 4 s"),
        (waiting_since(2, 0.1), [2], "ranks 0, 1 of 3 waited for rank 2 longer than 4 s"),
        (waiting_since(2, 2.0), [0, 1, 2], "ranks 0, 1, 2 of 3 waited longer than 4 s"),
        (Outcome(2, "joined", stack=STACK), [0, 1, 2], "ranks 0, 1, 2 of 3 waited longer than 4 s"),
        (Outcome(2, "returned"), [0, 1], "ranks 0, 1 of 3 waited longer than 4 s"),
    ],
    ids=["computes", "stopped in a collective", "came late", "waits", "calls torch", "returned"],
)
def test_the_rank_that_others_wait_for_is_blamed(last, ranks, summary):
    error = compose([waiting_since(0, 4.3), waiting_since(1, 4.2), last], 4.0)
    assert (error.kind, error.ranks, error.summary) == ("timeout", ranks, summary)
    assert "timeout=40" in str(error)


def test_ranks_of_which_none_waits():
    error = compose([Outcome(0, "joined"), Outcome(1, "joined"), Outcome(2, "returned")], 60.0)
    assert (error.ranks, error.summary) == ([0, 1], "ranks 0, 1 of 3 did nothing for 60 s")


def test_after_a_timed_out_collective_the_silent_rank_shows_its_stack_and_the_others_what_they_waited_for():
    late = raised(0, "RuntimeError: Timed out waiting 1800 ms for 127.0.0.1", 1.0)
    later = raised(2, "RuntimeError: Timed out waiting 1799 ms for 127.0.0.2", 2.0)
    late.status = later.status = Status("all_reduce tp #3", False, 0.0)
    silent = [Outcome(rank, "joined", stack=trim(STACK.replace("7fb6", f"7fb{rank}"))) for rank in (1, 3)]
    text = str(compose([late, silent[0], later, silent[1]], 60))
    assert (
        "rank 2: raised RuntimeError: Timed out waiting 1799 ms for 127.0.0.2, last waited in all_reduce tp #3" in text
    )
    assert "Traceback of rank 0, which waited in all_reduce tp #3:" in text
    assert text.count("Traceback of rank") == 1, "rank 2 raised at the same place"
    assert text.count("line 13 in hang") == 1
    assert "Stack of ranks 1, 3, innermost call first:\n  Thread (most recent call first):" in text
    assert "distributed_timeout_minutes= of run() and Ranks(), parallel.distributed_timeout_minutes" in text
    assert "distributed_timeout_minutes" not in str(compose([raised(0, "TimeoutError: mine", 1.0)], 60))


def test_a_rank_that_raised_elsewhere_is_quoted_too():
    elsewhere = Outcome(1, "failed", failure=Failure("KeyError: b", "Traceback elsewhere\nKeyError: b"), when=2.0)
    text = str(compose([raised(0, "ValueError: a", 1.0), elsewhere], 60))
    assert "Traceback of rank 1:\n  Traceback elsewhere\n  KeyError: b" in text


def test_a_rank_that_never_joined_is_told_from_those_that_waited_for_it():
    waiting = Status("rendezvous of all ranks", True, 0.0)
    outcomes = [Outcome(0, "here", status=waiting), Outcome(1, "starting"), Outcome(2, "here", status=waiting)]
    error = compose(outcomes, 5.0)
    assert (error.kind, error.ranks) == ("start", [1])
    assert error.summary == "rank 1 of 3 never joined within 5 s; the others could not start"
    assert "rank 1: gave no sign of life" in str(error)


def test_trim_keeps_the_callers_frames_and_drops_the_launchers():
    kept = trim(STACK)
    assert "line 13 in hang" in kept
    assert "worker.py" not in kept
    assert "<string>" not in kept


def test_innermost_skips_torch():
    assert innermost(STACK) == "hang (3021.py:13)"
    assert innermost("") == ""


def test_a_rank_that_calls_torch_directly_is_found_by_its_stack():
    assert activity(Outcome(0, "joined", stack=STACK)) == "waiting in torch.distributed.barrier, at hang (3021.py:13)"
    computing = STACK.replace("distributed/distributed_c10d.py", "nn/functional.py")
    assert activity(Outcome(0, "joined", stack=computing)) == "running, at hang (3021.py:13)"


def test_a_wait_of_torch_has_no_frame_and_is_found_by_its_line(tmp_path):
    cell = tmp_path / "cell.py"
    cell.write_text("work = dist.irecv(x, 1)\nwork.wait()\n")
    thread = 'Thread 0x2 (most recent call first):\n  File "/usr/lib/queue.py", line 180 in get\n\n'
    assert torch_call(f'{thread}Current thread 0x1:\n  File "{cell}", line 2 in f\n') == "wait() of torch.distributed"
    assert torch_call(f'{thread}Current thread 0x1:\n  File "{cell}", line 1 in f\n  File "{cell}", line 2 in g') == ""
    assert torch_call(thread + STACK) == "torch.distributed.barrier", "whatever thread it is"


def test_last_wait_is_told_of_a_rank_that_computes():
    text = activity(Outcome(0, "joined", status=Status("barrier", False, 1.0)))
    assert text == "running, last waited in barrier"


def test_mismatch_uses_each_ranks_own_call():
    first, second = raised(1, MISMATCH, 1.0), raised(0, MISMATCH.replace("Rank 1", "Rank 0", 1), 2.0)
    assert mismatched_call(first) == "ALLREDUCE [4, 2] Float"
    assert "rank 0 called ALLREDUCE [4, 2] Float, rank 1 called" in compose([first, second], 1).summary
    assert mismatched_call(Outcome(0, "returned")) is None


def test_describe_survives_an_exception_that_cannot_be_printed():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    try:
        raise Unprintable
    except Unprintable as error:
        assert "Unprintable" in describe(error).summary


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_describe_takes_every_kind_of_exception(error):
    assert type(error).__name__ in describe(error).summary
