"""Linear layers in fp8: a precision strategy, given to a model from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.lazy import public_names

if TYPE_CHECKING:
    from labkit.fp8.recipe import Float8Recipe as Float8Recipe
    from labkit.fp8.recipe import float8_recipe as float8_recipe
    from labkit.fp8.scaling import Float8Scaling as Float8Scaling
    from labkit.fp8.scaling import Float8Spec as Float8Spec

__all__, __getattr__, __dir__ = public_names(__name__)
