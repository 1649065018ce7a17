"""Shared experts: an MLP that every token passes through, in addition to its routed experts (arXiv 2401.06066).

The MLP does not depend on routing, so it can be computed while tokens travel. For that it has stages, which the
dispatcher calls between the steps of its communication, on a stream of their own:

| stage                          | what it does                                     | while                          |
|--------------------------------|--------------------------------------------------|--------------------------------|
| `pre_forward_comm(x)`          | gate; gathers the sequence over tp               | tokens are permuted            |
| `linear_fc1_forward_and_act(s)`| first projection and activation                  | tokens travel to their experts |
| `linear_fc2_forward(s)`        | second projection                                | results travel back            |
| `post_forward_comm(s)`         | sums over tp (reduce-scatter of the sequence)    | results are put in order       |
| `get_output(s)`                | returns the result, and joins the streams        |                                |

Each stage returns a `SharedExpertsStage`, which the next stage takes. A call of the module does the same at once.

Shapes: S sequence (this rank's part under sequence parallelism), B batch, H hidden, F width; t = size of tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group, ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import ModelConfig, MoEConfig
from labkit.parallel import mappings
from labkit.parallel.layers import NATIVE, Precision, column_parallel_linear
from labkit.parallel.mlp import ParallelMLP
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import Seed, make_parameter


class SharedExpertGate(nn.Module):
    """sigmoid(x w): the share of the shared experts' output that a token takes.

    Holds `weight` [1, H], whole on every rank.
    """

    def __init__(self, name: str, hidden: int, *, sequence_parallel: bool, **made: Any) -> None:
        super().__init__()
        self.weight = make_parameter(f"{name}.weight", (1, hidden), **made)
        record_of(self.weight).sequence_parallel = sequence_parallel

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, 1], between 0 and 1."""
        return torch.sigmoid(x_SBH @ self.weight.t())


class SharedExpertsStage(NamedTuple):
    """The shared experts between two of their stages."""

    cached_stage: Tensor
    """Result of the last stage."""
    gate_score: Tensor | None
    """Result of the gate, [S, B, 1], for `get_output`; None without a gate."""


class SharedExpertMLP(nn.Module):
    """All shared experts of a layer as one MLP without bias, cut over tp like a dense one.

    Holds `fc1.weight`, `fc2.weight` and, with a gate, `gate.weight`.

    Args:
        name: name in the whole model, such as `layers.3.mlp.shared_experts`.
        model: `hidden` and `activation`.
        moe: `shared_expert_ffn_hidden` and `shared_expert_gate`.
        groups: `tp`.
        sequence_parallel: x is this rank's part of the sequence.
        The other arguments are as in `ParallelMLP`.

    Raises:
        ValueError: tp does not divide the width.
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
        std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        gradient_accumulation_fusion: bool = False,
        precision: Precision = NATIVE,
    ) -> None:
        super().__init__()
        assert moe.shared_expert_ffn_hidden is not None, "built only where the configuration has shared experts"
        self.name, self.group = name, groups.tp
        self.computed_in_stages = moe.shared_expert_overlap
        """True if the dispatcher calls the stages and not `forward`, so module hooks do not run (`ParamGather`)."""
        self.sequence_parallel = sequence_parallel and groups.tp.size > 1
        made: dict[str, Any] = {"seed": seed, "std": std, "dtype": dtype, "device": device}
        mlp = ParallelMLP(
            name,
            model.hidden,
            moe.shared_expert_ffn_hidden,
            group=groups.tp,
            activation=model.activation,
            bias=False,
            sequence_parallel=sequence_parallel,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            precision=precision,
            output_std=output_std,
            **made,
        )
        self.fc1, self.fc2, self.activation = mlp.fc1, mlp.fc2, mlp.activation
        self.gate = None
        if moe.shared_expert_gate:
            self.gate = SharedExpertGate(f"{name}.gate", model.hidden, sequence_parallel=self.sequence_parallel, **made)
        self._stream = torch.cuda.Stream() if moe.shared_expert_overlap and groups.device.type == "cuda" else None

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], summed over tp."""
        inner_SBF, _ = self.fc1(x_SBH)
        output_SBH, _ = self.fc2(self.activation(inner_SBF))
        return output_SBH if self.gate is None else output_SBH * self.gate(x_SBH)

    # ---- the same in stages ----

    def pre_forward_comm(self, x_SBH: Tensor) -> SharedExpertsStage:
        """Compute the gate, and pass the layer's input through f or the gather of the sequence."""
        enter = mappings.copy_to_tensor_model_parallel_region
        if self.sequence_parallel:
            enter = mappings.gather_from_sequence_parallel_region
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            x_SBH.record_stream(self._stream)
        with self._on_stream():
            gate_score = None if self.gate is None else self.gate(x_SBH)
            return SharedExpertsStage(enter(x_SBH, self.group), gate_score)

    def linear_fc1_forward_and_act(self, stage: SharedExpertsStage) -> SharedExpertsStage:
        """Compute the first projection, without communication, and the activation."""
        with self._on_stream():
            return stage._replace(cached_stage=self.activation(self._alone(self.fc1, stage.cached_stage)))

    def linear_fc2_forward(self, stage: SharedExpertsStage) -> SharedExpertsStage:
        """Compute the second projection: this rank's part of the sum."""
        with self._on_stream():
            return stage._replace(cached_stage=self._alone(self.fc2, stage.cached_stage))

    def post_forward_comm(self, stage: SharedExpertsStage) -> SharedExpertsStage:
        """Pass the sum through g, or the reduce-scatter of the sequence."""
        leave = mappings.reduce_from_tensor_model_parallel_region
        if self.sequence_parallel:
            leave = mappings.reduce_scatter_to_sequence_parallel_region
        with self._on_stream():
            return stage._replace(cached_stage=leave(stage.cached_stage, self.group))

    def get_output(self, stage: SharedExpertsStage) -> Tensor:
        """Return [S, B, H], gated. The current stream waits for it."""
        output, gate_score = stage
        with self._on_stream():
            output = output if gate_score is None else output * gate_score
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            output.record_stream(torch.cuda.current_stream())
        return output

    def join_stream(self) -> None:
        """Between two stages, make the current stream wait for the stages so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def follow_stream(self, stage: SharedExpertsStage) -> None:
        """Between two stages, make later stages wait for a stage that was computed on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            for result in stage:
                if result is not None:
                    result.record_stream(self._stream)

    def _alone(self, layer: Any, x: Tensor) -> Tensor:
        """Run a projection without communication, because the stages around it communicate."""
        plan = replace(layer.plan, group=Group("none", (0,), 0), sequence_parallel=False)
        return column_parallel_linear(x, layer.weight, None, plan)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with comm_scope(layer=self.name):
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):
                yield
