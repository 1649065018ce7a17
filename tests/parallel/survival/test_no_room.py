"""Row F8: where a checkpoint cannot be written, the run ends with the reason within a second; the one before stays."""

import errno
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import on_this_machine
from save_faults import SaveFault, calls_of_a_save, watched_run
from survival_runs import TINY, Course, complete_steps, saving

from labkit.launch import run

SOON = 1.0
"""Seconds from the beginning of the save to the error."""


def fail_in_save(counts, course: Course, folder: Path, fault: SaveFault, words: str) -> None:
    """The save after step 2 fails: all ranks say why, step 1 is as it was, and the run can be started again."""
    results = run(watched_run, course.ranks, course.copy(folder), fault)
    for result in results:
        assert "the checkpoint of step 2 could not be written" in result.error, result.error or "no error"
        assert f"rank {fault.rank}: " in result.error and words in result.error, result.error
        assert result.seconds < on_this_machine(SOON), f"the error came after {result.seconds:.2f} s"
        counts.saw("seconds until the error", result.seconds)
    left = complete_steps(folder)
    assert left and left[0] in (1, 2)
    if left == [1]:
        assert f"the last good one is {folder / 'step_00000001'}" in results[0].error, results[0].error
    if fault.prepare is no_descriptor and list(folder.glob(".step*.partial")):
        counts.counts["partial folders that the next run removed"] += 1  # a folder cannot be emptied without one
    else:
        assert not list(folder.glob(".step*.partial")), "the partial folder is still there"
    assert course.finish(saving(course.config, folder)) == left[0]


@pytest.mark.parametrize(
    ("code", "stride"),
    [
        (errno.ENOSPC, 8),
        pytest.param(errno.ENOSPC, 1, marks=pytest.mark.sweep),
        pytest.param(errno.EROFS, 1, marks=pytest.mark.sweep),
    ],
)
def test_the_disk_fails_at_each_call_of_a_save(tally, course, tmp_path, code, stride):
    """From the call on nothing can be made or written any more, as on a full disk; removing still works.

    stride: the short form tries every fourth call.
    """
    found, words = course("1 rank"), os.strerror(code)
    counts = tally("F8", f"every {'' if stride == 1 else 'fourth '}call of a save: {words.lower()}")
    calls, _ = calls_of_a_save(found, tmp_path / "listed")
    failing = [at for at, call in enumerate(calls) if call.split()[0] not in ("unlink", "rmdir") and "old" not in call]
    assert len(failing) > 8, calls
    for at in failing[::stride]:
        with counts.attempt(f"from call {at} on, {calls[at]}"):
            fail_in_save(counts, found, tmp_path / "run", SaveFault(2, at=at, errno=code), words)


Undo = Callable[[], None]


def no_large_file() -> Undo:
    """The system refuses files above 20 kB, as it would on a disk with so much room."""
    return limited(resource.RLIMIT_FSIZE, 20_000)


def no_descriptor() -> Undo:
    """The system opens no file any more."""
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    return limited(resource.RLIMIT_NOFILE, free)


def limited(kind: int, most: int) -> Undo:
    """Lower a limit of this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    return lambda: resource.setrlimit(kind, before)


def no_permission() -> Undo:
    """This process may not write into the folder: it is its owner's, or it is read-only."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        return lambda: os.seteuid(0)
    folder = os.environ["LABKIT_TEST_FOLDER"]
    os.chmod(folder, 0o555)
    return lambda: os.chmod(folder, 0o755)


REFUSALS = {
    no_large_file: "File too large",
    no_descriptor: "Too many open files",
    no_permission: "Permission denied",
}


@pytest.mark.parametrize("attempts", [1, pytest.param(10, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.__name__)
@pytest.mark.parametrize(("layout", "rank"), [("1 rank", 0), ("dp2 zero", 1)])
def test_the_system_refuses_to_write(tally, course, tmp_path, monkeypatch, layout, rank, refusal, attempts):
    counts, folder = tally("F8", f"{refusal.__name__.replace('_', ' ')}, {layout}"), tmp_path / "run"
    monkeypatch.setenv("LABKIT_TEST_FOLDER", str(folder))
    for number in range(attempts):
        with counts.attempt(f"{number}"):
            fail_in_save(counts, course(layout), folder, SaveFault(2, rank, prepare=refusal), REFUSALS[refusal])


@pytest.mark.parametrize("refused", ["rename", "rmdir"])
def test_an_old_checkpoint_that_cannot_be_removed_is_said_and_the_run_goes_on(
    course, tmp_path, monkeypatch, capfd, refused
):
    """The new checkpoint is complete. The next save tries to remove the old one again."""
    original, refusals = getattr(os, refused), []

    def refuse(path, *args, **named):
        if str(args[0] if args else path).endswith("step_00000001.old") and not refusals:
            refusals.append(path)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return original(path, *args, **named)

    found = course("1 rank")
    monkeypatch.setattr(os, refused, refuse)
    assert found.finish(found.copy(tmp_path / "run")) == 1
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be removed (Permission denied)" in line]
    assert len(said) == len(refusals) == 1 and "step_00000001" in said[0], said


SCRIPT = """
mount -t tmpfs -o size={size} none {folder} || exit 99
cd {folder}
{command}
code=$?
ls -A {folder} {folder}/* > {listing}
exit $code
"""


def in_a_small_disk(folder: Path, size: str, command: list[str]) -> tuple[int, str, str]:
    """Run a command whose folder is a disk of this size. Return exit code, output and what lay there at the end."""
    listing = folder.parent / "listing"
    script = SCRIPT.format(size=size, folder=folder, listing=listing, command=" ".join(command))
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, listing.read_text() if listing.exists() else ""


def why_no_small_disk(folder: Path) -> str:
    """Why this machine mounts no disk for a test; empty where it does."""
    try:
        code, said, _ = in_a_small_disk(folder, "1m", ["true"])
    except FileNotFoundError:
        return "there is no command unshare"
    return "" if code == 0 else f"no tmpfs can be mounted here: {said.strip()}"


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_a_disk_without_room_for_a_second_checkpoint(tally, tmp_path, ranks):
    """A real file system of 700 kB, and `labkit train` as a user starts it: one checkpoint has 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if reason := why_no_small_disk(folder):
        pytest.skip(reason)
    config = tmp_path / "config.yaml"
    config.write_text(saving(TINY, Path("checkpoints"), hidden=24, steps=9, keep=9).to_yaml())
    command = [sys.executable, "-m", "labkit", "train", "--config", str(config), "--nproc", str(ranks)]
    counts = tally("F8", f"a full disk (tmpfs), labkit train on {ranks} rank{'s' * (ranks > 1)}")
    with counts.attempt("a disk of 1500 kB"):
        code, said, left = in_a_small_disk(folder, "1500k", command)
        assert code == 1, said
        match = re.search(r"the checkpoint of step (\d) could not be written \(.*No space left on device", said)
        assert match and f"the last good one is checkpoints/step_0000000{int(match[1]) - 1}" in said, said
        assert "Traceback" not in said
        assert f"step_0000000{int(match[1]) - 1}" in left and "partial" not in left, left
