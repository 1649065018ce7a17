"""Graphs of layers in a training run: captured after the warm-up, and again where microbatches come in other shapes.

A graph has fixed shapes, and data may not: the last batch of an epoch is short, a run goes on with longer sequences. So
a microbatch of other shapes runs without graphs, layer by layer, while the others of its step replay; the numbers are
the same. Where all microbatches of `cuda_graph_warmup_steps` steps in a row (1 at least) had one other shape, the next
step captures that shape. Lengths that change all the time therefore cost no captures, and an odd batch no graphs.

    shape of a step   16  16  16  8   16  8   8   8   8       8 and 16 in one step   8
                      eager   replay  replay  eager   replay  both                   replay
                          capture eager   eager   capture                                        warm-up of 2 steps

Another number of microbatches is another `Pipeline`. It takes the layers over: the graphs of the old one are dropped.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labkit.events import not_recording
from labkit.graphs.graphable import Shapes, release_cudagraphs
from labkit.graphs.helper import CudaGraphHelper
from labkit.graphs.memory import GraphMemory
from labkit.parallel.collectives import all_reduce, comm_scope
from labkit.parallel.groups import ParallelGroups

Batches = Iterator[dict[str, Tensor]]
Run = Callable[..., list[Any]]


class LayerGraphs:
    """Captures ahead of a training run, where that is due; a `StepGraphs`."""

    finalizes = False

    def __init__(
        self, run: Run, helper: CudaGraphHelper, warmup_steps: int, *, groups: ParallelGroups, captures_anew: bool
    ) -> None:
        """captures_anew: whether other shapes are captured if they stay. All ranks capture at once, since graphs hold
        collectives; with several ranks that takes a small all-reduce ahead of each step."""
        self.helper: CudaGraphHelper | None = helper
        self._run, self._helper, self._eager_steps_left = run, helper, warmup_steps
        self._groups, self._captures_anew, self._patience = groups, captures_anew, max(1, warmup_steps)
        self.num_captures = 0
        self._misfits: Counter[Shapes] = Counter()
        """Calls of layers in this step that the graphs did not take, by what they were called with."""
        self._wanted: tuple[int, int] | None = None
        """The other (seq_length, micro_batch_size) that all microbatches of the last step had."""
        self._wanted_for = 0
        """For how many steps in a row."""
        self._is_mixed = False
        """Whether the last step had microbatches for which there are no graphs and others."""
        self._told: set[Shapes] = set()

    def memory(self) -> list[GraphMemory]:
        """One pool for all layers."""
        found = self._helper.memory()
        return [] if found is None else [found]

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Eager in evaluation, by the rules of `GraphableMegatronModule`."""
        if forward_only:
            return self._run(batches, forward_only=True)
        self._capture_if_due()
        self._misfits.clear()
        with self._listening():
            reports = self._run(batches, forward_only=False)
        self._count()
        return reports

    def close(self) -> None:
        """The layers are eager again, unless another pipeline has taken them over."""
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
            release_cudagraphs(self._helper.chunks)  # of a pipeline that ran on these layers since
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
        """Whether some rank needs other graphs and no rank has to wait for its shapes to settle; the same on all."""
        wants = self._wanted is not None and self._wanted_for >= self._patience
        settled = wants or (self._wanted is None and not self._is_mixed)
        votes = torch.tensor([wants, not settled], dtype=torch.int32, device=self._groups.device)
        with not_recording(), comm_scope(layer="graphs", phase="capture"):
            wanting, waiting = all_reduce(votes, self._groups.world).tolist()
        return wanting > 0 and waiting == 0

    def _note_misfit(self, shapes: Shapes) -> None:
        self._misfits[shapes] += 1

    def _count(self) -> None:
        """After a step: was it of one other shape from end to end?"""
        calls = len(self._helper.layers) * self._helper.schedule_microbatches
        alike = [shapes for shapes, number in self._misfits.items() if number == calls]
        wanted = self._helper.sizes_of(alike[0]) if alike else None
        self._is_mixed = bool(self._misfits) and wanted is None
        self._wanted_for = self._wanted_for + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        self._tell()

    def _tell(self) -> None:
        """On standard error, once for each shape, from one rank of a replica."""
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
    """`[16, 1, 64]`, and the shapes of what else layers are given."""
    return ", ".join(str(list(shape)) for shape, _ in shapes)
