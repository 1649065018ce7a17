"""How a process knows that torchrun started it, and what is refused before it joins anything."""

import pytest

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
    message = r"asked for 4 ranks, but torchrun started 2: start it with --nproc-per-node 4 .* or ask for 2"
    with pytest.raises(ValueError, match=message):
        run(len, 4, "x")
    with pytest.raises(ValueError, match=message):
        Ranks(4).run(len, "x")


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
