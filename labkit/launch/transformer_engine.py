"""Whether Transformer Engine can be used here, and in one sentence why not."""

from __future__ import annotations

import importlib
import importlib.util

HOW_TO_GET_IT = "pip install --no-build-isolation 'transformer-engine[pytorch]', or from conda-forge"
"""It is compiled against the torch and CUDA that are installed."""


def why_no_transformer_engine() -> str | None:
    """None where `transformer_engine.pytorch` can be imported, else a sentence that says what is missing and how to get
    it. Takes an import of torch.

    Never imported without a GPU: its import then raises RuntimeError, not ImportError.
    """
    import torch

    installed = importlib.util.find_spec("transformer_engine") is not None
    if not torch.cuda.is_available():
        gpu = "no GPU is visible" if torch.version.cuda else "this torch is the CPU build"
        there = "is installed, but" if installed else "is not installed, and"
        needs = "it needs an NVIDIA GPU of the Ampere generation or later"
        return f"Transformer Engine {there} {gpu}: {needs}" + ("" if installed else f", and there {HOW_TO_GET_IT}")
    if not installed:
        return f"Transformer Engine is not installed: {HOW_TO_GET_IT}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"Transformer Engine cannot be imported ({reason}): build it for this torch, {HOW_TO_GET_IT}"
    return None
