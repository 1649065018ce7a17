"""The whole site, built with every warning an error, and read in headless Chromium as on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx", reason="the site needs the extra docs")
import make_docs
from chromium import executable, why_not

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.sweep
in_a_browser = pytest.mark.skipif(bool(why_not()), reason=why_not() or "everything is there")
WIDTH = 390
"""Pixels of a phone."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    make_docs.assemble(folder / "source", "https://github.com/someone/labkit", make_docs.generated())
    assert make_docs.build(folder / "source", folder / "site") == 0, "Sphinx printed what is wrong"
    return folder / "site"


@pytest.fixture
def page(site: Path) -> Iterator[Any]:
    """An empty page of a browser without a network."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": WIDTH, "height": 844}, color_scheme="dark", offline=True)
        yield context.new_page()
        browser.close()


def test_the_site_has_every_page(site: Path) -> None:
    written = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    chapters = {path.relative_to(ROOT).with_suffix(".html") for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    expected = (written - {Path("docs/index.html")}) | chapters | {Path("index.html"), Path("CONTRIBUTING.html")}
    assert [path for path in sorted(expected) if not (site / path).is_file()] == []


@in_a_browser
@pytest.mark.browser
def test_no_page_is_wider_than_a_phone(site: Path, page: Any) -> None:
    wide = {}
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > WIDTH:
            wide[path.relative_to(site).as_posix()] = width
    assert wide == {}


@in_a_browser
@pytest.mark.browser
def test_formulas_pictures_and_the_search_need_no_network(site: Path, page: Any) -> None:
    chapter = site / "notebooks" / "07_context_parallel.html"
    page.goto(chapter.as_uri())
    assert page.locator("math msub").count() > 3
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    page.goto(f"{(site / 'search.html').as_uri()}?q=all_reduce")
    page.locator("#search-results a", has_text="all_reduce").first.wait_for()
