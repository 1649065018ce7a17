"""A microbatch on its way through a model chunk, part by part, so that another microbatch can run between the parts.

The parts of a layer are those of `labkit.schedules.merging`. They are made of the halves and steps that a layer
declares for CUDA graphs (`LayerParts`, `MoELayer`). Autograd's graph is cut between parts: a part reads what the part
before gave as detached tensors, and its backward passes their gradients on. An all-to-all crosses a cut as its ticket
(`comm/in_flight.py`): one part starts it and the next one awaits it, in forward and in backward.

    forward    attention gives h, shared and the tickets of dispatch, experts the ticket of combine, combine the next x
    backward   combine' starts combine', experts' awaits it and starts dispatch', attention' awaits dispatch'

Shapes: S sequence of this rank, B batch, H hidden; N rows that leave or arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from labkit.comm.ledger import comm_scope
from labkit.models.blocks import LayerParts
from labkit.moe.layer import MoELayer
from labkit.parallel.deallocation import custom_backward
from labkit.schedules.merging import DENSE_PARTS, MOE_PARTS, Parts

Outputs = tuple[Tensor | None, ...]


class _Piece:
    """A function that ran on detached inputs, from its forward to its backward."""

    def __init__(self, function: Callable[..., Outputs], *inputs: Tensor | None) -> None:
        self.inputs = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs]
        self.outputs: Outputs = function(*self.inputs)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs, from those of the outputs; None where there is none."""
        pairs = [(y, dy) for y, dy in zip(self.outputs, gradients, strict=True) if y is not None and dy is not None]
        self.outputs = ()
        custom_backward(*map(list, zip(*pairs, strict=True)))  # pyright: ignore[reportArgumentType]
        return [None if x is None else x.grad for x in self.inputs]


class _LayerRun:
    """A layer at one microbatch. `forward` and `backward` take its parts in their order."""

    def __init__(self, layer: LayerParts, rotary: Any) -> None:
        self._layer, self._rotary = layer, rotary
        self._pieces: dict[str, _Piece] = {}
        self._flights: Any = ()
        self._metadata: Any = None
        self._of_attention: list[Tensor | None] = []
        """Gradients of what `combine` read of attention's outputs, until attention's backward."""

    @property
    def parts(self) -> Parts:
        return MOE_PARTS if isinstance(self._layer.mlp, MoELayer) else DENSE_PARTS

    def forward(self, part: str, given: Outputs) -> Outputs:
        """Run a part on what the part before gave; for the first part on (x,)."""
        if part == "combine":
            given = (*given, *self._pieces["attention"].outputs[:2])
        piece = self._pieces[part] = _Piece(getattr(self, f"_{part}"), *given)
        return piece.outputs[2:] if part == "attention" and self.parts == MOE_PARTS else piece.outputs

    def backward(self, part: str, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run a part's backward on what the part after it gave back."""
        gradients = self._pieces.pop(part).backward(gradients)
        if part == "combine":  # what it read of attention's outputs waits for attention's backward
            self._of_attention, gradients = gradients[1:], gradients[:1]
        elif part == "experts":
            gradients = [*self._of_attention, *gradients]
        return gradients

    # ---- the parts ----

    def _attention(self, x_SBH: Tensor) -> Outputs:
        assert self._layer.until_dispatch is not None
        h_SBH, *before = self._layer.until_dispatch(x_SBH, self._rotary)
        if not before:
            return (h_SBH,)
        shared_SBH, rows, probs, metadata = before
        with comm_scope(layer=self._layer.mlp.name):  # pyright: ignore[reportArgumentType]
            self._flights, self._metadata = self._dispatcher.start_dispatch(rows, probs, metadata)
        return (h_SBH, shared_SBH, *(flight.ticket for flight in self._flights))

    def _experts(self, *tickets: Tensor) -> Outputs:
        mlp: Any = self._layer.mlp
        for flight, ticket in zip(self._flights, tickets, strict=True):
            flight.ticket = ticket
        with comm_scope(layer=mlp.name):
            rows, probs = (flight.wait() for flight in self._flights)
            rows, self._metadata = mlp.routed_experts_compute(rows, probs, self._metadata)
            self._flights = (self._dispatcher.start_combine(rows, self._metadata),)
        return (self._flights[0].ticket,)

    def _combine(self, ticket: Tensor, h_SBH: Tensor, shared_SBH: Tensor | None) -> Outputs:
        mlp: Any = self._layer.mlp
        (flight,), self._flights = self._flights, ()
        flight.ticket = ticket
        with comm_scope(layer=mlp.name):
            made_SBH = self._dispatcher.combine_postprocess(flight.wait(), self._metadata)
        self._metadata = None
        return (self._layer.add_mlp(made_SBH if shared_SBH is None else made_SBH + shared_SBH, h_SBH),)

    def _mlp(self, h_SBH: Tensor) -> Outputs:
        return (self._layer.run_mlp(h_SBH),)

    @property
    def _dispatcher(self) -> Any:
        return self._layer.mlp.token_dispatcher


class ChunkParts:
    """One microbatch in a chunk: `begin`, the parts of each layer in their order, `finish`; and the same backward."""

    def __init__(
        self,
        layers: Sequence[LayerParts],
        first: Callable[[], Tensor],
        rotary: Callable[[Tensor], Any],
        last: Callable[[Tensor], Tensor] | None,
        *,
        ties: bool,
    ) -> None:
        """first: gives the hidden states before the layers. rotary: gives the positions' tables, for these. last: what
        the last stage makes of the hidden states after the layers. ties: first and last share a weight."""
        self._declared, self._first, self._rotary, self._last, self.ties = layers, first, rotary, last, ties
        self._layers: list[_LayerRun] = []
        self.last_input: Tensor | None = None
        """What `last` read: the loss's backward leaves its gradient there."""

    @property
    def layers(self) -> list[Parts]:
        """The parts of each layer, after `begin`."""
        return [layer.parts for layer in self._layers]

    def begin(self) -> None:
        """Compute what comes before the layers."""
        self._x_SBH = x_SBH = self._first()
        rotary = self._rotary(x_SBH)
        self._layers = [_LayerRun(layer, rotary) for layer in self._declared]
        self._given: Outputs = (x_SBH,)

    def forward(self, layer: int, part: str) -> None:
        """Run a part of a layer."""
        self._given = self._layers[layer].forward(part, self._given)

    def finish(self) -> Tensor:
        """Return the chunk's output."""
        (x_SBH,), self._given = self._given, ()
        assert x_SBH is not None
        if self._last is None:
            return x_SBH
        self.last_input = x_SBH.detach().requires_grad_(x_SBH.requires_grad)
        return self._last(self.last_input)

    # ---- the same backward ----

    def begin_backward(self, gradient: Tensor) -> None:
        """Take the gradient of the hidden states after the layers."""
        self._gradients: list[Tensor | None] = [gradient]

    def backward(self, layer: int, part: str) -> None:
        """Run the backward of a part of a layer."""
        self._gradients = self._layers[layer].backward(part, self._gradients)

    def finish_backward(self) -> Tensor:
        """Run the backward of what comes before the layers; return the gradient of the hidden states before them."""
        (gradient,) = self._gradients
        gradient = self._x_SBH.new_zeros(self._x_SBH.shape) if gradient is None else gradient
        if not self._x_SBH.is_leaf:
            custom_backward(self._x_SBH, gradient)
        return gradient
