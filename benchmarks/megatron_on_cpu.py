"""Let megatron-core 0.16.1 train on CPU with gloo, so that it can serve as oracle and as peer.

    import megatron_on_cpu                      # before any megatron.core module
    from megatron.core... import ...
    megatron_on_cpu.settle()                    # once all of them are imported

It asks the CUDA runtime for devices, moves tensors with `.cuda()` and draws dropout from a CUDA state; here they answer
for the CPU. Right only while every dropout is 0. Works for GPTModel with the local layer spec
(use_cpu_initialization, fusions off), tensor and sequence parallelism, 1F1B and interleaved 1F1B.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

warnings.filterwarnings("ignore", module="megatron")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _NoRngTracker:
    """Stands in for the CUDA RNG tracker."""

    fork = staticmethod(lambda *args, **kwargs: contextlib.nullcontext())
    add = set_states = reset = staticmethod(lambda *args, **kwargs: None)
    is_initialized = staticmethod(lambda: True)
    get_states = staticmethod(dict)


def _patch() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.zeros, torch.tensor = _on_cpu(torch.zeros), _on_cpu(torch.tensor)


def _let_torch_norms_be_sequence_parallel() -> None:
    """Its wrapper of torch's norms refuses sequence parallelism, as only apex's and Transformer Engine's mark their
    parameters for the sum over ranks. Mark torch's in the same way."""
    wrapper = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    refusing = wrapper.__new__

    def make(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm: torch.nn.Module = refusing(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    wrapper.__new__ = make


def settle() -> None:
    """Replace every imported reference to megatron's `get_cuda_rng_tracker`, and mend its wrapper of torch's norms."""
    _let_torch_norms_be_sequence_parallel()
    tracker = _NoRngTracker()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *args, **kwargs: tracker  # type: ignore[attr-defined]


_patch()
