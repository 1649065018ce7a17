"""Run a function on N ranks: from a notebook cell, from a script, or on the ranks that torchrun started.

    from labkit.launch import run
    run(lambda: torch.distributed.get_rank(), 4)        # [0, 1, 2, 3]

| module           | its part of a launch                                                               |
|------------------|------------------------------------------------------------------------------------|
| `forkserver`     | keeps one process that has imported torch, and forks ranks from it in milliseconds |
| `pickling`       | packs the function and its arguments into bytes                                    |
| `worker`         | runs in a rank                                                                     |
| `rank_pool`      | starts, watches and ends the ranks from outside                                    |
| `launcher`       | has `run` and `Ranks`                                                              |
| `status`         | has the slot in which a rank notes its present wait, and the request to stop       |
| `watch`          | finds ranks that wait too long                                                     |
| `failure_report` | puts a failure into words                                                          |
| `processes`      | ends processes together, and reads their state from the system                     |
| `folders`        | makes private folders that do not outlive their process                            |
| `magic`          | has `%%ranks`, which runs a cell of a notebook on ranks; `rank_cells` runs it there  |
| `by_rank`        | shows equal values and outputs of ranks once                                       |
| `engine_ranks`   | runs a function on ranks of several machines, by the engines of ipyparallel        |
| `machine`        | counts cores and open files; `available_memory` has the memory that is left        |

No module imports torch in the process that calls `run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.launch.engine_ranks import engines as engines
    from labkit.launch.engine_ranks import run_on_engines as run_on_engines
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

__all__, __getattr__, __dir__ = public_names(__name__)
