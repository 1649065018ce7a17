"""scripts/install_te.sh says all that is missing before it builds anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_te.sh"
TOOLS = ("bash", "dirname", "sed", "awk", "df", "cat", "g++")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def check(folder: Path, *, torch_cuda: str, nvcc: str | None, headers: str) -> subprocess.CompletedProcess[str]:
    """The script's answer where torch was built for `torch_cuda` and nvcc is of that release; None: there is none."""
    path = folder / "bin"
    path.mkdir()
    for tool in TOOLS:
        place = shutil.which(tool)
        (path / tool).symlink_to(place) if place else (path / tool).write_text("#!/bin/sh\n")
        if not place:
            (path / tool).chmod(0o755)
    python = f'case "$2" in *torch.version*) echo {torch_cuda};; *) echo {headers};; esac'
    programs = {"python": python} | ({"nvcc": f'echo "release {nvcc}, V{nvcc}.88"'} if nvcc else {})
    for name, text in programs.items():
        (path / name).write_text(f"#!{path / 'bash'}\n{text}\n")
        (path / name).chmod(0o755)
    environment = {"PATH": str(path), "PYTHON": str(path / "python"), "HOME": os.environ.get("HOME", "/")}
    command = [str(path / "bash"), str(SCRIPT), "--check"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    found = check(tmp_path, torch_cuda="cpu", nvcc=None, headers='""')
    assert found.returncode == 1
    for name in ("a torch with CUDA: this one is the CPU build", "nvcc: install", "cudnn.h:", "nccl.h:"):
        assert name in found.stderr
    assert "graph.cuda_graph_impl: local" in found.stderr, "what to do without it"


def test_where_all_is_there_it_says_so(tmp_path: Path) -> None:
    found = check(tmp_path, torch_cuda="12.8", nvcc="12.9", headers="/include")
    if "free disk" in found.stderr:
        pytest.skip("too little disk is free here")
    assert (found.returncode, found.stderr) == (0, "")
    assert "can be built" in found.stdout
