"""The kernel that runs a chapter. Its sockets are in a private folder, and it ends when `labkit run` ends.

By default Jupyter opens sockets on ports, which any user of the machine can reach. It can also make them files in the
working directory, but two runs may share that. So here they are files in a folder of this run alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from jupyter_client.manager import AsyncKernelManager
from traitlets.config import Config

from labkit.launch.folders import RUN_PREFIX, LaunchFolder, parent_of_sockets, sweep_all
from labkit.launch.processes import kill_family, kill_group_at_close

PATIENCE = 1.5
"""Seconds that an interrupted cell gets to end its ranks and remove their folder."""


class ChapterKernel:
    """The kernel that papermill starts, and how Ctrl-C ends it.

    A KeyboardInterrupt in the middle of asyncio would leave tasks behind, whose tracebacks reach the screen. So Ctrl-C
    only signals the kernel. The running cell then fails with KeyboardInterrupt, which papermill stores before it stops.
    """

    def __init__(self, folder: Path) -> None:
        self.interrupted = False
        self.options: dict[str, Any] = {
            "config": Config({"KernelManager": {
                "transport": "ipc", "ip": str(folder / "s"), "connection_file": str(folder / "kernel.json")}}),
            "kernel_manager_class": self._manager_class(),
            "on_notebook_start": self._is_ready,
        }  # fmt: skip
        """Arguments of `papermill.execute_notebook`."""
        self._words = folder / "words"
        self._pid: int | None = None
        self._ready = False
        self._alive_end = -1
        """Writing end of a pipe. When this process ends, the system closes the pipe, and that ends the kernel."""

    def _manager_class(self) -> type[AsyncKernelManager]:
        kernel = self

        class PrivateKernelManager(AsyncKernelManager):
            async def start_kernel(self, **options: Any) -> None:
                kernel_end, kernel._alive_end = os.pipe()
                with kernel._words.open("wb") as words:
                    await super().start_kernel(**options, stdout=words, stderr=words, pass_fds=(kernel_end,))
                kernel._pid = pid = int(self.provisioner.pid)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
                kill_group_at_close(kernel_end, pid)
                os.close(kernel_end)
                self.shutdown_wait_time = 2 * PATIENCE
                if kernel.interrupted:
                    kernel.kill()

        return PrivateKernelManager

    def _is_ready(self, **_: Any) -> None:
        self._ready = True

    def interrupt(self, _number: int = signal.SIGINT, _frame: FrameType | None = None) -> None:
        """End the running cell. Kill the kernel if it is still starting, if the cell does not end soon, or at a second
        Ctrl-C."""
        again, self.interrupted = self.interrupted, True
        logging.disable(logging.CRITICAL)  # Jupyter would report the dead kernel
        if self._pid is None:
            return
        if again or not self._ready:
            self.kill()
        else:
            os.kill(self._pid, signal.SIGINT)
            late = threading.Timer(PATIENCE, self.kill)
            late.daemon = True
            late.start()

    def kill(self) -> None:
        """End the kernel now, with its ranks."""
        if self._pid is not None:
            kill_family(self._pid)

    def last_words(self) -> str:
        """Return the last lines that the kernel itself printed, indented. The output of cells is in the notebook."""
        printed = self._words.read_text(errors="replace") if self._words.exists() else ""
        return "".join(f"\n  {line}" for line in printed.splitlines()[-4:])

    def close(self) -> None:
        """Close the pipe, which ends the kernel."""
        if self._alive_end >= 0:
            os.close(self._alive_end)
            self._alive_end = -1


@contextlib.contextmanager
def chapter_kernel() -> Iterator[ChapterKernel]:
    """Make a kernel that Ctrl-C ends, in a private folder that is removed with it."""
    folder = LaunchFolder(RUN_PREFIX, parent_of_sockets())
    kernel = ChapterKernel(folder.path)
    before = signal.signal(signal.SIGINT, kernel.interrupt)
    try:
        yield kernel
    finally:
        kernel.close()
        folder.remove()
        sweep_all()  # Jupyter sends SIGTERM to a kernel with children, which leaves the folders of launches
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGINT, before)
