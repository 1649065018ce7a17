"""Conditions under which a replay is right, noted at capture and compared at each call.

| noted at capture                                | if it differs at a call                                          |
|-------------------------------------------------|------------------------------------------------------------------|
| training mode of every module inside, autocast  | the callable runs eagerly: the graph is of another computation   |
| the parameters, buffers and modules             | rejected: the graph would use the old ones                        |
| addresses of parameters, buffers, `main_grad`   | rejected: the graph would use the old memory                      |
| `requires_grad` of the parameters               | rejected: the graph has no gradient of a frozen parameter         |
| no hooks on modules                             | rejected: a replay calls none                                     |

A call compares a few short lists; only a difference looks up names. Hooks of a module with manual hooks
(`cuda_graph_manual_hooks`) are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from labkit.comm.capturing import GraphCaptureError

HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
"""Attribute of a module -> the kind of hook that it holds."""


def global_hooks() -> list[Any]:
    """The dictionaries of hooks that torch calls for every module."""
    return [getattr(torch_module, f"_global{name}") for name in HOOKS]


def autocast_of(device_type: str) -> torch.dtype | None:
    """The type that autocast casts to; None without autocast."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


class ReplayGuards:
    """The state of a callable at its capture, and comparisons with its present state."""

    def __init__(
        self, function: Callable[..., Any], device_type: str = "cpu", main_grads_of: Sequence[nn.Parameter] = ()
    ) -> None:
        """main_grads_of: parameters to whose `main_grad` the graph may add."""
        self._function = function
        self._modules = list(function.modules()) if isinstance(function, nn.Module) else []
        self._modes = [module.training for module in self._modules]
        self._device_type = device_type
        self._autocast = autocast_of(device_type)
        own: list[dict[str, Any]] = [d for m in self._modules for d in (m._parameters, m._buffers, m._modules)]
        self._registered = [registered for registered in own if registered]
        self._members = self._present()
        parameters = {id(x): x for x in self._members if isinstance(x, nn.Parameter)}
        buffers = [x for x in self._members if isinstance(x, Tensor) and id(x) not in parameters]
        self._parameters = list(parameters.values())
        self._tensors = [x for x in (*self._parameters, *buffers) if x.layout is torch.strided]
        self._attributes = [vars(p) for p in main_grads_of]
        self._addresses = self._present_addresses()
        # A parameter frozen since its capture does no harm, unless the graph itself adds its gradient to main_grad.
        self._flagged = [p for p in self._parameters if not p.requires_grad or hasattr(p, "main_grad")]
        self._wants = [p.requires_grad for p in self._flagged]
        managed = hasattr(function, "cuda_graph_manual_hooks")
        hooks = [] if managed else [getattr(m, name) for m in self._modules for name in HOOKS] + global_hooks()
        self._hooks: list[Any] = hooks if self._modules else []

    def _present(self) -> list[Any]:
        return list(chain.from_iterable([d.values() for d in self._registered]))

    def _present_addresses(self) -> list[int]:
        mains = [attributes.get("main_grad") for attributes in self._attributes]
        return [x.data_ptr() for x in (*self._tensors, *mains) if x is not None]

    def fit_mode(self) -> bool:
        """True where training modes and autocast are those of the capture."""
        if [module.training for module in self._modules] != self._modes:
            return False
        return autocast_of(self._device_type) == self._autocast

    def wants_gradients(self) -> bool:
        """True where a parameter requires grad."""
        return any(p.requires_grad for p in self._parameters)

    def require(self, name: str, *, gradients: bool) -> None:
        """Compare everything but modes.

        name: name of the callable in messages. gradients: the capture ran with gradients enabled.

        Raises:
            GraphCaptureError: something has changed; the message names it and says what to do.
        """
        if any(self._hooks):
            raise GraphCaptureError(
                f"{name}: a hook was registered on one of its modules since the capture, and a replay calls none: "
                "remove it, or call it before each replay (cuda_graph_manual_hooks)"
            )
        self.require_members(name)
        if self._present_addresses() != self._addresses:
            raise GraphCaptureError(
                f"{name}: a parameter, a buffer or a main_grad was moved since the capture, and the graph would use "
                "the old memory. Change them in place (copy_, the optimizer's step), or capture again"
            )
        flags = zip(self._flagged, self._wants, strict=True)
        if gradients and (changed := [p for p, wants in flags if p.requires_grad != wants]):
            raise GraphCaptureError(
                f"{name}: requires_grad of {self._name_of(changed[0])} is not what it was at capture, and the graph "
                "treats its gradient as at capture. Set it back, or capture again"
            )

    def require_members(self, name: str, since: str = "since the capture") -> None:
        """Compare the parameters, buffers and modules themselves, as objects."""
        present = self._present()
        if len(present) != len(self._members) or any(map(is_not, present, self._members)):
            raise GraphCaptureError(
                f"{name}: {self._name_of(self._new_member(present))} was replaced {since}, and the graph would use the "
                "old one. Change it in place (copy_, load_state_dict without assign), or capture again"
            )

    def _new_member(self, present: list[Any]) -> Any:
        """The first member that was not there at the capture; None where members have only gone."""
        known = set(map(id, self._members))
        return next((member for member in present if member is not None and id(member) not in known), None)

    def _name_of(self, wanted: Any) -> str:
        modules = self._function.named_modules() if isinstance(self._function, nn.Module) else ()
        for path, module in modules:
            kinds = {"parameter": module._parameters, "buffer": module._buffers, "module": module._modules}
            for kind, registered in kinds.items():
                for name, member in registered.items():
                    if member is not None and member is wanted:
                        return f"{kind} {path}{'.' if path else ''}{name}"
        return "a parameter, a buffer or a module"
