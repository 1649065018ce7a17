"""A disk in memory that stops at a chosen operation, and what is found on it then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class Cut(BaseException):
    """The process is killed, or the power fails."""


@dataclass
class _File:
    data: bytes = b""
    kept: bytes = b""
    """What is on the disk for sure."""


@dataclass
class _Folder:
    files: dict[str, _File] = field(default_factory=dict)
    kept: dict[str, _File] = field(default_factory=dict)
    """Names that are on the disk for sure."""


View = Mapping[str, Mapping[str, bytes]]
"""Folder -> file -> its bytes."""


class Disk:
    """A disk with folders of files, which stops at a chosen operation.

    What is written or renamed is seen by every process at once. Bytes of a file are on the disk for sure after `sync`
    of the file, and names in a folder after `sync` of the folder; "." is the folder of folders.
    """

    def __init__(self, cut_at: int = 0) -> None:
        """cut_at: which operation is not completed; 0 completes all."""
        self.top: dict[str, _Folder] = {}
        self.kept: dict[str, _Folder] = {}
        self.operations = self.syncs = 0
        self.cut_at = cut_at

    def _begin(self) -> None:
        self.operations += 1
        if self.operations == self.cut_at:
            raise Cut

    def make(self, folder: str) -> None:
        """Make a folder. Raises FileExistsError."""
        self._begin()
        if folder in self.top:
            raise FileExistsError(f"{folder} is there already")
        self.top[folder] = _Folder()

    def write(self, path: str, data: bytes) -> None:
        """Write `folder/file`; cut off, it has written half of it."""
        folder, _, file = path.partition("/")
        if folder not in self.top or not file:
            raise FileNotFoundError(f"{path}: make the folder first, and write folder/file")
        made = self.top[folder].files[file] = _File(data[: len(data) // 2])
        self._begin()
        made.data = data

    def sync(self, path: str) -> None:
        """Bring the bytes of `folder/file`, or the names in a folder, to the disk."""
        folder, _, file = path.partition("/")
        if path != "." and (folder not in self.top or (file and file not in self.top[folder].files)):
            raise FileNotFoundError(f"{path} is not there")
        self._begin()
        self.syncs += 1
        if path == ".":
            self.kept = dict(self.top)
        elif file:
            self.top[folder].files[file].kept = self.top[folder].files[file].data
        else:
            self.top[folder].kept = dict(self.top[folder].files)

    def rename(self, old: str, new: str) -> None:
        """Give a folder another name, at once. Raises FileExistsError and FileNotFoundError."""
        if old not in self.top:
            raise FileNotFoundError(f"{old} is not there")
        if new in self.top:
            raise FileExistsError(f"{new} is there already")
        self._begin()
        self.top[new] = self.top.pop(old)

    def after_kill(self) -> View:
        """What another process sees."""
        return {name: {file: one.data for file, one in folder.files.items()} for name, folder in self.top.items()}

    def names_first(self) -> View:
        """After a power cut: all names had reached the disk, and of bytes only what was synced."""
        return {name: {file: one.kept for file, one in folder.files.items()} for name, folder in self.top.items()}

    def synced_only(self) -> View:
        """After a power cut: nothing had reached the disk but what was synced."""
        return {name: {file: one.kept for file, one in folder.kept.items()} for name, folder in self.kept.items()}
