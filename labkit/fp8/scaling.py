"""The scales of fp8 operands, and the history of amax from which `delayed` computes them.

Two choices differ from Transformer Engine's. First, the history of `delayed` moves on once per optimizer step, not once
per microbatch. Scales then do not depend on the spread of microbatches over ranks, and backward casts recomputed
activations as forward did. A step costs one all-reduce. Every layout of tp, cp, dp and pp computes the same fp8 values
as one process, in float64 to the last bits. With `current` only dp and pp agree with one process.

Second, the first step has no history, so it scales a tensor by its own amax (agreed over tp_cp). A scale of 1 would
flush the gradients of a mean loss to zero, since e5m2 has nothing between 0 and 2^-16.

Ranks that hold copies of a key/value head each cast the gradient of their own query heads. One process casts the sum of
these gradients, so the weight gradients of such layouts agree only to the format's precision.

Shapes: R rows and C columns of an operand, M layers of a model chunk, L steps of history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from labkit.comm import collectives
from labkit.comm.groups import Group, ParallelGroups
from labkit.comm.ledger import comm_scope, current_scope
from labkit.fp8 import operands
from labkit.fp8.casting import scale_of
from labkit.fp8.gemms import BlockwiseGemms, Float8Gemms
from labkit.fp8.recipe import KINDS, Float8Recipe
from labkit.models.build import LayerSpec
from labkit.parallel.layers import Precision


class Float8Scaling(Precision):
    """The scales of all fp8 layers of one model chunk.

    Args:
        recipe: formats and scaling.
        groups: this rank's groups.
        device: device of the scales; None is that of the groups.
    """

    def __init__(self, recipe: Float8Recipe, groups: ParallelGroups, device: torch.device | str | None = None) -> None:
        self.recipe = recipe
        self._one_sample, self._stage = groups.tp_cp, groups.tp_dp_cp
        self._device = groups.device if device is None else torch.device(device)
        self._members: dict[str, Float8Gemms] = {}
        self._steps = 0
        self._resize(0)

    def gemms(self, name: str) -> Float8Gemms:
        """The products of the layer `name`.

        Raises:
            ValueError: there is a layer of this name already.
        """
        if name in self._members:
            raise ValueError(f"the fp8 scales of {name} belong to another layer; names must differ")
        made = BlockwiseGemms if self.recipe.name == "blockwise" else Float8Gemms
        self._members[name] = made(self, len(self._members))
        self._resize(len(self._members))
        return self._members[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The layers, in the order of `scales`."""
        return tuple(self._members)

    @property
    def scales(self) -> Tensor:
        """Scales of `delayed`, [M, 3]: the factors of each layer's input, weight and output gradient."""
        return self._scale_M3

    def operand(
        self, index: int, kind: str, x_RC: Tensor, group: Group | None, *, noted: bool, transposed: bool
    ) -> operands.Operand:
        """x in fp8, the reciprocal of its scale (a float32 scalar), and x transposed if asked for and made by kernels.

        group: the ranks that agree on the scale of `current`; None for this rank alone.

        noted: the amax of x counts for later steps, except in an evaluation.
        """
        column, dtype = KINDS.index(kind), self.recipe.dtype(kind)
        delayed = self.recipe.name == "delayed"
        assert delayed or self.recipe.name == "current"
        so_far = self._amax_M3[index, column] if noted and delayed else None
        if delayed and self._steps:
            known = self._scale_M3[index, column]
            return operands.operand_by_history(x_RC, known, dtype, transposed=transposed, so_far=so_far)
        peaks_P = self._agreed(operands.peaks(x_RC), self._one_sample if delayed else group, index, kind)
        margin = self.recipe.margin if delayed else 0
        scale, scale_inv = operands.scales(peaks_P, dtype, margin, so_far=so_far)
        return operands.operand(x_RC, scale, scale_inv, dtype, transposed=transposed)

    def forget_weights(self) -> None:
        """Have all layers cast their weights again at the next use."""
        for member in self._members.values():
            member.forget_weight()

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors that steps change in place: largest magnitudes of this step, those of earlier steps, scales."""
        return self._amax_M3, self._history_LM3, self._scale_M3

    def end_step(self) -> None:
        """End a step after the last backward: forget cast weights, and move the history of `delayed` on.

        All ranks of tp_dp_cp call this; it makes the one all-reduce of a step.
        """
        self.forget_weights()
        if self.recipe.name != "delayed" or not self._members:
            return
        amax_M3 = torch.where(self._amax_M3.isfinite(), self._amax_M3, 0)
        with comm_scope(layer="fp8", phase="amax"):
            amax_M3 = collectives.all_reduce(amax_M3, self._stage, "max")
        self._history_LM3.copy_(torch.cat([amax_M3[None], self._history_LM3[:-1]]))  # in place: a graph may hold this
        chosen = self._history_LM3.amax(0) if self.recipe.amax_compute_algo == "max" else amax_M3
        for column, kind in enumerate(KINDS):
            fresh = scale_of(chosen[:, column], self.recipe.dtype(kind)) / 2**self.recipe.margin
            known = self._scale_M3[:, column]
            known.copy_(torch.where(chosen[:, column] > 0, fresh, known))
        self._amax_M3.zero_()
        self._steps += 1

    def layer_states(self) -> dict[str, Tensor]:
        """State of a checkpoint: history [L, 3] and scales [3] of each layer, as copies."""
        histories = {f"{name}.history": self._history_LM3[:, index].clone() for index, name in enumerate(self._members)}
        return histories | {f"{name}.scale": self._scale_M3[index].clone() for index, name in enumerate(self._members)}

    def load_layer_states(self, state: Mapping[str, Tensor], *, steps: int) -> None:
        """The inverse of `layer_states`, after `steps` steps. Layers of other chunks in `state` are ignored.

        Raises:
            KeyError: a layer of this chunk is missing.
        """
        for index, name in enumerate(self._members):
            self._history_LM3[:, index] = state[f"{name}.history"]
            self._scale_M3[index] = state[f"{name}.scale"]
        self._steps = steps

    def _agreed(self, peaks_P: Tensor, group: Group | None, index: int, kind: str) -> Tensor:
        """The largest magnitude over the ranks of `group`, [1]; over one rank the peaks themselves."""
        if group is None or group.size == 1:
            return peaks_P
        phase = "backward" if kind == "grad" else current_scope().phase or "forward"
        with comm_scope(layer=self.names[index], phase=phase):
            return collectives.all_reduce(peaks_P.amax(), group, "max").view(1)

    def _resize(self, members: int) -> None:
        made: Callable[..., Tensor] = lambda *shape: torch.zeros(*shape, members, 3, device=self._device)  # noqa: E731
        self._amax_M3, self._history_LM3 = made(), made(self.recipe.amax_history_len)
        self._scale_M3 = made() + 1


class Float8Spec(LayerSpec):
    """Linear layers of attention and MLP compute in fp8 by `recipe`; embedding and output layer keep their type."""

    def __init__(self, recipe: Float8Recipe) -> None:
        self.recipe = recipe

    def precision(self, groups: ParallelGroups, device: torch.device | str | None) -> Precision:
        """The scales of one model chunk."""
        return Float8Scaling(self.recipe, groups, device)
