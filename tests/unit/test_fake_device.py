"""labkit on a CUDA device that computes nothing (tests/fake_device): what a GPU would do in order, or wait for.

The device lives in processes of its own, one for each group of cases. A case alone, with all that was found:
`python tests/fake_device/child.py steps "dp2 shared overlap"`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu
from fake_device.cases import CASES
from fake_device.library import Unavailable, built, compiler

CHILD = Path(__file__).parents[1] / "fake_device" / "child.py"
try:
    compiler()
except Unavailable as reason:
    pytest.skip(f"no fake device: {reason}", allow_module_level=True)

Verdicts = dict[str, dict[str, Any]]
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


def verdicts_of(*words: str) -> Verdicts:
    """What a child found, by case; a skip where there can be no fake device."""
    try:
        built()
    except Unavailable as reason:
        pytest.skip(f"no fake device: {reason}")
    child = subprocess.run([sys.executable, str(CHILD), *words], capture_output=True, text=True, check=False)
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    assert child.returncode == 0, f"after {len(lines)} cases:\n{child.stderr[-3000:]}"
    return {found["name"]: found for found in map(json.loads, lines)}


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest) -> Verdicts:
    """Of the steps that this pytest has collected."""
    wanted = {item.callspec.params["name"] for item in request.session.items if "steps" in item.fixturenames}
    return verdicts_of("steps", *(name for name in CASES if name in wanted))


@pytest.fixture(scope="module")
def plants() -> Verdicts:
    """Of all planted mistakes."""
    return verdicts_of("plants")


@pytest.mark.parametrize("name", CASES)
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
    assert of_kind
    assert {name: found for name, found in of_kind.items() if not PLANTS[kind](found)} == {}
    if kind != "refused":
        assert {name: found["error"] for name, found in of_kind.items() if found["error"]} == {}


def test_without_a_compiler_there_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        built()


# ---- the GPU benchmark ----

LEFT_OUT = ("shared_tensor_parallel", "shared_pipeline", "shared_reduction")
"""Their ranks are processes that exchange numbers through the host, and a fake tensor has none. On the CPU
tests/parallel/test_benchmark_gpu_shared.py runs them."""
WAITS_OF_LABKIT = {
    "means": "the loss, once a step",
    "gradient_statistics": "the norm, once a step",
    "wait": "the rows of each expert, once a layer with experts",
    "_all_want_others": "the vote for other shapes, once a step with graphs of layers",
    "warming_up": "once ahead of captures",
    "before_captures": "once ahead of captures",
    "capturing": "once a capture",
    "_beside_the_allocator": "twice around captures",
}
"""Function -> why the host waits for the device there."""


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in gpu.PARTS if name not in LEFT_OUT])
def test_a_part_of_the_gpu_benchmark_at_its_real_size(name: str) -> None:
    found = verdicts_of("parts", name)[name]
    assert found["error"] is None, found["error"]
    assert found["rows"]
    assert [row for row in found["rows"] if any(key in row for key in gpu.USELESS)] == []
    assert {place for place in found["waits"] if of_labkit(place) not in (None, *WAITS_OF_LABKIT)} == set()
    assert {place for place in found["gemms"] if of_labkit(place) is not None} == set()


def of_labkit(place: str) -> str | None:
    """The function of labkit in which something happened; None where the innermost line is none of labkit."""
    line = place.partition(" at ")[2].partition(" < ")[0]
    return line.split()[-1] if line.startswith("labkit/") else None
