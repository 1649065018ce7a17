"""The palette: apart for colour-blind readers, legible labels, one meaning a colour; Figure's bundle."""

import base64
import io
import itertools
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from labkit import events
from labkit.viz.figure import Figure
from labkit.viz.style import (
    ACTIVITIES,
    AXES,
    HATCHES,
    SEQUENCE,
    color,
    hatch,
    label,
    mixed,
    new_figure,
    nth_style,
    styled,
    text_color,
)

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(hexadecimal: str) -> np.ndarray:
    c = np.array([int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear RGB."""
    t = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("family", [ACTIVITIES, AXES], ids=["activities", "axes"])
def test_marks_that_meet_in_a_picture_stay_apart(family: dict, vision: str) -> None:
    for left, right in itertools.combinations(family, 2):
        near = np.linalg.norm(lab(VISION[vision] @ linear(color(left))) - lab(VISION[vision] @ linear(color(right))))
        assert near > 15 or hatch(left) != hatch(right), (left, right, near)


def test_a_colour_has_one_meaning_in_all_chapters() -> None:
    """Forward, backward, weight gradient and communication share their colours with nothing; nor does an axis."""
    told = [color(kind) for kind in ("forward", "backward", "input_grad", "weight_grad", "send", "recv", "collective")]
    told += [*map(color, AXES), *SEQUENCE]
    assert len(set(told)) == len(told)


def test_every_kind_of_event_has_a_colour_and_a_label() -> None:
    for kind in events.KINDS:
        assert color(kind).startswith("#") and label(kind)


def test_labels_on_marks_are_legible() -> None:
    for name in [*ACTIVITIES, *AXES]:
        luminance = [float(linear(c) @ TO_XYZ[1]) for c in (color(name), text_color(color(name)))]
        assert (max(luminance) + 0.05) / (min(luminance) + 0.05) >= 4.5, name


def test_things_with_a_number_differ_up_to_the_last_hatch() -> None:
    count = len(SEQUENCE) * len(HATCHES)
    assert len({nth_style(number) for number in range(count)}) == count
    assert nth_style(count) == nth_style(0)


def test_a_colour_mixed_with_white() -> None:
    assert [mixed("#004080", white) for white in (0, 0.5, 1)] == ["#004080", "#80A0C0", "#FFFFFF"]


def test_a_name_without_meaning_is_refused_and_combined_groups_take_their_first_axis() -> None:
    assert color("dp_cp") == color("dp")
    with pytest.raises(ValueError, match="'speed' has no colour"):
        color("speed")


def line_figure() -> Figure:
    with styled():
        fig = new_figure(3, 2)
        fig.subplots().plot([0, 1], [0, 1])
    return Figure(fig, "A line from 0 to 1.")


def test_figure_shows_as_png_and_sentence() -> None:
    figure = line_figure()
    data, metadata = figure._repr_mimebundle_()
    png = base64.b64decode(data["image/png"])
    assert png.startswith(b"\x89PNG")
    assert data["text/plain"] == repr(figure) == metadata["image/png"]["alt"] == "A line from 0 to 1."
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    assert width == 300, "100 dots per inch"
    assert height == 230, "200 of the plot, and one line of 18 with 12 around it for the sentence"
    assert line_figure().png == png, "the same picture twice is the same bytes"


def test_sentence_is_drawn_under_the_picture_and_wrapped() -> None:
    figure = line_figure()
    long = Figure(figure.fig, "A line from 0 to 1, " + "said at length, " * 12 + "as it is.")
    pixels = np.asarray(Image.open(io.BytesIO(long.png)).convert("L"))
    assert pixels.shape[1] == 300
    written = (pixels[200:] < 128).any(axis=1)
    starts = np.flatnonzero(np.diff(written.astype(int)) == 1)
    assert len(starts) >= 5, "the sentence fills several lines below the plot"
    assert not (pixels[200:, -4:] < 128).any(), "no line is cut off at the right"


def test_figure_saves_by_suffix(tmp_path) -> None:
    figure = line_figure()
    assert figure.save(tmp_path / "new" / "a.png").read_bytes() == figure.png
    assert b"<svg" in figure.save(tmp_path / "a.svg").read_bytes()


@pytest.mark.parametrize("sentence", ["", "  ", "two\nlines"])
def test_figure_needs_one_sentence(sentence: str) -> None:
    with pytest.raises(ValueError, match="one sentence on one line"):
        Figure(line_figure().fig, sentence)


def test_figures_import_no_torch_and_leave_nothing_in_pyplot() -> None:
    code = (
        "import sys; from labkit.viz import rank_grid; rank_grid({'tp': 2}, 'tp', world_size=4).png;"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
