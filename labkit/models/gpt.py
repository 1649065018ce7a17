"""GPT, or any contiguous run of its layers: one class for the whole model and for the chunk that runs one stage.

A stage with `pre_process` embeds tokens, one with `post_process` ends with logits or the loss. Parameter names carry
the layer's global index, so a tensor has the same name in every layout.

Under sequence parallelism hidden states are [S/t, B, H] from the embedding to the output layer, also between stages.
Tokens, labels and losses cover whole sequences on every rank.

Shapes: S sequence, B batch, H hidden, V this rank's columns of the padded vocabulary; t = tensor-parallel size.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups, cut_group
from labkit.config import ModelConfig, MoEConfig
from labkit.models.attention import kv_copies
from labkit.models.blocks import TransformerLayer
from labkit.models.build import LOCAL, Build, LayerSpec
from labkit.models.chunk_parts import ChunkParts
from labkit.models.embedding import Embedding, OutputLayer, RotaryTable
from labkit.moe.layer import MoELayer
from labkit.parallel.context.zigzag import zigzag_positions
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.random import RngTracker, model_parallel_seed
from labkit.parallel.vocab.cross_entropy import linear_cross_entropy
from labkit.parallel.vocab.token_ids import check_token_ids
from labkit.parallel.vocab.vocab_parallel import padded_vocab_size, parallel_lm_logits


class GPTModel(nn.Module):
    """Layers `layers` of a GPT, with embedding and output layer where this stage has them.

    Args:
        config: shape of the whole model. GPT-2 by default; RoPE, RMSNorm, SwiGLU, grouped-query attention, an untied
            output and no biases give Llama.
        moe: which layers have experts, and how; None means none.
        groups: this rank's groups.
        layers: global indices of the layers held here (`stage_layers`).
        pre_process: hold the embeddings; otherwise the input comes through `set_input_tensor`.
        post_process: hold the final norm and the output layer.
        seed: seed of weights and dropout. Weights depend on (seed, name) alone, never on the layout.
        dtype: type of parameters and activations.
        device: None means `groups.device`.
        gradient_accumulation_fusion: linear layers add weight gradients to `main_grad` where it exists.
        label_smoothing: smoothing of the loss in training; in evaluation mode the loss is the plain negative
            log-likelihood.
        rng: random states for dropout and jitter, shared by the chunks of a rank; None makes them if they are needed.
        spec: parts of the layers, and the precision of their products (`labkit.train.layer_spec`).
        tied_weight_VH: the word embedding, if another chunk of this rank has it and the output layer uses it too; this
            chunk then has no output weight to count, update or save.

    Raises:
        ValueError: sizes that tp does not divide, or an option this model does not have.
    """

    family: ClassVar[str] = "gpt"
    """The value of `model.family`; BERT, T5 and Mamba have parts of their own in the places of these."""
    positions: ClassVar[tuple[str, ...]] = ("learned", "rope", "none")
    embedding_type: ClassVar[type[Embedding]] = Embedding

    def __init__(
        self,
        config: ModelConfig,
        groups: ParallelGroups,
        *,
        layers: range,
        moe: MoEConfig | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        gradient_accumulation_fusion: bool = False,
        label_smoothing: float = 0.0,
        rng: RngTracker | None = None,
        spec: LayerSpec = LOCAL,
        tied_weight_VH: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        _check(type(self), config, spec)
        if (copies := kv_copies(config, groups.tp.size)) > 1:  # a rank without a layer joins in making the group
            cut_group(groups, groups.tp, groups.tp.size // copies)
        moe = moe or MoEConfig()
        self.rng = rng or (model_parallel_seed(seed, groups) if draws(config, moe) else None)
        self.precision = spec.precision(groups, device)
        build = Build(
            config=config,
            group=groups.tp,
            groups=groups,
            moe=moe,
            seed=seed,
            rng=self.rng,
            dtype=dtype,
            device=groups.device if device is None else device,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            sequence_parallel=groups.config.sequence_parallel,
            cp=groups.cp,
            cp_comm_type=groups.config.cp_comm_type,
            spec=spec,
            precision=self.precision,
        )
        self.aux_loss_scale = build.aux_loss_scale
        self.config, self.group, self.cp, self.recompute = config, groups.tp, groups.cp, build.recompute
        self.sequence_parallel, self.sequence_parts = build.sequence_parallel, build.sequence_parts
        self.pre_process, self.post_process = pre_process, post_process
        self.label_smoothing, self.fusion = label_smoothing, gradient_accumulation_fusion
        self.padded_vocab = padded_vocab_size(config.vocab_size, config.make_vocab_size_divisible_by, groups.tp.size)
        self._build = build
        self.embedding = self.embedding_type(build) if pre_process else None
        self.layers = nn.ModuleDict({str(index): self.new_layer(index, build) for index in layers})
        self.final_norm = build.norm("final_norm") if post_process else None
        self._tied_weight: tuple[nn.Parameter, ...] = ()  # in a tuple, so that it is no parameter of this module
        if tied_weight_VH is not None:
            self._tied_weight = (tied_weight_VH,)
            record_of(tied_weight_VH).shared_embedding = False  # one weight: no copy to add
        tied_here = tied_weight_VH is not None or (pre_process and not config.untie_embeddings_and_output_weights)
        self.output = OutputLayer(build) if post_process and not tied_here else None
        self._input_SBH: Tensor | None = None
        self.rotary = RotaryTable(build) if config.position == "rope" else None

    @property
    def output_weight_VH(self) -> Tensor:
        """This rank's rows of the output layer; the word embedding itself where first and last stage are here."""
        if self.output is not None:
            return self.output()
        if self._tied_weight:
            return self._tied_weight[0]
        assert self.embedding is not None, "only a stage with post_process has an output layer"
        return self.embedding.word.weight

    def new_layer(self, index: int, build: Build) -> nn.Module:
        """Make layer `index` of the whole model."""
        return TransformerLayer(index, build)

    def set_input_tensor(self, x_SBH: Tensor | None) -> None:
        """Give the output of the previous stage; the next `forward` starts from it. The first stage ignores it."""
        self._input_SBH = x_SBH

    def moe_layers(self) -> list[MoELayer]:
        """Return the layers of this chunk that have experts, in their order."""
        return [module for module in self.layers.modules() if isinstance(module, MoELayer)]

    def layer_context(self, seq_length: int) -> tuple[Tensor, ...]:
        """Return samples of each layer's arguments after x, for CUDA graphs: rotary tables of `seq_length`, or none."""
        if self.rotary is None:
            return ()
        rows = slice(seq_length // self.cp.size)
        return tuple(table[rows, None, None].clone() for table in (self.rotary.cos, self.rotary.sin))

    def set_activation_checkpointing(self, on: bool) -> None:
        """Make the next forwards recompute as configured (True), or keep everything (False)."""
        self.recompute.active = on

    def forward(
        self, tokens_BS: Tensor | None, position_ids: Tensor | None = None, labels_BS: Tensor | None = None
    ) -> Tensor:
        """Run this stage.

        Args:
            tokens_BS: token ids; used by the first stage only.
            position_ids: positions [B, S], or [1, S] for all samples; None means those that this rank holds.
            labels_BS: the tokens to predict; used by the last stage only.

        Returns:
            hidden_SBH from a stage that is not the last. The last gives loss_BS (per token, float32 at least), or
            without labels logits_SBV (this rank's columns, padding included).

        Raises:
            ValueError: no input, a sequence longer than the model's, or an id outside the vocabulary.
        """
        if position_ids is None:
            position_ids = self._own_positions(tokens_BS)
        x_SBH = self._first_hidden(tokens_BS, position_ids)
        rotary = None if self.rotary is None else self.rotary(x_SBH, position_ids)
        with self.precision.region():
            if self.recompute.whole_layers:
                x_SBH = self.recompute.run_layers(self.layers.values(), x_SBH, rotary)
            else:
                for layer in self.layers.values():
                    x_SBH = layer(x_SBH, rotary)
        if self.final_norm is None:
            return x_SBH
        x_SBH = self.final_norm(x_SBH)
        if labels_BS is None:
            return parallel_lm_logits(
                x_SBH, self.output_weight_VH, self.group, sequence_parallel=self.sequence_parallel
            )
        return self._loss(x_SBH, labels_BS)

    def in_parts(
        self, tokens_BS: Tensor | None, position_ids: Tensor | None = None, labels_BS: Tensor | None = None
    ) -> ChunkParts:
        """Return this forward as parts, between which those of another microbatch can run (merged pairs).

        Arguments, outputs and errors are those of `forward`; what it returns comes from the parts' `finish`.
        """
        if position_ids is None:
            position_ids = self._own_positions(tokens_BS)
        return ChunkParts(
            [layer.parts() for layer in self.layers.values()],  # pyright: ignore[reportCallIssue]
            partial(self._first_hidden, tokens_BS, position_ids),
            lambda x_SBH: None if self.rotary is None else self.rotary(x_SBH, position_ids),
            partial(self._after_layers, labels_BS) if self.post_process else None,
            ties=self.pre_process and self.post_process and self.output is None,
        )

    def _after_layers(self, labels_BS: Tensor | None, x_SBH: Tensor) -> Tensor:
        """Return what the last stage makes of the hidden states: losses, or logits without labels."""
        assert self.final_norm is not None
        x_SBH = self.final_norm(x_SBH)
        if labels_BS is not None:
            return self._loss(x_SBH, labels_BS)
        return parallel_lm_logits(x_SBH, self.output_weight_VH, self.group, sequence_parallel=self.sequence_parallel)

    def _loss(self, x_SBH: Tensor, labels_BS: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of every position, [B, S], smoothed only in training. The caller picks positions."""
        labels_BS = check_token_ids(labels_BS, self.config.vocab_size, "label")
        loss_SB = linear_cross_entropy(
            x_SBH,
            self.output_weight_VH,
            labels_BS.t(),
            self.group,
            vocab_size=self.config.vocab_size,
            padded_vocab_size=self.padded_vocab,
            bias_V=bias_V,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            gradient_accumulation_fusion=self.fusion,
            sequence_parallel=self.sequence_parallel,
            check_ids=False,
            name="loss",
        )
        return loss_SB.t()

    def _first_hidden(self, tokens_BS: Tensor | None, *with_tokens: Tensor | None) -> Tensor:
        """Return the embedded tokens, or what the previous stage sent. with_tokens: more arguments of the embedding."""
        if self.embedding is None:
            if self._input_SBH is None:
                raise ValueError("this stage does not embed tokens; give it set_input_tensor(x_SBH) before forward")
            return self._input_SBH
        if tokens_BS is None:
            raise ValueError("the first stage needs tokens_BS")
        length, parts, most = tokens_BS.shape[1], self.sequence_parts, self.config.seq_length
        if length * self.cp.size > most:
            raise ValueError(f"a sequence of {length * self.cp.size} tokens is longer than model.seq_length = {most}")
        if length % parts:
            raise ValueError(
                f"sequence parallelism cuts a sequence over tp = {parts} ranks, and {length} tokens are not a multiple "
                f"of it; pad them to {-(-length // parts) * parts}"
            )
        return self.embedding(tokens_BS, *with_tokens)

    def _own_positions(self, tokens_BS: Tensor | None) -> Tensor | None:
        """Return the positions [1, S] of this rank's two chunks of a sequence (`zigzag.py`); None if it holds all."""
        if self.cp.size == 1:
            return None
        if tokens_BS is not None and self.embedding is not None:
            length, device = tokens_BS.shape[1], tokens_BS.device
        elif self._input_SBH is not None:
            length, device = self._input_SBH.shape[0] * self.sequence_parts, self._input_SBH.device
        else:
            return None  # refused below
        return zigzag_positions(length * self.cp.size, self.cp.size, self.cp.rank, device=device)[None]


def draws(config: ModelConfig, moe: MoEConfig) -> bool:
    """Return True if a forward draws random numbers."""
    drops = config.embedding_dropout or config.attention_dropout or config.hidden_dropout
    return bool(drops or (moe.num_experts and moe.input_jitter))


def _check(model: type[GPTModel], config: ModelConfig, spec: LayerSpec) -> None:
    allowed = {"family": (model.family,), "position": model.positions, "norm": ("layernorm", "rmsnorm")}
    for name, choices in allowed.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{model.__name__} has no {name} {getattr(config, name)!r}; choose {' or '.join(choices)}")
    if config.transformer_impl != spec.transformer_impl:
        raise ValueError(
            f"model.transformer_impl is {config.transformer_impl}, and the given layers are {spec.transformer_impl}: "
            "give GPTModel spec=labkit.train.layer_spec(model, optim)"
        )
