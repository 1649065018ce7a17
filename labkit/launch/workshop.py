"""Whether a laptop is ready for a workshop: what a chapter needs, and one line for the teacher to paste."""

from __future__ import annotations

import platform
import shutil
import socket
import time
from importlib import metadata
from pathlib import Path

from labkit.launch.available_memory import host_memory
from labkit.launch.doctor import Finding, examine, two_ranks
from labkit.launch.machine import usable_cores

_GIB = 1 << 30
MEMORY = 1.5
"""GiB that must be available: the largest chapter takes 1.3 in all its processes together."""
DISK = 0.5
"""GiB that must be free where the copies are kept."""
PORTS = {8888: "JupyterLab", 8765: "labkit board"}


def examine_for_workshop() -> list[Finding]:
    """Return the findings that matter in a room, the doctor's bad ones among them. Starts two ranks."""
    bad = [finding for finding in examine() if finding.level == "bad"]
    return [_versions(), _room(), _disk(), _ports(), _launch(), *bad]


def one_line(findings: list[Finding]) -> str:
    """Return what a participant sends to the teacher."""
    bad = [f"{finding.topic} ({finding.text})" for finding in findings if finding.level == "bad"]
    texts = [finding.text for finding in findings if finding.level != "bad"]
    return "; ".join([f"NOT READY: {', '.join(bad)}" if bad else "ready", *texts])


def _versions() -> Finding:
    parts = [f"Python {platform.python_version()}"]
    try:
        parts += [f"{name} {metadata.version(name)}" for name in ("labkit", "torch", "jupyterlab")]
    except metadata.PackageNotFoundError as missing:
        return Finding("versions", "bad", f"{missing.name} is not installed", "install labkit again, as a whole")
    return Finding("versions", "good", ", ".join([*parts, f"{platform.system()} {platform.machine()}"]))


def _room() -> Finding:
    """Report cores and memory."""
    memory, cores = host_memory(), usable_cores()
    text = f"{cores} cores, {memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB memory"
    if memory.available < MEMORY * _GIB:
        return Finding("memory", "bad", text, f"a chapter needs up to {MEMORY} GiB: close browsers and other programs")
    return Finding("memory", "good" if cores > 1 else "note", text)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    text = f"{free:.1f} GiB disk"
    return Finding("disk", "good", text) if free >= DISK else Finding("disk", "bad", text, "free some space here")


def _ports() -> Finding:
    """Report ports that somebody else uses; JupyterLab and the board then take another one."""
    taken = [f"{port} ({user})" for port, user in PORTS.items() if not _is_free(port)]
    if taken:
        return Finding(
            "ports", "note", f"port {' and '.join(taken)} in use", "close what uses it, or name another --port"
        )
    return Finding("ports", "good", f"ports {' and '.join(map(str, PORTS))} free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _launch() -> Finding:
    started = time.monotonic()
    try:
        found = two_ranks()
    except Exception as error:
        return Finding("two ranks", "bad", f"{type(error).__name__}: {error}".splitlines()[0], "labkit doctor --launch")
    if found.level == "bad":
        return found
    return Finding("two ranks", "good", f"two ranks in {time.monotonic() - started:.1f} s")
