"""A record of the logits of every forward, from which the same tokens can be routed by other policies later.

A `RoutingReplay` repeats a *choice*. This record keeps the logits, from which `labkit.viz.experts.router_lab` makes any
choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from labkit.moe.replay import is_second_forward
from labkit.moe.router import TopKRouter, routers_of


class LogitRecord:
    """Logits [T, E] of every forward of some modules' routers, on the host, by the router's name, until `close()`.

    A recomputed forward is not recorded again. The logits are those of the input without jitter. Each forward waits for
    the device, so close the record early.

        with LogitRecord([model]) as kept:
            model(tokens)
        torch.stack(kept.logits["layers.3.mlp.router"])      # [forwards, T, E]

    `pretrain` makes the model itself, so make the record in its `model_provider`, together with the chunk.

    Args:
        modules: model chunks, or routers.

    Raises:
        ValueError: the modules have no router.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        routers = list(routers_of(modules))
        if not routers:
            raise ValueError("there is no router in these modules; give the chunks of a model with experts")
        self.logits: dict[str, list[Tensor]] = {router.name: [] for router in routers}
        """Name of the router -> logits of its forwards, in their order."""
        self._handles = [router.register_forward_pre_hook(self._keep) for router in routers]

    def _keep(self, router: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(router, TopKRouter)
        if not is_second_forward():
            with torch.no_grad():
                self.logits[router.name].append(router.gating(inputs[0]).cpu())

    def close(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> LogitRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
