"""BERT (arXiv 1810.04805), or any contiguous run of its layers, in both layouts of figure 7 of arXiv 1909.08053.

    pre    x + attention(norm(x)), x + mlp(norm(x)); a final norm        figure 7b, GPT's layers
    post   norm(x + attention(x)), norm(x + mlp(x)); norm(embeddings)    figure 7a, the original

The layers of `pre` keep the sum of all branches in the residual stream, so the gradient reaches the first layer
unchanged. In `post` every norm is between a layer and the loss, and the paper reports that deep models of this layout
become unstable.

Every position sees every other position of its sample, except padding. Parameters have the same names in both layouts:
`layers.3.attention.norm` belongs to the attention half of layer 3, whether it comes before or after that half.

Shapes: S sequence, B batch, H hidden, V this rank's columns of the padded vocabulary, n = B x heads of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as lookup

from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import ModelConfig
from labkit.models.bert.bert_heads import MaskedLMHead, SentenceOrderHead
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.models.core_attention import scores_of_padding
from labkit.models.embedding import Embedding, Rotary
from labkit.models.gpt import GPTModel
from labkit.parallel.layers import LinearPlan, column_parallel_linear
from labkit.parallel.parameters.weights import make_parameter
from labkit.parallel.vocab.token_ids import check_token_ids
from labkit.plan.sizes import NUM_TOKENTYPES


class TokenTypeEmbedding(nn.Module):
    """A learned vector for tokens of the first sentence and one for those of the second: [2, H], whole on every rank.

    Under sequence parallelism a rank looks up its own positions, so its gradient is a partial sum.
    """

    def __init__(self, name: str, build: Build) -> None:
        super().__init__()
        shape = (NUM_TOKENTYPES, build.config.hidden)
        self.weight = build.whole_here(make_parameter(f"{name}.weight", shape, **build.drawn))
        self.parts, self.part = build.sequence_parts, build.group.rank if build.sequence_parallel else 0

    def forward(self, types_BS: Tensor) -> Tensor:
        """[B, S] -> this rank's part of [S, B, H]. TokenIdError for a type that is neither 0 nor 1."""
        types_SB = check_token_ids(types_BS, NUM_TOKENTYPES, "token type").t()
        return lookup(types_SB.chunk(self.parts)[self.part], self.weight)


class BertEmbedding(Embedding):
    """Words, positions and token types: [B, S] -> [S, B, H], normalised in the layout `post`.

    Without the sentence-order head (`model.bert_binary_head`) there are no token types.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        config = build.config
        self.tokentype = TokenTypeEmbedding("embedding.tokentype", build) if config.bert_binary_head else None
        self.norm = build.norm("embedding.norm") if config.norm_placement == "post" else None

    def forward(
        self, tokens_BS: Tensor, position_ids_BS: Tensor | None = None, types_BS: Tensor | None = None
    ) -> Tensor:
        """[B, S] -> [S, B, H]. types_BS: 0 for tokens of the first sentence, 1 for those of the second; None is all 0.

        Raises TokenIdError for an id outside the vocabulary, and for a token type that is neither 0 nor 1.
        """
        ids_BS = check_token_ids(tokens_BS, self.word.vocab_size)
        x_SBH = self.word(ids_BS.t(), check_ids=False)
        if self.position is not None:
            x_SBH = x_SBH + self.position(tokens_BS.shape[1], position_ids_BS)
        if self.tokentype is not None:
            x_SBH = x_SBH + self.tokentype(torch.zeros_like(tokens_BS) if types_BS is None else types_BS)
        if self.norm is not None:
            x_SBH = self.norm(x_SBH)
        return self.dropout(x_SBH)


class PostNormLayer(TransformerLayer):
    """norm(x + attention(x)), then norm(x + mlp(x)): the residual stream is normalised after each addition."""

    def forward_attention(self, x_SBH: Tensor, rotary: Rotary | None, *mask: Tensor) -> Tensor:
        """Compute the first half, norm(x + attention(x))."""
        attention = self.attention
        mixed, _ = attention.qkv(x_SBH)
        made_SBH, _ = attention.proj(attention.attend(mixed, rotary, *mask))
        return attention.norm(x_SBH + self.dropout(made_SBH))  # type: ignore[no-any-return]

    def forward_mlp(self, x_SBH: Tensor) -> Tensor:
        """Compute the second half, norm(x + mlp(x)). Backward computes the MLP again where configured."""
        made_SBH = self.recompute.part(self.part, self.mlp, x_SBH)
        norm: Any = self.mlp.norm
        return norm(self.add_mlp(made_SBH, x_SBH))  # type: ignore[no-any-return]


class BertModel(GPTModel):
    """Layers `layers` of a BERT, with embeddings and heads where this stage has them. Arguments are as in `GPTModel`.

    Raises:
        ValueError: sizes that tp does not divide, or an option this model does not have.
    """

    family = "bert"
    embedding_type = BertEmbedding

    def __init__(self, config: ModelConfig, groups: ParallelGroups, **options: Any) -> None:
        super().__init__(config, groups, **options)
        build, last = self._build, self.post_process
        if config.norm_placement == "post":
            self.final_norm = None  # the last layer ends in a norm
        self.lm_head = MaskedLMHead(build) if last else None
        self.binary_head = SentenceOrderHead(build) if last and config.bert_binary_head else None

    def new_layer(self, index: int, build: Build) -> TransformerLayer:
        """Make layer `index` of the whole model, in the configured layout."""
        return (PostNormLayer if build.config.norm_placement == "post" else TransformerLayer)(index, build)

    def forward(  # type: ignore[override]
        self,
        tokens_BS: Tensor | None,
        types_BS: Tensor | None = None,
        padding_mask_BS: Tensor | None = None,
        labels_BS: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Run this stage.

        Args:
            tokens_BS: token ids; used by the first stage only.
            types_BS: 0 for tokens of the first sentence, 1 for those of the second; used by the first stage only.
            padding_mask_BS: 1 for a token, 0 for padding, which no position attends to; used by every stage. None
                means that there is no padding.
            labels_BS: the words that the masks hide, any token id elsewhere; used by the last stage only.
            position_ids: positions [B, S], or [1, S] for all samples; None means 0, 1, ...

        Returns:
            hidden_SBH from a stage that is not the last. The last gives loss_BS (per token, float32 at least), or
            without labels logits_SBV (this rank's columns, padding included). With it come the logits_B2 of the
            sentence order, or None without that head.

        Raises:
            ValueError: no input, a sequence longer than the model's, or an id outside the vocabulary.
        """
        x_SBH = self._first_hidden(tokens_BS, position_ids, types_BS)
        rotary = None if self.rotary is None else self.rotary(x_SBH, position_ids)
        heads = self.config.heads // self.group.size
        mask = () if padding_mask_BS is None else (scores_of_padding(padding_mask_BS, heads, x_SBH.dtype),)
        with self.precision.region():
            x_SBH = self.recompute.run_layers(self.layers.values(), x_SBH, rotary, *mask)
        if self.final_norm is not None:
            x_SBH = self.final_norm(x_SBH)
        if self.lm_head is None:
            return x_SBH
        order_B2 = None if self.binary_head is None else self.binary_head(x_SBH)
        x_SBH, bias_V = self.lm_head(x_SBH), self.lm_head.bias
        return self._logits(x_SBH, bias_V) if labels_BS is None else self._loss(x_SBH, labels_BS, bias_V), order_B2

    def _logits(self, x_SBH: Tensor, bias_V: Tensor) -> Tensor:
        """Return this rank's columns of the logits, [S, B, V]; f is included."""
        plan = LinearPlan("output", self.group, self.sequence_parallel, self.fusion)
        with comm_scope(layer="output"):
            return column_parallel_linear(x_SBH, self.output_weight_VH, bias_V, plan)
