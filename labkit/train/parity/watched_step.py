"""One optimizer step of a run, watched: the gradient of every parameter, and the inputs of chosen modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from labkit.comm.groups import ParallelGroups
from labkit.parallel.parameters.parameter_record import main_grad_of, name_of
from labkit.schedules.ir import Schedule


class WatchedStep:
    """Observes a run (see `labkit.train.pretraining.Observer`) and keeps copies on the CPU of what one step computes.

    Each rank keeps its own parts and does not communicate.
    """

    def __init__(self, step: int, inputs_of: str | None = None) -> None:
        """step: the step to watch, 0 is the first.
        inputs_of: end of the names of the modules whose inputs are kept. Modules with hooks cannot become CUDA graphs,
            so this is for runs without graphs.
        """
        self.gradients: dict[str, Tensor] = {}
        """Parameter -> final gradient before clipping."""
        self.inputs: dict[str, list[Tensor]] = {}
        """Module's weight -> first input of each call, in the order of the forwards: one per microbatch."""
        self._step, self._inputs_of = step, inputs_of
        self._handles: list[RemovableHandle] = []

    def on_model(self, groups: ParallelGroups, chunks: Sequence[nn.Module], schedule: Schedule) -> None:
        """Hook the chosen modules."""
        for module in (each for chunk in chunks for each in chunk.named_modules()):
            if self._inputs_of is not None and module[0].endswith(self._inputs_of):
                self._handles.append(module[1].register_forward_pre_hook(self._keep))

    def on_gradients(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Keep what this step has computed, if it is the one to watch; else forget its inputs."""
        if step < self._step:
            self.inputs.clear()
        elif step == self._step:
            parameters = [each for chunk in chunks for each in chunk.parameters()]
            self.gradients = {name_of(each): main_grad_of(each).cpu().clone() for each in parameters}
            while self._handles:
                self._handles.pop().remove()

    def on_update(self, step: int, chunks: Sequence[nn.Module]) -> None:
        """Nothing to keep."""

    def _keep(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        weight: Any = module.weight
        self.inputs.setdefault(name_of(weight), []).append(inputs[0].detach().cpu().clone())
