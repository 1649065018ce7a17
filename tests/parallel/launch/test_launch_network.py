"""Meeting and talking: launches that cannot disturb each other, and sockets that nobody else can reach."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from labkit.launch import Ranks, folders, forkserver, run
from labkit.launch import rank_pool as pool

pytestmark = pytest.mark.usefixtures("no_rank_left")


def ready():
    return True


# F11: the rendezvous


def test_a_taken_port_and_a_stale_address_do_not_matter(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
        assert run(ready, 2, timeout=120) == [True, True]


@pytest.mark.parametrize("name", ["a blank", "50%20", "a#b?c=d", "a\nb", "ü", "\udcff", "x" * 150], ids=ascii)
def test_the_temporary_folder_may_have_any_name(name, tmp_path, monkeypatch):
    """It was part of an address: blanks and other signs made every rank wait for a store of its own."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path / name))
    assert run(total, 2, 1, timeout=20) == [2.0, 2.0]


def talk():
    print(f"rank {dist.get_rank()} talks")
    return total(1)


def test_a_stale_rendezvous_at_the_very_place_of_the_launch_is_not_met(tmp_path, monkeypatch, capsys):
    """A launch that was killed has left its store, status slots and outputs, and the next one gets the same folder."""
    place = tmp_path / f"{folders.PREFIX}1-abcd_123"

    def same_place_again(prefix, dir):
        place.mkdir(exist_ok=True)
        return str(place)

    monkeypatch.setattr(folders.tempfile, "mkdtemp", same_place_again)
    with monkeypatch.context() as killed:
        killed.setattr(pool.RankPool, "stop", pool.RankPool.kill)  # a clean end removes the store
        killed.setattr(folders.LaunchFolder, "remove", lambda self: os.close(self._lock))
        assert run(talk, 3, timeout=120) == [3.0] * 3
    assert (place / "store").stat().st_size > 0, "there is something stale to meet"
    assert (place / "out-0").read_text() == "rank 0 talks\n"
    capsys.readouterr()
    assert run(talk, 2, timeout=120) == [2.0] * 2
    assert capsys.readouterr().out == "[rank 0] rank 0 talks\n[rank 1] rank 1 talks\n"
    assert not place.exists()


def total(number):
    x = torch.tensor([float(number)])
    dist.all_reduce(x)
    return x.item()


def test_twenty_launches_at_once():
    results = {}

    def launch(number):
        results[number] = run(total, 2, number, timeout=60)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [2.0 * number] * 2 for number in range(20)}


# F23: who listens


def listeners(pids):
    """Addresses on which any of the processes listens for TCP, from the kernel's own tables."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                link = os.readlink(entry)
                if link.startswith("socket:["):
                    inodes.add(link[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


def talk_and_tell():
    """A round in the world group and in a sub-group, then the process id, while everything is still connected."""
    group = dist.new_group([0, 1], use_local_synchronization=True) if dist.get_rank() < 2 else None
    if group is not None:
        dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2))
    return os.getpid()


def test_ranks_listen_on_loopback_only():
    with socket.socket() as elsewhere:  # the test can see another listener
        elsewhere.bind(("0.0.0.0", 0))
        elsewhere.listen()
        assert listeners([os.getpid()]) == ["00000000"]
    with Ranks(3) as ranks:
        pids = ranks.run(talk_and_tell)
        found = listeners(pids)
    assert len(found) >= 3, "gloo listens on some address in every rank; none was seen"
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert set(found) <= loopback
    assert listeners([os.getpid(), forkserver._server._forkserver_pid]) == []
