"""Where a number comes from: the commit that was measured, the machine in words and the day.

    origin() -> {"commit": "3d82a90...", "changed": [], "machine": {...}, "date": "2026-11-22"}

A reader compares two results only if commit and machine tell how. Nothing here names the machine or its owner.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ("labkit", "benchmarks", "constraints.txt", ":!benchmarks/results")
"""Paths that decide a result. A benchmark itself rewrites its results, so they are no change."""
UNKNOWN = "unknown"
TREE = f"{UNKNOWN}, files "
"""Prefix of the name of code without git; a hash of its files follows."""
SEARCHED = 300
"""Commits among which `commit_of` looks for files, the newest."""
KEYS = ("commit", "changed", "machine", "date")
"""Keys of an origin; every stored result holds them all."""


def origin() -> dict[str, Any]:
    """Commit, files changed since the commit, machine and day of this run."""
    commit, changed = code(ROOT)
    return {"commit": commit, "changed": changed, "machine": machine(), "date": time.strftime("%Y-%m-%d")}


def code(root: Path) -> tuple[str, list[str]]:
    """Hash of the commit that is checked out, and the files of `MEASURED` that differ from the commit.

    Without git or outside a checkout `TREE` and a hash of these files stand for the commit, and the list is empty.
    """
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel").strip()).resolve() != root.resolve():
            return TREE + _digest(_blobs(root)), []  # a copy that lies in another repository
        commit = _git(root, "rev-parse", "HEAD").strip()
        status = _git(root, "status", "--porcelain", "--no-renames", "--", *MEASURED)
    except (OSError, subprocess.SubprocessError):
        return TREE + _digest(_blobs(root)), []
    return commit, [line[3:] for line in status.splitlines()]


def commit_of(name: str, root: Path = ROOT) -> str:
    """The newest commit with the files that `name` stands for, if possible in HEAD's history.

    `name` itself where it is a commit or none is found.
    """
    if not name.startswith(TREE):
        return name
    history, others = (_git(root, "rev-list", f"--max-count={SEARCHED}", ref).split() for ref in ("HEAD", "--all"))
    for commit in dict.fromkeys([*history, *others]):
        listed = _git(root, "ls-tree", "-r", "-z", commit, "--", *MEASURED[:-1]).split("\0")
        blobs = (line.split("\t") for line in listed if line)
        if name == TREE + _digest({path: words.split()[2] for words, path in blobs}):
            return commit
    return name


def _blobs(root: Path) -> dict[str, str]:
    """Path -> git's hash of the file as it lies there."""
    found = {}
    for path in (path for name in MEASURED[:-1] for path in (root / name, *(root / name).rglob("*"))):
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            hashed = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            found[path.relative_to(root).as_posix()] = hashed
    return found


def _digest(blobs: dict[str, str]) -> str:
    """Hash of the files that decide a result."""
    told = [f"{blobs[path]} {path}\n" for path in sorted(blobs) if not path.startswith("benchmarks/results/")]
    return hashlib.sha1("".join(told).encode()).hexdigest()


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def same_code(result: dict[str, Any]) -> bool:
    """True where the code of a stored result is the code of this checkout, both without changed files."""
    commit, changed = code(ROOT)
    if commit.startswith(UNKNOWN) or changed or result.get("changed", [""]):
        return False
    try:
        return not _git(ROOT, "diff", "--name-only", result["commit"], commit, "--", *MEASURED)
    except subprocess.SubprocessError:  # a commit that this checkout does not hold
        return False


def code_in_words(result: dict[str, Any]) -> str:
    """Commits of a result on one line; rows that were merged from several runs bear their own commits."""
    found = {(row["commit"], len(row["changed"])) for row in result["rows"] if "commit" in row}
    if not found and "commit" in result:
        found = {(result["commit"], len(result["changed"]))}
    return ", ".join(
        f"commit {commit if commit.startswith(UNKNOWN) else commit[:10]}"
        + (f" with {changed} changed file{'s' * (changed > 1)}" if changed else "")
        for commit, changed in sorted(found)
    ) or "an unrecorded commit"  # fmt: skip


def machine() -> dict[str, Any]:
    """The machine in words: all that a reader needs for a comparison."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    words: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        words["gpu"] = torch.cuda.get_device_name()
        words["gpus"] = torch.cuda.device_count()
        words["cuda"] = torch.version.cuda
        words |= {"driver": _driver(), "triton": _version("triton")}
    return words


def machine_in_words(machine: dict[str, Any]) -> str:
    """The machine on one line."""
    gpu = f", {machine['gpus']} x {machine['gpu']} (CUDA {machine['cuda']}" if "gpu" in machine else ""
    gpu += "".join(f", {key} {machine[key]}" for key in ("driver", "triton") if key in machine) + (")" if gpu else "")
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB{gpu}; "
        f"Python {machine['python']}, torch {machine['torch']}"
    )


def _driver() -> str:
    """Version of NVIDIA's driver."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return found.stdout.split()[0] if found.stdout.split() else UNKNOWN


def _version(package: str) -> str:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Model name of the processor where the system tells the name, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
