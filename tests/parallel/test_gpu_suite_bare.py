"""The GPU suite where labkit is not installed: an environment of torch, numpy, pytest, cloudpickle and tqdm alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BARE = ("torch", "numpy", "pytest", "cloudpickle", "tqdm")
PLANTED = [
    {"name": "crash", "command": ["python", "-c", "import os; print('about to'); os.kill(os.getpid(), 11)"]},
    {"name": "hang", "command": ["python", "-c", "import time; print('hanging', flush=True); time.sleep(600)"]},
    {"name": "textless", "command": ["python", "-c", "raise RuntimeError"]},
]
CHOSEN = (
    "smoke: gemm", "random states", "graph rules", "precision", "CPU: labkit import", "CPU: train optimizer",
    "CPU: graphs helper", "benchmark: layer", "benchmark: graphs", "experts of ranks", "benchmark: shared pipeline",
    "CPU: groups ranks",
)  # fmt: skip
"""A covering few of the real table: every kind, phase and family."""


def needed(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """These distributions and all that they require here, by name."""
    todo, found = list(names), {}
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system
        requirements = [Requirement(text) for text in found[name].requires or []]
        todo += [one.name for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def linked_environment(folder: Path) -> Path:
    """An environment whose packages are links to those of this one; returns its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    [target] = folder.glob("lib/python*/site-packages")
    for distribution in needed(BARE).values():
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            source, link = Path(str(distribution.locate_file(top))), target / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder / "bin" / "python"


def installed_environment(folder: Path, torch: str) -> Path:
    """A fresh environment with this release of torch, from the package index; returns its Python."""
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", f"torch=={torch}", *BARE[1:]]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        pytest.skip(f"needs torch {torch} from a package index: {said[-1] if said else error}")
    return python


def lacks(python: Path) -> None:
    """The environment is bare: what the suite must do without is not there."""
    names = ("hypothesis", "tokenizers", "yaml", "pytest_timeout", "matplotlib", "papermill", "labkit")
    code = f"import importlib.util as u; print([name for name in {names} if u.find_spec(name)])"
    done = subprocess.run(
        [str(python), "-c", code], cwd="/", env=bare_variables(python), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def bare_variables(python: Path) -> dict[str, str]:
    """This process's environment without its Python path, and no GPU."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST", "COV"))}
    return kept | {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def run_suite(python: Path, folder: Path, *words: str) -> tuple[int, str]:
    """(exit code, summaries of all phases) of the suite."""
    command = [str(ROOT / "scripts" / "gpu_suite.sh"), "all", "--memory", str(folder / "memory"), "--jobs", "2", *words]
    environment = bare_variables(python) | {"OUT": str(folder / "out")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=1700)
    texts = [(folder / "out" / f"phase{phase}.txt").read_text() for phase in (1, 2, 3)]
    return done.returncode, "\n".join(texts)


def outcomes(text: str) -> dict[str, str]:
    """By part, from the summaries."""
    found = re.findall(r"^  (passed|skipped|failed|crashed|too long|cut off) +[\d.]+ s  (.+?) \(", text, re.MULTILINE)
    return {name: outcome for outcome, name in found}


@pytest.mark.sweep
def test_a_covering_few_of_the_suite_with_a_crash_a_hang_and_an_error_without_text(tmp_path: Path) -> None:
    table = json.loads((ROOT / "scripts" / "gpu_parts.json").read_text())
    real = [part for part in table if part["name"] in CHOSEN]
    assert len(real) == len(CHOSEN)
    parts = [part | {"phase": 1, "seconds": 2 if part["name"] == "hang" else 60} for part in PLANTED] + real
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    python = linked_environment(tmp_path / "bare")
    lacks(python)
    code, text = run_suite(python, tmp_path, "--parts", str(tmp_path / "parts.json"))
    found = outcomes(text)
    assert code == 1, text
    assert {name: found[name] for name in ("crash", "hang", "textless")} == {
        "crash": "crashed", "hang": "too long", "textless": "failed",
    }, text  # fmt: skip
    # phase 3 repeats what phase 1 broke, and nothing else failed in any phase
    assert {name for name, outcome in found.items() if outcome not in ("passed", "skipped")} == {
        "crash", "hang", "textless",
    }, text  # fmt: skip
    assert set(found) == {part["name"] for part in parts}
    assert all(found[name] == ("passed" if name.startswith("CPU: ") else "skipped") for name in CHOSEN), text
    assert all(f"== {name}: " in text for name in ("crash", "hang", "textless")) and "   about to" in text
    assert re.search(r"^ +\d+  needs a GPU$", text, re.MULTILINE), "the tests and benchmarks of the GPU are skipped"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("torch", ["as pinned", "2.11.0"])
def test_the_whole_suite(tmp_path: Path, torch: str) -> None:
    """Every part of the table passes on a CPU or is skipped for the want of a GPU or of a package."""
    folder = tmp_path / "bare"
    python = linked_environment(folder) if torch == "as pinned" else installed_environment(folder, torch)
    lacks(python)
    code, text = run_suite(python, tmp_path)
    print(text, file=sys.stderr)
    assert code == 3, text
    assert {name for name, outcome in outcomes(text).items() if outcome not in ("passed", "skipped")} == set()
    assert "not started" not in text
