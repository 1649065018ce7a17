"""docs/parity.md has the rows of the script that writes it, whatever was added to the matrix since."""

import importlib.util
import re
from pathlib import Path

import labkit.train.parity.comparison as parity
from labkit.train.parity.assemble import FullRun

ROOT = Path(__file__).parents[2]


def _matrix():
    spec = importlib.util.spec_from_file_location("parity_matrix", ROOT / "scripts" / "parity_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_numbers(text):
    """Numbers and what rounding made of them on the machine that wrote the file."""
    text = re.sub(r"\d\.\de[+-]\d\d\b", "#", text)
    text = re.sub(r"\| [^|]+ \(rounding\) \|", "| none |", text)
    text = re.sub(r"\d+ of (\d+) layouts agree", r"\1 of \1 layouts agree", text)
    return re.sub(r" [^.]+ differs from one process by up to #, first in .+? as far\.", "", text)


def test_the_committed_tables_are_those_of_the_script_but_for_the_numbers(tmp_path, monkeypatch):
    """Nothing is trained: every layout is planned and named as ever, and two empty runs are compared."""
    nothing = FullRun(losses=[], activations={}, gradients={}, parameters={}, disagreements=[])
    monkeypatch.setattr(parity, "_observe", lambda *arguments, **options: (nothing, 0))
    monkeypatch.setattr(parity, "differences", lambda *runs, **options: iter(()))
    matrix = _matrix()
    monkeypatch.setattr(matrix, "TARGET", tmp_path / "parity.md")
    assert matrix.main() == 0
    written, committed = matrix.TARGET.read_text(), (ROOT / "docs" / "parity.md").read_text()
    sweeps = [
        *matrix.SWEEPS.values(),
        *matrix.DATA_SWEEPS.values(),
        *matrix.EXPERT_SWEEPS.values(),
        *matrix.COMPILED_SWEEPS.values(),
        *matrix.BERT_SWEEPS.values(),
        *matrix.T5_SWEEPS.values(),
        *matrix.MAMBA_SWEEPS.values(),
    ]
    layouts = len(matrix.PRESETS) * 2 * len(matrix.LAYOUTS) + sum(len(rows) for _, rows, _ in sweeps)
    assert len(re.findall(r"^\| tp\d ", committed, flags=re.MULTILINE)) == layouts
    assert _without_numbers(written).splitlines() == _without_numbers(committed).splitlines()
