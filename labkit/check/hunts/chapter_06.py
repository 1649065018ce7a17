"""Hunt of chapter 06: sequence parallelism and random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from torch import Tensor

from labkit.check.hunts.hunting import FIRST_TENSOR, NUMBERS_AGREE, Fault, Hunt
from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.models.embedding import PositionEmbedding
from labkit.parallel import layers, random
from labkit.parallel.data_parallel import gradients
from labkit.parallel.parameters.parameter_record import main_grad_of, name_of, record_of

# ---- the faults ----


def _first_positions() -> AbstractContextManager[Any]:
    """Every rank adds the vectors of the first s/t positions."""

    def own_positions(self: PositionEmbedding, length: int) -> slice:
        return slice(0, length // self.sequence_parts)

    return patch.object(PositionEmbedding, "own_positions", own_positions)


def _biases_left_out() -> AbstractContextManager[Any]:
    """The biases that are added after g_s are missing in the all-reduce of gradients."""

    def some_summed(chunks: Any, tp: Group) -> None:
        flagged = [p for p in gradients._parameters(chunks) if record_of(p).sequence_parallel]
        gradients._sum_together([main_grad_of(p) for p in flagged if not name_of(p).endswith(late)], tp)

    late = ("proj.bias", "fc2.bias")
    return patch.object(gradients, "_sum_sequence_parallel", some_summed)


def _one_state() -> AbstractContextManager[Any]:
    """Inside a fork the generator stays where it is, so all ranks draw from the common state."""
    return patch.object(random.RngTracker, "fork", lambda self, name="": nullcontext())


def _sum_then_cut() -> AbstractContextManager[Any]:
    """g_s adds up everything everywhere, and then each rank drops what is not its own."""

    def reduce_scatter(x: Tensor, group: Group, dim: int = 0, op: str = "sum", **_: Any) -> Tensor:
        whole = collectives.all_reduce(x, group, op, in_place=False)
        return whole.chunk(group.size, dim)[group.rank].clone()

    return patch.object(collectives, "reduce_scatter", reduce_scatter)


def _gathered_input_kept() -> AbstractContextManager[Any]:
    """Column-parallel layers keep their gathered input for backward, and gather it again all the same."""

    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Any, trains: bool) -> Tensor:
        ctx.plan, ctx.parameters = plan, (weight, bias)
        with plan.booked():
            whole = collectives.all_gather(x, plan.group) if plan.sequence_parallel else x
        ctx.save_for_backward(weight, x, whole)
        return plan.gemms.fprop((whole,), weight, bias)

    return patch.object(layers._ColumnLinear, "forward", staticmethod(forward))


# ---- what a verdict says ----

_LOOK_FURTHER = "Which of loss, gradients, bytes, memory and masks is not as it should be? Only one of them is wrong."

HUNT = Hunt(
    chapter="06",
    scene=(
        "Train with it (compare(..., pretrain=suspect.around(pretrain))), open a ledger, count the bytes that a layer "
        "keeps, compare the masks of two ranks: one of these shows it."
    ),
    questions={
        "family": "What kind of fault is it?",
        "place": "Which operation, layer or state is at fault?",
        "first": FIRST_TENSOR,
    },
    faults=(
        Fault(
            "positions",
            _first_positions,
            {"family": "wrong data", "place": "position|embedding", "first": "embedding output"},
            {
                "family": {
                    "missing": "Every collective was made, with the bytes that it should have: the ledger shows it.",
                    "": "The loss of the first step is wrong, and so is the output of the very first block.",
                },
                "place": {
                    "norm|layer|mlp|attention": "A layer only passes on what was wrong before it: look further up.",
                    "": "The first tensor that differs tells the place.",
                },
                "first": {"": "The microscope reads in the order of the forward: take its first name."},
            },
            "Every rank added the position vectors of the first s/t positions. Rank 0 was right by chance, the others "
            "were not, so the embedding's output was the first tensor to differ, and everything after it differed as "
            "well. No byte more or less was sent, which rules out all communication.",
        ),
        Fault(
            "late biases",
            _biases_left_out,
            {
                "family": "missing communication",
                "place": "bias|finalize|sum of (the )?gradients|all.?reduce of (the )?gradients|end of the step",
                "first": r"layers\.1\.mlp\.fc2\.bias gradient",
            },
            {
                "family": {
                    "wrong (data|scale)": "On each rank the gradient is a part of a sum: add the ranks' up, and it "
                    "is right.",
                    "": "The loss is right, and only some gradients are not. What do these parameters have in common?",
                },
                "place": {
                    "norm": "The norms' gradients are right. Which other parameters work between the regions?",
                    "g_s|reduce.?scatter|f_s|gather": "Activations and their gradients are right, so f_s and g_s are.",
                    "": "Look at the names of all tensors that differ (row.differing), not at the first alone.",
                },
                "first": {"final_norm": "The final norm's gradient agrees: it was added up.", "": "Run one step."},
            },
            "The biases of proj and fc2 are added after g_s, where a rank has its own positions only. Their gradients "
            "are parts of a sum, as those of the norms are, and they were left out of the all-reduce at the end of the "
            "step. The norms were in it, which is why the final norm, the first to be wrong when the whole all-reduce "
            "is lost, is right here.",
        ),
        Fault(
            "one state",
            _one_state,
            {"family": "random numbers", "place": "rng|fork|state|seed|dropout|mask|tracker", "first": "none"},
            {
                "family": {
                    "": "Without dropout this run is right in every digit, and its bytes and its memory are as "
                    "predicted. What does the microscope switch off?",
                },
                "place": {"": "What do ranks draw, and from which state should each of them draw it?"},
                "first": {"": NUMBERS_AGREE},
            },
            "fork did not swap in the rank's own state, so all ranks drew from the common one. Their masks coincide: "
            "positions i and i + s/t always lose the same features, and the heads of different ranks the same places. "
            "The microscope cannot see it, because masks differ between layouts by design and it trains without them. "
            "Only a look at the masks of two ranks shows it.",
        ),
        Fault(
            "sum, then cut",
            _sum_then_cut,
            {
                "family": "extra communication",
                "place": "g_s|reduce.?scatter|row.?parallel|fc2|proj",
                "first": "none",
            },
            {
                "family": {
                    "missing": "Nothing is missing: all sums are right.",
                    "": "Every number is right. So what does this run spend more of than it should?",
                },
                "place": {
                    "f_s|all.?gather": "Gathers are as many as before, with as many bytes. What replaced the others?",
                    "": "Compare the operations in the ledger, forward, with those of a healthy run.",
                },
                "first": {"": NUMBERS_AGREE},
            },
            "g_s was an all-reduce of which each rank kept its part. The result is the same, but an all-reduce is a "
            "reduce-scatter and an all-gather, so forward sent twice the bytes there. The ledger shows it by the name "
            "of the operation; loss and gradients cannot.",
        ),
        Fault(
            "gathered input kept",
            _gathered_input_kept,
            {
                "family": "kept memory",
                "place": "fc1|qkv|column|gathered|f_s|all.?gather",
                "first": "none",
            },
            {
                "family": {
                    "extra communication": "The ledger is the same, record by record.",
                    "": _LOOK_FURTHER,
                },
                "place": {
                    "fc2|proj|row": "The inputs of fc2 and proj are cut along the width, and are kept once, as "
                    "they should be.",
                    "": "Which tensor of [s, b, h] is kept that exercise 1 keeps as [s/t, b, h]?",
                },
                "first": {"": NUMBERS_AGREE},
            },
            "qkv and fc1 kept their gathered input [s, b, h] for backward in addition to their own positions, and "
            "gathered it again all the same. Each layer keeps 4 s b h bytes more than the formula, which is what "
            "sequence parallelism had saved there.",
        ),
    ),
)
