"""Public names of a package that are imported only when used (PEP 562), so that `labkit groups` needs no torch.

A package's `__init__.py` writes its public names once, as imports under `if TYPE_CHECKING:`. A type checker follows
these imports. Python skips the block at run time, so `public_names` reads it from the source. `from another import *`
gives all public names of another package.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def public_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for the package whose `__init__.py` calls this."""
    body = ast.parse(inspect.getsource(sys.modules[package])).body  # also from a zip
    blocks = [node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    module_of: dict[str, str] = {}
    for module, alias in ((str(node.module), alias) for node in imports for alias in node.names):
        names = importlib.import_module(module).__all__ if alias.name == "*" else [alias.name]
        module_of |= dict.fromkeys(names, module)
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:  # `from labkit.config import presets` names a module
            return importlib.import_module(f"{package}.{name}")
        namespace[name] = value = getattr(importlib.import_module(module_of[name]), name)
        return value

    return sorted(module_of), load, lambda: sorted({*namespace, *module_of})
