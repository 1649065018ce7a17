"""Models written once for every layout, and what they cost. Names are loaded on first use (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "counts": ("stage_contents", "stage_layers"),
    "memory.activation_bytes": ("Share", "layer_activation_bytes", "layer_parts", "paper_layer_bytes"),
    "convert": (
        "gather_full_state",
        "load_full_state",
        "full_state_from_hugging_face",
        "full_state_to_hugging_face",
        "model_config_from_hugging_face",
        "moe_config_from_hugging_face",
    ),
    "chunks": ("build_model_chunks",),
    "gpt": ("GPTModel",),
    "memory.saved_tensors": ("SavedTensors",),
    "synthetic_load": ("SleepingStage", "sleep_through"),
}
"""Module -> the names that this package offers from it."""
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from labkit.models.chunks import build_model_chunks as build_model_chunks
    from labkit.models.convert import full_state_from_hugging_face as full_state_from_hugging_face
    from labkit.models.convert import full_state_to_hugging_face as full_state_to_hugging_face
    from labkit.models.convert import gather_full_state as gather_full_state
    from labkit.models.convert import load_full_state as load_full_state
    from labkit.models.convert import model_config_from_hugging_face as model_config_from_hugging_face
    from labkit.models.convert import moe_config_from_hugging_face as moe_config_from_hugging_face
    from labkit.models.counts import stage_contents as stage_contents
    from labkit.models.counts import stage_layers as stage_layers
    from labkit.models.gpt import GPTModel as GPTModel
    from labkit.models.memory.activation_bytes import Share as Share
    from labkit.models.memory.activation_bytes import layer_activation_bytes as layer_activation_bytes
    from labkit.models.memory.activation_bytes import layer_parts as layer_parts
    from labkit.models.memory.activation_bytes import paper_layer_bytes as paper_layer_bytes
    from labkit.models.memory.saved_tensors import SavedTensors as SavedTensors
    from labkit.models.synthetic_load import SleepingStage as SleepingStage
    from labkit.models.synthetic_load import sleep_through as sleep_through


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
