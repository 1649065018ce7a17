"""The search of layouts: what is legal, bounds that never exceed what they bound, and a winner that is the fastest."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labkit.config import ConfigError, RunConfig, presets
from labkit.config.pipeline_layout import parse_layout
from labkit.plan.fitting import device_of, fullest
from labkit.plan.layout_bounds import memory_bounds, time_bounds
from labkit.plan.layouts import (
    RECOMPUTATIONS,
    SCHEDULE_NAMES,
    divisors,
    in_words,
    legal_layouts,
    matching,
    parse_words,
    rules_broken,
    uneven_layout,
    workload_of,
)
from labkit.plan.machine import load_machine
from labkit.plan.ranking import losers, pareto_front
from labkit.plan.search import Search
from labkit.plan.step_time import predict_step, schedule_of, step_lower_bound
from labkit.plan.workload import Workload

DENSE = {"model.layers": 6, "model.hidden": 256, "model.heads": 4, "model.vocab_size": 1000, "model.seq_length": 128,
         "train.global_batch_size": 8, "optim.precision": "bf16"}  # fmt: skip
EXPERTS = DENSE | {"moe.num_experts": 4, "moe.top_k": 2, "moe.ffn_hidden": 512}
MIXED = EXPERTS | {"moe.layer_freq": (0, 1)}
FLOAT8 = EXPERTS | {"model.seq_length": 2048, "optim.fp8": "hybrid", "optim.fp8_recipe": "current"}
LONG = DENSE | {"model.layers": 7, "model.seq_length": 2048, "model.position": "rope", "model.kv_heads": 2}


def silent(*_: object) -> None:
    pass


def base_of(fields: dict, world: int, software: str = "megatron_core") -> Workload:
    return Workload(RunConfig().replaced(fields), world, software=software)


def brute_force(base: Workload) -> set[str]:
    """Return every layout that labkit's own rules accept, in words, within what the search says that it searches."""
    config, world, found = base.config, base.world_size, set()
    sizes, batch, layers = divisors(world), config.train.global_batch_size, config.model.layers
    template = legal_layouts(presets.tiny(), 1)[0]
    for pp, tp, cp, ep, etp in product(sizes, repeat=5):
        if world % (pp * tp * cp) or batch % (dp := world // (pp * tp * cp)) or pp > layers:
            continue
        if (etp != tp and not config.moe.num_experts) or etp > config.model.heads:
            continue
        pipelines = [("auto", 1)] if pp == 1 else [(n, 1) for n in ("1f1b", "zero_bubble_h1")]
        pipelines += [] if pp == 1 else [(n, 2) for n in ("zbv", "dualpipe_v") if layers >= 2 * pp]
        pipelines += [("interleaved", v) for v in range(2, layers // pp + 1) if pp > 1 and -layers % (pp * v) <= 2]
        for micro, (name, chunks), sp, mode, sharded in product(
            divisors(batch // dp), pipelines, (False, True), range(3), (False, True)
        ):
            row = template.copy()
            values = (tp, cp, pp, ep, etp, dp, micro, batch // (dp * micro), chunks, SCHEDULE_NAMES.index(name), mode)
            for column, value in zip(row.dtype.names, (*values, sp, sharded)):
                row[column] = value
            useless = (sp and tp == 1) or (sharded and dp * cp == 1)
            if not useless and not rules_broken(workload_of(base, row).config, world):
                found.add(in_words(row))
    return found


@pytest.mark.parametrize("fields, world", [(DENSE, 8), (EXPERTS, 4), (LONG, 6)])
def test_the_layouts_are_those_that_the_rules_of_labkit_accept(fields, world):
    base = base_of(fields, world)
    rows = legal_layouts(base.config, world)
    words = [in_words(row) for row in rows]
    assert len(set(words)) == len(words) > 50
    assert set(words) == brute_force(base)


@cache
def bounds_of(kind: int, world: int, machine: str, software: str):
    base = base_of((DENSE, EXPERTS, MIXED, LONG, FLOAT8)[kind], world, software)
    rows = legal_layouts(base.config, world)
    device = device_of(load_machine(machine))
    return base, rows, memory_bounds(base, device, rows, silent), time_bounds(
        base, load_machine(machine), rows, silent
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    kind=st.integers(0, 4), world=st.sampled_from([1, 4, 8, 12, 24]), machine=st.sampled_from(["a100", "h100"]),
    pick=st.integers(0, 10**6), software=st.sampled_from(["megatron_core", "megatron_2022", "foundry_2023"]),
)  # fmt: skip
def test_no_bound_exceeds_what_it_bounds(kind, world, machine, pick, software):
    assume(machine == "h100" or kind < 4)  # an A100 has no fp8
    base, rows, memory, seconds = bounds_of(kind, world, machine, software)
    assume(len(rows))
    place = pick % len(rows)
    workload = workload_of(base, rows[place])
    schedule = schedule_of(workload.config, workload.microbatches)
    need = fullest(workload, load_machine(machine), schedule)
    assert 0 < memory[place] <= need.bytes
    lower, step = step_lower_bound(workload, load_machine(machine)), predict_step(workload, load_machine(machine))
    assert 0.2 * lower < seconds[place] <= lower * (1 + 1e-9)
    assert lower <= step.seconds * (1 + 1e-9)


def test_bounds_of_a_large_model_are_close():
    """Small models are mostly workspaces and launches; of a large one the bounds must say most."""
    base, machine = Workload(presets.get("table1_8_3b"), 64), load_machine("h100")
    base = Workload(base.config.replaced({"train.global_batch_size": 512}), 64)
    rows = legal_layouts(base.config, 64)
    rows = rows[:: len(rows) // 40]
    memory, seconds = memory_bounds(base, "cuda", rows, silent), time_bounds(base, machine, rows, silent)
    shares = []
    for place, row in enumerate(rows):
        workload = workload_of(base, row)
        need = fullest(workload, machine, schedule_of(workload.config, workload.microbatches)).bytes
        shares.append((memory[place] / need, seconds[place] / step_lower_bound(workload, machine)))
        assert max(shares[-1]) <= 1 + 1e-9
    assert np.median(shares, axis=0).min() > 0.8


@cache
def searched(kind: int, world: int = 8, memory_gb: float = 80.0) -> Search:
    return Search(base_of((DENSE, EXPERTS)[kind], world), load_machine("h100"), 80e9 - memory_gb * 1e9)


def test_a_machine_without_gpus_counts_the_bytes_of_a_cpu():
    """No bound exceeds `rank_memory` there, and no reserve of a GPU's libraries is known."""
    laptop = replace(load_machine("h100"), gpu="Intel(R) Xeon(R) Processor")
    assert device_of(laptop) == "cpu" and device_of(replace(laptop, gpu="NVIDIA L40S")) == "cuda"
    base = base_of(DENSE | {"optim.precision": "fp32"}, 4)
    rows = legal_layouts(base.config, 4)[::7]
    memory = memory_bounds(base, "cpu", rows, silent)
    for place, row in enumerate(rows):
        workload = workload_of(base, row)
        need = fullest(workload, laptop, schedule_of(workload.config, workload.microbatches))
        assert 0 < memory[place] <= need.bytes


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("memory_gb", [80.0, 0.09])
def test_the_best_are_the_fastest_of_all_that_fit(kind, memory_gb):
    search = searched(kind, 4, memory_gb)
    everything = []
    for row in search.rows:
        workload = workload_of(search.base, row)
        schedule = schedule_of(workload.config, workload.microbatches)
        if fullest(workload, search.machine, schedule).bytes <= search.available:
            everything.append(predict_step(workload, search.machine).seconds)
    best = search.best()
    assert [each.prediction.seconds for each in best] == sorted(everything)[:10]
    counts = search.counts
    assert counts.legal == len(search.rows) == counts.memory + counts.bounded + counts.simulated
    assert counts.simulated < counts.legal / 2
    assert counts.legal - counts.memory >= len(everything)
    assert memory_gb == 80.0 or counts.memory > 0


def test_a_family_loses_to_the_winner_by_the_part_that_grew():
    search = Search(Workload(presets.get("table1_8_3b").replaced({"train.global_batch_size": 64}), 64),
                    load_machine("h100"))  # fmt: skip
    winner = search.best(1)[0]
    lines = {each.family: each for each in losers(search, winner, np.ones(len(search.rows), bool))}
    assert all(
        each.best is None or each.best.prediction.seconds >= winner.prediction.seconds for each in lines.values()
    )
    assert any("communication of tp" in line.reason and "tp leaves the node" in line.reason for line in lines.values())
    only = matching(search.rows, {"tp": 16})
    best = search.best(1, only)[0]
    assert best.row["tp"] == 16 and best.prediction.seconds > winner.prediction.seconds
    front = pareto_front(search, winner)
    assert len(front) > 2
    for one, other in pairwise(front):
        assert other.prediction.seconds >= one.prediction.seconds and other.memory.bytes < one.memory.bytes


@pytest.mark.parametrize("layers, stages", [(7, 2), (7, 4), (9, 8), (72, 16), (61, 16)])
def test_uneven_stages_hold_every_layer_and_differ_by_one(layers, stages):
    counts = [stage.count("t") for stage in parse_layout(uneven_layout(layers, stages))]
    assert sum(counts) == layers and len(counts) == stages and max(counts) - min(counts) == 1
    assert counts[-1] == min(counts)


def test_words_of_a_layout_are_read_back():
    rows = legal_layouts(base_of(EXPERTS, 8).config, 8)
    for row in rows[:: max(1, len(rows) // 50)]:
        found = rows[matching(rows, parse_words(in_words(row)))]
        assert row in found
    with pytest.raises(ConfigError, match=r"tq.*is not part of a layout.*did you mean") as caught:
        parse_words("tq=4,pp=0,schedule=zb,sp=maybe")
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    "fields, world, message",
    [
        ({"model.heads": 3, "model.hidden": 256}, 8, "multiple of model.heads"),
        ({"model.family": "bert"}, 8, "times are known for gpt"),
        ({"optim.precision": "fp64"}, 8, "no rate for fp64"),
        ({"train.global_batch_size": 3}, 7, "no layout on 7 GPUs"),
    ],
)
def test_what_no_layout_could_repair_is_one_error(fields, world, message):
    with pytest.raises(ConfigError, match=message):
        Search(base_of(DENSE | fields, world), load_machine("h100"))


def test_recomputations_and_schedules_are_names_of_the_configuration():
    rows = legal_layouts(base_of(DENSE, 8).config, 8)
    assert set(np.unique(rows["recompute"])) == set(range(len(RECOMPUTATIONS)))
    assert set(np.unique(rows["schedule"])) == set(range(len(SCHEDULE_NAMES)))
