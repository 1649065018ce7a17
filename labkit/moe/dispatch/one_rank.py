"""The dispatcher of one rank that holds all experts: sort rows by expert, and back. Nothing is sent.

It is the readable form of the dispatchers that work across ranks, and their reference in tests.

Shapes: S, B, H, T, E, N as in `dispatcher.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.comm.groups import ParallelGroups
from labkit.config import MoEConfig
from labkit.moe.dispatch.dispatcher import MoETokenDispatcher
from labkit.moe.dispatch.host_copy import HostCopy
from labkit.moe.dispatch.permutation import permute, unpermute

__all__ = ["MoELocalTokenDispatcher"]


class MoELocalTokenDispatcher(MoETokenDispatcher):
    """All experts are on this rank: ep = etp = 1. Raises ValueError for other layouts."""

    def __init__(self, moe: MoEConfig, groups: ParallelGroups, **options: Any) -> None:
        super().__init__(moe, groups, **options)
        if self.ep.size > 1 or self.etp.size > 1:
            raise ValueError(
                f"the local dispatcher needs all experts on one rank, and ep = {self.ep.size}, etp = {self.etp.size}; "
                "set moe.dispatcher to alltoall or allgather"
            )
        self.handed_on = ["tokens_per_expert", "reversed_local_input_permutation_mapping"]

    def dispatch_preprocess(self, hidden_SBH: Tensor, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TH = self._flatten(hidden_SBH, probs_TE, map_TE)
        self.tokens_per_expert = map_TE.sum(dim=0)
        self._copy_to_host("before_permutation_1")
        rows = self._num_out_tokens(hidden_TH.shape[0], lambda: int(self._counts().sum()))
        rows_NH, probs_N, self.reversed_local_input_permutation_mapping = permute(
            hidden_TH, map_TE, probs_TE=probs_TE, num_out_tokens=rows
        )
        assert probs_N is not None
        return rows_NH, probs_N

    def _copy_to_host(self, point: str) -> None:
        if point == self.cuda_dtoh_point and not self.moe.pad_to_capacity:
            self._host_copy = HostCopy(self.tokens_per_expert)

    def _counts(self) -> Tensor:
        if self.moe.pad_to_capacity:
            capacity = self.capacity(self.hidden_shape[:-1].numel())
            # No operation of torch makes it, as in alltoall; torch.from_numpy would.
            return torch.frombuffer(np.full(self.num_experts, capacity), dtype=torch.int64)
        assert self._host_copy is not None, "counts are copied before their first use"
        return self._host_copy.wait()

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self._copy_to_host("before_ep_alltoall")
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return hidden, self._counts(), probs

    def combine_preprocess(self, output_NH: Tensor) -> Tensor:
        return output_NH

    def token_combine(self, hidden: Tensor) -> Tensor:
        return hidden

    def combine_postprocess(self, hidden: Tensor) -> Tensor:
        tokens = self.hidden_shape[:-1].numel()
        return unpermute(hidden, self.reversed_local_input_permutation_mapping, tokens).view(self.hidden_shape)
