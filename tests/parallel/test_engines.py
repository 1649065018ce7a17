"""Ranks on the engines of an ipyparallel cluster: three local engines, as no batch system is here."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from labkit.launch import RankError, engines, rank_info, run_on_engines

ipyparallel = pytest.importorskip("ipyparallel", reason="ranks of several nodes are started by ipyparallel's engines")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ["IPYTHONDIR"] = str(tmp_path_factory.mktemp("ipython"))
    try:
        with ipyparallel.Cluster(profile="slurm", cluster_id="", n=3, log_level=40) as started:
            yield started
    finally:
        del os.environ["IPYTHONDIR"]


def summed(start: float) -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    place = rank_info()
    total = torch.tensor([start + place.rank])
    dist.all_reduce(total)
    print(f"rank {place.rank} has {total.item():g}")
    return place.rank, place.local_rank, total.item()


def fails(how: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(7)
        raise RuntimeError("one is ill")
    if how == "others compute":
        time.sleep(600)
    dist.barrier()


def left() -> str:
    found = subprocess.run(["pgrep", "-af", "labkit.launch.engine_ranks"], capture_output=True, text=True, check=False)
    return found.stdout


def test_every_engine_is_a_rank_and_a_failure_costs_only_its_call(client: Any, capsys: Any) -> None:
    expected = [(0, 0, 33.0), (1, 1, 33.0), (2, 2, 33.0)]
    assert run_on_engines(client, summed, 10.0) == expected
    assert capsys.readouterr().out == "".join(f"[rank {rank}] rank {rank} has 33\n" for rank in range(3))
    for how, said in (("raises", "one is ill"), ("dies", "code 7"), ("others compute", "one is ill")):
        with pytest.raises(RankError, match=said) as failed:
            run_on_engines(client, fails, how)
        assert failed.value.ranks == [1] and "rank 1 of 3 ranks on " in failed.value.summary
        assert left() == ""
    found = engines("slurm")  # a notebook finds the cluster by its profile
    assert found is not None and run_on_engines(found, summed, 10.0) == expected


def test_without_a_cluster_there_are_no_engines(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert engines("slurm") is None
