"""Parameters of a chapter as a command line gives them: their names, types and rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.check.parameters import SIMPLE, Parameter, broken_rules, declared
from labkit.config.errors import nearest, shown
from labkit.config.field_spec import BadValueError, FieldSpec

OUTPUT_PARAMETER = "output_dir"
"""A chapter with this parameter writes its files into the folder that it names: --out, unless -p names another."""


def check_parameters(
    source: Path, given: list[tuple[str, str]], out: Path, *, alone: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return the typed parameters of one chapter, and what is wrong with their names, types and values.

    This check is needed because papermill ignores a name that the notebook does not have, and exits with 0.
    """
    try:
        known = declared(parameter_cell(source))
    except (ValueError, SyntaxError) as error:
        return {}, [f"{source}: its parameters cannot be read: {error}"]
    values: dict[str, Any] = {OUTPUT_PARAMETER: str(out.resolve())} if OUTPUT_PARAMETER in known else {}
    written = {name: f"-p {name} {shown(text)}" for name, text in given}
    problems: list[str] = []
    for name, text in given:
        if name not in known:
            listed = ", ".join(known) or "none"
            other = "" if alone else f"; -p CHAPTER:{name}=... sets it in one chapter"
            rule = f"{source.stem} has no such parameter; it has {listed}{nearest(name, known)}{other}"
            problems.append(f"-p {name}: {rule}")
            continue
        try:
            values[name] = _typed(known[name], text)
        except BadValueError as rule:
            problems.append(f"{written[name]}: {rule} in {source.stem}")
    if problems:  # a relation between parameters needs all of them
        return values, problems
    everything = {name: parameter.default for name, parameter in known.items()} | values
    for name, rule in broken_rules(known.values(), everything).items():
        if name == OUTPUT_PARAMETER and name not in written:
            continue  # `execute` has checked --out itself
        value = written.get(name, f"{name} {shown(everything[name])}{' (the default)' if name not in values else ''}")
        problems.append(f"{value}: {rule} in {source.stem}")
    return values, problems


def parameter_cell(notebook: Path) -> str:
    """Return the source of the cell that is tagged `parameters`; empty if there is none."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    cells = content.get("cells", []) if isinstance(content, dict) else []
    tagged = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    return "".join(tagged[0]["source"]) if tagged else ""


def _typed(parameter: Parameter, text: str) -> Any:
    """Return `text` as the type that the notebook declares; if that is not a simple one, the text is read as JSON."""
    if parameter.kind in SIMPLE:
        path = "any" if parameter.rule == "a folder" else ""
        return FieldSpec(parameter.name, parameter.kind, path=path).convert(text, text=True)
    try:
        return json.loads(text)
    except ValueError:
        raise BadValueError(f"must be {parameter.kind} written as JSON") from None
