"""`labkit checkpoint`: the words of list and verify, damage that verify names, requests that are refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.config import ConfigError, presets
from labkit.models import build_model_chunks
from labkit.parallel import single_process_groups
from labkit.train import pretrain
from labkit.train.checkpoint.exchange import import_weights
from labkit.train.checkpoint.manifest import CheckpointError, read_manifest, write_manifest
from labkit.train.checkpoint.rank_state import RankWeights
from labkit.train.checkpoint.resume import problems, to_try
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.run_folder.claim import RunFolder, folder_problems

MODEL = {"hidden": 32, "heads": 4, "layers": 2, "seq_length": 16, "global_batch_size": 2}
RESUMED = presets.tiny().override(MODEL | {"steps": 5, "eval_steps": 0, "optim.precision": "bf16"})
NAME = "layers.1.mlp.fc2.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of four steps in one process."""
    folder = tmp_path_factory.mktemp("run") / "ckpt"
    pretrain(RESUMED.override({"steps": 4, "checkpoint.dir": str(folder), "checkpoint.interval": 2}))
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_list_has_a_line_for_each_checkpoint(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(saved)]) == 0
    line = r"step_0000000{}  \d{{3}}\.\d kB  1 rank  bf16  \d{{4}}-\d\d-\d\d \d\d:\d\d  complete{}"
    expected = [line.format(2, ""), line.format(4, ", latest")]
    heads, *lines = capsys.readouterr().out.splitlines()
    assert heads.split() == ["checkpoint", "size", "layout", "type", "written", "state"]
    assert len(lines) == 2 and all(re.fullmatch(*pair) for pair in zip(expected, lines)), lines
    assert main(["checkpoint", "list", str(saved / "step_00000002")]) == 0
    assert re.fullmatch(expected[0], capsys.readouterr().out.splitlines()[1])


def test_list_follows_latest_and_sees_files_that_are_missing_or_cut(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "latest").write_text("step_00000002\n")
    (run / "step_00000004" / "rank_00000.safetensors").write_bytes(b"1234")
    shutil.copytree(run / "step_00000002", run / "step_00000003")
    shutil.copytree(run / "step_00000002", run / "step_00000005")
    (run / "step_00000005" / "manifest.json").unlink()
    assert main(["checkpoint", "list", str(run)]) == 0
    _, second, third, fourth, fifth = capsys.readouterr().out.splitlines()
    assert second.endswith("complete, latest")
    assert "damaged: " in third and "its manifest is from step 2" in third
    assert re.search(r"damaged: rank_00000\.safetensors has 4 bytes where \d+,\d+ were written$", fourth)
    assert re.match("step_00000005 +damaged: ", fifth) and "has no manifest.json" in fifth


@pytest.mark.parametrize(
    ("parallel", "world_size", "words"),
    [
        ({"tp": 2, "cp": 1, "pp": 2, "vpp": 2, "ep": 1, "etp": None}, 8, "8 ranks: tp2 x pp2 x dp2 x vpp2"),
        ({"tp": 1, "cp": 2, "pp": 1, "vpp": 1, "ep": 4, "etp": 1}, 4, "4 ranks: cp2 x dp2 x ep4"),
    ],
)
def test_a_layout_in_words(parallel: dict, world_size: int, words: str) -> None:
    from labkit.train.checkpoint.inventory import layout_words
    from labkit.train.checkpoint.manifest import Manifest

    assert layout_words(Manifest(1, {}, {}, {}, {"parallel": parallel}, world_size, {})) == words


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (10**6, "1.0 MB"),
        (1_340_000, "1.3 MB"),
        (94 * 10**9, "94.0 GB"),
    ],
)
def test_a_size_in_words(size: int, words: str) -> None:
    from labkit.train.checkpoint.inventory import size_words

    assert size_words(size) == words


IN_THE_WAY = {
    "latest": "file", ".lock": "file", ".latest.partial": "file", ".step_00000005.partial": "folder"
}  # fmt: skip
"""Name in a folder of checkpoints -> what a run expects or makes under that name."""


@pytest.mark.parametrize("other", ["the other kind", "a link", "a pipe"])
@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_of_a_save_is_seen_before_a_run_starts(run: Path, name: str, other: str) -> None:
    """And once more in the ranks, which torchrun may have started. What is there stays."""
    kind, place = IN_THE_WAY[name], run / name
    place.unlink(missing_ok=True)
    if other == "a pipe":
        os.mkfifo(place)
    elif other == "a link":
        place.symlink_to(run)
    elif kind == "file":
        place.mkdir()
    else:
        place.write_text("mine")
    config, before = RESUMED.override({"checkpoint.dir": str(run)}), os.lstat(place)
    problem = f"checkpoint.dir = {str(run)!r}: {name} in it is not a {kind}, and a run writes one there"
    assert [found.partition(";")[0] for found in folder_problems(config)] == [problem]
    with pytest.raises(ConfigError, match=re.escape(problem)):
        RunFolder(config, 1).claim()
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} in it is not a {kind}"):
        import_weights(None, run)  # type: ignore[arg-type] # refused before the weights are looked at
    assert os.path.samestat(before, os.lstat(place))


def test_a_step_that_is_a_link_is_resumed_and_only_the_link_is_removed(run: Path, tmp_path: Path) -> None:
    elsewhere = {step: tmp_path / f"{step}" for step in (2, 4)}
    for step, folder in elsewhere.items():
        (run / f"step_{step:08d}").rename(folder)
        (run / f"step_{step:08d}").symlink_to(folder)
    (run / ".step_00000001.old").symlink_to(tmp_path / "nowhere")  # as earlier versions left them
    result = pretrain(RESUMED.override({"checkpoint.dir": str(run), "checkpoint.keep": 1}))
    assert result.resumed_after == 4
    assert sorted(path.name for path in run.iterdir()) == [".lock", "latest", "step_00000005"]
    assert all((folder / "manifest.json").exists() for folder in elsewhere.values())


def test_a_run_ends_what_another_one_began_and_says_what_it_cannot_remove(
    run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill came between the two renames of a save of step 2; the run itself has no step left and saves nothing."""
    (run / ".latest.partial").write_text("step_00000002\n")
    for name in (".step_00000001.old", ".step_00000006.partial"):
        (run / name).mkdir()
    remove = shutil.rmtree

    def refuse(path: Path, *given: object, **named: object) -> None:
        if Path(path).suffix == ".old":
            raise PermissionError(errno.EACCES, "Permission denied")
        remove(path, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(shutil, "rmtree", refuse)
    result = pretrain(RESUMED.override({"checkpoint.dir": str(run), "steps": 2}))
    assert (result.resumed_after, result.losses) == (2, [])
    left = [".lock", ".step_00000001.old", "latest", "step_00000002", "step_00000004"]
    assert sorted(path.name for path in run.iterdir()) == left
    assert (run / "latest").read_text() == "step_00000002\n"
    assert f"{run}/.step_00000001.old cannot be removed (Permission denied)" in capfd.readouterr().err


@pytest.mark.parametrize("missing", [0, 3, 5])
def test_tensors_that_do_not_fit_are_named_up_to_five(missing: int, saved: Path) -> None:
    groups = single_process_groups()
    model, reader = RankWeights(build_model_chunks(RESUMED, groups), groups), Reader(saved / "step_00000004")
    assert model.misfits(reader) == ""
    tensors, norm, table = reader.manifest.tensors, "final_norm.weight", "embedding.position.weight"
    tensors[norm], tensors[table] = tensors[table], tensors[norm]
    for name in [name for name in tensors if name.startswith("layers.")][:missing]:
        del tensors[name]
    words = model.misfits(reader)
    assert words.startswith(
        f"{reader.folder} does not fit the model: {table} has shape [32], the model's is [16, 32]; "
    )
    assert words.count(" is missing") == (4 if missing == 5 else missing)
    assert (f"{norm} has shape [16, 32], the model's is [32]; load a" in words) == (missing < 5)
    assert ("is missing; and 2 more; load a checkpoint of this model" in words) == (" more" in words) == (missing == 5)


def test_a_run_in_fp8_finds_its_history_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = RESUMED.override({"checkpoint.dir": str(tmp_path), "checkpoint.keep": 9})
    for fp8, steps, anew in (("hybrid", 1, False), ("hybrid", 2, False), ("none", 3, False), ("hybrid", 4, True)):
        pretrain(config.override({"optim.fp8": fp8, "steps": steps}))
        stored = read_manifest(tmp_path / f"step_{steps:08d}").tensors
        assert any(name.startswith("fp8.layers.0.") for name in stored) == (fp8 == "hybrid")
        said = "the checkpoint has no fp8 history for this model, so the history starts anew"
        assert (said in capfd.readouterr().err) == anew


def test_list_needs_no_torch(saved: Path) -> None:
    code = (
        "import sys; from labkit.cli import main;"
        f"main(['checkpoint', 'list', {str(saved)!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] and done.stdout.splitlines()[-1] == "False"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def flip_a_bit_of(name: str, step: Path) -> None:
    """In the last byte of a tensor."""
    path = step / "rank_00000.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    flip(path, 8 + length + header[f"{name}@0,0"]["data_offsets"][1] - 1)


def replace(text: bytes, by: bytes) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        data = (step / "manifest.json").read_bytes()
        assert text in data
        (step / "manifest.json").write_bytes(data.replace(text, by, 1))

    return change


FILE = "step_00000002/rank_00000.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight": (lambda s: flip_a_bit_of(NAME, s), f"{FILE}: {NAME} at [0, 0] is not what was written (checksum)"),
    "a moment": (lambda s: flip_a_bit_of(f"exp_avg.{NAME}", s), f"{FILE}: exp_avg.{NAME} at [0, 0] is not what"),
    "the header": (lambda s: flip(s / "rank_00000.safetensors", 20), f"{FILE}: the header is not the one"),
    "the length of the header": (lambda s: flip(s / "rank_00000.safetensors", 7), f"{FILE}: the header is not the one"),
    "a cut file": (
        lambda s: (s / "rank_00000.safetensors").write_bytes((s / "rank_00000.safetensors").read_bytes()[:-1]),
        f"{FILE} has ",
    ),
    "no file": (lambda s: (s / "rank_00000.safetensors").unlink(), f"{FILE} is missing"),
    "no manifest": (lambda s: (s / "manifest.json").unlink(), "step_00000002: has no manifest.json"),
    "a folder in its place": (
        lambda s: ((s / "manifest.json").unlink(), (s / "manifest.json").mkdir()),
        "step_00000002/manifest.json cannot be read: Is a directory",
    ),
    "the manifest": (replace(b'"step": 2', b'"step": 3'), "step_00000002/manifest.json is damaged: its checksum"),
    "the manifest's checksum": (lambda s: flip(s / "manifest.json", 14), "step_00000002/manifest.json is damaged"),
    "a foreign file": (
        lambda s: (s / "rank_00001.safetensors").write_bytes(b""),
        "step_00000002/rank_00001.safetensors does not belong to the checkpoint",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_names_what_is_damaged(damage: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hurt, words = DAMAGE[damage]
    hurt(run / "step_00000002")
    for place in (run, run / "step_00000002"):
        assert main(["checkpoint", "verify", str(place)]) == 1
        out, err = capsys.readouterr()
        assert err.startswith("labkit checkpoint: 1 problem\n") and words in err and err.count("\n") == 2
        assert f"{run / 'step_00000002'}: damaged\n" in out
        assert ("step_00000004: good, 1 file, " in out) == (place == run)


def test_verify_counts_what_is_good_and_mentions_what_was_cut_off(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / ".step_00000006.partial").mkdir()
    (run / ".step_00000006.partial" / "rank_00000.safetensors").write_bytes(b"12")
    assert main(["checkpoint", "verify", str(run)]) == 0
    out, err = capsys.readouterr()
    tensors = json.loads((run / "step_00000004" / "manifest.json").read_text())["tensors"]
    assert len([name for name in tensors if name.startswith("exp_avg_sq.")]) > 20
    assert f"step_00000004: good, 1 file, {len(tensors)} tensors with the optimizer's state, " in out and err == ""
    assert ".step_00000006.partial: a checkpoint that was never finished" in out


def test_a_count_whose_double_is_no_int64_is_refused(run: Path) -> None:
    """torch and numpy count in int64, and places are added to sizes."""
    step = run / "step_00000004"
    for samples in (2**62 - 1, 2**62):
        stored = read_manifest(step)
        stored.training["consumed_samples"] = samples
        write_manifest(step, stored)
    with pytest.raises(CheckpointError, match=f"not a manifest of labkit .{2**62} is not a count"):
        read_manifest(step)


BEGINS: list[tuple[str | None, str | None, list[str] | str]] = [
    (None, None, []),
    (None, "none", []),
    (None, "latest", "checkpoint.load = 'latest': the run has no folder of checkpoints; set checkpoint.dir to a"),
    (None, "RUN", ["step_00000004", "step_00000002"]),
    (None, "RUN/step_00000002", ["step_00000002"]),
    (None, "EMPTY", "EMPTY' holds no checkpoint; name the folder of a run, one with"),
    ("EMPTY", None, []),
    ("EMPTY", "none", []),
    ("EMPTY", "EMPTY", []),
    ("EMPTY", "OTHER", "OTHER' holds no checkpoint; name the folder of a run, one with"),
    ("EMPTY", "latest", "EMPTY holds no checkpoint; set checkpoint.dir to a"),
    ("EMPTY", "RUN/step_00000002", ["step_00000002"]),
    ("RUN", None, ["step_00000004", "step_00000002"]),
    ("RUN", "none", "the checkpoints of another, step_00000004 the latest; name another folder, or remove"),
    ("RUN", "latest", ["step_00000004", "step_00000002"]),
    ("RUN", "RUN", ["step_00000004", "step_00000002"]),
    ("RUN", "RUN/step_00000002", ["step_00000002"]),
    ("RUN", "EMPTY", ["step_00000004", "step_00000002"]),
]
"""checkpoint.dir, checkpoint.load, and where a run begins, or why it does not."""


@pytest.mark.parametrize(("own", "load", "expected"), BEGINS, ids=lambda value: str(value)[:20])
def test_where_a_run_begins(own: str | None, load: str | None, expected: list[str] | str, saved: Path) -> None:
    empty, other = saved.parent / "EMPTY", saved.parent / "OTHER"
    empty.mkdir(exist_ok=True)
    other.mkdir(exist_ok=True)
    given = {"checkpoint.dir": own, "checkpoint.load": load}
    places = {"RUN": str(saved), "EMPTY": str(empty), "OTHER": str(other)}
    config = RESUMED.override({k: v and re.sub("RUN|EMPTY|OTHER", lambda m: places[m[0]], v) for k, v in given.items()})
    if isinstance(expected, list):
        assert [path.name for path in to_try(config)] == expected and problems(config) == []
    else:
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            to_try(config)
        assert [expected in problem for problem in problems(config)] == [True]


REQUESTS = [
    ("", "no action named; give one of list, verify, export, import"),
    (
        "lst DIR",
        "there is no such action; give one of list, verify, export, import, push, pull, as in labkit checkpoint",
    ),
    ("list", "list takes DIR, got 0 words"),
    ("export DIR", "export takes DIR OUT, got 1 word"),
    ("verify DIR --step 2", "--step: verify does not read it; leave it out"),
    ("list DIR --overwrite --dtype fp32", "--dtype: list does not read it"),
    ("export DIR DIR/../x --dtype fp8", "--dtype 'fp8': must be one of fp32, bf16, fp16"),
    ("export DIR DIR/../x --step -1", "--step -1: must be at least 0"),
    ("export DIR DIR/../x --step 3", "has no checkpoint of step 3; it has step_00000002, step_00000004"),
    ("list EMPTY", "holds no checkpoint; give the folder of a run, one with step_00000001"),
    ("verify EMPTY", "holds no checkpoint"),
    ("export EMPTY x.safetensors", "holds no checkpoint"),
    ("verify EMPTY/nothing", "is not a folder; give the folder of a run or of its checkpoints, or one step"),
    ("list DIR/latest", "is not a folder"),
    ("export DIR nowhere/x.safetensors", "there is no folder 'nowhere'; make it first"),
    ("export DIR DIR/latest", "is a file; give a folder, or a name that ends with .safetensors"),
    ("export DIR DIR/step_00000002/x.safetensors", "is inside a checkpoint, whose files must not change"),
    ("export DIR DIR/step_00000002", "is inside a checkpoint, whose files must not change"),
    ("export DIR EMPTY/there.safetensors", "exists; --overwrite replaces it"),
    ("import DIR/latest EMPTY", "is a file; give a folder"),
]


@pytest.mark.parametrize(("line", "words"), REQUESTS, ids=[line for line, _ in REQUESTS])
def test_wrong_requests_are_refused(
    line: str, words: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.safetensors").write_bytes(b"kept")
    places = {"DIR": str(saved), "EMPTY": str(tmp_path)}
    given = [re.sub("DIR|EMPTY", lambda match: places[match[0]], word) for word in line.split()]
    assert main(["checkpoint", *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("labkit checkpoint: ") and words in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]


def test_an_export_of_a_damaged_checkpoint_is_refused_and_another_step_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_bit_of(NAME, run / "step_00000004")
    assert main(["checkpoint", "export", str(run), str(tmp_path / "hf")]) == 1
    err = capsys.readouterr().err
    assert f"step_00000004/rank_00000.safetensors: {NAME} at [0, 0]" in err and "checkpoint with --step" in err
    assert not (tmp_path / "hf").exists()
    assert main(["checkpoint", "export", str(run), str(tmp_path / "hf"), "--step", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_that_cannot_be_written_leaves_nothing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    for out in ("hf", "one.safetensors"):
        assert main(["checkpoint", "export", str(saved), str(tmp_path / out)]) == 1
        assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    monkeypatch.setattr("labkit.train.checkpoint.shard_files.Reader", lambda _: pytest.fail("the checkpoint is read"))
    for action, place, out in (("export", "OUT", "hf"), ("export", "OUT", "one.safetensors"), ("import", "DIR", "in")):
        words = [str(saved), str(tmp_path / out)]
        assert main(["checkpoint", action, *(words if action == "export" else reversed(words))]) == 2
        said = capsys.readouterr().err
        assert f"{place} '{tmp_path / out}': cannot be written (Read-only file system); name a folder that can" in said
