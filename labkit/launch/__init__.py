"""Run a function on N ranks: from a notebook cell, from a script, or on the ranks that torchrun started.

    from labkit.launch import run
    run(lambda: torch.distributed.get_rank(), 4)        # [0, 1, 2, 3]

The way of a launch: `forkserver` keeps one process that has imported torch and forks ranks from it in milliseconds;
`pickling` packs the function; `worker` is a rank's part; `rank_pool` holds the ranks from outside; `launcher` has `run`
and `Ranks`; `status` is the slot in which a rank writes what it waits for; `watch` finds the ranks that wait too long;
`failure_report` puts a failure into words.
Nothing here imports torch in the process that calls `run`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.launch.failure_report import RankError as RankError
    from labkit.launch.forkserver import preload as preload
    from labkit.launch.info import RankInfo as RankInfo
    from labkit.launch.info import rank_info as rank_info
    from labkit.launch.info import report_progress as report_progress
    from labkit.launch.launcher import Ranks as Ranks
    from labkit.launch.launcher import before_launch as before_launch
    from labkit.launch.launcher import run as run
    from labkit.launch.status import waiting as waiting
    from labkit.launch.torchrun import join as join

_MODULE_OF = {
    "RankError": "failure_report",
    "RankInfo": "info",
    "Ranks": "launcher",
    "before_launch": "launcher",
    "join": "torchrun",
    "preload": "forkserver",
    "rank_info": "info",
    "report_progress": "info",
    "run": "launcher",
    "waiting": "status",
}
__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
