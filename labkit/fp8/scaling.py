"""The scales of fp8 operands, and the history of amax from which `delayed` computes them.

Two choices differ from Transformer Engine's. First, the history of `delayed` moves on once per optimizer step, not once
per microbatch. Scales then do not depend on the spread of microbatches over ranks, and backward casts recomputed
activations as forward did. A step costs one all-reduce. Every layout of tp, cp, dp and pp computes the same fp8 values
as one process, in float64 to the last bits. With `current` only dp and pp agree with one process.

Second, the first step has no history, so it scales a tensor by its own amax (agreed over tp_cp). A scale of 1 would
flush the gradients of a mean loss to zero, since e5m2 has nothing between 0 and 2^-16.

Ranks that hold copies of a key/value head each cast the gradient of their own query heads. One process casts the sum of
these gradients, so the weight gradients of such layouts agree only to the format's precision.

All experts of a layer share the scale of their rows, and each has a scale for its weight (Transformer Engine has three
scales for each expert). The rows of an expert come from several ranks and microbatches, which own magnitudes could not
tell apart. So in the first step of `delayed` experts compute in the type of their tensors and only note magnitudes.
Every layout of ep and etp then also computes the values of one process. With `current` each rank scales the rows that
it got, so ep and etp change the numbers; so they do with `blockwise`, whose blocks hold other rows.

Shapes: R rows and C columns of an operand, M layers of a model chunk (a layer of E experts counts 1 + E times), L steps
of history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from labkit.comm import collectives
from labkit.comm.groups import Group, ParallelGroups
from labkit.comm.ledger import comm_scope, current_scope
from labkit.fp8 import operands
from labkit.fp8.casting import scale_of
from labkit.fp8.gemms import BlockwiseGemms, CastOperands, Float8Gemms
from labkit.fp8.grouped_gemms import GroupedBlockwiseGemms, GroupedFloat8Gemms
from labkit.fp8.recipe import KINDS, Float8Recipe
from labkit.models.build import LayerSpec
from labkit.moe.experts import StackedLinear
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
        self._members: dict[str, CastOperands] = {}
        self._places: dict[str, int | slice] = {}
        self._layers: list[str] = []
        """The layer of each row of the scales."""
        self._steps = 0
        self._resize()

    def gemms(self, name: str) -> Float8Gemms:
        """The products of the layer `name`.

        Raises:
            ValueError: there is a layer of this name already.
        """
        made = BlockwiseGemms if self.recipe.name == "blockwise" else Float8Gemms
        member = made(self, len(self._layers))
        self._add(name, member, len(self._layers), 1)
        return member

    def grouped_gemms(self, name: str, experts: int, mine: range) -> GroupedFloat8Gemms:
        """The products of the layer `name` of all `experts` of the model, of which this rank holds `mine`.

        The first row of its scales is that of the input and of the output gradient; each expert has a row for its
        weight. Rows of experts on other ranks stay empty until `end_step`, whose maximum over ranks fills them.

        Raises:
            ValueError: there is a layer of this name already.
        """
        first = len(self._layers)
        made = GroupedBlockwiseGemms if self.recipe.name == "blockwise" else GroupedFloat8Gemms
        member = made(self, first, range(first + 1 + mine.start, first + 1 + mine.stop))
        self._add(name, member, slice(first, first + 1 + experts), 1 + experts)
        return member

    def _add(self, name: str, member: CastOperands, place: int | slice, rows: int) -> None:
        if name in self._members:
            raise ValueError(f"the fp8 scales of {name} belong to another layer; names must differ")
        self._members[name], self._places[name] = member, place
        self._layers += [name] * rows
        self._resize()

    @property
    def names(self) -> tuple[str, ...]:
        """The layers, in the order of `scales`."""
        return tuple(self._members)

    @property
    def scales(self) -> Tensor:
        """Scales of `delayed`, [M, 3]: the factors of each layer's input, weight and output gradient."""
        return self._scale_M3

    @property
    def calibrates(self) -> bool:
        """True in the first step of `delayed`, which has no scales of earlier steps."""
        return self.recipe.name == "delayed" and not self._steps

    def note(self, index: int, kind: str, x: Tensor) -> None:
        """Let the amax of x, which is not cast, count for later steps."""
        so_far = self._amax_M3[index, KINDS.index(kind)]
        torch.maximum(so_far, operands.peaks(x.flatten(0, -2)).amax(), out=so_far)

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
        """State of a checkpoint: history [L, 3] and scales [3] of each layer, as copies.

        Those of a layer of E experts are [L, 1 + E, 3] and [1 + E, 3] on every rank, so any ep can load them."""
        histories = {f"{name}.history": self._history_LM3[:, place].clone() for name, place in self._places.items()}
        return histories | {f"{name}.scale": self._scale_M3[place].clone() for name, place in self._places.items()}

    def load_layer_states(self, state: Mapping[str, Tensor], *, steps: int) -> None:
        """The inverse of `layer_states`, after `steps` steps. Layers of other chunks in `state` are ignored.

        Raises:
            KeyError: a layer of this chunk is missing.
        """
        for name, place in self._places.items():
            self._history_LM3[:, place] = state[f"{name}.history"]
            self._scale_M3[place] = state[f"{name}.scale"]
        self._steps = steps

    def _agreed(self, peaks_P: Tensor, group: Group | None, index: int, kind: str) -> Tensor:
        """The largest magnitude over the ranks of `group`, [1]; over one rank the peaks themselves."""
        if group is None or group.size == 1:
            return peaks_P
        phase = "backward" if kind == "grad" else current_scope().phase or "forward"
        with comm_scope(layer=self._layers[index], phase=phase):
            return collectives.all_reduce(peaks_P.amax(), group, "max").view(1)

    def _resize(self) -> None:
        rows = len(self._layers)
        made: Callable[..., Tensor] = lambda *shape: torch.zeros(*shape, rows, 3, device=self._device)  # noqa: E731
        self._amax_M3, self._history_LM3 = made(), made(self.recipe.amax_history_len)
        self._scale_M3 = made() + 1


class Float8Spec(LayerSpec):
    """Linear layers of attention, MLP and experts compute in fp8 by `recipe`; embedding, router, the gate of shared
    experts and output layer keep their type."""

    def __init__(self, recipe: Float8Recipe) -> None:
        self.recipe = recipe

    def precision(self, groups: ParallelGroups, device: torch.device | str | None) -> Precision:
        """The scales of one model chunk."""
        return Float8Scaling(self.recipe, groups, device)

    def expert_linear(self, precision: Precision) -> Callable[..., nn.Module]:
        """The projections of routed experts, with scales from `precision`, which this spec has made."""
        assert isinstance(precision, Float8Scaling)
        return partial(StackedLinear, gemms=precision.grouped_gemms)
