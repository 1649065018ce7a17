"""What `run` and `Ranks` promise when nothing goes wrong."""

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labkit.cli.checkpoints import model_options
from labkit.config import RunConfig
from labkit.launch import RankError, Ranks, forkserver, info, rank_info, report_progress, run

pytestmark = pytest.mark.usefixtures("no_rank_left")
MEMORY = {}


def sum_of_ranks(scale):
    total = torch.full((3,), float(dist.get_rank()) * scale)
    dist.all_reduce(total)
    return total


def test_results_come_by_rank_and_ranks_are_one_group():
    for world_size in (1, 2, 5):
        expected = torch.full((3,), 2.0 * sum(range(world_size)))
        results = run(sum_of_ranks, world_size, 2.0)
        assert len(results) == world_size
        assert all(torch.equal(result, expected) for result in results)


def whoami():
    me = rank_info()
    return me.rank, me.world_size, me.local_rank, str(me.device), me.backend, torch.get_num_threads()


def test_a_rank_knows_its_place():
    assert run(whoami, 3, device="cpu") == [(rank, 3, rank, "cpu", "gloo", 1) for rank in range(3)]


def connections(*_):
    return os.environ.get(info.CONNECTIONS)


def test_ranks_keep_the_number_of_connections_with_which_they_start(monkeypatch):
    """CUDA reads the variable once, so later values would be wrong."""
    monkeypatch.delenv(info.CONNECTIONS, raising=False)
    overlaps = RunConfig().override({"parallel.tp": 2})
    with Ranks(2, device="cpu") as ranks:
        assert ranks.run(connections, "a word", overlaps) == ["1"] * 2
        assert ranks.run(connections) == ["1"] * 2 and info.CONNECTIONS not in os.environ
    with Ranks(1, device="cpu") as ranks:
        assert ranks.run(connections) == ranks.run(connections, overlaps) == [None]
        monkeypatch.setenv(info.CONNECTIONS, "8")
        assert ranks.run(connections) == [None]
    assert run(connections, 1, overlaps) == ["8"]


def test_commands_for_checkpoints_tell_the_launcher_their_layout(monkeypatch):
    monkeypatch.delenv(info.CONNECTIONS, raising=False)
    for options, expected in (({"tp": 2, "pp": 1}, "1"), ({"tp": 1, "pp": 2}, None)):
        arguments = SimpleNamespace(options={**options, "device": "cpu", "checkpoint": "a"})
        assert model_options.launch(connections, arguments, "a word", progress=print) == expected


def test_ranks_inherit_torch_instead_of_importing_it():
    """The fork server passes over an import that fails, and then every rank pays a second for its own."""
    found = subprocess.run(
        [sys.executable, "-c", f"import {forkserver._modules[0]}, sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    wanted = {"torch", "torch.distributed", "cloudpickle", "numpy"}
    wanted |= set() if torch.backends.cuda.is_built() else {"torch._dynamo"}  # for torch's optimizers
    assert wanted <= set(found.stdout.split())


def test_ranks_collect_their_own_garbage_and_look_through_nothing_inherited():
    collects, inherited, own = run(lambda: (gc.isenabled(), gc.get_freeze_count(), len(gc.get_objects())), 1)[0]
    assert collects and inherited > 10 * own


def test_lambdas_closures_and_this_modules_functions_travel():
    offset = 10
    assert run(lambda x: x + offset + dist.get_rank(), 2, 5) == [15, 16]


config = 5


def config_and_rank():
    return config + torch.distributed.get_rank()


def test_a_global_that_is_named_like_a_module_of_torch_travels():
    """`config` beside `torch.distributed` is torch.distributed.config to cloudpickle."""
    assert run(config_and_rank, 2) == [5, 6]


class Counter:
    def __init__(self):
        self.value = dist.get_rank()


def make_counter():
    return Counter()


def test_classes_defined_here_come_back_as_themselves():
    assert all(isinstance(result, Counter) for result in run(make_counter, 2))


def speak(words):
    print(f"first of {dist.get_rank()}")
    os.system(f"echo {words}")
    os.write(2, b"an error line\n")
    print("no newline at the end", end="")


def test_output_is_replayed_in_rank_order_whoever_wrote_it(capsys):
    run(speak, 3, "from a child")
    out, err = capsys.readouterr()
    lines = ("first of {}", "from a child", "no newline at the end")
    assert out.splitlines() == [f"[rank {rank}] {line.format(rank)}" for rank in range(3) for line in lines]
    assert err.splitlines() == [f"[rank {rank}] an error line" for rank in range(3)]


def draw_a_bar():
    for step in range(3):
        print(f"\rstep {step}", end="")
    print("\r\ndone")


def test_of_a_progress_bar_only_the_end_is_shown(capsys):
    run(draw_a_bar, 1)
    assert capsys.readouterr().out == "[rank 0] step 2\n[rank 0] done\n"


def flood():
    for _ in range(40_000):
        print("x" * 99)


def test_a_flood_of_output_is_cut(capsys):
    run(flood, 1)
    out = capsys.readouterr().out
    assert len(out) < 1_500_000
    assert "more bytes" in out.splitlines()[-1]


def look_around():
    interfaces = {os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    assert interfaces == {info.loopback_interface()}
    assert os.environ["RANK"] == str(dist.get_rank())
    return os.environ.get("LABKIT_TEST_WORD"), os.getcwd(), sys.path[0]


def test_changes_between_launches_are_seen(monkeypatch, tmp_path):
    with Ranks(2) as ranks:
        for word in ("one", "two"):
            folder = tmp_path / word
            folder.mkdir()
            monkeypatch.setenv("LABKIT_TEST_WORD", word)
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", "another")
            monkeypatch.chdir(folder)
            monkeypatch.syspath_prepend(str(folder))
            expected = (word, str(folder), str(folder))
            assert ranks.run(look_around) == [expected] * 2
            assert run(look_around, 2) == [expected] * 2
        monkeypatch.delenv("LABKIT_TEST_WORD")
        assert [found[0] for found in ranks.run(look_around)] == [None, None]


def report(steps):
    for step in range(steps):
        report_progress({"step": step, "rank": dist.get_rank()})
    return steps


def test_progress_comes_from_rank_0_in_order():
    received = []
    assert run(report, 3, 4, progress=received.append) == [4, 4, 4]
    assert received == [{"step": step, "rank": 0} for step in range(4)]
    assert run(report, 2, 1) == [1, 1]  # nobody listens


def big(megabytes):
    return torch.full((megabytes * 250_000,), float(dist.get_rank()))


def test_a_result_of_100_mb():
    first, second = run(big, 2, 100)
    assert first.numel() == second.numel() == 25_000_000
    assert (first[0], second[-1]) == (0.0, 1.0)


def big_argument(x):
    return x.sum().item()


def test_an_argument_of_40_mb():
    assert run(big_argument, 2, torch.ones(10_000_000)) == [1e7, 1e7]


def remember(value):
    MEMORY.setdefault("seen", []).append(value)
    torch.seen = [*getattr(torch, "seen", []), value]
    return torch.seen


def test_state_persists_between_calls():
    with Ranks(2) as ranks:
        assert ranks.run(remember, "a") == [["a"]] * 2
        assert ranks.run(remember, "b") == [["a", "b"]] * 2
    assert not hasattr(torch, "seen")


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"only rank {rank}")
    return os.getpid()


def test_ranks_survive_an_exception_if_all_came_back(rank_pids):
    with Ranks(3) as ranks:
        pids = ranks.run(fail_on, -1)
        with pytest.raises(RankError, match=r"rank 1 of 3 raised ValueError: only rank 1"):
            ranks.run(fail_on, 1)
        assert ranks.run(fail_on, -1) == pids
        assert torch.equal(ranks.run(sum_of_ranks, 1.0)[0], torch.full((3,), 3.0))
        assert sorted(rank_pids()) == sorted(pids)


def fail_while_others_work(seconds):
    if dist.get_rank() == 0:
        raise ValueError("early")
    time.sleep(seconds)
    return os.getpid()


def test_ranks_that_are_still_at_work_are_waited_for():
    with Ranks(3) as ranks:
        pids = ranks.run(fail_on, -1)
        with pytest.raises(RankError, match="rank 0 of 3 raised ValueError: early") as error:
            ranks.run(fail_while_others_work, 0.7)
        assert "rank 2: had returned" in str(error.value)
        assert ranks.run(fail_on, -1) == pids


def fail_before_barrier(rank):
    if dist.get_rank() == rank:
        raise ValueError("gone")
    dist.barrier()


def test_ranks_start_anew_and_say_so_if_one_is_stuck(capsys):
    with Ranks(2) as ranks:
        before = ranks.run(fail_on, -1)
        with pytest.raises(RankError, match="rank 0 of 2 raised ValueError: gone"):
            ranks.run(fail_before_barrier, 0)
        assert set(ranks.run(fail_on, -1)).isdisjoint(before)
    assert "new ranks started; what earlier calls left in memory is gone" in capsys.readouterr().out


def test_ranks_close_when_they_are_forgotten(rank_pids, wait_until):
    ranks = Ranks(2)
    ranks.run(fail_on, -1)
    assert len(rank_pids()) == 2, "the test sees ranks"
    del ranks
    gc.collect()
    assert wait_until(lambda: rank_pids() == [])


def test_closing_twice_and_using_again():
    ranks = Ranks(2)
    ranks.close()
    assert ranks.run(report, 1) == [1, 1]
    ranks.close()
    ranks.close()
    assert ranks.run(report, 2) == [2, 2]
    ranks.close()


def test_nothing_is_left_open():
    def descriptors():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    run(report, 2, 1)
    before = descriptors()
    for _ in range(3):
        run(report, 2, 1)
        with pytest.raises(RankError):
            run(fail_before_barrier, 2, 0)
    assert descriptors() == before


def launch_again():
    return run(report, 2, 1)


def test_a_rank_cannot_launch():
    with pytest.raises(RankError, match="a rank cannot launch ranks"):
        run(launch_again, 2)


def load_with_workers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's hint about more workers than cores
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=1)
        return [batch.sum().item() for batch in loader]


def test_a_rank_may_have_data_loading_workers():
    assert run(load_with_workers, 2) == [[6, 22]] * 2


def test_preload_is_refused_once_the_server_runs():
    run(report, 1, 1)
    with pytest.raises(RuntimeError, match="already runs"):
        forkserver.preload("json")


def test_sixteen_ranks():
    with Ranks(16) as ranks:
        assert ranks.run(sum_of_ranks, 1.0)[15][0] == 120.0


def test_sixteen_warm_ranks_are_the_same_processes():
    """So a call costs a message there and back, and no start."""
    with Ranks(16) as ranks:
        first = ranks.run(os.getpid)
        assert ranks.run(sum_of_ranks, 2.0)[15][0] == 240.0
        assert ranks.run(os.getpid) == first and len(set(first)) == 16


def policies() -> set[int]:
    """Of this rank's main thread and of gloo's. A thread that torch started before the group keeps its own."""
    dist.all_reduce(torch.ones(1))
    found = {os.sched_getscheduler(0)}
    for thread in Path("/proc/self/task").iterdir():
        if "gloo" in (thread / "comm").read_text():
            found.add(os.sched_getscheduler(int(thread.name)))
    return found


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux's scheduler")
def test_ranks_do_not_interrupt_each_other_unless_somebody_chose_a_policy() -> None:
    assert run(policies, 2) == [{os.SCHED_BATCH}] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the launching process has an answer to give at once"


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux's scheduler")
def test_a_policy_that_somebody_chose_stays() -> None:
    chosen = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0));"
    asks = (
        "from labkit.launch.shared_cores import do_not_interrupt; do_not_interrupt(); print(os.sched_getscheduler(0))"
    )
    found = subprocess.run([sys.executable, "-c", chosen + asks], capture_output=True, text=True, check=True)
    assert int(found.stdout) == os.SCHED_IDLE
