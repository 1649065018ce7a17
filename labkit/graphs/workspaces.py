"""Bytes of the workspaces that cuBLAS keeps for a stream on which graphs are captured.

They are no part of a graph pool (`capture_streams.py` sees to that) and do not grow with layers or microbatches: torch
allocates one for each thread that runs matrix products there, and keeps it as long as the process lives. A training
step has two such threads, the main one and autograd's, which runs the backwards.

Sources: `parseChosenWorkspaceSize` in PyTorch's CublasHandlePool.cpp; NVIDIA's cuBLAS documentation,
`cublasSetWorkspace`, for what Hopper needs; pytorch#168175 for cuBLASLt, which shares the workspace from 2.11 on.
"""

from __future__ import annotations

import os
import re

MIB = 1 << 20
LARGE = 32 * MIB
"""From compute capability 9.0 (Hopper) on."""
SMALL = 2 * 4 * MIB + 8 * 16 * 1024
"""Of older GPUs: cuBLAS's own default, `:4096:2:16:8`."""


def predict_workspaces(capability: tuple[int, int], *, config: str | None = None, threads: int = 2) -> int:
    """Bytes of all workspaces of one capture stream.

    Args:
        capability: Compute capability of the GPU, (9, 0) on Hopper.
        config: `:SIZE:COUNT` pairs in KiB, as in the environment variable CUBLAS_WORKSPACE_CONFIG, which is read where
            this is None. torch takes its default for text without such a pair, and so does this function.
        threads: Threads that run matrix products in captures; 1 where nothing is differentiated.

    Raises:
        ValueError: fewer than one thread.
    """
    if threads < 1:
        raise ValueError(f"threads={threads}: at least one thread runs the products")
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "") if config is None else config
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    default = LARGE if capability[0] >= 9 else SMALL
    return threads * (sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else default)
