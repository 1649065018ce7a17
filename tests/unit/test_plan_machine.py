"""Machines: every constant has a source, and a bad file gets one error that names everything wrong."""

from pathlib import Path

import pytest

from labkit.config.errors import ConfigError
from labkit.plan.machine import known_machines, load_machine
from labkit.plan.software import SOFTWARE, software_of

WANTED = {"v100", "a100", "h100", "h200", "b200", "gb200", "gb300"}


@pytest.mark.parametrize("name", known_machines())
def test_every_constant_has_a_source(name):
    machine = load_machine(name)
    assert all(source.strip() for source in machine.sources.values())
    for level in range(len(machine.levels)):
        assert f"levels.{level}.bandwidth" in machine.sources
    assert set(machine.peak_flops) >= {"bf16", "fp16", "fp32"} and set(machine.gemm_ceiling) <= set(machine.peak_flops)
    generations = {name.split()[0] for name in (*machine.software, *machine.interval)}
    assert generations <= {*SOFTWARE, "default"}


def test_the_machines_of_the_papers_are_there():
    assert set(known_machines()) >= WANTED
    assert load_machine("h200").peak_flops == load_machine("h100").peak_flops
    assert load_machine("h200").memory_bandwidth > load_machine("h100").memory_bandwidth


def test_unknown_names_are_named():
    with pytest.raises(ConfigError, match=r"no machine is called 'h1000'; choose one of .*h100.*, or give a YAML file"):
        load_machine("h1000")
    with pytest.raises(ValueError, match="software is 'megatron'; choose one of megatron_2019"):
        software_of("megatron")


def problems(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_machine(str(path))
    return str(raised.value)


def test_a_file_extends_a_machine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: h100\nname: ours\nmemory_bandwidth: {value: 3e12, source: measured}\n")
    machine = load_machine(str(path))
    assert (machine.name, machine.memory_bandwidth, machine.sms) == ("ours", 3e12, 132)
    assert machine.sources["memory_bandwidth"] == "measured"


def test_all_problems_of_a_file_are_in_one_error(tmp_path):
    text = problems(
        tmp_path,
        "extends: h100\nmemory_bandwidth: {value: -3e12, source: measured}\nsms: {value: 132}\n"
        "memory_efficiency: {value: 1.5, source: hope}\npeak_flops: {bf16: {value: fast, source: s}}\nrate: 3\n",
    )
    assert "memory_bandwidth is -3e+12; give a number above 0" in text
    assert "sms has no source; say where the number is from" in text
    assert "memory_efficiency is 1.5; give a number from 0 to 1" in text
    assert "peak_flops.bf16 is 'fast'" in text
    assert "rate is not a constant of a machine" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: h100\nlevels: []\n", "levels is missing; give the levels of the network, the innermost first"),
        ("extends: h100\nlevels:\n  - name: link\n", "levels.0.bandwidth is missing"),
        ("- 1\n", "the file has no mapping of constants"),
        ("a: [\n", "not YAML"),
        ("name: mine\n", "gpu is missing; give a text"),
        ("extends: nothing\n", "no machine is called 'nothing'"),
    ],
)
def test_bad_files(tmp_path, text, words):
    assert words in problems(tmp_path, text)


def test_a_negative_bandwidth_is_one_clear_error(tmp_path):
    level = (
        "{name: link, ranks: {value: 8, source: s}, bandwidth: {value: -1, source: s}, latency: {value: 0, source: s}, "
        "hop: {value: 0, source: s}, ramp: {value: 0, source: s}}"
    )
    text = problems(tmp_path, f"extends: h100\nlevels: [{level}]\n")
    assert "levels.0.bandwidth is -1; give a number above 0" in text and text.count("give") == 1


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_machine(str(tmp_path / "absent.yaml"))


def test_machines_in_a_circle(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {path}\n")
    with pytest.raises(ConfigError, match="in a circle"):
        load_machine(str(path))
