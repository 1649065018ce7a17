"""`make test` names the stage it stops at, and adds up what pytest counted."""

from pathlib import Path

import pytest


@pytest.fixture
def script(load_script):
    return load_script("run_tests")


def test_stops_at_the_first_failing_stage_and_names_it(script, tmp_path, capfd):
    def stage(name: str, code: int):
        return script.Stage(name, "python", ("-c", f"open(r'{tmp_path / name}', 'w'); raise SystemExit({code})"))

    assert script.run([stage("first", 0), stage("second", 3), stage("third", 0)]) == "second"
    assert (tmp_path / "first").exists() and not (tmp_path / "third").exists()
    out = capfd.readouterr().out
    assert "== 1/3 first" in out and "== first passed in" in out
    assert "== 2/3 second" in out and "== second FAILED with exit code 3 in" in out
    assert script.run([stage("first", 0)]) is None


def test_totals_add_up_and_an_error_counts_as_failed(script, tmp_path):
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    (tmp_path / "a.xml").write_text(suite.format(10, 1, 0, 2))
    (tmp_path / "b.xml").write_text(suite.format(5, 0, 2, 0))
    assert script.totals(sorted(tmp_path.glob("*.xml"))) == "10 passed, 3 failed, 2 skipped"
    assert script.totals([]) == "0 passed, 0 failed, 0 skipped"


def test_stages_are_the_promised_ones_in_order(script):
    names = [stage.name for stage in script.stages()]
    assert names[:4] == ["ruff check", "ruff format", "basedpyright", "import-linter"]
    assert names[4:] == ["unit", "parallel", "oracles", "chapters", "other parameters"]


def test_chapters_stage_compares_every_chapter(script):
    chapters = next(stage for stage in script.stages() if stage.name == "chapters")
    expected = {
        f"notebooks/{path.name}" for path in (Path(__file__).parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb")
    }
    assert expected and expected == {word for word in chapters.arguments if word.endswith(".ipynb")}
    assert "--nbval" in chapters.arguments


def test_only_the_stage_with_gpu_tests_sees_a_gpu(script, monkeypatch, tmp_path):
    """A chapter's `device = auto` would be the GPU else, in a kernel that no conftest of ours reaches."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    seen = tmp_path / "seen"
    write = f"import os; open(r'{seen}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    for arguments, expected in (("notebooks/00_tour.ipynb",), ""), (("tests/parallel", "tests/gpu"), "3"):
        assert script.run([script.Stage("any", "python", ("-c", write, *arguments))]) is None
        assert seen.read_text() == expected
    assert [stage.name for stage in script.stages() if stage.environment()["CUDA_VISIBLE_DEVICES"]] == ["parallel"]
