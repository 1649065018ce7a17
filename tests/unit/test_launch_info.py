"""Device and backend of a rank; GPUs are played by a fake count."""

import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from labkit.config import RunConfig
from labkit.launch import rank_info
from labkit.launch.info import CONNECTIONS, choose_backend, choose_device, loopback_interface, set_variables
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
    info = rank_info()
    assert (info.rank, info.world_size, info.local_rank, info.device, info.backend) == (
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
    with pytest.raises(ValueError, match=r"rank 3 would use GPU 3 .* LOCAL_RANK=0 stands for GPU 0"):
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


@pytest.mark.parametrize(
    ("changes", "count", "expected"),
    [
        ({"tp": 2}, 2, {CONNECTIONS: "1"}),
        ({"cp": 2}, 2, {CONNECTIONS: "1"}),
        ({"pp": 2}, 2, {}),  # nothing is launched before a product that hides it
        ({"tp": 2}, 1, {}),  # two ranks on one GPU, so gloo
        ({"tp": 2, "distributed_backend": "gloo"}, 2, {}),
        ({"tp": 2}, 0, {}),
    ],
)
def test_one_connection_where_layers_overlap_transfers_on_gpus(gpus, changes, count, expected):
    gpus(count)
    config = RunConfig().override(changes)
    for fn in (pretrain, partial(pretrain, lr_mult=1.0)):
        assert look_before_launch(fn, 2, "auto", (config,)) == expected


def test_variables_come_too_late_once_cuda_runs(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    set_variables({CONNECTIONS: "1"})
    assert CONNECTIONS not in os.environ and f"{CONNECTIONS}=1 comes too late" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    set_variables({CONNECTIONS: "1"})
    assert os.environ[CONNECTIONS] == "1"
    os.environ[CONNECTIONS] = "8"
    set_variables({CONNECTIONS: "1"})
    assert os.environ[CONNECTIONS] == "8", "the user's own value stays"
