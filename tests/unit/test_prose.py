"""Docstrings of labkit are plain English, and docs/ names files and Python names that exist."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import prose  # noqa: E402

FOUND = list(prose.findings())


def test_sentences_of_docstrings_are_short_and_open_with_no_relative_clause() -> None:
    assert FOUND == []


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("What is gathered is dropped. Done.", ["opening"]),
        ("Good.\n\nWhere nothing waits: none.", ["opening"]),
        ("Who owns it? The first rank.", []),
        (" ".join(["word"] * 26) + ".", ["long"]),
        ("It ends. " * 10, []),
        ("rank   " * 10 + "\n| a | " + "b " * 30 + "|\n- " + "item " * 30, []),
        ("A rule:\n\n    " + "code " * 30 + "\n", []),
        ("Whether it runs on gloo.\nOr on NCCL, " + "so " * 25, ["opening", "long"]),
    ],
)
def test_the_rule_finds_what_it_should(text: str, kinds: list[str]) -> None:
    assert [kind for kind, _ in prose.problems(text)] == kinds


def test_constants_and_attributes_have_docstrings_too() -> None:
    source = '"""A."""\nX = 1\n"""B."""\nclass C:\n    """D."""\n    y: int\n    """E.\n\n    F."""\n'
    assert [text for _, text in prose.docstrings(source)] == ["A.", "B.", "D.", "E.\n\nF."]


# ---- docs/ ----

PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.stem not in ("log", "benchmarks"))
FOLDERS = ("labkit/", "tests/", "scripts/", "notebooks/", "docs/", "benchmarks/")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


@each_page
def test_paths_in_the_docs_exist(page: Path) -> None:
    named = set(re.findall(r"[\w./-]+\.(?:py|md|ipynb)\b", page.read_text()))
    paths = {path for path in named if path.startswith(FOLDERS) and "NN_name" not in path}
    links = {path for path in named if path.startswith("../")}
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert sorted(missing + [path for path in links if not (page.parent / path).exists()]) == []


@each_page
def test_python_in_the_docs_imports_what_exists(page: Path) -> None:
    for module, names in re.findall(r"^from (labkit[\w.]*) import ([\w, ]+)$", page.read_text(), re.M):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_each_word_of_the_glossary_stands_in_its_chapters() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \| (\[.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(rows) > 60
    for term, _, chapters in rows:
        forms = "|".join(re.escape(form.strip("`")) for form in re.split(", | and ", term))
        for path in re.findall(r"notebooks/[\w.]+", chapters):
            text = "\n".join("".join(cell["source"]) for cell in json.loads((ROOT / path).read_text())["cells"])
            assert re.search(rf"\b({forms})s?\b", text, re.I), f"{path} has no word of {term!r}"
