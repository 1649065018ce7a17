"""The CUDA graphs of a training run: when they are captured, and which steps they replay.

| `graph.cuda_graph_impl`                   | class                 | training                                       |
|-------------------------------------------|-----------------------|------------------------------------------------|
| `local`, `transformer_engine`, `emulated` | `LayerGraphs`         | eager warm-up steps, then every layer replays  |
| `full_iteration`                          | `FullIterationGraphs` | eager warm-up steps, then the whole step does  |

Validation is eager beside `LayerGraphs`; beside `FullIterationGraphs` it has a graph of its own.

The graph of an iteration ends with `finalize_model_grads`, because the code after it reads numbers on the host: the
norm, which clips, and the check that all gradients are finite. The optimizer follows.

Graphs of layers have fixed shapes, but data may not: the last batch of an epoch is short, or a run goes on with longer
sequences. A microbatch of another shape runs without graphs, layer by layer, while the other microbatches of its step
replay. The numbers are the same. The next step captures another shape once all microbatches of
`cuda_graph_warmup_steps` steps in a row (at least 1) had it. So lengths that change all the time cost no captures, and
one odd batch costs no graphs.

    shape of a step   16  16  16  8   16  8   8   8   8       8 and 16 in one step   8
                      eager   replay  replay  eager   replay  both                   replay
                          capture eager   eager   capture                                        warm-up of 2 steps

Another number of microbatches is another `Pipeline`. It takes over the layers and drops the graphs of the old pipeline.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.collectives import all_reduce
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import RunConfig
from labkit.events import not_recording
from labkit.fp8.scaling import Float8Scaling
from labkit.graphs.checks.before_capture import refuse_gloo
from labkit.graphs.cuda_graph_helper import CudaGraphHelper
from labkit.graphs.full_iteration import FullIterationGraph
from labkit.graphs.graphable_module import Shapes, release_cudagraphs
from labkit.graphs.memory import GraphMemory
from labkit.graphs.scope import captures_layers
from labkit.parallel.data_parallel.param_gather import finish_param_sync
from labkit.schedules.ir import Schedule

Batches = Iterator[dict[str, Tensor]]
Run = Callable[..., list[Any]]
"""Runs all microbatches of a global batch eagerly: takes `Batches` and `forward_only`, returns the loss function's
reports."""


class LayerGraphs:
    """Graphs of the layers, captured before a training step when a capture is due."""

    finalizes = False
    """`forward_backward` leaves gradients that `finalize_model_grads` has yet to complete."""

    def __init__(
        self, run: Run, helper: CudaGraphHelper, warmup_steps: int, *, groups: ParallelGroups, captures_anew: bool
    ) -> None:
        """captures_anew: capture other shapes if they stay. All ranks capture at once, since graphs hold collectives.
        With several ranks this takes a small all-reduce before each step."""
        self.helper = helper
        self.num_captures = 0
        """Number of captures of this run so far; the same on all ranks."""
        self._run, self._eager_steps_left = run, warmup_steps
        self._groups, self._captures_anew, self._patience = groups, captures_anew, max(1, warmup_steps)
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
        """Memory of this rank's graphs, which share one pool; [] if the backend does not know."""
        found = self.helper.memory()
        return [] if found is None else [found]

    def forward_backward(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Run one global batch; returns the reports of the loss function. Evaluation is eager."""
        if forward_only:
            return self._run(batches, forward_only=True)
        self._capture_if_due()
        self._misfits.clear()
        with self._listening():
            reports = self._run(batches, forward_only=False)
        self._count()
        return reports

    def close(self) -> None:
        """Make the layers eager again at the end of the run, unless another pipeline has taken them over."""
        if self.helper.graphs_created():
            self.helper.reset()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        for layer in self.helper.layers:
            layer.cuda_graph_misfit = self._note_misfit
        try:
            yield
        finally:
            for layer in self.helper.layers:
                layer.cuda_graph_misfit = None

    def _capture_if_due(self) -> None:
        if not self.helper.graphs_created():
            if self._eager_steps_left > 0:
                self._eager_steps_left -= 1
                return
            release_cudagraphs(self.helper.chunks)  # graphs of a pipeline that ran on these layers since
            self.helper.create_cudagraphs()
            self.helper.cuda_graph_set_manual_hooks()
        elif self._captures_anew and self._all_want_others():
            length, batch = self._wanted or (None, None)
            self.helper.recapture(seq_length=length, micro_batch_size=batch)
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
        calls = len(self.helper.layers) * self.helper.schedule_microbatches
        alike = [shapes for shapes, number in self._misfits.items() if number == calls]
        wanted = self.helper.sizes_of(alike[0]) if alike else None
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
            if self.helper.sizes_of(shapes) is None:
                after = "layers cannot be captured for it"
            elif self._captures_anew:
                settled = "a whole step" if self._patience == 1 else f"{self._patience} whole steps in a row"
                after = f"after {settled} of that shape, layers are captured again"
            else:
                after = "set schedule.variable_seq_lengths to have layers captured again for a lasting shape"
            given, held = (_words(x) for x in (shapes, self.helper.layers[0].cuda_graph_shapes))
            said = f"CUDA graphs: microbatches of shape {given} run eagerly, because the graphs have {held}; {after}"
            print(said, file=sys.stderr, flush=True)


def _words(shapes: Shapes) -> str:
    """`[16, 1, 64]`, and the shapes of a layer's other arguments."""
    return ", ".join(str(list(shape)) for shape, _ in shapes)


class FullIterationGraphs:
    """A graph of the whole training step, and another of the whole validation step."""

    finalizes = True
    """`forward_backward` leaves final gradients, since `finalize_model_grads` is inside the graph."""

    def __init__(self, training: FullIterationGraph, validation: FullIterationGraph) -> None:
        self.training, self.validation = training, validation

    @property
    def num_captures(self) -> int:
        """Number of captures of this run so far; the same on all ranks."""
        return self.training.num_captures + self.validation.num_captures

    def memory(self) -> list[GraphMemory]:
        """Memory of this rank's graphs: training and validation each have a pool."""
        return [found for one in (self.training, self.validation) if (found := one.memory()) is not None]

    def forward_backward(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Run one global batch; the first steps of either kind are eager."""
        return (self.validation if forward_only else self.training)(batches)

    def close(self) -> None:
        """Drop both graphs at the end of the run, also after an exception.

        Otherwise a communicator inside a graph would not end.
        """
        self.training.reset()
        self.validation.reset()


TrainingGraphs = LayerGraphs | FullIterationGraphs
"""Runs all microbatches of each step, by the graphs that `graph.cuda_graph_impl` names."""


def build_graphs(
    config: RunConfig,
    groups: ParallelGroups,
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    run: Run,
    run_and_finalize: Callable[[Batches], list[Any]],
) -> TrainingGraphs:
    """The graphs that `config.graph` asks for; its `cuda_graph_impl` is not `none`.

    run_and_finalize: a training run that also finalises its gradients.
    """
    graph, train = config.graph, config.train
    if captures_layers(graph):
        release_cudagraphs(chunks)  # of a pipeline with another number of microbatches
        length, batch = config.model.seq_length, train.micro_batch_size
        delays = config.schedule.delay_wgrad_compute
        rank = groups.pp.rank
        helper = CudaGraphHelper(
            chunks, graph, length, batch, schedule=schedule, pp_rank=rank, delay_wgrad_compute=delays
        )
        varies = config.schedule.variable_seq_lengths or groups.world.size == 1
        return LayerGraphs(run, helper, graph.cuda_graph_warmup_steps, groups=groups, captures_anew=varies)
    inside = groups.tp, groups.cp, groups.dp, groups.ep, groups.etp
    refuse_gloo(inside, groups.device, graph.cuda_graph_impl)
    shared: dict[str, Any] = {
        "num_microbatches": schedule.num_microbatches,
        "impl": "auto" if graph.cuda_graph_impl == "full_iteration" else graph.cuda_graph_impl,
        "device": groups.device,
        "warmup_steps": graph.cuda_graph_warmup_steps,
        "rng": next((chunk.rng for chunk in chunks if getattr(chunk, "rng", None) is not None), None),
        "before": partial(_make_parameters_ready, chunks),
        "chunks": chunks,
    }
    return FullIterationGraphs(
        FullIterationGraph(run_and_finalize, name="training", **shared),
        FullIterationGraph(partial(run, forward_only=True), name="validation", **shared),
    )


def _make_parameters_ready(chunks: Sequence[Any]) -> None:
    """Gather all parameters before a graph reads them. fp8 forgets its casts, so that the graph casts them again."""
    finish_param_sync(chunks)
    for chunk in chunks:
        if isinstance(scaling := getattr(chunk, "precision", None), Float8Scaling):
            scaling.forget_weights()
