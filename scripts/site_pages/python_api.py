"""The reference of the Python API: a page for each package, with the public names of its `__init__.py`.

Docstrings are Markdown, so they become part of the page as they are, but for their `Args:` and `Raises:`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature

import labkit

_SECTIONS = {"Args:": "**Arguments**", "Returns:": "**Returns**", "Raises:": "**Raises**", "Yields:": "**Yields**"}
_INDEX = """\
# Python API

Each package lists its public names in its `__init__.py` and loads them when they are first used. Import from the
package, as in `from labkit.parallel import plan_buckets`. Modules below the packages are not part of the interface.
[Architecture](/docs/architecture.md) says which package may import which.

```{toctree}
:maxdepth: 1
:glob:

*
```
"""


def api_pages() -> dict[str, str]:
    """Return the pages by their names, such as `labkit.comm`, and `index`."""
    found = (importlib.import_module(f"labkit.{module.name}") for module in pkgutil.iter_modules(labkit.__path__))
    packages = [package for package in found if getattr(package, "__all__", ())]
    home: dict[str, str] = {}
    for package in packages:
        for name in package.__all__:
            value = getattr(package, name)
            own = getattr(value, "__module__", package.__name__).startswith(f"{package.__name__}.")
            home[name] = package.__name__ if own else home.get(name, package.__name__)
    return {"index": _INDEX} | {package.__name__: _page(package, home) for package in packages}


def _page(package: ModuleType, home: dict[str, str]) -> str:
    """The page of a package. A name of another package is only listed, with a link to where it is described."""
    own = [name for name in package.__all__ if home[name] == package.__name__]
    lines = [f"# {package.__name__}\n", f"{markdown(inspect.getdoc(package) or '')}\n"]
    if others := sorted({*package.__all__} - {*own}, key=lambda name: (home[name], name)):
        listed = ", ".join(f"{{py:obj}}`~{home[name]}.{name}`" for name in others)
        lines.append(f"The package also gives these names of others: {listed}.\n")
    lines += [_entry(package.__name__, name, getattr(package, name)) for name in own]
    return "\n".join(lines)


def _entry(package: str, name: str, value: Any) -> str:
    """A function, a class with its members, a module, or a constant with its value."""
    if inspect.ismodule(value):
        return f"## {package}.{name}\n\n{markdown(inspect.getdoc(value) or '')}\n"
    if inspect.isclass(value):
        return _directive("class", name + _signature(value), _described(value), *_members(value), module=package)
    if callable(value):
        return _directive("function", name + _signature(value), markdown(inspect.getdoc(value) or ""), module=package)
    shown = repr(value)
    return _directive("data", name, f"= `{shown if len(shown) < 200 else shown[:200] + ' ...'}`", module=package)


def _described(cls: type) -> str:
    """The class's own docstring; empty if dataclass wrote it."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return "" if text.startswith(f"{cls.__name__}(") else markdown(text)


def _members(cls: type) -> Iterator[str]:
    """Fields, properties and methods that the class itself defines and describes."""
    described = ModuleAnalyzer.for_module(cls.__module__).find_attr_docs()
    fields = {name: lines for (owner, name), lines in described.items() if owner == cls.__name__ and name[0] != "_"}
    yield "\n".join(f"- `{name}`: {' '.join(lines).strip()}" for name, lines in fields.items())
    for name, value in vars(cls).items():
        text = inspect.getdoc(value)
        if name.startswith("_") or name in fields or not text:
            continue
        if isinstance(value, property | cached_property):
            yield _directive("property", name, markdown(text))
        elif inspect.isroutine(value):
            method = getattr(cls, name)
            yield _directive("method", name + _signature(method, drop=inspect.isfunction(value)), markdown(text))


def _signature(value: Any, *, drop: bool = False) -> str:
    """The signature with types as they are written; empty for a class that takes whatever its base takes.

    drop: leave out the first parameter, a method's `self`.
    """
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    returned = inspect.Signature.empty if inspect.isclass(value) else found.return_annotation
    found = found.replace(parameters=[*found.parameters.values()][drop:], return_annotation=returned)
    return re.sub(r"<(?:function |class ')?([\w.]+)[^<>]*>", r"\1", stringify_signature(found))


def _directive(kind: str, called: str, *content: str, module: str = "") -> str:
    """A directive of Sphinx's Python domain, of a name of `module` or, without it, of a member of a class."""
    fence, option = ("`" * 6, [f":module: {module}"]) if module else ("`" * 5, [])
    return "\n".join([f"{fence}{{py:{kind}}} {called}", *option, "", "\n\n".join(filter(None, content)), fence, ""])


def markdown(docstring: str) -> str:
    """The docstring with `Args:` and its kind as lists."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if line in _SECTIONS:
            inside = True
            lines += [_SECTIONS[line], ""]
        elif inside and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            lines.append(f"- `{name}`: {rest}" if colon else f"- {line.strip()}")
        else:
            inside = inside and (not line or line.startswith(" "))
            lines.append(line.strip() and f"  {line.strip()}" if inside else line)
    return "\n".join(lines)
