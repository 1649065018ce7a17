"""The scripts in examples/ train what `pretrain` trains by itself, in labkit's ranks and in torchrun's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.config import presets
from labkit.launch import run
from labkit.train import pretrain

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


CASES = [
    pytest.param(TORCHRUN, "gpt", "tiny", {}, id="gpt by torchrun", marks=pytest.mark.sweep),
    pytest.param([], "bert", "bert_tiny", {}, id="bert"),
    pytest.param([], "t5", "t5_tiny", {"split_rank": 1}, id="t5", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("launcher", "family", "preset", "more"), CASES)
def test_the_providers_of_the_examples_are_the_defaults(launcher, family, preset, more):
    """One launch under torchrun is enough: the scripts launch alike."""
    command = [sys.executable, *launcher, EXAMPLES / f"pretrain_{family}.py", "--ranks", "2", "--tp", "1", "--pp", "2"]
    done = subprocess.run([*command, "--steps", "2"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = run(pretrain, 2, presets.get(preset).override({"pp": 2, "train.steps": 2, **more}))[0].losses
    assert re.findall(r"\d+\.\d{4}", done.stdout)[:2] == [f"{loss:.4f}" for loss in expected]


def test_a_layout_that_cannot_be_is_refused_in_a_sentence():
    command = [sys.executable, EXAMPLES / "pretrain_gpt.py", "--ranks", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "launch 4, 8 or 12 ranks" in done.stderr and "Traceback" not in done.stderr
