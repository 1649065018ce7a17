"""The two heads of BERT: masked words, and the order of two sentences.

Every rank of the tensor-parallel group holds the small matrices whole and computes the same, as Megatron-LM does. Only
the output layer after the masked-LM head is cut, along the vocabulary.

Shapes: S sequence (S/t under sequence parallelism), B batch, H hidden, V the vocabulary's columns on this rank.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from labkit.comm.ledger import comm_scope
from labkit.models.build import Build
from labkit.parallel.mappings import gather_from_sequence_parallel_region
from labkit.parallel.mlp import ACTIVATIONS
from labkit.parallel.parameters.weights import make_parameter
from labkit.plan.sizes import padded_vocab


class WholeLinear(nn.Module):
    """y = x W^T + b, [.., H] -> [.., O], whole on every rank. `weight` [O, H] is drawn by (seed, name); `bias` is 0."""

    def __init__(self, name: str, output_size: int, build: Build) -> None:
        super().__init__()
        shape = (output_size, build.config.hidden)
        self.weight = make_parameter(f"{name}.weight", shape, **build.drawn)
        self.bias = make_parameter(f"{name}.bias", (output_size,), fill=0.0, **build.factory_kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., O]."""
        return linear(x, self.weight, self.bias)


class MaskedLMHead(nn.Module):
    """norm(activation(dense(x))), and the bias of the output layer after it, [V], cut as the vocabulary is.

    Under sequence parallelism a rank sees its own positions, so the gradients of dense layer and norm are partial sums.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, group = build.config, build.group
        self.dense = WholeLinear("lm_head.dense", config.hidden, build)
        for parameter in self.dense.parameters():
            build.whole_here(parameter)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = build.norm("lm_head.norm")
        rows = padded_vocab(config, group.size)
        cut = {"group": group, "partition_dim": 0, "padded_rows": rows}
        self.bias = make_parameter("lm_head.bias", (config.vocab_size,), fill=0.0, **cut, **build.factory_kwargs)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], the input of the output layer."""
        return self.norm(self.activation(self.dense(x_SBH)))  # type: ignore[no-any-return]


class SentenceOrderHead(nn.Module):
    """dense(tanh(pooler(x))) of the first position, [CLS]: logits of "in order" and "swapped" (arXiv 1909.11942).

    Under sequence parallelism the first rank has the first position. Each rank gives its own first position, B x H
    elements, to an all-gather, and all ranks read the first rank's. Megatron-LM gathers all of S x B x H.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.pooler = WholeLinear("binary_head.pooler", build.config.hidden, build)
        self.dense = WholeLinear("binary_head.dense", 2, build)
        self.group, self.sequence_parallel = build.group, build.sequence_parallel

    def forward(self, x_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [B, 2]."""
        return self.dense(self.pooled(x_SBH))  # type: ignore[no-any-return]

    def pooled(self, x_SBH: Tensor) -> Tensor:
        """Return tanh(pooler(x)) of the first position: [S, B, H] -> [B, H], the same on all ranks."""
        first_BH = x_SBH[:1]
        if self.sequence_parallel:
            with comm_scope(layer="binary_head"):
                first_BH = gather_from_sequence_parallel_region(first_BH, self.group, tensor_parallel_output_grad=False)
        return self.pooler(first_BH[0]).tanh()
