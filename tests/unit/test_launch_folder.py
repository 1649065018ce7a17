"""A launch's folder is private, goes with the launch, and is swept up after a process that was killed."""

import pytest

from labkit.launch import folders
from labkit.launch.folders import LaunchFolder, sweep


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    return tmp_path


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
    for name in ("labkit-launch-17-abcd_123", "labkit-run-18-abcd_123"):
        (temporary / name).mkdir()
        (temporary / name / "result-0-0").write_text("x")
    foreign = temporary / "labkit-launch-17-my-own-notes"
    foreign.mkdir()
    file = temporary / "labkit-launch-19-abcd_123"
    file.write_text("no folder")
    owned = LaunchFolder()
    sweep(temporary)
    assert {path.name for path in temporary.iterdir()} == {foreign.name, file.name, owned.path.name}
    owned.remove()


def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(temporary, monkeypatch):
    made = []

    def swept_at_once(**where):
        made.append(mkdtemp(**where))
        if len(made) < 3:
            sweep(temporary)
        return made[-1]

    mkdtemp = folders.tempfile.mkdtemp
    monkeypatch.setattr(folders.tempfile, "mkdtemp", swept_at_once)
    owned = LaunchFolder()
    assert [str(owned.path)] == made[2:] and owned.path.is_dir()
    owned.remove()
