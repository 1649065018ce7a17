"""Static inputs that are given back too early, on purpose: a bug of Megatron-LM and a relative of it.

Inside these blocks a run captures its layers with a wrong plan. Nothing raises, and gradients are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest.mock import patch

from torch import Tensor

from labkit.graphs.buffers import BufferPlan, Use, plan_buffers
from labkit.graphs.capture import _Capture  # pyright: ignore[reportPrivateUsage]
from labkit.graphs.cuda_graph_helper import CudaGraphHelper
from labkit.graphs.order_table import read_order


@contextmanager
def given_back_early(steps: int) -> Iterator[None]:
    """Give every static input back so many steps of the order before its backward, so a later forward takes it.

    A large number means right after the forward.
    """
    early = partialmethod(CudaGraphHelper.create_cudagraphs, early_release=steps)
    with patch.object(CudaGraphHelper, "create_cudagraphs", early):
        yield


@contextmanager
def given_back_as_in_4433() -> Iterator[None]:
    """Give the input of a rank's first layer back after its forward, to forwards and to backwards.

    This is the first bug of Megatron-LM's pull request 4433. There the buffer went to a pool from which the next
    forward took its first layer's input, and the next backward the dy of its last layer. So all of them are one
    tensor, and a backward copies its dy over the input that its first layer is about to read.

    Source: megatron-core 0.16.1, `create_fwd_graph` and `create_bwd_graph` in megatron/core/transformer/cuda_graphs.py.
    """
    honest = _Capture._grad_output  # pyright: ignore[reportPrivateUsage]

    def planned(*args: Any, **options: Any) -> BufferPlan:
        plan = plan_buffers(*args, **options)
        first = [use for use in plan.assignment if use.layer == 0]
        return replace(plan, assignment={**plan.assignment, **dict.fromkeys(first, plan.assignment[first[0]])})

    def grad_output(self: _Capture, index: int, output: Tensor, number: int) -> Tensor:
        layers = [place.layer for place in self.places if place.chunk == self.places[index].chunk]
        if self.places[index].layer < max(layers):
            return honest(self, index, output, number)
        return self.captured[index - max(layers)].inputs[0].detach()

    with (
        patch("labkit.graphs.cuda_graph_helper.plan_buffers", planned),
        patch.object(_Capture, "_grad_output", grad_output),
    ):
        yield


def inputs_read(plan: BufferPlan, order: Sequence[float]) -> dict[Use, Use]:
    """For each use of a static input, the use whose input its backward finds there: the last one written before."""
    passes = read_order(order)
    steps = {(one.kind, one.chunk, one.microbatch): one.step for one in passes}
    found: dict[Use, Use] = {}
    for use, buffer in plan.assignment.items():
        read = steps["B", use.chunk, use.microbatch]
        written = {steps["F", each.chunk, each.microbatch]: each for each in plan.lives(buffer)}
        found[use] = written[max(step for step in written if step < read)]
    return found
