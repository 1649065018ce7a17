"""One process that has imported torch and waits, so that a rank is a fork of it: milliseconds instead of a second.

It is the standard library's fork server with three differences. First, labkit has its own instance, so no other user of
`multiprocessing` decides on its imports. Second, a rank never imports the caller's `__main__`, so a script needs no
`if __name__ == "__main__":` guard. Third, the server starts with SIGINT and SIGTERM blocked: Jupyter interrupts the
whole process group, and a scheduler signals every process of a job. The server must not die of that before its ranks.

The first launch starts the server, which ends together with the process that started it. Its socket is in a
`LaunchFolder`. If that process is killed, as Jupyter does with a kernel, the server removes the folder (`preloaded`).
"""

from __future__ import annotations

import io
import os
import signal
from multiprocessing import popen_forkserver, process, reduction, resource_tracker, spawn
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from multiprocessing.forkserver import ForkServer, read_signed
from multiprocessing.util import Finalize
from typing import Any

from labkit.launch.folders import SERVER_PREFIX, LaunchFolder, parent_of_sockets

_server = ForkServer()
_modules = ["labkit.launch.preloaded"]
"""What the server imports, in this order."""
_server.set_forkserver_preload(_modules)
_started_by = 0
"""The process that started the server."""
_folder: LaunchFolder | None = None
"""The folder with the server's socket."""


def preload(*modules: str) -> None:
    """Have the fork server import `modules` once, so that no rank has to. Call it before the first launch.

    The modules must not start threads or touch a GPU when imported, since neither survives a fork.

    Raises:
        RuntimeError: the server runs already.
    """
    if _server._forkserver_pid is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise RuntimeError("the fork server already runs: call preload() before the first run() or Ranks()")
    _modules.extend(module for module in modules if module not in _modules)


def ensure_running() -> None:
    """Start the server if it does not run yet; a later launch then does not wait for the import of torch."""
    global _started_by, _folder
    if _server._forkserver_pid is None:  # pyright: ignore[reportAttributeAccessIssue]
        _started_by = os.getpid()
        _folder = LaunchFolder(SERVER_PREFIX, parent_of_sockets())
    if not hasattr(signal, "pthread_sigmask"):
        _ensure_running()
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()  # else the server starts it, and it unblocks SIGINT (CPython 3.11)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        _ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ensure_running() -> None:
    """Call `ForkServer.ensure_running`, but let it make the socket in our folder instead of multiprocessing's own."""
    config: dict[str, Any] = process.current_process()._config  # pyright: ignore[reportAttributeAccessIssue]
    before, config["tempdir"] = config.get("tempdir"), str(_folder.path) if _folder else None
    try:
        _server.ensure_running()
    finally:
        config["tempdir"] = before


def end() -> None:
    """End the server if this process started it, even if the server still imports. Its ranks must have ended."""
    pid = _server._forkserver_pid  # pyright: ignore[reportAttributeAccessIssue]
    if pid is not None and _started_by == os.getpid():  # not a fork of the process
        os.kill(pid, signal.SIGKILL)
        _server._stop()  # pyright: ignore[reportAttributeAccessIssue]
        if _folder is not None:
            _folder.remove()


class _Popen(popen_forkserver.Popen):
    """Popen of the standard library, but through labkit's server and without the data about `__main__`."""

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
        # It stays open as long as this process lives; its closing ends the rank.
        lifeline = os.dup(writer)
        self.finalizer = Finalize(self, _close, (lifeline, self.sentinel))
        try:
            with open(writer, "wb", closefd=True) as file:
                file.write(buffer.getbuffer())
            self.pid = read_signed(self.sentinel)
        except BaseException:  # interrupted: a rank that is forked nevertheless finds its lifeline closed, and ends
            self.finalizer()
            raise


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RankProcess(ForkServerProcess):
    """A `multiprocessing.Process` forked from labkit's server.

    multiprocessing does not list it among its children. It polls these whenever a thread starts a process, so two
    launches in two threads would read each other's exit codes. It also waits for them when the interpreter exits.
    """

    def start(self) -> None:
        """Fork the process."""
        self._popen = self._Popen(self)
        self._sentinel = self._popen.sentinel

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)
