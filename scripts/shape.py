"""Print the shape of labkit: code by package, functions, circles of imports, and how far a reader must travel.

    python scripts/shape.py             tables for people
    python scripts/shape.py --json      the same numbers for a program

Lines of code leave out blank lines, comments and docstrings. The longest function and the mean length of a line are
printed beside them, because whoever packs lines makes these grow.

A *journey* is the list of files of labkit of which any frame runs. Three are taken: from `train_step` to the loss (the
second step, so that nothing counts that happens once), from `pretrain` to the first layer that it builds, and from a
row-parallel layer to `dist.all_reduce`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
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


def modules() -> list[Path]:
    """Every Python file of labkit."""
    return sorted(PACKAGE.rglob("*.py"))


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def relative(path: Path | str) -> str:
    return str(Path(path).relative_to(PACKAGE))


# ---- what the text says ----


def code_of(path: Path) -> list[str]:
    """The lines of code of a file: all but blank lines, comments and docstrings."""
    text = path.read_text()
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    return [lines[number - 1] for number in sorted(numbers)]


def code_by_package() -> dict[str, int]:
    """Lines of code of each package of labkit, of all of labkit, and of the folders beside it."""
    found: Counter[str] = Counter()
    for path in modules():
        count, inner = len(code_of(path)), path.relative_to(PACKAGE).parts
        found[f"labkit/{inner[0]}"] += count
        found["labkit"] += count
    for folder in ("tests", "scripts", "benchmarks", "examples"):
        found[folder] = sum(len(code_of(path)) for path in (ROOT / folder).rglob("*.py"))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def mean_line() -> float:
    """Characters of a line of code in labkit, on average, without its indent."""
    lengths = [len(line.strip()) for path in modules() for line in code_of(path)]
    return sum(lengths) / len(lengths)


def functions() -> int:
    """Functions and methods of labkit."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return sum(isinstance(node, kinds) for path in modules() for node in ast.walk(ast.parse(path.read_text())))


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


def imported_by_the_core() -> dict[str, int]:
    """Lines of each file that a file of the core imports, the core itself left out."""
    found = {file for name in CORE for file in imports_of(PACKAGE / name)} - set(CORE)
    return {file: lines_of(PACKAGE / file) for file in sorted(found)}


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


def to_the_first_layer() -> Journey:
    """From `pretrain` to the constructor of the first transformer layer."""
    journey = Journey()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        journey.visit(frame, event, argument)
        if event == "call" and frame.f_code.co_qualname == "TransformerLayer.__init__":
            sys.setprofile(None)

    _pretrain({}, watch)
    return journey


def _row_parallel_rank() -> list[str]:
    """On one of two ranks: the frames of labkit between the layer's forward and `dist.all_reduce`, outermost first."""
    import torch

    from labkit.comm import initialize_model_parallel
    from labkit.config import presets
    from labkit.models.chunks import build_model_chunks

    config = presets.tiny().override({"parallel.tp": 2})
    (model,) = build_model_chunks(config, initialize_model_parallel(config.parallel))
    many = 2**20 // (config.model.seq_length * config.model.hidden)  # 4 MiB: beyond 1 MiB gloo's own all-reduce runs
    tokens_BS = torch.zeros(many, config.model.seq_length, dtype=torch.int64)
    stack: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name != "all_reduce" or "distributed" not in frame.f_code.co_filename:
            return
        found: list[str] = []
        outer = frame.f_back
        while outer is not None and not (found and found[0].endswith("RowParallelLinear.forward")):
            if outer.f_code.co_filename.startswith(f"{PACKAGE}/"):
                found.insert(0, f"{relative(outer.f_code.co_filename)}:{outer.f_code.co_qualname}")
            outer = outer.f_back
        if found and found[0].endswith("RowParallelLinear.forward"):
            stack.extend(found)
            sys.setprofile(None)

    with torch.no_grad():
        sys.setprofile(watch)
        try:
            model(tokens_BS)
        finally:
            sys.setprofile(None)
    return stack


def to_the_all_reduce() -> list[str]:
    """The frames of labkit from `RowParallelLinear.forward` to `dist.all_reduce`, outermost first."""
    from labkit.launch import run

    return run(_row_parallel_rank, 2)[0]


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
    return {
        "modules": len(modules()),
        "lines of code": code_by_package(),
        "characters of a line": round(mean_line(), 1),
        "functions": functions(),
        "longest functions": longest_functions(),
        "circles": circles(),
        "core": {name: lines_of(PACKAGE / name) for name in CORE},
        "imported by the core": imported_by_the_core(),
        "core imports what it must not": core_imports(),
        "train_step to the loss": asdict(to_the_loss()),
        "pretrain to the first layer": asdict(to_the_first_layer()),
        "row-parallel layer to dist.all_reduce": to_the_all_reduce(),
        "calls of a dense layer": calls_of_a_layer(),
    }


def table(shape: dict[str, Any]) -> Iterator[str]:
    """One line for each number, and one for each of a list."""
    for name, value in shape.items():
        if isinstance(value, dict) and "files" in value:
            yield f"{name}: {len(value['files'])} files, {value['changes']} changes of file, {value['calls']} calls"
            yield "    " + " ".join(value["files"])
        elif name in ("core", "imported by the core"):
            yield f"{name}: {len(value)} files, {sum(value.values())} lines"
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
