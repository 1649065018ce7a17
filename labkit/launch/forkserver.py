"""One process that has imported torch and waits; every rank is a fork of it, which takes milliseconds, not a second.

It is the standard library's fork server with three differences. It is labkit's own instance, so that no other user of
`multiprocessing` decides what it has imported. A rank never imports the caller's `__main__`, so a script needs no
`if __name__ == "__main__":` guard. And it is started with SIGINT blocked, because Jupyter interrupts the whole process
group and a rank must not die of it before it can say anything.

The server is started by the first launch and ends by itself when the process that started it does.
"""

from __future__ import annotations

import io
import os
import signal
from multiprocessing import popen_forkserver, reduction, resource_tracker, spawn
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.util import Finalize
from typing import Any

_server = ForkServer()
_modules = ["labkit.launch.preloaded"]
"""Imported in this order; `preloaded` stays the last, since it freezes what has been imported before it."""
_server.set_forkserver_preload(_modules)


def preload(*modules: str) -> None:
    """Have the fork server import `modules` too, once instead of in every rank; call it before the first launch.

    They must not start threads or touch a GPU when imported, since neither survives a fork.
    """
    if _server._forkserver_pid is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError("the fork server already runs: call preload() before the first run() or Ranks()")
    _modules[-1:-1] = [module for module in modules if module not in _modules]


def ensure_running() -> None:
    """Start the server unless it runs; a later launch then does not wait for the import of torch."""
    if not hasattr(signal, "pthread_sigmask"):
        _server.ensure_running()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # which the server would start first, and which unblocks SIGINT (CPython 3.11)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        _server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Popen(popen_forkserver.Popen):
    """As in the standard library, through our server and without a word about `__main__`."""

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj._name)
        for key in ("init_main_from_name", "init_main_from_path"):
            preparation.pop(key, None)
        buffer = io.BytesIO()
        set_spawning_popen(self)  # pyright: ignore[reportArgumentType]
        try:
            reduction.dump(preparation, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            set_spawning_popen(None)
        ensure_running()
        descriptors: list[int] = self._fds  # pyright: ignore[reportAttributeAccessIssue]
        self.sentinel, writer = _server.connect_to_new_process(descriptors)
        # Stays open as long as this process lives: its closing is the signal by which a rank dies with us.
        lifeline = os.dup(writer)
        self.finalizer = Finalize(self, _close, (lifeline, self.sentinel))
        try:
            with open(writer, "wb", closefd=True) as file:
                file.write(buffer.getbuffer())
            self.pid = read_signed(self.sentinel)
        except BaseException:  # interrupted: a rank that is forked after all finds its lifeline cut, and ends
            self.finalizer()
            raise


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RankProcess(ForkServerProcess):
    """A `multiprocessing.Process` forked from labkit's server.

    It is not entered among multiprocessing's children. Those are polled whenever any thread starts a process, and two
    launches in two threads would read each other's exit codes; and they are waited for when the interpreter exits.
    """

    def start(self) -> None:
        """Fork it."""
        self._popen = self._Popen(self)
        self._sentinel = self._popen.sentinel

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)
