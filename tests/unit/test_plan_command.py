"""`labkit plan`: its table, its files, its explanation of a layout, its predictions of tables, and its errors."""

from __future__ import annotations

import csv
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from labkit.cli import main
from labkit.config import RunConfig, presets
from labkit.config.foreign.megatron_arguments import megatron_arguments
from labkit.config.foreign.stacks import convert
from labkit.plan.published_rows import machine_for
from labkit.plan.row_predictions import COLUMNS, predict_table, predicted_row

TINY = ["plan", "--machine", "h100", "--gpus", "8", "--preset", "tiny", "--precision", "bf16"]
PUBLISHED = Path(__file__).parents[2] / "labkit" / "plan" / "tables" / "published.csv"
GOLDEN = Path(__file__).parents[1] / "oracles" / "data" / "megatron_golden.csv"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(list(words))
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    err = capsys.readouterr().err
    assert code and "Traceback" not in err, err
    return code, " ".join(err.split())


def test_the_winner_of_the_table_is_a_configuration_that_trains(capsys, tmp_path: Path):
    path = tmp_path / "best.yaml"
    out = run(capsys, *TINY, "--out", str(path))
    assert "legal layouts" in out and "80 % interval" in out and f"labkit train --config {path}" in out
    config = RunConfig.from_yaml(path)
    assert config.problems(8) == []
    kept = presets.get("tiny").replaced({"optim.precision": "bf16"})
    assert config.model.hidden == kept.model.hidden and config.train.global_batch_size == kept.train.global_batch_size


def test_json_counts_every_layout_and_parts_add_up(capsys):
    found = json.loads(run(capsys, *TINY, "--json"))
    counts = found["counts"]
    assert counts["legal"] == counts["memory"] + counts["bound"] + counts["simulated"]
    seconds = [each["seconds"] for each in found["best"]]
    assert seconds == sorted(seconds) and len(seconds) == 10
    for each in found["best"]:
        assert sum(each["parts"].values()) == pytest.approx(each["seconds"])
        assert each["low"] < each["seconds"] < each["high"] and each["memory_bytes"] > 0


def test_each_column_has_one_line_and_all_has_every_value(capsys):
    short, long = run(capsys, *TINY), run(capsys, *TINY, "--all")
    lines = [text.split("why others lose", 1)[1].splitlines()[1:] for text in (short, long)]
    columns = [[line.split()[0] for line in each if line] for each in lines]
    assert len(set(columns[0])) == len(columns[0]) and set(columns[0]) == set(columns[1]) and len(columns[1]) > 12
    assert any("; best: tp=" in line for line in lines[1]) and not any("best: " in line for line in lines[0])
    assert short.splitlines()[4].split()[:2] == ["tp", "pp"] and "dist-opt: the distributed optimizer" in short


def test_fields_that_are_given_stay(capsys):
    found = json.loads(run(capsys, *TINY, "--tp", "2", "--only", "pp=2,recompute=full", "--json"))
    for each in found["best"]:
        assert (each["layout"]["tp"], each["layout"]["pp"], each["layout"]["recompute"]) == (2, 2, "full")


def test_a_plan_of_compiled_layers_says_that_it_is_none(capsys):
    words = [*TINY, "--only", "tp=1,pp=1"]
    plain, compiled = (run(capsys, *words, "--model.compile", name) for name in ("none", "layers"))
    said = "model.compile = layers is not modelled: times and bytes are those of layers without it"
    assert said in compiled.splitlines() and "model.compile" not in plain


def test_hfu_counts_what_is_recomputed(capsys):
    larger = [*TINY[:6], "table1_1_2b", *TINY[7:], "--global-batch-size", "8"]
    assert "HFU" not in run(capsys, *larger, "--only", "recompute=none")
    lines = run(capsys, *larger, "--only", "recompute=full").splitlines()
    header = next(number for number, line in enumerate(lines) if "s/step" in line)
    names = lines[header].replace("80 % interval", "low to high").split()
    for line in lines[header + 1 : header + 4]:
        cells = dict(zip(names, line.split()[1:], strict=True))
        assert (
            1.2 < float(cells["HFU"].rstrip("%")) / float(cells["MFU"].rstrip("%")) < 4 / 3
        )  # all but embedding and logits
    assert "as most papers up to 2022 count" in "".join(lines)


def test_a_measured_step_scales_all_and_keeps_their_order(capsys):
    plain = json.loads(run(capsys, *TINY, "--json"))["best"]
    layout = "tp=1,pp=1,dp=8,micro_batch=2,dist-opt=false,recompute=none"
    before = json.loads(run(capsys, *TINY, "--only", layout, "--json"))["best"][0]["seconds"]
    scaled = json.loads(run(capsys, *TINY, "--measured", f"{layout}:{2 * before}", "--json"))["best"]
    assert [each["layout"] for each in scaled] == [each["layout"] for each in plain]
    for each, other in zip(scaled, plain, strict=True):
        assert each["seconds"] == pytest.approx(2 * other["seconds"])
        assert sum(each["parts"].values()) == pytest.approx(each["seconds"])
        assert each["high"] / each["seconds"] < 1.1 < other["high"] / other["seconds"]
    out = run(capsys, *TINY, "--measured", f"{layout}: {2 * before} s")
    assert "times 2.000" in out and "outside its interval; look whether" in out


@pytest.mark.parametrize(
    "layout, words",
    [
        ("tp=2,pp=4", ("tp=2,pp=4: legal, and fits", "the winner", "after the pipeline:", "weights")),
        ("tp=2,recompute=full", ("million parameters", "TFLOP/s per GPU", "with recomputation", "MFU")),
        ("tp=3", ("forbidden: ", "must be a multiple of parallel.tp = 3")),
        ("dp=3,pp=2", ("forbidden", "there are 8 GPUs")),
    ],
)
def test_why_explains_a_layout(capsys, layout, words):
    out = run(capsys, *TINY, "--why", layout)
    assert all(word in out for word in words), out


def test_why_shows_what_a_layout_lacks(capsys):
    large = ["plan", "--machine", "a100", "--gpus", "64", "--preset", "mixtral_8x7b", "--global-batch-size", "64"]
    out = run(capsys, *large, "--why", "pp=1,ep=1,tp=1,etp=1,dist-opt=false")
    assert "none of which fits" in out and "optimizer" in out and "in all" in out


def test_plot_is_a_picture_with_its_numbers(capsys, tmp_path: Path):
    path = tmp_path / "plan.png"
    fastest = json.loads(run(capsys, *TINY, "--plot", str(path), "--json"))["best"][0]
    with Image.open(path) as picture:
        assert picture.width > 1000
        assert f"{fastest['seconds']:.4g} s and {fastest['memory_bytes'] / 1e9:.1f} GB" in picture.info["Description"]


def test_arguments_of_megatron_are_written_and_read_back(capsys, tmp_path: Path):
    script = tmp_path / "args.sh"
    run(capsys, "plan", "--machine", "h100", "--gpus", "16", "--preset", "mixtral_8x7b", "--global-batch-size", "32",
        "--write-megatron", str(script))  # fmt: skip
    assert convert([script], "megatron").text.count("num_experts: 8") == 1
    found = json.loads(
        run(capsys, "plan", "--machine", "h100", "--gpus", "16", "--megatron-args", str(script), "--json")
    )
    same = json.loads(run(capsys, "plan", "--machine", "h100", "--gpus", "16", "--preset", "mixtral_8x7b",
                          "--global-batch-size", "32", "--json"))  # fmt: skip
    assert [each["seconds"] for each in found["best"]] == [each["seconds"] for each in same["best"]]


def test_arguments_of_megatron_say_what_the_plan_assumed(capsys, tmp_path: Path):
    """--tp-comm-overlap needs sequence parallelism, and is not given without it."""
    script = tmp_path / "args.sh"
    words = [*TINY, "--tp", "2", "--software", "megatron_tp_overlap", "--write-megatron", str(script)]
    out = run(capsys, *words, "--only", "sp=true")
    assert "--tokenizer-type" in out and "CUDA_DEVICE_MAX_CONNECTIONS=1" in out
    assert {"--tp-comm-overlap", "--sequence-parallel", "--attention-backend auto"} <= set(
        script.read_text().split("\n")
    )
    back = run(capsys, "plan", "--machine", "h100", "--gpus", "8", "--megatron-args", str(script))
    assert back.splitlines()[1].endswith("megatron_tp_overlap")
    run(capsys, *words, "--only", "sp=false")
    assert "--tp-comm-overlap" not in script.read_text()
    run(capsys, *TINY[:-1], "fp16", "--write-megatron", str(script), "--only", "tp=1")
    assert "--accumulate-allreduce-grads-in-fp32" in script.read_text()
    code, err = refused(capsys, *TINY, "--software", "torchtitan", "--write-megatron", str(script))
    assert code == 2 and "the plan is for torchtitan" in err and "megatron_core or megatron_tp_overlap" in err


@pytest.mark.parametrize("name", ["table1_8_3b", "llama_tiny", "deepseek_moe_16b", "gpt2_124m"])
def test_megatron_reads_the_model_and_layout_that_were_written(name, tmp_path: Path):
    from labkit.config import yaml_text

    changes = {"parallel.tp": 2, "parallel.sequence_parallel": True, "parallel.pp": 2, "parallel.vpp": 2,
               "optim.distributed_optimizer": True, "optim.overlap_param_gather": True,
               "model.recompute_granularity": "selective"}  # fmt: skip
    config = presets.get(name).replaced(changes)
    path = tmp_path / "args.sh"
    path.write_text(megatron_arguments(config))
    back = RunConfig().override(yaml_text.plain(convert([path], "megatron").text))
    for field in ("tp", "cp", "pp", "vpp", "ep", "expert_tp", "sequence_parallel"):
        assert getattr(back.parallel, field) == getattr(config.parallel, field), field
    assert back.train.global_batch_size == config.train.global_batch_size
    for field in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "seq_length", "vocab_size", "position", "norm",
                  "activation", "bias", "untie_embeddings_and_output_weights", "recompute_granularity",
                  "make_vocab_size_divisible_by", "attention_dropout", "hidden_dropout", "rope_theta", "norm_eps",
                  "attention_backend"):  # fmt: skip
        assert getattr(back.model, field) == getattr(config.model, field), field
    for field in ("num_experts", "top_k", "ffn_hidden", "shared_expert_ffn_hidden", "layer_freq", "dispatcher"):
        assert getattr(back.moe, field) == getattr(config.moe, field), field
    assert back.optim.precision == config.optim.precision
    assert back.optim.distributed_optimizer and back.optim.overlap_param_gather


def test_a_folder_of_hugging_face_is_planned(capsys, tmp_path: Path):
    llama = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 256,
             "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
             "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    out = run(capsys, "plan", "--machine", "h100", "--gpus", "4", "--hf", str(tmp_path), "--precision", "bf16")
    assert out.startswith("4 layers, hidden 256, 2.874 million parameters, sequence 256")


def head_of(path: Path, to: Path, count: int) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    with open(to, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


@pytest.mark.parametrize("table", [PUBLISHED, GOLDEN], ids=["published", "golden"])
def test_rows_of_a_table_get_their_predictions(capsys, tmp_path: Path, table: Path):
    head_of(table, tmp_path / "in.csv", 12)
    out = run(capsys, "plan", "--rows", str(tmp_path / "in.csv"), "--out", str(tmp_path / "out.csv"))
    assert "12 rows" in out and "filled in" in out and "worst" in out
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 and set(COLUMNS) <= set(rows[0])
    for row in rows:
        if not row["not_expressible"]:
            assert int(row["predicted_mem_bytes"]) >= int(row["predicted_alloc_bytes"]) > 0
        if row["predicted_step_s"]:
            low, step, high = (float(row[f"predicted_{name}_s"]) for name in ("low", "step", "high"))
            assert low < step < high
    assert any(row["predicted_step_s"] or table is GOLDEN for row in rows)


def test_rows_without_tp_are_named_and_fsdp_needs_none(capsys, tmp_path: Path):
    rows = head_of(PUBLISHED, tmp_path / "in.csv", 1)
    rows = [rows[0] | {"tp": ""}, rows[0] | {"tp": "", "pp": "", "fsdp_or_zero": "FSDP FULL_SHARD"}]
    with open(tmp_path / "in.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    found = json.loads(run(capsys, "plan", "--rows", str(tmp_path / "in.csv"), "--json"))["rows"]
    assert found[0]["not_expressible"] == "tp is not stated" and found[0]["predicted_step_s"] == ""
    assert found[1]["not_expressible"] == "" and float(found[1]["predicted_step_s"]) > 0


@cache
def rows_of(table: Path) -> list[dict[str, str]]:
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


WORDS = st.sampled_from(["", "0", "-1", "nan", "inf", "1e99", "3.5", "abc", "True", "false", "64", "8.0", "5222907904"])


@pytest.mark.parametrize("table", [PUBLISHED, GOLDEN], ids=["published", "golden"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_row_is_predicted_or_named(table: Path, data):
    """Cells are deleted, swapped between rows, or replaced by what no run has."""
    rows = rows_of(table)
    row = dict(data.draw(st.sampled_from(rows)))
    for name in data.draw(st.lists(st.sampled_from(list(row)), min_size=1, max_size=4)):
        other = data.draw(st.sampled_from(rows))
        row[name] = data.draw(st.sampled_from([other[name], *other.values()]) | WORDS)
    found = predicted_row(row, is_golden=table is GOLDEN)
    added = found.added()
    assert found.not_expressible or found.step or found.memory
    assert not (added["predicted_step_s"] and float(added["predicted_step_s"]) <= 0)
    assert not added["predicted_mem_bytes"] or int(added["predicted_mem_bytes"]) > 0


@pytest.mark.parametrize("table", [PUBLISHED, GOLDEN], ids=["published", "golden"])
def test_a_row_does_not_depend_on_others(table: Path, tmp_path: Path):
    rows = rows_of(table)[::23]
    for name, order in (("one.csv", rows), ("other.csv", rows[::-1][:-3])):
        with open(tmp_path / name, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(order)
    one, other = (predict_table(tmp_path / name).rows for name in ("one.csv", "other.csv"))
    assert [row.added() for row in one[:2:-1]] == [row.added() for row in other]


@pytest.mark.parametrize(
    "hardware, machine",
    [("H100 SXM5 80GB", "h100"), ("A100-SXM4-40GB", "a100_40gb"), ("nvidia a100-sxm4-80gb", "a100"), ("GH200", None),
     ("H100 PCIe", None), ("H100, NVLink 4", "h100"), ("Tesla V100-SXM3-32GB", "v100"), ("GB200 NVL72", "gb200")],
)  # fmt: skip
def test_words_of_a_gpu_name_a_machine(hardware, machine):
    assert machine_for(hardware) == machine


@pytest.mark.parametrize(
    "cells, reason",
    [({"schedule": "GPipe-2"}, "the schedule 'GPipe-2' is unknown; known are 1F1B"), ({"tp": ""}, "tp is not stated"),
     ({"precision": "posit16"}, "the precision 'posit16' is unknown"), ({"gpus": "512.5"}, "not a whole number"),
     ({"layers": "50000"}, "labkit plans at most 10,000"), ({"step_s": "fast"}, "")],
)  # fmt: skip
def test_what_a_row_cannot_say_is_named(cells, reason):
    row = rows_of(PUBLISHED)[0] | cells
    found = predicted_row(row, is_golden=False).not_expressible
    assert reason in found if reason else not found


def test_a_machine_with_a_negative_bandwidth_is_one_error(capsys, tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: h100\nname: mine\nmemory_bandwidth: {value: -1, source: nobody}\n")
    code, err = refused(capsys, *TINY[:2], str(path), *TINY[3:])
    assert code == 2 and "memory_bandwidth is -1; give a number above 0" in err


@pytest.mark.parametrize(
    "words, code, message",
    [
        ("--machine h1000 --gpus 8 --preset tiny", 2, "no machine is called 'h1000'; choose one of a100, a100_40gb"),
        ("--gpus 8 --preset tiny", 2, "--machine: is missing; give it, as in --machine h100"),
        ("--machine h100 --preset tiny", 2, "--gpus: is missing; give it, as in --gpus 512"),
        ("--machine h100 --gpus 7 --preset tiny --precision bf16 --tp 2", 2, "must be a multiple of tp x cp x pp"),
        ("--machine h100 --gpus 8", 2, "nothing to run; give a preset"),
        ("--machine h100 --gpus 8 --preset bert_tiny", 2, "times are known for gpt"),
        ("--machine v100 --gpus 1 --preset mixtral_8x7b --precision fp16", 1, "the smallest, "),
        ("--machine h100 --gpus 8 --preset tiny --only tq=2", 2, "'tq' is not part of a layout"),
        ("--machine h100 --gpus 8 --preset tiny --schedule.name gpipe", 2, "not searched; choose one of"),
        ("--machine h100 --gpus 8 --preset tiny --plot a.txt", 2, "its name ends with one of .png, .svg, .pdf"),
        ("--machine h100 --gpus 8 --preset tiny --precision bf16 --measured tp=2", 2, "as in tp=8,pp=4:5.3"),
        ("--machine h100 --gpus 8 --preset tiny --precision bf16 --measured tp=2:-1", 2, "a layout and its seconds"),
        ("--machine h100 --gpus 8 --preset tiny --precision bf16 --measured tp=3:1", 2, "multiple of parallel.tp = 3"),
        ("--machine v100 --gpus 8 --preset llama3_8b --precision fp16 --measured tp=1,pp=1:9", 2, "it does not fit"),
        ("--rows missing.csv", 2, "--rows 'missing.csv': no such file"),
        ("--rows pyproject.toml", 2, "has no column source"),
        ("--rows pyproject.toml --machine h100 --preset tiny", 2, "--machine: a row of a table has its own"),
    ],
)
def test_bad_requests_are_one_clear_error(capsys, monkeypatch, tmp_path: Path, words, code, message):
    shutil.copy(Path(__file__).parents[2] / "pyproject.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    found, err = refused(capsys, "plan", *words.split())
    assert found == code and message in err, err
