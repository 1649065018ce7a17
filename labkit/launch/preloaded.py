"""Import once, in the fork server, what every rank needs. No tensor is made, so no thread starts and no GPU is touched.

The server never collects garbage, because that would take a fifth of the time of importing torch. Each rank starts
collecting for the objects that it makes itself, so that no collection writes into the pages that all ranks share
(`worker._prepare`).
"""
# ruff: noqa: E402, F401  (collecting stops before the imports, which serve the ranks that are forked from here)

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
    os.setpgid(0, 0)  # Jupyter kills the whole process group of a kernel; in a terminal, Ctrl-Z stops the ranks too


def _sweep_after(launcher: int) -> None:
    """Remove the folders of a launcher that was killed, once the system has dropped its locks, and end at once.

    The server ends when the pipe from its launcher closes. The system closes that pipe before the launcher's other
    files, and gives the server a new parent after all of them, so the server waits for the new parent. It has nothing
    else to tidy, and taking all that it has imported to pieces would take a second of processor time.
    """
    deadline = time.monotonic() + 2.0
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(0.002)
    sweep_all()
    os._exit(0)


atexit.register(_sweep_after, os.getppid())

if not torch.backends.cuda.is_built():  # untried with drivers of GPUs, which must not be touched before a fork
    import torch._dynamo  # torch.optim imports it at first use, which took 0.9 s of processor time in every rank
