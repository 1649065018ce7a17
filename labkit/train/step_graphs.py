"""The CUDA graphs of a training run: one for each layer and microbatch, or one for the whole iteration.

| `graph.cuda_graph_impl`                   | training                                    | validation                |
|-------------------------------------------|---------------------------------------------|---------------------------|
| `local`, `transformer_engine`, `emulated` | eager warm-up steps, then layers replay (1) | eager                     |
| `full_iteration`                          | eager warm-up steps, then a step replays    | likewise, its own graph   |

(1) `labkit.train.layer_graphs`: microbatches of other shapes are eager, and captured anew if they stay.

The graph of an iteration ends with `finalize_model_grads`. The code after it reads numbers on the host: the norm, which
clips, and the check that all gradients are finite. The optimizer follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.config import RunConfig
from labkit.fp8.scaling import Float8Scaling
from labkit.graphs.checks.uncapturable import refuse_gloo
from labkit.graphs.full_iteration import FullIterationGraph
from labkit.graphs.graphable import release_cudagraphs
from labkit.graphs.helper import CudaGraphHelper
from labkit.graphs.memory import GraphMemory
from labkit.graphs.scope import captures_layers
from labkit.parallel.data_parallel.param_gather import finish_param_sync
from labkit.schedules.ir import Schedule
from labkit.train.layer_graphs import LayerGraphs

Batches = Iterator[dict[str, Tensor]]
Run = Callable[..., list[Any]]


class StepGraphs(Protocol):
    """Runs all microbatches of a step with its graphs."""

    finalizes: bool
    """`run` leaves final gradients."""
    helper: CudaGraphHelper | None
    """Helper of the layers' graphs; None for a graph of the iteration."""

    @property
    def num_captures(self) -> int:
        """Number of captures of this run so far; the same on all ranks."""
        ...

    def memory(self) -> list[GraphMemory]:
        """Memory of this rank's graphs, one entry for each pool; [] if the backend does not know."""
        ...

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Run one global batch; returns the reports of the loss function."""
        ...

    def close(self) -> None:
        """Let all graphs go at the end of the run, also after an exception. A communicator inside a graph would
        otherwise not end."""
        ...


class IterationGraphs:
    """Training and validation steps, each by a graph of its own."""

    finalizes = True
    helper: CudaGraphHelper | None = None

    def __init__(self, training: FullIterationGraph, validation: FullIterationGraph) -> None:
        self.training, self.validation = training, validation

    @property
    def num_captures(self) -> int:
        """Captures of training and of validation."""
        return self.training.num_captures + self.validation.num_captures

    def memory(self) -> list[GraphMemory]:
        """Training and validation each have their own pool."""
        return [found for one in (self.training, self.validation) if (found := one.memory()) is not None]

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Run one global batch; the first steps of either kind are eager."""
        return (self.validation if forward_only else self.training)(batches)

    def close(self) -> None:
        """Let both graphs go."""
        self.training.reset()
        self.validation.reset()


def build_step_graphs(
    config: RunConfig,
    groups: ParallelGroups,
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    run: Run,
    run_and_finalize: Callable[[Batches], list[Any]],
) -> StepGraphs:
    """The graphs that `config.graph` asks for; its `cuda_graph_impl` is not `none`.

    run: takes batches and `forward_only`. run_and_finalize: a training run that also finalises its gradients.
    """
    graph, train = config.graph, config.train
    if captures_layers(graph):
        release_cudagraphs(chunks)  # of a pipeline with another number of microbatches
        length, batch = config.model.seq_length, train.micro_batch_size
        helper = CudaGraphHelper(chunks, graph, length, batch, schedule=schedule, pp_rank=groups.pp.rank)
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
        "before": partial(_settle, chunks),
        "chunks": chunks,
    }
    return IterationGraphs(
        FullIterationGraph(run_and_finalize, name="training", **shared),
        FullIterationGraph(partial(run, forward_only=True), name="validation", **shared),
    )


def _settle(chunks: Sequence[Any]) -> None:
    """Gather all parameters before a graph reads them. fp8 forgets its casts, so that the graph casts them again."""
    finish_param_sync(chunks)
    for chunk in chunks:
        if isinstance(scaling := getattr(chunk, "precision", None), Float8Scaling):
            scaling.forget_weights()
