"""Compiles `guard.cpp` on first use and loads it. Importing torch fixes what the library adds, so torch comes after.

Nothing here imports torch: its folder and its version are read from its files.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "guard.cpp"
CONSTRAINTS = ROOT / "constraints.txt"


class Unavailable(Exception):
    """Why there can be no fake device here, for the reason of a skip."""


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None, "torch is not installed"
    return Path(spec.origin).parent


def compiler() -> str:
    """The C++ compiler. Raises Unavailable without one, off Linux, and where torch has CUDA already."""
    if sys.platform != "linux":
        raise Unavailable(f"it is built for Linux alone, and this is {sys.platform}")
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable("this torch has CUDA of its own, and a second one cannot be registered")
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise Unavailable("there is no C++ compiler (g++, or what CXX names) to build the fake device with")
    return found


def built() -> Path:
    """The library for this torch, compiled if need be (2 s). Raises Unavailable with the reason if there is none."""
    command, torch = [compiler()], _torch()
    key = hashlib.sha256(f"{version('torch')} {torch} {SOURCE.read_text()}".encode()).hexdigest()[:16]
    library = ROOT / "build" / "fake_device" / f"guard-{key}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}")  # two processes may compile at once
    include, lib = torch / "include", torch / "lib"
    command += ["-O1", "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(partial)]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]  # rpath: torch is not loaded yet
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        words = f"{SOURCE.name} does not compile against torch {version('torch')}:\n{result.stderr[-2000:]}"
        raise (RuntimeError if _is_pinned() else Unavailable)(words)
    partial.replace(library)
    return library


def _is_pinned() -> bool:
    """Whether this is the project's own torch, for which the guard must compile; others may be too old or too new."""
    return f"torch=={version('torch').partition('+')[0]}" in CONSTRAINTS.read_text().splitlines()


def load() -> ctypes.CDLL:
    """The library, loaded into this process. Raises as `built` does, and RuntimeError if torch is imported already."""
    if "torch" in sys.modules:
        raise RuntimeError("a fake device can only be added before torch is imported; call load() first")
    library = ctypes.CDLL(str(built()))
    library.get_stream.restype = library.set_stream.restype = ctypes.c_long
    library.set_stream.argtypes = [ctypes.c_long]
    return library
