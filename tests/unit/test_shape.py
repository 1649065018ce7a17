"""The shape of labkit: what docs/architecture.md says of the tree, and limits that keep it readable."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

import shape  # noqa: E402

PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = {name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not name.startswith(("scripts/", "tests/"))}


def test_every_file_that_the_page_names_exists() -> None:
    assert len(NAMED) > 60
    assert sorted(file for file in NAMED if not (shape.PACKAGE / file).is_file()) == []


def test_the_page_names_every_package() -> None:
    packages = {path.parent.name for path in shape.PACKAGE.glob("*/__init__.py")} | {"events", "output_files"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == packages


def test_the_page_names_the_files_between_a_step_and_its_loss() -> None:
    journey = shape.to_the_loss()
    assert journey.files[0] == "train/stepping.py" and "models/gpt.py" in journey.files
    assert set(journey.files) <= NAMED
    assert journey.changes <= 130


def test_a_dense_layer_costs_few_python_calls() -> None:
    assert 20 < shape.calls_of_a_layer() <= 90


def test_the_page_lists_the_core_which_imports_nothing_that_can_be_skipped() -> None:
    assert re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE, re.M) == list(shape.CORE)
    assert shape.core_imports() == {}


def test_no_files_import_each_other() -> None:
    assert shape.circles() == []


def test_a_circle_of_imports_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "a": "import labkit.b",
        "b": "def f():\n    from labkit import c",
        "c": "from labkit.a import f",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(shape, "PACKAGE", tmp_path)
    assert shape.circles() == [["a.py", "b.py", "c.py"]]
