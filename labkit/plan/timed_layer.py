"""Time line of one dense layer on one rank: its kernels, and its tensor-parallel messages beside them. No torch.

The terms are those of `labkit/plan/layer_times.py`; here they get an order. A message and the product beside which it
is hidden start together. Each second that is hidden makes both last `slowdown` seconds longer, so the pair takes

    max(message, product) + slowdown x min(message, product)

and the end of the line is the sum of the terms' seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from labkit.config import RunConfig
from labkit.events import Event
from labkit.plan.layer_times import layer_passes
from labkit.plan.layout import layout_of
from labkit.plan.machine import load_machine
from labkit.plan.terms import Term
from labkit.plan.what_if import without_nvls
from labkit.plan.workload import Workload

_FORWARD = (
    "attention norm", "qkv, all-gather", "qkv", "rotary positions", "attention", "proj", "proj, sum",
    "attention residual", "mlp norm", "fc1, all-gather", "fc1", "activation", "fc2", "fc2, sum", "mlp residual",
)  # fmt: skip
_BACKWARD = (
    "mlp residual, backward",
    "fc2, all-gather of the gradient", "fc2, input gradient", "fc2, weight gradient", "activation, backward",
    "fc1, all-gather again", "fc1, input gradient", "fc1, sum of input gradients", "fc1, weight gradient",
    "mlp norm, backward", "attention residual, backward",
    "proj, all-gather of the gradient", "proj, input gradient", "proj, weight gradient",
    "attention, backward", "rotary positions",
    "qkv, all-gather again", "qkv, input gradient", "qkv, sum of input gradients", "qkv, weight gradient",
    "attention norm, backward",
)  # fmt: skip


def layer_timeline(config: RunConfig, gpus: int, machine: str = "h100", *, nvls: bool = True) -> list[Event]:
    """Return what a rank does in forward and backward of one layer and one microbatch; times in seconds from 0.

    Of a model with experts it is a layer without them. `nvls=False` takes the machine's switches without their adding
    (NCCL's `NCCL_NVLS_ENABLE=0`), so that an all-reduce takes the ring.

    A message is an Event of kind `collective`: its name is `all_reduce`, `all_gather` or `reduce_scatter`, and its
    bytes are those of the whole tensor. The other Events are named as the plan names kernels.

    Raises ValueError for a layer whose order is not known here: with context parallelism, recomputation, unfused
    attention or products in fp8.
    """
    target = load_machine(machine) if nvls else without_nvls(load_machine(machine))
    workload = Workload(config, gpus, software=target.default_software)
    passes = layer_passes(workload.config.model, None, layout_of(workload), target)
    line = _Line()
    line.run(passes.forward, _FORWARD, "forward")
    line.run((*passes.input_grad, *passes.weight_grad), _BACKWARD, "backward")
    total = sum(term.seconds for term in (*passes.forward, *passes.input_grad, *passes.weight_grad, *passes.recompute))
    if abs(line.now - total) > 1e-9:
        raise ValueError(
            "layer_timeline knows the order of a dense layer with fused attention in 16 bits, without context "
            "parallelism and recomputation; leave these away"
        )
    return line.events


def unhidden(events: Sequence[Event]) -> list[Event]:
    """Return the messages of a line beside which nothing runs: the rank waits for the whole of them."""
    kernels = [event for event in events if event.kind != "collective"]
    return [
        message for message in events
        if message.kind == "collective"
        and not any(max(message.start, one.start) + 1e-9 < min(message.end, one.end) for one in kernels)
    ]  # fmt: skip


def is_between(event: Event) -> bool:
    """Return True for a kernel between the tensor-parallel regions: a norm or a residual addition."""
    return event.name.partition(",")[0].endswith((" norm", " residual"))


class _Line:
    """Events so far, and the time at which the next one starts."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0.0

    def run(self, terms: Sequence[Term], order: Sequence[str], kind: Literal["forward", "backward"]) -> None:
        """Append the terms in this order, one after another; a hidden message starts with the term after it."""
        of = {term.name: term for term in terms}
        known = [of[name] for name in order if name in of]
        beside: Term | None = None
        for term in known:
            inputs = dict(term.inputs)
            if inputs.get("hidden"):
                beside = term
            elif term.kind == "tp":
                self._message(term, inputs["whole"])
                self.now = self.events[-1].end
            else:
                self._computes(term, kind, beside)
                beside = None

    def _computes(self, term: Term, kind: str, beside: Term | None) -> None:
        end, slower = self.now + term.seconds, 0.0
        if beside is not None:
            inputs = dict(beside.inputs)
            slower = inputs["slowdown"] * inputs["hidden"]
            self._message(beside, inputs["whole"] + slower)
            end = max(end + slower, self.events[-1].end)
        self.events.append(Event(0, term.name, kind, self.now, self.now + term.seconds + slower))
        self.now = end

    def _message(self, term: Term, seconds: float) -> None:
        inputs = dict(term.inputs)
        operation = term.formula.rpartition(", ")[2].split()[0]  # "..., all_gather of the bytes over n ranks"
        self.events.append(
            Event(0, operation, "collective", self.now, self.now + seconds, bytes=round(inputs["bytes"]))
        )
