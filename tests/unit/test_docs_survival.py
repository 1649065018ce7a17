"""docs/survival.md says what results.json says; sums of several tests and of tests that ran twice are right."""

import pytest


@pytest.fixture
def script(load_script, monkeypatch):
    """scripts/survival.py."""
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return load_script("survival")


def test_the_committed_page_is_that_of_the_committed_results(script):
    assert script.TARGET.read_text(encoding="utf-8") == script.page(script.stored())


def test_every_stored_result_says_where_it_comes_from(script):
    rows = script.stored()
    assert {row["part"] for row in rows} <= set(script.PARTS)
    for row in rows:
        assert set(script.provenance.KEYS) <= row.keys()
        assert 0 <= row["passed"] <= row["attempts"] > 0


def record(test, attempts, passed, **values):
    empty = {"largest": {}, "counts": {}}
    return {"test": test, "row": "F4", "case": "x", "attempts": attempts, "passed": passed, **empty, **values}


def test_sums_are_over_tests_and_a_repetition_replaces(script, tmp_path, monkeypatch):
    records = [
        record("a", 5, 3, largest={"seconds": 2.0}),
        record("b", 5, 5, largest={"seconds": 1.0}, counts={"before": 2}),
        record("a", 5, 5, largest={"seconds": 0.5}, counts={"before": 1, "after": 4}),
    ]
    (result,) = script.summed(records)
    assert (result["attempts"], result["passed"], result["largest"]) == (10, 10, {"seconds": 1.0})
    assert result["counts"] == {"before": 3, "after": 4}
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results.json")
    origin = script.provenance.origin()
    script.keep("soak", [{**result, "row": "F22"}], origin)
    script.keep("saves", [result], origin)
    script.keep("saves", [{**result, "passed": 9}], origin)
    assert [(row["row"], row["passed"]) for row in script.stored()] == [("F4", 9), ("F22", 10)]
    text = script.page(script.stored())
    assert "| F4 | x | 9 of 10; at most 1 seconds; 4 after, 3 before |" in text
    assert "Not measured yet: F1, F2" in text
