"""`labkit lab` as a newcomer meets it: started in an empty folder, its chapters run through JupyterLab's own menus."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from chromium import executable, free_port, own_settings, why_not

from labkit.check.chapter_copies import CHAPTERS

PATIENCE = 120.0
"""Seconds for what takes a few on a machine that does nothing else."""
WHOLE_CHAPTER = 600.0
"""Seconds for all cells of a chapter, which start ranks."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "everything is there"),
]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address that `labkit lab` prints in an empty folder, for a user without any settings of Jupyter."""
    command = [sys.executable, "-m", "labkit", "lab", "--browser", "false", "--port", str(free_port())]
    log = tmp_path / "lab.log"
    with (
        log.open("w") as said,
        subprocess.Popen(
            command, cwd=tmp_path, stdout=said, stderr=said, env={**os.environ, **own_settings(tmp_path)}
        ) as server,
    ):
        try:
            yield printed_address(log, server)
        finally:
            kernels = psutil.Process(server.pid).children(recursive=True)
            server.terminate()
            _, alive = psutil.wait_procs(kernels, timeout=PATIENCE)
    assert alive == [], "kernels and ranks end with JupyterLab"


def printed_address(log: Path, server: subprocess.Popen[Any]) -> str:
    """Return the last address of JupyterLab's greeting, once it is there."""
    end = time.monotonic() + PATIENCE
    while not (found := re.findall(r"http://127\.0\.0\.1:\d+/lab\S+token=\S+", log.read_text())):
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.2)
    return found[-1]


@pytest.fixture
def page(address: str) -> Iterator[Any]:
    """A browser at this address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(PATIENCE * 1e3)
        page.goto(address)
        yield page
        browser.close()


def test_a_newcomer_sees_the_tour_first_and_runs_two_chapters(page: Any, tmp_path: Path) -> None:
    page.get_by_role("heading", name="00 Tour of the workbench").wait_for()
    page.get_by_text(re.compile(r"\| Idle$")).wait_for()
    page.screenshot(path=str(tmp_path / "first.png"))
    assert page.get_by_text("Jupyter news").count() == 0 and page.locator(".jp-Dialog").count() == 0
    assert page.locator(".lm-TabBar-tab.jp-mod-current").count() == 1
    assert page.locator(".lm-TabBar-tab.jp-mod-dirty").count() == 0, "opening a chapter does not change it"

    assert_chapter_runs(page, tmp_path / "chapters" / "00_tour.ipynb")
    page.screenshot(path=str(tmp_path / "tour.png"))

    page.locator(".jp-DirListing-item", has_text="02_rank").dblclick()
    page.get_by_role("heading", name=re.compile("^02 ")).wait_for()
    page.get_by_text(re.compile(r"\| Idle$")).wait_for()
    assert_chapter_runs(page, tmp_path / "chapters" / "02_rank_groups.ipynb")
    scroll_up_to(page, ".jp-OutputArea .widget-text input")
    page.screenshot(path=str(tmp_path / "widget.png"))


def assert_chapter_runs(page: Any, chapter: Path) -> None:
    """Run all cells of the open chapter by the menus; none may fail, and each shows something if labkit's does."""
    assert not any(shows(chapter).values()), "the reader predicts first"
    choose(page, "Run", "Run All Cells")
    end = time.monotonic() + WHOLE_CHAPTER
    while None in (cells := saved(page, chapter)).values():
        failed = [output for outputs in cells.values() for output in outputs or () if output.output_type == "error"]
        assert not failed and time.monotonic() < end, failed
        time.sleep(2)
    stored = shows(CHAPTERS / chapter.name)
    assert (shown := shows(chapter)) == {cell: stored[cell] for cell in shown}


def shows(chapter: Path) -> dict[str, bool]:
    """Return, for each code cell of a chapter's file, whether it has outputs."""
    cells = nbformat.read(chapter, as_version=4).cells
    return {cell.id: bool(cell.outputs) for cell in cells if cell.cell_type == "code"}


def saved(page: Any, chapter: Path) -> dict[str, list[Any] | None]:
    """Save the open chapter, and return the outputs of its code cells; None for one that has not been run yet."""
    page.keyboard.press("Control+s")
    time.sleep(1)
    try:
        cells = nbformat.read(chapter, as_version=4).cells
    except nbformat.reader.NotJSONError:  # it is being written at this moment
        return {"": None}
    return {
        cell.id: cell.outputs if cell.execution_count else None
        for cell in cells
        if cell.cell_type == "code" and cell.source
    }


def choose(page: Any, menu: str, entry: str) -> None:
    """Choose an entry of a menu of JupyterLab."""
    page.get_by_role("menuitem", name=menu, exact=True).click()
    page.get_by_role("menuitem", name=entry, exact=True).click()


def scroll_up_to(page: Any, selector: str) -> None:
    """Scroll the open chapter from its end until an output that fits the selector is on the screen."""
    chapter = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    found = chapter.locator(selector).first
    chapter.locator(".jp-Cell.jp-mod-active").hover()
    end = time.monotonic() + PATIENCE
    while not found.is_visible():
        assert time.monotonic() < end, f"no {selector} in this chapter"
        page.mouse.wheel(0, -400)
        time.sleep(0.3)
    found.evaluate("element => element.scrollIntoView({block: 'center'})")
    found.hover()  # waits until it does not move
