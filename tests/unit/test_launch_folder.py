"""A launch's folder is private, goes with the launch, and is swept up after a process that was killed."""

import os
import time

import pytest

from labkit.launch import folder
from labkit.launch.folder import LaunchFolder, sweep


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(folder.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path):
    old = time.time() - 3600
    os.utime(path, (old, old))
    return path


def test_private_and_removed_with_its_content(temporary):
    made = LaunchFolder()
    assert made.path.parent == temporary
    assert made.path.stat().st_mode & 0o077 == 0
    (made.path / "result").write_text("x")
    made.remove()
    made.remove()
    assert list(temporary.iterdir()) == []


def test_two_launches_never_share(temporary):
    first, second = LaunchFolder(), LaunchFolder()
    assert first.path != second.path
    first.remove()
    assert second.path.is_dir()
    second.remove()


def test_sweeping_takes_what_has_no_owner_and_nothing_else(temporary):
    abandoned = temporary / "labkit-launch-17-abcd_123"
    abandoned.mkdir()
    (abandoned / "result-0-0").write_text("x")
    fresh = temporary / "labkit-launch-18-abcd_123"
    fresh.mkdir()
    foreign = temporary / "labkit-launch-17-my-own-notes"
    foreign.mkdir()
    aged(foreign)
    file = temporary / "labkit-launch-19-abcd_123"
    file.write_text("no folder")
    aged(file)
    owned = LaunchFolder()
    aged(abandoned)
    aged(owned.path)
    sweep(temporary)
    assert {path.name for path in temporary.iterdir()} == {fresh.name, foreign.name, file.name, owned.path.name}
    owned.remove()
