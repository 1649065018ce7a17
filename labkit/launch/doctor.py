"""What this machine offers to a launch and what it lacks: the findings that `labkit doctor` prints, a line each."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from labkit.launch.available_memory import host_memory
from labkit.launch.info import CONNECTIONS, loopback_interface, loopback_problem
from labkit.launch.machine import FILES_PER_RANK, usable_cores
from labkit.launch.transformer_engine import why_no_transformer_engine

Level = Literal["good", "note", "bad"]
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    topic: str
    """What the finding is about."""
    level: Level
    """`good`, `note` (something optional is missing) or `bad` (a launch will fail or is likely to)."""
    text: str
    """The finding in words."""
    advice: str = ""
    """How to fix it; empty where nothing needs doing."""


def examine(*, launch: bool = False) -> list[Finding]:
    """Return a finding for everything that a launch depends on; with `launch`, start two ranks as well. Imports torch.

    An examination that fails becomes a bad finding itself, so one defect never hides the others.
    """
    examinations: list[Callable[[], Finding]] = [
        _python, _torch, _backends, _gpus, _attention, _connections, _transformer_engine, _cores, _memory,
        _shared_memory, _temporary_folder, _open_files, _processes, _loopback,
    ]  # fmt: skip
    if launch:
        examinations.append(two_ranks)
    findings = []
    for examination in examinations:
        try:
            findings.append(examination())
        except Exception as error:
            topic = examination.__name__.strip("_").replace("_", " ")
            findings.append(Finding(topic, "bad", f"could not be examined: {type(error).__name__}: {error}"))
    return findings


def _python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Finding("python", "good", text)


def _torch() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Finding("torch", "good", f"{torch.__version__} ({build})")


def _backends() -> Finding:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("backends", "bad", "torch was built without gloo", "install an official build of torch")
    nccl = "nccl" if dist.is_nccl_available() else "no nccl in this build (only GPUs need it)"
    return Finding("backends", "good", f"gloo, {nccl}")


def _gpus() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        text = ", ".join(f"{found.name} {found.total_memory / _GIB:.0f} GiB" for found in names)
        return Finding("GPUs", "good", f"{len(names)}: {text}; more ranks than that share them through gloo")
    if torch.version.cuda is None:
        return Finding("GPUs", "note", "none, as torch is the CPU build; every chapter runs on the CPU")
    return Finding("GPUs", "note", "torch is a CUDA build but sees no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES")


def _attention() -> Finding:
    """Report the kernels behind scaled_dot_product_attention, and the one that torch chooses for a causal layer."""
    import torch

    on_gpu, cuda = torch.cuda.is_available(), torch.backends.cuda
    kernels = {
        "flash": cuda.flash_sdp_enabled(),
        "cudnn": on_gpu and cuda.cudnn_sdp_enabled(),
        "efficient": on_gpu and cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    chosen = dict[str, list[str]]()
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.zeros(1, 16, 128, 64, dtype=dtype, device="cuda" if on_gpu else "cpu", requires_grad=True)
        number = torch._fused_sdp_choice(q, q, q, is_causal=True)  # pyright: ignore[reportPrivateImportUsage]
        name = torch.nn.attention.SDPBackend(number).name.removesuffix("_ATTENTION").lower()
        chosen.setdefault(name, []).append(str(dtype).removeprefix("torch."))
    takes = " and ".join(f"{name} for causal {' and '.join(dtypes)}" for name, dtypes in chosen.items())
    enabled = ", ".join(name for name, is_on in kernels.items() if is_on)
    return Finding("attention", "good", f"{enabled}; model.attention_backend = fused takes {takes}")


def _connections() -> Finding:
    """Report the number of CUDA's queues per process; `info.needs_one_connection` says why it matters."""
    given = os.environ.get(CONNECTIONS)
    if given is None:
        said = "is not set; labkit sets it to 1 for ranks with tp or cp above 1"
        return Finding("connections", "good", f"{CONNECTIONS} {said}")
    if given == "1":
        return Finding("connections", "good", f"{CONNECTIONS}=1")
    advice = "unset it, or set it to 1"
    said = "up to Hopper, transfers of tp and cp overlap reliably only with 1"
    return Finding("connections", "note", f"{CONNECTIONS}={given}; {said}", advice)


def _transformer_engine() -> Finding:
    topic = "Transformer Engine"
    if (missing := why_no_transformer_engine()) is not None:
        why = missing.removeprefix("Transformer Engine is ")  # the topic says it
        return Finding(topic, "note", f"{why}; labkit's own layers are used, fp8 included")
    return Finding(topic, "good", metadata.version("transformer_engine"))


def _cores() -> Finding:
    cores = usable_cores()
    if cores < 2:
        return Finding("cores", "note", "1; ranks take turns, so chapters run at half their usual speed")
    return Finding("cores", "good", f"{cores} (each rank uses one thread)")


def _memory() -> Finding:
    memory = host_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    text += ", by the limit of a control group" if memory.limited else ""
    if memory.available < 4 * _GIB:
        return Finding("memory", "note", text, "use at most 4 ranks; each needs about 0.1 GiB of its own")
    return Finding("memory", "good", text)


def _shared_memory() -> Finding:
    """Report the free space in /dev/shm, which DataLoader workers need and ranks do not."""
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "note", "no /dev/shm on this system")
    free = shutil.disk_usage("/dev/shm").free / _GIB
    if free < 0.25:
        advice = "DataLoader workers may fail; start the container with --shm-size=1g"
        return Finding("shared memory", "note", f"{free:.2f} GiB free in /dev/shm", advice)
    return Finding("shared memory", "good", f"{free:.1f} GiB free in /dev/shm")


def _temporary_folder() -> Finding:
    folder = tempfile.gettempdir()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"labkit")
    free = shutil.disk_usage(folder).free / _GIB
    if free < 0.5:
        advice = "results travel through it: free some space or set TMPDIR"
        return Finding("temporary folder", "bad", f"{free:.2f} GiB free in {folder}", advice)
    return Finding("temporary folder", "good", f"{free:.1f} GiB free in {folder}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = (soft - 64) // FILES_PER_RANK if soft != resource.RLIM_INFINITY else 512
    if ranks < 16:
        return Finding("open files", "bad", f"limit {soft}: not enough for 16 ranks", f"ulimit -n {min(hard, 4096)}")
    return Finding("open files", "good", f"limit {soft}")


def _processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        return Finding("processes", "good", "no limit")
    if soft < 256:
        return Finding("processes", "bad", f"limit {soft} for this user, threads included", "ulimit -u 4096")
    return Finding("processes", "good", f"limit {soft} for this user")


def _loopback() -> Finding:
    if problem := loopback_problem():
        return Finding("loopback", "bad", problem)
    return Finding("loopback", "good", f"interface {loopback_interface()}; ranks listen nowhere else")


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


def two_ranks() -> Finding:
    """Start two ranks that send each other messages."""
    from labkit.launch.launcher import run

    results = run(_sum_of_ranks, 2, backend="gloo", device="cpu", timeout=30.0)
    if results != [1.0, 1.0]:
        return Finding("two ranks", "bad", f"0 + 1 over two ranks gave {results}")
    return Finding("two ranks", "good", "started, summed over gloo, ended")
