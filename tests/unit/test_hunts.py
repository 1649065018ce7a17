"""Hunts: sealed, undone after an error, scored question by question, and never the same fault twice for one reader."""

from __future__ import annotations

import json
import types
from fractions import Fraction
from functools import cache
from importlib.resources import files

import pytest

from labkit.check import hunt
from labkit.check.chapter_copies import CHAPTERS as CHAPTERS_FOLDER
from labkit.check.chapter_copies import chapters_in
from labkit.check.hunts.hunting import FAMILIES, hunt_of
from labkit.comm import collectives, groups
from labkit.comm.fault_injection import Dropped
from labkit.data import batches
from labkit.data.cleaning import Cleaner
from labkit.evaluate import generation, wikitext
from labkit.evaluate.kv_cache import CachedAttention
from labkit.evaluate.sampling import Sampler
from labkit.events import watchers_of
from labkit.finetune import finetuning, repeated_runs
from labkit.finetune.task_samples import Packer
from labkit.fp8.gemms import CastOperands, Float8Gemms
from labkit.fp8.recipe import Float8Recipe
from labkit.fp8.scaling import Float8Scaling
from labkit.graphs import cuda_graph_helper, partial_moe
from labkit.graphs.graphable_module import GraphableMegatronModule
from labkit.graphs.graphed_callable import GraphedCallable
from labkit.models import chunk_parts, chunks
from labkit.models.bert import bert_model
from labkit.models.blocks import TransformerLayer
from labkit.models.core_attention import CoreAttention
from labkit.models.embedding import OutputLayer, PositionEmbedding
from labkit.models.recomputation import Recomputation
from labkit.models.t5.t5_layers import CrossAttention
from labkit.models.t5.t5_model import T5Model
from labkit.moe import router
from labkit.moe.balance import AuxLossAutoScaler
from labkit.parallel import layers, random, recompute
from labkit.parallel.context import ring_attention
from labkit.parallel.data_parallel import distributed_data_parallel, distributed_optimizer, grad_buffers, gradients
from labkit.parallel.data_parallel.grad_buffers import Reduction
from labkit.parallel.data_parallel.optimizer import Optimizer
from labkit.parallel.data_parallel.param_gather import ParamGather
from labkit.parallel.parameters import parameter_record
from labkit.parallel.vocab import cross_entropy
from labkit.plan import step_time
from labkit.plan.machine import Machine, load_machine
from labkit.plan.published_rows import read_published
from labkit.plan.what_if import CONSTANTS, scaled
from labkit.plan.workload import Workload
from labkit.schedules import execution, merging
from labkit.schedules.execution import RankStep
from labkit.schedules.merged_execution import MergedStep
from labkit.schedules.runtime import PipelineRuntime
from labkit.train import bert_step, stepping
from labkit.train.checkpoint import checkpoints
from labkit.train.checkpoint.checkpoints import Checkpoints
from labkit.train.checkpoint.rank_state import RankState
from labkit.train.loss_scaler import LossScaler
from labkit.train.lr_schedule import LearningRate

CHAPTERS = tuple(path.name[:2] for path in chapters_in(CHAPTERS_FOLDER))
CHANGED = (
    collectives, groups, gradients, cross_entropy, cuda_graph_helper, OutputLayer, PositionEmbedding, random.RngTracker,
    layers._ColumnLinear, layers._RowLinear, RankStep, PipelineRuntime, cuda_graph_helper.CudaGraphHelper, step_time,
    recompute.RandomStates, recompute._Again, Recomputation, ring_attention, ring_attention._Ring, batches,
    distributed_data_parallel, distributed_data_parallel.DistributedDataParallel, Reduction, ParamGather,
    distributed_optimizer._Shard, Cleaner, finetuning, repeated_runs, Packer, GraphedCallable, partial_moe,
    GraphableMegatronModule, AuxLossAutoScaler, TransformerLayer, LearningRate, bert_model, CoreAttention, bert_step,
    CrossAttention, T5Model, chunks, execution, grad_buffers, router, stepping, wikitext, generation,
    generation._Occurred, CachedAttention, Sampler, LossScaler, Optimizer, parameter_record, checkpoints,
    Checkpoints, RankState, merging, MergedStep, chunk_parts._LayerRun, CastOperands, Float8Gemms, Float8Recipe,
    Float8Scaling,
)  # fmt: skip
"""Everything that a fault may change."""


def functions() -> dict[tuple[str, str], object]:
    kinds = (types.FunctionType, staticmethod)
    return {(o.__name__, k): v for o in CHANGED for k, v in vars(o).items() if isinstance(v, kinds)}


@pytest.mark.parametrize(("chapter", "number"), [(c, i + 1) for c in CHAPTERS for i in range(len(hunt_of(c).faults))])
def test_a_fault_changes_one_thing_and_is_undone_after_an_error(chapter: str, number: int) -> None:
    honest = functions()

    def fails() -> None:
        changed = [key for key, value in functions().items() if honest[key] is not value]
        raise ArithmeticError(len(changed) + len(watchers_of(Dropped)))

    with pytest.raises(ArithmeticError, match=r"^1$"):
        hunt(chapter, number).around(fails)()
    assert functions() == honest and not watchers_of(Dropped)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_hunt_says_what_it_asks_and_nothing_about_its_faults(chapter: str) -> None:
    found = hunt_of(chapter)
    told = {repr(hunt(chapter, number + 1)) for number in range(len(found.faults))}
    assert len(told) == 1, "the same words whatever is planted"
    for fault in found.faults:
        assert set(fault.answers) == set(fault.astray) == set(found.questions)
        offered = found.families or tuple(FAMILIES)
        assert "family" not in found.questions or set(fault.answers["family"].split("|")) <= set(offered)
    assert len({fault.name for fault in found.faults}) == len(found.faults) >= 3


def test_a_hunt_that_offers_some_families_explains_them_and_takes_no_other() -> None:
    told = " ".join(repr(hunt("08")).split())
    assert "extra communication (a message or a sum too many); wrong data (" in told and "not captured" not in told
    with pytest.raises(ValueError, match="family = 'not captured': choose one of missing communication, "):
        hunt("08").verdict(family="not captured", place="", first="")


def test_a_verdict_is_scored_question_by_question_with_reasons() -> None:
    suspect = hunt("06", 2)
    part = suspect.verdict(family="missing communication", place="the norms", first="final_norm.bias gradient")
    assert (part.right, part.asked, part.ok) == (1, 3, False)
    told = " ".join(repr(part).split())
    assert told.startswith("1 of 3 right.") and "family: right." in told
    assert "'the norms' is not it. The norms' gradients are right." in told
    assert "The final norm's gradient agrees: it was added up." in told
    assert "all-reduce at the end" not in told, "the story is told once all is right"
    assert max(map(len, repr(part).splitlines())) <= 90
    whole = suspect.verdict(
        family="missing communication", place="biases of proj and fc2", first="layers.1.mlp.fc2.bias gradient"
    )
    assert whole.ok and "left out of the all-reduce at the end" in " ".join(repr(whole).split())


def test_no_fault_comes_twice_before_all_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))
    faults = hunt_of("06").faults
    seen = []
    for turn in range(len(faults)):
        suspect = hunt("06")
        assert hunt("06")._number == suspect._number, "the same until it is found"
        fault = faults[suspect._number]
        seen.append(fault.name)
        if turn == 1:
            suspect.give_up()
            continue
        right = {name: pattern.split("|")[0].replace("\\", "") for name, pattern in fault.answers.items()}
        assert suspect.verdict(**right).ok, right
    assert sorted(seen) == sorted(fault.name for fault in faults)
    kept = json.loads((tmp_path / "progress.json").read_text())["hunt"]["06"]
    assert kept == [f"{name} (shown)" if turn == 1 else name for turn, name in enumerate(seen)]


def test_readers_begin_with_different_faults(tmp_path, monkeypatch) -> None:
    first = set()
    for reader in range(12):
        monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / f"{reader}.json"))
        first.add(hunt("12")._number)
    assert len(first) > 2


def test_a_number_chooses_and_without_a_reader_it_is_the_first(monkeypatch) -> None:
    monkeypatch.delenv("LABKIT_PROGRESS", raising=False)
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    count = len(hunt_of("17").faults)
    assert [hunt("17", number)._number for number in (0, 1, count, count + 1)] == [0, 0, count - 1, 0]


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match=f"chapter '99' has no hunt; there are hunts in {', '.join(CHAPTERS)}"):
        hunt("99")
    with pytest.raises(ValueError, match="number = -1: give 0 for a fault that you have not found"):
        hunt("06", -1)
    with pytest.raises(ValueError, match=r"this hunt asks for family=\.\.\., place=\.\.\., first=\.\.\.; got family"):
        hunt("06").verdict(family="slow work")
    with pytest.raises(ValueError, match="family = 'a bug': choose one of missing communication, "):
        hunt("06").verdict(family="a bug", place="", first="")


@cache
def figure_5() -> list[Workload]:
    """What the rows of the paper's figure trained."""
    table = read_published(files("labkit.plan") / "tables" / "published.csv")
    return [row.workload for row in table if row.workload and row.id.startswith("1909_fig5")]


def step_seconds(machine: Machine) -> list[float]:
    """The predicted step of each row of the figure."""
    return [step_time.predict_step(workload, machine).seconds for workload in figure_5()]


FACTORS = [Fraction(factor) for factor in ("1/8", "1/4", "1/3", "1/2", "2", "3", "4", "8")]


@pytest.mark.parametrize("number", range(len(hunt_of("21").faults)))
def test_21_only_the_inverse_of_the_fault_brings_every_row_back(number: int) -> None:
    v100, suspect = load_machine("v100"), hunt("21", number + 1)
    honest, repairs = step_seconds(v100), suspect.around(step_seconds)
    back = [
        (constant, factor) for constant in CONSTANTS for factor in FACTORS
        if repairs(scaled(v100, constant, float(factor))) == pytest.approx(honest, rel=0.01)
    ]  # fmt: skip
    assert len(back) == 1, "one repair, and no other"
    ((constant, factor),) = back
    assert suspect.verdict(constant=constant, factor=str(1 / factor)).ok


def test_a_what_if_changes_one_constant_and_names_what_it_knows() -> None:
    v100 = load_machine("v100")
    network = scaled(v100, "network", 2).levels
    assert network[0] == v100.levels[0] and network[1].bandwidth == 2 * v100.levels[1].bandwidth
    with pytest.raises(ValueError, match="constant = 'disk': choose one of peak, memory, node, network, host"):
        scaled(v100, "disk", 2)
    with pytest.raises(ValueError, match="factor = 0: give a number above 0"):
        scaled(v100, "peak", 0)
