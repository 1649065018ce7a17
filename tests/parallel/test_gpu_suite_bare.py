"""The GPU suite where labkit is not installed: an environment of torch, numpy, pytest, cloudpickle and tqdm alone.

All tests here are `sweep`: the real parts take minutes of all cores.
"""

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
    {"name": name, "estimate": 2, "limit": limit, "command": ["python", "-c", code]}
    for name, limit, code in (
        ("crash", 60, "import os; print('about to'); os.kill(os.getpid(), 11)"),
        ("hang", 2, "import time; print('hanging', flush=True); time.sleep(600)"),
        ("textless", 60, "raise RuntimeError"),
    )
]
CHOSEN = (
    "smoke", "chapter 16", "graph rules", "precision", "context and collectives", "benchmark: layer",
    "benchmark: graphs", "benchmark: shared pipeline", "CPU: ranks", "CPU: training", "CPU: graphs",
)  # fmt: skip
"""A covering few of the real plan: every kind and family."""


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
    """(exit code, summary) of the suite, in one command of half an hour at most."""
    command = [str(ROOT / "scripts" / "gpu_suite.sh"), "--out", str(folder / "results"), "--jobs", "2"]
    command += ["--without-gpu", *words]
    environment = bare_variables(python) | {"OUT": str(folder / "out")}
    done = subprocess.run(
        [*command, "--per-command", "30"], env=environment, capture_output=True, text=True, cwd=folder, timeout=1900
    )
    assert done.returncode in (0, 1, 3), done.stderr
    return done.returncode, (folder / "out" / "summary.txt").read_text()


def outcomes(text: str) -> dict[str, str]:
    """By part, from the summary."""
    found = re.findall(
        r"^  (passed|skipped|failed|crashed|too long|cut off) +[\d.]+ +\d+  (.+?) \(", text, re.MULTILINE
    )
    return {name: outcome for outcome, name in found}


@pytest.mark.sweep
@pytest.mark.timeout(1900)
def test_a_covering_few_of_the_suite_with_a_crash_a_hang_and_an_error_without_text(tmp_path: Path) -> None:
    plan = json.loads((ROOT / "scripts" / "gpu_plan.json").read_text())
    real = [part for part in plan if part["name"] in CHOSEN]
    assert len(real) == len(CHOSEN)
    (tmp_path / "plan.json").write_text(json.dumps(PLANTED + real))
    python = linked_environment(tmp_path / "bare")
    lacks(python)
    code, text = run_suite(python, tmp_path, "--plan", str(tmp_path / "plan.json"))
    found = outcomes(text)
    assert code == 1, text
    planted = {"crash": "crashed", "hang": "too long", "textless": "failed"}
    assert found == planted | {name: "passed" if name.startswith("CPU: ") else "skipped" for name in CHOSEN}, text
    assert all(f"== {name}: " in text for name in planted) and "   about to" in text
    assert re.search(r"^ +\d+  needs a GPU$", text, re.MULTILINE), "the tests and benchmarks of the GPU are skipped"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("torch", ["as pinned", "2.11.0"])
def test_the_whole_suite(tmp_path: Path, torch: str) -> None:
    """Every part of the plan passes on a CPU or is skipped for the want of a GPU or of a package."""
    folder = tmp_path / "bare"
    python = linked_environment(folder) if torch == "as pinned" else installed_environment(folder, torch)
    lacks(python)
    code, text = run_suite(python, tmp_path)
    print(text, file=sys.stderr)
    assert code == 3, text
    assert {name for name, outcome in outcomes(text).items() if outcome not in ("passed", "skipped")} == set()
    assert "not started" not in text
