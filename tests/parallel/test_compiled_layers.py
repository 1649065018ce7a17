"""`model.compile: layers`: one compilation for all layers, the same messages, and the numbers of one process.

Rows of docs/parity.md have more layouts, and are a sweep.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from labkit.comm.ledger import CommLedger
from labkit.config import ConfigError
from labkit.launch import run
from labkit.models import build_model_chunks, compilation
from labkit.models.compilation import compile_layers
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.schedules.zero_bubble import zero_bubble_h1
from labkit.train import compare
from labkit.train.device_rules import compile_problem
from labkit.train.pretraining import pretrain
from labkit.train.run_schedule import check_schedule

BARE = {"precision": "fp64", "gradient_accumulation_fusion": False}
"""What a chunk needs that no data-parallel wrapper gives a `main_grad`."""
MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
SP, COMPILED = (MATRIX[name] for name in ("SEQUENCE_PARALLEL", "COMPILED"))


def compile_without_a_compiler() -> tuple[Any, list[Any]]:
    """A `torch.compile` whose graphs run operation by operation, and the graphs of its forwards."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    graphs: list[Any] = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    compile_by = torch.compile
    return lambda function, **_: compile_by(function, fullgraph=True, backend=backend), graphs


@pytest.fixture
def traced(monkeypatch):
    """Compile without a compiler; gives the graphs."""
    replaced, graphs = compile_without_a_compiler()
    monkeypatch.setattr(torch, "compile", replaced)
    torch._dynamo.reset()
    compilation._compiled.cache_clear()
    yield graphs
    compilation._compiled.cache_clear()
    torch._dynamo.reset()


def chunk_of(config, groups, *, compiled):
    [chunk] = build_model_chunks(config, groups)
    if compiled:
        compile_layers([chunk])
    return chunk


def batch_of(config, seed=0):
    shape = (2, config.model.seq_length + 1)
    ids = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step(chunk: nn.Module, config) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    tokens, labels = batch_of(config)
    chunk.zero_grad(set_to_none=True)
    loss = chunk(tokens, labels_BS=labels).mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in chunk.named_parameters()}


def assert_alike(compiled, plain):
    torch.testing.assert_close(compiled[0], plain[0], rtol=1e-12, atol=0)
    assert compiled[1].keys() == plain[1].keys()
    for name, grad in plain[1].items():
        torch.testing.assert_close(compiled[1][name], grad, rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("preset", ["tiny", "llama_tiny"])
def test_all_layers_share_one_graph_in_which_linear_layers_are_single_nodes(preset, traced):
    config, groups = MATRIX["small"](preset).override(BARE), single_process_groups()
    plain, compiled = (chunk_of(config, groups, compiled=on) for on in (False, True))
    assert_alike(step(compiled, config), step(plain, config))
    assert len(traced) == 1, "four layers"
    called = [str(node.target) for node in traced[0].graph.nodes if node.op == "call_function"]
    assert sum(name.startswith("aten.mm") for name in called) == 4, "the products of a rank alone are in the graph"
    with torch.no_grad():
        compiled(batch_of(config)[0])
    assert len(traced) == 2, "a forward without gradients is another"
    step(chunk_of(config, groups, compiled=True), config)
    assert len(traced) == 2, "a second model of the same shape compiles nothing"


def test_experts_share_one_graph_whatever_their_rows(traced):
    config, groups = MATRIX["sparse"]("tiny_moe").override(BARE), single_process_groups()
    plain, compiled = (chunk_of(config, groups, compiled=on) for on in (False, True))
    assert_alike(step(compiled, config), step(plain, config))
    assert len(traced) == 3, "dense layers; attention beside experts; the activation between the experts' products"
    for count in (3, 8):
        experts = compiled.layers["0"].mlp.experts
        x, probs = torch.randn(count, experts.fc1.weight.shape[1], dtype=torch.float64), torch.ones(count)
        experts.weighted_activation(x.requires_grad_(), probs.double().requires_grad_())
    assert len(traced) == 3, "other numbers of rows compile nothing"


def test_a_layer_with_a_hook_inside_computes_uncompiled(traced):
    config, groups = MATRIX["small"]("tiny").override({**BARE, "layers": 2}), single_process_groups()
    compiled, seen = chunk_of(config, groups, compiled=True), []
    handle = compiled.layers["0"].mlp.fc1.register_forward_hook(lambda *_: seen.append(len(traced)))
    step(compiled, config)
    assert seen == [0] and len(traced) == 1
    handle.remove()
    step(compiled, config)
    assert seen == [0] and len(traced) == 1


def test_only_labkit_s_own_layers_compile():
    with pytest.raises(ValueError, match=r"model\.compile = layers .* and Linear is none; set it to none"):
        compile_layers([nn.Linear(2, 2)])


def test_a_machine_without_a_compiler_refuses_before_the_start(monkeypatch):
    config = MATRIX["small"]("tiny").override(COMPILED)
    monkeypatch.setenv("CXX", sys.executable)  # something that is there
    assert compile_problem(config, "cpu") == ""
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = "needs a C\\+\\+ compiler, and there is no no-such-compiler; install it .*, or set it to none"
    with pytest.raises(ConfigError, match=f"model.compile = layers: it {said}"):
        run(pretrain, 2, config)


def test_a_schedule_of_one_s_own_that_splits_backwards_is_refused():
    config = MATRIX["small"]("tiny").override({**COMPILED, "pp": 2})
    with pytest.raises(ValueError, match=r"weight gradients into actions .* or set model.compile to none"):
        check_schedule(zero_bubble_h1(2, config.num_microbatches(2)), config, 2)


def messages(config) -> tuple[Any, ...]:
    """In a rank: losses, gradients and messages without and with compilation."""
    torch.compile, _ = compile_without_a_compiler()
    groups, found = initialize_model_parallel(config.parallel), []
    for on in (False, True):
        chunk = chunk_of(config, groups, compiled=on)
        with CommLedger() as ledger:
            made = step(chunk, config)
        counted = [(r.operation, r.group, r.layer, r.phase, r.bytes) for r in ledger.records]
        found.append((*made, sorted(counted, key=str)))
    return tuple(found)


def test_a_compiled_layer_sends_the_same_messages_under_the_same_names():
    config = MATRIX["small"]("tiny").override({**BARE, "layers": 2, "tp": 2, **SP})
    for plain, compiled in run(messages, 2, config):
        assert compiled[2] == plain[2]
        assert {"layers.1.mlp.fc1", "layers.1.attention.proj"} <= {name for _, _, name, _, _ in compiled[2]}
        assert_alike(compiled[:2], plain[:2])


missing = compile_problem(MATRIX["small"]("tiny").override(COMPILED), "cpu")
needs_compiler = pytest.mark.skipif(bool(missing), reason=missing)


@needs_compiler
def test_compiled_layers_agree_with_one_process():
    """Layers with experts and dense ones, on ranks that split both."""
    layout = {"tp": 2, "etp": 1, "ep": 2, **SP, **COMPILED}
    report = compare(MATRIX["sparse"]("tiny_moe").override({"layers": 2}), [layout], steps=2)
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@needs_compiler
@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("title", MATRIX["COMPILED_SWEEPS"])
def test_every_row(title):
    config, layouts, dtype = MATRIX["COMPILED_SWEEPS"][title]
    report = compare(config, layouts, steps=MATRIX["COMPILED_STEPS"], dtype=dtype)
    assert report.ok, f"\n{report}"
    assert len(report.rows) == len(layouts)
