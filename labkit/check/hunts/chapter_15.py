"""Hunt of chapter 15: experts in other groups than attention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from labkit.check.hunts.hunting import FIRST_TENSOR, Fault, Hunt
from labkit.comm import groups
from labkit.comm.fault_injection import dropped
from labkit.config import ParallelConfig
from labkit.parallel.data_parallel import grad_buffers

# ---- the faults ----


def _mean_over_copies() -> AbstractContextManager[Any]:
    """The sum of an expert's gradients is divided by the number of its copies."""
    honest = grad_buffers._averaging

    def averaging(groups: Any, is_expert: bool, in_collective: bool, per_token: bool) -> tuple[float, str]:
        factor, op = honest(groups, is_expert, in_collective, per_token)
        return (1 / groups.edp.size, "sum") if is_expert else (factor, op)

    return patch.object(grad_buffers, "_averaging", averaging)


def _copies_alone() -> AbstractContextManager[Any]:
    """Each rank is alone in its edp group."""
    honest = groups.groups_of_rank

    def groups_of_rank(rank: int, config: ParallelConfig, size: int, ends: Any = None) -> Any:
        plan = honest(rank, config, size, ends)
        alone = plan["edp"] == rank
        return {**plan, "edp": plan["edp"][alone]}

    return patch.object(groups, "groups_of_rank", groups_of_rank)


def _experts_with_dense() -> AbstractContextManager[Any]:
    """Nobody tells experts from dense weights, so their gradients go into the buffers of the dense ones."""
    honest = grad_buffers._by_kind

    def by_kind(*given: Any) -> Any:
        kinds: Any = {}
        for (kept, main, _), named in honest(*given).items():
            kinds.setdefault((kept, main, False), []).extend(named)
        return kinds

    return patch.object(grad_buffers, "_by_kind", by_kind)


def _copies_as_neighbours() -> AbstractContextManager[Any]:
    """In the order string dp comes before ep."""
    honest = groups.groups_of_rank

    def groups_of_rank(rank: int, config: ParallelConfig, size: int, ends: Any = None) -> Any:
        return honest(rank, replace(config, order="tp-cp-dp-ep-pp"), size, ends)

    return patch.object(groups, "groups_of_rank", groups_of_rank)


def _rows_stay() -> AbstractContextManager[Any]:
    """In backward no gradient of a row is sent: each rank keeps those that it should send."""
    return dropped(operation="all_to_all", group="ep", phase="backward")


# ---- what a verdict says ----

_NUMBERS_AGREE = "Loss, gradients and parameters all agree with one process: say 'none'."
_NAMED = {"none": "The microscope names one: row.first_difference.", "": "Take the name as it is printed."}

HUNT = Hunt(
    chapter="15",
    scene=(
        "Train with it under the microscope, ask the ranks whom they meet, and read the ledger of a step: each shows "
        "another side of the fault."
    ),
    questions={
        "family": "What kind of fault is it?",
        "group": "Which kind of group is used in the wrong way, has the wrong ranks, or should have been used? One of "
        "ep, edp, cp, dp_cp.",
        "first": FIRST_TENSOR,
    },
    choices={"family": ("missing communication", "wrong data", "wrong scale", "wrong order")},
    faults=(
        Fault(
            "experts with dense",
            _experts_with_dense,
            {"family": "wrong data", "group": r"dp_cp", "first": r"mlp\.experts\.fc2\.weight gradient"},
            {
                "family": {
                    "missing": "The line of edp is gone from the ledger, but no byte is: another line has grown.",
                    "scale": "A factor would leave the ledger as it was.",
                    "": "Some sum is taken, over the wrong ranks. Which line of the ledger has grown?",
                },
                "group": {
                    "edp": "That group has the right ranks, and nobody uses it. Which group do the experts' gradients "
                    "go to?",
                    "": "The loss is right, so rows and keys reached their ranks. What comes after backward?",
                },
                "first": _NAMED,
            },
            "The experts' gradients were in the buffers of the dense weights, so they were summed over dp_cp, whose "
            "ranks hold different experts. Shapes agree, nothing complains, and all copies agree too, since everybody "
            "has the same mixture. (Each half of the experts got a + b in place of a or b. So b and a are too much, "
            "as long as what is right: an error of 1, as with a factor of 2. The ledger tells the two apart.) In "
            "Megatron one attribute prevents it: allreduce = False on each parameter of an expert.",
        ),
        Fault(
            "mean over copies",
            _mean_over_copies,
            {"family": "wrong scale", "group": r"\bedp\b", "first": r"mlp\.experts\.fc2\.weight gradient"},
            {
                "family": {
                    "missing": "The ledger has the same messages with the same bytes, and copies agree.",
                    "data": "Groups and bytes are those of the healthy run. By how much is the gradient off?",
                    "": "Ledger and groups are those of the healthy run. By how much is the gradient off?",
                },
                "group": {
                    "dp_cp": "The dense gradients are right. The experts' are summed over another group, and their "
                    "sum is divided by the wrong number.",
                    "": "The loss is right, so rows and keys reached their ranks. What comes after backward?",
                },
                "first": _NAMED,
            },
            "The sum over edp was divided by the number of copies, 2, instead of dp cp, 4. Therefore every gradient of "
            "an expert is twice as large as it should be, an error of exactly 1 relative to the right one. Ledger and "
            "groups can't show a factor, and copies agree.",
        ),
        Fault(
            "copies alone",
            _copies_alone,
            {"family": "missing communication", "group": r"\bedp\b", "first": r"mlp\.experts\.fc2\.weight gradient"},
            {
                "family": {
                    "scale": "A wrong factor is the same on every rank, and copies would agree. Do they?",
                    "data": "Which data would that be? Whom does rank 1 meet in edp?",
                    "": "Which line of the healthy ledger is not there?",
                },
                "group": {
                    "dp_cp": "The dense gradients are right: the microscope names an expert's as the first.",
                    "": "The loss is right, so rows and keys reached their ranks. What comes after backward?",
                },
                "first": _NAMED,
            },
            "Each rank was alone in its edp group, and a sum over one rank is what it was before. So the copies of an "
            "expert learn from different rows and drift apart, which the microscope sees as copies that disagree. The "
            "ledger has no all-reduce over edp.",
        ),
        Fault(
            "copies as neighbours",
            _copies_as_neighbours,
            {
                "family": "wrong order",
                "group": r"^\W*(ep|edp|ep\W+(and\W+)?edp|edp\W+(and\W+)?ep)\W*$",
                "first": "none",
            },
            {
                "family": {
                    "missing": "The ledger has the same operations in the same groups. (Rank 1 exchanges rows with "
                    "another rank, so those have other bytes.)",
                    "": "Every number agrees with one process. What do two ranks on one node want to be to each other?",
                },
                "group": {"": "Compare whom rank 1 meets with the healthy run: two lines differ."},
                "first": {"": _NUMBERS_AGREE},
            },
            "The ranks were numbered with dp before ep. Copies of an expert are neighbours now, and the ranks that "
            "exchange rows are far apart. Every number is right, and the ledger has the same operations in the same "
            "groups. On two nodes of two, all rows would cross between the nodes.",
        ),
        Fault(
            "rows stay",
            _rows_stay,
            {
                "family": "missing communication",
                "group": r"(^|\W)ep(\W|$)",
                "first": r"mlp\.experts\.fc2\.weight gradient",
            },
            {
                "family": {
                    "data": "The data is another row's, but why? Which line of the ledger has become smaller?",
                    "scale": "An error by a factor would leave the ledger as it was. Which line has become smaller?",
                    "": "The ranks meet whom they should. Which line of the ledger has become smaller?",
                },
                "group": {
                    "edp|dp_cp": "Both sums of gradients are there, with all their bytes, and copies agree.",
                    "": "Which line of the ledger has become smaller?",
                },
                "first": _NAMED,
            },
            "In backward the all-to-alls were lost, so each rank kept the gradients of rows that it should have sent, "
            "and took them for those of the rows that it holds. The forward was right, and so is the loss. The sums "
            "over the copies were taken, so copies agree, on gradients of other tokens. The ledger has half of the "
            "healthy run's bytes over ep.",
        ),
    ),
)
