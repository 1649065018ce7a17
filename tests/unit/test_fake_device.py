"""Runs labkit on a CUDA device that computes nothing (tests/fake_device), to find races and waits of the host.

Each group of cases runs in a process of its own. To run one case and see everything that was found:
`python tests/fake_device/child.py steps "dp2 shared overlap"`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_device.cases import CASES, DAILY
from fake_device.library import Unavailable, built, compiler
from fake_device.parent import Verdicts, verdicts_of

try:
    compiler()
except Unavailable as reason:
    pytest.skip(f"no fake device: {reason}", allow_module_level=True)
pytestmark = pytest.mark.timeout(900)  # a child runs all cases, for the first test of a group

PLANTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "races": lambda found: len(found["races"]) > 0,
    "ordered": lambda found: found["races"] == [],
    "waits": lambda found: sum(found["waits"].values()) == 1,
    "no waits": lambda found: found["waits"] == {},
    "copies": lambda found: sum(found["copies"].values()) == 1,
    "no copies": lambda found: found["copies"] == {},
    "misaligned": lambda found: found["gemms"] != {},
    "aligned": lambda found: found["gemms"] == {},
    "refused": lambda found: "Capturing: " in (found["error"] or ""),
    "captured": lambda found: found["error"] is None,
}
"""Kind -> what must hold for each plant of the kind."""


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest) -> Verdicts:
    """Of the steps that this pytest has collected."""
    own = [item for item in request.session.items if item.path == request.path and "steps" in item.fixturenames]
    wanted = {item.callspec.params["name"] for item in own}
    return verdicts_of("steps", *(name for name in CASES if name in wanted))


@pytest.fixture(scope="module")
def plants() -> Verdicts:
    """Of all planted mistakes; every kind of them must be checked."""
    found = verdicts_of("plants")
    assert {name.partition(": ")[0] for name in found} == set(PLANTS)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DAILY else [pytest.mark.sweep]) for name in CASES]
)
def test_a_step_has_no_race_and_waits_as_often_as_it_must(steps: Verdicts, name: str) -> None:
    found = steps[name]
    assert found["error"] is None, found["error"]
    assert found["races"] == []
    assert sum(found["waits"].values()) == CASES[name].waits, found["waits"]
    assert sum(found["copies"].values()) <= CASES[name].copies, found["copies"]
    assert found["gemms"] == {}


@pytest.mark.parametrize("kind", PLANTS)
def test_planted_mistakes_are_found_and_their_twins_are_clean(plants: Verdicts, kind: str) -> None:
    of_kind = {name: found for name, found in plants.items() if name.startswith(f"{kind}: ")}
    assert {name: found for name, found in of_kind.items() if not PLANTS[kind](found)} == {}
    if kind != "refused":
        assert {name: found["error"] for name, found in of_kind.items() if found["error"]} == {}


def test_without_a_compiler_there_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        built()
