"""Every planted fault changes one piece of one symbol of the source as it is, and the module still compiles."""

import ast
import builtins
from textwrap import dedent

import pytest
from faults import every_fault
from planting import ROOT, Comparison, Fault
from symbols import find_symbol, replaced

FAULTS = every_fault()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_what_is_there(fault):
    path, changed = fault.changed_source()
    before = path.read_text(encoding="utf-8")
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(before)), "only the layout of the text changes"
    if isinstance(fault.found_by, str):
        for path in (word for word in fault.found_by.split() if word.startswith("tests/")):
            assert (ROOT / path.split("::")[0]).is_file()


def names(node: ast.AST) -> set[str]:
    """Variables and arguments that are read or bound somewhere in `node`."""
    bound = (each for each in ast.walk(node) if isinstance(each, ast.Name | ast.arg))
    return {each.id if isinstance(each, ast.Name) else each.arg for each in bound}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_uses_names_that_its_symbol_knows(fault):
    """Otherwise a NameError would be found, and not the fault."""
    file, symbol = find_symbol(fault.at)
    known = names(symbol) | set(dir(builtins))
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        else:
            known |= names(node)
    assert names(ast.parse(dedent(fault.new))) <= known


def test_there_are_enough_of_them_and_no_two_have_one_name():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert sum(isinstance(fault.found_by, Comparison) for fault in FAULTS) >= 25, "found by the microscope"


@pytest.mark.parametrize(
    ("at", "old", "problem"),
    [
        ("_RowLinear.forward", "no_such(piece)", "is 0 times in _RowLinear.forward"),
        ("_RowLinear", "plan.group", "times in _RowLinear, not once"),
        ("NoSuchClass.forward", "x", "0 symbols are called NoSuchClass.forward"),
        ("_shard", "x", "symbols are called _shard, not one"),
    ],
)
def test_a_fault_whose_piece_is_gone_or_there_twice_is_an_error(at, old, problem):
    with pytest.raises(ValueError, match=f"fault 'example': .*{problem}"):
        Fault("example", at, old, "y", "tests/unit/test_weights.py").changed_source()


def test_layout_of_the_text_does_not_matter():
    """Quotes, line breaks and comments are no part of a piece; the rest of the file stays as it is."""
    path, changed = replaced("_RowLinear.forward", "reduce( partial,  # of this rank\n plan.group )", "0")
    before = path.read_text(encoding="utf-8")
    assert changed == before.replace("reduce(partial, plan.group)", "(0)")
    _, shorter = replaced("_RowLinear.forward", "y = reduce(partial, plan.group)", "")
    assert "    pass\n" in shorter
