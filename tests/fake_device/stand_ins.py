"""Replacements for the few places in labkit that need numbers or addresses from a real device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fake_device.audit import Audit
from labkit.graphs.cuda import local_backend
from labkit.moe.dispatch.dispatcher import MoETokenDispatcher
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.parallel.parameters import weights


def zeros(
    name: str, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: Any = None, **_: Any
) -> Tensor:
    """In the place of `weights.draw`, which at real sizes draws for minutes."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.zeros(tuple(shape), dtype=kept, device=device or "cpu")


@contextmanager
def without_numbers(audit: Audit) -> Iterator[None]:
    """Inside the block weights are not drawn, each expert gets an equal share of the tokens that were routed last, and
    a weak reference of a graph to its memory is a view."""
    arrived, flatten, rows = HostCopy.wait, MoETokenDispatcher.flatten, 0

    def noting(dispatcher: MoETokenDispatcher, hidden: Tensor, probs_TE: Tensor, map_TE: Tensor) -> Tensor:
        nonlocal rows
        rows = map_TE.shape[0] * dispatcher.moe.top_k
        return flatten(dispatcher, hidden, probs_TE, map_TE)

    def equal(copy: HostCopy) -> Tensor:
        counts = arrived(copy)
        audit.read("counts of a router", counts)
        with unset_fake_temporarily():
            return torch.full(counts.shape, rows // counts.shape[-1], dtype=counts.dtype)

    with (
        patch.object(weights, "draw", zeros),
        patch.object(HostCopy, "wait", equal),
        patch.object(MoETokenDispatcher, "flatten", noting),
        patch.object(local_backend, "weak_cuda_tensor", Tensor.detach),
    ):
        yield
