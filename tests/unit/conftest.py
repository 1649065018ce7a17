"""Ranks of the few unit tests that launch some start with torch's compiler imported, which every optimizer imports."""

import gc

import pytest

from labkit.launch import preload

preload("torch._dynamo")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leave what the modules before made out of garbage collections: a test that asks for one would wait a second."""
    gc.freeze()
