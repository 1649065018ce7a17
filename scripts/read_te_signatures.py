"""Write down the signatures that labkit calls of Transformer Engine, from its own Python source.

    pip download --no-deps transformer_engine==2.20.2       # a pure wheel; needs neither a GPU nor a build
    python scripts/read_te_signatures.py transformer_engine-2.20.2-py3-none-any.whl

The result, tests/te_signatures.json, is what the recording stub of the tests holds every call against: without a GPU
the engine itself cannot be imported. Nothing but parameter names, their order, kinds and defaults (as text) is kept.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import zipfile
from pathlib import Path
from typing import Any

WANTED = {
    "transformer_engine/pytorch/module/linear.py": ("Linear",),
    "transformer_engine/pytorch/module/layernorm_linear.py": ("LayerNormLinear",),
    "transformer_engine/pytorch/module/grouped_linear.py": ("GroupedLinear",),
    "transformer_engine/pytorch/module/base.py": ("TransformerEngineBaseModule",),
    "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py": ("DotProductAttention",),
    "transformer_engine/pytorch/quantization.py": ("autocast",),
    "transformer_engine/pytorch/distributed.py": ("checkpoint",),
    "transformer_engine/pytorch/graph.py": ("make_graphed_callables",),
    "transformer_engine/common/recipe/__init__.py": ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"),
}
"""File of the wheel -> classes and functions."""
METHODS = ("__init__", "forward", "register_parameter")
OUTPUT = Path(__file__).parents[1] / "tests" / "te_signatures.json"


def parameters(function: ast.FunctionDef) -> list[list[Any]]:
    """[name, kind, default as text or None] in order, without self; kinds as `inspect` names them.

    Names that the body takes out of its **kwargs are parameters too, and then there are no others.
    """
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + [ast.unparse(d) for d in given.defaults]
    found: list[list[Any]] = [
        [argument.arg, "POSITIONAL_OR_KEYWORD", default] for argument, default in zip(positional, defaults, strict=True)
    ]
    if given.vararg:
        found.append([given.vararg.arg, "VAR_POSITIONAL", None])
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append([argument.arg, "KEYWORD_ONLY", None if default is None else ast.unparse(default)])
    if given.kwarg:
        popped = re.findall(rf"\b{given.kwarg.arg}\.pop\('(\w+)', (.+?)\)$", ast.unparse(function), re.M)
        found += [[name, "KEYWORD_ONLY", default] for name, default in popped]
        found += [] if popped else [[given.kwarg.arg, "VAR_KEYWORD", None]]
    return found[1:] if found and found[0][0] == "self" else found


def fields(node: ast.ClassDef) -> list[list[Any]]:
    """Constructor parameters of a dataclass: its annotated attributes."""
    return [
        [item.target.id, "POSITIONAL_OR_KEYWORD", None if item.value is None else ast.unparse(item.value)]
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]


def signatures(source: str, names: tuple[str, ...]) -> dict[str, dict[str, list[list[Any]]]]:
    """Name -> method (`__call__` for a function) -> parameters."""
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            found[node.name] = {"__call__": parameters(node)}
        elif isinstance(node, ast.ClassDef) and node.name in names:
            methods = {m.name: parameters(m) for m in node.body if isinstance(m, ast.FunctionDef) and m.name in METHODS}
            found[node.name] = methods if "__init__" in methods else {"__init__": fields(node)} | methods
    return found


def main() -> None:
    """Read a wheel, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel
    found: dict[str, Any] = {}
    with zipfile.ZipFile(wheel) as files:
        for path, names in WANTED.items():
            read = signatures(files.read(path).decode(), names)
            if missing := set(names) - set(read):
                raise SystemExit(f"{path} of {wheel.name} has no {', '.join(sorted(missing))}")
            found |= read
        exported = files.read("transformer_engine/pytorch/__init__.py").decode()
    offers = sorted(set(re.findall(r"^from transformer_engine\.pytorch\S* import (\w+)$", exported, re.M)))
    version = wheel.name.split("-")[1]
    OUTPUT.write_text(json.dumps({"version": version, "pytorch": offers, "signatures": found}, indent=1) + "\n")
    print(f"{OUTPUT.name}: {len(found)} names of Transformer Engine {version}")


if __name__ == "__main__":
    main()
