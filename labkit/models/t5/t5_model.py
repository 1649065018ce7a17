"""T5 (arXiv 1910.10683), or any contiguous run of its layers: an encoder and a decoder, or stages of both.

    text_enc -> embedding -> encoder layers -> encoder.final_norm ----+
    text_dec -> embedding -> decoder layers (cross-attention) <-------+-> decoder.final_norm -> output -> loss

Layers count through both halves: with L layers in the encoder, layer L is the decoder's first. Parameters are named
`encoder.layers.3.mlp.fc1.weight` and `decoder.layers.0.cross_attention.kv.weight`. Both halves embed words by one table
and, in Megatron-LM's form, positions by another. `t5_layers.py` describes the two forms.

In a pipeline (`parallel.split_rank`) a stage holds layers of one half. Encoder stages send their hidden states. Decoder
stages send two tensors, their hidden states and the encoder's output, which every decoder layer reads. The decoder's
first stage has copies of the embeddings, and each stage of a half has a copy of the half's relative biases. The copies
start equal, and `finalize_model_grads` adds up their gradients.

Shapes: S positions of the encoder, T of the decoder, B batch, H hidden, V this rank's columns of the padded vocabulary.
With t tensor-parallel ranks under sequence parallelism, S and T are S/t and T/t.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups, half_of_pipeline
from labkit.comm.ledger import comm_scope
from labkit.config import ModelConfig
from labkit.models.blocks import TransformerLayer
from labkit.models.build import Build
from labkit.models.core_attention import scores_of_padding
from labkit.models.gpt import GPTModel
from labkit.models.t5.t5_layers import DecoderLayer, HalfSpec, RelativeBias
from labkit.parallel.layers import LinearPlan, column_parallel_linear
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import make_parameter
from labkit.plan.sizes import padded_vocab


class T5Half(nn.Module):
    """The layers of one half on this stage, their relative biases and, on the half's last stage, its final norm."""

    def __init__(self, build: Build, layers: Mapping[str, nn.Module], *, is_last: bool) -> None:
        """build: that of this half. layers: by their numbers in the half."""
        super().__init__()
        self.recompute, self.heads = build.recompute, build.config.heads // build.group.size
        self.is_encoder, self.parts = build.prefix == "encoder.", build.sequence_parts
        relative = build.config.position == "relative"
        bias = RelativeBias(f"{build.prefix}relative_bias", build, both_ways=self.is_encoder) if relative else None
        self.layers, self.relative_bias = nn.ModuleDict(dict(layers)), bias
        self.final_norm = build.norm(f"{build.prefix}final_norm") if is_last else None

    def forward(self, x_SBH: Tensor, padding: Tensor | None, *encoded_SBH: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H].

        padding: the scores of the encoder's padding, [1, n, 1, S]. encoded_SBH: the encoder's output, for a decoder.
        """
        own = self._biases(x_SBH)
        if self.is_encoder:
            mask = own if padding is None else padding if own is None else own + padding
            context = (None, mask)
        else:
            context = (*encoded_SBH, own, padding)
        x_SBH = self.recompute.run_layers(self.layers.values(), x_SBH, *context)
        return x_SBH if self.final_norm is None else self.final_norm(x_SBH)

    def _biases(self, x_SBH: Tensor) -> Tensor | None:
        """Return the relative biases [1, n, S, S], which also hide later positions in a decoder; None without them."""
        if self.relative_bias is None:
            return None
        length, batch = x_SBH.shape[0] * self.parts, x_SBH.shape[1]
        biases = self.relative_bias(length)
        if not self.is_encoder:
            biases = biases + biases.new_full((length, length), torch.finfo(biases.dtype).min / 2).triu(1)
        return biases.repeat(batch, 1, 1)[None]


class T5Model(GPTModel):
    """Layers `layers` of a T5, with embeddings and output layer where this stage has them; arguments as in `GPTModel`.

    `pre_process` is for the first stage of each half, `post_process` for the decoder's last.

    Raises:
        ValueError: sizes that tp does not divide, or an option this model does not have.
    """

    family = "t5"
    positions = ("learned", "relative")

    def __init__(self, config: ModelConfig, groups: ParallelGroups, *, layers: range, **options: Any) -> None:
        super().__init__(config, groups, layers=layers, **options)
        made, depth, build = list(self.layers.values()), config.layers, self._build
        encoders = {str(i): layer for i, layer in zip(layers, made) if i < depth}
        decoders = {str(i - depth): layer for i, layer in zip(layers, made) if i >= depth}
        ends_encoder, last = depth - 1 in layers, self.post_process
        self.layers, self.final_norm = nn.ModuleDict(), None  # they belong to the halves
        self.encoder = T5Half(_encoder(build), encoders, is_last=ends_encoder) if encoders else None
        self.decoder = T5Half(_decoder(build), decoders, is_last=last) if decoders else None
        self.output_bias = _output_bias(build) if last and config.bias else None
        tied = not config.untie_embeddings_and_output_weights
        self.output_scale = config.hidden**-0.5 if tied and config.position == "relative" else 1.0
        if groups.config.split_rank is not None:
            self._mark_copies(groups)

    def _mark_copies(self, groups: ParallelGroups) -> None:
        """Note the parameters that several stages of the pipeline hold; the first of them is not a copy."""
        half = half_of_pipeline(groups)
        if self.embedding is not None:
            words, second = record_of(self.embedding.word.weight), self.encoder is None
            words.shared_embedding, words.shared = True, second
            if self.embedding.position is not None:
                positions = record_of(self.embedding.position.weight)
                positions.copied_over, positions.shared = "pos_embd", second
        bias = (self.encoder or self.decoder).relative_bias  # pyright: ignore[reportOptionalMemberAccess]
        if bias is not None and half.size > 1:
            record = record_of(bias.weight)
            record.copied_over, record.shared = "pp_half", half.rank > 0

    def new_layer(self, index: int, build: Build) -> TransformerLayer:
        """Make layer `index` of the whole model: one of the encoder, or after its last layer one of the decoder."""
        depth = build.config.layers
        if index < depth:
            return TransformerLayer(index, _encoder(build))
        return DecoderLayer(index - depth, _decoder(build))

    def forward(  # type: ignore[override]
        self,
        text_enc_BS: Tensor | None,
        text_dec_BT: Tensor | None,
        enc_mask_BS: Tensor | None = None,
        labels_BT: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run this stage.

        Args:
            text_enc_BS: token ids for the encoder; used by its first stage only.
            text_dec_BT: token ids for the decoder; used by its first stage only.
            enc_mask_BS: 1 for a token of `text_enc_BS`, 0 for padding, which no position attends to; used by every
                stage. None means that there is no padding.
            labels_BT: the tokens to predict, each following that of `text_dec_BT`; used by the last stage only.

        Returns:
            encoded_SBH from a stage of the encoder alone; (hidden_TBH, encoded_SBH) from one of the decoder that is not
            the last. The last gives loss_BT (per token, float32 at least), or without labels logits_TBV (this rank's
            columns, padding included).

        Raises:
            ValueError: no input, a sequence longer than the model's, or an id outside the vocabulary.
        """
        if self.encoder is not None:
            x_SBH = self._first_hidden(text_enc_BS)
            padding = self._padding(enc_mask_BS, x_SBH)
            encoded_SBH = self.encoder(x_SBH, padding)
            if self.decoder is None:
                return encoded_SBH  # type: ignore[no-any-return]
            x_TBH = self._first_hidden(text_dec_BT)
        else:
            x_TBH, encoded_SBH = self._received(text_dec_BT)
            padding = self._padding(enc_mask_BS, x_TBH)
        assert self.decoder is not None, "a stage has layers of the encoder, the decoder or both"
        x_TBH = self.decoder(x_TBH, padding, encoded_SBH)
        if not self.post_process:
            return x_TBH, encoded_SBH
        x_TBH = x_TBH if self.output_scale == 1.0 else x_TBH * self.output_scale
        return self._logits(x_TBH) if labels_BT is None else self._loss(x_TBH, labels_BT, self.output_bias)

    def _received(self, text_dec_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (hidden states, the encoder's output) for a stage that has only layers of the decoder."""
        given: Any = self._input_SBH
        if given is None:
            raise ValueError("a decoder's stage reads the encoder's output; give it set_input_tensor before forward")
        if self.embedding is None:
            return given[0], given[1]
        return self._first_hidden(text_dec_BT), given

    def _padding(self, enc_mask_BS: Tensor | None, like: Tensor) -> Tensor | None:
        heads = self.config.heads // self.group.size
        return None if enc_mask_BS is None else scores_of_padding(enc_mask_BS, heads, like.dtype)

    def _logits(self, x_TBH: Tensor) -> Tensor:
        """Return this rank's columns of the logits, [T, B, V]; f is included."""
        plan = LinearPlan("output", self.group, self.sequence_parallel, self.fusion)
        with comm_scope(layer="output"):
            return column_parallel_linear(x_TBH, self.output_weight_VH, self.output_bias, plan)


def _encoder(build: Build) -> Build:
    return build.half("encoder.", HalfSpec(causal=False))


def _decoder(build: Build) -> Build:
    return build.half("decoder.", HalfSpec(causal=True))


def _output_bias(build: Build) -> nn.Parameter:
    """Return the bias of the output layer, [V], cut as the vocabulary is; Megatron-LM's T5 has one."""
    cut = {"group": build.group, "partition_dim": 0, "padded_rows": padded_vocab(build.config, build.group.size)}
    return make_parameter("output_bias", (build.config.vocab_size,), fill=0.0, **cut, **build.factory_kwargs)
