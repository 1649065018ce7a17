"""Hunt of chapter 14: a router that is balanced by a bias and a loss, and what its gradients and its bias say."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from labkit.check.hunts.hunting import Fault, Hunt
from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import current_scope
from labkit.moe import router
from labkit.train import stepping

# ---- the faults ----


def _own_load() -> AbstractContextManager[Any]:
    """Each rank moves its biases by the load of its own tokens."""
    honest = router.all_reduce

    def all_reduce(counts: Tensor, *args: Any) -> Tensor:
        return counts if current_scope().phase == "expert bias" else honest(counts, *args)

    return patch.object(router, "all_reduce", all_reduce)


def _biased_weights() -> AbstractContextManager[Any]:
    """The weights are shares of scores and bias, as the choice is."""
    honest = router.topk_routing

    def routing(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
        _, chosen = honest(logits, top_k, **options)
        scores = (logits.sigmoid() + options["expert_bias"]) * chosen
        return scores / scores.sum(dim=-1, keepdim=True), chosen

    return patch.object(router, "topk_routing", routing)


def _router_cut_off() -> AbstractContextManager[Any]:
    """The weights lead no gradient back to the router."""
    honest = router.topk_routing

    def routing(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        weights, chosen = honest(*args, **options)
        return weights.detach(), chosen

    return patch.object(router, "topk_routing", routing)


def _no_pull() -> AbstractContextManager[Any]:
    """The balancing loss is counted, and pulls at nothing."""
    honest = router.normalized_scores
    return patch.object(router, "normalized_scores", lambda *args: honest(*args).detach())


def _old_counts() -> AbstractContextManager[Any]:
    """The load by which biases move is that of all steps so far."""
    honest = stepping.finish_router_step

    def finish(chunks: Iterable[nn.Module], groups: ParallelGroups, *, move_biases: bool = True) -> None:
        chunks = list(chunks)
        loads = [each.local_tokens_per_expert for each in router.routers_of(chunks)]
        before = [None if load is None else load.clone() for load in loads]
        honest(chunks, groups, move_biases=move_biases)
        for load, old in zip(loads, before):
            if load is not None and old is not None:
                load.copy_(old)

    return patch.object(stepping, "finish_router_step", finish)


# ---- what a verdict says ----

HUNT = Hunt(
    chapter="14",
    scene=(
        "Train with it on two ranks for three steps. You have the microscope, the biases of both ranks, the messages "
        "that move them, and the gradients of the routers."
    ),
    questions={
        "family": "What kind of fault is it?",
        "what": "What is treated wrongly: which number that the router makes or gets?",
        "first": "Which tensor differs first from one process, as the microscope names it?",
    },
    faults=(
        Fault(
            "own load",
            _own_load,
            {"family": "missing communication|wrong data", "what": "load|count|tokens.per|bias",
             "first": r"expert.?bias"},
            {
                "family": {
                    "": "Compare the biases of the two ranks, and the ledger's lines with those of a healthy run. "
                    "Which line is missing?",
                },
                "what": {"": "What has to be the same on every rank, and isn't?"},
                "first": {"": "Loss and gradients of step 1 are right. What does a step change besides parameters?"},
            },
            "Each rank moved its biases by the load of its own tokens. The counts of all ranks have to be added first, "
            "one all-reduce for each step, and that line is missing in the ledger. From then on the ranks route by "
            "different biases, and a checkpoint keeps one of them.",
        ),
        Fault(
            "biased weights",
            _biased_weights,
            {"family": "wrong data|wrong scale", "what": "weight|prob",
             "first": r"step 2|loss"},
            {
                "family": {"": "Nothing is missing, late or drawn. From step 2 on the forward uses another number."},
                "what": {
                    "bias": "The bias itself moves as it should in step 1. Where does it go that it shouldn't?",
                    "": "The first step is right, and in it all biases are 0. What else than the choice reads them?",
                },
                "first": {"": "Step 1 is right, gradients and biases included. What is the first of step 2?"},
            },
            "The weights were shares of scores plus bias. The bias is for the choice alone: it says how full an expert "
            "is and nothing about how good, and through the weights it changes the output. In step 1 all biases are 0, "
            "so the first thing that is wrong is the loss of step 2.",
        ),
        Fault(
            "router cut off",
            _router_cut_off,
            {"family": "wrong data|wrong scale", "what": "weight|prob|gradient",
             "first": r"layers\.1\.mlp\.(router|norm)"},
            {
                "family": {"": "Loss and messages of step 1 are right. The routers' gradients are wrong."},
                "what": {
                    "aux|balanc|score": "Then a router would still have the model's gradient. Set the coefficient of "
                    "the balancing loss to 0: what is left?",
                    "": "Through which numbers does a router learn from the model's loss?",
                },
                "first": {"": "Read from the output back: layer 1 before layer 0. Which gradient is the first?"},
            },
            "The weights led no gradient back. A router learns from the model's loss only through them, so what was "
            "left of its gradient is the balancing loss's. The loss of step 1 is right to the bit.",
        ),
        Fault(
            "no pull",
            _no_pull,
            {"family": "wrong data|wrong scale", "what": "aux|balanc|score|own loss",
             "first": r"layers\.1\.mlp\.(router|norm)"},
            {
                "family": {"": "Loss and messages of step 1 are right. The routers' gradients are wrong."},
                "what": {
                    "weight|prob": "Then nothing would be left of the gradient with a coefficient of 0. Is that so?",
                    "": "Set the coefficient of the balancing loss to 0: what changes, and what should change?",
                },
                "first": {"": "Read from the output back: layer 1 before layer 0. Which gradient is the first?"},
            },
            "The scores in the balancing loss had no history. The loss was computed and logged as before, and it "
            "pulled at nothing: gradients are those of a run with coefficient 0. Only the load tells, and late.",
        ),
        Fault(
            "old counts",
            _old_counts,
            {"family": "wrong data|reused memory|kept memory|wrong order", "what": "load|count|tokens.per|bias",
             "first": r"step 3|loss"},
            {
                "family": {
                    "communication": "The ledger has the line, and both ranks have the same biases.",
                    "": "Both ranks have the same biases, and the first update is right. What do later ones read?",
                },
                "what": {"": "The first update of the biases is right. By which number do they move?"},
                "first": {"": "Steps 1 and 2 agree with one process in everything. What is the first of step 3?"},
            },
            "The counts were not set back to 0 after a step, so biases moved by the load of all steps so far. The "
            "first update is right. Later ones push down an expert that was full once, long after it is empty.",
        ),
    ),
)  # fmt: skip
