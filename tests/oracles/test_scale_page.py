"""docs/scale.md and its figures are what scripts/make_scale.py makes of the model and the tables of today."""

import io
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.oracle


@pytest.fixture
def script(load_script, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return load_script("make_scale")


def test_the_committed_page_and_figures_are_those_of_today(script):
    """A figure is drawn anew elsewhere, so its sentence is compared, which has its key numbers."""
    pictures = script.drawn()
    committed = script.TARGET.read_text(encoding="utf-8")
    assert committed.splitlines() == script.page(pictures).splitlines(), "run python scripts/make_scale.py"
    for name, picture in pictures.items():
        stored = Image.open(io.BytesIO(script.TARGET.with_name(name).read_bytes()))
        assert stored.text["Description"] == picture.sentence
