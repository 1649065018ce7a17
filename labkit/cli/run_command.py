"""`labkit run`: run chapters with papermill, after a check of their parameters, and write HTML with nbconvert."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from labkit.check.chapter_copies import CHAPTERS, chapters_in
from labkit.check.parameters import can_be_written
from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.batches.settings import is_batch, settings_of
from labkit.cli.chapter_parameters import check_parameters
from labkit.cli.output import show
from labkit.config.errors import nearest, shown
from labkit.config.fields import Given
from labkit.output_files import appearing, naming

REPORT = "report.json"


class Chapter(NamedTuple):
    """One notebook to run."""

    source: Path
    target: Path
    parameters: dict[str, Any]


def execute(arguments: Arguments) -> int:
    """Check chapters and parameters, run the chapters one after another, and say where the results are."""
    options = arguments.options
    folder = notebook_folder(options["notebooks"])
    out = Path(options["out"])
    problems = [f"--out {shown(str(out))}: is a file; name a folder"] if out.exists() and not out.is_dir() else []
    if not problems and not can_be_written(out):
        problems.append(f"--out {shown(str(out))}: cannot be written; name another folder")
    sources, missing = find_chapters(arguments.words, folder)
    given, bad = by_chapter(options["parameter"], sources, folder)
    problems += bad
    if is_batch(given):
        return _batch(arguments, given, out, missing + problems)
    chapters: list[Chapter] = []
    for source in sources:
        parameters, bad = check_parameters(source, given[source], out, alone=len(sources) == 1)
        problems += bad
        chapters.append(Chapter(source, out / source.name, parameters))
    arguments.refuse(missing + problems)
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    started = time.time()
    for chapter in chapters:
        written += _run(chapter, options["timeout"], html=options["html"])
    show("\n".join(summary(out, written, started)))
    return 0


def _batch(arguments: Arguments, given: dict[Path, list[tuple[str, str]]], out: Path, problems: list[str]) -> int:
    """Run every combination of the values; the exit code is 1 if a setting failed."""
    from labkit.cli.batches.batch import Batch, lines, plot

    options, found = arguments.options, settings_of(given, out)
    nothing = [] if found.run else [f"no combination of these values can run; {'; '.join(found.left_out)}"]
    arguments.refuse(problems + (found.problems or nothing))
    for words in found.left_out:
        show(f"left out: {words}", stream=sys.stderr)
    more = ["--timeout", str(options["timeout"]), *(["--html"] if options["html"] else [])]
    batch = Batch(out, found.run, more)
    is_done = batch.run()
    mine = batch.rows[: len(found.run)]
    if options["plot"]:
        plot(mine, out).save(options["plot"])
    show(json.dumps(mine, indent=1) if options["json"] else "\n".join([*lines(mine), "", f"results in {out}"]))
    return 0 if is_done else 1


def notebook_folder(given: str | None) -> Path:
    """Return the folder of --notebooks, or `notebooks` here if it has chapters, or the one that labkit carries."""
    if given is not None:
        return Path(given)
    here = Path("notebooks")
    return here if chapters_in(here) else CHAPTERS


def find_chapters(words: list[str], folder: Path) -> tuple[list[Path], list[str]]:
    """Return the notebooks for words such as `00`, `00_tour`, a path, or `all`; and a sentence for each word that names
    none."""
    known = {path.stem: path for path in chapters_in(folder)}
    listed = f"chapters in {folder}: {', '.join(known) or 'none'}"
    if not words:
        return [], [f"no chapter named; {listed}, or all"]
    found: list[Path] = []
    problems: list[str] = []
    for word in words:
        path = Path(word)
        if word == "all":
            found += known.values()
        elif path.suffix == ".ipynb":
            found += [path] if path.is_file() else []
            problems += [] if path.is_file() else [f"{shown(word)}: no such file"]
        else:
            number = word and word.zfill(2)
            matches = [p for stem, p in known.items() if word == stem or number == stem.split("_")[0]]
            found += matches
            problems += [] if matches else [f"{shown(word)}: no such chapter; {listed}{nearest(word, known)}"]
    return list(dict.fromkeys(found)), problems


def by_chapter(
    given: list[tuple[str, str]], sources: list[Path], folder: Path
) -> tuple[dict[Path, list[tuple[str, str]]], list[str]]:
    """Return the parameters of each chapter, and what is wrong with the chapters that they name.

    `10:steps` is only for chapter 10, where it replaces a `steps` for all of them.
    """
    values = {source: {name: text for name, text in given if ":" not in name} for source in sources}
    once = {source: Given() for source in sources}
    problems: list[str] = []
    for name, text in dict(given).items():
        word, colon, parameter = name.rpartition(":")
        found, missing = find_chapters([word], folder) if colon else ([], [])
        problems += [f"-p {name}: {rule}" for rule in missing]
        for source in found:
            if source not in values:
                named = ", ".join(path.stem for path in sources) or "none"
                problems.append(f"-p {name}: {source.stem} is not among the chapters of this command: {named}")
            else:
                problems += once[source].add(f"-p {parameter} of {source.stem}", text, f"-p {name}={text}")
                values[source][parameter] = text
    return {source: list(pairs.items()) for source, pairs in values.items()}, problems


def _run(chapter: Chapter, timeout: float, *, html: bool) -> list[Path]:
    """Execute one chapter and return the files that it leaves. A failed cell becomes one message, and the notebook up
    to it is kept."""
    from labkit.cli.command_line import CommandFailedError

    print(f"{chapter.source.stem}: running", file=sys.stderr, flush=True)
    started = time.monotonic()
    failure = _execute(chapter, timeout)
    if failure:
        raise CommandFailedError(f"{chapter.source.stem} {failure}\n  see {chapter.target}")
    print(f"{chapter.source.stem}: done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return [chapter.target, as_page(chapter.target)] if html else [chapter.target]


def _execute(chapter: Chapter, timeout: float) -> str:
    """Execute one chapter and return why it failed, or an empty string. Raises a KeyboardInterrupt that says what was
    kept."""
    import warnings

    import papermill
    from nbclient.exceptions import CellTimeoutError
    from papermill.exceptions import PapermillExecutionError

    from labkit.cli.chapter_kernel import chapter_kernel
    from labkit.cli.chapter_progress import showing_cells

    failure = ""
    cells = len(json.loads(chapter.source.read_text(encoding="utf-8"))["cells"]) + bool(chapter.parameters)
    progress = showing_cells(chapter.source.stem, cells)
    with warnings.catch_warnings(), naming(chapter.target), chapter_kernel() as kernel, progress as begin:
        warnings.simplefilter("ignore")
        try:
            papermill.execute_notebook(
                str(chapter.source),
                str(chapter.target),
                parameters=chapter.parameters,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                on_cell_start=begin,
                execution_timeout=int(timeout),
                **kernel.options,
            )
        except PapermillExecutionError as error:
            what = _without_colours(f"{error.ename}: {error.evalue}")
            cell = str(error.source).strip().partition("\n")[0]
            failure = f"failed in the cell that begins `{cell}`\n  {what}"
        except CellTimeoutError:
            failure = f"failed: a cell took more than {timeout:g} seconds; raise --timeout"
        except RuntimeError as error:  # a kernel that does not start, or is killed
            failure = f"failed: {error}{kernel.last_words()}"
    if kernel.interrupted:
        raise KeyboardInterrupt(f"interrupted; what {chapter.source.stem} showed so far is in {chapter.target}")
    return failure


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


PAGE = """{% extends 'lab/index.html.j2' %}
{% block data_png scoped %}
<div class="jp-RenderedImage jp-OutputArea-output {{ extra_class }}">
<img src="data:image/png;base64,{{ output.data['image/png'] }}" alt="{{ output.data['text/plain'] | escape_html }}">
</div>
{% endblock data_png %}
"""
"""nbconvert's page, but with a figure's sentence as its alternative text, so that a screen reader can read it."""


def as_page(notebook: Path) -> Path:
    """Write the notebook as a page, without solutions, because a page cannot collapse them; return the file."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    config = Config(TagRemovePreprocessor={"enabled": True, "remove_cell_tags": {"solution"}})
    pages = HTMLExporter(config, extra_loaders=[DictLoader({"page": PAGE})], template_file="page")
    target = notebook.with_suffix(".html")
    with appearing(target) as draft:
        draft.write_text(pages.from_filename(str(notebook))[0], encoding="utf-8")
    return target


def summary(out: Path, written: list[Path], started: float) -> list[str]:
    """Return lines with the files of the results, and with what the tour's report says, if this run wrote one."""
    report = out / REPORT
    fresh = [p for p in sorted(out.iterdir()) if p.is_file() and p not in written and p.stat().st_mtime >= started - 1]
    lines = ["results", *(f"  {path}" for path in [*written, *fresh])]
    if report in fresh:
        content = json.loads(report.read_text(encoding="utf-8"))
        lines += ["", *report_lines(content)]
    return lines


def report_lines(content: dict[str, Any]) -> list[str]:
    """Return the lines that `report.json` has for the user: its `summary`, a sentence or a list of them."""
    shown_lines = content.get("summary", [])
    return [shown_lines] if isinstance(shown_lines, str) else [str(line) for line in shown_lines]


COMMAND = Command(
    name="run",
    summary="Run chapters as notebooks, with parameters, and keep what they show.",
    options=(
        Option(
            "out",
            "str",
            "folder for the executed notebooks and the files that they write",
            "build",
            path="any",
            aliases=("output",),
        ),
        Option(
            "parameter",
            "str",
            "set a parameter of every chapter named; 10:NAME=VALUE is only for chapter 10; may be repeated; of values "
            "such as 2,4 every combination runs",
            pairs=True,
            unset="default: the chapter's value",
        ),
        Option("html", "bool", "also write each notebook as HTML", False),
        Option(
            "notebooks",
            "str",
            "folder of the chapters",
            path="any",
            unset="default: notebooks here, or those that labkit carries",
        ),
        Option("timeout", "float", "seconds that one cell may take", 600.0, ge=1),
        Option("json", "bool", "of several settings: print the results as JSON", False),
        Option(
            "plot", "str", "of several settings: file for a figure of their results", path="any", unset="default: none"
        ),
    ),
    execute=execute,
    example="labkit run 00 --out build -p steps 5 --html",
    words="CHAPTER...",
    paths=True,
)
