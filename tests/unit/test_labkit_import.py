"""`import labkit` is light: it loads no torch, and neither does what answers without computing."""

import subprocess
import sys

import pytest

LIST = "import sys; print(*sorted(name.partition('.')[0] for name in sys.modules))"


def fresh(code):
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import labkit",
        "import labkit.launch",
        "from labkit.launch import run, Ranks, RankError, rank_info, waiting, report_progress, preload",
        "import labkit; labkit.events; labkit.launch; labkit.config; labkit.schedules",
        "from labkit.train.reporting.run_records import RunRecords; from labkit.viz import training_curves",
        "from labkit.graphs import plan_buffers, check_plan; check_plan(plan_buffers([1, -1], 2), [1, -1])",
    ],
)
def test_torch_is_not_imported(statement):
    assert "torch" not in fresh(f"{statement}; {LIST}")


def test_import_labkit_loads_nothing_but_its_own_file():
    """Beside what `typing` loads, which differs from one environment to another. It takes about a millisecond."""
    new = set(fresh("import labkit, sys; print(*sys.modules)")) - set(
        fresh("import __future__, typing, sys; print(*sys.modules)")
    )
    assert new == {"labkit"}


def test_names_are_listed_and_wrong_ones_refused():
    import labkit
    import labkit.launch

    assert {"launch", "schedules", "__version__"} <= set(dir(labkit))
    assert labkit.__version__.count(".") == 2
    assert set(labkit.launch.__all__) <= set(dir(labkit.launch))
    for module in (labkit, labkit.launch):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = module.nothing
