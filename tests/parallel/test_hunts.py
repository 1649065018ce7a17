"""Each planted fault of a hunt is found by its own evidence and by no other, on real ranks; a clean run is clean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from re import search
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from task_folders import write_task

from labkit import schedules, viz
from labkit.check.hunts.hunting import Planted, hunt_of
from labkit.comm import collectives
from labkit.comm.fault_injection import delayed
from labkit.comm.ledger import CommLedger
from labkit.config import RunConfig, presets
from labkit.data import bundled_text, load_tokenizer
from labkit.data.batches import data_iterator
from labkit.data.cleaning import Cleaner, Rules
from labkit.data.gpt_data import GPTDataset
from labkit.evaluate import CheckpointModel, Sampling, generate
from labkit.evaluate.sampling import Sampler
from labkit.evaluate.wikitext import score_windows
from labkit.events import EventRecorder, recording, span, watching
from labkit.finetune import Settings, repeated_runs
from labkit.finetune.finetuning import prepare, train_and_predict
from labkit.graphs import make_graphed_callables
from labkit.launch import RankError, Ranks
from labkit.models import Footprint, GPTModel, SavedTensors, build_model_chunks, sleep_through
from labkit.models.synthetic_load import SleepingLayer, SleepingParts, sleeping_ring
from labkit.moe import TopKRouter
from labkit.parallel import (
    DistributedDataParallel,
    initialize_model_parallel,
    model_parallel_seed,
    single_process_groups,
    vocab_parallel_cross_entropy,
    zigzag_split,
)
from labkit.parallel.context.ring_attention import ring_attention
from labkit.parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from labkit.parallel.data_parallel.optimizer import Optimizer
from labkit.parallel.parameters.parameter_record import main_grad_of, record_of
from labkit.schedules import Costs, simulate
from labkit.schedules.merging import MOE_PARTS
from labkit.train import bert_step, build_optimizer, compare, float64_layer, follows, pretrain, stepping
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.resume import Progress
from labkit.train.forward_step import gpt_forward_step
from labkit.train.lr_schedule import build_lr_schedule
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer
from labkit.train.stepping import train_step

CLEAN = "clean"
SMALL = presets.tiny().override(
    {"model.hidden": 32, "model.seq_length": 16, "global_batch_size": 4, "train.eval_steps": 0}
)
SPLIT = {"parallel.tp": 2, "parallel.pp": 1, "parallel.sequence_parallel": True}
FULL = {"model.recompute_granularity": "full", "model.attention_backend": "unfused"}
SHARDED = {
    "parallel.pp": 1, "optim.distributed_optimizer": True, "optim.overlap_param_gather": True,
    "optim.bucket_size": 5000,
}  # fmt: skip
PIPELINE = {"parallel.pp": 2}
PADDED = {"model.layers": 2, "model.vocab_size": 1100}
GRAPHS = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 2, "train.steps": 3}
GRAPHS |= {"train.micro_batch_size": 1}
PARTIAL = presets.tiny_moe().override(
    {
        "model.layers": 2, "model.hidden": 32, "model.seq_length": 16, "moe.layer_freq": [1], "moe.ffn_hidden": 64,
        "global_batch_size": 8, "graph.cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"], **GRAPHS,
        "train.micro_batch_size": 2,
    }
)  # fmt: skip
EXPERTS = {"parallel.ep": 2, "parallel.pp": 1}
ROUTED = presets.tiny_moe().override(
    {
        "model.layers": 2, "model.hidden": 32, "model.seq_length": 16, "moe.layer_freq": [1], "moe.ffn_hidden": 32,
        "moe.score_function": "sigmoid", "moe.expert_bias": True, "moe.expert_bias_update_rate": 0.01,
        "moe.z_loss_coeff": 0.0, "global_batch_size": 8, "train.micro_batch_size": 2, "train.eval_steps": 0,
    }
)  # fmt: skip
PAIRED = presets.tiny_moe().override(
    {
        "model.layers": 2, "model.hidden": 32, "model.seq_length": 16, "moe.layer_freq": [1], "moe.ffn_hidden": 32,
        "global_batch_size": 16, "train.micro_batch_size": 1, "train.eval_steps": 0,
    }
)  # fmt: skip
MERGES, DELAYS = {"schedule.overlap_moe_expert_parallel_comm": True}, {"schedule.delay_wgrad_compute": True}
REPLICAS = {"model.layers": 2, "train.micro_batch_size": 1, "optim.bucket_size": 4096}
T5 = {"model.hidden": 32, "model.heads": 4, "model.layers": 1, "model.decoder_layers": 3, "train.eval_steps": 0}
T5 |= {"global_batch_size": 4, "micro_batch_size": 2}
BERT = {"model.init_std": 0.11, "optim.precision": "fp64", "train.steps": 20}
BERT |= {"optim.lr": 1.0, "optim.warmup_steps": 4, "optim.lr_schedule": "constant"}
MARK = 30
"""Minutes of the timeout of the first run of a comparison; later runs have one minute more each, by which ranks know
their fault."""


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, device="cpu", backend="gloo") as started:
        yield started


ENDLESS = "gradients last"
"""A fault with which a run does not end; it is the last one of its hunt."""
LOSS_MOVES = (
    "positions", "forward sum", "samples of neighbours", "alone", "neighbours", "own maximum", "padding counts",
    "other copy", "mask of the plain cut", "one buffer", "same samples", "labels out of step", "rounded on the wire",
    "first tokens", "chunks swapped", "short circuit", "causal crossing",
)  # fmt: skip
"""Faults with which the loss of the first step is another one."""


def names(chapter: str) -> list[str]:
    return [CLEAN, *(fault.name for fault in hunt_of(chapter).faults if fault.name != ENDLESS)]


def with_each_fault(ranks: Ranks, chapter: str, function: Callable[..., Any]) -> dict[str, list[Any]]:
    """What the ranks return, by fault; a clean run comes last, on ranks that have had all faults."""
    wrapped = {name: Planted(chapter, i, function) for i, name in enumerate(names(chapter)[1:])}
    return {name: ranks.run(each) for name, each in (wrapped | {CLEAN: function}).items()}


def loud_and_silent(chapter: str) -> tuple[list[int], list[int]]:
    """Numbers of the faults that spoil a tensor, and of those that spoil none, without the endless one."""
    numbers = [i for i, fault in enumerate(hunt_of(chapter).faults) if fault.name != ENDLESS]
    silent = [i for i in numbers if hunt_of(chapter).faults[i].answers["first"] == "none"]
    return [i for i in numbers if i not in silent], silent


def train_marked(chapter: str, config: RunConfig, observer: Any) -> Any:
    """Train with the loud fault that the timeout of the layout names, or with all silent ones at once."""
    (loud, silent), run = loud_and_silent(chapter), pretrain
    marked = round(config.parallel.distributed_timeout_minutes) - MARK
    for number in [loud[marked]] if marked < len(loud) else silent:
        run = Planted(chapter, number, run)
    return run(config, schedule=schedules.zbv(2, 4) if chapter == "12" else None, observer=observer)


@pytest.mark.parametrize(
    ("chapter", "config", "layout", "steps"),
    [
        ("00", SMALL.override({"model.layers": 4}), {"parallel.tp": 2, "parallel.pp": 2}, 1),
        ("02", SMALL.override({"model.layers": 1}), {"parallel.tp": 2, "world_size": 4}, 1),
        ("03", SMALL.override({"model.layers": 2}), {"parallel.tp": 2, "parallel.pp": 1}, 2),
        ("04", SMALL.override(PADDED), {"parallel.tp": 2, "parallel.pp": 2}, 1),
        ("05", SMALL.override({"model.layers": 2, **FULL}), {"parallel.tp": 2, "parallel.pp": 1}, 1),
        ("06", SMALL.override({"model.layers": 2}), SPLIT, 1),
        ("07", SMALL.override({"model.layers": 2}), {"parallel.cp": 2, "parallel.pp": 1}, 1),
        ("08", SMALL.override(REPLICAS), {"parallel.pp": 1, "world_size": 2}, 1),
        ("09", SMALL.override({"model.layers": 2}), SHARDED | {"world_size": 2}, 2),
        ("10", SMALL.override({"model.layers": 4}), PIPELINE, 1),
        ("11", SMALL.override({"model.layers": 4}), PIPELINE | {"parallel.vpp": 2}, 1),
        ("12", SMALL.override({"model.layers": 8}), PIPELINE, 1),
        ("14", ROUTED, EXPERTS, 3),
        ("17", SMALL.override({"model.layers": 4, **GRAPHS}), PIPELINE, 3),
        ("18", PARTIAL, EXPERTS, 3),
        ("24", presets.t5_tiny().override(T5), {"parallel.pp": 4, "parallel.split_rank": 1}, 1),
        ("25", PAIRED, EXPERTS | {"parallel.pp": 2} | MERGES | DELAYS, 1),
    ],
)
def test_the_microscope_names_the_tensor_of_the_verdict_or_none(chapter, config, layout, steps) -> None:
    faults, (loud, _) = hunt_of(chapter).faults, loud_and_silent(chapter)
    marked = [layout | {"parallel.distributed_timeout_minutes": MARK + i} for i in range(len(loud) + 1)]
    *spoilt, silent = compare(config, marked, steps=steps, device="cpu", pretrain=partial(train_marked, chapter)).rows
    assert silent.verdict == "equal", silent
    for fault, row in zip([faults[number] for number in loud], spoilt, strict=True):
        assert row.verdict == "fault" and search(fault.answers["first"], str(row.first_difference)), (fault.name, row)
        moves = fault.name in LOSS_MOVES or chapter in ("03", "09", "14")  # whose later steps count
        assert (row.loss_diff > 1e-12) == moves, "only outputs, the loss itself, and groups that log it, change it"


# ---- 00 ----


def test_00_the_silent_fault_shows_in_the_forwards_of_the_last_stage(ranks) -> None:
    found = with_each_fault(ranks, "00", train_two_stages)
    forwards = {name: [min(seconds) for seconds in runs] for name, runs in found.items()}  # other work only adds
    ratios = {name: last / first for name, (first, last) in forwards.items()}
    slow = ratios.pop("slow forward")
    assert slow > 2.5 * max(ratios.values()), (slow, ratios)


def train_two_stages() -> list[float]:
    """Seconds of this stage's forwards."""
    result = pretrain(SMALL.override({"model.layers": 4, "train.steps": 6, **PIPELINE}))
    return [event.duration for event in result.events if event.kind == "forward"]


# ---- 01 ----


def descended() -> tuple[torch.Tensor, torch.Tensor, dict[str, int], dict[str, float]]:
    """Weights of this rank after one and after 40 steps, bytes given to each operation, seconds in each."""
    group = initialize_model_parallel(presets.tiny().override({"parallel.pp": 1}).parallel).world
    inputs, targets = samples(group.rank)
    weight, first, recorder = torch.zeros(8), None, EventRecorder(group.rank)
    with CommLedger() as ledger, watching(recorder):
        for _ in range(40):
            gradient = 2 * inputs.T @ (inputs @ weight - targets) / len(inputs) / group.size
            mine = weight.chunk(group.size)[group.rank] - 0.05 * collectives.reduce_scatter(gradient, group)
            weight = collectives.all_gather(mine, group)
            first = weight if first is None else first
    given: Counter[str] = Counter()
    for record in ledger.records:
        given[record.operation] += record.bytes
    assert first is not None
    waited: dict[str, float] = {}
    for event in recorder.events:
        name = event.name.split()[0]
        waited[name] = waited.get(name, 0.0) + event.duration
    return first, weight, given, waited


def samples(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, 8, generator=made)
    return inputs, inputs @ torch.linspace(-1, 1, 8)


def first_step(*ranks: int) -> torch.Tensor:
    """The first step of one process with the samples of these ranks, as two ranks divide it."""
    return 0.05 * sum((2 * x.T @ y / len(x) / 2 for x, y in map(samples, ranks)), torch.zeros(8))


def test_01_each_fault_has_its_own_evidence(ranks) -> None:
    found = with_each_fault(ranks, "01", descended)
    firsts, last, given = ({name: runs[0][i] for name, runs in found.items()} for i in range(3))
    both = first_step(0, 1)
    right = {name for name, first in firsts.items() if torch.allclose(first, both, atol=1e-6)}
    assert right == {CLEAN, "padded sum", "straggler"}
    torch.testing.assert_close(firsts["mean"], both / 2)
    torch.testing.assert_close(firsts["sent too early"], first_step(0), msg="rank 1 is missing")
    torch.testing.assert_close(firsts["no sum"], torch.cat([first_step(0)[:4], first_step(1)[4:]]))
    whole = {"reduce_scatter": 40 * 32, "all_gather": 40 * 16}
    assert {name: dict(each) for name, each in given.items() if each != whole} == {
        "no sum": {"all_gather": 40 * 16},
        "padded sum": {"reduce_scatter": 40 * 32, "all_reduce": 40 * 32},
    }
    assert (last["sent too early"] - last[CLEAN]).norm() < 0.1 * last[CLEAN].norm(), "hardly to be seen at the end"
    waited, other = (run[3]["reduce_scatter"] for run in found["straggler"])
    assert waited > 40 * 0.015 and waited > other + 0.3, "who comes late does not wait"
    assert waited > found["straggler"][0][3]["all_gather"] + 0.3, "and nobody waits in the other operation"


# ---- 02 ----


def met_and_given() -> tuple[list[int], list[int], dict[tuple[str, str], set[int]]]:
    """Whom this rank meets in dp and in dp_cp, and the sizes of the groups of its calls, by operation and kind."""
    config = SMALL.override({"model.layers": 1, "parallel.tp": 2, "parallel.pp": 1, "train.steps": 1})
    groups = initialize_model_parallel(config.parallel)
    mine = torch.tensor([groups.rank])
    dp, dp_cp = (collectives.all_gather(mine, group).tolist() for group in (groups.dp, groups.dp_cp))
    sizes: dict[tuple[str, str], set[int]] = {}
    with CommLedger() as ledger:
        pretrain(config)
    for record in ledger.records:
        sizes.setdefault((record.operation, record.group), set()).add(record.group_size)
    return dp, dp_cp, sizes


def test_02_each_fault_shows_in_whom_rank_1_meets_or_in_the_ledger() -> None:
    with Ranks(4, device="cpu", backend="gloo") as four:
        found = {name: runs[1] for name, runs in with_each_fault(four, "02", met_and_given).items()}
    assert {name: (dp, dp_cp) for name, (dp, dp_cp, _) in found.items()} == {
        "whole world": ([1, 3], [0, 1, 2, 3]),
        "order from its end": ([0, 1], [0, 1]),
        "samples of neighbours": ([0, 1], [1, 3]),
        "alone": ([1, 3], [1]),
        "neighbours": ([1, 3], [0, 1]),
        CLEAN: ([1, 3], [1, 3]),
    }
    for fault in hunt_of("02").faults:
        assert search(fault.answers["meets"], ", ".join(map(str, found[fault.name][1]))), fault.name
    sums = {name: sizes.get(("all_reduce", "dp_cp"), set()) for name, (_, _, sizes) in found.items()}
    assert {name: size for name, size in sums.items() if size != {2}} == {"whole world": {4}, "alone": set()}


# ---- 03 ----


def two_layers() -> tuple[dict[str, torch.Tensor], Counter[str], list[str]]:
    """Gradients by name, number of messages by phase, and products that run beside a message of an MLP's backward."""
    groups = initialize_model_parallel(SMALL.override({"parallel.tp": 2, "parallel.pp": 1}).parallel)
    blocks = [float64_layer(SMALL, groups, index) for index in range(2)]
    model = torch.nn.Sequential(*blocks)
    x = torch.linspace(-1, 1, 8 * 2 * 32, dtype=torch.float64).reshape(8, 2, 32).requires_grad_()
    with CommLedger() as ledger:
        model(x).square().sum().backward()
    named = [("x", x), *model.named_parameters()]
    gradients = {name: tensor.grad.clone() for name, tensor in named if tensor.grad is not None}
    with delayed(0.05), recording(groups.rank) as recorder:
        blocks[0].mlp(x).sum().backward()
    sums = [event for event in recorder.events if event.kind == "collective"]
    beside = [e.name for e in recorder.events if any(s.start < e.start < s.end for s in sums) and e.kind != "wait"]
    return gradients, Counter(str(record.phase) for record in ledger.records), beside


def test_03_each_fault_has_its_own_evidence(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "03", two_layers).items()}
    right, sent, beside = found[CLEAN]
    assert sent == {"forward": 4, "backward": 4} and beside == ["layers.0.mlp.fc1 weight_grad"]
    messages = {name: dict(run[1]) for name, run in found.items() if run[1] != sent}
    assert messages == {
        "g both ways": {"forward": 4, "backward": 8}, "f lost": {"forward": 4, "backward": 3},
    }  # fmt: skip
    assert {name for name, run in found.items() if not run[2]} == {"awaited f"}
    wrong = {
        name: {key for key, grad in run[0].items() if not torch.allclose(grad, right[key], rtol=1e-9, atol=1e-12)}
        for name, run in found.items()
    }
    before_attention = {"0.attention.norm.weight", "0.attention.norm.bias", "x"}
    assert {name: names for name, names in wrong.items() if len(names) < 8} == {
        CLEAN: set(), "early bias": set(), "awaited f": set(), "f lost": before_attention,
    }  # fmt: skip
    torch.testing.assert_close(found["g both ways"][0]["1.mlp.fc2.bias"], 2 * right["1.mlp.fc2.bias"])
    torch.testing.assert_close(found["mean in f"][0]["1.mlp.norm.weight"], right["1.mlp.norm.weight"] / 2)
    assert not {"1.mlp.fc1.weight", "1.mlp.fc2.weight"} & wrong["mean in f"], "these are before f in backward"


# ---- 04 ----


def loss_alone() -> tuple[float, list[tuple[str, int]]]:
    """By how much this rank's loss is too large, and the operations of the loss with their numbers."""
    group = initialize_model_parallel(SMALL.override({"parallel.tp": 2, "parallel.pp": 1}).parallel).tp
    logits = 8 * torch.randn(16, 96, generator=torch.Generator().manual_seed(0))  # 90 words and 6 columns of padding
    labels = torch.arange(16)
    right = torch.nn.functional.cross_entropy(logits[:, :90], labels)
    with CommLedger() as ledger:
        own = logits.chunk(2, 1)[group.rank]
        loss = vocab_parallel_cross_entropy(own, labels, group, vocab_size=90, padded_vocab_size=96)
    return float(loss.mean() - right), [(each.operation, each.bytes // 4) for each in ledger.records]


class Copies:
    """Keeps this rank's copy of the table after each step."""

    def on_model(self, groups: Any, chunks: Any, schedule: Any) -> None:
        self.noted: list[torch.Tensor] = []

    def on_gradients(self, step: int, chunks: Any) -> None:
        pass

    def on_update(self, step: int, chunks: Any) -> None:
        weights = [weight for chunk in chunks for weight in chunk.parameters()]
        self.noted += [w.detach().clone() for w in weights if w.full_name == "embedding.word.weight"]


def copies() -> torch.Tensor:
    observer = Copies()
    pretrain(SMALL.override(PADDED | PIPELINE | {"train.steps": 2}), observer=observer)
    return torch.stack(observer.noted)


def test_04_each_fault_has_its_own_evidence(ranks) -> None:
    found = with_each_fault(ranks, "04", loss_alone)
    off = {name: [run[0] for run in runs] for name, runs in found.items()}
    assert {name for name, each in off.items() if max(map(abs, each)) > 1e-5} == {"own maximum", "padding counts"}
    assert off["own maximum"][0] != off["own maximum"][1] and off["padding counts"][0] == off["padding counts"][1] > 0
    given = {name: runs[0][1] for name, runs in found.items()}
    assert given[CLEAN] == [("all_reduce", 16), ("all_reduce", 32)]
    assert given["own maximum"] == [("all_reduce", 32)]
    assert given["logits gathered"] == [("all_gather", 16 * 48), *given[CLEAN]]
    assert all(given[name] == given[CLEAN] for name in ("padding counts", "mean of copies", "other copy"))
    tables = with_each_fault(ranks, "04", copies)
    apart = {name: [float(x) for x in (a - b).norm(dim=(1, 2)) / a.norm(dim=(1, 2))] for name, (a, b) in tables.items()}
    assert {name for name, each in apart.items() if any(each)} == {"other copy"}
    assert min(apart["other copy"]) > 1.5 and abs(apart["other copy"][0] - apart["other copy"][1]) < 0.2


# ---- 05 ----


def vital_signs() -> tuple[Counter[str], int, int, bool]:
    """All-reduces by phase, bytes kept after forward, operations, and whether gradients are those of keeping all."""
    sent: Counter[str] = Counter()
    gradients, kept, operations = [], 0, 0
    for change in ({"model.attention_backend": "unfused"}, FULL):
        rates = {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
        config = SMALL.override({"parallel.tp": 2, "parallel.pp": 1, "model.layers": 2, **rates, **change})
        groups = initialize_model_parallel(config.parallel)
        stage = GPTModel(config.model, groups, layers=range(2), seed=0, pre_process=False, post_process=False)
        stage.set_input_tensor(torch.linspace(-1, 1, 1024).view(16, 2, 32).requires_grad_())
        with CommLedger() as ledger, Footprint(stage) as run:
            y = stage(None)
            kept = run.kept
            y.square().sum().backward()
        sent, operations = Counter(record.phase or "" for record in ledger.records), run.operations
        gradients.append([p.grad for p in stage.parameters()])
    return sent, kept, operations, all(map(torch.equal, *gradients))


def test_05_each_fault_has_its_own_vital_sign(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "05", vital_signs).items()}
    sent, kept, operations, same = found[CLEAN]
    assert sent == {"forward": 4, "recompute": 4, "backward": 4} and kept == 2 * 16 * 2 * 32 * 4 and same
    assert {name for name in found if found[name][0] != sent} == {"sum left out"}
    assert found["sum left out"][0]["recompute"] == 3
    assert {name for name in found if found[name][1] != kept} == {"graph kept"}
    assert found["graph kept"][1] > 5 * kept
    more = {name: each[2] for name, each in found.items() if each[2] != operations}
    assert more == {"core again": operations + 2 * 4 * 16 * 16 * 2 * 16}, "two layers, q k and probs v, half the heads"
    wrong = {name for name in found if not found[name][3]}
    assert wrong == {"sum left out", "new numbers", "input overwritten"}


# ---- 06 ----


def bytes_and_masks() -> tuple[Counter[str], int, bool]:
    """Bytes by operation of a forward of a layer, bytes that it keeps, and whether ranks 0 and 1 draw one mask."""
    config = SMALL.override(SPLIT | {"model.layers": 1})
    groups = initialize_model_parallel(config.parallel)
    stage = GPTModel(config.model, groups, layers=range(1), seed=0, pre_process=False, post_process=False)
    stage.set_input_tensor(torch.ones(8, 2, 32, requires_grad=True))
    with CommLedger() as ledger, SavedTensors(stage) as saved:
        _result = stage(None)
        kept = saved.bytes
    tracker = model_parallel_seed(0, groups, device="cpu")
    with tracker.fork():
        drawn = torch.rand(8)
    others = [torch.empty(8), torch.empty(8)]
    torch.distributed.all_gather(others, drawn)
    sent: Counter[str] = Counter()
    for record in ledger.records:
        sent[record.operation] += record.bytes
    return sent, kept, torch.equal(*others)


def test_06_each_silent_fault_shows_in_the_ledger_in_memory_or_in_the_masks(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "06", bytes_and_masks).items()}
    sent, kept, one_mask = found[CLEAN]
    assert set(sent) == {"all_gather", "reduce_scatter"} and not one_mask
    other_bytes = {name for name in found if found[name][0] != sent}
    more_kept = {name for name in found if found[name][1] > kept}
    same_masks = {name for name in found if found[name][2]}
    assert (other_bytes, more_kept, same_masks) == ({"sum, then cut"}, {"gathered input kept"}, {"one state"})
    assert found["sum, then cut"][0]["all_reduce"] == sent["reduce_scatter"]
    assert found["gathered input kept"][1] - kept == 2 * 16 * 2 * 32 * 4, "qkv and fc1, [s, b, h] in float32"


# ---- 07 ----


def messages_and_keys() -> tuple[Counter[str], list[list[int]]]:
    """Messages by phase, and by position which keys have a weight, on this rank of two with 4 of 8 positions."""
    cp = initialize_model_parallel(presets.tiny().override({"parallel.cp": 2, "parallel.pp": 1}).parallel).cp
    q, k = (x[None, None].requires_grad_() for x in torch.ones(2, 4, 8).unbind(0))
    v = zigzag_split(torch.eye(8), 2, cp.rank, dim=0)[None, None].requires_grad_()
    with CommLedger() as ledger:
        out = ring_attention(q, k, v, cp)
        out.sum().backward()
    sent = Counter(record.phase for record in ledger.records if record.operation == "send")
    return sent, [row.nonzero().flatten().tolist() for row in out[0, 0].detach()]


def test_07_each_wrong_number_shows_in_the_messages_or_in_the_keys(ranks) -> None:
    found = with_each_fault(ranks, "07", messages_and_keys)
    sent = {name: dict(runs[0][0]) for name, runs in found.items()}
    assert sent[CLEAN] == {"forward": 1, "backward": 2}
    fewer = {"forward": 1, "backward": 1}
    assert {name: each for name, each in sent.items() if each != sent[CLEAN]} == {
        "sums not passed on": fewer,
        "one hop short": fewer,
    }
    keys = {name: [row for _, rows in runs for row in rows] for name, runs in found.items()}
    order = [0, 1, 6, 7, 2, 3, 4, 5]
    assert keys[CLEAN] == [list(range(position + 1)) for position in order]
    others = {name for name in keys if keys[name] != keys[CLEAN]}
    assert others == {"mask of the plain cut", "one buffer"}
    assert any(max(row) > position for position, row in zip(order, keys["mask of the plain cut"])), "the future"
    assert not any(position in row for position, row in zip(order, keys["one buffer"])), "nobody sees itself"


def asleep_on_a_slow_link() -> float:
    """Least of three runs' seconds of a ring of two ranks, whose messages take half as long as a block."""
    cp = initialize_model_parallel(presets.tiny().override({"parallel.cp": 2, "parallel.pp": 1}).parallel).cp
    cut = [[0, 1, 6, 7], [2, 3, 4, 5]]
    seconds: list[float] = []
    for _ in range(3):  # other work only adds
        with delayed(0.04, group="cp"):
            events = [each for each in sleeping_ring(cp, cut, seconds_per_pair=0.01) if each.kind == "forward"]
        seconds.append(events[-1].end - events[0].start)
    return min(seconds)


def test_07_the_late_message_shows_in_the_time(ranks) -> None:
    seconds = {name: max(runs) for name, runs in with_each_fault(ranks, "07", asleep_on_a_slow_link).items()}
    assert seconds[CLEAN] > 0.179, "18 pairs"
    assert seconds["sent after the block"] > seconds[CLEAN] + 0.02, (seconds, "half a block more")


# ---- 08 ----


def third_step() -> tuple[list[str], list[bool]]:
    """Buckets that this rank starts in the third step, and for each all-reduce if it starts during the backward."""
    groups = initialize_model_parallel(SMALL.override({"parallel.pp": 1}).parallel)
    layers = [SleepingLayer(f"layer {i}", 1000, forward=0.0, backward=0.01) for i in range(8)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), groups, bucket_size=2000)
    started: list[str] = []
    events: list[Any] = []
    for _ in range(3):
        with recording(groups.rank) as recorder, CommLedger() as ledger:
            ddp.zero_grad_buffer()
            ddp(torch.zeros(1)).sum().backward()
            ddp.finish_grad_sync()
        started, events = [str(record.layer) for record in ledger.records], recorder.events
    end = max(event.end for event in events if event.kind == "backward")
    sent = sorted(event.start for event in events if event.kind == "collective")
    return started, [start < end for start in sent]


def test_08_each_fault_of_the_buckets_shows_in_what_is_started_and_when(ranks) -> None:
    found = with_each_fault(ranks, "08", third_step)
    buckets = [f"buckets.{number}" for number in range(4)]
    assert {
        name: [run[0] for run in runs] for name, runs in found.items() if [run[0] for run in runs] != [buckets] * 2
    } == {
        "other order": [buckets, [buckets[number] for number in (0, 1, 3, 2)]],
        "reduced twice": [buckets * 2] * 2,
    }
    during = {name: sum(runs[0][1]) for name, runs in found.items()}
    assert during[CLEAN] == 3 and {name for name, count in during.items() if count == 0} == {"late start"}


# ---- 09 ----


def sharded() -> tuple[dict[str, int], int, float]:
    """Bytes given to each operation, gathers that start inside of a forward, and what masters have beyond weights."""
    config = SMALL.override(SHARDED | {"model.layers": 2})
    groups = initialize_model_parallel(config.parallel)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).bfloat16()
    ddp = DistributedDataParallel(model, groups, distributed_optimizer=True, overlap_param_gather=True, bucket_size=1)
    optimizer = build_optimizer([ddp], config.optim, layout=groups)
    with CommLedger() as ledger, recording(groups.rank) as recorder:
        for _ in range(2):
            ddp.zero_grad_buffer()
            for last in (False, True):
                with span("forward", "forward"):
                    loss = ddp(torch.ones(2, 64).bfloat16()).square().mean()
                with nullcontext() if last else ddp.no_sync():
                    loss.backward()
            ddp.finish_grad_sync()
            optimizer.step(config.optim.lr)
        ddp.finish_param_sync()
    given: Counter[str] = Counter()
    for record in ledger.records:
        given[record.operation] += record.bytes
    forwards = [event for event in recorder.events if event.kind == "forward"]
    starts = [event.start for event in recorder.events if event.name.startswith("all_gather")]
    inside = sum(any(f.start < start < f.end for f in forwards) for start in starts)
    assert isinstance(optimizer, DistributedOptimizer)
    beyond = [
        float((own.master - own.parameter.flatten()[first : first + own.piece.numel].float()).abs().max())
        for pieces in optimizer.pieces
        for own in pieces
        for first in [own.piece.offset_in_parameter]
    ]
    return dict(given), inside, max(beyond)


def test_09_each_silent_fault_shows_in_the_ledger_in_the_time_line_or_in_the_masters(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "09", sharded).items()}
    given, inside, beyond = found[CLEAN]
    buckets = 8  # a weight or a bias each, of which the optimizer starts one
    assert inside == buckets - 1 and beyond > 0
    more = {name for name, (sent, _, _) in found.items() if sent["all_gather"] > given["all_gather"]}
    assert more == {"gathered again"} and len({sent["reduce_scatter"] for sent, _, _ in found.values()}) == 1
    assert {name for name, (_, starts, _) in found.items() if not starts} == {"waits at once"}
    assert {name for name, (*_, rest) in found.items() if rest == 0} == {"masters made anew"}


# ---- 10 ----


def asleep_in_one_stage() -> list[Any]:
    groups = initialize_model_parallel(SMALL.override(PIPELINE).parallel)
    costs = Costs(forward=0.03, input_grad=0.03, weight_grad=0.03)
    return sleep_through(groups, schedules.one_f_one_b(2, 6), costs)


def test_10_each_silent_fault_shows_in_the_timeline(ranks) -> None:
    table = schedules.one_f_one_b(2, 6)
    seen = {
        name: [event for events in runs for event in events if event.name[:1].isdigit()]
        for name, runs in with_each_fault(ranks, "10", asleep_in_one_stage).items()
    }
    assert {name for name, events in seen.items() if not follows(events, table)} == {"all forwards first"}
    peaks = {name: viz.gantt(events, memory=True).sentence for name, events in seen.items()}
    assert {name for name, said in peaks.items() if "6 in flight" in said} == {"all forwards first"}

    def wait_for_gradients(events: list[Any]) -> float:
        """Fewest seconds from the end of a backward on rank 1 to the start of the one on rank 0 that needs it."""
        at = {event.name: event for event in events}
        return min(at[f"0B{i}"].start - at[f"1B{i}"].end for i in range(5))  # other work only adds

    waits = {name: wait_for_gradients(events) for name, events in seen.items() if name != "all forwards first"}
    assert {name for name, wait in waits.items() if wait > 0.02} == {"late gradients"}, waits


# ---- 11 ----


def asleep_in_two_chunks() -> list[Any]:
    groups = initialize_model_parallel(SMALL.override(PIPELINE).parallel)
    return sleep_through(groups, schedules.interleaved(2, 2, 6), COSTS)


def test_11_each_silent_fault_shows_in_the_timeline(ranks) -> None:
    table = schedules.interleaved(2, 2, 6)
    seen = {
        name: [event for events in runs for event in events if event.name[:1].isdigit()]
        for name, runs in with_each_fault(ranks, "11", asleep_in_two_chunks).items()
    }
    assert {name for name, events in seen.items() if not follows(events, table)} == {"short warm-up", "one group"}
    overlays = {
        name: viz.gantt_overlay(simulate(table, COSTS), events, memory=True).sentence for name, events in seen.items()
    }
    peaks = {name: float(said.split("peak ")[1].split()[0]) for name, said in overlays.items()}
    assert {name: peak for name, peak in peaks.items() if peak != peaks[CLEAN] == 2.5} == {
        "short warm-up": 2.0,
        "one group": 4.5,
    }

    def way_round(events: list[Any]) -> float:
        """Shortest time from the end of a forward on the last rank to the one on rank 0 that reads it."""
        at = {event.name: event for event in events}
        return min(at[f"2F{i}"].start - at[f"1F{i}"].end for i in range(2))

    late = {name: way_round(events) for name, events in seen.items() if name not in ("short warm-up", "one group")}
    assert {name for name, wait in late.items() if wait > 0.045} == {"slow way round"}, late


# ---- 12 ----

COSTS = Costs(forward=0.02, input_grad=0.02, weight_grad=0.02, activation=0.5)


def asleep() -> list[Any]:
    groups = initialize_model_parallel(SMALL.override(PIPELINE).parallel)
    return sleep_through(groups, schedules.zbv(2, 4), COSTS)


def test_12_each_silent_fault_shows_in_the_timeline_of_its_rank(ranks) -> None:
    table = schedules.zbv(2, 4)
    seen = {
        name: [event for events in runs for event in events if event.name[:1].isdigit()]
        for name, runs in with_each_fault(ranks, "12", asleep).items()
    }
    other_order = {name for name, events in seen.items() if not follows(events, table)}
    assert other_order == {"weights at once", "weights last"}
    overlays = {
        name: viz.gantt_overlay(simulate(table, COSTS), events, memory=True).sentence for name, events in seen.items()
    }
    of_rank = {name: said.split("rank ")[1][0] for name, said in overlays.items() if "did not run its row" in said}
    assert of_rank == {"weights at once": "1", "weights last": "0"}
    peaks = {name: int(said.split("peak ")[1].split()[0]) for name, said in overlays.items()}
    assert {name for name, peak in peaks.items() if peak > peaks[CLEAN]} == {"weights last"}

    def shortest(events: list[Any], stage: int) -> float:
        return min(event.duration for event in events if event.name.startswith(f"{stage}F"))

    slow = {(name, stage) for name, events in seen.items() for stage in range(4) if shortest(events, stage) > 0.035}
    assert slow == {("slow forward", 0)}, "the earlier stage of rank 0"


def test_12_a_run_with_late_gradients_hangs_and_every_rank_waits_in_a_receive() -> None:
    number = [fault.name for fault in hunt_of("12").faults].index(ENDLESS)
    with Ranks(2, device="cpu", backend="gloo", timeout=8) as own, pytest.raises(RankError) as report:
        own.run(Planted("12", number, asleep))
    for rank in (0, 1):
        assert f"rank {rank}: waiting in recv pp" in str(report.value)


# ---- 13 ----


def in_bf16(tensors: list[torch.Tensor]) -> float:
    """Share of the numbers other than 0 that bf16 has, too."""
    found = torch.cat([torch.zeros(1), *(t.flatten() for t in tensors)])
    found = found[found != 0]
    return (found == found.bfloat16()).float().mean().item() if len(found) else 0.0


class Summed:
    """Looks at the summed gradients of a rank before they are used."""

    def on_model(self, groups: Any, chunks: Any, schedule: Any) -> None:
        pass

    def on_gradients(self, step: int, chunks: Any) -> None:
        sums = [main_grad_of(w) for chunk in chunks for w in chunk.parameters()]
        self.overflow, self.in_bf16 = not all(each.isfinite().all() for each in sums), in_bf16(sums)

    def on_update(self, step: int, chunks: Any) -> None:
        pass


def mixed_precision() -> list[dict[str, Any]]:
    """What a rank has after each of twelve steps in fp16 over two ranks, as the chapter's table has it."""
    run = initialize(FP16)
    chunks, optimizer, rate_of = setup_model_and_optimizer(run)
    assert isinstance(optimizer, Optimizer)
    batches = build_data_iterators(run, bytes_of_text).train(0)
    pipeline = Pipeline(FP16, run.groups, chunks, gpt_forward_step, run.schedule)
    weights = [w for group in optimizer.groups for w in group.params]
    mains = [main for group in optimizer.masters for main in group]
    copied = [w for w in weights if not record_of(w).tensor_model_parallel]

    table, updates, onlooker = [], 0, Summed()
    for step in range(FP16.train.steps):
        result = train_step(
            pipeline, optimizer, run.timers, batches,
            step=step, lr=rate_of(updates), clip_grad=1.0, observer=onlooker,
        )  # fmt: skip
        updates += not result.skipped
        nearer = sum((main.abs() - w.detach().abs()).sum() for w, main in zip(weights, mains))
        table.append({
            "loss": result.loss, "scale": result.loss_scale, "norm": result.grad_norm, "skipped": result.skipped,
            "overflow": onlooker.overflow,
            "copies": torch.cat([w.detach().float().flatten() for w in copied]),
            "sum": onlooker.in_bf16,
            "second moment": in_bf16([s["exp_avg_sq"] for s in optimizer.adamw.state.values()]),
            "bias": abs(float(nearer / sum(main.abs().sum() for main in mains))),
        })  # fmt: skip
    run.groups.close()
    return table


def bytes_of_text(config: RunConfig) -> tuple[GPTDataset, GPTDataset, GPTDataset]:
    tokens = np.frombuffer(bundled_text().encode()[:300_000], np.uint8)
    found = GPTDataset(tokens, config.model.seq_length, config.train.seed, shuffle=True)
    return found, found, found


FP16 = presets.tiny().override(
    {
        "model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.seq_length": 64, "model.position": "rope",
        "model.vocab_size": 256, "model.make_vocab_size_divisible_by": 32, "model.init_std": 0.1,
        "model.untie_embeddings_and_output_weights": True, "parallel.pp": 1, "parallel.tp": 2,
        "optim.data_parallel": "naive", "optim.lr": 1e-2, "optim.warmup_steps": 2, "optim.weight_decay": 0.0,
        "train.steps": 12, "global_batch_size": 4, "micro_batch_size": 2, "train.eval_steps": 0,
        "optim.precision": "fp16", "optim.initial_loss_scale": 2.0**17, "optim.loss_scale_window": 3,
        "optim.hysteresis": 1,
    }
)  # fmt: skip


def test_13_each_fault_shows_in_its_column(ranks) -> None:
    found = with_each_fault(ranks, "13", mixed_precision)
    healthy = found[CLEAN][0]
    apart = {
        name: [float((a["copies"] - b["copies"]).abs().max()) for a, b in zip(*runs)] for name, runs in found.items()
    }
    assert {name for name, each in apart.items() if any(each)} == {"alone"}
    alone = [a["overflow"] != b["overflow"] for a, b in zip(*found[CLEAN])]
    assert apart["alone"][alone.index(True)] > 0, "one rank updated, the other skipped"

    def first(name: str, column: str) -> float:
        """Of the second update: the first has the rate 0."""
        return [row[column] for row in found[name][0] if not row["skipped"]][1]

    others = [name for name in found if name != "alone"]
    assert {name for name in others if first(name, "sum") > 0.5} == {"sum in 16 bits"}
    assert {name for name in others if first(name, "second moment") > 0.5} == {"moment in 16 bits"}
    assert {name for name in others if first(name, "bias") > 1e-4} == {"chopped"}
    norms = {name: first(name, "norm") / first(CLEAN, "norm") for name in others}
    assert {name for name, norm in norms.items() if not 0.9 < norm < 1.1} == {"scaled twice"}
    assert 8 < norms["scaled twice"] < 32 and not any(row["skipped"] for row in healthy[:3])


# ---- 15 ----

FOLDED = presets.tiny_moe().override(
    {
        "model.layers": 2, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16, "moe.num_experts": 4,
        "moe.ffn_hidden": 64, "global_batch_size": 4, "train.steps": 1, "train.eval_steps": 0,
        "train.record_events": False, "parallel.cp": 2, "parallel.ep": 2, "parallel.pp": 1, "optim.precision": "fp64",
    }
)  # fmt: skip


def folded() -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Bytes that this rank gave in each group of a step, and whom it meets for experts."""
    groups = initialize_model_parallel(FOLDED.parallel)
    with CommLedger() as ledger:
        pretrain(FOLDED)
    given: Counter[str] = Counter()
    for record in ledger.records:
        given[record.group] += record.bytes
    return dict(given), {group.name: group.ranks for group in (groups.cp, groups.ep, groups.edp)}


def test_15_each_fault_shows_in_the_microscope_in_the_ledger_or_in_the_groups() -> None:
    faults = hunt_of("15").faults
    with Ranks(4, device="cpu", backend="gloo") as own:
        found = {name: runs[1] for name, runs in with_each_fault(own, "15", folded).items()}
    given, met = found[CLEAN]
    assert met == {"cp": (0, 1), "ep": (0, 1), "edp": (1, 3)}
    moved = {name: ranks for name, (_, ranks) in found.items() if ranks != met}
    assert moved == {"copies alone": met | {"edp": (1,)}, "copies as neighbours": met | {"ep": (1, 3), "edp": (0, 1)}}
    assert {name for name, (sent, _) in found.items() if sent.get("edp", 0) != given["edp"]} == {
        "copies alone", "experts with dense",
    }  # fmt: skip
    mixed = found["experts with dense"][0]
    assert mixed["dp_cp"] == given["dp_cp"] + given["edp"]
    assert found["rows stay"][0]["ep"] < 0.6 * given["ep"] and found["mean over copies"] == found[CLEAN]

    layout = [{"cp": 2, "ep": 2, "world_size": 4}]
    off = {}
    for number, fault in enumerate(faults):
        row = compare(FOLDED, layout, steps=1, pretrain=Planted("15", number, pretrain), device="cpu").rows[0]
        assert search(fault.answers["first"], row.first_difference or "none"), fault.name
        assert row.loss_diff < 1e-10 and bool(row.disagreements) == (fault.name == "copies alone"), fault.name
        off[fault.name] = row.grad_diff
    assert off["mean over copies"] == pytest.approx(1) == off["experts with dense"]


# ---- 16 ----


def measured(graphs: bool = True) -> tuple[list[torch.Tensor], list[torch.Tensor], bool, list[torch.Tensor], int]:
    """What the chapter's `measure` gives: outputs, gradients, two masks alike, two evaluations, replays."""
    torch.manual_seed(1)
    batches = [torch.randn(4, 8) for _ in range(2)]

    def made(dropout: float) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(2)
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(dropout))
        return layer, make_graphed_callables(layer, (torch.randn(4, 8),), impl="emulated") if graphs else layer

    (plain, first), (dropping, second) = made(0.0), made(0.5)
    with recording(0) as recorder:
        outputs = [first(batch).detach().clone() for batch in batches]
        for batch in batches:
            (first(batch) ** 2).mean().backward()
        masks = torch.equal(*(second(batches[0]).detach().clone() for _ in range(2)))
        dropping.eval()
        evaluations = [second(batches[0]).detach().clone() for _ in range(2)]
    replays = sum(event.kind == "graph_replay" for event in recorder.events)
    return outputs, [p.grad.clone() for p in plain.parameters()], masks, evaluations, replays


def test_16_each_fault_of_a_captured_layer_shows_in_its_own_entry() -> None:
    faults = hunt_of("16").faults
    found = {fault.name: Planted("16", i, measured)() for i, fault in enumerate(faults)} | {CLEAN: measured()}
    eager = measured(graphs=False)
    alike = lambda run, entry: all(map(torch.equal, run[entry], eager[entry]))  # noqa: E731
    assert {name for name, run in found.items() if not alike(run, 0)} == {"input left"}
    assert {name for name, run in found.items() if not alike(run, 1)} == {"input left", "gradients shared"}
    assert {name for name, run in found.items() if run[2]} == {"same dice"}
    assert {name for name, run in found.items() if not torch.equal(*run[3])} == {"mode not asked"}
    assert {name for name, run in found.items() if not alike(run, 3)} == {"mode not asked"}, "the same weights as eager"
    counts = {name: run[4] for name, run in found.items() if run[4] != 8}
    assert counts == {"mode not asked": 10, "never replayed": 0}


# ---- 17 ----


def graphed() -> tuple[int, dict[str, Any]]:
    """Replays of this rank in the third step, and the line of metrics about the graphs."""
    result = pretrain(SMALL.override({"model.layers": 4, **GRAPHS, **PIPELINE}))
    replays = sum(event.kind == "graph_replay" for event in result.events)
    return replays, next(line["graphs"] for line in result.metrics if "graphs" in line)


def test_17_each_silent_fault_shows_in_the_pool_or_in_the_replays(ranks) -> None:
    found = with_each_fault(ranks, "17", graphed)
    replays = {name: [count for count, _ in runs] for name, runs in found.items()}
    whole = [2 * 2 * 4] * 2  # 2 L m on each rank
    assert {name: counts for name, counts in replays.items() if counts != whole} == {"layer left eager": [16, 8]}
    pools = {name: runs[0][1]["pool_peak_bytes"][1] for name, runs in found.items()}
    assert {name for name, peak in pools.items() if peak > pools[CLEAN]} == {"nothing given back"}
    static = {name: runs[0][1]["static_input_bytes"][1] for name, runs in found.items()}
    assert {name for name, size in static.items() if size < static[CLEAN]} == {"input given away"}


# ---- 14 ----


def three_moves() -> tuple[list[float], int]:
    """This rank's biases after three steps of a router alone, and the number of messages that moved them."""
    groups = initialize_model_parallel(ROUTED.override(EXPERTS).parallel)
    router, draw = TopKRouter("router", ROUTED.model, ROUTED.moe, groups), torch.Generator().manual_seed(groups.rank)
    with CommLedger() as ledger:
        for _ in range(3):
            router(torch.randn(16, 2, 32, generator=draw))
            stepping.finish_router_step([router], groups)
    assert router.expert_bias is not None
    return router.expert_bias.tolist(), sum(record.phase == "expert bias" for record in ledger.records)


def test_14_biases_that_part_or_remember_show_on_a_router_alone(ranks) -> None:
    found = with_each_fault(ranks, "14", three_moves)
    assert {name for name, (one, two) in found.items() if one[0] != two[0]} == {"own load"}
    assert {name: {count for _, count in runs} for name, runs in found.items() if name != CLEAN} == {
        name: {0 if name == "own load" else 3} for name in found if name != CLEAN
    }
    others = {name for name, runs in found.items() if runs[0][0] != found[CLEAN][0][0]}
    assert others == {"own load", "old counts"}


def routers_learn(coefficient: float) -> list[float]:
    """Lengths of the gradients of both routers in a first step, in one process."""
    moe = replace(ROUTED.moe, aux_loss_coeff=coefficient)
    model = GPTModel(ROUTED.model, single_process_groups(), moe=moe, layers=range(2), seed=0, dtype=torch.float64)
    text = torch.arange(2 * 17).view(2, 17)
    model(text[:, :-1], None, text[:, 1:]).mean().backward()
    gradients = [layer.mlp.router.weight.grad for layer in model.layers.values()]
    return [0.0 if gradient is None else float(gradient.norm()) for gradient in gradients]


def test_14_a_router_without_one_of_its_two_gradients_shows_when_the_coefficient_is_0() -> None:
    found = {
        name: [Planted("14", number, routers_learn)(coefficient) for coefficient in (0.01, 0.0)]
        for number, name in enumerate(names("14")[1:])
    }
    assert {name for name, (_, alone) in found.items() if not any(alone)} == {"router cut off"}
    assert {name for name, (both, alone) in found.items() if both == alone} == {"no pull"}


# ---- 18 ----


def partly_graphed() -> tuple[int, dict[str, Any]]:
    """Replays of this rank in the third step, and the line of metrics about the graphs."""
    result = pretrain(PARTIAL.override(EXPERTS))
    replays = sum(event.kind == "graph_replay" for event in result.events)
    return replays, next(line["graphs"] for line in result.metrics if "graphs" in line)


def test_18_a_graph_that_ends_early_shows_in_the_pool_alone(ranks) -> None:
    found = with_each_fault(ranks, "18", partly_graphed)
    assert {count for runs in found.values() for count, _ in runs} == {2 * 2 * 2}, "2 L m on each rank"
    pools = {name: runs[0][1]["pool_peak_bytes"] for name, runs in found.items()}
    assert {name for name, peak in pools.items() if peak != pools[CLEAN]} == {"ends after the router"}
    assert pools["ends after the router"][1] < pools[CLEAN][0]


# ---- 22 ----

WORDS = [f"word{number}" for number in range(60)]
PAGES = (" ".join(WORDS[:50]), " ".join(WORDS), "read more")
"""A preview, the article that it is from, and a page that is short and like no other."""


def audited(settings: Settings) -> dict[str, Any]:
    """What the rehearsal of the chapter's hunt shows: a value for each part that a verdict can name."""
    cleaner = Cleaner(Rules(min_tokens=len(load_tokenizer().encode(PAGES[1]).ids)), [])
    kept = [number for number, text in enumerate(PAGES) if cleaner(text) is not None]
    prepared = prepare(settings)
    runs = [train_and_predict(prepared, prepared.row, seed) for seed in (1, 2, 3)]
    about = {"task": "race", "checkpoint": "", "batch": 8, "lr": 1.0, "epochs": 1}
    dev = (0.5, 0.7, 0.6)
    results = [about | {"seed": seed, "scores": {"dev_accuracy": score}} for seed, score in enumerate(dev, 1)]
    together = repeated_runs.added([run.logits for run in runs])["dev"]
    return {
        "cleaned": kept,
        "sample": int(prepared.samples("train").make(0)["types_BCS"].sum()) > 0,
        "steps": [len(run.losses) for run in runs],
        "row": repeated_runs.summary("race", results)["median"]["dev_accuracy"],
        "logits": float(abs(together - sum(run.logits["dev"] for run in runs)).max()) < 1e-5,
    }


def test_22_each_fault_shows_in_the_part_that_its_verdict_names(tmp_path, one_thread) -> None:
    bert = {"layers": 1, "hidden": 32, "heads": 2, "seq_length": 80, "global_batch_size": 1, "steps": 1}
    pretrain(presets.bert_tiny().override(bert | {"checkpoint.dir": str(tmp_path / "bert")}))
    race = str(write_task("race", tmp_path / "race", train=16, dev=8))
    settings = Settings(
        task="race", path=race, checkpoint=str(tmp_path / "bert"), batch=8, epochs=1, seq_length=40, micro_batch_size=8
    )
    clean = audited(settings)
    assert clean == {"cleaned": [1], "sample": True, "steps": [2, 2, 2], "row": 0.6, "logits": True}
    other = {"cleaned": [], "sample": False, "steps": [3, 3, 3], "row": 0.7, "logits": False}
    for number, fault in enumerate(hunt_of("22").faults):
        found = Planted("22", number, audited)(settings)
        shown = fault.answers["shown_by"]
        assert found == clean | {shown: other[shown]}, fault.name
    assert {fault.answers["shown_by"] for fault in hunt_of("22").faults} == set(other)
    assert audited(settings) == clean


# ---- 20 ----


def rehearsed(folder: str) -> dict[str, Any]:
    """What the rehearsal of the chapter's hunt shows: a value for each part that a verdict can name."""
    new = lambda: CheckpointModel(folder)  # noqa: E731
    short, long = [5, 17, 300], [8, 2, 9, 40, 5, 77]
    # below 1 it attracts: then an untrained model repeats its prompt, if it knows that it has one
    penalty, sampler, one = Sampling(repetition_penalty=0.1), Sampler(Sampling(temperature=1.0)), new()
    return {
        "perplexity": sum(count for _, count in score_windows(new(), list(range(3, 43)), stride=4)),
        "batch": generate(new(), [short, long], max_new_tokens=6),
        "penalised": generate(new(), [short], max_new_tokens=6, sampling=penalty)[0],
        "draws": len({int(sampler(torch.zeros(1, 4))) for _ in range(40)}),
        "twice": [generate(one, [short], max_new_tokens=6)[0] for _ in range(2)],
    }


def test_20_each_fault_shows_in_the_part_that_its_verdict_names(tmp_path, one_thread) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 2, "seq_length": 16, "steps": 2, "global_batch_size": 2}
    pretrain(presets.tiny().override(model | {"init_std": 0.5, "checkpoint.dir": str(tmp_path)}))
    clean = rehearsed(str(tmp_path))
    assert clean["perplexity"] == 39 and clean["draws"] == 4 and clean["twice"][0] == clean["twice"][1]
    for number, fault in enumerate(hunt_of("20").faults):
        found = Planted("20", number, rehearsed)(str(tmp_path))
        assert {name for name in clean if found[name] != clean[name]} == {fault.answers["shown_by"]}, fault.name
        if fault.name == "not emptied":
            assert found["twice"][0] == clean["twice"][0], "the first text is right"
        if fault.name == "padding seen":
            assert found["batch"][1] == clean["batch"][1], "the longer prompt has no padding"
    assert {fault.answers["shown_by"] for fault in hunt_of("20").faults} == set(clean)
    assert rehearsed(str(tmp_path)) == clean


# ---- 19 ----


def check_up() -> tuple[list[float], list[float], float, torch.Tensor]:
    """Size of the stream after each layer, rates of six steps, the weight of a wrong label, and who sees whom."""
    config = presets.bert_tiny().override({"model.hidden": 32, "model.seq_length": 8, "model.layers": 3, **BERT})
    (bert,) = build_model_chunks(config, single_process_groups())
    stream: list[float] = []
    for layer in bert.layers.values():
        layer.register_forward_hook(lambda layer, given, made: stream.append(float(made.detach().std())))
    tokens, chosen = torch.arange(5, 13)[None].repeat(9, 1), torch.zeros(9, 8)
    padding = torch.ones(9, 8, dtype=torch.long)
    padding[:, 6:], chosen[:, 2] = 0, 1
    losses = []
    for labels in (tokens, torch.where(chosen == 1, tokens, 7)):
        output = bert(tokens, None, padding, labels)
        loss, _ = bert_step.bert_loss(chosen, torch.zeros(9, dtype=torch.long), output)
        losses.append(float(loss.detach()))
    for place in range(8):
        tokens[place + 1, place] = 40
    logits = bert(tokens, None, padding)[0].detach()
    seen = (logits - logits[:, :1]).abs().amax(-1)[:, 1:] > 1e-12
    schedule = build_lr_schedule(config.optim, 20)
    return stream[:3], [schedule(step) for step in range(6)], losses[1] - losses[0], seen


def test_19_each_fault_has_its_own_line_of_the_check_up() -> None:
    found = {name: Planted("19", i, check_up)() for i, name in enumerate(names("19")[1:])} | {CLEAN: check_up()}
    stream, rates, moved, seen = found[CLEAN]
    assert stream == sorted(stream) and stream[-1] < 0.5 and rates == [0, 0.25, 0.5, 0.75, 1, 1] and moved == 0
    assert seen[:6, :6].all() and not seen[:6, 6:].any()
    flat = {name for name, each in found.items() if min(each[0]) > 0.9}
    early = {name for name, each in found.items() if each[1][0] > 0}
    labels = {name for name, each in found.items() if each[2]}
    assert (flat, early, labels) == ({"residual of the norm"}, {"no warm-up"}, {"labels everywhere"})
    assert found["no warm-up"][1] == [1] * 6
    sights = {name for name, each in found.items() if not torch.equal(each[3], seen)}
    assert sights == {"padding seen", "looks back only"}
    assert found["padding seen"][3][:6].all() and found["looks back only"][3].triu(1).sum() == 0


# ---- 23 ----


@dataclass(eq=False)
class Recorded(GPTDataset):
    """Notes which samples were read."""

    read: list[int] = field(default_factory=list)

    def ordered(self, position: int) -> np.ndarray:
        self.read.append(position)
        return super().ordered(position)


def resumed_again(config: RunConfig) -> dict[str, tuple[float, float]]:
    """Three steps, a save and a fourth step; then a resume and the fourth step again: (went on, resumed) by line."""
    run = initialize(config)
    tokens = np.frombuffer(bundled_text().encode()[:50_000], np.uint8)

    def start() -> Any:
        chunks, optimizer, rate_of = setup_model_and_optimizer(run)
        assert isinstance(optimizer, Optimizer)
        pipeline = Pipeline(config, run.groups, chunks, gpt_forward_step, run.schedule)
        kept = Checkpoints(config, run.groups, chunks, optimizer, say=lambda text: None)

        def step(number: int, batches: Any) -> float:
            where: dict[str, Any] = {"step": number, "lr": rate_of(number), "clip_grad": 1.0}
            return train_step(pipeline, optimizer, run.timers, batches, **where).loss

        return pipeline.loss_scaler, kept, [main for group in optimizer.masters for main in group], step

    def fourth(samples: int, mains: list[torch.Tensor], step: Any) -> dict[str, float]:
        data = Recorded(tokens, config.model.seq_length)
        before = [main.detach().clone() for main in mains]
        loss = step(3, data_iterator(data, config, run.groups, consumed_samples=samples))
        squares = [float((a - b.detach()).square().sum()) for a, b in zip(before, mains)]
        return {"next sample": data.read[0], "first loss": loss, "first update": sum(squares) ** 0.5}

    scaler, kept, mains, step = start()
    batches = data_iterator(Recorded(tokens, config.model.seq_length), config, run.groups)
    for number in range(3):
        step(number, batches)
    saved = [main.detach().clone() for main in mains]
    kept.save(Progress(3, 3 * config.train.global_batch_size, 0), scaler)
    went_on = fourth(3 * config.train.global_batch_size, mains, step)
    scaler, kept, mains, step = start()
    progress = kept.load(scaler)
    far = max(float((a - b.detach()).abs().max()) for a, b in zip(saved, mains))
    again = fourth(progress.consumed_samples, mains, step)
    run.groups.close()
    return {"weights": (0.0, far)} | {name: (went_on[name], again[name]) for name in went_on}


def test_23_each_fault_shows_first_in_the_line_that_its_verdict_names(ranks, tmp_path) -> None:
    config = SMALL.override(
        {
            "parallel.tp": 2, "parallel.pp": 1, "model.layers": 2, "model.vocab_size": 256, "train.steps": 8,
            "model.hidden_dropout": 0.1, "optim.warmup_steps": 2, "checkpoint.dir": str(tmp_path),
            "micro_batch_size": 2,
        }
    )  # fmt: skip
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "23", partial(resumed_again, config)).items()}
    order = ("next sample", "weights", "first loss", "first update")
    first = {name: next((line for line in order if len(set(rows[line])) > 1), "none") for name, rows in found.items()}
    assert first == {CLEAN: "none"} | {fault.name: fault.answers["first"] for fault in hunt_of("23").faults}
    assert found["samples anew"]["next sample"] == (12, 0)
    updates = {name: again / went_on for name, rows in found.items() for went_on, again in [rows["first update"]]}
    assert updates["moments anew"] < 0.9 and updates["updates anew"] > 1.5


# ---- 25 ----

SLEEP = 0.02
"""Seconds of a sleeping part's forward and of an all-to-all."""


def pairs_asleep() -> dict[str, float]:
    """Seconds that each kind of part waits for an all-to-all, in pairs of sleeping layers: the median."""
    config = PAIRED.override(EXPERTS | MERGES | {"train.steps": 2, "train.keep_event_steps": 2})
    with delayed(SLEEP, operation="all_to_all", group="ep"):
        events = [e for e in pretrain(config, observer=SleepingParts(SLEEP)).events if e.step == 2]
    waits = [event for event in events if event.name.startswith("wait all_to_all")]
    found: dict[str, list[float]] = {}
    for event in events:
        action, _, part = event.name.rpartition(" ")
        side = "B" if "B" in action else "F"
        if part in MOE_PARTS and event.microbatch != (0 if side == "F" else 7):
            inside = [wait.duration for wait in waits if event.start <= wait.start and wait.end <= event.end]
            found.setdefault(f"{side} {part}", []).append(sum(inside))
    return {part: median(each) for part, each in found.items()}


def test_25_each_silent_fault_shows_in_what_waits(ranks) -> None:
    found = {name: runs[0] for name, runs in with_each_fault(ranks, "25", pairs_asleep).items()}
    long = {name: {part for part, wait in waits.items() if wait > 0.7 * SLEEP} for name, waits in found.items()}
    assert long.pop("at once") == {"F attention", "F experts", "B combine", "B experts"}
    assert long.pop("other turns") == {"F experts", "B attention"}
    assert not any(long.values()), long


# ---- 26 ----


class EightBits:
    """An onlooker of `pretrain`: scales, peaks of fc2's operands, and errors of three products, by step."""

    def on_model(self, groups: Any, chunks: Any, schedule: Any) -> None:
        self.scaling, self.rows, self.row = chunks[0].precision, [], {}
        self.at = self.scaling.names.index("layers.1.mlp.fc2")
        mlp = chunks[0].layers["1"].mlp
        self.fc2 = mlp.fc2
        mlp.fc1.register_forward_hook(self.error_of_y)
        mlp.fc2.register_forward_pre_hook(self.before)
        mlp.fc2.register_full_backward_hook(self.after)

    def note(self, name: str, found: torch.Tensor, right: torch.Tensor) -> None:
        self.row[name] = float((found.detach().double() - right).norm() / right.norm())

    def peak(self, column: int, x: torch.Tensor) -> None:
        kind = ("input", "weight", "grad")[column]
        largest = torch.finfo(self.scaling.recipe.dtype(kind)).max
        self.row[kind] = float(x.detach().abs().max() * self.scaling.scales[self.at, column]) / largest

    def error_of_y(self, layer: Any, given: Any, made: Any) -> None:
        x, w, b = (t.detach().double() for t in (given[0], layer.weight, layer.bias))
        self.note("y", made[0], x @ w.T + b)

    def before(self, layer: Any, given: Any) -> None:
        self.x = given[0].detach().flatten(0, 1).double()
        self.peak(0, self.x)
        self.peak(1, layer.weight)

    def after(self, layer: Any, made: Any, given: Any) -> None:
        g = given[0].flatten(0, 1).double()
        self.peak(2, g)
        self.note("dx", made[0].flatten(0, 1), g @ layer.weight.detach().double())
        self.right = g.T @ self.x

    def on_gradients(self, step: int, chunks: Any) -> None:
        self.note("dw", self.fc2.weight.main_grad, self.right)
        self.row["scales"] = self.scaling.scales.log2()
        self.rows, self.row = [*self.rows, self.row], {}

    def on_update(self, step: int, chunks: Any) -> None: ...


def in_eight_bits() -> list[dict[str, Any]]:
    """What the chapter's instrument shows of each step, on this rank."""
    observer = EightBits()
    train = {"optim.lr": 1e-2, "lr_schedule": "constant", "train.steps": 8, "train.micro_batch_size": 4}
    model = {"model.layers": 2, "model.init_std": 0.1, "optim.precision": "fp32"}
    fp8 = {"optim.fp8": "hybrid", "optim.fp8_amax_history_len": 1, "parallel.tp": 2, "parallel.pp": 1}
    pretrain(SMALL.override(train | model | fp8), observer=observer)
    return observer.rows


def test_26_each_fault_shows_in_the_columns_that_its_verdict_names(ranks) -> None:
    found = with_each_fault(ranks, "26", in_eight_bits)
    clean = found[CLEAN][0]
    apart = {n: max(float((a["scales"] - b["scales"]).abs().max()) for a, b in zip(*runs)) for n, runs in found.items()}
    assert {name for name, most in apart.items() if most} == {"own history"}
    first = {name: runs[0][0] for name, runs in found.items()}
    coarse = {name for name, row in first.items() if row["y"] > 1.5 * clean[0]["y"]}
    again = {name for name, row in first.items() if row["dw"] > 1.2 * clean[0]["dw"]}
    assert coarse == {"three bits forward"} and again - coarse == {"cast again"}
    late = {name: runs[0][-1] for name, runs in found.items()}
    grown = {name for name, row in late.items() if min(row["y"], row["dx"]) > 0.2}
    assert grown == {"first weights"} and late["first weights"]["dw"] < 2 * clean[-1]["dw"]
    off = {
        name
        for name, runs in found.items()
        if max(abs(np.log2(row[kind])) for row in runs[0][3:] for kind in ("input", "weight", "grad"))
        > 1.2 + max(abs(np.log2(row[kind])) for row in clean[3:] for kind in ("input", "weight", "grad"))
    }
    assert off - {"first weights"} == {"first scales"}
