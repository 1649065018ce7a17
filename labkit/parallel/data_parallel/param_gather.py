"""All-gather of parameters: each rank has updated its part of a bucket, and the gather makes the bucket whole again.

The gather runs at once, or during the next forward (Megatron's `overlap_param_gather`). Then a hook before each
module's forward waits for the buckets of the module's own parameters, and starts the next bucket. Buckets are gathered
in the order in which a forward needs them, the reverse of the order in which a backward fills them:

    optimizer step   update own parts, start bucket 2
    forward          wait 2, start 1 | first layers | wait 1, start 0 | middle layers | wait 0 | last layers

A bucket is `stale` from the update to the start of its gather, then `under way`, and `ready` after a wait. Every rank
of a data-parallel group runs the same modules in the same order, and so starts the same gathers in the same order. All
other code that reads parameters calls `finish` first.

The gather is in place: the buffer that receives the other ranks' parts holds this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from labkit.comm.collectives import all_gather_async
from labkit.comm.ledger import comm_scope
from labkit.comm.pending import Pending
from labkit.parallel.data_parallel.grad_buffers import GradBucket, own_part
from labkit.parallel.parameters.parameter_record import name_of


class ParamGather:
    """The gathers of one wrapped model chunk."""

    def __init__(self, module: nn.Module, buckets: Sequence[GradBucket], *, overlap: bool) -> None:
        """buckets: buckets of the chunk, in the order of their reduction; each has its `param_data`.

        overlap: hook the modules. Another module may read a module's parameters without calling the module; then the
        module around it waits. This concerns modules without a `forward`, modules marked `computed_in_stages` with all
        modules inside, and all modules inside a module marked `reads_children`.
        """
        self.overlap = overlap
        self._buckets = list(reversed(buckets))
        self._stale: set[int] = set()
        self._under_way: dict[int, Pending] = {}
        self._place = {id(p): place for place, bucket in enumerate(self._buckets) for p in bucket.parameters}
        self._module, self._handles = module, list[RemovableHandle]()
        if overlap:
            self.enable_hooks()
            for bucket in buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._check_was_ready)

    # ---- what the optimizer and the pipeline call ----

    def updated(self) -> None:
        """Note that this rank's parts are new: every bucket needs its gather. With overlap the first gather starts."""
        assert not self._under_way, "parameters were updated while an earlier update was still being gathered"
        self._stale = set(range(len(self._buckets)))
        if self.overlap:
            self._start_next()

    def start(self) -> None:
        """Start every gather that has not been started."""
        while self._stale:
            self._start_next()

    def finish(self) -> None:
        """Start the remaining gathers and wait for all. Every parameter then has the value that its owner computed."""
        self.start()
        for place in list(self._under_way):
            self._under_way.pop(place).wait()

    @property
    def is_ready(self) -> bool:
        """True if all parameters may be read."""
        return not self._stale and not self._under_way

    # ---- buckets ----

    def _start(self, place: int) -> None:
        bucket = self._buckets[place]
        assert bucket.param_data is not None, "only the distributed optimizer gathers parameters"
        self._stale.discard(place)
        group = bucket.reduction.within
        with comm_scope(layer=f"buckets.{bucket.index}", phase="parameters"):
            part = own_part(bucket.param_data, group)
            self._under_way[place] = all_gather_async(part, group, out=bucket.param_data)

    def _start_next(self) -> None:
        if self._stale:
            self._start(min(self._stale))

    def _need(self, place: int) -> None:
        """Wait for a bucket and start the next, which travels during the following computation."""
        if place in self._stale:
            self._start(place)
        if (pending := self._under_way.pop(place, None)) is not None:
            pending.wait()
            self._start_next()

    # ---- hooks ----

    def enable_hooks(self) -> None:
        """Make modules wait for their parameters before their forwards. Without overlap nothing changes."""
        if self.overlap and not self._handles:
            for reader, places in self._readers(self._module).items():
                self._handles.append(reader.register_forward_pre_hook(self._hook(sorted(places))))

    def disable_hooks(self) -> None:
        """Wait for all parameters, and remove the hooks: a CUDA graph captures modules without hooks."""
        self.finish()
        while self._handles:
            self._handles.pop().remove()

    def make_hook(self) -> Callable[[nn.Module], None]:
        """Return a function that waits for a module's own parameters. The replay of a graph, for example, computes with
        them without calling the module."""

        def wait(module: nn.Module) -> None:
            if not self.is_ready:
                own = {self._place.get(id(parameter)) for parameter in module.parameters(recurse=False)}
                for place in sorted(place for place in own if place is not None):
                    self._need(place)

        return wait

    def _readers(self, module: nn.Module) -> dict[nn.Module, set[int]]:
        """Return module with a hook -> buckets that it waits for."""
        readers: dict[nn.Module, set[int]] = {}

        def visit(inner: nn.Module, around: nn.Module, staged: bool) -> None:
            staged |= getattr(inner, "computed_in_stages", False)
            reader = around if staged or _has_no_forward(inner) else inner
            for parameter in inner.parameters(recurse=False):
                if id(parameter) in self._place:  # else frozen, or another chunk's
                    readers.setdefault(reader, set()).add(self._place[id(parameter)])
            for child in inner.children():
                visit(child, reader, staged or getattr(inner, "reads_children", False))

        visit(module, module, False)
        return readers

    def _hook(self, places: list[int]) -> Any:
        def wait(*_: object) -> None:
            if not self.is_ready:
                for place in places:
                    self._need(place)

        return wait

    def _check_was_ready(self, parameter: torch.Tensor) -> None:
        """Raise for a gradient of a parameter that is not ready: a forward has computed with its old value."""
        place = self._place[id(parameter)]
        if place in self._stale or place in self._under_way:
            raise RuntimeError(
                f"{name_of(parameter)} was used before its update was gathered: a forward "
                "reads it without calling the module that owns it. Call that module, or turn off "
                "optim.overlap_param_gather"
            )


def _has_no_forward(module: nn.Module) -> bool:
    """Return True for a container, or a module that only holds parameters, because calling it is an error."""
    return type(module).forward is nn.Module.forward


def param_gathers(chunks: Sequence[Any]) -> Iterator[ParamGather]:
    """Yield the `ParamGather` of each chunk that has one."""
    for chunk in chunks:
        gather = getattr(chunk, "param_gather", None)
        if gather is not None:
            yield gather


def finish_param_sync(chunks: Sequence[Any]) -> None:
    """Wait until every parameter of the rank's chunks may be read, as between two steps."""
    for gather in param_gathers(chunks):
        gather.finish()
