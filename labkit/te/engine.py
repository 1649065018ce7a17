"""What labkit asks of Transformer Engine: its module, its fp8, its recomputation (`model.transformer_impl`).

| ours                             | Transformer Engine's     | under the parameter names                         |
|----------------------------------|--------------------------|---------------------------------------------------|
| norm, then ColumnParallelLinear  | LayerNormLinear          | `norm.weight`, `norm.bias`, `qkv.weight`, ..      |
| RowParallelLinear                | Linear                   | `proj.weight`, `proj.bias`                        |
| core attention, any cp_comm_type | DotProductAttention      | none                                              |
| moe's StackedLinear              | GroupedLinear            | `fc1.weight`, `fc2.weight`, stacked               |
| Float8Recipe                     | DelayedScaling, Float8CurrentScaling, Float8BlockScaling                     ||
| recompute.checkpoint, with fp8   | checkpoint               | (replays the fp8 scales of the first pass)        |

The engine communicates over the process groups that it gets; labkit's ledger does not book that. The engine needs a
GPU, so labkit imports it only when it builds a model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from labkit.comm.groups import ParallelGroups
from labkit.fp8.recipe import Float8Recipe
from labkit.launch.transformer_engine import why_no_transformer_engine
from labkit.parallel.layers import Precision
from labkit.parallel.random import RngTracker


def engine() -> Any:
    """Return the module `transformer_engine.pytorch`.

    Raises:
        ValueError: the engine cannot be used here; one sentence says what is missing and how to get it.
    """
    if (missing := why_no_transformer_engine()) is not None:
        raise ValueError(f"model.transformer_impl is transformer_engine. {missing}; or set it to local")
    return importlib.import_module("transformer_engine.pytorch")


class CastsOnce(Protocol):
    """A layer that casts its weight at the begin of a step."""

    is_first_microbatch: bool | None


def engine_recipe(recipe: Float8Recipe, *, reduces: bool) -> Any:
    """The recipe as the engine's own object. reduces: several ranks agree on an amax."""
    engine()  # raises a clear error where it is missing
    recipes = importlib.import_module("transformer_engine.common.recipe")
    fp8_format = recipes.Format.HYBRID if recipe.hybrid else recipes.Format.E4M3
    if recipe.name == "current":
        return recipes.Float8CurrentScaling(fp8_format=fp8_format)
    if recipe.name == "blockwise":
        return recipes.Float8BlockScaling(fp8_format=fp8_format)
    return recipes.DelayedScaling(
        margin=recipe.margin,
        fp8_format=fp8_format,
        amax_history_len=recipe.amax_history_len,
        amax_compute_algo=recipe.amax_compute_algo,
        reduce_amax=reduces,
    )


class EngineFloat8(Precision):
    """fp8 of one model chunk: the region in which the engine's layers cast, and the begin of steps.

    Args:
        recipe: formats and scaling. The engine moves the history of `delayed` on with every microbatch.
        groups: the ranks of tp_dp_cp agree on an amax. One rank alone reduces nothing; without a group the engine
            would reduce over the whole world, other pipeline stages included.
    """

    def __init__(self, recipe: Float8Recipe, groups: ParallelGroups) -> None:
        self.group, self._engine = groups.tp_dp_cp, engine()
        self.recipe = engine_recipe(recipe, reduces=self.group.size > 1)
        self._layers: list[CastsOnce] = []

    def casts_once_a_step(self, layer: CastsOnce) -> None:
        """Have `layer` cast its weight to fp8 only in the first microbatch of each step."""
        layer.is_first_microbatch = True
        self._layers.append(layer)

    def region(self) -> AbstractContextManager[Any]:
        """The context for the forward of all layers of one microbatch; backward needs none."""
        group = self.group.process_group
        return self._engine.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=group)

    def graph_options(self) -> dict[str, Any]:
        """Options for `make_graphed_callables`, since captured layers run outside the region.

        Only the replays of the first microbatch cast weights."""
        group = self.group.process_group
        named = {"enabled": True, "recipe": self.recipe, "amax_reduction_group": group}
        return named | {"cache_quantized_params": True}

    def end_step(self) -> None:
        """End a step: weights will change, so the next forward casts them again."""
        for layer in self._layers:
            layer.is_first_microbatch = True


def checkpoint(function: Callable[..., Any], *args: Any, rng: RngTracker | None = None) -> Any:
    """`recompute.checkpoint` by the engine's own function: the second pass casts with the scales of the first.

    rng: named random states that `function` draws from.
    """
    tracker = None if rng is None else (lambda: rng)
    found = importlib.import_module("transformer_engine.pytorch")  # importable: a model of its layers exists
    return found.checkpoint(function, *args, get_rng_state_tracker=tracker, use_reentrant=True)
