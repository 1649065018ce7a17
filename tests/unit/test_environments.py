"""The conda environments name what pyproject.toml asks for, in ranges that cannot disagree with it.

Proven are names, ranges and channels, not that conda-forge has builds that solve together: that takes its index, and
these tests use no network.
"""

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from rattler import MatchSpec, VersionSpec
from rattler import Version as CondaVersion

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalnum()]
PINNED = {pin.name.lower(): next(iter(pin.specifier)).version for pin in CONSTRAINTS}
FILES = ("environment.yml", "environment-cpu.yml")
CONDA_NAMES = {
    "environment.yml": {
        "torch": "pytorch-gpu",
        "transformer-engine": "transformer-engine-torch",
        "playwright": "playwright-python",
        "xxhash": "python-xxhash",
    },
    "environment-cpu.yml": {
        "torch": "pytorch-cpu",
        "playwright": "playwright-python",
        "xxhash": "python-xxhash",
    },
}
"""Where conda-forge calls a distribution by another name than the Python index, apart from upper case."""


def load(file: str) -> dict:
    return yaml.safe_load((ROOT / file).read_text())


def specs_of(file: str) -> dict[str, MatchSpec]:
    specs = [MatchSpec(entry) for entry in load(file)["dependencies"] if isinstance(entry, str)]
    assert len({spec.name.normalized for spec in specs}) == len(specs), "a package is named twice"
    return {spec.name.normalized: spec for spec in specs}


def wanted(file: str) -> list[Requirement]:
    """What pyproject asks for on such a machine: the package itself and everything its tests use.

    A conda environment's file cannot tell systems apart. What is asked for on one system alone (triton) is left out of
    it: pytorch-gpu brings triton, and without it the tests that need it are skipped.
    """
    extras = ["dev", "oracles", *(["gpu"] if file == "environment.yml" else [])]
    lines = PROJECT["dependencies"] + [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return [requirement for requirement in map(Requirement, lines) if requirement.marker is None]


def probes(requirement: Requirement) -> set[str]:
    """Versions at and just below each bound of a requirement, and the pinned one."""
    versions = {PINNED[requirement.name.lower()]}
    for specifier in requirement.specifier:
        release = [*Version(specifier.version).release, 0, 0][:3]
        versions |= {specifier.version, ".".join(map(str, [release[0], max(release[1] - 1, 0), 999]))}
    return versions


def admits(spec: MatchSpec, version: str) -> bool:
    return spec.version is None or VersionSpec(spec.version).matches(CondaVersion(version))


@pytest.mark.parametrize("file", FILES)
def test_every_dependency_is_named_in_a_range_that_agrees(file):
    specs = specs_of(file)
    for requirement in wanted(file):
        name = CONDA_NAMES[file].get(requirement.name, requirement.name.lower())
        assert name in specs, f"{file} lacks {name}, which pyproject.toml asks for"
        pinned = PINNED[requirement.name.lower()]
        assert admits(specs[name], pinned), f"{file}: {specs[name]} refuses {pinned}, the version of constraints.txt"
        for version in probes(requirement):
            assert not admits(specs[name], version) or requirement.specifier.contains(version), (
                f"{file}: {specs[name]} admits {version}, pyproject.toml asks for {requirement}"
            )


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_named_that_pyproject_does_not_ask_for(file):
    known = {CONDA_NAMES[file].get(r.name, r.name.lower()) for r in wanted(file)} | {"python", "pip", "make", "git"}
    assert set(specs_of(file)) == known


def test_a_cluster_gets_everything_but_jupyter_and_figures():
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["cluster"]
    left_out = {"matplotlib", "jupyterlab", "tornado", "ipywidgets", "papermill", "nbval"}
    assert set(PROJECT["dependencies"]) - set(group) == left_out
    assert set(group) < set(PROJECT["dependencies"])


def test_containers_binder_and_ci_take_the_same_index_of_torch_and_the_pins():
    (index,) = set(re.findall(r"https://download\S+", (ROOT / "Makefile").read_text()))
    for file in ("Dockerfile", ".binder/postBuild", ".devcontainer/devcontainer.json", ".github/workflows/ci.yml"):
        text = (ROOT / file).read_text()
        assert set(re.findall(r"https://download[^\s\"]+", text)) == {index}, file
        installs = [line for line in text.splitlines() if "pip install" in line]
        assert all("constraints.txt" in line for line in installs), file
    assert os.access(ROOT / ".binder/postBuild", os.X_OK)


def test_ci_runs_what_a_contributor_runs():
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["everything"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"] and os.access(ROOT / ".ci/run", os.X_OK)


FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_have_what_github_asks_for(form):
    fields = yaml.safe_load(form.read_text())
    assert fields["name"] and fields["description"]
    ids = [field["id"] for field in fields["body"]]
    assert len(set(ids)) == len(ids) and all(field["attributes"]["label"] for field in fields["body"])
    assert {field["type"] for field in fields["body"]} <= {"textarea", "input"}


@pytest.mark.parametrize("file", FILES)
def test_python_range_agrees(file):
    spec, asked = specs_of(file)["python"], Requirement(f"python{PROJECT['requires-python']}").specifier
    for version in ("3.10.14", "3.11.0", "3.12.4", "3.13.5", "3.14.10", "3.15.0"):
        assert admits(spec, version) == asked.contains(version) == ("3.11" <= version[:4] <= "3.14")


@pytest.mark.parametrize("file", FILES)
def test_conda_forge_is_the_only_channel(file):
    assert load(file)["channels"] == ["conda-forge", "nodefaults"]
    assert all(spec.channel is None for spec in specs_of(file).values())


def test_only_the_gpu_environment_brings_cuda():
    assert {"pytorch-gpu", "transformer-engine-torch"} <= set(specs_of("environment.yml"))
    assert not any("gpu" in name or "transformer-engine" in name for name in specs_of("environment-cpu.yml"))
