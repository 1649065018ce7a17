"""What cannot be launched is refused before any process starts."""

import threading

import pytest

from labkit.launch import Ranks, forkserver, pool, run


@pytest.fixture
def no_process(monkeypatch):
    def started(*_args, **_kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(pool.RankHandle, "__init__", started)
    monkeypatch.setattr(forkserver, "ensure_running", started)
    monkeypatch.setattr(pool.LaunchFolder, "__init__", started)


def task():
    return 1


@pytest.mark.parametrize("world_size", [0, -1, "4", 1.5, 2**31, 513, True, None])
def test_world_size(no_process, world_size):
    with pytest.raises(ValueError, match=r"world_size must be .*, got"):
        run(task, world_size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "mpi"}, "backend must be one of auto, gloo, nccl, got 'mpi'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"backend": "nccl", "device": "cpu"}, 'backend="nccl" moves GPU tensors only and device="cpu" was asked for'),
        ({"timeout": 0}, "timeout must be a positive number or None, got 0"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"distributed_timeout_minutes": "10"}, "distributed_timeout_minutes must be"),
    ],
)
def test_settings(no_process, settings, message):
    with pytest.raises(ValueError, match=message):
        Ranks(2, **settings)


def test_every_problem_is_told_at_once(no_process):
    with pytest.raises(ValueError, match=r"world_size.*; backend.*; timeout"):
        Ranks(0, backend="x", timeout=-1)


def test_function_and_arguments(no_process):
    with pytest.raises(TypeError, match="must be a function, got str"):
        run("task", 2)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        run(task, 2, threading.Lock())
