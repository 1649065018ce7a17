"""Graphs of layers in a training run: captured after the warm-up, and again if microbatches keep another shape.

A graph has fixed shapes, but data may not: the last batch of an epoch is short, or a run goes on with longer sequences.
A microbatch of another shape runs without graphs, layer by layer, while the other microbatches of its step replay. The
numbers are the same. The next step captures another shape once all microbatches of `cuda_graph_warmup_steps` steps in a
row (at least 1) had it. So lengths that change all the time cost no captures, and one odd batch costs no graphs.

    shape of a step   16  16  16  8   16  8   8   8   8       8 and 16 in one step   8
                      eager   replay  replay  eager   replay  both                   replay
                          capture eager   eager   capture                                        warm-up of 2 steps

Another number of microbatches is another `Pipeline`. It takes over the layers and drops the graphs of the old pipeline.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labkit.comm.collectives import all_reduce, comm_scope
from labkit.comm.groups import ParallelGroups
from labkit.events import not_recording
from labkit.graphs.graphable import Shapes, release_cudagraphs
from labkit.graphs.helper import CudaGraphHelper
from labkit.graphs.memory import GraphMemory

Batches = Iterator[dict[str, Tensor]]
Run = Callable[..., list[Any]]


class LayerGraphs:
    """A `StepGraphs` that captures layers before a training step, when a capture is due."""

    finalizes = False

    def __init__(
        self, run: Run, helper: CudaGraphHelper, warmup_steps: int, *, groups: ParallelGroups, captures_anew: bool
    ) -> None:
        """captures_anew: capture other shapes if they stay. All ranks capture at once, since graphs hold collectives.
        With several ranks this takes a small all-reduce before each step."""
        self.helper: CudaGraphHelper | None = helper
        self._run, self._helper, self._eager_steps_left = run, helper, warmup_steps
        self._groups, self._captures_anew, self._patience = groups, captures_anew, max(1, warmup_steps)
        self.num_captures = 0
        self._misfits: Counter[Shapes] = Counter()
        """Shapes -> number of layer calls in this step that did not fit the graphs."""
        self._wanted: tuple[int, int] | None = None
        """The other (seq_length, micro_batch_size) that all microbatches of the last step had."""
        self._wanted_for = 0
        """Number of steps in a row with these sizes."""
        self._is_mixed = False
        """The last step had microbatches with graphs and microbatches without."""
        self._told: set[Shapes] = set()

    def memory(self) -> list[GraphMemory]:
        """One pool for all layers."""
        found = self._helper.memory()
        return [] if found is None else [found]

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Run one global batch. Evaluation is eager, by the rules of `GraphableMegatronModule`."""
        if forward_only:
            return self._run(batches, forward_only=True)
        self._capture_if_due()
        self._misfits.clear()
        with self._listening():
            reports = self._run(batches, forward_only=False)
        self._count()
        return reports

    def close(self) -> None:
        """Make the layers eager again, unless another pipeline has taken them over."""
        if self._helper.graphs_created():
            self._helper.reset()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        for layer in self._helper.layers:
            layer.cuda_graph_misfit = self._note_misfit
        try:
            yield
        finally:
            for layer in self._helper.layers:
                layer.cuda_graph_misfit = None

    def _capture_if_due(self) -> None:
        if not self._helper.graphs_created():
            if self._eager_steps_left > 0:
                self._eager_steps_left -= 1
                return
            release_cudagraphs(self._helper.chunks)  # graphs of a pipeline that ran on these layers since
            self._helper.create_cudagraphs()
            self._helper.cuda_graph_set_manual_hooks()
        elif self._captures_anew and self._all_want_others():
            length, batch = self._wanted or (None, None)
            self._helper.recapture(seq_length=length, micro_batch_size=batch)
        else:
            return
        self.num_captures += 1
        self._wanted, self._wanted_for = None, 0

    def _all_want_others(self) -> bool:
        """True if some rank needs other graphs and the shapes of every rank have settled; the same on all ranks."""
        wants = self._wanted is not None and self._wanted_for >= self._patience
        settled = wants or (self._wanted is None and not self._is_mixed)
        if self._groups.world.size == 1:  # nobody to ask, so the host need not wait for the device
            return wants
        votes = torch.tensor([wants, not settled], dtype=torch.int32, device=self._groups.device)
        with not_recording(), comm_scope(layer="graphs", phase="capture"):
            wanting, waiting = all_reduce(votes, self._groups.world).tolist()
        return wanting > 0 and waiting == 0

    def _note_misfit(self, shapes: Shapes) -> None:
        self._misfits[shapes] += 1

    def _count(self) -> None:
        """After a step, note the other shape if all its microbatches had the same one."""
        calls = len(self._helper.layers) * self._helper.schedule_microbatches
        alike = [shapes for shapes, number in self._misfits.items() if number == calls]
        wanted = self._helper.sizes_of(alike[0]) if alike else None
        self._is_mixed = bool(self._misfits) and wanted is None
        self._wanted_for = self._wanted_for + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        self._tell()

    def _tell(self) -> None:
        """Print a line for each new shape to standard error, from one rank of a replica."""
        new = [shapes for shapes in self._misfits if shapes not in self._told]
        self._told.update(new)
        groups = self._groups
        for shapes in new if groups.tp.rank == groups.cp.rank == groups.pp.rank == 0 else ():
            if self._helper.sizes_of(shapes) is None:
                after = "layers cannot be captured for it"
            elif self._captures_anew:
                settled = "a whole step is" if self._patience == 1 else f"{self._patience} whole steps in a row are"
                after = f"once {settled} of it, layers are captured anew"
            else:
                after = "set schedule.variable_seq_lengths to have layers captured anew where it stays"
            given, held = (_words(x) for x in (shapes, self._helper.layers[0].cuda_graph_shapes))
            said = f"CUDA graphs: microbatches of {given} run eagerly, because the graphs are of {held}; {after}"
            print(said, file=sys.stderr, flush=True)


def _words(shapes: Shapes) -> str:
    """`[16, 1, 64]`, and the shapes of a layer's other arguments."""
    return ", ".join(str(list(shape)) for shape, _ in shapes)
