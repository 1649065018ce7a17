"""Lazy packages: every promised name exists, none hides a module, and the light ones come without torch."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [f"labkit.{path.parent.name}" for path in sorted((ROOT / "labkit").glob("*/__init__.py"))]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_promised_name_exists_and_hides_no_module(name: str) -> None:
    package = importlib.import_module(name)
    folder = Path(package.__path__[0])
    for export in package.__all__:
        assert getattr(package, export) is not None
        module = (folder / f"{export}.py").exists()
        assert module == (f"{name}.{export}" == "labkit.config.presets"), f"{name}.{export} is a module as well"
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_light_names_come_without_torch() -> None:
    code = (
        "import sys; from labkit.parallel import RankGenerator, rank_generators, all_groups, groups_of_rank;"
        "from labkit.viz import rank_grid, compare_orders; from labkit.check import check; check('02.place', None);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
