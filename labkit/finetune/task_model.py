"""BERT with the head of a task in place of its own two, and the forward step that trains it.

| head  | from         | scores                                        | task            |
|-------|--------------|-----------------------------------------------|-----------------|
| pair  | [CLS]        | one for each class, or one for a pair of four | MNLI, QQP, RACE |
| token | each token   | one as the first, one as the last of a span   | SQuAD           |

The pair head begins with the pooler of the sentence-order head, whose pre-trained weights it takes. The loss is the
cross-entropy of the right class, pair, first token or last token, averaged over the labels and samples of a microbatch.

Shapes: B samples of a microbatch, C pairs of a sample, L labels of a sample, n scores of one label, S sequence, H
hidden. Under sequence parallelism a rank holds S/t positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import comm_scope
from labkit.config import ModelConfig
from labkit.models.bert.bert_heads import SentenceOrderHead, WholeLinear
from labkit.models.bert.bert_model import BertModel
from labkit.models.build import Build
from labkit.models.chunks import ModelProvider, build_model_chunk
from labkit.models.norm_and_dropout import Dropout
from labkit.parallel.mappings import gather_from_sequence_parallel_region


class PairHead(SentenceOrderHead):
    """dense(dropout(tanh(pooler(x)))) of the first position: [S, B, H] -> [B, outputs]."""

    def __init__(self, outputs: int, build: Build) -> None:
        super().__init__(build)
        self.dense = WholeLinear("task_head.dense", outputs, build)
        self.dropout = Dropout(build.config.hidden_dropout)

    def forward(self, x_SBH: Tensor, padding_mask_BS: Tensor | None = None) -> Tensor:
        """Score pairs: [S, B, H] -> [B, outputs]."""
        return self.dense(self.dropout(self.pooled(x_SBH)))  # type: ignore[no-any-return]


class TokenHead(nn.Module):
    """dense(x) of every position: [S, B, H] -> [B, 2, S], its scores as first and as last token of the answer.

    Padding gets the lowest number of the type. Under sequence parallelism a rank scores its own positions and gathers
    the scores, 2 numbers per position, so its gradients of the weights are partial sums.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.dense = WholeLinear("task_head.dense", 2, build)
        for parameter in self.dense.parameters():
            build.whole_here(parameter)
        self.group, self.sequence_parallel = build.group, build.sequence_parallel

    def forward(self, x_SBH: Tensor, padding_mask_BS: Tensor | None = None) -> Tensor:
        """Score tokens: [S, B, H] -> [B, 2, S]."""
        scores_SB2 = self.dense(x_SBH)
        if self.sequence_parallel:
            with comm_scope(layer="task_head"):
                scores_SB2 = gather_from_sequence_parallel_region(
                    scores_SB2, self.group, tensor_parallel_output_grad=False
                )
        scores_B2S = scores_SB2.permute(1, 2, 0)
        if padding_mask_BS is None:
            return scores_B2S
        return scores_B2S.masked_fill(padding_mask_BS[:, None] == 0, torch.finfo(scores_B2S.dtype).min)


class BertForTask(BertModel):
    """The layers of a BERT, after which the last stage has the head of a task.

    The model has no output layer. So no weight is tied, and a pipeline has no gradients of two copies to sum.
    """

    def __init__(self, config: ModelConfig, groups: ParallelGroups, *, outputs: int | None, **options: Any) -> None:
        """outputs: scores that the head gives a pair of texts; None for the head that scores tokens."""
        super().__init__(config, groups, **options)
        self.output = self.lm_head = self.binary_head = None
        self.head: PairHead | TokenHead | None = None
        if self.post_process:
            self.head = TokenHead(self._build) if outputs is None else PairHead(outputs, self._build)

    def forward(  # type: ignore[override]
        self, tokens_BS: Tensor | None, types_BS: Tensor | None = None, padding_mask_BS: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [S, B, H]; on the last stage, the scores of the head."""
        x_SBH = super().forward(tokens_BS, types_BS, padding_mask_BS)
        assert isinstance(x_SBH, Tensor), "without its own heads BERT returns hidden states"
        return x_SBH if self.head is None else self.head(x_SBH, padding_mask_BS)


def task_provider(outputs: int | None) -> ModelProvider:
    """Return the `model_provider` of a BERT with the head of a task on the last stage."""
    return partial(build_model_chunk, kind=partial(BertForTask, outputs=outputs))


def task_forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
    """Run the forward step: return the scores of the next batch's pairs, and the function that computes their loss."""
    batch = next(data_iterator)
    tokens_BS, types_BS, mask_BS = (batch[f"{name}_BCS"].flatten(0, 1) for name in ("tokens", "types", "padding_mask"))
    return model(tokens_BS, types_BS=types_BS, padding_mask_BS=mask_BS), partial(task_loss, batch)


def task_loss(batch: dict[str, Tensor], scores: Tensor, non_loss_data: bool = False) -> Any:
    """Return (mean loss of the microbatch, what to report), the two-item form of a loss.

    scores: [B C, n] of pairs, or [B, 2, S] of tokens. non_loss_data: return `logits_BLn` and `index_B` instead.
    """
    labels_BL = batch["labels_BL"]
    wide = torch.promote_types(torch.float32, scores.dtype)
    logits_BLn = scores.reshape(*labels_BL.shape, -1).to(wide)
    if non_loss_data:
        return {"logits_BLn": logits_BLn.detach(), "index_B": batch["index_B"]}
    loss = cross_entropy(logits_BLn.flatten(0, 1), labels_BL.flatten())
    return loss, {"loss_sum": loss.detach(), "tokens": torch.ones_like(loss.detach())}
