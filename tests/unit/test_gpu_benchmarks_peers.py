"""The peers of the GPU benchmark, tiny on the host: who is compared with whom, what is counted, what is reported of a
peer that drops out. Times and memory of a GPU are planted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu_attention
import gpu_graph_memory
import gpu_graphs
import gpu_loss
import gpu_moe_layers
import gpu_peers
import gpu_plain
import gpu_precision
import gpu_profile
import gpu_replays
import pytest
import torch
from gpu_peers import Side, beside
from gpu_profile import REST
from harness import Comparison
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.config import GraphConfig, ModelConfig, MoEConfig
from labkit.graphs import LAYER_ORDER, layer_memory, play_back
from labkit.graphs.backend import get_backend
from labkit.moe.dispatch import permutation
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.grouped_gemm import Segments
from labkit.parallel.vocab import token_ids

HOST = torch.device("cpu")
TINY = ModelConfig(layers=2, hidden=32, heads=2, vocab_size=128, seq_length=16)
EXPERTS = {
    "tiny": (
        ModelConfig(hidden=32, heads=2, seq_length=16, **gpu_moe_layers.SWIGLU),
        MoEConfig(num_experts=4, top_k=2, ffn_hidden=48, dispatcher="local"),
    )
}
FEW: dict[str, Any] = {"device": HOST, "repetitions": 2}


def sorted_out(part: Iterator[Any]) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """Comparisons and rows of a part; every one has a case."""
    found = list(part)
    rows = [one for one in found if isinstance(one, dict)]
    assert all(row["case"] for row in rows)
    return [one for one in found if isinstance(one, Comparison)], rows


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled peers are traced as on a GPU, and run without generated code, which takes a minute to build."""
    original = torch.compile

    def traced(module: nn.Module, *, fullgraph: bool, mode: str | None = None) -> Any:
        return original(module, backend="aot_eager", fullgraph=fullgraph)

    monkeypatch.setattr(torch, "compile", traced)


# ---- how sides are set beside each other ----


def side(*values: float) -> Side:
    return Side(lambda: None, lambda: {"y": torch.tensor(values)})


def broken() -> Side:
    raise RuntimeError


def test_a_peer_that_fails_or_computes_something_else_is_a_row_and_the_others_stay() -> None:
    builds = {
        "ours": lambda: side(1.0, 2.0),
        "same": lambda: side(1.0, 2.001),
        "broken": broken,
        "other": lambda: side(1.0, 3.0),
        "nan": lambda: side(1.0, float("nan")),
    }
    [found], rows = sorted_out(beside("case", builds, device=HOST, tolerance=1e-2, repetitions=2))
    assert list(found.seconds) == ["ours", "same"] and found.ours == "ours"
    assert found.facts["difference_from_ours"] == {"same": {"y": 0.00045}}  # 0.001 / sqrt(5)
    assert rows[0] == {"case": "case: broken", "could_not_run": "RuntimeError"}
    assert rows[1] == {"case": "case: other", "not_the_same": {"y": 0.45}, "tolerance": 1e-2}
    assert [row["case"] for row in rows[1:]] == ["case: other", "case: nan"]


def test_without_ours_there_is_nothing_to_compare() -> None:
    with pytest.raises(RuntimeError):
        list(beside("case", {"ours": broken, "peer": lambda: side(1.0)}, device=HOST))


def test_what_is_told_of_a_side_gets_its_time_unless_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def describe(_: Side, seconds: float | None) -> dict[str, Any]:
        given.append(seconds)
        return {"told": seconds is not None}

    for repetitions in (2, 15):
        seconds = {"ours": [0.5] * repetitions, "peer": [1.0] * repetitions}
        planted = Comparison("case", seconds)
        monkeypatch.setattr(gpu_peers, "timed", lambda *_, planted=planted, **__: planted)
        builds = {"ours": lambda: side(1.0), "peer": lambda: side(1.0)}
        [found], _ = sorted_out(beside("case", builds, device=HOST, describe=describe, flops=2e12))
        assert found.facts["by_name"]["peer"] == {"told": repetitions == 15}
    assert given == [None, None, 0.5, 1.0]
    assert found.facts["tflop_per_s"] == {"ours": 4.0, "peer": 2.0}


def test_a_compilation_during_the_timing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([4, 6])
    monkeypatch.setattr(gpu_peers, "compiled_graphs", lambda: next(counted))
    [found], _ = sorted_out(beside("case", {"ours": lambda: side(1.0)}, device=HOST, repetitions=2))
    assert found.facts["compiled_while_timed"] == 2


def test_what_cannot_be_told_does_not_take_the_times_along() -> None:
    def describe(*_: Any) -> dict[str, Any]:
        raise ZeroDivisionError("no kernel was seen")

    part = beside("case", {"ours": lambda: side(1.0)}, device=HOST, describe=describe, repetitions=2)
    [found], rows = sorted_out(part)
    assert rows == [] and list(found.seconds) == ["ours"]
    assert found.facts["by_name"] == {"ours": {"not_described": "ZeroDivisionError: no kernel was seen"}}


def test_sides_that_share_weights_start_without_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    seen: list[bool] = []

    def build() -> Side:
        seen.append(weight.grad is None)
        passes = (lambda: setattr(weight, "grad", None), lambda: None, lambda: weight.sum().backward())
        return Side(lambda: [one() for one in passes], lambda: {"gradient": weight.grad + 0}, passes)  # type: ignore[operator]

    sorted_out(beside("case", {"ours": build, "peer": build}, device=HOST, repetitions=2))
    assert seen == [True, True]


def test_memory_of_a_side_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    log, gib = [], 2**30
    pools = [{"segment_pool_id": (0, 0), "total_size": 9 * gib}, {"segment_pool_id": (0, 7), "total_size": 3 * gib}]

    def peak(_: torch.device) -> int:
        log.append("peak")
        return 5 * gib

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: log.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: log.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: pools)
    found = gpu_peers.memory(lambda: log.append("step"), (2 * gib, gib), torch.device("cuda"))
    assert found == {"peak_gib": 3.0, "graph_pools_gib": 2.0}
    assert log == ["wait", "reset", "step", "wait", "peak"]


# ---- the layer and the step ----


@pytest.mark.usefixtures("without_inductor")
def test_plain_peers_compute_what_our_layer_and_step_do() -> None:
    parts = [
        gpu_plain.layer(replace(TINY, layers=1), 2, dtype=torch.float32, **FEW),
        gpu_plain.gpt2(TINY, 2, precision="fp32", **FEW),
    ]
    for part in parts:
        [found], rows = sorted_out(part)
        assert list(found.seconds) == ["labkit", "plain, eager", "plain, compiled"] and rows == []
        differences = found.facts["difference_from_ours"]
        assert max(value for by_name in differences.values() for value in by_name.values()) < 1e-5


def test_without_a_compiler_ours_is_still_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nset CXX")

    monkeypatch.setattr(torch, "compile", compile_)
    [found], [row] = sorted_out(gpu_plain.layer(replace(TINY, layers=1), 2, dtype=torch.float32, **FEW))
    assert list(found.seconds) == ["labkit", "plain, eager"]
    assert row["case"].endswith(": plain, compiled") and row["could_not_run"] == "RuntimeError: no C++ compiler set CXX"


# ---- equal work ----


ASKING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}


class Reads(TorchDispatchMode):
    """Counts how often the host asks for numbers of a tensor, for each of which a GPU lets it wait; but for
    `host_numbers`, which a dispatcher's copy has brought to the host before: that copy is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ASKING
        return func(*args, **(kwargs or {}))

    def of(self, step: Any, patch: pytest.MonkeyPatch) -> int:
        """Reads of a step; a list of all numbers is one, which torch dispatches nothing for."""
        to_list, wait, self.count = torch.Tensor.tolist, HostCopy.wait, 0

        def counted(tensor: torch.Tensor) -> Any:
            self.count += sys._getframe(1).f_code.co_name != "host_numbers"
            return to_list(tensor)

        def waited(copy: HostCopy) -> torch.Tensor:
            self.count += 1
            return wait(copy)

        with patch.context() as inner, self:
            inner.setattr(torch.Tensor, "tolist", counted)
            inner.setattr(HostCopy, "wait", waited)
            inner.setattr(permutation, "host_would_wait", lambda _: True)
            step()
        return self.count


def graph_parts(form: str) -> Iterator[Any]:
    emulated = GraphConfig(cuda_graph_impl="emulated", cuda_graph_warmup_steps=1)
    small: dict[str, Any] = {"precision": "fp32", "device": HOST}
    if form == "dense":
        return gpu_graphs.dense({"tiny": (TINY, 1)}, emulated, **small)
    swiglu = replace(TINY, activation="swiglu")
    return gpu_graphs.experts_in_part((swiglu, MoEConfig(num_experts=4, top_k=2)), emulated, **small)


EQUAL_WORK: dict[str, tuple[Any, int]] = {
    "layer": (lambda: gpu_plain.layer(replace(TINY, layers=1), 2, dtype=torch.float32, **FEW), 0),
    "gpt2": (lambda: gpu_plain.gpt2(TINY, 2, precision="fp32", **FEW), 2),
    "step_phases": (lambda: gpu_profile.where(TINY, 2, precision="fp32", **FEW), 2),
    "recomputation": (lambda: gpu_precision.recomputation(TINY, 2, device=HOST), 0),
    "fp8_layer": (lambda: gpu_precision.fp8_layer(((32, 2),), 16, 16, device=HOST), 0),
    "precisions": (lambda: gpu_precision.precisions(TINY, 2, ("labkit, bf16", "labkit, fp32"), device=HOST), 2),
    "loss_chunks": (
        lambda: gpu_loss.loss_chunks(
            tokens=64, vocab=128, hidden_sizes=(8,), exponents=(10,), dtype=torch.float32, **FEW
        ),
        0,
    ),
    "graphs": (lambda: graph_parts("dense"), 0),
    "partial_graphs": (lambda: graph_parts("experts"), 2),
    "graph_peers": (lambda: gpu_replays.replays(TINY, 2, dtype=torch.float32, impl="emulated", **FEW), 0),
}
"""Part -> its rows, and how many numbers each alternative reads in a step: of experts one of each layer. MoE layers
beside plain ones and loops over experts read what their form demands, and are no entry."""


@pytest.mark.parametrize("name", EQUAL_WORK)
def test_all_alternatives_of_a_row_read_as_many_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With token ids checked as on a GPU. A wait that one alternative has and another has not is unequal work."""
    part, expected = EQUAL_WORK[name]
    reads: list[dict[str, int]] = []

    def timed(case: str, steps: Any, **_: Any) -> Comparison:
        for step in steps.values():
            step()
        reads.append({key: Reads().of(step, monkeypatch) for key, step in steps.items()})
        return Comparison(case, {key: [0.5, 0.5] for key in steps})

    monkeypatch.setattr(token_ids, "LATE_DEVICES", {"cpu"})
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    for module in (gpu_peers, gpu_profile, gpu_precision):
        monkeypatch.setattr(module, "timed", timed)
    list(part())
    assert len(reads) == 1 and len(reads[0]) > 1
    assert reads[0] == dict.fromkeys(reads[0], expected)


# ---- attention ----


def test_attention_is_compared_with_float64_and_a_missing_kernel_is_named() -> None:
    sizes = {"a": gpu_attention.Sizes(3, 16, 8), "b": gpu_attention.Sizes(2, 16, 8, causal=False)}
    found, rows = sorted_out(gpu_attention.attention(sizes, dtype=torch.float32, calls=2, **FEW))
    assert [len(one.seconds) for one in found] == [3] * 4, "forward and backward, without cuDNN"
    exact = [row for row in rows if "difference from float64" in row["case"]]
    assert len(exact) == 2
    for row in exact:
        assert all(0 < value < 1e-6 for value in row["labkit, flash as in the ring"].values())
        assert row["labkit, flash as in the ring"].keys() == {"output", "dq", "dk", "dv"}
        assert row["SDPA, cuDNN"].startswith("RuntimeError: No viable backend")
        assert row["torch_chooses"] == "FLASH_ATTENTION"
    dropped = [row["could_not_run"] for row in rows if "could_not_run" in row]
    assert len(dropped) == 4 and all("No viable backend" in why for why in dropped)


def test_operands_lie_as_the_layers_give_them() -> None:
    """As `ParallelAttention.attend` cuts them out of the projection's output."""
    given = gpu_attention.Operands.random(gpu_attention.Sizes(4, 16, 8), HOST, torch.float32)
    mixed = torch.empty(16, 2, 2 * 3 * 8).view(16, 4, 3, 8)
    of_layer = [x.reshape(16, -1, 8).transpose(0, 1)[None] for x in mixed.split((1, 1, 1), dim=2)]
    assert [x.stride() for x in given.qkv] == [x.stride() for x in of_layer]
    assert [x.shape for x in given.qkv] == [x.shape for x in of_layer]


# ---- graphs ----


def test_microseconds_of_python_in_a_replay() -> None:
    assert gpu_replays.host_facts([100.0, 60.0], [40.0, 20.0], 4) == {
        "host_us": [100.0, 60.0],
        "host_us_a_replay": [25.0, 15.0],
        "bare_us_a_replay": [10.0, 5.0],
        "python_us_a_replay": [15.0, 10.0],
    }
    assert gpu_replays.host_facts([100.0, 60.0], None, 0) == {"host_us": [100.0, 60.0]}


@pytest.mark.sweep
@pytest.mark.usefixtures("without_inductor")
def test_graphs_of_all_makers_stand_in_one_run() -> None:
    [found], rows = sorted_out(gpu_replays.replays(TINY, 2, dtype=torch.float32, impl="emulated", **FEW))
    assert len(found.seconds) == 5 and found.ours == "labkit, a graph a layer"
    assert {row["case"].split(": ")[-1].split(",")[0] for row in rows} == {"torch.cuda.make_graphed_callables"}
    assert len(rows) == 2 and all("on a GPU alone" in row["could_not_run"] for row in rows)
    by_name = found.facts["by_name"]
    assert "host_us_a_replay" not in by_name["eager"]
    for name, count in {"labkit, a graph a layer": TINY.layers, "labkit, one graph": 1}.items():
        one = by_name[name]
        assert one["host_us_a_replay"] == pytest.approx([us / count for us in one["host_us"]], abs=0.1)
        assert one.keys() >= {"bare_us_a_replay", "python_us_a_replay"}


def test_prediction_from_one_layer_stands_beside_the_measured_pool() -> None:
    small = replace(TINY, layers=1)
    part = gpu_graph_memory.graph_memory(2, 4, 2, small, device=HOST, dtype=torch.float32, impl="emulated")
    _, rows = sorted_out(part)
    assert [row["case"].split("one layer on the ")[1] for row in rows] == ["host, measured", "device, measured"]
    for row in rows:
        assert row["graphs"] == [16, 16]  # 2 layers, 4 microbatches, forward and backward
        assert row["over_predicted"] == 1.0
        assert row["static inputs mib"][0] == row["static inputs mib"][1] > 0


def test_one_layer_measured_by_the_allocator_is_what_its_history_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counters are played by the emulated pool's, which has a history to compare with."""
    backend = gpu_graph_memory.Watched(get_backend("emulated", []), HOST)
    pool, since = backend.new_pool(), [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: pool.live_bytes)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: since.__setitem__(0, len(pool.history)))

    def peak(_: torch.device) -> int:
        live = play_back(pool.history).live_bytes
        return max(live[max(0, since[0] - 1) :])

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    small = replace(TINY, layers=1)
    gpu_graph_memory.captured(small, 1, LAYER_ORDER, HOST, torch.float32, backend=backend, pool=pool)
    assert len(backend.spans) == len(LAYER_ORDER)
    assert gpu_graph_memory.from_spans(backend.spans) == layer_memory(pool.history)
    with pytest.raises(ValueError, match="5 captures"):
        gpu_graph_memory.from_spans(backend.spans[1:])


# ---- where a step's time goes ----


def test_phases_of_both_steps() -> None:
    [found], rows = sorted_out(gpu_profile.where(TINY, 2, precision="fp32", **FEW))
    assert list(found.seconds) == ["labkit", "plain, eager"]
    both = {"forward", "backward", "gradients: norm, check", "optimizer", REST}
    assert both | {"output layer and loss", "gradients: clip"} <= rows[0]["ms"].keys()
    assert both | {"loss"} <= rows[1]["ms"].keys()
    for row in rows:
        assert sum(row["share"].values()) == pytest.approx(1.0, abs=0.01)
        assert row["host_waits"] == 0


# ---- experts ----


@pytest.mark.usefixtures("without_inductor")
def test_plain_moe_layers_compute_what_ours_does() -> None:
    # bf16, because torch traces its grouped product for no other type.
    [found], [row] = sorted_out(gpu_moe_layers.moe_layers(EXPERTS, 2, dtype=torch.bfloat16, **FEW))
    assert "Transformer Engine is not installed" in row["could_not_run"]
    assert list(found.seconds) == [
        "labkit", "labkit, dispatcher alltoall", "plain, loop over experts", "plain, grouped product",
        "plain, grouped product, compiled", "plain, loop over experts, compiled",
    ]  # fmt: skip
    [found], _ = sorted_out(gpu_moe_layers.moe_layers(EXPERTS, 2, dtype=torch.float32, **FEW))
    for name in ("plain, loop over experts", "plain, grouped product"):
        assert max(found.facts["difference_from_ours"][name].values()) < 1e-5


@pytest.mark.sweep
def test_experts_on_streams_and_in_a_loop_stand_beside_the_grouped_product() -> None:
    found, rows = sorted_out(gpu_moe_layers.grouped_product(EXPERTS, 64, dtype=torch.float32, **FEW))
    assert rows == [] and [len(one.seconds) for one in found] == [3] * 4
    assert [one.case.rsplit(", ", 1)[1] for one in found] == ["forward", "forward and backward"] * 2
    differences = [v for one in found for by_name in one.facts.get("difference_from_ours", {}).values()
                   for v in by_name.values()]  # fmt: skip
    assert len(differences) == 2 * 2 * (1 + 4) and max(differences) < 1e-5


def test_gradients_of_the_loop_on_streams() -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (3, 4, 3)))
    projection = gpu_moe_layers.OnStreams(nn.Parameter(weight.detach().clone()))
    y = projection(x, Segments([2, 0, 3]))
    grad = torch.randn_like(y)
    y.backward(grad)
    got = x.grad
    x.grad = None
    torch.cat([rows @ w.t() for rows, w in zip(x.split([2, 0, 3]), weight, strict=True)]).backward(grad)
    torch.testing.assert_close(got, x.grad)
    torch.testing.assert_close(projection.weight.grad, weight.grad)
    assert not projection.weight.grad[1].any(), "an expert without rows"


def test_streams_wait_for_what_is_under_way_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} after {other.name}")

        def __enter__(self) -> None:
            log.append(f"on {self.name}")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    gpu_moe_layers.spread_over([Stream("a"), Stream("b")], [lambda i=i: log.append(f"job {i}") for i in range(3)])
    assert log == [
        "a after main", "b after main", "on a", "job 0", "on b", "job 1", "on a", "job 2",
        "main after a", "main after b",
    ]  # fmt: skip
