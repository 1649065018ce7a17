"""What cannot be launched is refused before any process starts."""

import math
import sys
import threading
from types import SimpleNamespace

import pytest

from labkit.launch import Ranks, forkserver, info, processes, run
from labkit.launch import rank_pool as pool


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
        ({"backend": "nccl", "device": "cpu"}, "backend = nccl: it moves tensors of GPUs only, and device is cpu"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, math.inf for no limit or None .*, got 0"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"timeout": True}, "timeout must be"),
        ({"distributed_timeout_minutes": "10"}, "distributed_timeout_minutes must be"),
        ({"distributed_timeout_minutes": math.inf}, "distributed_timeout_minutes must be .* at most 10080, got inf"),
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


@pytest.mark.parametrize(
    ("settings", "in_script", "in_notebook"),
    [
        ({}, 600.0, 60.0),
        ({"timeout": 5.0}, 5.0, 5.0),
        ({"timeout": math.inf, "distributed_timeout_minutes": 2}, math.inf, math.inf),
        ({"distributed_timeout_minutes": 2}, 120.0, 120.0),
    ],
)
def test_how_long_a_rank_may_wait(no_process, monkeypatch, settings, in_script, in_notebook):
    assert Ranks(2, **settings).timeout == in_script
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported by a script
    assert Ranks(2, **settings).timeout == in_script
    shell = SimpleNamespace(kernel="of a notebook")
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert Ranks(2, **settings).timeout == in_notebook


@pytest.mark.parametrize(
    ("limit", "asked", "backend", "given"),
    [
        (600.0, 600.0, "gloo", 610.0),  # both at once: the launcher's error is the better one
        (600.0, 605.0, "gloo", 610.0),
        (600.0, 45.0, "gloo", 45.0),  # a configuration may ask for less
        (60.0, 600.0, "gloo", 600.0),
        (60.0, 600.0, "nccl", 70.0),  # what waits in the GPU the launcher does not see
        (math.inf, 600.0, "nccl", 600.0),
    ],
)
def test_torchs_own_limit_comes_after_the_launchers(monkeypatch, limit, asked, backend, given):
    monkeypatch.setattr(info, "_launcher_limit", limit)
    monkeypatch.setattr(processes, "SEES_USAGE", True)
    assert info.torch_timeout(asked, backend).total_seconds() == given
    monkeypatch.setattr(processes, "SEES_USAGE", False)
    assert info.torch_timeout(asked, backend).total_seconds() == info.torch_timeout(asked, "nccl").total_seconds()
