"""What the page "labkit in the browser" loads: Python for the browser, and labkit's packages that need no torch.

The runtime comes from the npm package `pyodide`, once, into build/pyodide. Without npm, or with another package than
the one pinned here, the page loads the same version from its public address. numpy for the browser is in neither npm
nor PyPI, so it always comes from that address, unless `LABKIT_PYODIDE` names a folder with a whole distribution
(pyodide-VERSION.tar.bz2 of its releases, unpacked).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from site_pages.links import ROOT

VERSION = "0.29.5"
SHA256 = "6749b10ee515a1458ecea36d860c8ce2a48366e85b3f92d749ad1840e4aff181"
"""Of the npm package's archive."""
ADDRESS = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
FILES = ("pyodide.mjs", "pyodide.asm.js", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
KEPT = ROOT / "build" / "pyodide"
PACKAGES = ("comm", "config", "launch", "parallel", "plan", "schedules")
"""Packages whose modules `answers.py` imports, if only a few of them."""


def add_browser_page(site: Path) -> str:
    """Write runtime and sources next to the page's scripts; return what is missing, in a sentence, or ''."""
    folder = site / "_static" / "browser"
    found, missing = runtime()
    own = found is not None and any(found.glob("numpy-*.whl"))
    if found is not None:
        names = {*FILES, *(path.name for path in found.glob("numpy-*.whl"))}
        (folder / "pyodide").mkdir(exist_ok=True)
        for name in sorted(names):
            shutil.copy(found / name, folder / "pyodide" / name)
    places = {"runtime": "pyodide/" if found else ADDRESS, "packages": "pyodide/" if own else ADDRESS}
    (folder / "runtime.json").write_text(json.dumps(places), encoding="utf-8")
    with zipfile.ZipFile(folder / "labkit.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in sources():
            archive.write(path, name)
    return missing


def sources() -> Iterator[tuple[Path, str]]:
    """Yield the files that the page's Python imports or reads, with their names in its archive."""
    labkit = ROOT / "labkit"
    folders = [labkit, *(labkit / name for name in PACKAGES)]
    for folder in folders:
        nested = folder != labkit
        for path in sorted(folder.rglob("*") if nested else folder.glob("*.py")):
            if path.suffix in (".py", ".yaml", ".json") and "__pycache__" not in path.parts:
                yield path, path.relative_to(ROOT).as_posix()
    for path in sorted(Path(yaml.__file__).parent.glob("*.py")):
        yield path, f"yaml/{path.name}"
    yield ROOT / "docs" / "_static" / "browser" / "answers.py", "answers.py"


def runtime() -> tuple[Path | None, str]:
    """Return the folder of Pyodide's files, or None and the reason why there is none."""
    if given := os.environ.get("LABKIT_PYODIDE"):
        missing = [name for name in FILES if not (Path(given) / name).is_file()]
        return (None, f"LABKIT_PYODIDE: {given} lacks {', '.join(missing)}") if missing else (Path(given), "")
    archive = KEPT / f"pyodide-{VERSION}.tgz"
    KEPT.mkdir(parents=True, exist_ok=True)
    if not archive.is_file():
        command = ["npm", "pack", "--silent", "--pack-destination", str(KEPT), f"pyodide@{VERSION}"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=KEPT)
        except (OSError, subprocess.SubprocessError) as error:
            return None, f"npm could not fetch pyodide {VERSION}: {error}"
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        archive.unlink()
        return None, f"npm's pyodide {VERSION} is not the archive that scripts/site_pages/browser.py expects"
    with tarfile.open(archive) as package:
        for name in FILES:
            source = package.extractfile(f"package/{name}")
            assert source is not None, name
            (KEPT / name).write_bytes(source.read())
    return KEPT, ""
