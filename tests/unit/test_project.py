"""Rules of the repository that users rely on: pins are complete, chapters are stored as they ran, nothing is stray."""

import base64
import io
import json
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from PIL import Image

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


# ---- installation ----


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line) for line in lines), "one name==version a line"
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert len(set(names)) == len(names), "a package is pinned twice"
    return dict(zip(names, (line.split("==")[1] for line in lines)))


SYSTEMS = {
    "linux-x86_64": {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    "linux-aarch64": {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64"},
    "macos-arm64": {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
}
PYTHONS = ("3.11.0", "3.12.0", "3.13.0", "3.14.0")
EXTRAS = ("dev", "docs", "oracles", "mutants")


@pytest.mark.parametrize("file", ["README.md", "Makefile", "constraints.txt"])
def test_every_page_names_the_same_pythons(file: str) -> None:
    first, last = (version.rpartition(".")[0] for version in (PYTHONS[0], PYTHONS[-1]))
    assert re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / file).read_text()) == [(first, last)]


def environment(python: str, system: str) -> dict[str, str]:
    """What environment markers see there."""
    version = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    cpython = {"implementation_name": "cpython", "implementation_version": python, "os_name": "posix"}
    return version | cpython | {"platform_python_implementation": "CPython"} | SYSTEMS[system]


def own_requirements() -> list[str]:
    """labkit's requirements as pyproject.toml has them; the metadata of an installation may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [
        (extra, Requirement(line)) for extra, lines in project["optional-dependencies"].items() for line in lines
    ]
    for extra, requirement in optional:
        condition = f"({requirement.marker}) and " if requirement.marker else ""
        requirement.marker = Marker(f'{condition}extra == "{extra}"')
    return project["dependencies"] + [str(requirement) for _, requirement in optional]


def requirements(name: str, extras: tuple[str, ...], where: dict[str, str]) -> list[Requirement]:
    """What an installation of `name[extras]` asks for, followed through the metadata of everything installed here.

    A package that is not installed here, since only another interpreter or system needs it, is a leaf: its own
    requirements are not seen.
    """
    seen: set[tuple[str, tuple[str, ...]]] = set()
    todo, found = [(name, extras)], []
    while todo:
        package, wanted = todo.pop()
        if (package, wanted) in seen:
            continue
        seen.add((package, wanted))
        try:
            lines = own_requirements() if package == "labkit" else metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate(where | {"extra": extra}) for extra in ("", *wanted)):
                found.append(requirement)
                todo.append((canonicalize_name(requirement.name), tuple(sorted(requirement.extras))))
    return found


def names(found: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in found} - {"labkit"}


def test_every_direct_and_transitive_dependency_is_pinned_to_what_is_installed():
    pinned = pins()
    here = {key: str(value) for key, value in default_environment().items()}
    needed = names(requirements("labkit", EXTRAS, here)) | {"megatron-core"}
    assert sorted(needed - set(pinned)) == [], "not in constraints.txt"
    installed = {name: Version(Version(metadata.version(name)).public) for name in needed}  # torch may be 2.13.0+cpu
    assert {name: version for name, version in installed.items() if version != Version(pinned[name])} == {}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_complete_and_agree_with_each_other(python, system):
    pinned = pins()
    found = requirements("labkit", EXTRAS, environment(python, system))
    assert sorted(names(found) - set(pinned)) == [], "not in constraints.txt"
    others = [r for r in found if r.name != "labkit"]
    refused = [str(r) for r in others if not r.specifier.contains(pinned[canonicalize_name(r.name)])]
    assert refused == [], "a pin lies outside of what another package asks for"


def test_nothing_of_one_machine_is_written_into_the_set_up():
    files = ["Makefile", "constraints.txt", "pyproject.toml", ".ci/run", "environment.yml", "environment-cpu.yml"]
    files += ["Dockerfile", "Dockerfile.gpu", ".binder/postBuild", ".devcontainer/devcontainer.json", "AGENTS.md"]
    for file in files:
        text = (ROOT / file).read_text()
        assert not re.search(r"file:|/opt/|/home/|/tmp/|--extra-index-url|--find-links", text), file


def test_makefile_explains_every_target():
    shown = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets is not None
    assert {line.split()[0] for line in shown.splitlines()} == set(targets[1].split())


# ---- chapters ----


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in load(path)["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def texts(cell: dict) -> list[str]:
    """Every text that a cell put out."""
    found = []
    for output in cell["outputs"]:
        found.append("".join(output.get("text", "")))
        found += ["".join(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return found


@each_chapter
def test_chapter_keeps_its_outputs_and_ran_in_order(path):
    counts = [cell["execution_count"] for cell in code_cells(path) if source(cell).strip()]
    assert counts == list(range(1, len(counts) + 1))
    assert sum(bool(cell["outputs"]) for cell in code_cells(path)) >= 5
    assert any("image/png" in output.get("data", {}) for cell in code_cells(path) for output in cell["outputs"])


@each_chapter
def test_chapter_keeps_no_error_no_widget_state_and_no_timings(path):
    notebook = load(path)
    assert "widgets" not in notebook["metadata"] and "papermill" not in notebook["metadata"]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        assert not {"execution", "papermill", "ExecuteTime"} & set(cell["metadata"])
        assert not any(output["output_type"] == "error" for output in cell.get("outputs", []))


@each_chapter
def test_chapter_is_small(path):
    assert path.stat().st_size < 800_000


@each_chapter
def test_chapter_has_one_cell_of_documented_parameters(path):
    tagged = [cell for cell in code_cells(path) if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    lines = [line for line in source(tagged[0]).splitlines() if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"\w+: [\w\[\], |]+ = .+  # .+", line) for line in lines), "name: type = value  # help"
    assert {"world_size", "device", "backend"} <= {line.split(":")[0] for line in lines}


@each_chapter
def test_chapter_shows_no_memory_address_and_no_path_of_this_machine(path):
    for cell in code_cells(path):
        for text in texts(cell):
            assert not re.search(r" at 0x[0-9a-f]{6,}|/tmp/|/home/|/Users/|site-packages|\.venv/", text), text[:200]


@each_chapter
def test_every_picture_says_its_sentence(path):
    """A picture's text/plain is a sentence with a number, not matplotlib's `<Figure size 640x480 with 1 Axes>`."""
    for cell in code_cells(path):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                sentence = "".join(output["data"].get("text/plain", ""))
                assert re.search(r"\d", sentence) and not sentence.startswith("<"), sentence
                picture = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"])))
                assert picture.info.get("Description") == sentence, "the picture is older; run `make chapters`"


def test_chapters_are_there():
    assert CHAPTERS, "no chapter in notebooks/"


@each_chapter
def test_numbers_of_chapters_are_right(path):
    """The title and the exercises bear the file's own number, and each chapter that the text names exists."""
    number = path.name[:2]
    cells = load(path)["cells"]
    assert source(cells[0]).startswith(f"# {number} ")
    text = "\n".join(map(source, cells))
    asked = re.findall(r'check\("(\d\d)\.\w+"', text) + re.findall(r"solutions/(\d\d)_", text)
    assert set(asked) == {number}
    named = re.findall(r"[Cc]hapters? (\d\d(?:(?:, | and )\d\d)*)", text)
    assert {each for numbers in named for each in re.findall(r"\d\d", numbers)} <= {each.name[:2] for each in CHAPTERS}
