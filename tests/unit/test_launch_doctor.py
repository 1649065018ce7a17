"""The doctor finds what is there, and one defect does not hide another."""

import os
import resource
import socket
import sys
from importlib.util import find_spec

import pytest

from labkit.launch import doctor, info, workshop
from labkit.launch.available_memory import Memory


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


def test_a_healthy_machine_has_no_bad_finding():
    found = by_topic(doctor.examine())
    assert [finding for finding in found.values() if finding.level == "bad"] == []
    assert "gloo" in found["backends"].text
    assert found["attention"].text == (
        "flash, math; model.attention_backend = fused takes flash for causal bfloat16 and float32"
    )
    assert len(found) == 14


def test_an_examination_that_fails_is_a_finding_and_the_rest_goes_on(monkeypatch):
    def broken():
        raise OSError("no such place")

    broken.__name__ = "_shared_memory"
    monkeypatch.setattr(doctor, "_shared_memory", broken)
    found = by_topic(doctor.examine())
    assert found["shared memory"].level == "bad"
    assert "no such place" in found["shared memory"].text
    assert found["loopback"].level == "good"


@pytest.mark.parametrize(
    ("limit", "level"), [(64, "bad"), (111, "bad"), (1024, "good"), (resource.RLIM_INFINITY, "good")]
)
def test_open_files(monkeypatch, limit, level):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, limit))
    assert doctor._open_files().level == level


def test_few_processes(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (100, 100))
    assert doctor._processes().level == "bad"


def test_transformer_engine_is_not_imported_without_a_gpu(monkeypatch, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('found no CUDA')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = doctor._transformer_engine()
    assert found.level == "note"
    assert found.text.startswith("installed, but") and "needs an NVIDIA GPU" in found.text
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = doctor._transformer_engine()
    assert "cannot be imported (RuntimeError: found no CUDA)" in found.text and "pip install" in found.text
    assert "transformer_engine" not in sys.modules


def test_without_transformer_engine_one_sentence_says_how_to_get_it(monkeypatch):
    found = doctor._transformer_engine()
    assert found.level == "note" and found.text.startswith("not installed, and") and "pip install" in found.text
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = doctor._transformer_engine()
    assert "not installed: pip install" in found.text and "\n" not in found.text


def test_loopback_missing(monkeypatch):
    def unreachable(*_):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(info.socket.socket, "connect", unreachable)
    found = doctor._loopback()
    assert found.level == "bad" and "lo is not up (Network is unreachable)" in found.text


def test_cores_are_those_allowed():
    assert 1 <= doctor.usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("value", "level", "said"),
    [(None, "good", "is not set"), ("1", "good", "=1"), ("8", "note", "=8; up to Hopper")],
)
def test_connections(monkeypatch, value, level, said):
    monkeypatch.delenv(doctor.CONNECTIONS, raising=False)
    if value is not None:
        monkeypatch.setenv(doctor.CONNECTIONS, value)
    found = doctor._connections()
    assert found.level == level and said in found.text


in_a_workshop = pytest.mark.skipif(find_spec("jupyterlab") is None, reason="needs jupyterlab")
"""What a laptop of a workshop has, and a bare GPU machine has not."""


@in_a_workshop
def test_a_laptop_that_is_ready_says_so_in_one_line():
    findings = workshop.examine_for_workshop()
    line = workshop.one_line(findings)
    assert line.startswith("ready; Python ") and "\n" not in line
    assert all(
        word in line for word in ("labkit", "torch", "jupyterlab", "cores", "GiB memory", "GiB disk", "two ranks in")
    )


@in_a_workshop
def test_a_laptop_that_is_not_ready_says_why(monkeypatch):
    poor = Memory(total=4 << 30, available=1 << 30, limited=False)
    monkeypatch.setattr(workshop, "host_memory", lambda: poor)
    monkeypatch.setattr(workshop, "two_ranks", lambda: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(workshop, "PORTS", {taken.getsockname()[1]: "JupyterLab"})
        found = by_topic(workshop.examine_for_workshop())
    assert (found["memory"].level, found["ports"].level, found["two ranks"].level) == ("bad", "note", "bad")
    line = workshop.one_line(list(found.values()))
    assert line.startswith("NOT READY: memory (") and "two ranks (ZeroDivisionError" in line
    assert "(JupyterLab) in use" in line
