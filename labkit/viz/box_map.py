"""Boxes of a checkpoint: which rank's file has which part of a tensor, read from the manifest.

A tensor of a checkpoint is stored as boxes, each an offset and a shape in the whole tensor
(`labkit/train/checkpoint/boxes.py`). The figure draws the whole tensor and its boxes, rows down and columns across, in
the colours of the ranks that wrote the boxes.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch

from labkit.train.checkpoint.boxes import Box
from labkit.train.checkpoint.manifest import Manifest, StoredTensor, read_manifest
from labkit.viz.figure import Figure
from labkit.viz.style import DPI, box, new_figure, nth_style, styled

_WIDTH, _HEIGHT, _PANEL = 7.2, 3.4, 4.2
"""Largest width of a figure in inches, its height, and the largest width of a panel."""
_MARGIN = 75
"""Pixels of a panel outside its axes."""
_LETTER, _LINE = 6.0, 13.0
"""Width of a letter and height of a line in pixels."""
_MOST_TICKS = 7
_MOST_NAMES = 4
"""Ranks that an entry of the sentence names one by one; of more it names only the first and the last."""
_WRITTEN_BY_A_RANK = re.compile(r"rank_(\d+)\.safetensors")


def stored_boxes(checkpoints: Mapping[str, str | os.PathLike[str]], tensor: str) -> Figure:
    """Draw the boxes of one tensor, a panel for each checkpoint. Each box carries its writer and its shape.

    checkpoints: title of a panel -> folder of a checkpoint, such as `runs/a/step_00000020`.
    tensor: name in the manifest, of one or two dimensions; `exp_avg.NAME` is the first moment of NAME.

    Raises ValueError without a checkpoint, and for a tensor that a checkpoint lacks or that has more than two
    dimensions. A folder that is no complete checkpoint raises CheckpointError, a ValueError.
    """
    if not checkpoints:
        raise ValueError("stored_boxes needs at least one checkpoint")
    stored = {title: _tensor_of(read_manifest(Path(folder)), tensor) for title, folder in checkpoints.items()}
    writers = sorted({_writer(part.file) for held in stored.values() for part in held.boxes}, key=_in_order)
    with styled():
        width = min(_WIDTH, _PANEL * len(stored))
        fig = new_figure(width, _HEIGHT)
        panels = fig.subplots(1, len(stored), squeeze=False)[0]
        for axes, (title, held) in zip(panels, stored.items()):
            _draw(axes, title, held, writers, width * DPI / len(stored) - _MARGIN)
        handles = [
            Patch(facecolor=fill, hatch=hatch, edgecolor="#FFFFFF", label=writer)
            for writer, (fill, hatch) in zip(writers, map(nth_style, range(len(writers))))
        ]
        fig.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), title="file of")
    return Figure(fig, _sentence(tensor, stored))


def _tensor_of(manifest: Manifest, name: str) -> StoredTensor:
    found = manifest.tensors.get(name)
    if found is None:
        near = difflib.get_close_matches(name, manifest.tensors, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"the checkpoint of step {manifest.step} has no tensor {name}{hint}")
    if not 1 <= len(found.shape) <= 2:
        raise ValueError(f"{name} has shape {list(found.shape)}; a tensor of one or two dimensions can be drawn")
    return found


def _writer(file: str) -> str:
    """Return `rank 3` for the file of rank 3, or the name of another file."""
    match = _WRITTEN_BY_A_RANK.fullmatch(file)
    return f"rank {int(match[1])}" if match else file


def _in_order(writer: str) -> tuple[int, str]:
    number = writer.removeprefix("rank ")
    return (int(number), "") if number.isdecimal() else (-1, writer)


def _flat(box: Box) -> tuple[int, int, int, int]:
    """Return (row, column, rows, columns) of a box; a tensor of one dimension is one row."""
    if len(box.shape) == 1:
        return 0, box.offset[0], 1, box.shape[0]
    return *box.offset, *box.shape  # pyright: ignore[reportReturnType]


def _draw(axes: Any, title: str, tensor: StoredTensor, writers: Sequence[str], width: float) -> None:
    """Draw one panel, whose axes are about `width` pixels wide."""
    rows, columns = (1, *tensor.shape)[-2:]
    height = 0.62 * _HEIGHT * DPI
    for part in tensor.boxes:
        row, column, high, wide = _flat(part.box)
        writer = _writer(part.file)
        fill, hatch = nth_style(writers.index(writer))
        text = _fitting(writer, part.box, width * wide / columns, height * high / rows)
        box(axes, (column, row), wide, high, fill, text, hatch=hatch, edgecolor="#FFFFFF", linewidth=1.0)
    flat = len(tensor.shape) == 1
    axes.set(xlim=(0, columns), ylim=(rows, 0), xlabel="element" if flat else "column", ylabel="" if flat else "row")
    borders = [_flat(part.box) for part in tensor.boxes]
    axes.set_xticks(_ticks((c for _, column, _, wide in borders for c in (column, column + wide)), columns))
    axes.set_yticks([] if flat else _ticks((r for row, _, high, _ in borders for r in (row, row + high)), rows))
    axes.set_title(title, loc="left")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=2)


def _fitting(writer: str, box: Box, width: float, height: float) -> str:
    """Return as many of writer, shape and offset as fit the pixels; both refer to the whole tensor."""
    lines = [writer, f"shape {list(box.shape)}", f"at {list(box.offset)}"]
    if max(map(len, lines)) * _LETTER < width and height > 3 * _LINE:
        return "\n".join(lines)
    brief = f"{writer}: {list(box.shape)} at {list(box.offset)}"
    for text in (brief, f"{writer}: {list(box.shape)}", writer):
        if len(text) * _LETTER < width and height > _LINE:
            return text
    return ""


def _ticks(borders: Iterable[int], end: int) -> list[int]:
    """Return the ends and borders of boxes, without borders whose numbers would overlap."""
    kept: list[int] = [0]
    for border in sorted(set(borders)):
        if min(border - kept[-1], end - border) * _MOST_TICKS >= end:
            kept.append(border)
    return [*kept, end]


def _sentence(tensor: str, stored: Mapping[str, StoredTensor]) -> str:
    shapes = list(dict.fromkeys(str(list(held.shape)) for held in stored.values()))
    parts = [f"{title}: {_words(held)}" for title, held in stored.items()]
    return f"{tensor} of shape {' or '.join(shapes)} as boxes: {'; '.join(parts)}."


def _words(tensor: StoredTensor) -> str:
    """Return words such as `3 boxes, rank 0 with 4,096 elements and rank 1 with 12,288 elements`."""
    held: dict[str, int] = {}
    for part in tensor.boxes:
        held[_writer(part.file)] = held.get(_writer(part.file), 0) + part.box.numel
    names = sorted(held, key=_in_order)
    count = f"{len(tensor.boxes)} box{'' if len(tensor.boxes) == 1 else 'es'}"
    if len(names) > 1 and len(set(held.values())) == 1:
        return f"{count}, {_listed(names)} with {held[names[0]]:,} elements each"
    return f"{count}, {_listed([f'{name} with {held[name]:,} elements' for name in names])}"


def _listed(names: Sequence[str]) -> str:
    """Join names as in `rank 0, rank 1 and rank 2`; give only the first and the last of many."""
    if len(names) > _MOST_NAMES:
        return f"{names[0]} to {names[-1]}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
