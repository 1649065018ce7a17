"""Device and backend of a rank; GPUs are played by a fake count."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from labkit.config import RunConfig
from labkit.launch import info, rank_info
from labkit.launch.info import (
    CONNECTIONS,
    RankInfo,
    announce_connections,
    choose_backend,
    choose_device,
    loopback_interface,
    take_variables,
    variables_of,
)
from labkit.launch.launcher import look_before_launch
from labkit.train import pretrain


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    return pretend


def test_a_plain_process_is_a_world_of_one(gpus):
    gpus(0)
    here = rank_info()
    assert (here.rank, here.world_size, here.local_rank, here.device, here.backend) == (
        0, 1, 0, torch.device("cpu"), "none",
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "count", "index"), [(0, 1, 0), (3, 1, 0), (5, 4, 1), (7, 8, 7)])
def test_device_is_rank_modulo_count(gpus, rank, count, index):
    gpus(count)
    assert choose_device("auto", rank, rank) == torch.device("cuda", index)
    assert choose_device("cpu", rank, rank) == torch.device("cpu")


def test_device_is_held_against_the_local_rank(gpus):
    gpus(4)
    assert choose_device("auto", 9, 1) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"rank 3 would use GPU 3 .* LOCAL_RANK=0 means GPU 0"):
        choose_device("auto", 3, 0)


def test_cuda_without_a_gpu_is_refused(gpus):
    gpus(0)
    with pytest.raises(ValueError, match="torch sees no GPU"):
        choose_device("cuda", 0, 0)


def test_backend_follows_the_gpus(gpus):
    gpus(4)
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert choose_backend("auto", cuda, 4) == "nccl"
    assert choose_backend("auto", cuda, 5) == "gloo"
    assert choose_backend("auto", cpu, 4) == "gloo"
    assert choose_backend("gloo", cuda, 4) == "gloo"
    with pytest.raises(ValueError, match="needs a GPU for each of the 5 ranks on this machine, and torch sees 4"):
        choose_backend("nccl", cuda, 5)


def test_loopback_exists():
    import socket

    assert loopback_interface() in {name for _, name in socket.if_nameindex()}


ONE = {CONNECTIONS: "1"}


@pytest.mark.parametrize(("changes", "expected"), [({"tp": 2}, ONE), ({"cp": 2}, ONE), ({"pp": 2}, {})])
def test_a_function_whose_layers_overlap_transfers_gets_one_connection(changes, expected):
    """By its configuration, wherever that is among the arguments; a pipeline launches nothing before a GEMM."""
    config = RunConfig().override(changes)
    assert expected == variables_of(["a word", config])
    for fn, args in ((pretrain, (config,)), (partial(lambda *_, **__: None, config=config), ()), (print, ("", config))):
        assert look_before_launch(fn, 2, "cpu", args) == expected


def test_variables_come_too_late_once_cuda_runs(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {})
    parallel = RunConfig().override({"tp": 2}).parallel
    place = RankInfo(0, 2, 0, torch.device("cuda", 0), "nccl")
    for backend, rank, running, told in (
        ("nccl", 0, True, 1),
        ("nccl", 1, True, 0),
        ("gloo", 0, True, 0),
        ("nccl", 0, False, 0),
    ):
        os.environ.clear()
        monkeypatch.setattr(info, "_current", replace(place, backend=backend, rank=rank))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda running=running: running)
        take_variables(ONE)
        assert os.environ == ({} if running else ONE)
        announce_connections(parallel)
        assert capsys.readouterr().err.count("was not set when CUDA started") == told
    os.environ[CONNECTIONS] = "8"
    take_variables(ONE)
    assert os.environ[CONNECTIONS] == "8", "the user's own value stays"
