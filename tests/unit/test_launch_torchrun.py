"""How a process knows that torchrun started it, and what is refused before it joins anything."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from labkit.config import ConfigError
from labkit.launch import Ranks, info, join, run, torchrun

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture
def under_torchrun(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torchrun, "_join", lambda *_: pytest.fail("it must not join"))


def test_the_environment_decides(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not info.under_torchrun()
    for name, value in VARIABLES.items():
        assert not info.under_torchrun()
        monkeypatch.setenv(name, value)
    assert info.under_torchrun()


def test_another_world_size_is_refused_by_run_and_ranks(under_torchrun):
    message = (
        r"asked for 4 ranks, but torchrun started 2: start it with --nproc-per-node 4 .* or ask for 2 \(the "
        r"environment has RANK=1 WORLD_SIZE=2 .*MASTER_PORT=1; .*: unset RANK .*MASTER_PORT\)"
    )
    with pytest.raises(ValueError, match=message):
        run(len, 4, "x")
    with pytest.raises(ValueError, match=message):
        Ranks(4).run(len, "x")


@pytest.mark.parametrize(
    "left", ["RANK=2", "WORLD_SIZE=two", "LOCAL_RANK=", "MASTER_PORT=x", "MASTER_PORT=70000", "MASTER_ADDR="]
)
def test_values_that_no_launcher_sets_are_named(under_torchrun, monkeypatch, left):
    monkeypatch.setenv(*left.split("="))
    with pytest.raises(ConfigError, match=rf"value that no launcher sets.*{left}"):
        run(len, 2, "x")


def test_join_is_refused_where_torchrun_started_nothing(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"join\(\) is for the ranks of torchrun .* call labkit.launch.run"):
        join()


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("192.0.2.7", False), ("node-3", False)],
)
def test_loopback_is_recognised(address, loopback):
    assert torchrun._is_loopback(address) is loopback


# ---- several attempts on one store ----


def attempt(store, ranks, limit=20.0):
    """Let all ranks look for the part of their attempt at the same time; {rank: part, or the error}."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        started = {rank: threads.submit(torchrun.attempt_store, store, rank, 3, limit) for rank in ranks}
        return {rank: future.exception() or future.result() for rank, future in started.items()}


def test_every_attempt_has_a_part_of_the_store_that_all_its_ranks_and_no_other_share():
    store = HashStore()
    for number in range(4):
        parts = attempt(store, (0, 1, 2))
        parts[0].set("address", str(number))
        assert [part.get("address") for part in parts.values()] == [str(number).encode()] * 3
        for part in parts.values():
            part.set("left over", "of a dead rank")
        assert not attempt(store, (2, 0, 1))[1].check(["address"]), "keys of the attempt before"


def test_a_rank_that_comes_before_the_new_rank_0_does_not_join_the_dead_ones():
    """Ranks 1 and 2 of the second attempt first find the name of the first one, which is complete."""
    store = HashStore()
    dead = attempt(store, (0, 1, 2))
    with ThreadPoolExecutor(3) as threads:
        early = [threads.submit(torchrun.attempt_store, store, rank, 3, 20.0) for rank in (1, 2)]
        assert not any(future.done() for future in early)
        first = torchrun.attempt_store(store, 0, 3, 20.0)
        first.set("who", "second")
        assert [future.result().get("who") for future in early] == [b"second"] * 2
    assert not dead[1].check(["who"])


def test_an_attempt_that_died_while_it_gathered_does_not_disturb_the_next():
    store = HashStore()
    assert isinstance(attempt(store, (0, 2), limit=0.2)[0], TimeoutError)
    parts = attempt(store, (0, 1, 2))
    parts[0].set("who", "third")
    assert all(part.get("who") == b"third" for part in parts.values())


def test_ranks_that_do_not_come_are_named():
    found = attempt(HashStore(), (0, 2), limit=0.3)
    assert str(found[0]).startswith("rank 1 of 3 did not join rank 0 within 0.3 s")
    assert str(found[2]).startswith("rank 2 waited 0.3 s for rank 0 and all other ranks to join")
    assert isinstance(found[0], TimeoutError) and isinstance(found[2], TimeoutError)


def test_sigusr1_prints_stacks_and_a_handler_of_the_user_stays():
    code = """
import os, signal, sys
from labkit.launch import torchrun
if len(sys.argv) > 1: signal.signal(signal.SIGUSR1, lambda *_: print("mine", file=sys.stderr))
torchrun._answer_for_stacks()
def here(): os.kill(os.getpid(), signal.SIGUSR1)
here()
"""
    for words, said in (([], "in here"), (["own"], "mine")):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert said in done.stderr and ("in here" in done.stderr) == (not words)
