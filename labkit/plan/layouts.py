"""Every legal layout of a run on a number of GPUs, as rows of one numpy array. No torch.

The searched fields are those of `COLUMNS`; the model, the global batch and everything else come from a configuration.
Layers are shared evenly where the stages divide them. Where they do not, stages have one layer less from both ends
inwards; interleaving is searched then only if the first and the last stage alone have it (as in arXiv 2407.21783).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from labkit.config import ConfigError, RunConfig
from labkit.config.choices import SCHEDULES
from labkit.config.errors import nearest, shown
from labkit.plan.sizes import expert_width
from labkit.plan.workload import Workload

COLUMNS = np.dtype([
    ("tp", "i4"), ("cp", "i4"), ("pp", "i4"), ("ep", "i4"), ("etp", "i4"), ("dp", "i4"), ("micro_batch", "i4"),
    ("microbatches", "i4"), ("vpp", "i2"), ("schedule", "i1"), ("recompute", "i1"), ("sp", "?"), ("sharded", "?"),
])  # fmt: skip
"""A layout. `vpp` counts the model chunks of a rank; `sharded` is the distributed optimizer."""
SCHEDULE_NAMES = ("auto", "1f1b", "interleaved", "zero_bubble_h1", "zbv", "dualpipe_v")
"""Searched schedules, by their number in the column; `auto` is the plain loop over microbatches of a single stage."""
RECOMPUTATIONS = ("none", "selective", "full")
"""`model.recompute_granularity`, by its number in the column."""
WORDS: Mapping[str, tuple[str, ...]] = {"schedule": SCHEDULE_NAMES, "recompute": RECOMPUTATIONS}
"""Column -> its words, of those whose numbers are not sizes."""
SHOWN = {"sharded": "dist-opt"}
"""Column -> how tables and layouts in words call it, as users of Megatron-LM do; the column's name is read as well."""
_COLUMN_OF = {shown: name for name, shown in SHOWN.items()}
AXES = tuple(name for name in COLUMNS.names or () if name != "microbatches")
"""Names that a layout in words may set."""
ALWAYS = ("tp", "pp", "dp")
"""Columns that are shown even if they are 1, because a reader looks for them first."""
FIELDS = {
    "parallel.tp": "tp", "parallel.cp": "cp", "parallel.pp": "pp", "parallel.vpp": "vpp", "parallel.ep": "ep",
    "parallel.etp": "etp", "parallel.sequence_parallel": "sp", "train.micro_batch_size": "micro_batch",
    "schedule.name": "schedule", "model.recompute_granularity": "recompute", "optim.distributed_optimizer": "sharded",
}  # fmt: skip
"""Field of a configuration -> the column that it decides."""
NEUTRAL = {
    "parallel.tp": 1, "parallel.cp": 1, "parallel.pp": 1, "parallel.vpp": 1, "parallel.ep": 1, "parallel.etp": None,
    "parallel.sequence_parallel": False, "parallel.pipeline_layout": None, "parallel.order": "tp-cp-ep-dp-pp",
    "parallel.standalone_embedding_stage": False, "schedule.name": "auto", "schedule.overlap_p2p_comm": False,
    "schedule.microbatch_group_size": None, "schedule.all_warmup": False, "train.micro_batch_size": 1,
    "model.recompute_granularity": "none", "model.recompute_method": "uniform", "model.recompute_num_layers": 1,
    "model.num_microbatches_with_partial_activation_checkpoints": None, "optim.distributed_optimizer": False,
    "optim.overlap_param_gather": False, "optim.num_distributed_optimizer_instances": 1,
}  # fmt: skip
"""Fields that the search decides, with the values of no layout."""
_PLAN_ONLY = ("tokenizer", "Transformer Engine's experts want")
"""Words of rules that keep labkit from running a configuration, but not from planning it."""


class Pipeline(NamedTuple):
    """A schedule and the number of its chunks on a rank."""

    schedule: int
    chunks: int


def splits_backward(schedule: int) -> bool:
    """Return True if I and W are separate actions under a schedule of the column."""
    return schedule > 0 and SCHEDULES[SCHEDULE_NAMES[schedule]].splits_backward


def neutral(config: RunConfig) -> RunConfig:
    """Return a configuration with the defaults in every searched field."""
    return config.replaced(NEUTRAL)


def rules_broken(config: RunConfig, world_size: int | None = None) -> list[str]:
    """Return the rules that a configuration breaks, apart from those that matter only to a run."""
    return [text for text in config.problems(world_size) if not any(words in text for words in _PLAN_ONLY)]


def legal_layouts(config: RunConfig, world_size: int) -> np.ndarray:
    """Return the layouts (N,) of `COLUMNS` of a configuration on `world_size` ranks."""
    return np.fromiter(_rows(config, world_size), COLUMNS)


def _rows(config: RunConfig, world: int) -> Iterator[tuple[Any, ...]]:
    batch, layers = config.train.global_batch_size, config.model.layers
    modes = range(len(RECOMPUTATIONS))
    for pp in (size for size in divisors(world) if size <= layers):
        for tp, cp in product(_tensor_sizes(config, world // pp), _context_sizes(config, world // pp)):
            if world % (pp * tp * cp) or batch % (dp := world // (pp * tp * cp)):
                continue
            sequence = [
                sp for sp in _sequence_parallel(config, tp) if not sp or config.model.seq_length // cp % tp == 0
            ]
            shards = (False, True) if dp * cp > 1 else (False,)
            experts = list(_expert_sizes(config, world // pp, tp))
            for micro in divisors(batch // dp):
                count = batch // (dp * micro)
                pipelines = _pipelines(pp, count, layers)
                for (schedule, chunks), (ep, etp), sp, recompute, sharded in product(
                    pipelines, experts, sequence, modes, shards
                ):
                    yield tp, cp, pp, ep, etp, dp, micro, count, chunks, schedule, recompute, sp, sharded


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def _tensor_sizes(config: RunConfig, ranks: int) -> list[int]:
    model, shared = config.model, config.moe.shared_expert_ffn_hidden or 0
    kv = model.kv_heads or model.heads
    return [
        tp
        for tp in divisors(ranks)
        if not (model.heads % tp or (model.ffn_hidden or 0) % tp or shared % tp) and (kv % tp == 0 or tp % kv == 0)
    ]


def _context_sizes(config: RunConfig, ranks: int) -> list[int]:
    model = config.model
    if model.attention_dropout or model.attention_backend in ("cudnn", "efficient", "math"):
        return [1]
    return [cp for cp in divisors(ranks) if cp == 1 or model.seq_length % (2 * cp) == 0]


def _sequence_parallel(config: RunConfig, tp: int) -> tuple[bool, ...]:
    """Return the values of sequence parallelism; experts need it."""
    if tp == 1:
        return (False,)
    return (True,) if config.moe.num_experts else (False, True)


def _expert_sizes(config: RunConfig, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield ep and etp on the ranks of a stage; etp is at most the number of heads, as tp is."""
    if not config.moe.num_experts:
        yield 1, tp
        return
    width = expert_width(config.model, config.moe)
    for ep, etp in product(divisors(ranks), repeat=2):
        fits = ranks % (ep * etp) == 0 and etp <= config.model.heads
        if fits and config.moe.num_experts % ep == 0 and width % etp == 0:
            yield ep, etp


@lru_cache(maxsize=4096)
def _pipelines(pp: int, microbatches: int, layers: int) -> tuple[Pipeline, ...]:
    """Return the schedules that run on `pp` ranks with this number of microbatches."""
    if pp == 1:
        return (Pipeline(0, 1),)
    found = []
    for number, name in enumerate(SCHEDULE_NAMES[1:], start=1):
        row = SCHEDULES[name]
        if row.chunks is None:
            if microbatches % pp == 0:
                found += [Pipeline(number, chunks) for chunks in _interleaved_chunks(pp, layers)]
        elif layers >= pp * row.chunks and microbatches >= row.least_microbatches * pp:
            found.append(Pipeline(number, row.chunks))
    return tuple(found)


def _interleaved_chunks(pp: int, layers: int) -> list[int]:
    """Return the numbers of chunks, of which at most the first and the last stage have a layer less."""
    return [chunks for chunks in range(2, layers // pp + 1) if -layers % (pp * chunks) <= 2]


def uneven_layout(layers: int, stages: int) -> str:
    """Return the text of `parallel.pipeline_layout` in which stages have a layer less, from both ends inwards."""
    each = -(-layers // stages)
    counts = [each] * stages
    for turn in range(each * stages - layers):
        counts[-1 - turn // 2 if turn % 2 == 0 else turn // 2] -= 1
    parts = ["t" * count for count in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(parts)


def workload_of(base: Workload, row: np.void) -> Workload:
    """Return the workload of a layout; `base` has everything that is not searched."""
    tp, pp, chunks, name = int(row["tp"]), int(row["pp"]), int(row["vpp"]), SCHEDULE_NAMES[row["schedule"]]
    layers, etp, sharded = base.config.model.layers, int(row["etp"]), bool(row["sharded"])
    config = base.config.replaced({
        "parallel.tp": tp,
        "parallel.cp": int(row["cp"]),
        "parallel.pp": pp,
        "parallel.vpp": chunks if name == "interleaved" else 1,
        "parallel.ep": int(row["ep"]),
        "parallel.etp": None if etp == tp else etp,
        "parallel.sequence_parallel": bool(row["sp"]),
        "parallel.pipeline_layout": uneven_layout(layers, pp * chunks) if layers % (pp * chunks) else None,
        "schedule.name": name,
        "schedule.overlap_p2p_comm": name == "interleaved",
        "train.micro_batch_size": int(row["micro_batch"]),
        "model.recompute_granularity": RECOMPUTATIONS[row["recompute"]],
        "optim.distributed_optimizer": sharded,
        "optim.overlap_param_gather": sharded,
    })  # fmt: skip
    return Workload(config, base.world_size, expert_load=base.expert_load, software=base.software,
                    extras=base.extras, libraries=base.libraries)  # fmt: skip


def in_words(row: np.void) -> str:
    """Return a layout as `parse_words` reads it: tp, pp and dp always, others if they are not 1 or the default."""
    names = ("tp", "cp", "pp", "vpp", "ep", "dp", "micro_batch")
    parts = [f"{name}={row[name]}" for name in names if row[name] > 1 or name in ALWAYS]
    parts += [f"etp={row['etp']}"] if row["etp"] != row["tp"] else []
    parts += [f"schedule={SCHEDULE_NAMES[row['schedule']]}"] if row["pp"] > 1 else []
    parts += [f"recompute={RECOMPUTATIONS[row['recompute']]}"] if row["recompute"] else []
    return ",".join([*parts, *(SHOWN.get(name, name) for name in ("sp", "sharded") if row[name])])


def parse_words(text: str) -> dict[str, int]:
    """Return the columns that a text such as `tp=4,pp=8,recompute=full,sp` sets. Raises ConfigError with all problems.

    A name alone is true; `sp=false` is the opposite.
    """
    found: dict[str, int] = {}
    problems = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        given, _, word = item.partition("=")
        name = _COLUMN_OF.get(given, given)
        if name not in AXES:
            known = [SHOWN.get(axis, axis) for axis in AXES]
            problems.append(f"{shown(name)} is not part of a layout; name {', '.join(known)}{nearest(name, known)}")
        elif name in WORDS:
            if word not in WORDS[name]:
                problems.append(f"{item}: choose one of {', '.join(WORDS[name])}{nearest(word, WORDS[name])}")
            found[name] = WORDS[name].index(word) if word in WORDS[name] else 0
        elif name in ("sp", "sharded"):
            if word not in ("", "true", "false"):
                problems.append(f"{item}: give true or false")
            found[name] = word != "false"
        elif not word.isdecimal() or int(word) < 1:
            problems.append(f"{item}: give a whole number from 1, as in {name}=4")
        else:
            found[name] = int(word)
    if problems:
        raise ConfigError(problems, source="the layout")
    return found


def pinned(given: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the columns that fields of a configuration set, and a problem for each field that cannot be set."""
    columns: dict[str, int] = {}
    problems = []
    for name, value in given.items():
        if name in FIELDS:
            column = FIELDS[name]
            if column not in WORDS:
                columns[column] = value
            elif value in WORDS[column] and value != "auto":
                columns[column] = WORDS[column].index(value)
            elif value != "auto":
                problems.append(f"{name} = {value}: not searched; choose one of {', '.join(WORDS[column])}")
        elif name in NEUTRAL:
            problems.append(f"{name}: the search decides it; leave it out")
    return columns, problems


def matching(rows: np.ndarray, columns: Mapping[str, int]) -> np.ndarray:
    """Return a mask (N,) of the layouts that have these values."""
    mask = np.ones(len(rows), dtype=bool)
    for name, value in columns.items():
        mask &= rows[name] == value
    return mask
