"""Transformer Engine's own `make_graphed_callables` without a GPU: its Python source, its captures emulated.

The source is read from where `make test` puts it (`.venv/te-source`, a pure wheel without its compiled half) or from
the folder or wheel that LABKIT_TE_SOURCE names. Only `pytorch/graph.py` is run; what it imports of the engine is stood
in for by empty classes, and what it takes from `torch.cuda` by the emulated backend.
"""

from __future__ import annotations

import os
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from labkit.graphs import make_weak_ref
from labkit.graphs.backend import get_backend

GRAPH = "transformer_engine/pytorch/graph.py"
PACKAGE = "te_graph_source"


def graph_source() -> str | None:
    """The text of the engine's graph.py; None where it is not to be had."""
    place = Path(os.environ.get("LABKIT_TE_SOURCE", Path(sys.prefix) / "te-source"))
    if place.suffix == ".whl" and place.exists():
        return zipfile.ZipFile(place).read(GRAPH).decode()
    return (place / GRAPH).read_text(encoding="utf-8") if (place / GRAPH).exists() else None


WHY_NONE = f"needs transformer_engine: its source is not in {sys.prefix}/te-source, where `make test` puts it"


class Quantisation:
    """What graph.py asks of `FP8GlobalStateManager`; remembers how weights were to be treated."""

    weight_updates_skipped: list[bool] = []  # noqa: RUF012

    @staticmethod
    def set_skip_fp8_weight_update_tensor(skip: bool) -> None:
        Quantisation.weight_updates_skipped.append(skip)

    @staticmethod
    def is_first_fp8_module() -> bool:
        return True

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool) -> None:
        """Nothing is quantised."""


QUANTISED_REGIONS: list[dict[str, Any]] = []
"""Arguments of each `autocast` that was entered."""


def _autocast(**arguments: Any) -> Any:
    QUANTISED_REGIONS.append(arguments)
    return nullcontext()


class EmulatedCUDAGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.graph: Any = None

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        if self.graph is not None:
            self.graph.reset()


def _stand_ins(backend: Any) -> dict[str, types.ModuleType]:
    """Modules that graph.py imports, relative (under PACKAGE) and absolute."""

    def module(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(content)
        return made

    def kind(name: str) -> type:
        return type(name, (), {})

    recipe = {"DelayedScaling": kind("DelayedScaling"), "Recipe": kind("Recipe")}
    quantization = {
        "autocast": _autocast, "FP8GlobalStateManager": Quantisation, "get_default_fp8_recipe": lambda: "default",
    }  # fmt: skip
    rng = {"get_all_rng_states": dict, "graph_safe_rng_available": lambda: False}
    relative = {
        "": {}, ".pytorch": {}, ".pytorch.quantization": quantization, ".pytorch.distributed": rng,
        ".pytorch.module": {}, ".pytorch.ops.op": {"BasicOperation": kind("BasicOperation")},
        ".pytorch.module.base": {"TransformerEngineBaseModule": kind("TransformerEngineBaseModule")},
        ".pytorch.ops": {"Sequential": kind("Sequential")},
        ".pytorch.ops.fuser": {"OperationFuser": kind("OperationFuser")},
        ".pytorch.utils": {"make_weak_ref": lambda tree: make_weak_ref(tree, backend)},
        ".pytorch.attention": {}, ".pytorch.attention.linear_attention": {},
        ".pytorch.attention.linear_attention.base": {"LinearAttentionBase": kind("LinearAttentionBase")},
    }  # fmt: skip
    absolute = {
        "": {},
        ".common": {},
        ".common.recipe": recipe,
        ".pytorch": {},
        ".pytorch.constants": {"dist_group_type": Any},
    }
    return {f"{PACKAGE}{name}": module(f"{PACKAGE}{name}", **content) for name, content in relative.items()} | {
        f"transformer_engine{name}": module(f"transformer_engine{name}", **content)
        for name, content in absolute.items()
    }


def _cuda(backend: Any) -> dict[str, Any]:
    """What graph.py uses of `torch.cuda`."""
    names = iter(range(10**9))

    @contextmanager
    def capture(graph: EmulatedCUDAGraph, pool: Any) -> Iterator[None]:
        with backend.capturing(pool, f"engine graph {next(names)}") as graph.graph:
            yield

    the_stream = object()
    return {
        "CUDAGraph": EmulatedCUDAGraph, "graph": capture, "synchronize": lambda: None,
        "Stream": lambda: the_stream, "stream": nullcontext, "current_stream": lambda: the_stream,
        "get_rng_state": torch.get_rng_state, "set_rng_state": torch.set_rng_state,
    }  # fmt: skip


@contextmanager
def emulated_engine() -> Iterator[Callable[..., Any]]:
    """Inside the block: the engine's `make_graphed_callables`, which captures on the host."""
    source = graph_source()
    assert source is not None, WHY_NONE
    backend = get_backend("emulated")
    name = f"{PACKAGE}.pytorch.graph"
    graph = types.ModuleType(name)
    graph.__package__ = f"{PACKAGE}.pytorch"
    modules = _stand_ins(backend) | {name: graph}
    earlier = {key: sys.modules[key] for key in modules if key in sys.modules}
    sys.modules.update(modules)  # not patch.dict: what torch imports meanwhile must stay
    try:
        exec(compile(source, f"<{GRAPH}>", "exec"), vars(graph))
        graph.graph_pool_handle = backend.new_pool  # type: ignore[attr-defined]
        with patch.multiple(torch.cuda, **_cuda(backend)):
            yield graph.make_graphed_callables
    finally:
        for key in modules:
            sys.modules.pop(key, None)
        sys.modules.update(earlier)
