"""The scripts for Slurm: bash can read them, sbatch knows their options, and their commands are labkit's.

A cluster is not needed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from labkit.cli import main

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
TRAIN, CHAPTERS, ARRAY = (
    ROOT / "examples" / "slurm" / f"{name}.sbatch" for name in ("train", "chapters", "chapter_array")
)
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)

OPTIONS = {
    "array": r"\d+(-\d+)?(,\d+(-\d+)?)*(%\d+)?",
    "cpus-per-task": r"\d+",
    "exclusive": r"(user|mcs|topo)?",
    "gpus-per-node": r"(\w+:)?\d+",
    "job-name": r"\S+",
    "mem": r"\d+[KMGT]?",
    "nodes": r"\d+(-\d+)?",
    "ntasks": r"\d+",
    "ntasks-per-node": r"\d+",
    "open-mode": r"append|truncate",
    "output": r"\S+",
    "requeue": r"",
    "signal": r"([RB]{1,2}:)?(SIG)?(USR1|USR2|TERM|INT|HUP|\d+)(@\d{1,5})?",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
}
"""Options of sbatch (https://slurm.schedmd.com/sbatch.html) -> their values; those that labkit's scripts may use."""


def directives(script: Path) -> list[tuple[str, str]]:
    """(option, value) of each line that sbatch reads: those ahead of the first command."""
    head = re.split(r"^(?!#|\s*$).*$", script.read_text(), maxsplit=1, flags=re.M)[0]
    lines = [line.removeprefix("#SBATCH ") for line in head.splitlines() if line.startswith("#SBATCH")]
    found = [re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", line) for line in lines]
    assert all(found), lines
    return [(match[1], match[2] or "") for match in found if match]


def test_all_scripts_are_there() -> None:
    assert [path.name for path in SCRIPTS] == ["chapter_array.sbatch", "chapters.sbatch", "train.sbatch"]


@each_script
def test_sbatch_knows_every_option_and_reads_all_of_them(script: Path) -> None:
    given = directives(script)
    assert script.read_text().startswith("#!/bin/bash\n")
    assert len(given) == script.read_text().count("\n#SBATCH"), "a line behind the first command is ignored"
    assert len(dict(given)) == len(given)
    assert [pair for pair in given if not re.fullmatch(OPTIONS.get(pair[0], "unknown option"), pair[1])] == []


@each_script
def test_bash_can_read_it(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_the_warning_comes_early_enough_for_the_ranks_to_end() -> None:
    given, text = dict(directives(TRAIN)), TRAIN.read_text()
    (warning,) = re.findall(r"^B:USR1@(\d+)$", given["signal"])
    (patience,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)$", text, re.M)
    assert 30 < int(patience) < int(warning)
    assert "trap 'requeue=yes; stop' USR1" in text and "requeue" in given
    assert given["ntasks-per-node"] == "1", "one torchrun a node"


STUB = """#!/bin/bash
echo "$@" >>"$CALLS"
[[ $4 != *08_* ]]
"""


def test_chapters_run_one_after_the_other_and_a_failed_one_is_named(tmp_path: Path) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB)
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "CALLS": str(calls), "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}

    def chapters(*words: str) -> tuple[int, str, list[str]]:
        done = subprocess.run(
            ["bash", str(CHAPTERS), *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        called = calls.read_text().splitlines()
        calls.unlink()
        return done.returncode, done.stderr, called

    code, said, called = chapters()
    names = [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
    assert called == [f"-m labkit run {name} --out runs/chapters-7 --html" for name in names]
    assert (code, said) == (1, f"1 of {len(names)} chapters failed: notebooks/08_data_parallel.ipynb\n")
    chosen = [f"-m labkit run {word} --out runs/chapters-7 --html" for word in ("16", "00")]
    assert chapters("16", "00") == (0, "", chosen)


def test_a_task_of_the_array_runs_its_chapter_with_the_values_given(tmp_path: Path) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(STUB)
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "CALLS": str(calls), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    command = ["bash", str(ARRAY), "-p", "world_size=2,4"]
    subprocess.run(command, env=environment | {"PATH": "/usr/bin:/bin"}, cwd=ROOT, check=True)
    assert calls.read_text() == "-m labkit run 03 -p world_size=2,4 --out runs/array-7/03 --html\n"
    last = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))[-1].name[:2]
    assert dict(directives(ARRAY))["array"] == f"0-{int(last)}"


def test_the_command_of_the_example_is_one_that_labkit_understands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (words,) = re.findall(r"^#\s+sbatch examples/slurm/train.sbatch (.*)$", TRAIN.read_text(), re.M)
    config = tmp_path / "mine.yaml"
    config.write_text("model: {heads: 8}\n")
    assert main(["train", *words.replace("runs/mine.yaml", str(config)).split(), "--print-config"]) == 0
    assert "tp: 8" in capsys.readouterr().out
