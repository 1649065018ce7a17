"""The result of a capture: the graphs of one callable at one microbatch, and their static tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from labkit.graphs.checks.in_flight_forwards import InFlightForwards
from labkit.graphs.planned_captures import Place
from labkit.graphs.static_inputs import Arguments

if TYPE_CHECKING:
    from labkit.graphs.backend import Graph


class CallableGraphs(NamedTuple):
    """The graphs of one callable at one microbatch."""

    forward: Graph
    backward: Graph | None = None
    """None where no output requires grad."""
    weight: Graph | None = None
    """The graph of weight gradients that the backward leaves out; None where the backward computes them."""


class CaptureTimes(NamedTuple):
    """The times at which the graphs of one callable were captured, as counts of captures in their pool."""

    forward: int
    backward: int
    weight: int | None = None


class CaptureResult:
    """The graphs of one callable at one microbatch, and the tensors at fixed addresses that they read and write.

    A capture fills this in forward, backward and weight gradients; a `GraphedCallable` replays it.
    """

    def __init__(self, arguments: Arguments, inputs: Sequence[Tensor]) -> None:
        self.arguments = arguments
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        """Static inputs; a call copies its tensors into them."""
        self.graphs: CallableGraphs | None = None
        self.output_spec: TreeSpec | None = None
        self.outputs: tuple[Tensor | None, ...] = ()
        """Static outputs; weak references where the pool may use their memory again."""
        self.differentiable: tuple[bool, ...] = ()
        """For each output, True where it takes a gradient."""
        self.grad_outputs: tuple[Tensor | None, ...] = ()
        """Static tensors into which a backward copies the gradients of its outputs."""
        self.grad_inputs: tuple[Tensor | None, ...] = ()
        """Static tensors into which the backward writes the gradients of its inputs."""
        self.parameters: tuple[nn.Parameter, ...] = ()
        """Parameters that the backward reaches. Autograd calls their hooks after a replay."""
        self.grad_parameters: tuple[Tensor | None, ...] = ()
        """None for a parameter whose gradient the graph adds to `main_grad`, or leaves to the weight graph."""
        self.late: tuple[tuple[nn.Parameter, Tensor | None], ...] = ()
        """Parameters of the weight graph, in the order in which it completes them, and their gradients."""

        self.place: Place | None = None
        """The callable's place among those captured together."""
        self.outputs_read: tuple[int, ...] = ()
        """Indices of the outputs that the backward reads."""
        self.changed: tuple[int, ...] = ()
        """Indices of the inputs that the callable changes in place."""
        self.in_grad_mode = False
        """The capture ran with gradients enabled."""
        self.in_inference_mode = False
        """The capture ran in inference mode, so its tensors may not leave that mode."""
        self.times: CaptureTimes | None = None
        """None without a backward, and where replays are not watched."""
        self.in_flight: InFlightForwards | None = None
        """The forwards in flight of the pool; None where replays are not watched."""

    def versions_read(self) -> list[int]:
        """Version counters of the outputs that the backward reads; replays do not count."""
        return (
            []
            if self.in_inference_mode
            else [y._version for i in self.outputs_read if (y := self.outputs[i]) is not None]
        )
