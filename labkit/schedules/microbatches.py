"""One microbatch at a time: its data and its loss.

- `reader`: the item of a data iterator that a forward reads.
- `MicrobatchLosses`: the loss on the last stage, and its weight on the way backward.
- `AttachedLosses`: losses that a layer attaches to its output and the loss function never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from labkit.comm.collectives import all_reduce
from labkit.comm.groups import Group
from labkit.comm.ledger import comm_scope

# ---- data ----


class Reader:
    """Reads the iterator itself, because microbatches run in order. The iterator is None where a rank has no data."""

    def __init__(self, iterator: Any, microbatches: int) -> None:
        self.iterator, self._microbatches = iterator, microbatches
        self.wanted = 0
        """Microbatch of the next forward."""

    def _given(self) -> int:
        """Return the number of microbatches that the iterator gave."""
        return self.wanted

    def ran_short(self, stage: int, chunk: int) -> ValueError:
        """Return the error of a forward that found no more data."""
        return ValueError(
            f"stage {stage} (chunk {chunk} of its rank) found no data for microbatch {self.wanted}: its data "
            f"iterator had enough for {self._given()} of the {self._microbatches} microbatches of a step. Give each "
            f"chunk an iterator of its own with data for {self._microbatches}, or run fewer microbatches"
        )


class ReorderingReader(Reader):
    """Gives a forward step that calls `next` once its own microbatch, and keeps what it skips for later.

    The schedules of the sources run the microbatches of a chunk in order. A user's own schedule may not, and still all
    stages of a microbatch must see the same data.
    """

    def __init__(self, source: Iterator[Any], microbatches: int) -> None:
        super().__init__(self, microbatches)
        self._source = source
        self._kept: dict[int, Any] = {}
        self._count = 0

    def _given(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self.wanted not in self._kept:
            self._kept[self._count] = next(self._source)
            self._count += 1
        return self._kept.pop(self.wanted)


def reader(iterator: Any, order: Sequence[int]) -> Reader:
    """Read `iterator`, which yields the microbatches of a chunk in order, for forwards in this `order`."""
    if iterator is None or all(first < second for first, second in pairwise(order)):
        return Reader(iterator, len(order))
    return ReorderingReader(iterator, len(order))


# ---- losses ----


class MicrobatchLosses:
    """Losses and reports of one run, on the rank of the last stage."""

    def __init__(self, count: int, cp: Group, num_tokens: Any, *, per_token: bool, backward: bool, non_loss: bool):
        """count: microbatches of a step. num_tokens: a zero, to which the tokens of each microbatch are added.

        per_token: leave a three-item loss unscaled. backward: a loss is needed. non_loss: collect other data instead.
        """
        self._count, self._cp, self.num_tokens = count, cp, num_tokens
        self._per_token, self._backward, self._non_loss = per_token, backward, non_loss
        self.reports: dict[int, Any] = {}
        """By microbatch, the metrics that the loss function gave."""
        self.loss_weights: dict[int, float] = {}
        """By microbatch, the weight of its loss on the way backward; 1 where it has none here."""

    def loss(self, microbatch: int, output: Any, loss_func: Callable[..., Any] | None) -> Any:
        """Return the loss of a last stage's output. Its weight is left to the backward: with it the gradients of all
        microbatches add up to those of their mean. Multiplied into the loss, it would be one more operation each way,
        while all ranks wait."""
        if loss_func is None:
            if self._backward and getattr(output, "numel", lambda: 0)() != 1:
                raise ValueError(
                    "the forward step of the last stage gave no loss function, and its output is not one number that "
                    "could be the loss; return (output, loss function)"
                )
            self.reports[microbatch] = output
            return output
        if self._non_loss:
            self.reports[microbatch] = loss_func(output, non_loss_data=True)
            return output
        returned = loss_func(output)
        if not isinstance(returned, tuple | list) or len(returned) not in (2, 3):
            given = f"{len(returned)} items" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
            raise ValueError(f"the loss function returned {given}: (loss, metrics) or (sum, tokens, metrics)")
        if len(returned) == 3:
            loss, tokens, self.reports[microbatch] = returned
            tokens = self.num_tokens.new_zeros(()) + tokens  # a number becomes a tensor
            self.num_tokens += tokens.to(self.num_tokens)
            if self._per_token:
                return loss
            self.loss_weights[microbatch] = 1 / self._count
            return self._mean(loss, tokens)
        if self._per_token:
            raise ValueError("calculate_per_token_loss needs a loss function that returns (sum, tokens, metrics)")
        loss, self.reports[microbatch] = returned
        self.loss_weights[microbatch] = self._cp.size / self._count
        return loss

    def _mean(self, loss_sum: Any, tokens: Any) -> Any:
        """Return this rank's part of the microbatch's mean loss, times cp because gradients are averaged over cp as
        well.

        Its positions and those of the other ranks of cp are parts of the same samples, and may count unequal numbers of
        tokens. The sum is divided by the number in the samples.
        """
        with comm_scope(layer="loss", phase="forward"):
            tokens = all_reduce(tokens, self._cp, in_place=False)
        return loss_sum * self._cp.size / tokens.clamp(min=1)


class AttachedLosses:
    """The modules of a rank's chunks that attach losses: those with a method `set_aux_loss_scale`.

    Mixture of experts has such losses (`labkit.moe.balance`). Their gradient enters the backward of the layer itself,
    on any stage and in any action. So it misses the runtime's factors of the model's loss: loss scale, mean over
    microbatches, and the factor that undoes the average over cp. All three are the same for every microbatch of a step,
    so each layer is told once, before the first. No schedule can make that wrong.
    """

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
        """Tell all modules, before the forwards of a step, by which `loss_scale` the model's loss is multiplied."""
        for module in self.modules:
            module.set_aux_loss_scale(loss_scale, num_microbatches=self._count, tokens_per_microbatch=self._tokens)
