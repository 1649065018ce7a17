"""The page "labkit in the browser", in headless Chromium: with CPython behind it, and with Pyodide where it can be had.

The page's own Python answers in both. CPython needs nothing else, so what a reader sees and types is tested everywhere.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx", reason="the site needs the extra docs")
import answers
import make_docs
from chromium import executable, why_not
from site_pages.browser import runtime
from site_pages.links import for_site

ROOT = Path(__file__).parents[2]

PAGE = "docs/start/in_the_browser.md"
FIRST, EDIT = 10.0, 0.5
"""Seconds to the first picture and of an edit that the page promises; a busy machine may take `BUSY` times as long."""
BUSY = 4
PATIENCE = 120_000
"""Milliseconds."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "everything is there"),
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page on a server of its own; of the site, only this page and its index are built."""
    folder = tmp_path_factory.mktemp("site")
    source = folder / "source"
    (source / PAGE).parent.mkdir(parents=True)
    (source / PAGE).write_text(for_site((ROOT / PAGE).read_text(), PAGE, {PAGE}, ""))
    (source / "index.md").write_text("# labkit\n\n```{toctree}\ndocs/start/in_the_browser\n```\n")
    assert make_docs.build(source, folder / "site") == 0, "Sphinx printed what is wrong"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder / "site"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{Path(PAGE).with_suffix('.html')}"
        server.shutdown()


@pytest.fixture
def empty(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty page of a browser, 1200 pixels wide and light, or as the parameter says."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        width, scheme = getattr(request, "param", (1200, "light"))
        page = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme).new_page()
        page.set_default_timeout(PATIENCE)
        yield page
        browser.close()


@pytest.fixture
def page(address: str, empty: Any) -> Any:
    """The page with its first pictures; CPython answers."""
    empty.expose_function("labkitAnswer", answers.answer)
    open_page(empty, address)
    return empty


def open_page(page: Any, address: str) -> None:
    page.goto("about:blank")  # an address that differs only after its # would not load again
    page.goto(address)
    page.locator("[data-part=groups] table.bytes").wait_for()


def bubble(page: Any) -> str:
    """The words in bold under the timeline."""
    return page.locator("[data-part=schedule] p b").inner_text()


def cell(page: Any, rank: int, position: int) -> Any:
    return page.locator(f'[data-at="{rank},{position}"]')


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def problem(page: Any, part: str = "schedule") -> str:
    """The reason below the last picture, once there is one."""
    page.locator(f"[data-part={part}] .problem:not(:empty)").wait_for()
    return page.locator(f"[data-part={part}] .problem").inner_text()


def test_a_table_is_edited_by_keyboard_and_its_link_carries_it(page: Any, address: str) -> None:
    assert bubble(page).startswith("bubble 27.3%, 33 units of time, at most 4 ")  # 3 / (8 + 3)
    page.locator("[data-part=schedule] [name=weight_grad]").focus()
    press(page, "Tab", "Tab", "Tab")  # the button, a verdict that unfolds, then the table: one stop
    assert page.evaluate("document.activeElement.dataset.at") == "0,0"
    # F4 of rank 0 before B0: five microbatches in flight, and no time is won
    press(page, "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "Shift+ArrowLeft")
    page.get_by_text("at most 5 microbatches in flight").wait_for()
    assert page.evaluate("document.activeElement.dataset.at") == "0,4" and cell(page, 0, 4).input_value() == "0F4"
    page.keyboard.type("b0")  # the rank has one stage, so this is 0B0
    press(page, "Enter")
    page.keyboard.type("f4")
    press(page, "Enter")
    page.get_by_text("at most 4 microbatches in flight").wait_for()
    assert cell(page, 0, 4).input_value() == "0B0" and page.get_by_text("Your table.").is_visible()
    press(page, "ArrowLeft", "Shift+ArrowLeft")
    page.get_by_text("at most 5 microbatches in flight").wait_for()
    words, link = bubble(page), page.url
    page.locator("[data-part=schedule] [type=reset]").click()
    page.get_by_text("at most 4 microbatches in flight").wait_for()
    open_page(page, link)
    assert bubble(page) == words and cell(page, 0, 4).input_value() == "0F4"


def test_what_cannot_be_keeps_the_picture_and_says_why_below_it(page: Any) -> None:
    picture = page.locator("[data-part=schedule] svg")
    before = picture.inner_html()
    cell(page, 0, 1).focus()
    page.keyboard.type("F2")
    press(page, "Enter")
    assert "rank 0, position 1: 0F2 appears more than once" in problem(page)
    assert cell(page, 0, 1).get_attribute("aria-invalid") == "true" and picture.inner_html() == before
    shown = page.locator("[data-part=schedule] .problem").bounding_box()
    assert shown["y"] > picture.bounding_box()["y"]
    cell(page, 0, 1).focus()
    press(page, "Delete")
    page.get_by_text("0F1 is missing").wait_for()
    page.locator("[data-part=schedule] [name=preset]").select_option("dualpipe_v")
    page.locator("[data-part=schedule] [name=microbatches]").fill("4")
    assert "microbatches" in problem(page)
    page.locator("[data-part=schedule] [name=microbatches]").fill("8")
    page.locator("[data-part=schedule] .problem:empty").wait_for(state="attached")
    assert bubble(page).startswith("bubble 5.9%, 25.5 units of time, at most 4.5 ")  # docs/schedules.md


def test_an_order_string_moves_bytes_between_nodes(page: Any) -> None:
    part = page.locator("[data-part=groups]")
    assert "No order of these axes sends less" in part.inner_text()
    part.locator("[value=tp]").focus()
    press(page, "ArrowRight")  # to dp: 8 groups of 8
    page.get_by_text("8 groups of 8 along dp").wait_for()
    part.locator("[name=order]").fill("pp-dp-ep-cp-tp")
    page.get_by_text("sends least between nodes").wait_for()
    grid = part.locator(".grid").inner_html()
    part.locator("[name=order]").fill("pp-dq")
    assert "not an axis" in problem(page, "groups") and part.locator(".grid").inner_html() == grid


def test_a_plan_has_ten_layouts_each_with_the_parts_of_its_step(page: Any) -> None:
    part = page.locator("[data-part=plan]")
    part.locator("[name=preset]").select_option("gpt2_124m")
    part.locator("[name=gpus]").fill("8")
    part.locator("[name=gpus]").press("Enter")
    part.locator("table.best").wait_for()
    assert part.locator(".step").count() == 10 and "0.1244 billion parameters on H100" in part.inner_text()
    part.locator("[name=gpus]").fill("13")
    part.locator("[name=gpus]").press("Enter")
    assert "no layout on 13 GPUs" in problem(page, "plan") and part.locator("table.best").is_visible()


@pytest.mark.parametrize("empty", [(768, "dark"), (390, "dark")], indirect=True, ids=str)
def test_the_page_is_readable_in_a_dark_theme_and_on_a_narrow_screen(page: Any) -> None:
    width = page.viewport_size["width"]
    page.locator("[data-part=schedule] [name=preset]").select_option("dualpipe_v")
    page.get_by_text("bubble 5.9%").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    for selector in (".say", ".cells input", ".cells th", "svg .name", "svg .onF", "svg .onI", ".grid td", ".bytes th"):
        assert contrast(page, f".labkit-live {selector}") > 4.4, selector


def contrast(page: Any, selector: str) -> float:
    """WCAG's contrast of the first such text with what is behind it (the fill of the block before it, in a picture)."""
    text, back = page.locator(selector).first.evaluate(
        """element => {
            const style = getComputedStyle(element);
            if (element instanceof SVGElement) {
                const block = element.classList.contains("name") ? null : element.parentElement.querySelector("rect");
                const behind = getComputedStyle(block ?? document.body);
                return [style.fill, block ? behind.fill : behind.backgroundColor];
            }
            let behind = element;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [style.color, getComputedStyle(behind).backgroundColor];
        }"""
    )
    light, dark = sorted((_luminance(text), _luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    channels = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_pyodide_says_what_cpython_says(address: str, empty: Any) -> None:
    """The first picture, an edit, and the numbers of several schedules, of groups and of a plan."""
    if missing := runtime()[1]:
        pytest.skip(f"there is no Python for the browser: {missing}")
    empty.goto(address)
    empty.wait_for_function(
        "performance.getEntriesByName('labkit-first-picture').length"
        " || document.querySelector('.say').textContent.includes('could not start')"
    )
    said = empty.locator("[data-part=schedule] .say").inner_text()
    if "could not start" in said:
        assert said.startswith("labkit could not start: numpy could not be loaded from cdn.jsdelivr.net"), said
        pytest.skip("Python started in the browser, but numpy's public address cannot be reached from here; "
                    "LABKIT_PYODIDE may name a folder with a whole distribution")  # fmt: skip
    first = empty.evaluate("performance.getEntriesByName('labkit-first-picture')[0].startTime") / 1e3
    empty.locator("[data-part=groups] table.bytes").wait_for()
    cell(empty, 0, 5).focus()
    press(empty, "Shift+ArrowLeft")
    empty.get_by_text("at most 5 microbatches in flight").wait_for()
    edit = empty.evaluate("performance.getEntriesByName('labkit-schedule').at(-1).duration") / 1e3
    print(f"first picture after {first:.1f} s, an edit answered in {edit:.2f} s")
    sizes = {"pp": "4", "microbatches": "8", "chunks": "2", "forward": "1", "input_grad": "1.25", "weight_grad": "0.7"}
    grid = {"order": "tp-ep-dp-pp", "world_size": "64", "gpus_per_node": "8", "batch": "512", "tp": "4", "cp": "1",
            "pp": "2", "ep": "8"}  # fmt: skip
    asked = [("schedule", {"preset": name, **sizes}) for name in answers.choices()["preset"]]
    asked += [("schedule", {"preset": "1f1b", **sizes, "rows": [["0F0", "0B0"], ["1B0", "1F0"]]})]
    asked += [("groups", {"model": "mixtral_8x7b", **grid})]
    asked += [("plan", {"preset": "table1_8_3b", "machine": "h100", "gpus": "512", "batch": "512"})]
    empty.evaluate(
        """async () => {
            const worker = new Worker(new URL("../../_static/browser/worker.js", location), { type: "module" });
            window.ask = (kind, request) => new Promise((resolve) => {
                worker.onmessage = ({ data }) => data.answer && resolve(data.answer);
                worker.postMessage({ id: 1, kind, request });
            });
        }"""
    )
    for kind, request in asked:
        text = json.dumps(request)
        there = json.loads(empty.evaluate("([kind, request]) => ask(kind, request)", [kind, text]))
        assert same(there, json.loads(answers.answer(kind, text))), (kind, request)
    assert first < BUSY * FIRST and edit < BUSY * EDIT


def same(there: Any, here: Any) -> bool:
    """Return True for equal values; floats may differ by the order in which they were added."""
    if isinstance(there, dict) and isinstance(here, dict):
        return there.keys() == here.keys() and all(same(there[name], here[name]) for name in there)
    if isinstance(there, list) and isinstance(here, list):
        return len(there) == len(here) and all(map(same, there, here))
    if isinstance(there, float) and isinstance(here, float):
        return there == pytest.approx(here, rel=1e-9, abs=1e-12)
    return there == here
