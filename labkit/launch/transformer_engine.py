"""Whether Transformer Engine can be used here, and what is missing if not. The answer needs torch."""

from __future__ import annotations

import importlib
import importlib.util

_HOW_TO_GET_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]', or from conda-forge"
"""pip compiles it against the installed torch and CUDA."""


def why_no_transformer_engine() -> str | None:
    """Return None if `transformer_engine.pytorch` can be imported, else what is missing and how to get it.

    Imports torch. Without a GPU it does not try the import, which would raise RuntimeError instead of ImportError.
    """
    import torch

    installed = importlib.util.find_spec("transformer_engine") is not None
    if not torch.cuda.is_available():
        gpu = "no GPU is visible" if torch.version.cuda else "this torch is the CPU build"
        there = "is installed, but" if installed else "is not installed, and"
        needs = "it needs an NVIDIA GPU of the Ampere generation or later"
        return f"Transformer Engine {there} {gpu}: {needs}" + ("" if installed else f", and there {_HOW_TO_GET_TE}")
    if not installed:
        return f"Transformer Engine is not installed: {_HOW_TO_GET_TE}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"Transformer Engine cannot be imported ({reason}): build it for this torch, {_HOW_TO_GET_TE}"
    return None
