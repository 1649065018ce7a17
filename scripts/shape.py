"""Print the shape of labkit: sizes, folders, long functions, circles of imports, and how far a reader must travel.

    python scripts/shape.py             tables for people
    python scripts/shape.py --json      the same numbers for a program

A *journey* is the list of files of labkit of which any frame runs. Three are taken: from `train_step` to the loss (the
second step, so that nothing counts that happens once), two steps of `pretrain` alone, and two steps on TP2 x PP2.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "labkit"
CORE = (
    "comm/rank_generator.py",
    "parallel/mappings.py",
    "parallel/layers.py",
    "parallel/mlp.py",
    "models/attention.py",
    "models/blocks.py",
    "models/gpt.py",
    "parallel/data_parallel/naive.py",
    "schedules/builders.py",
    "schedules/execution.py",
    "train/stepping.py",
)
"""The evening core, in reading order."""
SMALL = 60
"""Modules under so many lines are listed: each should be an idea of its own."""


def modules() -> list[Path]:
    """Every Python file of labkit."""
    return sorted(PACKAGE.rglob("*.py"))


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def relative(path: Path | str) -> str:
    return str(Path(path).relative_to(PACKAGE))


# ---- what the text says ----


def folders() -> dict[str, int]:
    """Modules of each folder beside its `__init__`."""
    found: dict[str, int] = {}
    for path in modules():
        found.setdefault(str(path.parent.relative_to(ROOT)), 0)
        found[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    return found


def longest_functions(count: int = 5) -> list[tuple[int, str]]:
    """(lines, `file:function`) of the longest ones, without their docstrings."""
    found = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                assert node.end_lineno is not None
                found.append((node.end_lineno - first.lineno + 1, f"{relative(path)}:{node.name}"))
    return sorted(found, reverse=True)[:count]


def base_names() -> dict[str, list[str]]:
    """Base names that several modules bear."""
    by_name: dict[str, list[str]] = {}
    for path in modules():
        if path.stem not in ("__init__", "__main__"):
            by_name.setdefault(path.stem, []).append(relative(path))
    return {name: paths for name, paths in by_name.items() if len(paths) > 1}


def imports_of(path: Path) -> set[str]:
    """Files of labkit that `path` imports anywhere: at its top, inside functions, for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        found |= {file for name in names if (file := _file_of(name)) is not None and file != relative(path)}
    return found


def _file_of(module: str) -> str | None:
    """`labkit.comm.groups` -> `comm/groups.py`; None for packages and for what is not labkit's."""
    head, *rest = module.split(".")
    file = PACKAGE.joinpath(*rest).with_suffix(".py") if rest else PACKAGE / "__init__.py"
    return relative(file) if head == "labkit" and rest and file.is_file() else None


def circles() -> list[list[str]]:
    """Sets of files that import each other, directly or through others (Tarjan's strongly connected components). An
    `__init__` that hands out names lazily is no part of any circle: nothing below a package imports it by file."""
    graph = {relative(path): sorted(imports_of(path)) for path in modules()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def core_imports() -> dict[str, list[str]]:
    """By file of the core, what it imports and must not: graphs, fp8, Transformer Engine, faults, benchmarks."""
    words = ("graphs", "fp8", "te", "capturing", "fault", "faults", "benchmarks")
    found = {}
    for name in CORE:
        if (path := PACKAGE / name).is_file():
            bad = [file for file in sorted(imports_of(path)) if set(Path(file).with_suffix("").parts) & set(words)]
            if bad:
                found[name] = bad
    return found


def lines_of_config() -> int:
    """Lines of the configuration without its presets, and of the command line's parser."""
    config = [path for path in (PACKAGE / "config").glob("*.py") if path.name != "presets.py"]
    return sum(map(lines_of, [*config, PACKAGE / "cli" / "arguments.py"]))


def fields_of_config() -> int:
    """Fields of a configuration, in all sections."""
    from labkit.config.fields import SPECS

    return len(SPECS)


# ---- what a run says ----


@dataclass
class Journey:
    """What one thread visits between `start` and `stop`."""

    files: list[str] = field(default_factory=list)
    """In the order of their first frame."""
    changes: int = 0
    """Times that a frame started in another file than the one before it."""
    calls: int = 0
    """Frames of labkit that started."""
    _last: str = ""

    def visit(self, frame: FrameType, event: str, _: Any) -> None:
        """For `sys.setprofile`."""
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(f"{PACKAGE}/") or frame.f_code.co_name == "<module>":
            return
        name = relative(path)
        self.calls += 1
        self.changes += name != self._last
        self._last = name
        if name not in self.files:
            self.files.append(name)


def _pretrain(layout: dict[str, Any], watch: Callable[[FrameType, str, Any], None]) -> None:
    """Two steps, twice: the first time unwatched, so that no import is seen."""
    from labkit.config import presets
    from labkit.train import pretrain

    two_steps = {"train.global_batch_size": 2, "train.steps": 2, "train.eval_steps": 0}
    config = presets.tiny().override(two_steps | layout)
    pretrain(config)
    sys.setprofile(watch)
    try:
        pretrain(config)
    finally:
        sys.setprofile(None)


def to_the_loss() -> Journey:
    """From the second `train_step` to the end of its first forward, which gives the loss."""
    journey, steps = Journey(), 0

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal steps
        function = frame.f_code.co_qualname
        steps += event == "call" and function == "train_step"
        if steps == 2:
            journey.visit(frame, event, argument)
            if event == "return" and function == "GPTModel.forward":
                sys.setprofile(None)

    _pretrain({}, watch)
    return journey


def two_steps(layout: dict[str, Any]) -> Journey:
    """All of `pretrain`, two steps."""
    journey = Journey()
    _pretrain(layout, journey.visit)
    return journey


def two_steps_on_four_ranks() -> Journey:
    """The files that any rank of TP2 x PP2 visits in two steps."""
    from labkit.launch import run

    journeys = run(two_steps, 4, {"parallel.tp": 2, "parallel.pp": 2})
    files = list(dict.fromkeys(file for journey in journeys for file in journey.files))
    return Journey(files, max(j.changes for j in journeys), max(j.calls for j in journeys))


def calls_of_a_layer() -> float:
    """Frames of labkit in forward and backward of one microbatch, over the number of layers (`presets.tiny()`)."""
    import torch

    from labkit.config import presets
    from labkit.models.chunks import build_model_chunks
    from labkit.parallel import single_process_groups

    config = presets.tiny()
    (model,) = build_model_chunks(config, single_process_groups(config.parallel))
    tokens_BS = torch.zeros(1, config.model.seq_length, dtype=torch.int64)

    def step() -> None:
        model(tokens_BS, labels_BS=tokens_BS).sum().backward()

    step()
    journey = Journey()
    sys.setprofile(journey.visit)
    try:
        step()
    finally:
        sys.setprofile(None)
    return journey.calls / config.model.layers


# ---- the table ----


def measure() -> dict[str, Any]:
    """All numbers, by name."""
    files = modules()
    loss, dense, four = to_the_loss(), two_steps({}), two_steps_on_four_ranks()
    by_folder = folders()
    largest = max(by_folder, key=lambda name: by_folder[name])
    return {
        "files": len(files),
        "lines": sum(map(lines_of, files)),
        "largest folder": f"{largest}: {by_folder[largest]} modules",
        "folders over 14": {name: count for name, count in by_folder.items() if count > 14},
        f"modules under {SMALL} lines": [
            relative(p) for p in files if lines_of(p) < SMALL and not p.name.startswith("__")
        ],
        "longest functions": longest_functions(),
        "one base name twice": base_names(),
        "circles": circles(),
        "core": {name: lines_of(PACKAGE / name) if (PACKAGE / name).is_file() else None for name in CORE},
        "core imports what it must not": core_imports(),
        "train_step to the loss": asdict(loss),
        "two steps of pretrain, one process": asdict(dense),
        "two steps of pretrain, TP2 x PP2": asdict(four),
        "calls of a dense layer": calls_of_a_layer(),
        "lines of config without presets, and of the command line's parser": lines_of_config(),
        "the same for each field": round(lines_of_config() / fields_of_config(), 1),
    }


def table(shape: dict[str, Any]) -> Iterator[str]:
    """One line for each number, and one for each of a list."""
    for name, value in shape.items():
        if isinstance(value, dict) and "files" in value:
            yield f"{name}: {len(value['files'])} files, {value['changes']} changes of file, {value['calls']} calls"
            yield "    " + " ".join(value["files"])
        elif name == "core":
            yield f"core: {len(value)} files, {sum(v or 0 for v in value.values())} lines"
            yield from (f"    {file}: {lines}" for file, lines in value.items())
        elif isinstance(value, list | dict):
            yield f"{name}: {len(value)}"
            yield from (f"    {item}: {value[item]}" if isinstance(value, dict) else f"    {item}" for item in value)
        else:
            yield f"{name}: {value}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the numbers as JSON")
    show: Callable[[dict[str, Any]], str] = lambda shape: "\n".join(table(shape))  # noqa: E731
    if parser.parse_args(arguments).json:
        show = json.dumps
    print(show(measure()))


if __name__ == "__main__":
    main(sys.argv[1:])
