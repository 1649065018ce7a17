"""`run` and `Ranks`, which call a function on N ranks and return its results by rank."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from labkit.launch import forkserver, info, machine, pickling, rank_cells, torchrun
from labkit.launch.by_rank import RankValues
from labkit.launch.failure_report import RankError
from labkit.launch.rank_pool import GRACE, RankPool

MOST_RANKS = 512
"""A larger number of processes on one machine is probably a typing error, and would overload the machine."""
NOTEBOOK_LIMIT, SCRIPT_LIMIT = 60.0, 600.0
"""Default seconds that a rank may wait for others, fewer in a notebook because a person waits in front of it."""
_LONGEST = 7 * 24 * 3600.0
"""Seconds in a week: the longest limit that torch gets, and also that of `parallel.distributed_timeout_minutes`."""
_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()
_stop_asked = False


def run(
    fn: Callable[..., Any],
    world_size: int = 4,
    *args: Any,
    backend: str = "auto",
    timeout: float | None = None,
    debug: bool = False,
    device: str = "auto",
    distributed_timeout_minutes: float | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks, each a process of its own in one torch.distributed group.

    Under torchrun the ranks are those that torchrun started, and each of them gets the results. Output, errors and the
    end of hung ranks are then up to torchrun.

    **Arguments**: `backend` is gloo, nccl or auto (nccl if each rank has a GPU of its own). `device` is cpu, cuda or
    auto; on GPUs rank r uses GPU r % count, so several ranks may share one. `debug` makes torch compare each collective
    between the ranks, so that ranks with different shapes or operations raise at once instead of hanging. `progress`
    receives what rank 0 passes to `report_progress`.

    `timeout` is the longest that a rank may wait for others, in seconds: in one collective, for one message, or at the
    start. A longer wait counts as a hang and ends the call. A rank that computes has no limit, and neither has the call
    as a whole; `labkit.launch.watch` has the rules. The default is `distributed_timeout_minutes` if that is given, else
    60 s in a notebook and 600 s elsewhere. `math.inf` lets ranks wait without a limit.

    `distributed_timeout_minutes` is torch's own limit of a collective: default 10, or `timeout` if that is longer.
    Under torchrun it is the only limit and defaults to `timeout`.

    If `args` has a RunConfig or a ParallelConfig with tp or cp above 1, the ranks start with
    CUDA_DEVICE_MAX_CONNECTIONS=1 (`info.needs_one_connection`), unless you have set this variable yourself.

    **Returns** the results by rank; GPU tensors come back on the CPU. What the ranks printed is shown afterwards, in
    rank order.

    **Raises** ValueError or TypeError before any process starts if an argument is impossible, and RankError if a rank
    raises, dies or hangs. No rank is left running in any case. A function can also have its own arguments checked
    before any process starts: see `before_launch`.
    """
    with Ranks(
        world_size, backend=backend, timeout=timeout, debug=debug, device=device,
        distributed_timeout_minutes=distributed_timeout_minutes,
    ) as ranks:  # fmt: skip
        ranks._patience = GRACE  # these ranks are not used again: do not wait for stragglers after a failure
        return ranks.run(fn, *args, progress=progress)


Look = Callable[..., None]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def before_launch(look: Look) -> Callable[[_Function], _Function]:
    """Return a decorator: the launching process then calls `look(world_size, device, *args)` before each launch.

    `look` gets the arguments of the call, and raises ValueError for arguments with which the ranks would fail. It also
    runs for a `functools.partial` of the decorated function. Under torchrun nothing is launched, so `look` is not
    called.
    """

    def decorate(fn: _Function) -> _Function:
        fn.before_launch = look  # pyright: ignore[reportFunctionMemberAccess]
        return fn

    return decorate


def look_before_launch(fn: Callable[..., Any], world_size: int, device: str, args: tuple[Any, ...]) -> dict[str, str]:
    """Call the `look` that `before_launch` attached to `fn`, if any; return the variables that its ranks need."""
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        fn, args, keywords = fn.func, (*fn.args, *args), {**fn.keywords, **keywords}
    look: Look | None = getattr(fn, "before_launch", None)
    if look is not None and not info.under_torchrun():
        look(world_size, device, *args, **keywords)
    return info.variables_of((*args, *keywords.values()))


class Ranks:
    """Ranks that stay alive: they start only once, and keep their memory from one call to the next.

        with Ranks(4) as ranks:
            ranks.run(build_model)
            ranks.run(train_one_step)

    In a notebook keep the object between cells and call `close()` at the end. It also closes when it is no longer
    referenced, or when the kernel ends or is killed. The ranks start with the first call. After an exception in the
    function they stay usable, with their state, if every rank returns within two seconds. Otherwise some rank hangs,
    has died or waits for the failed one, so all ranks are ended, and the next call starts new ones and says so. The
    arguments are those of `run`.
    """

    def __init__(
        self,
        world_size: int = 4,
        *,
        backend: str = "auto",
        timeout: float | None = None,
        debug: bool = False,
        device: str = "auto",
        distributed_timeout_minutes: float | None = None,
    ) -> None:
        _check(world_size, backend, device, timeout, distributed_timeout_minutes)
        self.world_size = world_size
        self.timeout = _limit(timeout, distributed_timeout_minutes)
        """Seconds that a rank may wait for others."""
        self._settings = {"backend": backend, "device": device, "debug": debug}
        self._group_timeout = _group_timeout(self.timeout, distributed_timeout_minutes)
        self._pool: RankPool | None = None
        self._lost_state = False
        self._patience = 2.0
        self._finalizer: weakref.finalize[[RankPool], Ranks] | None = None

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        progress: Callable[[dict[str, Any]], None] | None = None,
        together: bool = False,
    ) -> list[Any]:
        """Call `fn(*args)` on every rank, like `labkit.launch.run`. `timeout` replaces that of the constructor.

        together: show output that is the same on several ranks only once.
        """
        limit = self.timeout if timeout is None else _checked_timeout(timeout)
        variables = look_before_launch(fn, self.world_size, self._settings["device"], args)
        if info.under_torchrun():
            info.take_variables(variables)
            return torchrun.run_here(
                fn, self.world_size, args, group_timeout=self._group_timeout, progress=progress, **self._settings
            )
        packed = pickling.pack(fn, args)
        pool = self._started(variables)
        pool.together = together
        try:
            return pool.call(packed, limit, progress)
        except RankError as error:
            if not pool.in_step:
                self._give_up()
            raise error.with_traceback(None) from error.__cause__  # the message tells more than labkit's own frames
        except BaseException:
            self._give_up()
            raise
        finally:
            if not pool.ended:
                pool.replay()

    def __getitem__(self, name: str) -> RankValues:
        """Return what a cell of `%%ranks` assigned to `name`, by rank. Raises KeyError if a rank has no such name."""
        found = self.run(rank_cells.pull, name)
        if missing := [rank for rank, (known, _) in enumerate(found) if not known]:
            raise KeyError(f"no cell of %%ranks has assigned {name!r} on rank {', '.join(map(str, missing))}")
        return RankValues(value for _, value in found)

    def close(self) -> None:
        """End the ranks. Closing twice is fine; a later `run` starts new ones."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        assert self._finalizer is not None
        self._finalizer.detach()
        try:
            pool.stop()
            pool.replay()
        finally:
            _end(pool)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:  # no clean end: the ranks may not be in step
            self._give_up()
        self.close()

    def _started(self, variables: dict[str, str]) -> RankPool:
        if self._pool is not None and not self._pool.spec.folder.is_dir():  # a cleaner of temporary files was here
            self._give_up()
        if self._pool is None:
            if self._lost_state:
                print("labkit: new ranks started; what earlier calls left in memory is gone")
                self._lost_state = False
            if problem := info.loopback_problem() or machine.too_few_files(self.world_size):
                raise RankError(problem, ranks=[], kind="start")
            if warning := machine.crowding(self.world_size):
                print(warning, file=sys.stderr, flush=True)
            pool = RankPool(
                self.world_size, limit=self.timeout, group_timeout=self._group_timeout, variables=variables,
                **self._settings,
            )  # fmt: skip
            pool.patience = self._patience
            _pools.add(pool)
            self._pool, self._finalizer = pool, weakref.finalize(self, _end, pool)
            try:
                if _stop_asked:
                    pool.ask_to_stop(True)
                pool.start()
            except BaseException:
                self._give_up()
                raise
        return self._pool

    def _give_up(self) -> None:
        if isinstance(sys.exception(), KeyboardInterrupt) and sys.excepthook is sys.__excepthook__:
            sys.excepthook = _in_a_line
        pool, self._pool = self._pool, None
        if pool is None:
            return
        assert self._finalizer is not None
        self._finalizer.detach()
        self._lost_state = True
        try:
            pool.replay()
        finally:
            _end(pool)


def ask_to_stop(asked: bool = True) -> None:
    """Ask the ranks of all launches of this process to stop, including a launch that starts later.

    A function that does not look at `StatusSlot.asked_to_stop` just goes on. `asked=False` takes the request back. A
    signal handler may call this.
    """
    global _stop_asked
    _stop_asked = asked
    for pool in list(_pools):
        pool.ask_to_stop(asked)


def _in_a_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line instead of a traceback when Ctrl-C ends a script during a launch."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter ends undisturbed by further ones
    print(str(error) or "interrupted", file=sys.stderr)


def _end(pool: RankPool) -> None:
    pool.kill()
    pool.remove_folder()
    _pools.discard(pool)


@atexit.register
def _end_all() -> None:
    """End all ranks before multiprocessing's own exit handler, which would wait without end for a stopped rank.

    The fork server is ended too, since it notices the end of this process only after its imports.
    """
    for pool in list(_pools):
        with contextlib.suppress(Exception):
            _end(pool)
    forkserver.end()


def _check(
    world_size: int, backend: str, device: str, timeout: float | None, distributed_timeout_minutes: float | None
) -> None:
    """Reject impossible arguments before any process starts, with all problems in one error."""
    problems = []
    if not isinstance(world_size, int) or isinstance(world_size, bool):
        problems.append(f"world_size must be a whole number of ranks, got {world_size!r}")
    elif not 1 <= world_size <= MOST_RANKS and not info.under_torchrun():
        problems.append(
            f"world_size must be between 1 and {MOST_RANKS} processes on one machine, got {world_size}; "
            "plans for more ranks need no processes (labkit.parallel.RankGenerator)"
        )
    if backend not in info.BACKENDS:
        problems.append(f"backend must be one of {', '.join(info.BACKENDS)}, got {backend!r}")
    if device not in info.DEVICES:
        problems.append(f"device must be one of {', '.join(info.DEVICES)}, got {device!r}")
    if (backend, device) == ("nccl", "cpu"):
        problems.append("backend = nccl: it moves tensors of GPUs only, and device is cpu; set it to gloo")
    if timeout is not None and not (_is_number(timeout) and timeout > 0):
        problems.append(
            f"timeout must be a positive number of seconds, math.inf for no limit or None for the usual "
            f"{NOTEBOOK_LIMIT:g} in a notebook and {SCRIPT_LIMIT:g} elsewhere, got {timeout!r}"
        )
    minutes = distributed_timeout_minutes
    if minutes is not None and not (_is_number(minutes) and 0 < 60 * minutes <= _LONGEST):
        problems.append(
            f"distributed_timeout_minutes must be None or above 0 and at most {_LONGEST / 60:g}, got {minutes!r}"
        )
    if info.inside_rank() and not info.under_torchrun():
        problems.append("this process is a rank itself; a rank cannot launch ranks")
    if problems:
        raise ValueError("; ".join(problems))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_timeout(timeout: float) -> float:
    _check(1, "auto", "auto", timeout, None)
    return timeout


def _limit(timeout: float | None, distributed_timeout_minutes: float | None) -> float:
    """Return the seconds that a rank may wait for others."""
    if timeout is not None:
        return timeout
    if distributed_timeout_minutes is not None:
        return 60.0 * distributed_timeout_minutes
    return NOTEBOOK_LIMIT if _in_notebook() else SCRIPT_LIMIT


def _in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook; a script that a kernel starts is not."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _group_timeout(limit: float, distributed_timeout_minutes: float | None) -> float:
    """Return the seconds after which torch itself gives up a collective; `info.torch_timeout` has them end later."""
    if distributed_timeout_minutes is not None:
        return 60.0 * distributed_timeout_minutes
    return min(_LONGEST, limit if info.under_torchrun() else max(SCRIPT_LIMIT, limit))
