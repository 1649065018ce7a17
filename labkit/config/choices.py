"""What a configuration can choose by name, a table each: schedules, model families, dispatchers and layer parts.

To add one, write a function or a class, and one row here. The fields' choices and help, the rules, `labkit order`, the
schedule explorer and docs/config.md are made from these tables.

A function or class is written as text, `module:name`, because `config` imports nothing above it and needs no torch. The
caller imports it by `pkgutil.resolve_name`, so a GPT loads none of BERT's modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class NamedSchedule(NamedTuple):
    """A schedule that `schedule.name` can choose."""

    builder: str
    """A function of (pp, microbatches) that returns the `Schedule`. If `chunks` is None, it takes the arguments of
    `labkit.schedules.interleaved` instead."""
    chunks: int | None = 1
    """Model chunks on each rank. None means as many as `parallel.vpp`, under the rules of interleaving."""
    splits_backward: bool = False
    """True if input and weight gradients are two separate actions."""
    least_microbatches: int = 0
    """Fewest microbatches of a step per pipeline rank; 0 means that a single microbatch is enough."""
    reads: tuple[str, ...] = ()
    """Fields of the section `schedule` that the builder takes as keyword arguments of the same name."""
    merged: str | None = None
    """The builder of its form with merged pairs (`schedule.overlap_moe_expert_parallel_comm`); it reads no fields."""


SCHEDULES = {
    "gpipe": NamedSchedule("labkit.schedules.builders:gpipe"),
    "1f1b": NamedSchedule(
        "labkit.schedules.builders:one_f_one_b", merged="labkit.schedules.builders:merged_one_f_one_b"
    ),
    "interleaved": NamedSchedule(
        "labkit.schedules.builders:interleaved",
        chunks=None,
        reads=("all_warmup",),
        merged="labkit.schedules.builders:merged_interleaved",
    ),
    "zero_bubble_h1": NamedSchedule("labkit.schedules.zero_bubble:zero_bubble_h1", splits_backward=True),
    "zbv": NamedSchedule("labkit.schedules.zero_bubble:zbv", chunks=2, splits_backward=True),
    "dualpipe_v": NamedSchedule(
        "labkit.schedules.zero_bubble:dualpipe_v",
        chunks=2,
        splits_backward=True,
        least_microbatches=2,
        merged="labkit.schedules.zero_bubble:merged_dualpipe_v",
    ),
}
"""`schedule.name` -> the schedule. `auto` has no row, because it is 1f1b if a rank has one chunk, else interleaved."""


def named_schedule(name: str, vpp: int) -> NamedSchedule:
    """Return the row of `schedule.name` with `vpp` model chunks on a rank."""
    return SCHEDULES[name if name != "auto" else "1f1b" if vpp == 1 else "interleaved"]


class ModelFamily(NamedTuple):
    """A model that `model.family` can choose."""

    model: str
    """The class, a `GPTModel`."""
    datasets: str
    """A function of the configuration that returns the training, validation and test split."""
    forward_step: str
    """The default `forward_step` of `pretrain`."""
    doc: str = ""
    """The paper, for the help text."""
    reads_windows: bool = False
    """True if a sample is a window of one long text; else it is a dict of tensors, which a batch stacks by name."""


_GPT_DATA = "labkit.data.gpt_data:build_gpt_datasets"
_NEXT_TOKEN = "labkit.train.forward_step:gpt_forward_step"
FAMILIES = {
    "gpt": ModelFamily("labkit.models.gpt:GPTModel", _GPT_DATA, _NEXT_TOKEN, reads_windows=True),
    "bert": ModelFamily(
        "labkit.models.bert.bert_model:BertModel",
        "labkit.data.masked.bert_samples:build_bert_datasets",
        "labkit.train.bert_step:bert_forward_step",
        "arXiv 1810.04805",
    ),
    "t5": ModelFamily(
        "labkit.models.t5.t5_model:T5Model",
        "labkit.data.masked.t5_samples:build_t5_datasets",
        "labkit.train.forward_step:t5_forward_step",
        "arXiv 1910.10683",
    ),
    "mamba": ModelFamily(
        "labkit.models.mamba.mamba_model:MambaModel", _GPT_DATA, _NEXT_TOKEN, "arXiv 2405.21060", reads_windows=True
    ),
}
"""`model.family` -> its model, its data and its step."""


class Dispatcher(NamedTuple):
    """A way to send tokens to their experts that `moe.dispatcher` can choose."""

    dispatcher: str
    """The class, a `MoETokenDispatcher`."""
    doc: str = ""
    """How it sends them, for the help text."""


DISPATCHERS = {
    "alltoall": Dispatcher("labkit.moe.dispatch.alltoall:MoEAlltoAllTokenDispatcher"),
    "allgather": Dispatcher("labkit.moe.dispatch.allgather:MoEAllGatherTokenDispatcher", "each rank sees all tokens"),
    "local": Dispatcher(
        "labkit.moe.dispatch.dispatcher:MoELocalTokenDispatcher", "one rank has all experts: ep = etp = 1"
    ),
}
"""`moe.dispatcher` -> the dispatcher."""


class RecomputedPart(NamedTuple):
    """A part of a layer that `model.recompute_modules` can name; the layer runs it by `recompute.part(name, ...)`."""

    doc: str = ""
    """What it contains, for the help text."""
    captured_in: str | None = None
    """The part of `CAPTURED_PARTS` that contains it. None: no graph can contain it, because it frees memory."""


RECOMPUTED_PARTS = {
    "core_attn": RecomputedPart("softmax and both products", "attn"),
    "mlp": RecomputedPart(captured_in="mlp"),
    "layernorm": RecomputedPart(),
    "moe": RecomputedPart("whole MoE layers", "moe"),
    "shared_experts": RecomputedPart(captured_in="moe_router"),
}
"""Word of `model.recompute_modules` -> the part of a layer."""


class CapturedPart(NamedTuple):
    """A part of a layer that `graph.cuda_graph_modules` can name; `labkit.graphs.scope` says what it contains."""

    doc: str = ""
    """When it can be captured, for the help text."""


CAPTURED_PARTS = {
    "attn": CapturedPart(),
    "mlp": CapturedPart("of dense layers"),
    "moe": CapturedPart("drop-and-pad only"),
    "moe_router": CapturedPart(),
    "moe_preprocess": CapturedPart(),
    "mamba": CapturedPart(),
}
"""Word of `graph.cuda_graph_modules` -> the part of a layer."""


def in_words(table: Mapping[str, Any], last: str) -> str:
    """Name the rows of a table with their `doc`, for a help text: "`a`, `b` (doc of b) or `c`" if `last` is "or"."""
    *names, end = (f"`{name}` ({row.doc})" if row.doc else f"`{name}`" for name, row in table.items())
    return f"{', '.join(names)} {last} {end}"


LOGGERS = {
    "tensorboard": "labkit.train.reporting.tensorboard_writer:TensorBoard",
    "wandb": "labkit.train.reporting.wandb_writer:WandB",
    "mlflow": "labkit.train.reporting.mlflow_writer:MLflow",
}
"""Word of `train.loggers`, which is also the package that it needs -> a `Logger` (`train/reporting/loggers.py`)."""
