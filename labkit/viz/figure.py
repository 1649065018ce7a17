"""`Figure`: a picture with one sentence under it, which gives its key numbers."""

from __future__ import annotations

import base64
import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from labkit.output_files import appearing
from labkit.viz.style import DPI, styled


def _pixels(fig: matplotlib.figure.Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(fig)
    with styled():
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _caption(sentence: str, width: int) -> np.ndarray:
    """Draw the sentence as a strip of this many pixels: notebooks and pages show the PNG, not its plain text."""
    lines = textwrap.wrap(sentence, max(20, width // 7))
    strip = matplotlib.figure.Figure(figsize=(width / DPI, (18 * len(lines) + 12) / DPI), dpi=DPI)
    strip.text(8 / width, 0.5, "\n".join(lines), va="center", fontsize=9, color="#333333", linespacing=1.3)
    return _pixels(strip)


class Figure:
    """A matplotlib figure with a sentence that carries its key numbers.

    A notebook shows the figure as a PNG with the sentence under the picture. The sentence is also the plain text and
    the alternative text: a screen reader reads it, and nbval compares it from run to run. The PNG contains it as its
    description, so that a stored picture that is older than its sentence is noticed.

    Raises:
        ValueError: the sentence is empty or more than one line.
    """

    def __init__(self, fig: matplotlib.figure.Figure, sentence: str) -> None:
        if not sentence.strip() or "\n" in sentence:
            raise ValueError(f"a figure needs one sentence on one line, not {sentence!r}")
        self.fig = fig
        self.sentence = sentence
        self._png: bytes | None = None

    def __repr__(self) -> str:
        return self.sentence

    @property
    def png(self) -> bytes:
        """The picture as PNG at 100 dpi, drawn once, in 256 colours so that notebooks are three times smaller."""
        if self._png is None:
            self.fig.set_dpi(DPI)
            pixels = _pixels(self.fig)
            picture = Image.fromarray(np.vstack([pixels, _caption(self.sentence, pixels.shape[1])]))
            buffer, words = io.BytesIO(), PngInfo()
            words.add_itxt("Description", self.sentence)
            picture.quantize(256, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True, pnginfo=words)
            self._png = buffer.getvalue()
        return self._png

    def save(self, path: str | Path) -> Path:
        """Write the picture in the format of the suffix (png, svg, pdf). Make its folder, and return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as draft:
            if path.suffix.lower() == ".png":
                draft.write_bytes(self.png)
            else:
                with styled():
                    self.fig.savefig(draft, format=path.suffix[1:] or "png")
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"image/png": base64.b64encode(self.png).decode("ascii"), "text/plain": self.sentence}
        return data, {"image/png": {"alt": self.sentence}}
