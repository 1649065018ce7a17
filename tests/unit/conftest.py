"""Ranks of the few unit tests that launch some start with torch's compiler imported, which every optimizer imports.

A test that takes `misread` runs once for each row of its module's `TABLES`: {exercise: {id: (wrong answer, words of the
score that name the misunderstanding)}}.
"""

import gc

import pytest

from labkit.check import Score, check
from labkit.launch import preload

preload("torch._dynamo")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "misread" in metafunc.fixturenames:
        tables = metafunc.function.__globals__["TABLES"]
        rows = {f"{name} {key}": (name, *case) for name, table in tables.items() for key, case in table.items()}
        metafunc.parametrize("misread", list(rows.values()), ids=list(rows), indirect=True)


@pytest.fixture
def misread(request: pytest.FixtureRequest) -> tuple[Score, str]:
    """The score of a wrong answer, and the words that it must have once."""
    name, answer, words = request.param
    return check(name, answer), words


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leave what the modules before made out of garbage collections: a test that asks for one would wait a second."""
    gc.freeze()
