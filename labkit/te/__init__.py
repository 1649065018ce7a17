"""Transformer Engine's modules in place of ours, given to a model from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.te.engine import EngineFloat8 as EngineFloat8
    from labkit.te.spec import EngineSpec as EngineSpec

__all__, __getattr__, __dir__ = public_names(__name__)
