"""A call of `make_graphed_callables` as a checked request, which our backends and Transformer Engine take alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from labkit.comm.capturing import GraphCaptureError
from labkit.graphs.buffers import BufferPlan, plan_buffers
from labkit.graphs.checks.before_capture import check_callables, check_samples, check_samples_apart, refuse_records
from labkit.graphs.planned_captures import Place, PlannedCapture, planned_captures
from labkit.graphs.static_inputs import Arguments, owners


class CaptureRequest(NamedTuple):
    """The checked arguments of one call."""

    functions: Sequence[Callable[..., Any]]
    """The callables; under an order the layers of all chunks, chunk by chunk."""
    places: Sequence[Place]
    """One for each pair of arguments, in the layout of the sample arguments."""
    captures: Sequence[PlannedCapture]
    """All graphs, in the order of their captures."""
    arguments: Sequence[Arguments]
    """The sample of each place."""
    owner: Sequence[int]
    """For each place, the index of the place into whose sample its calls are copied."""
    order: Sequence[float] | None
    """Signed chunk numbers; None where each callable has one graph."""
    layers: Sequence[int]
    """Layers of each chunk."""
    num_warmup: int
    """This and the following fields are the arguments of the same name."""
    pool: Any
    reuse_buffers: bool
    allow_unused_input: bool
    clone_param_grads: bool

    def device(self) -> torch.device:
        """The device of the samples, else of the parameters, else the host.

        Raises:
            ValueError: they lie on several devices.
        """
        devices = {tensor.device for one in self.arguments for tensor in one.tensors}
        if not devices:
            devices = {p.device for f in self.functions if isinstance(f, nn.Module) for p in f.parameters()}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"sample arguments are on {found}: move them to one device; a graph cannot copy from the host"
            )
        return devices.pop() if devices else torch.device("cpu")


def checked_request(
    callables: Any,
    sample_args: Any,
    sample_kwargs: Any,
    *,
    order: Sequence[float] | None,
    num_layers_per_chunk: int | Sequence[int] | None,
    num_warmup: int,
    pool: Any,
    reuse_buffers: bool,
    impl: str,
    allow_unused_input: bool,
    clone_param_grads: bool,
    plan: BufferPlan | None,
) -> CaptureRequest:
    """Check the arguments of `make_graphed_callables`, whose docstring explains them and lists the errors."""
    if num_warmup < 0:
        raise ValueError(f"num_warmup={num_warmup}: give 0 or more")
    several = isinstance(callables, tuple | list)
    single = not several and order is None
    functions = list(callables) if several else [callables]
    _check_functions(functions)
    all_args = [sample_args] if single else list(sample_args)
    all_kwargs = _all_kwargs(sample_kwargs, len(all_args), single)
    places, captures, layers = planned_captures(functions, len(all_args), order, num_layers_per_chunk)
    arguments = [Arguments(p.name, args, kw) for p, args, kw in zip(places, all_args, all_kwargs, strict=True)]
    check_samples(arguments)
    if reuse_buffers:
        order = _order_for_reuse(functions, order)
        plan = plan or _planned(order, layers, arguments, impl)
    owner = owners(places, plan)
    if torch.is_grad_enabled():
        check_samples_apart(captures, arguments, owner)
    return CaptureRequest(
        functions, places, captures, arguments, owner, order, layers,
        num_warmup, pool, reuse_buffers, allow_unused_input, clone_param_grads,
    )  # fmt: skip


def _all_kwargs(sample_kwargs: Any, count: int, single: bool) -> list[Mapping[str, Any]]:
    if sample_kwargs is None:
        return [{}] * count
    given = [sample_kwargs] if single or isinstance(sample_kwargs, Mapping) else list(sample_kwargs)
    if len(given) != count:
        raise ValueError(f"{len(given)} sample_kwargs for {count} sample_args: give a dict for each")
    return given


def _check_functions(functions: Sequence[Callable[..., Any]]) -> None:
    """Reject callables that a replay could not follow, and routers that record or repeat their choices."""
    check_callables(functions)
    for function in functions:
        if isinstance(function, nn.Module) and not hasattr(function, "cuda_graph_manual_hooks"):
            refuse_records(function)  # a wrapped layer checks itself: its router may lie outside of the graph


def _order_for_reuse(functions: Sequence[Callable[..., Any]], order: Sequence[float] | None) -> Sequence[float]:
    """The order, which tells when each buffer is free.

    Raises:
        ValueError: there is no order.
        GraphCaptureError: a callable has no backward here, so nothing tells when its buffer is free.
    """
    if order is None:
        raise ValueError("reuse_buffers needs an order: it tells when a backward has run and its buffer is free")
    if not torch.is_grad_enabled() or not all(getattr(f, "training", True) for f in functions):
        raise GraphCaptureError(
            "reuse_buffers is for training: without backwards nothing says when a buffer is free; "
            "call .train(), or capture without reuse_buffers"
        )
    return order


def _planned(order: Sequence[float], layers: Sequence[int], arguments: Sequence[Arguments], impl: str) -> BufferPlan:
    """The plan of one capture. Separate weight gradients read the input again, so the plan keeps it for them.

    Transformer Engine gives the input back at the backward."""
    signatures = [one.signature for one in arguments]
    return plan_buffers(order, layers, signatures, keep_for_weight_gradients=impl != "transformer_engine")


def parameters_of(functions: Sequence[Callable[..., Any]]) -> Iterator[nn.Parameter]:
    """The parameters of these modules that require grad, each once."""
    seen: set[int] = set()
    for function in functions:
        for parameter in function.parameters() if isinstance(function, nn.Module) else ():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter
