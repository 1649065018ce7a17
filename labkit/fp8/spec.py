"""labkit's own layers with their products in fp8."""

from __future__ import annotations

import torch

from labkit.fp8.recipe import Float8Recipe
from labkit.fp8.scaling import Float8Scaling
from labkit.models.layer_spec import LayerSpec
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.precision import Precision


class Float8Spec(LayerSpec):
    """Linear layers of attention and MLP compute in fp8 by `recipe`; embedding and output layer keep their type."""

    def __init__(self, recipe: Float8Recipe) -> None:
        self.recipe = recipe

    def precision(self, groups: ParallelGroups, device: torch.device | str | None) -> Precision:
        """The scales of one model chunk."""
        return Float8Scaling(self.recipe, groups, device)
