"""Computing parts of a model chunk again in backward, as `model.recompute_granularity` and its companions say.

`full` keeps a layer's input and nothing else. `selective` recomputes parts that keep much and cost little (arXiv
2205.05198, section 5). One is core attention, because two small products make its S x S probabilities. Another is the
output of a norm, which is as large as its input. The third is the whole MLP.

Shapes: S sequence, B batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from labkit.config import ModelConfig
from labkit.parallel.random import RngTracker
from labkit.parallel.recompute import CheckpointWithoutOutput, checkpoint

Layer = Callable[..., Tensor]
Made = TypeVar("Made", Tensor, tuple[Any, ...])


class Recomputation:
    """The choice of one model chunk. While `active` is False, the chunk keeps everything."""

    def __init__(
        self, config: ModelConfig, rng: RngTracker | None = None, *, checkpoint: Callable[..., Any] = checkpoint
    ) -> None:
        """rng: random states that the layers draw from. checkpoint: called like `recompute.checkpoint`."""
        self.active, self._checkpoint = True, checkpoint
        self._rng = rng
        self.whole_layers = config.recompute_granularity == "full"
        """The granularity is `full`."""
        self._by_group = config.recompute_method == "uniform"
        self._count = config.recompute_num_layers
        self._modules = config.recompute_modules if config.recompute_granularity == "selective" else ()

    def selects(self, name: str) -> bool:
        """Return True for a part of a layer (`core_attn`, `layernorm`, `mlp`, `moe`) that is recomputed."""
        return name in self._modules

    def part(self, name: str, function: Callable[..., Tensor], *args: Tensor | None) -> Tensor:
        """Return `function(*args)`, a part of a layer, and recompute it in backward if it is selected."""
        if self.active and self.selects(name):
            return self._checkpoint(function, *args, rng=self._rng)
        return function(*args)

    def norm(self, norm: Layer, x_SBH: Tensor, consumer: Callable[[Tensor], Made]) -> Made:
        """Return `consumer(norm(x))`. If `layernorm` is selected, the norm's output is dropped and made again.

        A consumer may return several things; the gradient of any of their tensors brings the norm's output back.
        """
        if not (self.active and self.selects("layernorm")):
            return consumer(norm(x_SBH))
        dropped = CheckpointWithoutOutput()
        made = consumer(dropped.checkpoint(norm, x_SBH))
        given = (made,) if isinstance(made, Tensor) else [y for y in made if isinstance(y, Tensor)]
        dropped.discard_output_and_register_recompute(*given)
        return made

    def run_layers(self, layers: Iterable[Layer], x_SBH: Tensor, *context: Any) -> Tensor:
        """Run one layer after the other, `x = layer(x, *context)`. Tensors of `context` may want gradients.

        `full` by `uniform` keeps the input of each group of recompute_num_layers layers. `full` by `block` keeps only
        the input of each of the first recompute_num_layers layers, and everything of the rest.
        """
        run = list(layers)
        for start, stop, again in self._pieces(len(run)):
            piece = partial(_one_after_another, run[start:stop])
            x_SBH = self._checkpoint(piece, x_SBH, *context, rng=self._rng) if again else piece(x_SBH, *context)
        return x_SBH

    def _pieces(self, layers: int) -> list[tuple[int, int, bool]]:
        """Return (first layer, end, whether it is recomputed as one piece) of each run of layers."""
        if not (self.active and self.whole_layers):
            return [(0, layers, False)]
        if self._by_group:
            return [(i, min(i + self._count, layers), True) for i in range(0, layers, self._count)]
        front = min(self._count, layers)
        return [(i, i + 1, True) for i in range(front)] + [(front, layers, False)]


def _one_after_another(layers: Sequence[Layer], x_SBH: Tensor, *context: Any) -> Tensor:
    for layer in layers:
        x_SBH = layer(x_SBH, *context)
    return x_SBH
