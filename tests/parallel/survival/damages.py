"""Ways in which the files of a checkpoint are damaged, and the words by which labkit must name the damage.

Each damage gets the folder of one checkpoint, written by two ranks: `manifest.json`, `rank_00000.safetensors` and
`rank_00001.safetensors`. A forged manifest has a checksum that fits, as only a program of ill will would write it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.train.checkpoint.manifest import MANIFEST, checksum

FIRST, SECOND = "rank_00000.safetensors", "rank_00001.safetensors"
Damage = Callable[[Path], object]


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Change one bit; a negative byte counts from the end."""
    with path.open("r+b") as file:
        file.seek(byte, os.SEEK_END if byte < 0 else os.SEEK_SET)
        place, old = file.tell(), file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ (1 << bit)]))


def header_of(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file."""
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def read_content(folder: Path) -> dict[str, Any]:
    """The manifest as JSON."""
    return json.loads((folder / MANIFEST).read_bytes())


def write_content(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest whose checksum fits."""
    rest = json.dumps({key: value for key, value in content.items() if key != "checksum"}).encode()[1:]
    (folder / MANIFEST).write_bytes(f'{{"checksum": "{checksum(rest)}",\n'.encode() + rest)


def forged(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the content of the manifest."""

    def damage(folder: Path) -> None:
        content = read_content(folder)
        change(content)
        write_content(folder, content)

    return damage


def _swap(folder: Path) -> None:
    os.rename(folder / FIRST, folder / "third")
    os.rename(folder / SECOND, folder / FIRST)
    os.rename(folder / "third", folder / SECOND)


def _absurd_header(folder: Path) -> None:
    """The length of the header is changed, and the manifest made to fit."""
    with (folder / FIRST).open("r+b") as file:
        file.write((1 << 60).to_bytes(8, "little"))
    content = read_content(folder)
    content["files"][FIRST]["header_checksum"] = checksum((folder / FIRST).read_bytes())
    write_content(folder, content)


def _renamed(new: str) -> Callable[[dict[str, Any]], None]:
    """The first file under another name, everywhere in the manifest."""

    def change(content: dict[str, Any]) -> None:
        content["files"][new] = content["files"].pop(FIRST)
        for tensor in content["tensors"].values():
            for box in tensor["boxes"]:
                box[2] = new if box[2] == FIRST else box[2]

    return change


def _of_tensor(field: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"]["final_norm.weight"].update({field: value})


def _of_box(number: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        content["tensors"]["final_norm.weight"]["boxes"][0][number] = value

    return change


def _overlapping(content: dict[str, Any]) -> None:
    """Two boxes hold as many elements as the tensor has, but one of them twice and another not at all."""
    tensor = content["tensors"]["final_norm.weight"]
    _, (size,), file, digits = tensor["boxes"][0]
    tensor["boxes"] = [[[0], [size // 2], file, digits], [[size // 2 - 1], [size // 2], file, digits]]


DAMAGED_FILES: dict[str, tuple[Damage, str]] = {
    "half a shard": (lambda f: os.truncate(f / FIRST, (f / FIRST).stat().st_size // 2), f"{FIRST} has .* bytes"),
    "a shard without its last byte": (
        lambda f: os.truncate(f / SECOND, (f / SECOND).stat().st_size - 1),
        f"{SECOND} has",
    ),
    "a shard with one byte more": (
        lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"\0"),
        f"{FIRST} has .* bytes",
    ),
    "an empty shard": (lambda f: os.truncate(f / SECOND, 0), f"{SECOND} has 0 bytes"),
    "a bit in the data": (lambda f: flip(f / FIRST, -1), f"{FIRST}: [\\w.-]+ at .*checksum"),
    "a bit in the header": (lambda f: flip(f / SECOND, 40), f"{SECOND}: the header"),
    "a bit in the length of the header": (lambda f: flip(f / SECOND, 7, 6), f"{SECOND}: the header"),
    "a bit in the manifest": (lambda f: flip(f / MANIFEST, 300), f"{MANIFEST} is damaged"),
    "a bit in the manifest's checksum": (lambda f: flip(f / MANIFEST, 16), f"{MANIFEST} is damaged"),
    "a shard deleted": (lambda f: (f / FIRST).unlink(), f"{FIRST} is missing"),
    "two shards swapped": (_swap, f"{FIRST}.*{SECOND}"),
    "a shard under the other's name": (lambda f: shutil.copy(f / FIRST, f / SECOND), SECOND),
    "a folder in the place of a shard": (lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()), FIRST),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"has no {MANIFEST}"),
    "an empty manifest": (lambda f: os.truncate(f / MANIFEST, 0), f"{MANIFEST} is damaged"),
    "half a manifest": (
        lambda f: os.truncate(f / MANIFEST, (f / MANIFEST).stat().st_size // 2),
        f"{MANIFEST} is damaged",
    ),
    "the manifest of another step": (
        lambda f: shutil.copy(f.parent / "step_00000001" / MANIFEST, f / MANIFEST),
        "step",
    ),
}
"""Name -> (damage, words). What disks, copies and people do."""
FORGED: dict[str, tuple[Damage, str]] = {
    "the next format": (forged(lambda c: c.update(format=c["format"] + 1)), "format 2.*install"),
    "a format of no number": (forged(lambda c: c.update(format="1")), "not a manifest of labkit"),
    "a header of 2^60 bytes": (_absurd_header, f"{FIRST}"),
    "a file above the folder": (forged(_renamed(f"../step_00000001/{FIRST}")), "not the name of a safetensors file"),
    "a file by its whole path": (forged(_renamed("/dev/zero.safetensors")), "not the name of a safetensors file"),
    "a file with a zero in its name": (forged(_renamed("rank\0.safetensors")), "."),
    "no tensors": (forged(lambda c: c.update(tensors={})), "."),
    "no files": (forged(lambda c: c.update(files={})), "not listed"),
    "a tensor of 2^62 elements": (forged(_of_tensor("shape", [2**62])), str(2**62)),
    "a tensor of 2^31 x 2^31 elements": (forged(_of_tensor("shape", [2**31, 2**31])), "final_norm.weight"),
    "a shape below zero": (forged(_of_tensor("shape", [-16])), "-16"),
    "a shape of words": (forged(_of_tensor("shape", "ab")), "."),
    "a type that is none": (forged(_of_tensor("dtype", "load")), "."),
    "another type": (forged(_of_tensor("dtype", "float64")), "."),
    "a box far outside": (forged(_of_box(0, [2**61])), "final_norm.weight"),
    "a box below zero": (forged(_of_box(0, [-1])), "-1"),
    "a box with more dimensions": (forged(_of_box(0, [0, 0])), "final_norm.weight"),
    "a box of another file": (forged(_of_box(2, "rank_00007.safetensors")), "not listed"),
    "a box without a checksum": (forged(_of_box(3, None)), "None"),
    "overlapping boxes": (forged(_overlapping), "final_norm.weight"),
    "a step of no number": (forged(lambda c: c.update(step="2")), "."),
    "a step of another folder": (forged(lambda c: c.update(step=7)), "."),
    "no state of the loop": (forged(lambda c: c.update(training={})), "."),
    "a state of the loop below zero": (forged(lambda c: c["training"].update(step=-1)), "."),
    "a loss scale of words": (
        forged(lambda c: c["training"].update(loss_scaler={"hopeless_steps": "x"})),
        "loss scale",
    ),
    "a loss scale without numbers": (
        forged(lambda c: c["training"].update(loss_scaler=[])),
        "not a manifest of labkit",
    ),
    "a huge number of samples": (forged(lambda c: c["training"].update(consumed_samples="many")), "."),
    "a world of no ranks": (forged(lambda c: c.update(world_size=0)), "."),
}
"""Name -> (damage, words). What only a program of ill will writes; the words are those of the finding."""


def names_step(problem: str) -> bool:
    """True for a finding that names the checkpoint or a file in it."""
    return re.search(r"step_0000000\d", problem) is not None
