"""What travels to the ranks: by value where a rank could not import it, with the caller's surroundings."""

import importlib.util
import linecache
import os
import pickle
import subprocess
import sys
import threading

import numpy
import pytest

import labkit.events
from labkit.launch import pickling

HERE = sys.modules[__name__]
FACTOR = 3


def times_factor(x):
    return FACTOR * x


def load_in_fresh_process(packed, tmp_path, call):
    """Unpack in a process that cannot import this module, and call."""
    path = tmp_path / "payload"
    path.write_bytes(packed)
    code = (
        "import sys; from pathlib import Path; from labkit.launch.pickling import unpack\n"
        f"fn, args = unpack(Path({str(path)!r}))\nprint({call})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_a_function_of_a_test_module_travels_with_its_globals(tmp_path):
    packed = pickling.pack(times_factor, (14,))
    assert load_in_fresh_process(packed, tmp_path, "fn(*args)") == "42"


def test_a_function_of_a_file_outside_the_path_travels(tmp_path):
    file = tmp_path / "elsewhere" / "learners_own.py"
    file.parent.mkdir()
    file.write_text("base = 40\nclass Two:\n    def value(self): return 2\ndef answer(): return base + Two().value()\n")
    spec = importlib.util.spec_from_file_location("learners_own", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["learners_own"] = module
    try:
        spec.loader.exec_module(module)
        assert not pickling._importable(module)
        packed = pickling.pack(module.answer, ())
    finally:
        del sys.modules["learners_own"]
    file.unlink()
    assert load_in_fresh_process(packed, tmp_path, "fn(*args)") == "42"


@pytest.mark.parametrize("module", [os, sys, numpy, labkit.events, importlib.util])
def test_installed_modules_travel_by_name(module):
    assert pickling._importable(module)


def test_an_installed_function_stays_a_reference():
    assert len(pickling.pack(labkit.events.shift_to_zero, ())) - len(pickling.pack(len, ())) < 200


def test_registration_leaves_no_trace():
    import cloudpickle

    before = set(cloudpickle.list_registry_pickle_by_value())
    pickling.pack(times_factor, (1,))
    with pytest.raises(TypeError):
        pickling.pack(times_factor, (threading.Lock(),))
    assert set(cloudpickle.list_registry_pickle_by_value()) == before


def test_what_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"times_factor or one of its arguments cannot be sent.*lock"):
        pickling.pack(times_factor, (threading.Lock(),))
    with pytest.raises(TypeError, match="must be a function, got int: 3"):
        pickling.pack(3, ())


def test_surroundings_travel(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_WORD", "seen")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    packed = pickling.pack(times_factor, (1,))
    seen = load_in_fresh_process(
        packed, tmp_path.parent, "__import__('os').environ['LABKIT_TEST_WORD'], sys.path[0], __import__('os').getcwd()"
    )
    assert seen == f"seen {tmp_path} {tmp_path}"


def test_the_ranks_own_variables_survive_the_callers_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.update(RANK="3", LEFTOVER="old")
    pickling.apply_environment({"RANK": "77", "NEW": "1"})
    assert os.environ["RANK"] == "3"
    assert os.environ["NEW"] == "1"
    assert "LEFTOVER" not in os.environ


def test_notebook_cells_travel_so_that_tracebacks_can_quote_them():
    name = "<ipython-input-7-abc>"
    linecache.cache[name] = (10, None, ["x = 1\n"], name)
    try:
        cells = pickling._surroundings()["cells"]
    finally:
        del linecache.cache[name]
    assert cells[name][2] == ["x = 1\n"]
    assert all(not os.path.exists(other) for other in cells)
    assert len(pickle.dumps(cells)) < 1_000_000
