"""One graph for all microbatches of a step, forward and backward (`graph.cuda_graph_impl: full_iteration`).

For dense models without pipelining. The first steps run eagerly and read their data from static slots, one for each
microbatch. Then one step is captured. From then on a step copies its batches into the slots and replays the graph.
Training and validation compute different things, so each has an object of this class.

    batches -> slots of fixed address -> graph: all microbatches, gradients reduced over replicas -> results

Every replay writes its results to the same memory, so a caller gets a copy. Python runs only at capture: the captured
function must not look for NaN, change a learning rate, or write a report. A replay records one Event in place of
the Events inside. The graph itself compares token ids and labels with the vocabulary and notes the bad ones. The host
reads the notes after the replay (`labkit.parallel.vocab.token_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from labkit.comm.capturing import require_whole_process
from labkit.events import not_recording, span
from labkit.graphs.backend import Graph, GraphBackend, Pool, choose_impl, get_backend
from labkit.graphs.capture_isolation import counters_kept
from labkit.graphs.checks.before_capture import refuse_records
from labkit.graphs.graphable_module import unwrap_layers
from labkit.graphs.memory import GraphMemory, graph_objects_made
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import RandomStates
from labkit.parallel.vocab.token_ids import TokenIdChecks, token_ids_checked_late

Batch = dict[str, Tensor]
Iteration = Callable[[Iterator[Batch]], Any]
"""A step: takes an iterator of its batches; returns tensors in tuples, lists or dicts."""


class FullIterationGraph:
    """A step that runs eagerly a few times, is captured at the next call, and is replayed from then on."""

    def __init__(
        self,
        function: Iteration,
        *,
        num_microbatches: int,
        impl: str = "auto",
        device: torch.device | str = "cpu",
        warmup_steps: int = 3,
        name: str = "training",
        rng: RngTracker | None = None,
        before: Callable[[], None] | None = None,
        chunks: Sequence[nn.Module] = (),
    ) -> None:
        """Unwrap the layers of `chunks`; nothing runs yet.

        Args:
            function: a step, given an iterator of its batches.
            num_microbatches: number of batches of a step.
            impl: `local`, `emulated`, or `auto` for the one that fits `device`.
            warmup_steps: eager calls before the capture, at least one where something is made lazily.
            name: name in Events.
            rng: named random states that `function` draws from.
            before: called before every run, for work outside the graph, such as waiting for gathered parameters.
            chunks: the model. The capture leaves its counters as they are, and unwraps layers that a `CudaGraphHelper`
                has wrapped, since it captures whole layers.

        Raises:
            ValueError: an impl that cannot hold an iteration, or layers that have graphs of their own.
        """
        unwrap_layers(chunks)
        if impl == "transformer_engine":
            raise ValueError("Transformer Engine captures layers; a whole iteration needs impl = local or emulated")
        self.backend: GraphBackend = get_backend(choose_impl(impl, torch.device(device)), [] if rng is None else [rng])
        self.function, self.name = function, name
        self.num_microbatches, self.warmup_steps = num_microbatches, warmup_steps
        self.graph: Graph | None = None
        """None before the capture and after `reset`."""
        self.pool: Pool = self.backend.new_pool()
        self.eager_steps = 0
        """Eager calls since the start or the last `reset`."""
        self.num_captures = 0
        """Graphs captured since the start, dropped ones included."""
        self._rng, self._before, self._chunks = rng, before, list(chunks)
        self._slots: list[dict[str, Tensor]] = []
        self._results: Any = None
        self._graph_objects: int | None = None
        self._ids = TokenIdChecks(captured=True)

    def __call__(self, batches: Iterator[Batch]) -> Any:
        """One step on the next `num_microbatches` of `batches`. After a change of shapes the eager steps start over.

        Raises:
            ValueError: `batches` ends too early.
            TokenIdError: an id outside the model's vocabulary; raised after the run, or by the block around it
                (`token_ids_checked_late`).
            BrokenProcessError: a failed capture on a GPU could not be repaired.
        """
        require_whole_process()
        self._fill(list(islice(batches, self.num_microbatches)))
        if self._before is not None:
            self._before()
        if self.graph is None and self.eager_steps < self.warmup_steps:
            self.eager_steps += 1
            with self.backend.warming_up(self.pool):
                return self.function(self._batches())
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        with span(f"full iteration, {self.name}", "graph_replay"):
            self.graph.replay()
        self._ids.replayed()
        return tree_map_only(Tensor, torch.clone, self._results)

    def memory(self) -> GraphMemory | None:
        """Memory of the graph and its slots; None without a graph."""
        if self.graph is None:
            return None
        data = [x.nbytes for slot in self._slots for x in slot.values() if isinstance(x, Tensor)]
        return GraphMemory(
            graphs=1, operations=self.graph.num_operations, graph_objects=self._graph_objects, static_inputs=sum(data),
            static_gradients=0, break_points=0,
            pool_peak=self.pool.peak_bytes, pool_reserved=self.pool.reserved_bytes,
            workspaces=self.pool.workspace_bytes,
        )  # fmt: skip

    def reset(self) -> None:
        """Drop graph, slots and results; the next calls are eager again."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self._results, self._slots, self.eager_steps = None, None, [], 0
        self._ids = TokenIdChecks(captured=True)
        self.pool = self.backend.new_pool()

    def _batches(self) -> Iterator[Batch]:
        return iter([dict(slot) for slot in self._slots])

    def _fill(self, batches: list[Batch]) -> None:
        if len(batches) < self.num_microbatches:
            raise ValueError(f"{len(batches)} batches for the {self.num_microbatches} microbatches of a step")
        if [_shape(batch) for batch in batches] != [_shape(slot) for slot in self._slots]:
            self.reset()
            self._slots = [
                {key: x.clone() if isinstance(x, Tensor) else x for key, x in batch.items()} for batch in batches
            ]
            return
        for slot, batch in zip(self._slots, batches, strict=True):
            for key, x in batch.items():
                if isinstance(x, Tensor):
                    slot[key].copy_(x, non_blocking=True)

    def _capture(self) -> None:
        """Record one step and drop its results; the replay after it draws the same random numbers."""
        for chunk in self._chunks:
            refuse_records(chunk)
        self.backend.before_captures(self.pool)
        states = RandomStates.now(self._rng)
        name = f"full iteration, {self.name}"
        with (
            span(f"capture, {name}", "timer"),
            not_recording(),
            counters_kept(self._chunks),
            token_ids_checked_late(self.backend.device_type, captured=True) as ids,
            graph_objects_made(self.backend.device_type) as objects,
            self.backend.capturing(self.pool, name) as graph,
        ):
            self._results = self.function(self._batches())
        self._results = tree_map_only(Tensor, Tensor.detach, self._results)
        states.restore(self._rng)
        self.graph, self._ids, self._graph_objects = graph, ids, objects[0] if objects else None
        self.num_captures += 1


def _shape(batch: Batch) -> dict[str, Any]:
    """Shapes and types of the tensors, and all other values; none of them may change between steps."""
    return {key: (x.shape, x.dtype) if isinstance(x, Tensor) else x for key, x in batch.items()}
