"""The command line: the values that it reads, its help, groups of known layouts, the reference page."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from dataclasses import make_dataclass, replace
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cli import main
from labkit.cli.arguments import CONFIG_OPTIONS, read
from labkit.cli.command_line import COMMANDS
from labkit.cli.help_text import COMMON, help_text
from labkit.cli.output import folded, table
from labkit.cli.parity_command import STANDARD_EXPERT_LAYOUTS, STANDARD_LAYOUTS, read_layouts
from labkit.cli.run_command import COMMAND as RUN
from labkit.cli.run_command import Chapter
from labkit.cli.train_command import COMMAND as TRAIN
from labkit.cli.written_files import output_problems
from labkit.comm.group_plan import GROUP_KINDS
from labkit.comm.rank_generator import rank_generators
from labkit.config import RunConfig, field, presets, yaml_text
from labkit.config.errors import shown
from labkit.config.fields import ALIASES, SPECS, resolve
from labkit.config.sections import SECTIONS
from labkit.evaluate.records import Records
from labkit.launch import forkserver
from labkit.launch import rank_pool as pool
from labkit.output_files import appearing
from labkit.schedules import interleaved
from labkit.train.reporting.metrics import JsonLines

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()


def _config(*words: str) -> RunConfig:
    arguments = read(TRAIN, ["--preset", "tiny", *words])
    assert arguments.problems == []
    return arguments.config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--device", "cuda"], "labkit train: --device cuda: torch sees no GPU; set it to cpu or auto"),
        (["parity", "--device", "gpu"], "labkit parity: --device cuda: torch sees no GPU; set it to cpu or auto"),
        (
            ["train", "--nproc", "2", "--distributed-backend", "nccl"],
            "--distributed-backend nccl: needs a GPU for each of the 2 ranks on",
        ),
        (
            ["parity", "--layouts", "tp=2", "--parallel.distributed_backend", "nccl"],
            "parallel.distributed_backend = nccl: needs a GPU for each of the 2 ranks",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_missed_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    def started(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(forkserver, "ensure_running", started)
    monkeypatch.setattr(pool.LaunchFolder, "__init__", started)
    assert main([words[0], "--preset", "tiny", *words[1:]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"labkit {words[0]}: ") and message in err


def test_help_is_short_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert main(["--help"]) == 0 and capsys.readouterr().out == out
    assert main(["--version"]) == 0 and capsys.readouterr().out.startswith("labkit 0.")
    assert len(out.splitlines()) <= 34 and max(map(len, out.splitlines())) <= 80
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: labkit {name}")
    assert re.search(f"examples?: labkit {name}", " ".join(out.split()))
    rows = re.findall(
        r"^  (?:-p, )?--[^\n]*(?:\n {26}[^\n]*)*", out.partition("\noptions:\n")[2].split("\n\n")[0], re.M
    )
    assert len(rows) == len(OF_THE_COMMANDS[name].all_options)
    assert all(re.search(r"\(((default: |as )[^)]|required)", row) for row in rows)


def test_help_of_an_action_has_its_own_words_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    for action, options in (("list", ""), ("export", "--step --dtype --overwrite"), ("import", "")):
        assert main(["checkpoint", action, "--help"]) == 0
        out = capsys.readouterr().out
        assert re.findall(r"^  (--[\w-]+)", out, re.MULTILINE) == options.split()
        assert out.startswith(f"usage: labkit checkpoint {action} DIR") and ("example: " in out) == (action == "export")


def test_help_of_train_takes_two_screens() -> None:
    """The short one has every preset and, of each common field, names that are all this field's, and its default."""
    text = help_text(TRAIN)
    assert len(text.splitlines()) <= 104 and max(map(len, text.splitlines())) <= 100
    assert all(f" {name} " in text for name in presets.PRESETS) and "--help-all" in text
    rows = [line.strip().partition(": ")[0].split(", ") for line in COMMON.splitlines() if line.startswith(" ")]
    found = [{resolve(name.lstrip("-"))[0] for name in names} for names in rows]
    assert all(len(fields) == 1 and None not in fields for fields in found) and len(set.union(*found)) == len(rows)
    assert "--steps, --train-iters" in text and "--steps, --train-iters" not in help_text(OF_THE_COMMANDS["parity"])
    said = " ".join(text.split())
    for words in ("--lr FLOAT peak learning rate (default: 0.001)", "(default: 4 x hidden)", "gpt2_124m 124M,"):
        assert words in said


def test_help_all_shows_every_field_with_its_string() -> None:
    said = " ".join(help_text(TRAIN, ["--help-all"]).split())
    assert all(f"--{spec.dotted} " in said and f"(default: {spec.default_words}" in said for spec in SPECS.values())
    assert (
        "--model.rope_theta FLOAT Base of the rotary frequencies. (default: 10000; Megatron-LM: --rotary-base)" in said
    )


@pytest.mark.parametrize(
    "words",
    [["--parallel.tp", "2"], ["--parallel.tp=2"], ["--tp", "2"], ["--tensor-model-parallel-size", "2"],
     ["--tensor_model_parallel_size", "2"], ["--parallel.tensor_model_parallel_size=2"], ["--tp", "2", "--tp=+2"]],
)  # fmt: skip
def test_ways_to_write_one_field(words: list[str]) -> None:
    assert _config(*words) == presets.tiny().override({"parallel.tp": 2})


@pytest.mark.parametrize("alias", ALIASES)
def test_every_long_name_with_dashes(alias: str) -> None:
    spec = SPECS[ALIASES[alias]]
    other = "false" if spec.default is True else "true"
    word = {
        "int": "3",
        "float": "5e-1",
        "bool": other,
        "str": "x",
        "tuple[str, ...]": "attn",
        "tuple[int, ...]": "1,0",
    }[spec.kind]
    config = _config(f"--{alias.replace('_', '-')}", word)
    assert config == _config(f"--{spec.dotted}", word) != presets.tiny()


def test_values_of_the_command_line_are_read_as_the_fields_type() -> None:
    config = _config(
        "--lr", "1e-4", "--kv-heads", "null", "--sequence-parallel", "--bias", "false", "--warmup-steps=+3",
        "--cuda-graph-scope", "attn,moe_router", "--output-dir", "123", "--min-lr", "0", "--params-dtype", "bfloat16",
    )  # fmt: skip
    assert config == presets.tiny().override({
        "lr": 1e-4, "sequence_parallel": True, "bias": False, "warmup_steps": 3, "output_dir": "123",
        "cuda_graph_modules": ["attn", "moe_router"], "min_lr": 0.0, "optim.precision": "bf16",
    })  # fmt: skip
    assert config.train.output_dir == "123" and isinstance(config.optim.min_lr, float)


def test_file_lies_over_preset_and_options_over_both(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("num_layers: 4\nparallel: {tp: 2, pp: 2}\n")
    config = _config("--config", str(path), "--parallel.tp", "4")
    assert config == presets.tiny().override({"layers": 4, "tp": 4, "pp": 2})


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        (["true"], True),
        (["False"], False),
        (["null"], None),
        (["none"], None),
        ([""], None),
        (["--tp", "1"], True),
    ],
)
def test_a_bool_stands_alone_or_takes_the_word_after_it(words: list[str], value: bool | None) -> None:
    assert _config("--schedule.batch_p2p_comm", *words).schedule.batch_p2p_comm is value


@pytest.mark.parametrize(("word", "value"), [("none", "none"), ("null", None), ("latest", "latest")])
def test_none_is_a_word_where_a_field_has_it(word: str, value: str | None) -> None:
    """`checkpoint.load none` starts anew, and without a value the run resumes."""
    assert _config(f"--checkpoint.load={word}").checkpoint.load == value


OF_THE_COMMANDS = {name: import_module(f"labkit.cli.{module}").COMMAND for name, (module, _) in COMMANDS.items()}
OPTIONS = [(name, option) for name, command in OF_THE_COMMANDS.items() for option in command.all_options]


def test_a_tilde_is_the_home_folder_in_every_option_and_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in quotes and behind `=`, where no shell expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").write_text("train: {steps: 3}")
    words = re.compile(r"\b(file|files|folder)\b")
    for name, option in OPTIONS:
        may_be = "str" in option.kind and option.name not in ("preset", "squad-version")
        assert option.path or not (may_be and words.search(option.doc)), (name, option.name)
        if option.path:
            found = read(OF_THE_COMMANDS[name], [f"--{option.name}=~/a"]).options[option.key]
            assert found in (f"{tmp_path}/a", (f"{tmp_path}/a",)), (name, option.name)
    assert {name: read(command, ["~/a"]).words == [f"{tmp_path}/a"] for name, command in OF_THE_COMMANDS.items()} == {
        name: name in ("watch", "why", "checkpoint", "config", "data", "run", "grade") for name in OF_THE_COMMANDS
    }
    assert read(OF_THE_COMMANDS["train"], ["--config", "~/a"]).config.train.steps == 3


def test_a_tilde_is_the_home_folder_in_every_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In YAML, on the command line, in changes and in sections made by hand. A run stores the whole path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    lists = {name for name, spec in SPECS.items() if spec.path and spec.kind.startswith("tuple")}
    written: dict = {name: ["~/a", "b/~"] if name in lists else "~/a" for name, spec in SPECS.items() if spec.path}
    whole = {name: (f"{tmp_path}/a", "b/~") if name in lists else f"{tmp_path}/a" for name in written}
    sections = {section: {n.partition(".")[2]: v for n, v in written.items() if n.startswith(f"{section}.")}
                for section in SECTIONS}  # fmt: skip
    (tmp_path / "c.yaml").write_text(yaml_text.dump(sections))
    assert yaml_text.read("~/c.yaml") == (whole, [])
    by_hand = RunConfig(**{section: SECTIONS[section](**values) for section, values in sections.items()})
    assert by_hand == RunConfig().override(written) == RunConfig().replaced(whole)
    assert all(vars(getattr(by_hand, SPECS[name].section))[SPECS[name].name] == path for name, path in whole.items())
    words = [f"--{name}={','.join(path) if name in lists else path}" for name, path in written.items()]
    assert _config(*words) == presets.tiny().replaced(whole)
    assert set(written) == {
        "schedule.path", "data.path", "data.blend", "data.tokenizer", "data.cache", "train.output_dir",
        "train.tensorboard_dir", "checkpoint.dir", "checkpoint.load",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["maybe", "1", "on"])
def test_a_bool_refuses_other_words_by_its_own_name(word: str) -> None:
    problems = read(TRAIN, ["--preset", "tiny", "--schedule.batch_p2p_comm", word, "--bias", word]).problems
    assert problems == [
        f"--schedule.batch_p2p_comm '{word}': must be true, false or null",
        f"--bias '{word}': must be true or false",
    ]


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--decoder-first-pipeline-num-layers", "set parallel.pipeline_layout, which gives the layers of every stage"),
        ("--decoder-last-pipeline-num-layers", 'as in "E ttt | ttt | t L" for a last stage of one layer'),
        ("--account-for-embedding-in-pipeline-split", 'as in "E t | tt | tt L", one layer fewer by the embedding'),
        ("--account-for-loss-in-pipeline-split", 'as in "E tt | tt | t L", one layer fewer by the loss'),
    ],
)
def test_megatrons_other_ways_to_divide_layers_lead_to_ours(option: str, advice: str) -> None:
    words = [option] if option.startswith("--account") else [option, "2"]
    (problem,) = read(TRAIN, ["--preset", "tiny", *words]).problems
    assert problem.startswith(f"{option}: ") and advice in problem
    layout = problem.partition('"')[2].partition('"')[0]
    if layout:
        shape = {"layers": layout.count("t"), "pp": 3, "pipeline_layout": layout}
        assert presets.tiny().override(shape).problems(3) == []


@pytest.mark.parametrize("text", ["", " ; ", ",", "tp=2;;dp=2", "tp=2;"])
def test_parity_refuses_an_empty_layout(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A layout of nothing would be one process, held against itself."""
    assert main(["parity", "--preset", "tiny", "--layouts", text]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"labkit parity: --layouts {text!r}: ")
    assert err.endswith("write axis=size, as in tp=2,pp=2;dp=2, or leave --layouts out\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("groups --world-size 8 --dp 4", "--dp: data parallelism takes the remaining ranks: dp = world size / (tp"),
        ("run 10 --microbatches 16", "--microbatches: unknown option; a chapter's parameter is set by -p microbatches"),
        ("run 10 --htm", '--htm: unknown option; did you mean "--html"?'),
    ],
)
def test_unknown_options_lead_to_what_was_meant(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


TWICE = [
    ("train --preset tiny --tp 4 --tp 2", "parallel.tp: given twice, as --tp '4' and as --tp '2'"),
    ("train --preset tiny --tp 2 --tensor-model-parallel-size=4 --parallel.tp 2", "parallel.tp: given twice, as --tp"),
    ("train --preset tiny --bias --bias false", "model.bias: given twice, as --bias 'true' and as --bias 'false'"),
    ("train --preset tiny --nproc 2 --world-size 4", "--nproc: given twice, as --nproc '2' and as --world-size '4'"),
    ("train --preset tiny --preset llama_tiny", "--preset: given twice"),
    ("parity --preset tiny --layouts tp=2,tp=4", "layout tp=2,tp=4: parallel.tp: given twice, as tp=2 and as tp=4"),
    ("parity --preset tiny --layouts dp=2;tp=2,sp,sp=false", "given twice, as sp and as sp=false"),
    ("parity --preset tiny --layouts tp=2,tensor_model_parallel_size=4", "parallel.tp: given twice"),
    ("parity --preset tiny --layouts dp=2,dp=4", "dp: given twice, as dp=2 and as dp=4"),
    ("parity --preset tiny --layouts world_size=2,world-size=4", "as world_size=2 and as world-size=4"),
    ("parity --preset tiny --layouts tp=2 --layouts tp=4", "--layouts: given twice"),
    ("parity --preset tiny --drop operation=all_reduce,operation=all_gather", "operation: given twice"),
    ("groups --world-size 8 --tp 4 --parallel.tp 2", "--tp: given twice, as --tp '4' and as --parallel.tp '2'"),
    ("order --pp 4 --microbatches 8 --num_microbatches 4", "--microbatches: given twice"),
    ("run 00 -p steps 5 --parameter steps 6", "-p steps: given twice, as '5' and as '6'"),
    ("doctor --json --json false", "--json: given twice"),
]


@pytest.mark.parametrize(("line", "message"), TWICE, ids=[line for line, _ in TWICE])
def test_two_values_for_one_option_are_refused(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "; keep one\n" in err


def test_the_same_value_again_is_no_second_one() -> None:
    words = ["--lr", "1e-4", "--optim.lr", "0.0001", "--nproc", "2", "--world_size=2", "--print-config"]
    arguments = read(TRAIN, ["--preset", "tiny", *words, "--print_config"])
    assert arguments.problems == [] and arguments.config.optim.lr == 1e-4 and arguments.options["nproc"] == 2
    again = read(RUN, ["00", "-p", "steps", "5", "-p", "steps", "5"])
    assert again.problems == [] and set(again.options["parameter"]) == {("steps", "5")}


def test_a_flag_leaves_the_words_of_its_command_alone() -> None:
    arguments = read(RUN, ["--html", "00"])
    assert arguments.problems == [] and arguments.words == ["00"] and arguments.options["html"] is True


def _text(spec, value) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_WORDS = st.text(alphabet="abcxyz019-_./ :#{}[]'\"", min_size=1, max_size=10).filter(lambda s: not s.startswith("-"))
_BY_KIND = {
    "int": st.integers(-5, 2**31), "float": st.floats(0, 1e6), "bool": st.booleans(),
    "str": _WORDS.filter(lambda s: s.strip().lower() not in ("null", "none", "~", "")),
    "tuple[str, ...]": st.lists(st.sampled_from(["attn", "mlp", "moe"]), max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(st.integers(0, 3), max_size=3).map(tuple),
}  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_value_of_a_field_can_be_written_on_the_command_line(data) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(SPECS)), unique=True, max_size=6))
    drawn = {
        n: data.draw(st.sampled_from(SPECS[n].choices) if SPECS[n].choices else _BY_KIND[SPECS[n].kind], label=n)
        for n in names
    }
    words = [word for n, v in drawn.items() for word in (f"--{n}={_text(SPECS[n], v)}",)]
    arguments = read(TRAIN, ["--preset", "tiny", *words])
    assert arguments.problems == []
    assert arguments.config == presets.tiny().replaced(drawn)


@pytest.mark.parametrize("flag", ["--print_config", "--print-config"])
def test_print_config_loads_back_equal(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--preset", "llama_tiny", "--parallel.tp", "2", "--optim.lr", "3e-4", "--nproc", "4"]
    assert main([*words, flag]) == 0
    path = tmp_path / "c.yaml"
    path.write_text(capsys.readouterr().out)
    assert "  # Tensor parallel size. [>= 1]\n  tp: 2\n" in path.read_text()
    assert RunConfig.from_yaml(path) == presets.llama_tiny().override({"tp": 2, "lr": 3e-4})


def test_print_config_fits_the_terminal_and_keeps_limits_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _on_terminal(monkeypatch, 80, ["train", "--preset", "tiny", "--print-config"])
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if re.search(r"[<>]=?$|\[[^],]*$", line)] == []
    assert yaml_text.parse("\n".join(lines))[0]["model.heads"] == 8


def test_print_config_of_a_bad_one_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "tiny", "--tp", "3", "--print_config"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "model.heads = 8" in err


def test_options_do_not_shadow_fields() -> None:
    """A field's bare name that is also an option of the command would silently mean the option."""
    names = {o.key for o in (*CONFIG_OPTIONS, *TRAIN.options)} | {a for o in TRAIN.options for a in o.aliases}
    assert names.isdisjoint({spec.name for spec in SPECS.values()} | set(ALIASES))


def _groups(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["groups", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["groups"]


def test_groups_of_the_documents_16_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """TP2 PP4 of the pipeline document: lists as printed there."""
    found = _groups(capsys, "--world-size", "16", "--tensor_model_parallel_size", "2", "--pp", "4")
    assert found["tp"][:2] == [[0, 1], [2, 3]] and found["dp"][:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert found["mp"] == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert found["pp"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert found["embd"] == [[0, 12], [1, 13], [2, 14], [3, 15]] and found["pos_embd"] == [[0], [1], [2], [3]]


def test_groups_of_the_folding_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = _groups(capsys, "--world_size", "16", "--tp", "4", "--pp", "2", "--etp", "1", "--ep", "4")
    assert found["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["edp"][:2] == [[0, 4], [1, 5]]
    one = _groups(capsys, "--nproc", "16", "--tp", "4", "--pp", "2", "--etp", "1", "--ep", "4", "--rank", "6")
    assert one == {kind: next((g for g in groups if 6 in g), []) for kind, groups in found.items()}


def test_groups_as_text_list_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["groups", "--world-size", "8", "--tp", "2", "--order", "tp-dp-pp-cp-ep"]) == 0
    out = capsys.readouterr().out
    assert "dense    tp 2 x cp 1 x dp 4 x pp 1" in out and "[0, 1] [2, 3] [4, 5] [6, 7]" in out
    decoder, _ = rank_generators(world_size=8, tp=2, order="tp-dp-pp-cp-ep")
    assert "[0, 2, 4, 6] [1, 3, 5, 7]" in out and decoder.get_ranks("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert max(map(len, out.splitlines())) <= 120


def test_groups_of_a_large_world_are_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["groups", "--world-size", "131072", "--tp", "8", "--pp", "16"]) == 0
    out = capsys.readouterr().out
    assert "... 16,380 more" in out and len(out) < 5000
    assert "x dp 1,024 x" in out and "\n  kind      groups x size   ranks\n" in out and "docs/glossary.md\n" in out
    (mp,) = (line for line in out.splitlines() if line.startswith("  mp "))
    assert mp.endswith("... 1,020 more; 128 ranks: 8 at stride 1, 16 times at stride 8,192")
    assert all(f"| `{kind}` |" in GLOSSARY or f"| {kind} |" in GLOSSARY for kind in GROUP_KINDS)
    assert main(["groups", "--world-size", "100000000", "--tp", "8"]) == 2
    assert "more than the 1,048,576 ranks that are listed at once; add --rank r" in capsys.readouterr().err


def test_one_ranks_groups_in_a_world_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    """A group that is too long to list is told by its ends, its size and its runs."""
    words = ["groups", "--world-size", "100000000", "--tp", "8", "--rank", "5"]
    found = _groups(capsys, *words[1:])
    assert found["tp"] == list(range(8)) and found["pp"] == found["embd"] == [5]
    assert found["dp"] == {"first": 5, "last": 99_999_997, "size": 12_500_000, "runs": [[12_500_000, 8]]}
    assert main(words) == 0
    assert "[5, 13, 21, 29, 37, 45, ..., 99999997]; 12,500,000 ranks, stride 8\n" in capsys.readouterr().out
    assert main(["groups", "--world-size", "2147483647", "--rank", "5"]) == 0
    assert "2,147,483,647 ranks, stride 1\n" in capsys.readouterr().out
    assert main(["groups", "--world-size", "128", "--tp", "8", "--pp", "4", "--rank", "127"]) == 0
    (mp,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  mp "))
    assert mp.endswith("[24, 25, 26, 27, 28, 29, ..., 127]; 32 ranks: 8 at stride 1, 4 times at stride 32")


def test_groups_and_errors_import_neither_torch_nor_other_commands() -> None:
    code = (
        "import sys; from labkit.cli import main; main(['groups', '--world-size', '8', '--tp', '2']);"
        "main(['train', '--preset', 'tiny', '--tp', '3']);"
        "print(sorted({'torch', 'papermill', 'labkit.train', 'labkit.cli.run_command'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def _on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, words: list[str], wanted: str = "") -> list[str]:
    """The lines of both streams on a terminal of so many columns; `wanted` is the variable COLUMNS."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    printed: list[bytes] = []

    def read_all() -> None:
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(ours, 65536):
                printed.append(part)

    reader = threading.Thread(target=read_all)
    reader.start()
    with monkeypatch.context() as patched, open(theirs, "w") as stream:
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        patched.setenv("COLUMNS", wanted)
        main(words)
    reader.join()
    os.close(ours)
    return b"".join(printed).decode().split("\r\n")


SCREENS = [
    "groups --world-size 16 --tp 4 --pp 2 --etp 1 --ep 4",
    "groups --world-size 64",
    "groups --world-size 131072 --tp 8 --pp 16",
    "groups --world-size 131072 --order pp-tp-cp-ep-dp --tp 2 --pp 32768",
    "groups --world-size 128 --tp 8 --pp 4 --rank 127",
    "train --preset tiny --tp 3 --heads eight --sequence-length 5",
    "train --preset tiny --checkpoint.dir runs --train.profile nothing",
    "run 00 44 -p 00:steps=5",
    "order --pp 4 --vpp 2 --microbatches 8",
    "order --pp 2 --microbatches 4 --name zero_bubble_h1",
    "data clean --help",
    "checkpoint list --help",
    *(f"{name} --help" for name in COMMANDS),
    "train --help-all",
]


@pytest.mark.parametrize("line", SCREENS)
def test_a_terminal_breaks_lines_at_blanks_and_a_pipe_gets_whole_ones(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main(line.split())
    whole = "".join(capsys.readouterr()).split()
    for columns in (80, 100, 200):
        lines = _on_terminal(monkeypatch, columns, line.split())
        assert max(map(len, lines)) <= columns
        assert " ".join(lines).split() == whole, "the same words and numbers in the same order, none of them cut"


def test_a_long_schedule_takes_about_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["order", "--pp", "8", "--microbatches", "64"], ["order", "--pp", "70", "--microbatches", "1"]):
        main(words)
        whole = capsys.readouterr().out
        *lines, _, rest, end = _on_terminal(monkeypatch, 80, words)
        assert 50 < len(lines) <= 60 and end == ""
        assert re.fullmatch(r"\.\.\. \d+ more rows: --rank R prints one rank's order, --csv FILE writes all rows", rest)
        assert " ".join(whole.split()).startswith(" ".join(" ".join(lines).split())) and "more rows" not in whole


def test_one_ranks_order_is_broken_at_commas_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "order --pp 4 --vpp 2 --microbatches 8 --rank 0".split()  # noqa: SIM905 - a command line
    legend, first, second, _ = _on_terminal(monkeypatch, 80, words)
    assert legend.startswith("rank 0, order: ") and first.endswith(",") and len(first) <= 80
    assert json.loads(first + second) == interleaved(4, 2, 8).order(0)


def test_columns_replaces_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["order", "--pp", "4", "--microbatches", "8"]
    wide, narrow = (_on_terminal(monkeypatch, columns, words) for columns in (120, 60))
    for wanted, lines in (("60", narrow), ("0", wide), ("-5", wide), ("many", wide), ("", wide)):
        assert _on_terminal(monkeypatch, 120, words, wanted) == lines != (wide if lines is narrow else narrow)


def test_a_pipe_gets_one_line_for_a_kind_of_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["groups", "--world-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[7:]] == list(_groups(capsys, "--world-size", "64"))


def test_a_broken_line_goes_on_below_its_text() -> None:
    text = "2 problems\n  1. heads = 7: choose 4 or 8\n  rank 10  0F0 0F1 0B0 0B1\nmetrics: runs/a_long_name"
    assert folded(text, "", 20) == [
        "2 problems",
        "  1. heads = 7:",
        "     choose 4 or 8",
        "  rank 10  0F0 0F1",
        "           0B0 0B1",
        "metrics:",
        "  runs/a_long_name",
    ]
    assert folded("a b c", "head  ", 8) == ["head  a", "      b", "      c"] and folded("", "head") == ["head"]
    assert folded(text) == text.split("\n"), "whole lines in a file or pipe"


def test_a_wide_table_breaks_inside_its_cells() -> None:
    head = ("layout", "ranks", "worst gradient", "first difference")
    rows = [head, ("tp2 pp2 dp1 sp", "1024", "1.0e-10", "layers.1.mlp.fc2.weight gradient")]
    assert table(rows, (1, 2)) == [
        "layout          ranks  worst gradient  first difference",
        "tp2 pp2 dp1 sp   1024         1.0e-10  layers.1.mlp.fc2.weight gradient",
    ]
    assert table(rows, (1, 2), 60) == [
        "layout       ranks     worst  first difference",
        "                    gradient",
        "tp2 pp2 dp1   1024   1.0e-10  layers.1.mlp.fc2.weight",
        "sp                            gradient",
    ]
    assert table(rows, (1, 2), 44) == [  # narrower than the longest words together
        "layout: tp2 pp2 dp1 sp",
        "ranks: 1024",
        "worst gradient: 1.0e-10",
        "first difference: layers.1.mlp.fc2.weight",
        "  gradient",
    ]
    rows.append(("dp2", "2", "0.0e+00", "none"))
    assert table(rows, (1, 2), 60, below=True) == [
        "layout          ranks  worst gradient",
        "tp2 pp2 dp1 sp   1024         1.0e-10",
        "    first difference: layers.1.mlp.fc2.weight gradient",
        "dp2                 2         0.0e+00",
    ]
    assert table(rows, (1, 2), 72, below=True) == table(rows, (1, 2)), "it fits as it is"


def test_paritys_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.train.parity.comparison import ParityReport, ParityRow

    name = "tp2 cp2 pp2 dp2 vpp2 sp recompute full uniform 2 buckets of 4000 no overlap zero"
    row = ParityRow({}, 16, name, 1.5e-9, 2.5e-9, 3.5e-9, "decoder.layers.1.mlp.fc2.weight gradient", "fault")
    report = ParityReport([row, row], 3, "float64", 1e-10, [5.0])
    monkeypatch.setattr("labkit.train.compare", lambda *_args, **_options: report)
    for columns in (80, 200):
        starts, *lines = _on_terminal(monkeypatch, columns, ["parity", "--preset", "tiny", "--layouts", "tp=2"])
        assert starts == "comparing 1 layout with one process, 3 steps in float64"
        assert "" in lines, "a blank line between table and sentence"
        assert max(map(len, lines)) <= columns
        shown, whole = (set(text.replace(":", "").split()) for text in (" ".join(lines), str(report)))
        assert shown == whole, "no word and no number is cut"
        assert sum("2.5e-09" in line for line in lines) == 2


READERS = [
    ("groups --world-size 4096 --tp 2 --json | head -c 1", "{", "0"),
    ("groups --world-size 4096 --tp 2 | head -1", "4,096 ranks, order tp-cp-ep-dp-pp (fastest first)\n", "0"),
    ("order --pp 8 --microbatches 64 | true", "", "0"),
    ("--help | true", "", "0"),
    ("train --preset tiny --print-config | true", "", "0"),
    ("train --preset tiny --tp 3 2>&1 | true", "", "2"),
    ("groups --world-size 8 >&-", "", "0"),
    ("groups --world-size 7 --tp 2 2>&-", "", "2"),
]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("line", "out", "status"), READERS, ids=[line for line, *_ in READERS])
def test_a_reader_that_leaves_changes_no_status(line: str, out: str, status: str, unbuffered: str) -> None:
    command = f"{sys.executable} -m labkit {line}; echo ${{PIPESTATUS[0]}} >&3"
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&2 2>&1; {command}"],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (out, f"{status}\n")


def test_a_stdout_that_cannot_write_a_name_changes_no_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "labkit", "order", "--pp", "2", "--microbatches", "2", "--csv", "é.csv"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and "written: \\xe9.csv" in done.stdout
    assert (tmp_path / "é.csv").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_a_failure_said_once() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "labkit", "groups", "--world-size", "8"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "labkit groups: [Errno 28] No space left on device: 'standard output'\n",
    )


def many_metrics(path: Path) -> None:
    with contextlib.closing(JsonLines(path)) as lines:
        lines.write(*[{"step": 1, "loss": 2.5}] * 999)


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "data prepare": ("out.bin", lambda path: main(["data", "prepare", *TEXT, str(path.with_suffix("")), *ALONE])),
    "data clean": ("out.jsonl", lambda path: main(["data", "clean", *TEXT, str(path), "--min-tokens", "0"])),
    "order --csv": ("order.csv", lambda path: main([*ORDER, "--csv", str(path)])),
    "order --trace": ("trace.json", lambda path: main([*ORDER, "--trace", str(path)])),
    "order --plot": ("order.svg", lambda path: main([*ORDER, "--plot", str(path)])),
    "metrics": ("metrics.jsonl", lambda path: many_metrics(path)),
    "kept scores": ("rows.jsonl.partial", lambda path: Records(path.with_suffix("")).keep({}, [0.5] * 999)),
    "a row": ("rows.jsonl", lambda path: Records(path).add({"scores": [0.5] * 999})),
}
"""The file that each writes, larger than the limit below."""
TEXT, ALONE = [str(ROOT / "labkit" / "data" / "bundled" / "jargon.txt")], ["--workers", "1"]
ORDER = ["order", "--pp", "4", "--vpp", "2", "--microbatches", "64"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_names_the_file_and_leaves_no_cut_one(
    writer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system refuses the bytes above a limit, as a full disk does, by an error without a file's name."""
    name, write = WRITERS[writer]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        code, said = write(tmp_path / name), ""
    except OSError as error:
        code, said = 1, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said += capsys.readouterr().err
    assert code in (1, 2) and "File too large" in said and str(tmp_path / name) in said, said
    if writer not in ("metrics", "a row"):  # these grow line by line
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_a_file_appears_whole_and_a_device_is_written_itself(there: bool, tmp_path: Path) -> None:
    path, link = tmp_path / "kept.txt", tmp_path / "link.txt"
    link.symlink_to(path)
    if there:
        path.write_text("old")
    with appearing(link) as draft:
        draft.write_text("new")
        assert path.exists() == there
    assert link.is_symlink() and path.read_text() == "new" and len(list(tmp_path.iterdir())) == 2
    with appearing("/dev/null") as draft:
        assert draft == Path("/dev/null")


def test_a_name_that_is_not_utf_8_is_shown_by_its_byte() -> None:
    for line in (
        ["data", "prepare", b"nb\xffme.txt", "x"],
        ["train", "--config", b"nb\xffme"],
        ["data", "show", b"nb\xffme"],
    ):
        done = subprocess.run([sys.executable, "-m", "labkit", *line], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and r"nb\xffme" in done.stderr and "udcff" not in done.stderr, done.stderr
    assert shown("a\udcff\\udcff") == r"'a\xff\\udcff'"


def test_a_terminal_is_told_what_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_00000001").mkdir()
    lines = _on_terminal(monkeypatch, 200, ["checkpoint", "export", str(tmp_path), str(tmp_path / "out")])
    assert lines[0] == f"loading {tmp_path / 'step_00000001'}"


def test_a_trace_may_lie_where_the_run_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for trace in ("runs/first.json", "runs/first/trace.json"):
        assert output_problems("--trace", trace, [None, "runs/first"]) == []
    assert "make it first" in output_problems("--trace", "runs/first/traces/a.json", ["runs/first"])[0]


@pytest.mark.parametrize("module", ["labkit", "labkit.cli"])
def test_the_package_is_the_command(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    assert main(["--help"]) == 0
    assert done.stdout == capsys.readouterr().out and "python -m labkit" in done.stdout


def test_layouts_of_parity() -> None:
    config = presets.tiny().override({"parallel.pp": 2})
    layouts, problems = read_layouts("tp=2; dp=2 ;tp=4,pp=1,dp=2;world_size=8", config)
    assert problems == []
    assert layouts == [
        {"parallel.tp": 2, "world_size": 4},
        {"world_size": 4},
        {"parallel.tp": 4, "parallel.pp": 1, "world_size": 8},
        {"world_size": 8},
    ]
    layouts, problems = read_layouts("tp=2;dp=2;dp=2,world_size=4", config, 8)
    assert problems == [] and [layout["world_size"] for layout in layouts] == [8, 4, 4]
    assert read_layouts(None, config, 8) == ([{"world_size": 8}], [])
    assert read_layouts(None, config) == ([{"world_size": 2}], [])
    layouts, problems = read_layouts("tp=3;dp=x;pp=3", config)
    assert layouts == [] and len(problems) == 3
    layouts, problems = read_layouts("tp=2,sp;tp=2,sp=true;tp=2,sp=false", config)
    assert problems == [] and [layout["parallel.sequence_parallel"] for layout in layouts] == [True, True, False]


@pytest.mark.parametrize("preset", ["tiny", "llama_tiny", "tiny_moe", "mixtral_tiny", "deepseek_tiny"])
def test_layouts_that_parity_compares_unasked_are_sound(preset: str) -> None:
    config = presets.get(preset)
    layouts, problems = read_layouts(STANDARD_EXPERT_LAYOUTS if config.moe.num_experts else STANDARD_LAYOUTS, config)
    assert problems == [] and max(layout["world_size"] for layout in layouts) == 4


def test_doctor_says_what_it_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit.launch import doctor

    found = [doctor.Finding("python", "good", "3.11"), doctor.Finding("memory", "note", "1 GiB", "use fewer ranks")]
    monkeypatch.setattr(doctor, "examine", lambda *, launch: found)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok    python  3.11\nnote  memory  1 GiB; use fewer ranks\n"
    found.append(doctor.Finding("loopback", "bad", "none"))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[2]["topic"] == "loopback"


@pytest.fixture
def chapter(tmp_path: Path) -> Path:
    """A notebook folder with one chapter; returns the folder."""
    cell = nbformat.v4.new_code_cell(
        "steps: int = 3  # steps\nlr: float = 1e-3\nname: str = 'a'\nflag: bool = True\nsizes: list = []"
    )
    cell.metadata.tags = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "07_toy.ipynb")
    return tmp_path


def test_run_refuses_misspelt_parameters_before_it_runs(chapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = chapter / "out"
    words = ["run", "7", "--notebooks", str(chapter), "--out", str(out), "-p", "step", "1", "-p", "lr", "fast"]
    assert main([*words, "-p", "sizes", "two", "-p", "flag", "maybe", "-p", "steps", "1.5"]) == 2
    err = capsys.readouterr().err
    assert '-p step: 07_toy has no such parameter; it has steps, lr, name, flag, sizes; did you mean "steps"?' in err
    assert "-p lr 'fast': must be a number" in err and "-p flag 'maybe': must be true or false" in err
    assert "-p sizes 'two': must be list written as JSON" in err
    assert "-p steps '1.5': must be an integer" in err and not out.exists()


def test_run_types_parameters_by_the_notebook(chapter: Path) -> None:
    from labkit.cli.chapter_parameters import check_parameters

    given = [("steps", "5"), ("lr", "1e-4"), ("name", "5"), ("flag", "false"), ("sizes", "[2, 4]")]
    values, problems = check_parameters(chapter / "07_toy.ipynb", given, chapter)
    assert problems == [] and values == {
        "steps": 5,
        "lr": 1e-4,
        "name": "5",
        "flag": False,
        "sizes": [2, 4],
    }


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("07 08", [3, 3]),
        ("07 08 -p steps 5", [5, 5]),
        ("07 08 -p steps=5", [5, 5]),
        ("07 08 --parameter=steps=5", [5, 5]),
        ("7 8 -p 8:steps=5", [3, 5]),
        ("07 08 -p 08_copy:steps 5", [3, 5]),
        ("all -p 7:steps=4 -p 8:steps=5", [4, 5]),
        ("07 08 -p 8:steps=5 -p steps=4", [4, 5]),
        ("07 08 -p 8:steps=5 -p 08_copy:steps=5", [3, 5]),
    ],
)
def test_run_gives_a_parameter_to_one_chapter_or_to_all(
    chapter: Path, monkeypatch: pytest.MonkeyPatch, words: str, steps: list[int]
) -> None:
    (chapter / "08_copy.ipynb").write_text((chapter / "07_toy.ipynb").read_text())
    ran: list[int] = []

    def run(done: Chapter, _timeout: float, *, html: bool) -> list[Path]:
        ran.append(done.parameters.get("steps", 3))
        return []

    monkeypatch.setattr("labkit.cli.run_command._run", run)
    out = str(chapter / "out")
    assert main(["run", *words.split(), "--notebooks", str(chapter), "--out", out]) == 0 and ran == steps


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("07 08 -p 9:steps=5", "-p 9:steps: '9': no such chapter"),
        ("07 08 -p :steps=5", "-p :steps: '': no such chapter"),
        ("07 -p 8:steps=5", "-p 8:steps: 08_copy is not among the chapters of this command: 07_toy"),
        ("07 08 -p 8:step=5", '-p step: 08_copy has no such parameter; it has steps, lr, name, flag, sizes'),
        ("07 08 -p step=5", "-p CHAPTER:step=... sets it in one chapter"),
        ("07 08 -p 8:steps=five", "-p steps 'five': must be an integer in 08_copy"),
        ("07 08 -p 8:steps=4 -p 08:steps=5", "given twice, as -p 8:steps=4 and as -p 08:steps=5; keep one"),
        ("07 08 -p 8:steps=4 -p 8:steps=5", "-p 8:steps: given twice, as '4' and as '5'; keep one"),
        ("07 -p steps", "--parameter: needs a name and a value, as in -p steps 5 or -p 10:steps=5"),
        ("07 --parameter=name", "--parameter: needs a name and a value, as in -p steps 5 or -p 10:steps=5"),
        ("07 -p --html", "--parameter: needs a name and a value, as in -p steps 5 or -p 10:steps=5"),
    ],
)  # fmt: skip
def test_run_refuses_a_parameter_for_no_chapter(
    chapter: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    (chapter / "08_copy.ipynb").write_text((chapter / "07_toy.ipynb").read_text())
    assert main(["run", *words.split(), "--notebooks", str(chapter), "--out", str(chapter / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and not (chapter / "out").exists()
    assert "problems" not in said or not words.endswith("-p steps"), "the name is no second chapter"


def test_an_empty_word_names_no_chapter(chapter: Path) -> None:
    (chapter / "00_tour.ipynb").write_text((chapter / "07_toy.ipynb").read_text())
    assert main(["run", "", "--notebooks", str(chapter), "--out", str(chapter / "out")]) == 2


def test_a_script_takes_no_name_of_an_option_of_the_command():
    """Otherwise `--nproc` would never reach the script's field."""
    own = make_dataclass("Own", [("nproc", int, field(1, "Mine."))], frozen=True, kw_only=True)
    with pytest.raises(ValueError, match="extra_args_provider: --nproc is an option of labkit train; choose another"):
        read(replace(TRAIN, extra_args_provider=own), [])
