"""Every planted fault is one change of the source as it is: text that is there once, in a module that compiles."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import every_fault
from planting import ROOT, Comparison, Fault

FAULTS = every_fault()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_what_is_there(fault):
    changed = fault.changed_source()
    before = (ROOT / "labkit" / fault.file).read_text()
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(before)), "only the layout of the text changes"
    if isinstance(fault.found_by, str):
        for path in (word for word in fault.found_by.split() if word.startswith("tests/")):
            assert (ROOT / path.split("::")[0]).is_file()


def test_there_are_enough_of_them_and_no_two_have_one_name():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(isinstance(fault.found_by, Comparison) for fault in FAULTS) >= 25, "found by the microscope"


def test_a_fault_whose_text_is_gone_or_there_twice_is_an_error():
    for text, count in (("no such text", 0), ("return", "")):
        fault = Fault("example", "parallel/layers.py", text, "", "tests/unit/test_weights.py")
        with pytest.raises(ValueError, match=f"its text is {count}"):
            fault.changed_source()
