"""Explorers, bets and scores in a real JupyterLab, in headless Chromium: what a reader of a chapter sees and moves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from chromium import executable, free_port, own_settings, why_not

TOKEN = "explorer"
CELL = "from labkit.viz import explore_schedule\n\nexplore_schedule(builder='1f1b', pp=4, microbatches=8)"
BUCKETS = """from labkit.plan import BackwardPiece
from labkit.viz import explore_buckets

layers = {f"layer {i}": 1_000_000 for i in range(40)}
backward = [BackwardPiece(0.004, (f"layer {i}",)) for i in reversed(range(40))]
explore_buckets(layers, backward, bucket_mb=40.0, time_limit=0.25)"""
SKEW = """from labkit.viz import explore_skew

explore_skew(lambda skew: [100 + round(50 * skew), 100 - round(50 * skew)], chosen=0.5, largest=2.0)"""
POLICIES = """import torch
from labkit.viz import explore_policies

# 4 tokens choose expert 0 first, 1 second: with capacity ceil(4 x 2 / 4 x 1) = 2 half of the choices are dropped
logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).repeat(1, 4, 1)
grouped = {"top_k": 2, "num_groups": 2, "group_topk": 1}
explore_policies(logits, {"limit": {"top_k": 2, "capacity_factor": 1.0}, "grouped": grouped}, hidden=8)"""
FOLDING = """from labkit.viz import explore_folding

explore_folding(world_size=16, tp=2, cp=2, pp=2, ep=4, etp=2, gpus_per_node=8)"""
POOL = """from labkit.graphs import play_back
from labkit.viz import explore_pool

# two forwards, then the first backward gives back what the third forward takes
rows = [("F", 0, 0), ("F", 1, 8), ("B", 0, 16), ("-", 0, 0), ("F", 2, 0)]
names = {"F": "forward", "B": "backward"}
explore_pool(play_back(
    (time, "free" if kind == "-" else "alloc", place * 1024, 8192, f"microbatch {m} {names.get(kind, '')}")
    for time, (kind, m, place) in enumerate(rows)
))"""
BET = 'from labkit.check import check, predict\n\nbet, steps = predict("06.bytes"), predict("12.one", p=4, m=8)'
HUNT = 'from labkit.check import hunt\n\nhunt("21", 1).verdict(constant="network", factor="3")'
WRONG = """def mean_gradient(gradients, tokens):
    return gradients[len(tokens) + 5], []


mean_gradient = check("08.tokens", mean_gradient)"""
ENDLESS = """def most_held(order):
    while True:
        pass


most_held = check("17.held", most_held)"""
SETTLE = 'bet.settle("none")\nsteps.settle(96)\nprint(mean_gradient.__module__)'
PATIENCE = 60_000
"""Milliseconds for what a kernel start or a redraw may take on a busy machine."""


pytestmark = [
    pytest.mark.browser,
    pytest.mark.sweep,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "everything is there"),
]


@pytest.fixture
def lab(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own. Its cells are the parameter, or CELL."""
    sources = getattr(request, "param", CELL)
    cells = [nbformat.v4.new_code_cell(source) for source in ([sources] if isinstance(sources, str) else sources)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "explorer.ipynb")
    port, settings = free_port(), own_settings(tmp_path)
    address = f"http://127.0.0.1:{port}"
    options = {"ip": "127.0.0.1", "port": port, "port_retries": 0, "root_dir": tmp_path, "allow_root": True}
    words = [f"--ServerApp.{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", f"--IdentityProvider.token={TOKEN}", *words]
    with (
        (tmp_path / "lab.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **settings}) as server,
    ):
        try:
            _wait_for(f"{address}/api?token={TOKEN}", server, tmp_path / "lab.log")
            yield f"{address}/lab/tree/explorer.ipynb?token={TOKEN}"
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[Any], log: Path) -> None:
    end = time.monotonic() + PATIENCE / 1e3
    while True:
        assert server.poll() is None and time.monotonic() < end, log.read_text()
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)


@pytest.fixture
def page(lab: str) -> Iterator[Any]:
    """The notebook open in a browser, its cell run and its controls shown."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(PATIENCE)
        page.goto(lab)
        page.locator(".jp-CodeCell .cm-content").first.click()
        page.get_by_text(re.compile(r"\| Idle$")).wait_for()  # the kernel: what is run earlier may be lost
        page.keyboard.press("Shift+Enter")
        page.locator(".jp-OutputArea img, .jp-OutputArea button").first.wait_for()
        yield page
        browser.close()


def _slider(page: Any, name: str) -> Any:
    """The handle of the slider called `name`."""
    return page.locator(".widget-slider", has=page.get_by_text(name, exact=True)).locator(".noUi-handle")


def _says(page: Any, sentence: str) -> None:
    """Wait until the words beside the picture hold `sentence`."""
    page.locator(".widget-html", has_text=sentence).wait_for(state="attached")


def _redrawn(page: Any, before: str | None) -> None:
    """Wait until the picture is another; it comes a moment after the words."""
    page.wait_for_function("src => document.querySelector('.jp-OutputArea img').src !== src", arg=before)


def test_a_slider_redraws_and_a_refusal_is_beneath_the_last_picture(page: Any) -> None:
    picture = page.locator(".jp-OutputArea img")
    # (p - 1)/(m + p - 1): 3/11, then 3/12 for one microbatch more
    _says(page, "1F1B, 4 stages, 8 microbatches: bubble 27.3%, peak 4 in flight, 33 units of time")
    before = picture.get_attribute("src")
    _slider(page, "microbatches").press("ArrowRight")
    _says(page, "1F1B, 4 stages, 9 microbatches: bubble 25.0%, peak 4 in flight, 36 units of time")
    _redrawn(page, before)
    assert picture.bounding_box()["width"] > 600

    # interleaving needs groups of at least p microbatches, the last one too: 9 are refused, and groups of 1
    page.locator(".widget-dropdown select").select_option("interleaved")
    kept = picture.get_attribute("src")
    page.locator(".widget-html b").first.wait_for()
    assert picture.is_visible() and picture.get_attribute("src") == kept
    assert page.locator(".widget-html b").first.bounding_box()["y"] > picture.bounding_box()["y"]
    _screenshot(page, "refused")
    _slider(page, "microbatches").press("ArrowLeft")
    _says(page, "interleaved 1F1B, 8 stages, 8 microbatches: bubble 15.8%, peak 5.5 in flight, 28.5 units of time")
    _slider(page, "group_size").press("ArrowRight")
    page.locator(".widget-html b", has_text="group size is 1").wait_for()
    _slider(page, "group_size").press("ArrowLeft")
    page.locator(".widget-html b").first.wait_for(state="detached")
    _screenshot(page, "interleaved")


@pytest.mark.parametrize("lab", [CELL, POLICIES], indirect=True, ids=["schedule", "policies"])
def test_a_narrow_window_cuts_no_control_off(lab: str, page: Any) -> None:
    page.set_viewport_size({"width": 768, "height": 1000})  # with JupyterLab's side bar 340 are left for the cell
    page.wait_for_function("document.querySelector('.jp-OutputArea .widget-vbox').clientWidth < 400")
    cut = """[...document.querySelectorAll('.jp-OutputArea .widget-box')]
             .map(box => [box.scrollWidth, box.clientWidth]).filter(([whole, seen]) => whole > seen)"""
    assert page.evaluate(cut) == []
    assert page.locator(".jp-OutputArea .widget-readout").first.is_visible()


@pytest.mark.parametrize("lab", [BUCKETS], indirect=True)
def test_the_picture_of_buckets_stays_below_its_sliders(lab: str, page: Any) -> None:
    picture, size = page.locator(".jp-OutputArea img"), _slider(page, "bucket size (MB)")
    _says(page, "buckets of 40 MB or more: 4 reductions, 3 of them start")  # 40 layers of 4 MB, ten to a bucket
    before, place = picture.get_attribute("src"), picture.bounding_box()
    assert size.bounding_box()["y"] < place["y"]
    size.press("Home")  # 0.1 MB: a bucket for each layer
    _says(page, "buckets of 0.1 MB or more: 40 reductions, 39 of them start")
    _redrawn(page, before)
    assert picture.bounding_box() == place
    _screenshot(page, "buckets")


@pytest.mark.parametrize("lab", [SKEW], indirect=True)
def test_more_skew_makes_a_step_longer(lab: str, page: Any) -> None:
    picture = page.locator(".jp-OutputArea img")
    _says(page, "1.25 at skew 0.5, 2.00 at skew 2; at skew 0.5 the ranks compute for 80% of it")  # 125 against 100
    before = picture.get_attribute("src")
    _slider(page, "skew").press("End")
    _says(page, "at skew 2 the ranks compute for 50% of it")
    _redrawn(page, before)
    _screenshot(page, "skew")


@pytest.mark.parametrize("lab", [POLICIES], indirect=True)
def test_controls_of_the_router_lab_change_policies_and_leave_out_what_cannot_be(lab: str, page: Any) -> None:
    picture = page.locator(".jp-OutputArea img")
    _says(page, "dropped: limit 50.0%")
    before = picture.get_attribute("src")
    for _ in range(4):
        _slider(page, "capacity_factor").press("ArrowRight")  # 2.0: an expert takes all 4
    page.locator(".widget-html", has_text="dropped").wait_for(state="detached")
    _redrawn(page, before)
    after = picture.get_attribute("src")
    _slider(page, "top_k").press("ArrowRight")  # a group has two experts, so no token finds three in one
    page.locator(".widget-html b", has_text="left out: policy 'grouped'").wait_for()
    _says(page, "fullest expert against the mean: limit 1.33")  # 4 rows, the mean is 4 x 3 / 4
    _redrawn(page, after)
    picture.wait_for(state="visible")
    _screenshot(page, "policies")


@pytest.mark.parametrize("lab", [FOLDING], indirect=True)
def test_a_layout_that_folding_alone_allows_is_refused_without_it(lab: str, page: Any) -> None:
    picture = page.locator(".jp-OutputArea img")
    _says(page, "attention tp 2 cp 2 dp 2 pp 2, experts etp 2 ep 4 pp 2")
    _screenshot(page, "folding")
    page.get_by_label("folded").uncheck()
    page.locator(".widget-html b", has_text="ep 4 does not divide dp 2").wait_for()
    assert picture.is_visible()
    page.get_by_label("folded").check()
    page.locator(".widget-html b").first.wait_for(state="detached")


@pytest.mark.parametrize("lab", [POOL], indirect=True)
def test_the_player_steps_through_the_frames_of_a_pool(lab: str, page: Any) -> None:
    picture = page.locator(".jp-OutputArea img")
    _says(page, "Frame 0 of 4, F0: 8 KiB held in 1 block, 0 KiB of it just taken")
    before = picture.get_attribute("src")
    _slider(page, "frame").press("End")
    _says(page, "Frame 3 of 4, F2: 24 KiB held in 3 blocks, 8 KiB of it just taken from earlier graphs")
    assert picture.get_attribute("src") != before
    _screenshot(page, "pool")
    _slider(page, "frame").press("Home")
    _says(page, "Frame 0 of 4")
    page.locator(".jupyter-widget-play button, .widget-play button").first.click()
    _says(page, "Frame 3 of 4")  # by itself


def _screenshot(page: Any, name: str) -> None:
    """Into the folder SCREENSHOTS, if that is set: to look at what assertions cannot see."""
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.mark.parametrize("lab", [[BET, WRONG, ENDLESS, SETTLE, HUNT]], indirect=True)
def test_bets_scores_and_verdicts_as_a_reader_sees_them(page: Any, tmp_path: Path) -> None:
    buttons = page.get_by_role("button", name="Place bet")
    buttons.nth(1).wait_for()
    choice, number = buttons.all()
    choice.click()
    page.get_by_text("Choose an answer first.").wait_for()
    page.get_by_text("100 %", exact=True).click()
    choice.click()
    page.get_by_text("Your bet: 100 %. Run the next cells to settle it.").wait_for()
    assert page.get_by_role("radio").first.is_disabled()
    page.get_by_placeholder("a number").fill("33")
    number.click()
    page.get_by_text("Your bet: 33 steps.").wait_for()
    page.locator(".jp-CodeCell .cm-content").nth(1).click()
    page.keyboard.press("Shift+Enter")
    page.get_by_text("IndexError: list index out of range").wait_for()
    page.get_by_text("return gradients[len(tokens) + 5], []").nth(1).wait_for()
    page.keyboard.press("Shift+Enter")
    page.get_by_text("no end after 10 seconds").wait_for()
    page.keyboard.press("Shift+Enter")
    page.get_by_text("Not this time: you bet 100 %, and it is none.").wait_for()
    page.get_by_text("33 steps? That is 1F1B's time").wait_for()
    page.get_by_text("labkit.check.solutions.chapter_08").wait_for()
    page.keyboard.press("Shift+Enter")
    page.get_by_text("1 of 2 right.").wait_for()
    page.get_by_text("constant: right.").wait_for()
    _screenshot(page, "verdict")
    kept = json.loads((tmp_path / "progress.json").read_text())
    assert kept["check"] == {"08.tokens": "tried", "17.held": "tried"}
    assert kept["predict"] == {"06.bytes": "wrong", "12.one": "wrong"}
