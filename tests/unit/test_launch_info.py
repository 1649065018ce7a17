"""Device and backend of a rank; GPUs are played by a fake count."""

import pytest
import torch
import torch.distributed as dist

from labkit.launch import rank_info
from labkit.launch.info import choose_backend, choose_device, loopback_interface


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
