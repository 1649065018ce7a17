"""Hunt of chapter 18: graphs that end inside a layer of experts, and what passes from them to the rest of the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.comm.capturing import is_graph_capturing
from labkit.config import GraphConfig
from labkit.graphs import partial_moe
from labkit.graphs.graphable_module import GraphableMegatronModule
from labkit.graphs.partial_moe import CutMoELayer
from labkit.moe.balance import AuxLossAutoScaler

# ---- the faults ----


def _between(layer: str, changed: Callable[[CutMoELayer, list[Tensor]], list[Tensor]]) -> AbstractContextManager[Any]:
    """Change what one layer's graph hands to the rest of the layer, on every rank."""
    honest = partial_moe.fill_store

    def fill(cut: CutMoELayer, outputs: Sequence[Tensor]) -> Tensor:
        return honest(cut, changed(cut, list(outputs)) if cut.moe_layer.name.startswith(layer) else outputs)

    return patch.object(partial_moe, "fill_store", fill)


def _weights_cut_off() -> AbstractContextManager[Any]:
    """The weights of layer 1's rows lead no gradient back into the graph."""
    return _between("layers.1.", lambda _, out: [out[0], out[1].detach(), *out[2:]])


def _residual_cut_off() -> AbstractContextManager[Any]:
    """The residual of layer 0 leads no gradient back into the graph."""
    return _between("layers.0.", lambda _, out: [*out[:-1], out[-1].detach()])


def _first_tokens() -> AbstractContextManager[Any]:
    """In layer 1 rows return to the tokens of the first replay."""

    def changed(cut: CutMoELayer, out: list[Tensor]) -> list[Tensor]:
        place = 2 + cut.valid_cudagraph_attrs.index("token_of_row_N")
        out[place] = vars(cut).setdefault("first_tokens", out[place].clone())
        return out

    return _between("layers.1.", changed)


def _start_of_the_capture() -> AbstractContextManager[Any]:
    """Captured backwards start the routers' own losses at 1, and not at the value of the step."""
    honest = AuxLossAutoScaler.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        dy, start, nothing = honest(ctx, *grads)
        return dy, start / start if is_graph_capturing() else start, nothing

    return patch.object(AuxLossAutoScaler, "backward", staticmethod(backward))


def _ends_after_the_router() -> AbstractContextManager[Any]:
    """Layer 0's graph ends after the router."""
    honest = GraphableMegatronModule.__init__

    def init(self: GraphableMegatronModule, layer: Any, graph: GraphConfig) -> None:
        words = tuple(word for word in graph.cuda_graph_modules if word != "moe_preprocess")
        name = getattr(layer.parts().mlp, "name", "")
        honest(self, layer, replace(graph, cuda_graph_modules=words) if name.startswith("layers.0.") else graph)
        self.graph = graph

    return patch.object(GraphableMegatronModule, "__init__", init)


# ---- what a verdict says ----

_RIGHT = "Loss, gradients and parameters agree with one process, so no tensor is wrong: say 'none'."
_FIRST = {
    "none": "A gradient is wrong: compare those of step 2 with a healthy run's.",
    "": "Read from the output back to the input: layer 1 before layer 0, in a layer the experts, the router, the norm "
    "and then attention. Which gradient is the first that is wrong?",
}
_LAYER = {
    "": "In which layer is the first wrong gradient, read from the output? What lies below it has only inherited the "
    "fault. If all gradients are right, ask how the pools differ.",
}

HUNT = Hunt(
    chapter="18",
    scene=(
        "Train with it, with graphs up to the permutation, for three steps or more (two are eager). You have the "
        "losses, the gradient of every parameter in the first step that replays, and the metrics of the graphs."
    ),
    questions={
        "family": "What kind of fault is it?",
        "layer": "Which layer has it?",
        "what": "What is treated wrongly (a word or two): one of the tensors that cross the end of a graph, such as "
        "rows or the residual, a loss, or a step?",
        "first": "What is the first that is wrong, from the loss back to the input: the loss, which gradient (give its "
        "parameter's name), or none?",
    },
    choices={"layer": ("0", "1", "both")},
    faults=(
        Fault(
            "weights cut off",
            _weights_cut_off,
            {"family": "wrong data|wrong scale", "layer": "1", "what": "prob|weight",
             "first": r"layers\.1\.mlp\.(router|norm)"},
            {
                "family": {"": "The loss is right, so the forward is. A gradient lacks most of its length."},
                "layer": _LAYER,
                "what": {
                    "row|hidden": "The norm would lose nearly all of its gradient then. How much does it lose?",
                    "residual|^x": "Attention would lose most of its gradient then.",
                    "": "Through which tensor does a router learn from the model's loss?",
                },
                "first": _FIRST,
            },
            "In layer 1 the weights of the rows went into the store without their history. The loss is right to the "
            "bit. Only through these weights does a router learn from the model's loss, so what is left of its "
            "gradient is the z loss's. The norm below it lacks the router's share, and so does all that is further "
            "down.",
        ),
        Fault(
            "residual cut off",
            _residual_cut_off,
            {"family": "wrong data|wrong scale", "layer": "0", "what": r"residual|\bx\b",
             "first": r"layers\.0\.attention\.proj"},
            {
                "family": {"": "The loss is right, so the forward is. A gradient lacks most of its length."},
                "layer": _LAYER,
                "what": {
                    "prob|weight": "The router of that layer has its whole gradient.",
                    "row|hidden": "The norm in front of the experts has its whole gradient.",
                    "": "Which tensor goes from attention past the experts, to the end of the layer?",
                },
                "first": _FIRST,
            },
            "In layer 0 the residual left the graph without its history. Experts, router and norm have right "
            "gradients; attention gets only what comes back through the norm, and that is the smaller part. The loss "
            "is right to the bit.",
        ),
        Fault(
            "first tokens",
            _first_tokens,
            {"family": "wrong data|reused memory", "layer": "1", "what": "token|metadata|permutation|map",
             "first": "loss|final_norm"},
            {
                "family": {"": "The loss itself is wrong from step 2 on, so a forward reads something wrong."},
                "layer": {
                    "0": "Even the gradients above layer 1 are wrong, so the output of layer 1 is.",
                    "": "The loss is wrong, and with it every gradient. Look at which errors are largest: which "
                    "layer's experts get the gradients of other tokens?",
                },
                "what": {
                    "count|split": "Then the experts would get rows of their neighbours, and their gradients would be "
                    "wrong by as much in one microbatch as in two. Here the first microbatch of all is right.",
                    "": "Which integers does a graph hand on that say where a row came from?",
                },
                "first": {
                    "": "Look at the losses before you look at a gradient.",
                },
            },
            "In layer 1 the rows of every replay returned to the tokens of the first one: a list of the metadata "
            "stayed as it was, as an attribute does that no graph gives out. Shapes and sums fit, so nothing raised, "
            "and this early in the training the loss moves little.",
        ),
        Fault(
            "start of the capture",
            _start_of_the_capture,
            {"family": "wrong scale", "layer": "both|1", "what": "aux|balanc|load|z.?loss|own loss|start|scale",
             "first": r"layers\.1\.mlp\.(router|norm)"},
            {
                "family": {"": "The loss is right, and no gradient is missing. Both routers' gradients have another "
                           "length."},
                "layer": {"0": "The router of layer 1 is wrong as well, and above it everything is right."},
                "what": {
                    "prob": "Then only one router would be wrong, and it would lack most of its gradient.",
                    "": "Which losses does a router have of its own, and from which number do their gradients start?",
                },
                "first": _FIRST,
            },
            "The captured backwards started the gradients of the routers' own losses (balancing and z) at 1, as a "
            "number that Python had at the capture. The value of the step is 1 divided by the microbatches, so these "
            "losses pulled too strongly at both routers. The model's loss does not contain them, and is right.",
        ),
        Fault(
            "ends after the router",
            _ends_after_the_router,
            {"family": "not captured", "layer": "0", "what": "preprocess|permut", "first": "none"},
            {
                "family": {
                    "kept": "The pool is smaller than a healthy one, not larger.",
                    "slow": "It would be, on a GPU. But the reason can be counted here, too.",
                    "": "Every number is right, and every graph replays. Compare the pool with a healthy one.",
                },
                "layer": {"1": "That is a good guess. Ask which layer's graph gives out fewer rows.",
                          "both": "Then the pool would have shrunk by twice as much: your function of section 3 says "
                          "by how much."},
                "what": {"": "Which step makes k rows of each token? Without it a graph gives out less."},
                "first": {"": _RIGHT},
            },
            "The graph of layer 0 ended after the router, so counting and sorting were launched one by one. Every "
            "digit is right and the replays are as many as before. What tells is the pool: without k rows per token it "
            "is smaller.",
        ),
    ),
)  # fmt: skip
