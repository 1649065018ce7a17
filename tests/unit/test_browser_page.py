"""What the page "labkit in the browser" computes, in CPython; tests/browser/test_browser_page.py drives the page."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import answers
import pytest

from labkit.schedules import one_f_one_b, zbv

UNITS = {"forward": "1", "input_grad": "1", "weight_grad": "1"}

ALONE = """
import json, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]  # of labkit's sources
sys.path.insert(0, sys.argv[1])
import answers, labkit
plan = dict(preset="gpt2_124m", machine="h100", gpus="8", batch="64")
groups = dict(order="tp-ep-dp-pp", world_size="8", gpus_per_node="4", model="mixtral_8x7b", batch="64", tp="2", cp="1",
              ep="2", pp="1")
schedule = dict(preset="zbv", pp="2", microbatches="4", chunks="1", forward="1", input_grad="1", weight_grad="1")
for kind, request in (("choices", {}), ("schedule", schedule), ("groups", groups), ("plan", plan)):
    answer = json.loads(answers.answer(kind, json.dumps(request)))
    assert "problem" not in answer, answer
installed = {module.__name__.split(".")[0] for module in list(sys.modules.values())
             if "site-packages" in (getattr(module, "__file__", None) or "") and module.__name__[0] != "_"}
print(labkit.__file__, installed)
"""
"""Answers every kind of request with the archive's folder, given as argument, in front of everything installed."""


def asked(kind: str, **request: Any) -> dict[str, Any]:
    return json.loads(answers.answer(kind, json.dumps(request)))


def schedule(preset: str = "1f1b", pp: str = "4", microbatches: str = "8", **other: Any) -> dict[str, Any]:
    return asked("schedule", preset=preset, pp=pp, microbatches=microbatches, chunks="2", **UNITS | other)


def groups(**other: Any) -> dict[str, Any]:
    sizes = {"tp": "4", "cp": "1", "ep": "1", "pp": "2", "world_size": "64", "gpus_per_node": "8", "batch": "512"}
    return asked("groups", **{"order": "tp-cp-ep-dp-pp", "model": "table1_8_3b"} | sizes | other)


def test_a_schedule_has_the_bubble_and_the_peaks_of_the_papers() -> None:
    found = schedule()
    assert found["bubble"] == pytest.approx(3 / 11)  # (p - 1)/(m + p - 1)
    assert found["peaks"] == [4, 3, 2, 1]
    assert [verdict[:2] for verdict in found["verdicts"]][-1] == ["blocking", False]
    half = schedule("zbv")
    assert half["makespan"] == pytest.approx(3 * 8 + 3 / 2) and half["peaks"] == [4.0] * 4
    assert half["rows"][0] == [str(action) for action in zbv(4, 8).actions(0)]


def test_costs_are_those_of_a_ranks_whole_share() -> None:
    assert schedule(forward="2", weight_grad="0.5")["makespan"] == pytest.approx((8 + 3) * 3.5)
    assert schedule("interleaved", forward="2", weight_grad="0.5")["makespan"] == pytest.approx((8 + 3 / 2) * 3.5)


def test_a_cell_may_leave_out_the_only_stage_of_its_rank() -> None:
    rows = [[str(action) for action in one_f_one_b(2, 3).actions(rank)] for rank in range(2)]
    typed = [["f0 F1", "", *rows[0][2:]], rows[1]]
    assert schedule(rows=typed)["rows"] == rows
    both = [["0F0", "3F0", "3B0", "B0"], ["1F0", "2F0", "2B0", "1B0"]]
    assert schedule(rows=both)["problem"] == "rank 0, position 3: B0 names no stage; write 0B0 or 3B0"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pp": "x"}, "pp is 'x'; give a whole number"),
        ({"forward": "-1"}, "costs are finite and not negative"),
        ({"preset": "dualpipe_v", "microbatches": "4"}, "microbatches"),
        ({"pp": "64", "microbatches": "1000"}, "more than this page draws"),
        ({"rows": [["0F0", "0F0", "0B0"], ["1F0", "1B0"]]}, "rank 0, position 1: 0F0 appears more than once"),
        ({"rows": [["0F0", "0B0"], [""]]}, "rank 1 has no action"),
        ({"rows": [["0F0", "0B0"], ["1B0", "1F0"]]}, "your table"),
    ],
)
def test_a_setting_that_cannot_be_is_answered_with_the_reason(given: dict[str, Any], words: str) -> None:
    assert words in schedule(**given)["problem"]


def test_bytes_inside_and_between_nodes_are_those_of_the_volume_model() -> None:
    found = groups()
    assert [len(found["groups"][axis]) for axis in ("tp", "cp", "dp", "pp")] == [16, 64, 8, 32]
    activation, share = 2 * 1024 * 3072, 12 * 72 * 3072**2 / (4 * 2) * 4
    tp = 64 * 4 * (512 / 8) * (72 / 2) * 2 * 3 / 4 * activation  # 64 links, 4 all-reduces a layer
    dp = 64 * 2 * 7 / 8 * share
    assert sum(found["bytes"]["tp"]) == pytest.approx(tp) and found["bytes"]["tp"][1] == 0
    assert sum(found["bytes"]["dp"]) == pytest.approx(dp)
    reverse = groups(order="pp-dp-ep-cp-tp")
    assert reverse["bytes"]["tp"] == pytest.approx([0, tp]) and reverse["best"].startswith("tp-")


def test_experts_have_groups_of_their_own_and_a_dense_model_rejects_them() -> None:
    assert set(groups(ep="8", model="mixtral_8x7b")["groups"]) == {"tp", "cp", "dp", "pp", "etp", "ep", "edp"}
    assert "without experts" in groups(ep="8")["problem"]
    assert "multiple of" in groups(tp="3")["problem"] and "not an axis" in groups(order="tp-xp")["problem"]
    assert "more than this page draws" in groups(world_size="2048")["problem"]


def test_the_archive_of_the_page_needs_nothing_but_numpy(tmp_path: Path) -> None:
    pytest.importorskip("nbformat")
    from site_pages.browser import sources

    with zipfile.ZipFile(tmp_path / "labkit.zip", "w") as archive:
        for path, name in sources():
            archive.write(path, name)
        archive.extractall(tmp_path / "alone")
    command = [sys.executable, "-c", ALONE, str(tmp_path / "alone")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(tmp_path / "alone"))
    assert result.stdout.rstrip().endswith(" {'numpy'}"), result.stdout


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("exit 7", "npm could not fetch pyodide"),
        ("touch $4/pyodide-{version}.tgz", "is not the archive that scripts/site_pages/browser.py expects"),
    ],
)
def test_without_the_pinned_runtime_the_page_loads_it_from_its_public_address(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbformat")
    from site_pages import browser

    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\n{program.format(version=browser.VERSION)}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("LABKIT_PYODIDE", raising=False)
    monkeypatch.setattr(browser, "KEPT", tmp_path / "kept")
    site = tmp_path / "site"
    (site / "_static" / "browser").mkdir(parents=True)
    assert reason in browser.add_browser_page(site)
    places = json.loads((site / "_static" / "browser" / "runtime.json").read_text())
    assert places == {"runtime": browser.ADDRESS, "packages": browser.ADDRESS}
    assert not list(browser.KEPT.iterdir()), "what is not the runtime does not stay"
