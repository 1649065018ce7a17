"""Lazy packages: every promised name exists, none hides a module, and the light ones come without torch."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ["labkit.parallel", "labkit.moe", "labkit.viz", "labkit.check"]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_promised_name_exists_and_hides_no_module(name: str) -> None:
    package = importlib.import_module(name)
    folder = Path(package.__path__[0])
    for export in package.__all__:
        assert getattr(package, export) is not None
        assert not (folder / f"{export}.py").exists(), f"{name}.{export} is a module as well"
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", PACKAGES)
def test_the_type_checkers_names_are_those_of_the_table(name: str) -> None:
    package = importlib.import_module(name)
    tree = ast.parse(Path(str(package.__file__)).read_text())
    typed = {
        (node.module, alias.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    promised = {(f"{name}.{home}", export) for export, home in package._HOME.items()}
    assert promised == {pair for pair in typed if (pair[0] or "").startswith(f"{name}.")}


def test_light_names_come_without_torch() -> None:
    code = (
        "import sys; from labkit.parallel import RankGenerator, rank_generators, all_groups, groups_of_rank;"
        "from labkit.viz import rank_grid, compare_orders; from labkit.check import check; check('02.order', None);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
