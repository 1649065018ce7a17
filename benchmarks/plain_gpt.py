"""A GPT-2 as one writes it for one device (nanoGPT's form): the peer that has no parallelism to pay for.

Batch first, separate modules, SDPA attention, `F.cross_entropy` on whole logits. The same sizes and operations as
`labkit.models.GPTModel` with learned positions, LayerNorm, tanh-GeLU, biases and a tied output.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.plan.sizes import ffn_width, padded_vocab


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.heads = config.hidden, config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn_width(config)), nn.Linear(ffn_width(config), hidden)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        batch, length, hidden = x_BSH.shape
        q, k, v = self.qkv(self.norm_1(x_BSH)).split(hidden, dim=2)
        q, k, v = (x.view(batch, length, self.heads, -1).transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.proj(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x_BSH + self.fc2(F.gelu(self.fc1(self.norm_2(x_BSH)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Embeddings, blocks, norm, tied output, loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(padded_vocab(config), config.hidden)
        self.position = nn.Embedding(config.seq_length, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, 0.0, config.init_std)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean loss of [B, S] tokens."""
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.word(tokens_BS) + self.position(positions)
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits = F.linear(self.norm(x_BSH), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())
