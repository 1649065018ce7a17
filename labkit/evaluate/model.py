"""`CheckpointModel`: the weights of a checkpoint in a model that computes losses and chooses tokens, on tp x pp ranks.

    model = CheckpointModel("runs/a", {"tp": 2, "pp": 2})        # in every rank of a launch
    loss_BS = model.losses(tokens_BS, labels_BS)                 # the same on all ranks

Each pipeline rank holds one stage. A batch passes through the stages once: a stage receives hidden states, runs its
layers and sends them on. The last stage computes losses, or logits at the requested positions, and broadcasts the
result. The layout is chosen here and does not depend on the layout that saved the checkpoint.

Shapes: B samples, S positions, P requested positions of each sample, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from labkit.comm.collectives import all_gather, broadcast, gather_objects, irecv, isend
from labkit.comm.groups import Group, ParallelGroups, initialize_model_parallel
from labkit.config import ConfigError, ModelConfig, MoEConfig, RunConfig
from labkit.config.errors import counted
from labkit.evaluate.sampling import NO_TOKEN, NOT_FINITE
from labkit.models.attention import ParallelAttention
from labkit.models.build import Build
from labkit.models.chunks import DTYPES, build_model_chunk, build_model_chunks
from labkit.models.gpt import GPTModel
from labkit.parallel.layers import ColumnParallelLinear
from labkit.train.checkpoint.exchange import model_of
from labkit.train.checkpoint.inventory import chosen
from labkit.train.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from labkit.train.checkpoint.rank_state import RankWeights
from labkit.train.checkpoint.shard_files import Reader

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
"""Types in which an evaluation computes."""
_TRAINING_ONLY = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "num_microbatches_with_partial_activation_checkpoints",
    "transformer_impl",
    "attention_backend",
    "compile",
    "embedding_dropout",
    "attention_dropout",
    "hidden_dropout",
)
"""Fields of the model that an evaluation leaves at their defaults."""
_OF_A_BATCH = ("input_jitter", "capacity_factor", "drop_policy", "pad_to_capacity")
"""Fields of experts that it leaves at their defaults, too: with a capacity the tokens of a batch compete for places, so
a score would depend on the batch."""


def evaluation_config(manifest: Manifest, layout: Mapping[str, int], precision: str) -> RunConfig:
    """Return the configuration under which the model of a checkpoint is evaluated: its shape, and the given layout.

    layout: sizes of `tp` and `pp`.

    Raises:
        CheckpointError: the manifest describes no model of labkit.
        ConfigError: the layout does not fit the model; the message has all problems.
    """
    model, moe = model_of(manifest)
    model = replace(model, **{name: getattr(ModelConfig(), name) for name in _TRAINING_ONLY})
    made = RunConfig(model=model, moe=replace(moe, **{name: getattr(MoEConfig(), name) for name in _OF_A_BATCH}))
    return made.override({"optim.precision": precision, **layout})


def layout_problems(config: RunConfig, groups: ParallelGroups) -> list[str]:
    """Return everything that is wrong with the layout of an evaluation."""
    tp, pp, family = groups.tp.size, groups.pp.size, config.model.family
    if family in ("bert", "t5"):
        return [f"model.family = {family!r}: perplexity, LAMBADA and generation need one that predicts the next token"]
    if groups.world_size != tp * pp:
        ranks, needed = counted(groups.world_size, "rank"), counted(tp * pp, "rank")
        return [f"{ranks} started, but tp {tp} x pp {pp} needs {needed}; start as many, or change tp or pp"]
    if config.moe.num_experts and tp > 1:
        config = config.override({"parallel.sequence_parallel": True})  # as `_GPTUnderTp` builds layers with experts
    return config.problems(groups.world_size)


class _GPTUnderTp(GPTModel):
    """A GPT with experts. Only their inputs are sharded over tp, because the single new token of a pass cannot be."""

    def new_layer(self, index: int, build: Build) -> nn.Module:
        """Make layer `index`; its experts see this rank's share of the tokens."""
        has_experts = build.moe.is_moe_layer(index)
        layer: Any = super().new_layer(index, replace(build, sequence_parallel=has_experts))
        if has_experts:
            layer.attention = ParallelAttention(f"layers.{index}.attention", build)
            share = _ShareOfTokens(build.group)
            layer.mlp.register_forward_pre_hook(share.take)
            layer.mlp.register_forward_hook(share.join)
        return layer  # type: ignore[no-any-return]


class _ShareOfTokens:
    """Hooks of a layer's experts: before them each tp rank takes its share of the tokens, after them all ranks gather.

    The last shares are padded with zeros. These are routed to experts, too, but nothing reads their results.
    """

    def __init__(self, tp: Group) -> None:
        self._tp, self._shape = tp, torch.Size()

    def take(self, _: nn.Module, args: tuple[Any, ...]) -> Tensor:
        """Take this rank's share: [S, B, H] -> [T/t, 1, H], where T is S B padded to a multiple of t."""
        self._shape = args[0].shape
        x_TH = args[0].flatten(0, 1)
        filled_TH = pad(x_TH, (0, 0, 0, -len(x_TH) % self._tp.size))
        return filled_TH.chunk(self._tp.size)[self._tp.rank].unsqueeze(1).contiguous()

    def join(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Gather the shares: [T/t, 1, H] -> [S, B, H]."""
        whole_TH = all_gather(output, self._tp).flatten(0, 1)
        return whole_TH[: self._shape[:2].numel()].view(self._shape)


class CheckpointModel:
    """The model of a checkpoint on this rank. All ranks make it, and call its methods, together."""

    def __init__(
        self, checkpoint: str | Path, layout: Mapping[str, int] | None = None, *, step: int | None = None,
        precision: str = "fp32",
    ) -> None:  # fmt: skip
        """checkpoint: the folder of a run's checkpoints, of which `step` or the latest is read; or one of its steps.

        layout: sizes of `tp` and `pp`, such as {"tp": 2}. Without torch.distributed there is one rank.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or of another model; the same on all ranks.
            ConfigError: the model or the number of ranks does not allow the layout.
        """
        self.folder = chosen(Path(checkpoint), step)
        """The checkpoint, `.../step_00000020`."""
        self.manifest = read_manifest(self.folder)
        self.config = evaluation_config(self.manifest, layout or {}, precision)
        self.groups: ParallelGroups = initialize_model_parallel(self.config.parallel)
        if problems := layout_problems(self.config, self.groups):
            raise ConfigError(problems, source="the evaluation's layout")
        self.folder = gather_objects(self.folder, self.groups.world)[
            0
        ]  # a run may be saving, so all ranks read the checkpoint that rank 0 found
        self.manifest = read_manifest(self.folder)
        under_tp = self.config.moe.num_experts > 0 and self.groups.tp.size > 1
        provider = partial(build_model_chunk, kind=_GPTUnderTp if under_tp else None)
        [self.chunk] = build_model_chunks(self.config, self.groups, model_provider=provider)
        self.chunk.eval().requires_grad_(False)
        self._load()

    @property
    def seq_length(self) -> int:
        """Longest sequence of the model."""
        return self.config.model.seq_length

    @property
    def device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self.groups.device

    def _load(self) -> None:
        """Check every byte, each rank those of its share of the files, and fill parameters and buffers."""
        reader = Reader(self.folder)
        share = sorted(reader.manifest.files)[self.groups.world.rank :: self.groups.world.size]
        state = RankWeights([self.chunk], self.groups)
        own = [*reader.problems(share), *filter(None, [state.misfits(reader)])]
        if found := dict.fromkeys(word for words in gather_objects(own, self.groups.world) for word in words):
            raise CheckpointError("; ".join(found))
        state.load_weights(reader)
        reader.close()
        if self.device.type == "cpu":
            _store_wide_by_columns(self.chunk)

    # ---- a batch through the stages ----

    @torch.inference_mode()
    def losses(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the loss of each token in nats, -log p(label), [B, S], float32 at least; the same on all ranks."""
        loss_BS = self._through(tokens_BS, None, lambda chunk: chunk(tokens_BS, None, labels_BS))
        wide = torch.promote_types(torch.float32, DTYPES[self.config.optim.precision])
        return self._from_last(loss_BS, tokens_BS.shape, wide)

    @torch.inference_mode()
    def choose(
        self, tokens_BS: Tensor, positions_BP: Tensor, pick: Callable[[Tensor], Tensor],
        *, position_ids_BS: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the ids [B, P] that `pick` chooses from the logits at `positions_BP`; the same on all ranks.

        pick: logits [B, P, V] -> ids [B, P], int64. It runs on all ranks of the last stage, which have the same logits.

        Raises ValueError on all ranks for logits that are not finite.
        """

        def run(chunk: GPTModel) -> Tensor:
            with _only(chunk, positions_BP):
                return chunk(tokens_BS, position_ids_BS)

        logits_PBV = self._through(tokens_BS, position_ids_BS, run)
        ids_BP = None
        if logits_PBV is not None:
            whole = all_gather(logits_PBV, self.groups.tp, dim=-1)[..., : self.config.model.vocab_size]
            logits_BPV = whole.transpose(0, 1).to(torch.promote_types(torch.float32, whole.dtype))
            ids_BP = pick(logits_BPV).where(logits_BPV.amax(dim=-1).isfinite(), NO_TOKEN)
        chosen_BP = self._from_last(ids_BP, positions_BP.shape, torch.int64)
        if bool((chosen_BP == NO_TOKEN).any()):  # on all ranks alike, so that none waits for another
            raise ValueError(NOT_FINITE)
        return chosen_BP

    def _through(
        self, tokens_BS: Tensor, position_ids_BS: Tensor | None, last: Callable[[GPTModel], Tensor]
    ) -> Tensor | None:
        """Run this rank's stage; the last stage runs `last` and returns its result, the others None."""
        pp, (batch, length) = self.groups.pp, tokens_BS.shape
        if pp.rank > 0:
            shape, dtype = (length, batch, self.config.model.hidden), DTYPES[self.config.optim.precision]
            received = torch.empty(shape, dtype=dtype, device=self.device)
            self.chunk.set_input_tensor(irecv(received, pp, pp.ranks[pp.rank - 1]).wait())
        if pp.rank == pp.size - 1:
            return last(self.chunk)
        hidden_SBH = self.chunk(tokens_BS, position_ids_BS)
        isend(hidden_SBH.contiguous(), pp, pp.ranks[pp.rank + 1]).wait()
        return None

    def _from_last(self, result: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the result of the last stage, on every rank."""
        pp = self.groups.pp
        if result is None:
            result = torch.empty(shape, dtype=dtype, device=self.device)
        return broadcast(result.to(dtype).contiguous(), pp, src=pp.size - 1)


def _store_wide_by_columns(chunk: GPTModel) -> None:
    """Reorder matrices with more rows than columns in memory, not in shape.

    A pass of one token reads each weight once, and a CPU reads a wide projection faster by columns: the whole row of
    results is then summed at once, instead of one result after the other.
    """
    matrices: list[Tensor] = [module.weight for module in chunk.modules() if isinstance(module, ColumnParallelLinear)]
    if chunk.post_process:
        matrices.append(chunk.output_weight_VH)
    for matrix_OI in matrices:
        if len(matrix_OI) > matrix_OI.shape[1]:
            matrix_OI.data = matrix_OI.t().contiguous().t()


@contextmanager
def _only(chunk: GPTModel, positions_BP: Tensor) -> Iterator[None]:
    """Let the chunk compute its logits at these positions of each sample alone, instead of at all of them."""

    def pick(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden_SBH = args[0]
        index_PB1 = positions_BP.t().unsqueeze(-1)
        return (hidden_SBH.gather(0, index_PB1.expand(-1, -1, hidden_SBH.shape[-1])),)

    assert chunk.final_norm is not None, "only the last stage has logits"
    handle = chunk.final_norm.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()
