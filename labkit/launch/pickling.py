"""Pack what travels to the ranks into bytes: the function, its arguments, and the surroundings that both need.

A file holds two pickles. The first holds the environment, the working directory, `sys.path` and the source lines of
notebook cells, which a traceback of a rank quotes. The second holds the function and its arguments. A rank applies the
first before it reads the second, because the function may need the environment and the path to be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import linecache
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from labkit.launch.info import CONNECTIONS

_registry = threading.Lock()  # cloudpickle's list of modules to copy is global; launches may come from several threads
OWN_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS", CONNECTIONS,
)  # fmt: skip


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pack all that a rank needs to call `fn(*args)`.

    Raises:
        TypeError: `fn` is not a function, or the function or an argument cannot be pickled.
    """
    if not callable(fn):
        raise TypeError(f"the first argument must be a function, got {type(fn).__name__}: {fn!r}")
    file = io.BytesIO()
    pickle.dump(_surroundings(), file)
    try:
        with _registry, _by_value(_modules_of((fn, *args))):
            _Pickler(file).dump((fn, args))
    except Exception as error:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)!s} or one of its arguments cannot be sent to the ranks: "
            f"{type(error).__name__}: {error}. Files, locks and connections do not travel: open them in the function"
        ) from error
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickler of cloudpickle that also sends a module by its name if the module has a class of its own.

    cloudpickle mistakes a global `config` next to `torch.distributed` for `torch.distributed.config`, whose class is
    torch's own and cannot be pickled.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def unpack(path: Path) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Take over the caller's surroundings in this rank, then read and return the function and its arguments."""
    with path.open("rb") as file:
        apply_surroundings(pickle.load(file))
        return pickle.load(file)


def unpacked_elsewhere(packed: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Read the function and its arguments on another machine. It keeps its own environment and directory, and gets the
    caller's import path behind its own, and the notebook's sources."""
    file = io.BytesIO(packed)
    values = pickle.load(file)
    sys.path += [entry for entry in values["path"] if entry not in sys.path]
    linecache.cache.update(values["cells"])
    return pickle.load(file)


def apply_environment(values: dict[str, str]) -> None:
    """Give this rank the caller's environment, except for the rank's own variables."""
    for key in set(os.environ) - set(values) - set(OWN_VARIABLES):
        del os.environ[key]
    os.environ.update({key: value for key, value in values.items() if key not in OWN_VARIABLES})


def _surroundings() -> dict[str, Any]:
    cells = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
    }
    return {"environment": dict(os.environ), "directory": os.getcwd(), "path": list(sys.path), "cells": cells}


def apply_surroundings(values: dict[str, Any]) -> None:
    """Take over environment, directory, import path and notebook sources."""
    apply_environment(values["environment"])
    with contextlib.suppress(OSError):  # the directory may be gone; many functions do not need it
        os.chdir(values["directory"])
    sys.path[:] = values["path"]
    linecache.cache.update(values["cells"])


def _modules_of(objects: tuple[Any, ...]) -> list[ModuleType]:
    """Return the modules that define the given functions, classes and instances, and all that a test runner loaded."""
    names = {getattr(item, "__module__", None) or type(item).__module__ for item in objects}
    found = [sys.modules[name] for name in names if name in sys.modules]
    return found + [module for module in list(sys.modules.values()) if _loaded_by_test_runner(module)]


def _loaded_by_test_runner(module: ModuleType) -> bool:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return type(loader).__module__.startswith("_pytest")


def _importable(module: ModuleType) -> bool:
    """Return True if a fresh process with this `sys.path` would find the same file under the module's name."""
    if module.__name__ == "__main__" or _loaded_by_test_runner(module):
        return False
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # built in
    path: Any = None
    spec = None
    for depth in range(1, module.__name__.count(".") + 2):
        name = ".".join(module.__name__.split(".")[:depth])
        spec = _find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    origin = spec.origin if spec is not None else None
    return origin is not None and (origin == "frozen" or os.path.realpath(origin) == os.path.realpath(file))


def _find_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    """Find a module's spec like `importlib.util.find_spec`, but without looking into `sys.modules` first."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(name, path, None) if find else None
        if spec is not None:
            return spec
    return None


@contextlib.contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Have cloudpickle copy the definitions of modules that a rank could not import, while the block runs."""
    registered = []
    for module in {id(module): module for module in modules}.values():
        # __main__ needs no registration: cloudpickle always copies its definitions
        if module.__name__ != "__main__" and module.__name__ in sys.modules and not _importable(module):
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
