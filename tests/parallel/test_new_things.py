"""A schedule, a field, a layer spec and an exercise, added to a copy of labkit by the steps of docs/architecture.md.

The rows of "Where a new thing goes" are tried here, not believed: the copy changes where its rows say, and nowhere
else. Then each new thing is used as a reader would use it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE = '''
"""Some forwards, then their backwards, and so on: GPipe in rounds."""

from labkit.schedules.ir import Schedule
from labkit.schedules.tables import from_programs


def in_rounds(pp: int, microbatches: int, *, microbatches_a_round: int) -> Schedule:
    """Program of every rank with n microbatches a round: `(m/n)(nF nB)`."""
    count = min(microbatches_a_round, microbatches)
    rounds = [(count, "F"), (count, "B")] * -(-microbatches // count)
    return from_programs("in rounds", microbatches, [rounds] * pp, lambda rank, _: rank)
'''
ROUND = """\
    microbatches_a_round: int = field(2, "Forwards of in_rounds before their backwards.", ge=1)
"""
FIELD = """\
    branch_scale: float = field(1.0, "Attention is multiplied by this before it joins the residual stream.", gt=0,
        of_model=True)
"""
LAYER_SPEC = '''
"""Attention whose output is multiplied by `model.branch_scale`."""

import dataclasses

from labkit.models.build import LayerSpec
from labkit.models.chunks import build_model_chunk
from labkit.models.core_attention import CoreAttention


class ScaledAttention(CoreAttention):
    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.branch_scale = config.branch_scale

    def forward(self, *args):
        return self.branch_scale * super().forward(*args)


class ScaledSpec(LayerSpec):
    def core_attention(self, name, config, rng, tp, cp, cp_comm_type):
        return ScaledAttention(config, rng, cp, cp_comm_type, name=name)


def model_provider(config, groups, *, pre_process, post_process, chunk):
    chunk = dataclasses.replace(chunk, spec=ScaledSpec())
    return build_model_chunk(config, groups, pre_process=pre_process, post_process=post_process, chunk=chunk)
'''
EXERCISE = '''
"""Exercise of chapter 99."""

from collections.abc import Iterator
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise


@exercise("99.double", "Write double(number) -> twice the number.")
def double(answer: Any) -> Iterator[Outcome]:
    yield compare("3", 6, lambda: answer(3))
    yield compare("2", 4, lambda: answer(2))
'''
TRAIN = ["train", "--preset", "tiny", "--hidden", "32", "--heads", "4", "--seq-length", "16", "--layers", "2",
        "--global-batch-size", "4", "--steps", "2", "--precision", "fp64", "--nproc", "2", "--pp", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of labkit in which the four things are added."""
    folder = tmp_path_factory.mktemp("copy")
    labkit = folder / "labkit"
    shutil.copytree(ROOT / "labkit", labkit, ignore=shutil.ignore_patterns("__pycache__"))
    (labkit / "schedules" / "in_rounds.py").write_text(SCHEDULE)
    row = '    "in_rounds": NamedSchedule("labkit.schedules.in_rounds:in_rounds", reads=("microbatches_a_round",)),\n'
    _insert(labkit / "config" / "choices.py", "SCHEDULES = {\n", row)
    _insert(labkit / "config" / "sections.py", '    """Shape of the model. Defaults give a small GPT-2."""\n\n', FIELD)
    _insert(labkit / "config" / "sections.py", '    """How microbatches go through the pipeline."""\n\n', ROUND)
    (labkit / "models" / "scaled_spec.py").write_text(LAYER_SPEC)
    (labkit / "check" / "chapter_99.py").write_text(EXERCISE)
    return folder


def _insert(path: Path, after: str, text: str) -> None:
    before, found, rest = path.read_text().partition(after)
    assert found, f"{path} has no {after!r}"
    path.write_text(before + found + text + rest)


def run(copy: Path, script: str) -> list[str]:
    """The lines that a script prints which imports the copy."""
    path = copy / "script.py"
    path.write_text(f"def main():\n{textwrap.indent(script, '    ')}\nif __name__ == '__main__':\n    main()\n")
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, str(path)], cwd=copy, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def trained(copy: Path) -> list[str]:
    """What the copy prints: a training with the new schedule and field, the usual one, and what else knows of them."""
    own = ["--schedule.name", "in_rounds", "--branch-scale", "0.5", "--checkpoint.dir", "kept"]
    wide = ["--schedule.name", "in_rounds", "--microbatches-a-round", "4"]
    script = f"""
import runpy
from labkit.cli import main
from labkit.viz import explore_schedule
assert main({[*TRAIN, *own, "--output-dir", "own", "--write-events"]}) == 0
assert main({TRAIN}) == 0
assert main({[*TRAIN, *wide, "--output-dir", "wide", "--write-events"]}) == 0
assert main({[*TRAIN, "--steps", "3", "--checkpoint.dir", "kept"]}) == 2, "a checkpoint of another model"
assert main("order --pp 2 --microbatches 4 --name in_rounds".split()) == 0
print("explored:", explore_schedule(builder="in_rounds", pp=2, microbatches=4).sentence)
print(runpy.run_path({str(ROOT / "scripts" / "make_config_reference.py")!r})["page"]())
"""
    return run(copy, script)


def order_of(folder: Path) -> str:
    """The forwards and backwards of rank 0 in a run's events, by their letters."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kinds = {"forward": "F", "backward": "B"}
    return "".join(kinds.get(event["kind"], "") for event in events if event["rank"] == 0)


def test_a_new_schedule_trains_by_its_name_and_all_that_lists_names_knows_it(copy: Path, trained: list[str]) -> None:
    own, usual, _ = [line for line in trained if "training loss" in line]
    assert own == usual
    assert order_of(copy / "own") == "FFBB" * 4, "two rounds in each of two steps; 1F1B has FBFB"
    assert order_of(copy / "wide") == "FFFFBBBB" * 2, "the builder has read its field"
    assert any(re.fullmatch(r" *rank 0 +0F0 +0F1 +0B0 +0B1 +0F2 +0F3 +0B2 +0B3", line) for line in trained)
    assert any(line.startswith("explored: in rounds, 2 stages, 4 microbatches") for line in trained)
    assert any("Values: auto, in_rounds, gpipe, 1f1b" in line for line in trained), "docs/config.md"


def test_a_new_field_is_read_kept_and_documented(copy: Path, trained: list[str]) -> None:
    """The launches of `trained` read it from the command line, and refuse to resume with another value."""
    assert "  branch_scale: 0.5\n" in (copy / "own" / "config.yaml").read_text()
    assert any(line.startswith("| `model.branch_scale` | float | `1.0` | Attention is multiplied") for line in trained)


def test_a_new_layer_spec_trains_on_ranks_and_reads_the_field(copy: Path) -> None:
    script = """
from functools import partial
from labkit.config import presets
from labkit.launch import run
from labkit.models.scaled_spec import model_provider
from labkit.train import pretrain
small = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": 2}
scaled = presets.tiny().override({**small, "precision": "fp64", "branch_scale": 2.0})
train = partial(pretrain, model_provider=model_provider)
results = pretrain(scaled), train(scaled.override({"branch_scale": 1.0})), train(scaled)
results += (run(train, 2, scaled.override({"tp": 2}))[0],)
print(*(result.losses[-1] for result in results))
"""
    without, by_one, by_two, on_ranks = map(float, run(copy, script)[-1].split())
    assert without == by_one != by_two, "layers of the usual spec do not read the field"
    assert by_two == pytest.approx(on_ranks, rel=1e-12)


def test_a_new_exercise_is_scored(copy: Path) -> None:
    script = """
from labkit.check import score
print(score("99.double", lambda number: 2 * number))
print(score("99.double", lambda number: number + 3))
"""
    assert run(copy, script) == ["99.double: 2/2", "99.double: 1/2", "  - Given 2, expected 4, got 5."]
