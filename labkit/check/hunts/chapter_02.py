"""Hunt of chapter 02: ranks in wrong groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm import groups
from labkit.config import ParallelConfig

Plan = Mapping[str, np.ndarray]
"""Kind of group -> its ranks, of one rank."""

# ---- the faults ----


def _replaced(kind: str, choose: Callable[[int, Plan, np.ndarray], np.ndarray]) -> AbstractContextManager[Any]:
    """The group of `kind` has the ranks that `choose` gives, from a rank, its groups and the world."""
    honest = groups.groups_of_rank

    def groups_of_rank(rank: int, config: ParallelConfig, size: int, ends: Any = None) -> Plan:
        plan = honest(rank, config, size, ends)
        return {**plan, kind: choose(rank, plan, config.rank_offset + np.arange(size))}

    return patch.object(groups, "groups_of_rank", groups_of_rank)


def _read_from_the_end() -> AbstractContextManager[Any]:
    """The order string is taken to name the slowest axis first."""
    honest = groups.groups_of_rank

    def groups_of_rank(rank: int, config: ParallelConfig, size: int, ends: Any = None) -> Plan:
        order = "-".join(reversed(config.order.split("-")))
        return honest(rank, replace(config, order=order), size, ends)

    return patch.object(groups, "groups_of_rank", groups_of_rank)


# ---- what a verdict says ----

_OWN_LOSS = "The loss in the log is the mean over the same group, so it is the first number that differs"
_RENUMBERED = "Another numbering of the ranks would leave every number right."
_FIRST = {"none": "The microscope names one: row.first_difference.", "": "Take the name as it is printed."}
_MEETS = {
    "": "That is what the kind dp_cp is for. Which list does rank 1 print?",
}

HUNT = Hunt(
    chapter="02",
    scene=(
        "Train with it under the microscope, read the ledger of a step, and ask the ranks whom they meet: each shows "
        "another side of the fault."
    ),
    questions={
        "family": "What kind of fault is it?",
        "meets": "With whom does rank 1 sum up its gradients? All members of the group, rank 1 included, such as "
        "'1, 3'.",
        "first": FIRST_TENSOR,
    },
    choices={"family": ("missing communication", "wrong data", "wrong order", "slow work")},
    faults=(
        Fault(
            "whole world",
            partial(_replaced, "dp_cp", lambda rank, plan, world: world),
            {"family": "wrong data", "meets": r"^\D*0\D+1\D+2\D+3\D*$", "first": r"mlp\.fc2\.weight gradient"},
            {
                "family": {
                    "missing": "The ledger has the sum of gradients. Over how many ranks?",
                    "order": _RENUMBERED,
                    "": "A slow run computes the right gradients. This one doesn't.",
                },
                "meets": _MEETS,
                "first": {"norm": "The norms' gradients are right. What do all ranks share?", **_FIRST},
            },
            "All four ranks summed up their gradients together. That does no harm to norms, which are the same on both "
            "ranks of tp, so the final norm is right, and all copies agree. But a matrix is cut: its two shards were "
            "averaged with each other, and the first matrix that backward meets, fc2, is the first to differ.",
        ),
        Fault(
            "order from its end",
            _read_from_the_end,
            {"family": "wrong order", "meets": r"^\D*0\D+1\D*$", "first": "none"},
            {
                "family": {
                    "missing": "The ledger has the same sums with the same bytes, in tp and in dp_cp.",
                    "data": "Every tensor agrees with one process, so nothing wrong was averaged.",
                    "": "All four ranks are on one machine, so no link is slow here.",
                },
                "meets": _MEETS,
                "first": {"": "Loss, gradients and parameters all agree with one process: say 'none'."},
            },
            "The order string was read from its end, so dp is the fastest axis and tp has stride 2. Rank 1 sums up "
            "gradients with rank 0, and that is right here, because the two now have the same shard. Every number "
            "agrees, and no test of numbers will ever find it. On two nodes of two, every message of tp crosses: "
            "that is the slow run of the opening.",
        ),
        Fault(
            "samples of neighbours",
            partial(_replaced, "dp", lambda rank, plan, world: plan["tp"]),
            {"family": "wrong data", "meets": r"^\D*1\D+3\D*$", "first": "embedding output"},
            {
                "family": {
                    "missing": "The ledger has the same sums with the same bytes, in tp and in dp_cp.",
                    "order": _RENUMBERED,
                    "": "A slow run computes the right outputs. This one doesn't.",
                },
                "meets": {
                    "": "Of the kinds that meet prints, dp decides which samples a rank reads, and dp_cp with whom it "
                    "sums up gradients.",
                },
                "first": {"loss": "The loss is wrong because something before it is.", **_FIRST},
            },
            "Gradients met the right ranks. But which samples a rank reads is decided by its place in dp, and dp was a "
            "block of neighbours. So the two ranks that share every layer read different samples, and already the "
            "embedding, the first sum over tp, added up two different texts. Megatron avoids it by another way: one "
            "rank of a tp group reads, and broadcasts to the others.",
        ),
        Fault(
            "alone",
            partial(_replaced, "dp_cp", lambda rank, plan, world: np.array([rank])),
            {"family": "missing communication", "meets": r"^\D*1\D*$|nobody|none|alone|itself", "first": "loss"},
            {
                "family": {
                    "data": "Which data would that be? Look for the sum of gradients in the ledger.",
                    "order": _RENUMBERED,
                    "": "Copies that learn different things are no matter of speed. What is not in the ledger?",
                },
                "meets": _MEETS,
                "first": _FIRST,
            },
            "Each rank was alone in its group, and a collective in a group of one returns its input. So no gradients "
            f"were summed up, and the two copies drift apart. {_OWN_LOSS}. The ledger has no message of dp_cp.",
        ),
        Fault(
            "neighbours",
            partial(_replaced, "dp_cp", lambda rank, plan, world: plan["tp"]),
            {"family": "wrong data", "meets": r"^\D*0\D+1\D*$", "first": "loss"},
            {
                "family": {
                    "missing": "The ledger has the sum of gradients with all its bytes, over two ranks.",
                    "order": _RENUMBERED,
                    "": "Copies that learn different things are no matter of speed.",
                },
                "meets": _MEETS,
                "first": _FIRST,
            },
            "Gradients were averaged over the tp group, a block of neighbours: the mistake of section 2, in a GPT. The "
            f"two shards of each matrix were mixed, and the copies never met. {_OWN_LOSS}.",
        ),
    ),
)
