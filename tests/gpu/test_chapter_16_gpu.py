"""Chapter 16 on a GPU: the same cells, captured by CUDA itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.check.parameters import declared
from labkit.cli.chapter_parameters import parameter_cell

CHAPTER = Path(__file__).parents[2] / "notebooks" / "16_cuda_graphs.ipynb"
TOLD = (
    "Runs counted after 24 calls (4 of them warm-up and capture): by Python 4, in a tensor 20.",
    "replay x 10: False",
    "result of a is still a: False ; it is b: True",
    "return x[x > 0].mean()",
    "if x.abs().max() > 10",
    "Python's dice, two replays alike: True",
)
"""Of what the cells say, that which holds on every device."""


def words(notebook: Path) -> str:
    """What its cells say: figures' sentences, refusals, printed lines."""
    outputs = [o for cell in json.loads(notebook.read_text())["cells"] for o in cell.get("outputs", [])]
    return "\n".join("".join(o.get("text", "") or o.get("data", {}).get("text/plain", "")) for o in outputs)


def test_the_stored_chapter_has_the_parameter_and_says_so() -> None:
    """Needs no GPU: what the next test relies on is not first missed where minutes are few."""
    assert "device" in declared(parameter_cell(CHAPTER))
    stored = words(CHAPTER)
    assert [told for told in TOLD if told not in stored] == []


@pytest.mark.gpu
def test_every_rule_is_broken_on_a_gpu_as_on_the_host(tmp_path: Path) -> None:
    """Every assert of the chapter holds, and its silent mistakes are as silent and as wrong."""
    for package in ("papermill", "ipykernel"):
        pytest.importorskip(package, reason=f"needs {package}")
    command = [sys.executable, "-m", "labkit.cli", "run", str(CHAPTER), "--out", str(tmp_path), "-p", "device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    fresh = words(tmp_path / CHAPTER.name)
    assert [told for told in TOLD if told not in fresh] == []
