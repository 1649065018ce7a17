"""What a parity run may be asked to leave out is all that the source communicates."""

import ast
from pathlib import Path

import labkit
from labkit.train.parity.comparison_plan import KNOWN, fault_problems, fault_words


def phases() -> set[str]:
    """Every phase that the source gives to a scope, written out as a word."""
    found: set[str] = set()
    for path in Path(labkit.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "comm_scope":
                words = [keyword.value for keyword in node.keywords if keyword.arg == "phase"]
                found |= {word.value for word in words if isinstance(word, ast.Constant)}
    return found


def test_every_phase_of_the_source_can_be_named():
    known = KNOWN["phase"]
    assert known is not None
    assert phases() <= set(known), "a phase that `labkit parity --drop` refuses"
    assert {"gradients", "parameters", "expert bias"} <= phases(), "the search finds them"


def test_a_fault_of_experts_is_sound_and_reads_as_it_was_written():
    fault = {"operation": "all_to_all", "group": "ep", "phase": "backward", "layer": "layers.2.mlp"}
    assert fault_problems(fault) == []
    assert fault_words(fault) == "operation=all_to_all,group=ep,phase=backward,layer=layers.2.mlp"
    (problem,) = fault_problems({"phase": "bias"})
    assert problem.startswith("phase 'bias' is not known") and problem.endswith('did you mean "expert bias"?')
