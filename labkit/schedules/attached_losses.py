"""How large the gradient of a loss must be that a layer attaches to its output and the loss function never sees.

Mixture of experts has such losses (`labkit.moe.balance`). Their gradient enters the backward of the layer itself, on
whatever stage and in whichever action that runs, so it misses what the runtime does to the model's loss: loss scale,
mean over microbatches, and the factor that undoes the average over cp. All three are the same for every microbatch of
a step, so each layer is told once, before the first; no schedule can make that wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AttachedLosses:
    """The modules of a rank's chunks that attach losses: those with a method `set_aux_loss_scale`."""

    def __init__(
        self, chunks: Sequence[Any], num_microbatches: int, per_token: bool, tokens_per_microbatch: int | None
    ) -> None:
        """per_token: the model's loss is a sum over tokens, divided by their number in the global batch at the end.

        tokens_per_microbatch: B x S of the whole sequence, for `per_token`; not this rank's part of it, as Megatron-LM
            had until its pull request 5047, or the losses would be tp x cp times too weak. Raises ValueError where it
            is missing.
        """
        all_modules = [module for chunk in chunks for module in chunk.modules()]
        self.modules = [module for module in all_modules if hasattr(module, "set_aux_loss_scale")]
        if self.modules and per_token and tokens_per_microbatch is None:
            raise ValueError(
                "calculate_per_token_loss divides all gradients by the tokens of the global batch, also those of "
                "load-balancing losses, which must be multiplied by them before: give tokens_per_microbatch = "
                "micro batch x sequence length, or to an entry point seq_length and micro_batch_size"
            )
        self._count, self._tokens = num_microbatches, tokens_per_microbatch if per_token else None

    def set_scale(self, loss_scale: Any) -> None:
        """Before the forwards of a step. loss_scale: what the model's loss is multiplied by for its backward."""
        for module in self.modules:
            module.set_aux_loss_scale(loss_scale, num_microbatches=self._count, tokens_per_microbatch=self._tokens)
