"""Rows F5 and F6: a checkpoint with any damage is refused by name, and a run goes on from the one before it."""

import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from damages import DAMAGED_FILES, FIRST, FORGED, SECOND, flip, header_of, names_step, read_content, write_content
from survival_runs import TINY, ZERO, saving

from labkit.config import ConfigError
from labkit.launch import run
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.train import pretrain
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.checkpoint.step_folders import latest_step, passed_over, step_folder
from labkit.train.loss_scaler import build_loss_scaler
from labkit.train.pretraining import initialize, setup_model_and_optimizer

pytestmark = pytest.mark.usefixtures("one_thread")
sweep = pytest.mark.sweep
STEP_1, STEP_2 = "step_00000001", "step_00000002"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoints of steps 1 and 2, each in two files."""
    folder = tmp_path_factory.mktemp("saved")
    run(pretrain, 2, saving(TINY, folder, **ZERO, steps=2, keep=2))
    return folder


@pytest.fixture(scope="module")
def losses(saved, tmp_path_factory) -> list[float]:
    """Steps 2 and 3 of one process that goes on after step 1."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(saved / STEP_1, folder / STEP_1)
    return pretrain(saving(TINY, folder)).losses


def resumes_from_the_one_before(folder: Path, losses: list[float], capfd) -> str:
    """The run goes on after step 1 and computes what it would without step 2. Return the words about step 2."""
    capfd.readouterr()
    result = pretrain(saving(TINY, folder, keep=9))
    assert result.resumed_after == 1, f"went on after step {result.resumed_after}"
    assert result.losses == losses
    assert Reader(folder / STEP_2).problems() == [], "step 2 is written anew"
    said = [line for line in capfd.readouterr().err.splitlines() if "damaged, so not used" in line]
    assert len(said) == 1 and STEP_2 in said[0] and STEP_1 not in said[0].replace(f"../{STEP_1}", ""), said
    return said[0]


KINDS = {"damaged files": DAMAGED_FILES, "forged manifests": FORGED}


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, id=f"{name}, counted", marks=sweep) for name in KINDS)])
def test_each_damage_is_refused_and_named_and_the_checkpoint_before_is_used(
    tally, saved, losses, tmp_path, capfd, name
):
    counts = tally("F6", name)
    for number, (damaged, (damage, words)) in enumerate(KINDS[name].items()):
        with counts.attempt(damaged):
            folder = tmp_path / str(number)
            shutil.copytree(saved, folder)
            damage(folder / STEP_2)
            try:
                said = resumes_from_the_one_before(folder, losses, capfd)
            except CheckpointError as error:  # nothing is damaged, but no run of this model can have written it
                said = str(error)
                assert KINDS[name] is FORGED and STEP_2 in said and STEP_1 not in said, said
            assert re.search(words, said), said


def test_nothing_is_half_loaded_when_every_checkpoint_is_damaged(saved, tmp_path):
    """The last tensor of each is damaged; neither weights nor moments of the run have changed."""
    shutil.copytree(saved, tmp_path / "run")
    for step in (STEP_1, STEP_2):
        flip(tmp_path / "run" / step / SECOND, -1)
    config = saving(TINY, tmp_path / "run")
    made = initialize(config)
    with made.groups:
        chunks, optimizer, _ = setup_model_and_optimizer(made)
        before = {name: p.detach().clone() for name, p in named_parameters(chunks).items()}
        with Checkpoints(config, made.groups, chunks, optimizer, say=print) as checkpoints:
            with pytest.raises(CheckpointError) as error:
                checkpoints.load(build_loss_scaler(config.optim))
            assert f"{STEP_1}/{SECOND}" in str(error.value) and f"{STEP_2}/{SECOND}" in str(error.value)
        assert all(torch.equal(before[name], p) for name, p in named_parameters(chunks).items())
        assert not any(optimizer.adamw.state[part.master] for part in optimizer.updated_parts())
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "latest", STEP_1, STEP_2]


def test_a_model_of_another_size_is_refused_before_any_rank_starts(saved):
    with pytest.raises(ConfigError, match=r"model\.hidden = 32: the checkpoint of step 2 has 16"):
        run(pretrain, 2, saving(TINY, saved, hidden=32))


# ---- latest ----


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (b"", 2),
        (b"step_00000002", 2),
        (b"step_00000003\n", 2),
        (b"step_00000001\n", 1),
        (b"step_00000000\n", 2),
        (b"../../etc/passwd\n", 2),
        (b"\xff\xfe\x00", 2),
        (b"step_" + b"9" * 5000, 2),
        (None, 2),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_any_text_in_latest_finds_a_complete_checkpoint(saved, losses, tmp_path, capfd, text, after):
    """Only a step that is there counts. A newer one is then not used, which is said."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "latest").unlink()
    if text is not None:
        (folder / "latest").write_bytes(text)
    result = pretrain(saving(TINY, folder))
    assert result.resumed_after == after
    assert (folder / "latest").read_text() == "step_00000003\n"
    said = f"not used, because {folder}/latest names an earlier checkpoint: step 2\n"
    assert (said in capfd.readouterr().err) == (after == 1)
    if after == 1:
        assert result.losses == losses


def test_a_named_checkpoint_that_is_gone_gives_way_to_the_one_before_it(tmp_path):
    """A run went on from step 10 and left 20 and 30 behind; its own step 15 was set aside for a better one."""
    for step in (10, 20, 30):
        step_folder(tmp_path, step).mkdir()
    (tmp_path / "latest").write_text("step_00000015\n")
    assert (latest_step(tmp_path), passed_over(tmp_path)) == (10, [20, 30])


# ---- single bits ----


def bits_of(folder: Path, count: int, seed: int) -> list[tuple[Path, int, int]]:
    """Random bits of a checkpoint: (file, byte, bit), each byte of all files as likely as the next."""
    chance = random.Random(seed)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = [path.stat().st_size for path in files]
    return [
        (file, chance.randrange(file.stat().st_size), chance.randrange(8))
        for file in chance.choices(files, sizes, k=count)
    ]


def tensor_at(file: Path, byte: int) -> str:
    """Name of the tensor in whose bytes this one lies, or `header`."""
    header = header_of(file)
    start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] <= byte - start < entry["data_offsets"][1]:
            return key.partition("@")[0]
    return "header"


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=sweep)])
def test_every_flipped_bit_is_found_and_its_tensor_named(tally, saved, losses, tmp_path, capfd, count):
    """Every twentieth also goes through a whole run, which must go on from the checkpoint before."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    counts = tally("F5", "a bit of a shard or the manifest")
    for number, (file, byte, bit) in enumerate(bits_of(folder / STEP_2, count, seed=count)):
        with counts.attempt(f"bit {bit} of byte {byte} of {file.name}"):
            place = tensor_at(file, byte) if file.name in (FIRST, SECOND) else "manifest"
            flip(file, byte, bit)
            try:
                found = Reader(folder / STEP_2).problems()
            except CheckpointError as error:
                found = [str(error)]
            assert len(found) == 1 and file.name in found[0], found
            assert place in found[0], f"{place}: {found}"
            counts.counts[
                "in the header" if place == "header" else "in the manifest" if place == "manifest" else "in a tensor"
            ] += 1
            if number % 20 == 0:
                shutil.copytree(folder, tmp_path / f"run {number}")
                resumes_from_the_one_before(tmp_path / f"run {number}", losses, capfd)
                counts.counts["resumed from the checkpoint before"] += 1
        if file.exists():
            flip(file, byte, bit)


# ---- any value anywhere ----


def places_in(content: object, path: tuple = ()) -> list[tuple]:
    """Paths of all values of a JSON object; of a list and of a large object only the first two."""
    found = [path] if path else []
    items = (
        list(content.items())
        if isinstance(content, dict)
        else list(enumerate(content))
        if isinstance(content, list)
        else []
    )
    for key, value in items[: 2 if len(path) > 0 else None]:
        found += places_in(value, (*path, key))
    return found


@pytest.mark.parametrize("value", [None, -1, 2**70, 1.5, "x", [], {}, [[]], True], ids=repr)
def test_a_forged_manifest_with_any_value_is_read_or_refused_in_words(saved, tmp_path, value):
    """No other exception than CheckpointError, whatever stands where, and no memory for a size that is only claimed."""
    folder = tmp_path / STEP_2
    shutil.copytree(saved / STEP_2, folder)
    content = read_content(folder)
    places = [place for place in places_in(content) if place[0] not in ("checksum", "config")]
    assert len(places) > 20
    for place in places:
        forgery = read_content(saved / STEP_2)
        inner = forgery
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        write_content(folder, forgery)
        try:
            found = Reader(folder).problems()
        except CheckpointError as error:
            found = [str(error)]
        assert all(map(names_step, found)), (place, found)
