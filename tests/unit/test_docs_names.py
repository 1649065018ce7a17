"""docs/ names files, Python names and words that exist."""

import importlib
import json
import re
from pathlib import Path

import pytest

from labkit.config.fields import SPECS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.stem not in ("log", "benchmarks"))
FOLDERS = ("labkit/", "tests/", "scripts/", "notebooks/", "docs/", "benchmarks/")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


@each_page
def test_paths_in_the_docs_exist(page: Path) -> None:
    named = set(re.findall(r"[\w./-]+\.(?:py|md|ipynb)\b", page.read_text()))
    paths = {path for path in named if path.startswith(FOLDERS) and "NN" not in path}
    links = {path for path in named if path.startswith("../")}
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert sorted(missing + [path for path in links if not (page.parent / path).exists()]) == []


@each_page
def test_python_in_the_docs_imports_what_exists(page: Path) -> None:
    for module, names in re.findall(r"^from (labkit[\w.]*) import ([\w, ]+)$", page.read_text(), re.M):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


@each_page
def test_fields_in_the_docs_exist(page: Path) -> None:
    """Names such as `parallel.tp` are fields, but for the names of another stack, which are in the first column."""
    text = page.read_text()
    if page.parent.name == "coming_from":
        text = re.sub(r"^\|[^|\n]*|^```.*?^```", "", text, flags=re.M | re.S)  # first columns, and their files
    code = " ".join(re.findall(r"`+([^`]+)`+", text))
    sections = "|".join({name.partition(".")[0] for name in SPECS})
    names = set(re.findall(rf"(?<![\w./])(?:{sections})\.[a-z]\w*\b(?![\w(./])", code))
    assert sorted(name for name in names - SPECS.keys() if not name.endswith((".py", ".safetensors", ".tsv"))) == []


def test_each_word_of_the_glossary_stands_in_its_chapters() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+) \| (\[.+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert len(rows) > 60
    for term, _, chapters in rows:
        forms = "|".join(re.escape(form.strip("`")) for form in re.split(", | and ", term))
        for path in re.findall(r"notebooks/[\w.]+", chapters):
            text = "\n".join("".join(cell["source"]) for cell in json.loads((ROOT / path).read_text())["cells"])
            assert re.search(rf"\b({forms})s?\b", text, re.I), f"{path} has no word of {term!r}"
