"""The layer spec that a config asks for: labkit's own layers, these in fp8, or Transformer Engine's."""

from __future__ import annotations

from labkit.config import ModelConfig, OptimConfig
from labkit.fp8.recipe import Float8Recipe, float8_recipe
from labkit.fp8.scaling import Float8Spec
from labkit.models.layer_spec import LOCAL, LayerSpec
from labkit.te.spec import EngineSpec


def layer_spec(model: ModelConfig, optim: OptimConfig) -> LayerSpec:
    """The parts and the precision of a model's layers, by `model.transformer_impl` and `optim.fp8`."""
    return layer_spec_with(model, float8_recipe(optim))


def layer_spec_with(model: ModelConfig, recipe: Float8Recipe | None) -> LayerSpec:
    """The same by a recipe; None computes without fp8."""
    if model.transformer_impl == "transformer_engine":
        return EngineSpec(recipe)
    return LOCAL if recipe is None else Float8Spec(recipe)
