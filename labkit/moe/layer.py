"""The MoE layer: a router chooses experts for each token, and the token visits them on their ranks.

One forward is a chain of methods with Megatron's names. Each can be called on its own. The first three work on shapes
that are known beforehand; only routing tells how many rows travel.

| method                   | takes                | gives                     | work                                   |
|--------------------------|----------------------|---------------------------|----------------------------------------|
| `shared_experts_compute` | x_SBH                | y_SBH or None             | an MLP that all tokens pass through    |
| `route`                  | x_SBH                | probs_TE, map_TE          | choose experts and their weights       |
| `preprocess`             | x_SBH, probs, map    | rows_NH, probs_N          | counts; rows in the order of experts   |
| `dispatch`               | rows_NH, probs_N     | rows and weights received | all-to-all over ep                     |
| `routed_experts_compute` | rows and weights     | rows_NH                   | gather over etp, experts, and back     |
| `combine`                | rows_NH, y_SBH       | x_SBH                     | all-to-all back; sum per token, plus y |

The last four call the six steps of the dispatcher (`dispatch/dispatcher.py`). From `preprocess` on, each method also
takes and returns the metadata of these steps.

With `moe.shared_expert_overlap` the dispatcher computes the shared experts while rows travel, and the first method does
nothing.

Shapes: S sequence of this rank, S/(cp tp) under sequence parallelism. B batch, H hidden, T = S B tokens of this rank,
E experts. N rows: one for each token and expert that it visits.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import ConfigError, ModelConfig, MoEConfig
from labkit.config.choices import DISPATCHERS
from labkit.config.fields import SPECS
from labkit.moe.balance import AuxLossScale
from labkit.moe.dispatch.dispatcher import Metadata, MoETokenDispatcher
from labkit.moe.experts import GroupedExperts, SequentialExperts, StackedLinear
from labkit.moe.router import TopKRouter
from labkit.moe.shared_experts import SharedExpertMLP
from labkit.parallel.layers import NATIVE, Precision
from labkit.parallel.parameters.weights import Seed
from labkit.parallel.random import RngTracker

Part = Callable[..., Tensor]
"""`part(name, function, x)` is `function(x)`; backward recomputes it if the part `name` is selected."""


def _keep(_: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def _check_fields(name: str, moe: MoEConfig) -> None:
    """Reject values that a field cannot hold, for layers that are built without `RunConfig.validate`.

    Otherwise nothing would raise for most of them: an unknown `load_balancing`, for example, would balance nothing.
    """
    given = {f"moe.{field}": value for field, value in vars(moe).items() if value is not None}
    broken = {field: SPECS[field].broken(value) for field, value in given.items()}
    problems = [f"{field} = {given[field]!r}: {rule}" for field, rule in broken.items() if rule]
    if problems:
        raise ConfigError(problems, source=name)


def build_dispatcher(
    moe: MoEConfig,
    groups: ParallelGroups,
    *,
    name: str = "moe",
    cuda_dtoh_point: str = "before_permutation_1",
) -> MoETokenDispatcher:
    """Build the dispatcher that `moe.dispatcher` names. Arguments and errors are those of `MoETokenDispatcher`."""
    if moe.dispatcher not in DISPATCHERS:
        raise ValueError(f"moe.dispatcher is {moe.dispatcher!r}; choose one of {', '.join(DISPATCHERS)}")
    dispatcher = resolve_name(DISPATCHERS[moe.dispatcher].dispatcher)
    return dispatcher(moe, groups, name=name, cuda_dtoh_point=cuda_dtoh_point)


class MoELayer(nn.Module):
    """Router, dispatcher, routed experts and shared experts in place of an MLP.

    Args:
        name: name in the whole model, such as `layers.3.mlp`; its parts are `router`, `experts`, `shared_experts`.
        model: shape of the model.
        moe: experts, routing and dispatch.
        groups: groups of this rank.
        sequence_parallel: x is this rank's part of the sequence; needed where tp > 1.
        seed: seed of the weights.
        output_std: std of the experts' last projections; None means model.init_std.
        gradient_accumulation_fusion: add weight gradients to `main_grad` where it exists.
        expert_linear: constructor of the routed experts' projections (`Experts`).
        precision: gives the products of the shared experts.
        aux_loss_scale: start of the gradients of the routers' losses, shared within a model chunk.
        rng: random states for `moe.input_jitter`.
        part: calls a part that backward may recompute; here `shared_experts`.
        dtype, device: dtype and device of the parameters.

    Attributes:
        router, experts, shared_experts (None without), token_dispatcher.

    Raises:
        ConfigError: a value that a field of `moe` cannot hold.
        ValueError: tp > 1 without sequence parallelism, a size that ep, etp or tp does not divide, or an overlap with
            a dispatcher that has no transfer.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        moe: MoEConfig,
        groups: ParallelGroups,
        *,
        sequence_parallel: bool = False,
        seed: Seed = 0,
        output_std: float | None = None,
        gradient_accumulation_fusion: bool = False,
        expert_linear: Callable[..., nn.Module] = StackedLinear,
        precision: Precision = NATIVE,
        aux_loss_scale: AuxLossScale | None = None,
        rng: RngTracker | None = None,
        part: Part = _keep,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_fields(name, moe)
        self.name, self.moe, self.hidden, self._part = name, moe, model.hidden, part
        made: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": device}
        self.router = TopKRouter(
            f"{name}.router",
            model,
            moe,
            groups,
            sequence_parallel=sequence_parallel,
            aux_scale=aux_loss_scale,
            rng=rng,
            **made,
        )
        made |= {"std": model.init_std, "output_std": output_std}
        made |= {"gradient_accumulation_fusion": gradient_accumulation_fusion}
        experts = GroupedExperts if moe.grouped_gemm else SequentialExperts
        self.experts = experts(f"{name}.experts", model, moe, groups, linear=expert_linear, **made)
        self.shared_experts: SharedExpertMLP | None = None
        if moe.shared_expert_ffn_hidden is not None:
            made |= {"sequence_parallel": sequence_parallel, "precision": precision}
            self.shared_experts = SharedExpertMLP(f"{name}.shared_experts", model, moe, groups, **made)
        self.groups = groups
        self.token_dispatcher = build_dispatcher(moe, groups, name=name)
        if moe.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], to be added to the residual stream. ValueError for another shape or type."""
        self._check_input(x_SBH)
        with comm_scope(layer=self.name):
            shared_SBH = self.shared_experts_compute(x_SBH)
            probs_TE, map_TE = self.route(x_SBH)
            rows, probs, metadata = self.preprocess(x_SBH, probs_TE, map_TE)
            rows, probs, metadata = self.dispatch(rows, probs, metadata)
            rows, metadata = self.routed_experts_compute(rows, probs, metadata)
            return self.combine(rows, metadata, shared_SBH)

    def _check_input(self, x_SBH: Tensor) -> None:
        shape, dtype = list(x_SBH.shape), self.router.weight.dtype
        if len(shape) != 3 or shape[2] != self.hidden or shape[0] == 0 or x_SBH.dtype != dtype:
            wanted = f"{dtype} [S, B, {self.hidden}] with S of at least 1"
            raise ValueError(f"{self.name}: the input must be {wanted}, got {x_SBH.dtype} {shape}")

    @property
    def has_shared_output(self) -> bool:
        """True if `shared_experts_compute` computes an output."""
        return self.shared_experts is not None and not self.moe.shared_expert_overlap

    def shared_experts_compute(self, x_SBH: Tensor) -> Tensor | None:
        """Return the shared experts' output; None without shared experts, or where the dispatcher computes them."""
        if self.shared_experts is None or not self.has_shared_output:
            return None
        # MLP and gate both read x. The view adds up their gradients before they join others, as a recomputed part does,
        # so that recomputation changes no bit.
        x_SBH = x_SBH.view_as(x_SBH)
        with comm_scope(layer=self.shared_experts.name):
            return self._part("shared_experts", self.shared_experts, x_SBH)

    def before_dispatch(self, x_SBH: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Metadata]:
        """Run the first three steps, for a merged pair; return (the shared experts' output, *`preprocess`)."""
        with comm_scope(layer=self.name):
            shared_SBH = self.shared_experts_compute(x_SBH)
            return shared_SBH, *self.preprocess(x_SBH, *self.route(x_SBH))

    # Each step is a method, because a partial CUDA graph ends after `route` or `preprocess` (`graphs/partial_moe.py`).

    def route(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [T, E], 0 where not chosen, and the choice [T, E], bool."""
        return self.router(x_SBH)

    def preprocess(self, x_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor, Metadata]:
        """Return the rows and weights in the order in which they leave this rank."""
        return self.token_dispatcher.dispatch_preprocess(x_SBH, probs_TE, map_TE)

    def dispatch(self, rows: Tensor, probs: Tensor, metadata: Metadata) -> tuple[Tensor, Tensor, Metadata]:
        """Return the rows and weights that arrive at this rank."""
        return self.token_dispatcher.token_dispatch(rows, probs, metadata)

    def routed_experts_compute(self, rows: Tensor, probs: Tensor, metadata: Metadata) -> tuple[Tensor, Metadata]:
        """Return the experts' output, in the order in which the rows arrived."""
        dispatcher = self.token_dispatcher
        rows_NH, tokens_per_expert, probs_N, metadata = dispatcher.dispatch_postprocess(rows, probs, metadata)
        return dispatcher.combine_preprocess(self.experts(rows_NH, tokens_per_expert, probs_N), metadata)

    def combine(self, rows: Tensor, metadata: Metadata, shared_SBH: Tensor | None = None) -> Tensor:
        """Return [S, B, H]: the sum of each token's results, plus the shared experts' output."""
        rows, metadata = self.token_dispatcher.token_combine(rows, metadata)
        output_SBH = self.token_dispatcher.combine_postprocess(rows, metadata)
        return output_SBH if shared_SBH is None else output_SBH + shared_SBH
