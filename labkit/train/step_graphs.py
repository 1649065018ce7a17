"""The CUDA graphs of a training run: none, one for each layer and microbatch, or one for the whole iteration.

| `graph.cuda_graph_impl`, scope | training                                     | validation                    |
|--------------------------------|----------------------------------------------|-------------------------------|
| `none`                         | eager                                        | eager                         |
| any, parts of layers           | eager warm-up steps, then layers replay      | eager                         |
| any, `full_iteration`          | eager warm-up steps, then a step is a replay | likewise, a graph of its own  |

The graph of an iteration ends where `finalize_model_grads` ends. What follows reads numbers on the host (norm, clipping
by it, whether all is finite), and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from labkit.config import RunConfig
from labkit.graphs.full_iteration import FullIterationGraph
from labkit.graphs.helper import CudaGraphHelper
from labkit.graphs.scope import captures_layers
from labkit.parallel.fp8 import Float8Scaling
from labkit.parallel.groups import ParallelGroups
from labkit.parallel.param_gather import finish_param_sync
from labkit.schedules.ir import Schedule

Batches = Iterator[dict[str, Tensor]]
Run = Callable[..., list[Any]]


class StepGraphs(Protocol):
    """Runs all microbatches of a step, by whatever graphs there are."""

    finalizes: bool
    """Whether `run` leaves final gradients."""
    helper: CudaGraphHelper | None
    """Of graphs of layers; None where there are none."""

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """One global batch; what the loss function reported."""
        ...


class NoGraphs:
    """Everything eager."""

    finalizes = False
    helper: CudaGraphHelper | None = None

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """As it is."""
        return self._run(batches, forward_only=forward_only)


class LayerGraphs:
    """Layers are captured ahead of the first training run after the warm-up."""

    finalizes = False

    def __init__(self, run: Run, helper: CudaGraphHelper, warmup_steps: int) -> None:
        self.helper: CudaGraphHelper | None = helper
        self._run, self._helper, self._eager_steps_left = run, helper, warmup_steps

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Eager in evaluation, by the rules of `GraphableMegatronModule`."""
        if not forward_only and not self._helper.graphs_created():
            if self._eager_steps_left == 0:
                self._helper.create_cudagraphs()
                self._helper.cuda_graph_set_manual_hooks()
            else:
                self._eager_steps_left -= 1
        return self._run(batches, forward_only=forward_only)


class IterationGraphs:
    """Training and validation steps, each by a graph of its own."""

    finalizes = True
    helper: CudaGraphHelper | None = None

    def __init__(self, training: FullIterationGraph, validation: FullIterationGraph) -> None:
        self.training, self.validation = training, validation

    def run(self, batches: Batches, *, forward_only: bool) -> list[Any]:
        """Eager for the first steps of either kind."""
        return (self.validation if forward_only else self.training)(batches)


def build_step_graphs(
    config: RunConfig,
    groups: ParallelGroups,
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    run: Run,
    run_and_finalize: Callable[[Batches], list[Any]],
) -> StepGraphs:
    """What `config.graph` asks for. run: takes batches and `forward_only`. run_and_finalize: a training run with all
    that makes its gradients final."""
    graph, train = config.graph, config.train
    if graph.cuda_graph_impl == "none":
        return NoGraphs(run)
    if captures_layers(graph):
        length, batch = config.model.seq_length, train.micro_batch_size
        helper = CudaGraphHelper(chunks, graph, length, batch, schedule=schedule, pp_rank=groups.pp.rank)
        return LayerGraphs(run, helper, graph.cuda_graph_warmup_steps)
    shared: dict[str, Any] = {
        "num_microbatches": schedule.num_microbatches,
        "impl": graph.cuda_graph_impl,
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
    """Ahead of a graph that reads all parameters: they are gathered, and fp8 casts them inside."""
    finish_param_sync(chunks)
    for chunk in chunks:
        if isinstance(scaling := getattr(chunk, "float8", None), Float8Scaling):
            scaling.forget_weights()
