"""Memory and cores of machines laid out in a folder: containers of both kinds of control groups, no /proc."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from labkit.launch import info, machine
from labkit.launch.available_memory import GIB, Memory, free_gpu_memory, host_memory
from labkit.launch.machine import crowding

NONE_V1 = 9223372036854771712
"""What version 1 writes where there is no limit: 2^63 rounded down to a page."""


def laid_out(root: Path, files: dict[str, object], *, total: int = 24, available: int = 20) -> Path:
    """A root with /proc/meminfo in GiB and the given files."""
    meminfo = f"MemTotal: {total << 20} kB\nMemFree: 5 kB\nMemAvailable: {available << 20} kB\nHugePages_Total: 0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group_1(folder: str, limit: int, used: int, cache: int = 0) -> dict[str, object]:
    at = f"sys/fs/cgroup/memory/{folder}"
    stat = f"inactive_file 7\ntotal_inactive_file {cache}"
    return {f"{at}/memory.limit_in_bytes": limit, f"{at}/memory.usage_in_bytes": used, f"{at}/memory.stat": stat}


def group_2(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, object]:
    at = f"sys/fs/cgroup/{folder}"
    return {f"{at}/memory.max": limit, f"{at}/memory.current": used, f"{at}/memory.stat": f"inactive_file {cache}"}


V1 = {"proc/self/cgroup": "9:name=systemd:/\n8:pids:/a\n4:memory,hugetlb:/a/b\n0::/"}
V2 = {"proc/self/cgroup": "0::/a/b"}
MACHINES: dict[str, tuple[dict[str, object], Memory]] = {
    "no control groups": ({}, Memory(24 * GIB, 20 * GIB, False)),
    "version 2": ({**V2, **group_2("a/b", 4 * GIB, GIB)}, Memory(4 * GIB, 3 * GIB, True)),
    "file cache is free": ({**V2, **group_2("a/b", 4 * GIB, 3 * GIB, 2 * GIB)}, Memory(4 * GIB, 3 * GIB, True)),
    "a parent is tighter": (
        {**V2, **group_2("a/b", 4 * GIB, 0), **group_2("a", 3 * GIB, GIB)}, Memory(3 * GIB, 2 * GIB, True),
    ),
    "max is no limit": ({**V2, **group_2("a/b", "max", GIB)}, Memory(24 * GIB, 20 * GIB, False)),
    "a limit above what is free": ({**V2, **group_2("a/b", 22 * GIB, GIB)}, Memory(22 * GIB, 20 * GIB, False)),
    "full": ({**V2, **group_2("a/b", GIB, 2 * GIB)}, Memory(GIB, 0, True)),
    "version 1": ({**V1, **group_1("a/b", 2 * GIB, GIB, GIB // 2)}, Memory(2 * GIB, 3 * GIB // 2, True)),
    "version 1 without a limit": ({**V1, **group_1("a/b", NONE_V1, GIB)}, Memory(24 * GIB, 20 * GIB, False)),
    "a container that reads the path of its host": (
        {**V1, **group_1("", 5 * GIB, 4 * GIB)}, Memory(5 * GIB, GIB, True),
    ),
    "version 2 at the root of its mount": ({"proc/self/cgroup": "0::/", **group_2("", 6 * GIB, 0)},
                                           Memory(6 * GIB, 6 * GIB, True)),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_available_is_the_smaller_of_machine_and_control_groups(tmp_path: Path, name: str) -> None:
    files, expected = MACHINES[name]
    assert host_memory(laid_out(tmp_path, files)) == expected


def test_without_proc_all_of_the_memory_counts(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory(tmp_path) == Memory(total, total, False)


def test_this_machine_has_some() -> None:
    memory = host_memory()
    assert 0 < memory.available <= memory.total


@pytest.mark.parametrize(("ranks", "warns"), [(20, False), (21, True), (32, True)])
def test_a_crowd_is_more_than_ten_ranks_a_core(monkeypatch: pytest.MonkeyPatch, ranks: int, warns: bool) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    assert bool(crowding(ranks)) == warns
    assert not warns or f"{ranks} ranks share 2 cores" in crowding(ranks)


SMI = """#!/bin/sh
echo '0, GPU-a, [N/A], 81000'
echo '1, GPU-b, Disabled, 500'
echo '2, GPU-c, {mig}, 7'
"""


@pytest.mark.parametrize(
    ("visible", "mig", "expected"),
    [
        (None, "Disabled", [81000, 500, 7]),
        ("1", "Disabled", [500]),
        ("GPU-b,0", "Disabled", [500, 81000]),
        ("2,0", "Enabled", []),  # nobody knows what a part of it has
        ("", "Disabled", []),
    ],
)
def test_free_gpu_memory_in_the_order_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, mig: str, expected: list[int]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(mig=mig))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert free_gpu_memory() == [mib << 20 for mib in expected]


def test_without_a_driver_auto_is_the_cpu_and_torch_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_DRIVERS", ("/dev/labkit-has-no-such-device",))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert info.device_kind("auto") == "cpu" and "torch" not in sys.modules
    assert info.device_kind("cuda") == "cuda" and info.device_kind("cpu") == "cpu"
