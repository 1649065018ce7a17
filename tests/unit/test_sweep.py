"""`make sweep` runs every test marked `sweep` in one part, and a part that was cut goes on where it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.sweep
@pytest.mark.parametrize("number", range(3))
def test_it(number, ran):
    ran.append(number)
    assert number != BAD
"""


@pytest.fixture
def sweep(load_script, tmp_path, monkeypatch):
    """The script with one part of three tests in a folder of its own; `sweep.ran` has what they were called with."""
    script = load_script("sweep")
    (tmp_path / "test_three.py").write_text(TESTS.replace("BAD", "1"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sweep: long\n")
    monkeypatch.setattr(script, "STATE", tmp_path / "state")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "ran.txt"
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef ran():\n    class Log:\n        def append(self, number):\n"
        f"            open({str(log)!r}, 'a').write(str(number))\n    return Log()\n"
    )
    # A folder with a conftest of its own, as `rest` has several: pytest then looks plugins up in a set.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "conftest.py").write_text("")
    monkeypatch.setattr(script, "PARTS", {"three": ["test_three.py", "other", "-p", "no:cacheprovider"]})
    script.log, script.tests = log, tmp_path / "test_three.py"
    return script


def in_a_process(sweep, at):
    """Run the part as `make sweep PART=three` does: pytest keeps modules of an earlier call in the same process."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import sweep; from pathlib import Path\n"
        f"sweep.STATE, sweep.ROOT, sweep.PARTS = Path({str(sweep.STATE)!r}), Path.cwd(), {sweep.PARTS!r}\n"
        f"sys.exit(not sweep.run('three', {at!r}))"
    )
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([sys.executable, "-c", code], cwd=sweep.ROOT, env=environment, capture_output=True, text=True)


def test_a_cut_part_goes_on_and_a_complete_one_starts_again(sweep):
    assert in_a_process(sweep, "one").returncode == 1
    assert sweep.log.read_text() == "012" and "cut after 2 tests at one" in sweep.standing("three", "one")
    sweep.tests.write_text(TESTS.replace("BAD", "-1"))
    assert in_a_process(sweep, "one").returncode == 0
    assert sweep.log.read_text() == "0121", "only the test that failed"
    assert sweep.standing("three", "one").startswith("all passed, 0 skipped at one,")
    assert in_a_process(sweep, "one").returncode == 0
    assert sweep.log.read_text() == "0121012"


def test_every_marked_file_is_in_one_part(load_script):
    """`rest` takes what no other part names; a part that is split by names has both halves."""
    script = load_script("sweep")
    for path in script.NAMED:
        assert (ROOT / path).exists(), path
        assert f"--ignore={path}" in script.PARTS["rest"]
        filters = [
            words[words.index("-k") + 1] if "-k" in words else "" for words in script.PARTS.values() if path in words
        ]
        assert filters == [""] or sorted(filters) == ["float32", "not float32"], path
