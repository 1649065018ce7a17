"""`make test` names the stage it stops at, and adds up what pytest counted."""

from pathlib import Path

import pytest


@pytest.fixture
def script(load_script):
    return load_script("run_tests")


def stage_of(script, name, *codes, folder):
    """A stage whose pieces end with these codes, and leave a file each."""
    pieces = [
        script.Piece(f"{name} {i}", "python", ("-c", f"open(r'{folder / name}{i}', 'w'); raise SystemExit({code})"))
        for i, code in enumerate(codes)
    ]
    return script.Stage(name, tuple(pieces))


def test_starts_nothing_after_a_failure_and_names_it(script, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(script, "CORES", 1)
    chosen = [
        stage_of(script, "first", 0, folder=tmp_path),
        stage_of(script, "second", 3, 0, folder=tmp_path),
        stage_of(script, "third", 0, folder=tmp_path),
    ]
    outcome = script.run(chosen)
    assert outcome.failed == ["second 0"] and sorted(outcome.seconds) == ["first", "second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first0", "second0"]
    out = capfd.readouterr().out
    assert "first 0 passed in" in out and "second 0 FAILED with exit code 3 in" in out
    assert script.run(chosen[:1]).failed == []


def test_a_piece_waits_until_there_are_cores_for_it(script, tmp_path):
    """Two that share a core run beside a third; a fourth starts once one has ended."""
    log = tmp_path / "log"
    write = f"open(r'{log}', 'a').write(sys.argv[1])"
    tell = f"import sys, time; sys.argv.append('+'); {write}; time.sleep(0.5); sys.argv[1] = '-'; {write}"
    pieces = [script.Piece(f"piece {i}", "python", ("-c", tell), cores) for i, cores in enumerate((0.5, 0.5, 1, 1))]
    script.run([script.Stage("four", tuple(pieces))])
    assert log.read_text().startswith("+++-") and log.read_text().count("+") == 4


def test_totals_add_up_and_an_error_counts_as_failed(script, tmp_path):
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    (tmp_path / "a.xml").write_text(suite.format(10, 1, 0, 2))
    (tmp_path / "b.xml").write_text(suite.format(5, 0, 2, 0))
    assert script.totals(sorted(tmp_path.glob("*.xml"))) == "10 passed, 3 failed, 2 skipped"
    assert script.totals([]) == "0 passed, 0 failed, 0 skipped"


def test_stages_are_the_promised_ones_in_order(script):
    """Beside the tests of hangs only single processes run: types and unit tests."""
    names = [stage.name for stage in script.stages()]
    assert names[:6] == ["ruff check", "ruff format", "import-linter", "hangs", "basedpyright", "unit"]
    assert names[6:] == ["parallel", "oracles", "other parameters", "chapters"]


def test_every_test_file_and_chapter_is_in_one_piece(script):
    root = Path(__file__).parents[2]
    words = [word for stage in script.stages() for piece in stage.pieces for word in piece.arguments]
    files = [word for word in words if word.startswith(("tests/", "notebooks/"))]
    found = [path for path in (root / "tests").rglob("test_*.py") if path.parent.name not in ("gpu", "browser")]
    expected = [*found, *(root / "notebooks").glob("[0-9][0-9]_*.ipynb"), root / "tests" / "gpu"]
    assert sorted(files) == sorted(path.relative_to(root).as_posix() for path in expected)


def test_only_the_piece_with_gpu_tests_sees_a_gpu(script, monkeypatch, tmp_path):
    """A chapter's `device = auto` would be the GPU else, in a kernel that no conftest of ours reaches."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    seen = tmp_path / "seen"
    write = f"import os; open(r'{seen}', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    for arguments, expected in (("notebooks/00_tour.ipynb",), ""), (("tests/parallel", "tests/gpu"), "3"):
        piece = script.Piece("any", "python", ("-c", write, *arguments))
        assert script.run([script.Stage("any", (piece,))]).failed == []
        assert seen.read_text() == expected
    pieces = [piece for stage in script.stages() for piece in stage.pieces]
    assert [piece.environment()["CUDA_VISIBLE_DEVICES"] for piece in pieces].count("3") == 1
