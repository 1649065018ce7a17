"""What README and CONTRIBUTING point to exists, and README's commands are ones that labkit understands."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from labkit.cli import main
from labkit.schedules import zero_bubble_h1

ROOT = Path(__file__).parents[2]
TEXTS = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/checkpoints.md",
    "docs/gpu.md",
    "docs/log.md",
    "docs/running.md",
    "docs/schedules.md",
    "labkit/data/bundled/PROVENANCE.md",
]
README = (ROOT / "README.md").read_text()


@pytest.mark.skipif((ROOT / "benchmarks/results/gpu.json").exists(), reason="a GPU has run labkit: rows are stored")
def test_the_first_screen_and_each_command_for_gpus_say_that_no_gpu_has_run_it():
    said = "never run on a GPU"
    assert said in README[: README.index("## Start")].replace("Never", "never")
    page = (ROOT / "docs/howto/gpu_node_slurm.md").read_text()
    assert "ever run on a GPU" in page[: page.index("```")]


def test_the_citation_has_the_version_and_a_date_only_if_it_is_released():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    (heading,) = re.findall(rf"^## {re.escape(project['version'])}.*$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert ("date-released" in citation) == ("unreleased" not in heading)


@pytest.mark.parametrize("file", TEXTS)
def test_relative_links_lead_somewhere(file):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / file).read_text())
    missing = [link for link in links if "://" not in link and not (ROOT / file).parent.joinpath(link).exists()]
    assert not missing


def test_chapters_table_names_every_chapter():
    linked = set(re.findall(r"\]\(notebooks/(\d\d_\w+\.ipynb)\)", README))
    assert linked == {path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}


def test_the_comparisons_are_those_of_the_page():
    told = re.findall(r"(\d+) of \1 layouts agree with one process to (1e-\d+)", (ROOT / "docs/parity.md").read_text())
    loose, tight = (sum(int(rows) for rows, limit in told if limit == bound) for bound in ("1e-05", "1e-10"))
    assert (
        f"[{tight} comparisons with one process](docs/parity.md) agree to 1e-10 in float64, {loose} to 1e-5" in README
    )


def test_the_same_citation_everywhere():
    citation = (ROOT / "CITATION.cff").read_text()
    (entry,) = {
        re.search(r"```bibtex\n(.*?)```", text, re.S)[1] for text in (README, (ROOT / "docs/index.md").read_text())
    }
    title, version = (re.search(rf'^{key}: "?([^"\n]+)', citation, re.M)[1] for key in ("title", "version"))
    assert f"title = {{{title}}}" in entry and f"version = {{{version}}}" in entry
    assert f'\nversion = "{version}"' in (ROOT / "pyproject.toml").read_text()


def commands() -> list[str]:
    """Calls of labkit in README, and those of the pages that run nothing long."""
    asked = ("labkit groups ", "labkit order ", "labkit parity ", "labkit train ")
    pages = sorted([*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/howto/*.md")])
    of_pages = (call for page in pages for call in calls_in(page.read_text()))
    return list(dict.fromkeys([*calls_in(README), *(call for call in of_pages if call.startswith(asked))]))


def calls_in(page: str) -> list[str]:
    """Lines of code blocks that call labkit, by its command or as a module."""
    blocks = re.findall(r"```\w*\n(.*?)```", page.replace("\\\n", " "), re.S)
    lines = [line.split("  #")[0] for block in blocks for line in block.split("\n")]
    calls = [re.sub(r"^.* -m labkit(?:\.cli)? ", "labkit ", line.strip()) for line in lines]
    return [call for call in calls if call.startswith("labkit ") and not call.split()[1].endswith(":")]


def test_commands_are_found():
    assert {command.split()[1] for command in commands()} >= {"groups", "train", "parity"}


@pytest.mark.parametrize("command", commands())
def test_command_is_understood(command, tmp_path, monkeypatch, capsys):
    """Commands that would launch are only asked for their configuration, which checks every option."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert main(["train", "--preset", "tiny", "--print_config"]) == 0
    (tmp_path / "runs" / "mine.yaml").write_text(capsys.readouterr().out)
    if "--csv runs/mine.csv" not in command:
        (tmp_path / "runs" / "mine.csv").write_text(zero_bubble_h1(4, 8).to_csv())
    (tmp_path / "runs" / "first" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    (tmp_path / "labkit").symlink_to(ROOT / "labkit")
    if "--data.path runs/corpus" in command:
        assert main(["data", "prepare", "labkit/data/bundled/sample.jsonl", "runs/corpus", "--workers", "1"]) == 0
    words = shlex.split(command.split(" > ")[0])[1:]
    monkeypatch.setattr("labkit.cli.run_command._run", lambda *_, **__: [])  # a chapter takes half a minute
    if words[0] in ("train", "parity") and "--print-config" not in words:
        words.append("--print_config")
    assert main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out
