"""labkit: a workbench for the Megatron-style parallel training stack.

`import labkit` loads this file alone. Python imports `labkit.schedules`, `labkit.launch` and the other packages on
their first use (PEP 562). Only the packages that compute import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit import check as check
    from labkit import cli as cli
    from labkit import comm as comm
    from labkit import config as config
    from labkit import data as data
    from labkit import events as events
    from labkit import fp8 as fp8
    from labkit import graphs as graphs
    from labkit import launch as launch
    from labkit import models as models
    from labkit import moe as moe
    from labkit import parallel as parallel
    from labkit import plan as plan
    from labkit import schedules as schedules
    from labkit import te as te
    from labkit import train as train
    from labkit import viz as viz


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("labkit")
        except PackageNotFoundError:
            return "0.0.0+source"  # imported from a checkout that was never installed
    if name in _packages():
        from importlib import import_module

        return import_module(f"labkit.{name}")
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `%%ranks` in a notebook; `%load_ext labkit` calls this."""
    from labkit.launch.magic import RankMagics

    shell.register_magics(RankMagics)


def __dir__() -> list[str]:
    return sorted({*globals(), *_packages(), "__version__"})


def _packages() -> set[str]:
    """Names of the packages and modules in this folder."""
    from pkgutil import iter_modules

    return {module.name for module in iter_modules(__path__)} - {"__main__"}
