"""Imported once by the fork server: what every rank needs. It makes no tensor, so no thread and no GPU is touched.

The server never collects garbage, which takes a fifth of the time of importing torch. Each rank begins to do so for
what it makes itself; then a collection does not write into the pages that all ranks share (`worker._prepare`).
"""
# ruff: noqa: E402, F401  (collections end ahead of the imports, which are for the ranks that are forked from here)

import gc

gc.disable()

import atexit
import os
import time

import cloudpickle
import numpy
import torch
import torch.distributed

import labkit.events
import labkit.launch.worker
from labkit.launch.folders import sweep_all

if "JPY_PARENT_PID" in os.environ:
    os.setpgid(0, 0)  # Jupyter kills the whole process group of a kernel; in a terminal, Ctrl-Z stops ranks as well


def _sweep_after(launcher: int) -> None:
    """Remove the folders of a launcher that was killed, when the system has dropped its locks.

    The server ends as the pipe from its launcher closes. The system closes that pipe before the launcher's other files,
    and gives the server a new parent after them.
    """
    deadline = time.monotonic() + 2.0
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(0.002)
    sweep_all()


atexit.register(_sweep_after, os.getppid())

if not torch.backends.cuda.is_built():  # untried with drivers of GPUs, which must not be touched before a fork
    import torch._dynamo  # torch.optim imports it at first use, which took 0.9 s of processor time in every rank
