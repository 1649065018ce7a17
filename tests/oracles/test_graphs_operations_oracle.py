"""Every operation of torch's own collection of samples, captured and replayed: the eager bits, or refused."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.emulated.emulated_backend import EmulatedBackend

BACKEND = EmulatedBackend()
SAMPLES = 2
"""Of each operation."""
_LEFT_OUT = ("empty", "new_empty", "jiterator")
"""Without values, or for GPUs alone."""


@pytest.fixture(scope="module")
def operations() -> list[Any]:
    """torch's `op_db`. Its module wants a test library that it does not need for the samples."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "expecttest" not in sys.modules:
            patch.setitem(sys.modules, "expecttest", stub)
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if torch.float32 in op.dtypes and not op.name.startswith(_LEFT_OUT)]


def tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.layout is torch.strided]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = (torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def calls_of(op: Any) -> Iterator[Any]:
    """Samples that work at all, as calls without arguments; each call starts from the same seed."""
    try:
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:SAMPLES]
    except (RuntimeError, NotImplementedError):
        return
    for sample in samples:
        yield sample, lambda s=sample: op(s.input, *s.args, **s.kwargs)


def outcome(sample: Any, call: Any) -> str:
    """`equal`, `refused` or `different`."""
    torch.manual_seed(42)  # samples of random operations start from this one themselves
    expected = [x.clone() for x in tensors_of(call())]
    try:
        with BACKEND.capturing(BACKEND.new_pool(), "operation") as graph:
            made = tensors_of(call())
    except GraphCaptureError:
        return "refused"
    given = {x.untyped_storage().data_ptr() for x in tensors_of((sample.input, sample.args, sample.kwargs))}
    for x in made:
        if x.untyped_storage().data_ptr() not in given:
            torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).fill_(7)
    torch.manual_seed(42)
    graph.replay()
    equal = len(made) == len(expected) and all(map(same_bits, made, expected))
    return "equal" if equal else "different"


@pytest.mark.oracle
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_every_operation_replays_to_the_bit_or_is_refused(operations: list[Any], one_thread: None) -> None:
    found: dict[str, set[str]] = {}
    for op in operations:
        for sample, call in calls_of(op):
            found.setdefault(outcome(sample, call), set()).add(op.name)
    assert found.get("different", set()) == set()
    assert len(found["equal"]) > 400
    for name in ("item", "nonzero", "masked_select", "unique", "equal", "argwhere", "allclose"):
        assert name in found["refused"]
    assert found["refused"] & {"add", "nn.functional.linear", "where", "softmax", "nn.functional.layer_norm"} == set()
