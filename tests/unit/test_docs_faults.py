"""docs/faults.md has the faults of tests/faults.py, whatever was added since, and says that all are found."""


def test_the_committed_table_is_that_of_the_script(load_script):
    script = load_script("planted_faults")
    committed = script.TARGET.read_text(encoding="utf-8").split(script.MUTANTS)[0]
    wanted = [script.row(fault, True, "").strip() for faults in script.FAULTS.values() for fault in faults]
    rows = [line for line in committed.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    assert rows == wanted
    assert f"{len(wanted)} of {len(wanted)} planted faults are found (100%)." in committed
