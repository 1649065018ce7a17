"""The site of docs: each page has its place in a section, links lead somewhere, references name everything.

What Sphinx makes of it is in tests/browser/test_site.py, since that takes a minute.
"""

import importlib
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("sphinx", reason="the site needs the extra docs")
ROOT = Path(__file__).parents[2]

import make_docs  # noqa: E402
from site_pages import chapters, commands, links, presets, python_api  # noqa: E402

CHAPTERS = sorted(path.name for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
REFERENCE = "docs/reference/command_line.md"
ADDRESS = "https://github.com/someone/labkit"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Sphinx reads; one page stands for those that are read from the code."""
    folder = tmp_path_factory.mktemp("site") / "source"
    make_docs.assemble(folder, "", {REFERENCE: "# Command line\n"})
    return folder


def markdown(path: Path) -> str:
    """The text of a page without its blocks of code; of a chapter, that of its Markdown cells."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return re.sub(r"```\w*\n.*?```", "", text, flags=re.DOTALL)


def pages(source: Path) -> list[Path]:
    return sorted([*source.rglob("*.md"), *(source / "notebooks").glob("*.ipynb")])


def test_every_page_is_in_one_section(source: Path) -> None:
    listed = Counter[str]()
    for path in source.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(), re.DOTALL):
            listed.update(line.lstrip("/") for line in tree.splitlines() if line and line[0] != ":")
    names = {path.relative_to(source).with_suffix("").as_posix() for path in pages(source)}
    assert listed == Counter(names - {"index"})
    assert {f"notebooks/{name.removesuffix('.ipynb')}" for name in CHAPTERS} < names


def test_relative_links_lead_to_files_of_the_site(source: Path) -> None:
    for path in pages(source):
        targets = re.findall(r"(?:\]\(|\{download\}`[^<`]*<)([^)>#\s]+)", markdown(path))
        for target in [target for target in targets if "://" not in target]:
            start = source if target.startswith("/") else path.parent
            assert (start / target.lstrip("/")).is_file(), f"{path.relative_to(source)}: {target}"


def test_each_chapter_can_be_downloaded_without_its_solutions(source: Path) -> None:
    for name in CHAPTERS:
        assert f"<../exercises/{name}>" in nbformat.read(source / "notebooks" / name, as_version=4).cells[0].source
        cells = nbformat.read(source / "exercises" / name, as_version=4).cells
        assert not any("solution" in cell.metadata.get("tags", []) or cell.get("outputs") for cell in cells)
        assert any("exercise" in cell.metadata.get("tags", []) for cell in cells)


PAGES = {"docs/running.md", "docs/teaching/index.md", "notebooks/00_tour.ipynb"}
LINKS = [
    ("[a](running.md#slurm)", "[a](running.md#slurm)"),
    ("[a](../notebooks/00_tour.ipynb)", "[a](../notebooks/00_tour.ipynb)"),
    ("[a](teaching)", "[a](/docs/teaching/index.md)"),
    ("[a](../README.md)", "[a](/index.md)"),
    ("![a](timeline.png) <https://arxiv.org>", "![a](timeline.png) <https://arxiv.org>"),
    ("```\n[a](nowhere)\n```", "```\n[a](nowhere)\n```"),
]
TO_SOURCES = [
    ("[`lazy.py`](../labkit/lazy.py)", "`labkit/lazy.py`", f"[`lazy.py`]({ADDRESS}/blob/main/labkit/lazy.py)"),
    ("[how](../labkit/lazy.py)", "how (`labkit/lazy.py`)", f"[how]({ADDRESS}/blob/main/labkit/lazy.py)"),
]


@pytest.mark.parametrize(("written", "shown"), LINKS)
def test_a_link_to_a_page_stays_a_link(written: str, shown: str) -> None:
    assert links.for_site(written, "docs/data.md", PAGES, "") == shown


@pytest.mark.parametrize(("written", "shown", "with_address"), TO_SOURCES)
def test_a_link_to_a_source_needs_the_repositorys_address(written: str, shown: str, with_address: str) -> None:
    assert links.for_site(written, "docs/data.md", PAGES, "") == shown
    assert links.for_site(written, "docs/data.md", PAGES, ADDRESS) == with_address


def test_a_link_that_leads_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/data\.md: the link to nowhere\.md"):
        links.for_site("[a](nowhere.md)", "docs/data.md", PAGES, "")


def test_hosts_that_run_a_chapter_need_the_repositorys_address() -> None:
    chapter = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 00 Tour\n\nText")])

    def first_cell(address: str) -> str:
        return chapters.chapter_page(chapter, "00_tour.ipynb", PAGES, address).cells[0].source

    assert "Colab" not in first_cell("") and "Binder" not in first_cell("https://example.org/labkit")
    assert "https://colab.research.google.com/github/someone/labkit/blob/main/notebooks/00_tour.ipynb" in first_cell(
        ADDRESS
    )
    assert "https://mybinder.org/v2/gh/someone/labkit/main?urlpath=lab/tree/notebooks/00_tour.ipynb" in first_cell(
        ADDRESS
    )
    assert first_cell(ADDRESS).startswith("# 00 Tour\n") and first_cell(ADDRESS).endswith("\nText")


def test_the_reference_names_every_command_and_option() -> None:
    page = commands.commands_page()
    for name, (module, _) in commands.COMMANDS.items():
        section = page.split(f"\n## labkit {name}\n")[1].split("\n## ")[0]
        command = importlib.import_module(f"labkit.cli.{module}").COMMAND
        assert all(f"`--{option.name}" in section for option in command.all_options)
        assert all(f"`{action}" in section for action in command.actions)


def test_the_reference_counts_parameters_of_presets() -> None:
    """As published: GPT-2 small, and Mixtral 8x7B with what a token uses (arXiv 2401.04088)."""
    page = presets.presets_page()
    assert re.search(r"`gpt2_124m` \| gpt \| 12 \| 768 \| 12 \| 1,024 \| 124\.4 \|", page)
    assert re.search(r"`mixtral_8x7b` .* 46,702\.8 \| 8; a token uses 12,879\.9 \|", page)
    assert all(f"| `{name}` |" in page for name in presets.presets.names())


def test_the_reference_describes_each_public_name_once() -> None:
    written = python_api.api_pages()
    described = Counter(re.findall(r"^`{6}\{py:\w+\} (\w+)", "\n".join(written.values()), re.MULTILINE))
    packages = [importlib.import_module(name) for name in written if name != "index"]
    public = {name for package in packages for name in package.__all__} - {"presets"}  # a module
    assert described == Counter(public)
    signature = "(x: Tensor, group: Group, op: str = 'sum', *, in_place: bool = True) -> Tensor"
    assert f"{{py:function}} all_reduce{signature}\n:module: labkit.comm\n" in written["labkit.comm"]
    # `labkit.models` comes first in the alphabet, and gives the name, too
    assert "{py:function} paper_layer_bytes(" in written["labkit.plan"]
    assert "{py:obj}`~labkit.plan.paper_layer_bytes`" in written["labkit.models"]


def test_arguments_of_a_docstring_become_a_list() -> None:
    text = (
        "Say it.\n\nArgs:\n    a, b: first,\n        and more.\n    c: last.\n\nRaises:\n    ValueError: never.\n\nEnd."
    )
    assert python_api.markdown(text).splitlines() == [
        "Say it.", "", "**Arguments**", "", "- `a, b`: first,", "  and more.", "- `c`: last.", "",
        "**Raises**", "", "- `ValueError`: never.", "", "End.",
    ]  # fmt: skip
