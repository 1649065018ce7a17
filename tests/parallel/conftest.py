"""Ranks that many tests share, because starting them costs more than most of the tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from labkit.launch import Ranks


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[Callable[..., list[Any]]]:
    """`on_ranks(fn, world_size, *args)`: as `run`, on ranks that are started once per world size and session."""
    started: dict[int, Ranks] = {}

    def call(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
        if world_size not in started:
            started[world_size] = Ranks(world_size)
        return started[world_size].run(fn, *args)

    yield call
    for ranks in started.values():
        ranks.close()
