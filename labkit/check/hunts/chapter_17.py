"""Hunt of chapter 17: captured layers in a pipeline, their buffers and their pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import FIRST_TENSOR, NUMBERS_AGREE, Fault, Hunt
from labkit.graphs import cuda_graph_helper
from labkit.graphs.cuda_graph_helper import CudaGraphHelper
from labkit.graphs.graphed_callable import GraphedCallable

# ---- the faults ----


def _input_given_away() -> AbstractContextManager[Any]:
    """Rank 0 gives every static input back one step before its backward."""
    honest = CudaGraphHelper.create_cudagraphs

    def create(self: CudaGraphHelper, **_: int) -> None:
        honest(self, early_release=1 if self.pp_rank == 0 else 0)

    return patch.object(CudaGraphHelper, "create_cudagraphs", create)


def _gradient_not_copied() -> AbstractContextManager[Any]:
    """On rank 0 the backward of microbatch 1 reads the dy that the replay before left."""
    honest = CudaGraphHelper.create_cudagraphs

    def create(self: CudaGraphHelper, **options: int) -> None:
        honest(self, **options)
        if self.pp_rank == 0:
            graphed = self.callables_per_chunk[0][-1].cuda_graphs[1]
            graphed.replay_backward = partial(_stale, graphed)  # pyright: ignore[reportAttributeAccessIssue]

    return patch.object(CudaGraphHelper, "create_cudagraphs", create)


def _stale(graphed: GraphedCallable, grads: Sequence[Any], owned: Sequence[bool], flight: Any = None) -> Any:
    return GraphedCallable.replay_backward(graphed, graphed.captured.grad_outputs, owned, flight)


def _nothing_given_back() -> AbstractContextManager[Any]:
    """Outputs and gradients stay in the pool for good."""
    honest: Callable[..., Any] = cuda_graph_helper.make_graphed_callables

    def make(*args: Any, **options: Any) -> Any:
        return honest(*args, **options | {"reuse_buffers": False})

    return patch.object(cuda_graph_helper, "make_graphed_callables", make)


def _layer_left_eager() -> AbstractContextManager[Any]:
    """Rank 1 does not capture the first layer of its first chunk."""
    honest = CudaGraphHelper.__init__

    def init(self: CudaGraphHelper, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        if self.pp_rank == 1:
            del self.callables_per_chunk[0][0]

    return patch.object(CudaGraphHelper, "__init__", init)


# ---- what a verdict says ----

_FIRST = {"": "The microscope reads from the output back to the input. Let it run three steps, the third one replays."}
_RANK = {"": "Which ranks' gradients, pools and replays are as they should be? It is none of those ranks."}

HUNT = Hunt(
    chapter="17",
    scene=(
        "Train with it, with graphs, for three steps or more (two are eager). The microscope names tensors. The line "
        "of metrics about the graphs has static_input_bytes and pool_peak_bytes, least and most over the ranks. The "
        "events have every graph_replay."
    ),
    questions={
        "family": "What kind of fault is it?",
        "rank": "Which rank of the pipeline has it?",
        "tensor": "What is overwritten, kept or missing: static input, static gradient, pool, graph?",
        "first": FIRST_TENSOR,
    },
    choices={"rank": ("0", "1", "2", "3", "all")},
    faults=(
        Fault(
            "gradient not copied",
            _gradient_not_copied,
            {"family": "reused memory|wrong data", "rank": "0", "tensor": "static (grad|dy)|^dy|grad.?output|gradient",
             "first": r"mlp\.fc2\.bias gradient"},
            {
                "family": {"": "The loss is right; a gradient is wrong from the top of one rank's layers down."},
                "rank": {"": "Which rank holds the first layer whose gradients are wrong? Its neighbours' are right."},
                "tensor": {
                    "input": "With a wrong static input the norm would be the first. Here even the last bias is wrong, "
                    "and that is a sum of dy.",
                    "": "The last bias of a layer is a sum of one tensor. Of which?",
                },
                "first": _FIRST,
            },
            "On rank 0 the dy of microbatch 1 was not copied into the static gradient, so the backward graph read the "
            "dy that the replay before had left there. Even the last bias of the rank's layers is wrong, because it is "
            "a sum of dy, and everything below it is wrong as well.",
        ),
        Fault(
            "nothing given back",
            _nothing_given_back,
            {"family": "kept memory", "rank": "all|0", "tensor": "pool|output|activation", "first": "none"},
            {
                "family": {"": "The numbers are right, and every layer replays. What does the run need more of?"},
                "rank": {"": "Compare least and most of pool_peak_bytes with a healthy run's. Do both differ, or one?"},
                "tensor": {
                    "input": "Static inputs are not in the pool, and there are as many as the plan says.",
                    "": "What grows with the number of microbatches, and should grow with those in flight?",
                },
                "first": {"": NUMBERS_AGREE},
            },
            "The three rules were off: outputs and static gradients stayed in the pool. The numbers are right, but the "
            "pool grows with the number of microbatches and not with those in flight.",
        ),
        Fault(
            "layer left eager",
            _layer_left_eager,
            {"family": "not captured", "rank": "1", "tensor": "graph|capture|replay", "first": "none"},
            {
                "family": {
                    "slow": "It would be, on a GPU. But the reason can be counted here, too.",
                    "": "The numbers are right, and the pools are not larger than they should be.",
                },
                "rank": {"": "Count the events of kind graph_replay of each rank, and compare them with 2 L m."},
                "tensor": {"": "What do this rank's events lack?"},
                "first": {"": NUMBERS_AGREE},
            },
            "Rank 1 did not capture the first layer of its chunk. It ran eagerly between the others' graphs: right in "
            "every digit, and with all the launches that graphs were meant to save. Its events have fewer replays than "
            "2 L m, and its pool is smaller.",
        ),
        Fault(
            "input given away",
            _input_given_away,
            {"family": "reused memory", "rank": "0", "tensor": "static input|buffer",
             "first": r"norm\.weight gradient"},
            {
                "family": {
                    "kept": "The pool is as large as it should be.",
                    "": "The loss of the steps is right at first, and a gradient is wrong only when replays are in "
                    "flight at the same time.",
                },
                "rank": _RANK,
                "tensor": {
                    "gradient": "The first bias of the layer is right, so dy was right: what else does a norm read?",
                    "pool": "Everything in the pool was right: the gradients of the matrices above the norm agree.",
                    "": "Which operation reads the tensor again in backward? The first wrong parameter belongs to it.",
                },
                "first": _FIRST,
            },
            "Rank 0 gave each static input back one step before its backward, and the forward of a later microbatch "
            "wrote into it. The backward of a norm reads its input again, so the norm's weight is the first wrong "
            "gradient; its bias is right, because it is a sum of dy. The metrics say it too: rank 0 has fewer bytes of "
            "static inputs than its microbatches in flight need.",
        ),
    ),
)  # fmt: skip
