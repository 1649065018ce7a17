"""Our adaptor to Transformer Engine's graphs: what it asks of which version, and what it refuses."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.graphs import GraphCaptureError, capture, make_graphed_callables
from labkit.graphs.cuda import te_adaptor
from labkit.graphs.cuda.te_adaptor import engine_arguments

SIGNATURES = Path(__file__).parents[1] / "te_signatures.json"


def newest() -> Callable[..., Any]:
    """A function with the signature of the engine's own source."""
    read = json.loads(SIGNATURES.read_text())["signatures"]["make_graphed_callables"]["__call__"]
    parameters = [
        inspect.Parameter(
            name,
            inspect._ParameterKind[kind],
            default=inspect.Parameter.empty if default is None else ast.literal_eval(default),
        )
        for name, kind, default in read
    ]

    def function(*args: Any, **kwargs: Any) -> Any:
        """Never called."""

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def version_1_10(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: Any = False,
    fp8_calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool = False,
    _order: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
) -> Any:
    """Parameters of an engine from before shared buffers."""


WANTED = {
    "num_warmup_iters": 2, "allow_unused_input": False, "sample_kwargs": None, "_order": [1, -1],
    "_num_layers_per_chunk": [2], "pool": None, "_reuse_graph_input_output_buffers": False,
    "clone_param_grads_on_return": True,
}  # fmt: skip


def test_the_newest_engine_is_asked_for_everything_by_its_names() -> None:
    options = {"enabled": True, "recipe": "r", "amax_reduction_group": "g", "cache_quantized_params": True}
    given = engine_arguments(newest(), {**WANTED, "_reuse_graph_input_output_buffers": True, **options})
    assert given == {key: value for key, value in WANTED.items() if value is not None} | options | {
        "_reuse_graph_input_output_buffers": True
    }
    inspect.signature(newest()).bind((), (), **given)


def test_an_older_engine_is_asked_by_its_older_names() -> None:
    options = {"enabled": True, "recipe": "r", "amax_reduction_group": "g", "cache_quantized_params": True}
    given = engine_arguments(version_1_10, {**WANTED, **options})
    assert given == {
        "num_warmup_iters": 2, "allow_unused_input": False, "_order": [1, -1],
        "fp8_enabled": True, "fp8_recipe": "r", "fp8_group": "g", "fp8_weight_caching": True,
    }  # fmt: skip
    version_1_10((), (), **given)


def test_what_an_older_engine_cannot_do_is_refused_with_the_version_that_can() -> None:
    with pytest.raises(ValueError, match=r"_reuse_graph_input_output_buffers \(it came with 2\.7\): update the engine"):
        engine_arguments(version_1_10, {**WANTED, "_reuse_graph_input_output_buffers": True})
    with pytest.raises(ValueError, match=r"only chunks of equal length, and these have \[1, 3\]"):
        engine_arguments(version_1_10, {**WANTED, "_num_layers_per_chunk": [1, 3]})


def test_without_an_engine_or_for_functions_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match="captures tensors on cuda, and these are on cpu"):
        make_graphed_callables(layer, (x,), impl="transformer_engine")
    monkeypatch.setattr(capture, "choose_impl", lambda impl, device: impl)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"Transformer Engine is .*or use impl='local'"):
            make_graphed_callables(layer, (x,), impl="transformer_engine")
    with pytest.raises(GraphCaptureError, match="only modules"):
        make_graphed_callables(torch.tanh, (x,), impl="transformer_engine")
    with torch.no_grad(), pytest.raises(GraphCaptureError, match="enable gradients"):
        make_graphed_callables(layer, (x,), impl="transformer_engine")
    with pytest.raises(GraphCaptureError, match="order only in training"):
        make_graphed_callables((layer.eval(),), ((x,),), impl="transformer_engine", order=[1, -1])


class OldEngine:
    """Replays by running the module; hands parameters' gradients out of one buffer, as engines did before 2.20."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def __call__(self, modules: Any, sample_args: Any, num_warmup_iters: int = 3, allow_unused_input: bool = False,
                 _order: Any = None, pool: Any = None) -> Any:  # fmt: skip
        self.asked = {"_order": _order, "samples": len(sample_args)}
        buffer = torch.zeros_like(modules[0].weight)

        class Run(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                return x @ weight.T

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                x, weight = ctx.saved_tensors
                buffer.copy_(grads[0].T @ x)
                return grads[0] @ weight, buffer.detach()

        return (lambda x: Run.apply(x, modules[0].weight),)


def test_gradients_of_an_older_engine_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OldEngine()
    monkeypatch.setattr(capture, "choose_impl", lambda impl, device: impl)
    monkeypatch.setattr(te_adaptor, "engine_function", lambda: engine)
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    graphed = make_graphed_callables(layer, (x.clone().requires_grad_(),), impl="transformer_engine")
    assert engine.asked == {"_order": [1, -1], "samples": 1}
    graphed(x.clone().requires_grad_()).sum().backward()
    kept = layer.weight.grad
    assert kept is not None
    before, layer.weight.grad = kept.clone(), None
    graphed((2 * x).requires_grad_()).sum().backward()
    assert torch.equal(kept, before)
    graphed.reset()  # this engine has none: dropping it is all
    with pytest.raises(GraphCaptureError, match="was reset"):
        graphed(x)


def test_the_engine_is_told_of_our_random_states_while_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {"theirs": 1}
    module = ModuleType("an_engine.pytorch.distributed")
    module.get_all_rng_states = lambda: known  # type: ignore[attr-defined]

    def set_all(states: dict[str, Any]) -> None:
        nonlocal known
        known = states

    module.set_all_rng_states = set_all  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    make: Any = SimpleNamespace(__module__="an_engine.pytorch.graph")
    ours = torch.Generator()
    tracker: Any = SimpleNamespace(generators=[ours])
    with te_adaptor._generators_known(make, [tracker]):
        assert known == {"theirs": 1, "labkit 0": ours}
    assert known == {"theirs": 1}
