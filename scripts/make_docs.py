"""Build the documentation's site into build/site: the pages of docs/, the chapters, and a reference read from the code.

    python scripts/make_docs.py     needs the extra: pip install -e '.[docs]'

Sphinx reads one folder, build/docs, which has the layout of the repository, so that links between pages stay as they
are. Nothing is executed: a chapter's outputs are those that it has stored. A warning of Sphinx is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import nbformat
from site_pages.browser import add_browser_page
from site_pages.chapters import chapter_page, to_download
from site_pages.commands import commands_page
from site_pages.links import ROOT, for_site, repository
from site_pages.presets import presets_page
from site_pages.python_api import api_pages
from site_pages.ratios import with_ratios

TOP_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside of docs/."""


class Section(NamedTuple):
    """A part of the site, with the page docs/FOLDER/index.md, which is written here if it does not exist."""

    title: str
    about: str
    """First sentence of the page."""
    pages: str
    """Patterns of its pages in their order, relative to its folder or, with a `/`, to the root."""


SECTIONS = {
    "start": Section(
        "Start",
        "Install labkit, run it once, and find out what to do if something is wrong.",
        "install first_run in_the_browser faq *",
    ),
    "tutorials": Section("Tutorials", "The chapters, with the outputs that they had when they ran.", "/notebooks/*"),
    "howto": Section(
        "How-to guides",
        "One task per page, for readers who know what they want.",
        "compare_layouts * /docs/running /docs/data /docs/checkpoints /docs/evaluation /docs/finetune /docs/gpu",
    ),
    "coming_from": Section("Coming from", "The names of other libraries next to labkit's.", "megatron* *"),
    "concepts": Section(
        "Concepts",
        "What the parts of the stack are, and why they work.",
        "memory graphs * /docs/schedules /docs/models /docs/glossary",
    ),
    "reference": Section(
        "Reference",
        "Commands, fields, presets and public names, read from the code, and the files that labkit writes.",
        "command_line /docs/config presets python/index file_formats *",
    ),
    "evidence": Section(
        "Evidence",
        "What was compared with what, what was broken on purpose, and what was measured.",
        "/docs/parity /docs/faults /docs/survival /docs/benchmarks /docs/scale *",
    ),
    "teaching": Section("Teaching", "For each chapter, a page for its teacher.", "*"),
    "maintenance": Section(
        "Maintenance",
        "How labkit is built, changed and released.",
        "/docs/architecture /CONTRIBUTING * /CHANGELOG /docs/log",
    ),
}


def generated() -> dict[str, str]:
    """The pages that are read from the code, by their paths on the site."""
    api = {f"docs/reference/python/{name}.md": text for name, text in api_pages().items()}
    return api | {"docs/reference/command_line.md": commands_page(), "docs/reference/presets.md": presets_page()}


def assemble(source: Path, address: str, others: Mapping[str, str]) -> None:
    """Write everything that Sphinx reads into the folder `source`, anew.

    address: of the repository; empty if it is not known.
    others: pages that are not in the repository, by their paths on the site.
    Raises ValueError for a link that leads nowhere.
    """
    shutil.rmtree(source, ignore_errors=True)
    for folder in ("docs/ratios", "notebooks", "exercises"):
        (source / folder).mkdir(parents=True)
    own = (*TOP_PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))))
    paths = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    chapters = [f"notebooks/{path.name}" for path in paths]
    pages = {*own, *others, *chapters, *map(_index, SECTIONS)}
    for page in own:
        _write(source / page, for_site((ROOT / page).read_text(encoding="utf-8"), page, pages, address))
    for page, text in others.items():
        _write(source / page, text)
    for path in paths:
        chapter = nbformat.read(path, as_version=4)
        nbformat.write(chapter_page(chapter, path.name, pages, address), source / "notebooks" / path.name)
        nbformat.write(to_download(chapter, path.name, chapters, address), source / "exercises" / path.name)
    for folder in SECTIONS:
        _complete_index(source / _index(folder), folder, pages)
    benchmarks = source / "docs" / "benchmarks.md"
    _write(benchmarks, with_ratios(benchmarks.read_text(encoding="utf-8"), source / "docs" / "ratios", "ratios"))
    for path in (ROOT / "docs").iterdir():
        if path.suffix in (".png", ".gif", ".svg"):
            shutil.copy(path, source / "docs")
    (source / "docs" / "index.md").rename(source / "index.md")


def _index(folder: str) -> str:
    """The first page of a section."""
    return f"docs/{folder}/index.md"


def _complete_index(path: Path, folder: str, pages: Collection[str]) -> None:
    """Add the section's list of pages to its first page; if it has no such page, write one that shows the list."""
    section = SECTIONS[folder]
    table = _chapters_of_readme() if folder == "tutorials" else ""
    text = f"# {section.title}\n\n{section.about}\n\n{table}"
    hidden = [":hidden:"] if path.exists() or table else []
    if path.exists():
        text = path.read_text(encoding="utf-8")
    listed = [f"/{page.rpartition('.')[0]}" for page in pages_of(folder, pages)]
    _write(path, "\n".join([text, "```{toctree}", ":maxdepth: 1", *hidden, "", *listed, "```", ""]))


def pages_of(folder: str, pages: Collection[str]) -> list[str]:
    """The pages of a section in their order."""
    listed = dict[str, None]()
    for pattern in SECTIONS[folder].pages.split():
        whole = pattern[1:] if pattern.startswith("/") else f"docs/{folder}/{pattern}"
        depth = whole.count("/")
        found = [page for page in sorted(pages) if page.count("/") == depth and fnmatch(page.rpartition(".")[0], whole)]
        listed |= dict.fromkeys(found)
    return [page for page in listed if page != _index(folder)]


def _chapters_of_readme() -> str:
    """README's table of chapters, for the site."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.search(r"(?:^\|.*\n){2}(?:^\|.*\]\(notebooks/.*\n)+", readme, re.MULTILINE)
    return re.sub(r"\]\((?!/|\w+:)", "](/", rows[0]) if rows else ""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(source: Path, site: Path) -> int:
    """Build what `assemble` wrote; Sphinx's exit code, which is 0 if it had no warning."""
    shutil.rmtree(site, ignore_errors=True)
    settings = ["-W", "--keep-going", "-n", "-q", "-E", "-j", "auto", "-c", str(ROOT / "docs")]
    command = [sys.executable, "-m", "sphinx", *settings, "-d", f"{source}-doctrees", str(source), str(site)]
    code = subprocess.run(command, check=False).returncode
    if not code and (missing := add_browser_page(site)):
        print(f"labkit in the browser loads Python from its public address: {missing}")
    return code


def main() -> int:
    """Exit code 0 if the site was built without a warning."""
    source, site = ROOT / "build" / "docs", ROOT / "build" / "site"
    assemble(source, repository(), generated())
    if code := build(source, site):
        return code
    print(f"{len(list(site.rglob('*.html')))} pages; open {site / 'index.html'} in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
