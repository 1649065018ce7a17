"""`device="auto"` is the CPU in tests, on a machine with a GPU too; tests marked `gpu` see what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.launch import rank_info
from labkit.launch.info import choose_backend, choose_device, device_kind

PLUGIN = Path(__file__).parents[1] / "without_gpus.py"

FAKE_TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 8)
"""
CONFTEST = """
import without_gpus

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs CUDA")
    config.pluginmanager.register(without_gpus)
"""
TESTS = """
import os
import subprocess
import sys

import pytest
import torch

def seen():
    child = [sys.executable, "-c", "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))"]
    return torch.cuda.is_available(), torch.cuda.device_count(), subprocess.check_output(child, text=True).strip()

@pytest.fixture(scope="module")
def early():
    return seen()

def test_cpu(early):
    assert early == seen() == (False, 0, "")

@pytest.mark.gpu
def test_gpu():
    assert seen() == (True, 8, "all")

def test_cpu_again():
    assert seen() == (False, 0, "")
"""


def test_tests_without_the_marker_see_no_gpu_and_marked_ones_do(tmp_path: Path) -> None:
    """Fixtures of a module and programs that a test starts see none either."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(PLUGIN.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_auto_is_the_cpu_in_this_very_test() -> None:
    """Fails on a machine with a GPU where `tests/conftest.py` does not register the plugin."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0


def test_what_auto_would_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules that the plugin has to silence do send `auto` to a GPU."""
    assert (device_kind("auto"), choose_device("auto", 0, 0).type, rank_info().device.type) == ("cpu",) * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert (device_kind("auto"), choose_device("auto", 0, 0).type, rank_info().device.type) == ("cuda",) * 3
    assert choose_backend("auto", choose_device("auto", 0, 0), 2) == "gloo"
