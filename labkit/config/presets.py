"""Ready configurations, as functions: small ones for a laptop, and the rows of Megatron-LM's paper (arXiv 1909.08053).

`get(name)` finds one by its command-line name; `names()` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from labkit.config.errors import ConfigError, nearest
from labkit.config.run_config import RunConfig
from labkit.config.sections import ModelConfig, OptimConfig, ParallelConfig, TrainConfig


def tiny() -> RunConfig:
    """A GPT-2 of 0.5 million parameters for parity and lessons.

    Every layout up to tp 8, pp 8 divides it; its vocabulary is the bundled tokenizer's and needs no padding at any of
    these; a global batch is 16 microbatches. AdamW's epsilon is 1e-5, so that a gradient of pure noise (a key bias)
    moves its parameter by nothing that parity could see.
    """
    return RunConfig(
        model=ModelConfig(layers=8, hidden=64, heads=8, vocab_size=1024, seq_length=64),
        optim=OptimConfig(lr=1e-3, eps=1e-5),
        train=TrainConfig(steps=20, micro_batch_size=1, global_batch_size=16),
    )


def llama_tiny() -> RunConfig:
    """`tiny` with Llama's blocks: RoPE, RMSNorm, SwiGLU, 4 key/value for 8 query heads, no bias, untied output."""
    config = tiny()
    model = replace(
        config.model,
        kv_heads=4,
        ffn_hidden=192,
        position="rope",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=True,
    )
    return replace(config, model=model)


def gpt2_124m() -> RunConfig:
    """GPT-2 small (124 million parameters) in bf16.

    Its vocabulary of 50,257 needs a tokenizer file of that size in `data.tokenizer`. Batch, rates and regularisation
    are the paper's (section 4.1).
    """
    return _gpt2(layers=12, hidden=768, heads=12, tp=1, global_batch=512)


def _gpt2(*, layers: int, hidden: int, heads: int, tp: int, global_batch: int, padded_to: int = 128) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            layers=layers,
            hidden=hidden,
            heads=heads,
            vocab_size=50257,
            make_vocab_size_divisible_by=padded_to // tp,
            seq_length=1024,
            embedding_dropout=0.1,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        parallel=ParallelConfig(tp=tp),
        optim=OptimConfig(
            lr=1.5e-4, min_lr=1e-5, lr_schedule="cosine", warmup_steps=3_000, beta2=0.999, precision="bf16"
        ),
        train=TrainConfig(
            steps=300_000, micro_batch_size=8, global_batch_size=global_batch, log_interval=100, record_events=False
        ),
    )


class Row(NamedTuple):
    """One model of the paper's tables."""

    layers: int
    hidden: int
    heads: int
    tp: int
    """GPUs of one model-parallel group."""
    gpus: int
    """GPUs with data parallelism."""


TABLE_1: dict[str, Row] = {
    "1.2B": Row(40, 1536, 16, 1, 64),
    "2.5B": Row(54, 1920, 20, 2, 128),
    "4.2B": Row(64, 2304, 24, 4, 256),
    "8.3B": Row(72, 3072, 32, 8, 512),
}
"""Scaling study: 96 features a head, vocabulary padded to a multiple of 1,024."""

TABLE_2: dict[str, Row] = {
    "355M": Row(24, 1024, 16, 1, 64),
    "2.5B": Row(54, 1920, 20, 2, 128),
    "8.3B": Row(72, 3072, 24, 8, 512),
}
"""Models that were trained; model-parallel sizes are those of Table 1."""


def table1(row: str, *, data_parallel: bool = False) -> RunConfig:
    """A row of Table 1 (`1.2B`, `2.5B`, `4.2B`, `8.3B`): batch 8 on `tp` GPUs, or batch 512 on 64 times as many."""
    r = _row(TABLE_1, row, "Table 1")
    batch = 512 if data_parallel else 8
    return _gpt2(layers=r.layers, hidden=r.hidden, heads=r.heads, tp=r.tp, global_batch=batch, padded_to=1024)


def table2(row: str) -> RunConfig:
    """A row of Table 2 (`355M`, `2.5B`, `8.3B`): batch 512, 300,000 steps."""
    r = _row(TABLE_2, row, "Table 2")
    return _gpt2(layers=r.layers, hidden=r.hidden, heads=r.heads, tp=r.tp, global_batch=512, padded_to=1024)


def _row(table: dict[str, Row], row: str, name: str) -> Row:
    if row not in table:
        raise ConfigError([f"{name} has no row {row!r}; choose from {', '.join(table)}"], source="the preset")
    return table[row]


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "llama_tiny": llama_tiny,
    "gpt2_124m": gpt2_124m,
    **{f"table1_{row.lower().replace('.', '_')}": partial(table1, row) for row in TABLE_1},
    **{f"table2_{row.lower().replace('.', '_')}": partial(table2, row) for row in TABLE_2},
}
"""Every preset by its name on the command line."""


def names() -> list[str]:
    """Names that `get` knows."""
    return list(PRESETS)


def get(name: str) -> RunConfig:
    """The preset called `name`; ConfigError lists the names where there is none."""
    key = name.replace("-", "_").replace(".", "_").lower()
    if key not in PRESETS:
        hint = nearest(key, PRESETS)
        raise ConfigError([f"no preset {name!r}; choose from {', '.join(PRESETS)}{hint}"], source="the preset")
    return PRESETS[key]()
