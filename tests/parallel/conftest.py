"""Ranks that many tests share, because starting them costs more than most of the tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from labkit.launch import Ranks, preload

# A rank that makes an optimizer imports torch's compiler, which takes a second, and labkit itself another tenth. The
# fork server imports both once, so that each of the thousands of ranks here starts with them.
preload("torch._dynamo", "labkit.train.parity", "labkit.train.pretraining", "labkit.train.checkpoint.checkpoints")


@pytest.fixture(scope="module")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`on_ranks(fn, world_size, *args)`: like `labkit.launch.run`, on ranks that the tests of one module share."""
    started: dict[int, Ranks] = {}

    def call(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        if world_size not in started:
            started[world_size] = Ranks(world_size, device="cpu", backend="gloo")
        return started[world_size].run(fn, *args)

    yield call
    for ranks in started.values():
        ranks.close()
