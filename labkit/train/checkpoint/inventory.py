"""The checkpoints under a path, and the facts in their manifests. Needs no torch and reads no tensor."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config.errors import counted
from labkit.train.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from labkit.train.checkpoint.step_folders import latest_step, remains_in, step_folder, steps_in
from labkit.train.run_folder.contents import checkpoints_in


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first; or `path` itself, if it is a checkpoint, damaged or not.

    path: the folder of a run, or of its checkpoints, or one of these. Raises CheckpointError if there is none.
    """
    path = checkpoints_in(path)
    if steps := steps_in(path):
        return [step_folder(path, step) for step in steps]
    here = path.resolve()
    if path.is_dir() and here in [step_folder(here.parent, step) for step in steps_in(here.parent)]:
        return [path]
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; give the folder of a run or of its checkpoints, or one step")
    cut = f"; {remains_in(path)[0].name} was never finished" if remains_in(path) else ""
    raise CheckpointError(
        f"{path} holds no checkpoint{cut}; give the folder of a run, one with step_00000001 or similar in it, or a step"
    )


def chosen(path: Path, step: int | None) -> Path:
    """Return the checkpoint of `step` under `path`, or the one that a run would resume from. Raises CheckpointError."""
    folder = checkpoints_in(path)
    found = checkpoints_at(folder)
    if step is None:
        latest = latest_step(folder)
        return found[0] if latest is None else step_folder(folder, latest)
    for checkpoint in found:
        if checkpoint.name == step_folder(folder, step).name:
            return checkpoint
    raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(f.name for f in found)}")


def is_export(path: Path) -> bool:
    """Return True for a model of Hugging Face: a file, or a folder with a `config.json`."""
    return path.is_file() or (path / "config.json").is_file()


def strays(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names in the folder of a checkpoint that its manifest does not list."""
    return sorted({path.name for path in folder.iterdir()} - {MANIFEST, *manifest.files})


FACTS = ("size", "layout", "type", "written")
"""Column names of `Row.facts`."""


@dataclass(frozen=True)
class Row:
    """One checkpoint in a list."""

    folder: Path
    """The checkpoint."""
    facts: tuple[str, ...]
    """Size, ranks and layout, precision, date; empty without a manifest."""
    damage: str
    """The first thing that is wrong, as far as the manifest and file sizes show; empty for a complete checkpoint."""


def row_of(folder: Path) -> Row:
    """Return the row of a checkpoint."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Row(folder, (), str(error))
    size = sum(file.size for file in manifest.files.values())
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / MANIFEST).stat().st_mtime))
    facts = (size_words(size), layout_words(manifest), _precision(manifest), date)
    return Row(folder, facts, next(_wrong_sizes(folder, manifest), ""))


def _wrong_sizes(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            yield f"{name} cannot be found ({error.strerror or error})"
            continue
        if size != file.size:
            yield f"{name} has {counted(size, 'byte')} where {file.size:,} were written"


def size_words(size: int) -> str:
    """Return the size as `812 bytes`, `1.3 MB` or `94.0 GB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return counted(size, "byte")


def layout_words(manifest: Manifest) -> str:
    """Return the layout as `8 ranks: tp2 x pp2 x dp2`, or `imported`."""
    layout: dict[str, Any] = manifest.config.get("parallel", {})
    if not layout:
        return "imported"
    ranks = counted(manifest.world_size, "rank")
    sizes = {axis: layout.get(axis) or 1 for axis in ("tp", "cp", "pp")}
    sizes["dp"] = manifest.world_size // (sizes["tp"] * sizes["cp"] * sizes["pp"])
    sizes |= {axis: layout.get(axis) or 1 for axis in ("vpp", "ep")}
    words = " x ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    return f"{ranks}: {words}" if words else ranks


def _precision(manifest: Manifest) -> str:
    """Return the run's precision, or the types of the tensors if they are imported weights."""
    optim = manifest.config.get("optim")
    if optim is None:
        return " ".join(sorted({tensor.dtype for tensor in manifest.tensors.values()}))
    fp8 = optim.get("fp8", "none")
    return f"{optim.get('precision')}{'' if fp8 == 'none' else f' fp8 {fp8}'}"
