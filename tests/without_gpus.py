"""Tests see no GPU unless they are marked `gpu`.

`device="auto"` means CUDA where torch sees a GPU. On a machine that has one, tests of the CPU would so run on the GPU:
with other kernels, NCCL, and memory that others need. `tests/conftest.py` registers this file as a plugin. It needs
pytest alone.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around the whole test, so that fixtures of modules and sessions see no GPU either."""
    if item.get_closest_marker("gpu") is not None:
        return (yield)
    with no_gpu_seen():
        return (yield)


@contextmanager
def no_gpu_seen() -> Iterator[None]:
    """Inside the block there is no GPU for this process, nor for ranks, programs and kernels that it starts.

    CUDA reads the variable when it starts, and may have started in this process; so torch's own answers are replaced
    too. They are not where torch is yet to be imported: then CUDA has not started, and the variable says enough.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        if (torch := sys.modules.get("torch")) is not None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield
