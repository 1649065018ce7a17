"""Each stored result names its commit, the files changed since, and the machine in words."""

import ast
import json
import shutil
import subprocess
from pathlib import Path

import harness
import provenance
import pytest
import table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN_BY_HAND = sorted(path for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())
MACHINE = {"processor": "a", "cores": 2, "memory_gib": 1, "python": "3", "torch": "2.11"}


def calls(path: Path) -> set[str]:
    """Names of the functions that a file calls."""
    found = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in found}


@pytest.mark.parametrize("path", RUN_BY_HAND, ids=lambda path: path.stem)
def test_each_benchmark_stores_through_the_harness_alone(path: Path) -> None:
    """`report`, `store` and `origin` name the commit and the machine; no benchmark writes JSON beside them."""
    made = calls(path)
    if path.stem in ("table", "gpu_fp8_cast"):  # the document; a table on the screen
        assert "write_result" not in made and "dump" not in made and "dumps" not in made
    else:
        assert made & {"report", "origin"}, f"{path.name} stores nothing through harness.report"
        own = "dump" in made or ("dumps" in made and "origin" not in made)
        assert not own or path.stem == "data", (
            f"{path.name} writes JSON of its own"
        )  # data.py: its input has JSON lines


def test_both_ways_of_storing_name_commit_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(table, "main", lambda: None)
    (tmp_path / "benchmarks").mkdir()
    rows = [{"case": "one", "bytes": 1}]
    harness.report("reported", rows=rows)
    harness.store("stored", rows, title="Stored", notes=[])
    for name in ("reported", "stored"):
        result = json.loads((harness.RESULTS / f"{name}.json").read_text())
        assert set(provenance.KEYS) <= result.keys(), name
        assert set(MACHINE) <= result["machine"].keys() and result["commit"] != ""


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", root, *who, *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit of code and results."""
    for name in ("labkit/a.py", "benchmarks/b.py", "benchmarks/results/b.json", "docs/c.md", "constraints.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_changed_file_is_said_if_it_can_change_a_result(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    (checkout / "benchmarks/results/b.json").write_text("2\n")  # each benchmark writes results and pages
    (checkout / "docs/c.md").write_text("2\n")
    assert provenance.code(checkout) == (commit, [])
    (checkout / "labkit/a.py").write_text("2\n")
    (checkout / "labkit/new.py").write_text("2\n")
    assert provenance.code(checkout) == (commit, ["labkit/a.py", "labkit/new.py"])


def test_without_git_the_files_stand_for_the_commit_that_holds_them(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = git(checkout, "rev-parse", "HEAD")
    (checkout / "labkit/a.py").write_text("2\n")
    git(checkout, "commit", "-qam", "second")
    bare = tmp_path_factory.mktemp("bare")
    shutil.copytree(checkout, bare, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    for name in ("labkit/__pycache__/a.pyc", "benchmarks/results/b.json", "docs/d.md"):  # written there: no change
        (bare / name).parent.mkdir(parents=True, exist_ok=True)
        (bare / name).write_text("3\n")
    name, changed = provenance.code(bare)
    assert name.startswith(provenance.UNKNOWN) and changed == []
    assert provenance.commit_of(name, checkout) == git(checkout, "rev-parse", "HEAD") != first
    (bare / "labkit/a.py").write_text("1\n")
    assert provenance.commit_of(provenance.code(bare)[0], checkout) == first == provenance.commit_of(first, checkout)
    (bare / "labkit/new.py").write_text("")
    name, _ = provenance.code(bare)
    assert provenance.commit_of(name, checkout) == name, "a file that no commit holds"
    assert provenance.code_in_words({"rows": [{"commit": name, "changed": []}]}) == f"commit {name}"


def test_stored_rows_are_kept_only_for_the_code_that_gave_them(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", checkout)
    stored = {"commit": git(checkout, "rev-parse", "HEAD"), "changed": []}
    (checkout / "benchmarks/results/b.json").write_text("2\n")
    git(checkout, "commit", "-qam", "results")
    assert provenance.same_code(stored), "a commit of results changes no code"
    assert not provenance.same_code({}) and not provenance.same_code(stored | {"changed": ["labkit/a.py"]})
    assert not provenance.same_code(stored | {"commit": "0" * 40}), "a commit that this checkout does not hold"
    (checkout / "labkit/a.py").write_text("2\n")
    assert not provenance.same_code(stored), "changed, not committed"
    git(checkout, "commit", "-qam", "code")
    assert not provenance.same_code(stored)


def test_the_document_names_commits_and_changed_files() -> None:
    result = {"commit": "a" * 40, "changed": ["x", "y"], "machine": MACHINE, "rows": []}
    assert provenance.code_in_words(result) == "commit aaaaaaaaaa with 2 changed files"
    merged = result | {"rows": [{"commit": "b" * 40, "changed": []}, {"commit": "c" * 40, "changed": ["x"]}]}
    assert provenance.code_in_words(merged) == "commit bbbbbbbbbb, commit cccccccccc with 1 changed file"
    assert provenance.code_in_words({"rows": []}) == "an unrecorded commit"
