"""The rules behind chapters' parameters: every parameter has one; defaults keep it, values just outside do not."""

import json
import linecache
import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.check import check_parameters
from labkit.check.parameters import broken_rules, declared, is_rule
from labkit.cli.chapter_parameters import check_parameters as of_command_line
from labkit.cli.chapter_parameters import parameter_cell
from labkit.launch import forkserver

CHAPTERS = sorted((Path(__file__).parents[2] / "notebooks").glob("[0-9][0-9]_*.ipynb"))
each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
LINES = """\
world_size: int = 4  # ranks (2, 4 or 8)
tp: int = 2  # (remark) shards (1 to 8, a divisor of world_size)
samples: int = 8  # of a batch (a multiple of 2 world_size)
chunks: int = 2  # of a rank (1 to 8 / world_size)
half: int = 1  # of the ranks (1 to world_size / 2)
rate: float = 0.5  # a share (0 to 0.9)
order: str = "a-b-c"  # of axes (a-b-c in any order, c last)
out: str = "."  # for results (a folder)
note: str = "x"  # anything (no rule)
"""


def broken(**changes: object) -> dict[str, str]:
    known = declared(LINES)
    return broken_rules(known.values(), {name: p.default for name, p in known.items()} | changes)


def test_defaults_and_both_ends_are_allowed():
    assert broken() == {}
    assert (
        broken(world_size=8, tp=8, samples=16, chunks=1, rate=0, order="b-a-c", out="new/folder", note="(1 to 2)") == {}
    )
    assert broken(world_size=2, tp=1, samples=4, chunks=4, rate=0.9) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"world_size": 3}, {"world_size": "must be 2, 4 or 8"}),
        ({"tp": 0}, {"tp": "must be 1 to 8, a divisor of world_size (world_size is 4)"}),
        ({"tp": 8}, {"tp": "must be 1 to 8, a divisor of world_size (world_size is 4)"}),
        ({"tp": -2}, {"tp": "must be 1 to 8, a divisor of world_size (world_size is 4)"}),
        ({"samples": 12}, {"samples": "must be a multiple of 2 world_size (world_size is 4)"}),
        ({"chunks": 3}, {"chunks": "must be 1 to 8 / world_size (world_size is 4)"}),
        ({"half": 3}, {"half": "must be 1 to world_size / 2 (world_size is 4)"}),
        ({"rate": 0.91}, {"rate": "must be 0 to 0.9"}),
        ({"rate": float("nan")}, {"rate": "must be a finite number"}),
        ({"world_size": "4"}, {"world_size": "must be an integer, not text; write it without quotes"}),
        ({"world_size": True}, {"world_size": "must be an integer, not true/false"}),
        ({"order": "c-b-a"}, {"order": "must be a-b-c in any order, c last"}),
        ({"order": "a-a-c"}, {"order": "must be a-b-c in any order, c last"}),
        ({"out": __file__}, {"out": "must be a folder"}),
        ({"out": f"{__file__}/below"}, {"out": "must be a folder"}),
    ],
)
def test_what_is_outside_is_refused_with_the_rule(changes, said):
    assert broken(**changes) == said


def test_a_remark_is_no_rule_and_untyped_lines_have_their_value_s_type():
    assert [p.rule for p in declared(LINES).values()][-1] == ""
    assert not is_rule("processes") and not is_rule("1 too 4")
    assert declared("a = 3  # (1 to 4)")["a"].kind == "int"


@given(st.text(max_size=60))
def test_any_comment_is_read_without_an_error(text):
    is_rule(text)


def test_a_kernel_reads_the_cell_that_ran_last_and_a_script_its_own_file(tmp_path, monkeypatch):
    known = {name: p.default for name, p in declared(LINES).items()}
    cells = [
        "",
        "world_size: int = 4  # (1 to 4)",
        LINES,
        "# Parameters\nworld_size = 3\n",
        "check_parameters(globals())",
    ]
    check_parameters({**known, "In": cells})
    with pytest.raises(ValueError, match=r"^world_size = 3: must be 2, 4 or 8; rate = 2: must be 0 to 0\.9$"):
        check_parameters({**known, "world_size": 3, "rate": 2, "In": cells})
    script = tmp_path / "chapter.py"
    script.write_text(f"# %% tags=['parameters']\n{LINES}\n# %%\nimport torch\n")
    with pytest.raises(ValueError, match=r"^rate = 2\.0: must be 0 to 0\.9$"):
        check_parameters({**known, "rate": 2.0, "__file__": str(script)})
    with pytest.raises(ValueError, match="run the cell of parameters first"):
        check_parameters({})
    monkeypatch.setitem(linecache.cache, "/x/ipykernel_7/1.py", (9, None, LINES.splitlines(keepends=True), "1.py"))
    with pytest.raises(ValueError, match=r"^tp = 3: must be 1 to 8, a divisor of world_size"):
        check_parameters({**known, "tp": 3})  # as under nbval, whose kernel keeps no history


def test_a_notebook_starts_the_server_of_ranks_once_with_what_trains(monkeypatch):
    asked = []
    monkeypatch.setattr(forkserver, "_modules", [])
    monkeypatch.setattr(forkserver._server, "_forkserver_pid", None)  # another test may have started it
    monkeypatch.setattr(forkserver, "ensure_running", lambda: asked.append(list(forkserver._modules)))
    namespace = {name: p.default for name, p in declared(LINES).items()} | {"In": [LINES], "get_ipython": None}
    check_parameters(namespace)
    monkeypatch.setattr(forkserver._server, "_forkserver_pid", 1)  # as if it ran
    check_parameters(namespace)
    assert len(asked) == 2 and asked[0] == asked[1] and "labkit.train.pretraining" in asked[0]
    assert all(find_spec(module) for module in asked[0]), "a server skips what it can't import"


# ---- the chapters' own ----


@each_chapter
def test_every_parameter_has_a_rule_that_its_default_keeps(chapter, tmp_path):
    known = declared(parameter_cell(chapter))
    assert [p.name for p in known.values() if not p.rule] == []
    assert of_command_line(chapter, [], tmp_path)[1] == []
    source = "".join("".join(cell["source"]) for cell in json.loads(chapter.read_text())["cells"])
    assert source.count("check_parameters(globals())") == 1, "papermill and people at the keyboard are told, too"


def outside(rule: str) -> list[str]:
    """Values that break a rule: beyond both ends, off a multiple, no choice."""
    found = []
    for end in re.findall(r"([\d._]+) to ([\d._]+)", rule):
        low, high = (float(each) for each in end)
        found += [f"{low - 1:g}", f"{high + 1:.0f}", "-3"]
    if " or " in rule:
        found += ["5", "none"]
    if "in any order" in rule:
        found += ["tp-pp", "tp-cp-ep-pp-dp", "pp"]
    if "multiple" in rule and "_" not in rule and "tp" not in rule:
        found += ["7"]
    return found or ["-3", "0"]


@each_chapter
def test_values_just_outside_are_refused_at_once(chapter, tmp_path):
    for name, parameter in declared(parameter_cell(chapter)).items():
        if parameter.rule == "a folder":
            continue
        for text in outside(parameter.rule):
            started = time.process_time()
            said = of_command_line(chapter, [(name, text)], tmp_path)[1]
            assert len(said) >= 1 and said[0].startswith(f"-p {name} '{text}': must be "), (name, text)
            assert time.process_time() - started < 5, "no kernel, no torch"


@pytest.mark.parametrize(
    ("stem", "given", "said"),
    [
        (
            "00_tour",
            {"tp": "4"},
            "world_size 4 (the default): must be 1 to 16, a multiple of tp pp, a divisor of 4 tp pp",
        ),
        ("10_p2p_and_1f1b", {"world_size": "3"}, "-p world_size '3': must be 2, 4 or 8 in 10_p2p_and_1f1b"),
        ("10_p2p_and_1f1b", {"microbatches": "0"}, "-p microbatches '0': must be 1 to 32 in 10_p2p_and_1f1b"),
        (
            "11_interleaving",
            {"chunks": "4"},
            "-p chunks '4': must be 2 to 4, a divisor of 8 / world_size (world_size is 4)",
        ),
        (
            "12_write_your_own_schedule",
            {"microbatches": "9"},
            "'9': must be 2 world_size to 64, a multiple of world_size (world_size is 4)",
        ),
        ("14_moe_layer", {"top_k": "9"}, "-p top_k '9': must be 2 to experts (experts is 8) in 14_moe_layer"),
        ("17_graphs_in_a_pipeline", {"microbatches": "6"}, "a multiple of world_size (world_size is 4)"),
    ],
)
def test_relations_between_parameters(stem, given, said, tmp_path):
    chapter = next(path for path in CHAPTERS if path.stem == stem)
    (found,) = of_command_line(chapter, list(given.items()), tmp_path)[1]
    assert said in found


def test_gpus_that_are_not_there_are_said_in_the_words_of_a_launch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    known = declared(parameter_cell(CHAPTERS[0]))
    values = {name: p.default for name, p in known.items()}
    assert broken_rules(known.values(), values) == {}
    assert "torch sees no GPU" in broken_rules(known.values(), values | {"device": "cuda"})["device"]
    said = broken_rules(known.values(), values | {"backend": "nccl"})
    assert "needs a GPU for each of the 4 ranks" in said["backend"]
