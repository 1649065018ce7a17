"""The figure of a checkpoint's boxes: rectangles, words and sentence are those of the manifest."""

import pytest
from matplotlib.patches import Rectangle

from labkit.train.checkpoint.boxes import Box
from labkit.train.checkpoint.manifest import Manifest, StoredBox, StoredFile, StoredTensor, write_manifest
from labkit.train.checkpoint.step_folders import step_folder
from labkit.viz import stored_boxes


def checkpoint(folder, tensors, step=3):
    """A checkpoint's manifest: name -> (shape, [(file, offset, shape)])."""
    held = {
        name: StoredTensor(
            "float32", shape, tuple(StoredBox(Box(at, size), file, "0" * 16) for file, at, size in boxes)
        )
        for name, (shape, boxes) in tensors.items()
    }
    files = {part.file: StoredFile(8, "0" * 16) for tensor in held.values() for part in tensor.boxes}
    training = {"step": step, "consumed_samples": 0, "skipped_steps": 0}
    path = step_folder(folder, step)
    path.mkdir(parents=True)
    write_manifest(path, Manifest(step, held, files, training, {}, 4, {}))
    return path


RANKS = [f"rank_0000{rank}.safetensors" for rank in range(4)]
COLUMNS = ((4, 6), [(RANKS[0], (0, 0), (4, 3)), (RANKS[1], (0, 3), (4, 3))])
RUNS = (
    (4, 6),
    [(RANKS[2], (0, 0), (1, 6)), (RANKS[2], (1, 0), (1, 4)), (RANKS[3], (1, 4), (1, 2)), (RANKS[3], (2, 0), (2, 6))],
)


def rectangles(axes):
    return [(p.get_x(), p.get_y(), p.get_width(), p.get_height()) for p in axes.patches if isinstance(p, Rectangle)]


def test_each_box_is_drawn_at_its_place_in_the_colour_of_its_rank(tmp_path):
    old = checkpoint(tmp_path / "a", {"w": COLUMNS})
    new = checkpoint(tmp_path / "b", {"w": RUNS})
    figure = stored_boxes({"tp2": old, "dp2": new}, "w")
    left, right = figure.fig.axes
    assert rectangles(left) == [(0, 0, 3, 4), (3, 0, 3, 4)]
    assert rectangles(right) == [(0, 0, 6, 1), (0, 1, 4, 1), (4, 1, 2, 1), (0, 2, 6, 2)]
    colours = [patch.get_facecolor() for axes in (left, right) for patch in axes.patches]
    assert len(set(colours)) == 4 and colours[2] == colours[3] and colours[4] == colours[5]
    assert [text.get_text() for text in left.texts] == [
        "rank 0\nshape [4, 3]\nat [0, 0]",
        "rank 1\nshape [4, 3]\nat [0, 3]",
    ]
    assert figure.sentence == (
        "w of shape [4, 6] as boxes: tp2: 2 boxes, rank 0 and rank 1 with 12 elements each; "
        "dp2: 4 boxes, rank 2 with 10 elements and rank 3 with 14 elements."
    )
    (legend,) = figure.fig.legends
    assert [text.get_text() for text in legend.get_texts()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert figure.png.startswith(b"\x89PNG")


def test_a_vector_is_one_row_and_a_box_without_room_has_no_words(tmp_path):
    tensors = {
        "b": ((8,), [(RANKS[1], (0,), (8,))]),
        "thin": ((1000, 4), [(RANKS[0], (0, 0), (999, 4)), (RANKS[1], (999, 0), (1, 4))]),
    }
    folder = checkpoint(tmp_path, tensors)
    figure = stored_boxes({"dp2": folder}, "b")
    assert rectangles(figure.fig.axes[0]) == [(0, 0, 8, 1)]
    assert figure.fig.axes[0].get_xlabel() == "element" and figure.fig.axes[0].get_yticks().tolist() == []
    assert figure.sentence == "b of shape [8] as boxes: dp2: 1 box, rank 1 with 8 elements."
    thin = stored_boxes({"dp2": folder}, "thin").fig.axes[0]
    assert [text.get_text() for text in thin.texts] == ["rank 0\nshape [999, 4]\nat [0, 0]"]
    assert thin.get_yticks().tolist() == [0, 1000], "999 and 1000 would lie on each other"


def test_many_writers_share_a_sentence(tmp_path):
    boxes = [(f"rank_{rank:05d}.safetensors", (rank, 0), (1, 2)) for rank in range(10)]
    figure = stored_boxes({"dp10": checkpoint(tmp_path, {"w": ((10, 2), boxes)})}, "w")
    assert figure.sentence.endswith("dp10: 10 boxes, rank 0 to rank 9 with 2 elements each.")
    fills = {(patch.get_facecolor(), patch.get_hatch()) for patch in figure.fig.axes[0].patches}
    assert len(fills) == 10, "ranks 8 and 9 have the colours of 0 and 1 with a hatch"


def test_what_cannot_be_drawn_is_refused(tmp_path):
    experts = ((2, 4, 6), [(RANKS[0], (0, 0, 0), (2, 4, 6))])
    folder = checkpoint(tmp_path, {"layers.0.fc1.weight": COLUMNS, "experts": experts})
    with pytest.raises(ValueError, match="at least one checkpoint"):
        stored_boxes({}, "w")
    with pytest.raises(
        ValueError, match=r"step 3 has no tensor layers.0.fc2.weight; did you mean layers.0.fc1.weight\?"
    ):
        stored_boxes({"a": folder}, "layers.0.fc2.weight")
    with pytest.raises(ValueError, match=r"experts has shape \[2, 4, 6\]; a tensor of one or two dimensions"):
        stored_boxes({"a": folder}, "experts")
    with pytest.raises(ValueError, match="is not a folder"):
        stored_boxes({"a": tmp_path / "gone"}, "w")
