"""Ready-made configurations, as functions: small ones for a laptop, the rows of Megatron-LM's paper (arXiv 1909.08053),
and mixtures of experts.

`get(name)` returns the one with a command-line name; `names()` lists these names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from labkit.config.errors import ConfigError, nearest
from labkit.config.run_config import RunConfig
from labkit.config.sections import DataConfig, ModelConfig, MoEConfig, OptimConfig, ParallelConfig, TrainConfig


def tiny() -> RunConfig:
    """Return a GPT-2 of 0.5 million parameters for parity and lessons.

    Every layout up to tp 8, pp 8 divides it. Its vocabulary is that of the bundled tokenizer and needs no padding in
    any of these layouts. A global batch has 16 microbatches. AdamW's epsilon is 1e-5, so that a gradient of pure noise
    (that of a key bias) moves its parameter by less than parity could see.
    """
    return RunConfig(
        model=ModelConfig(layers=8, hidden=64, heads=8, vocab_size=1024, seq_length=64),
        optim=OptimConfig(lr=1e-3, eps=1e-5),
        train=TrainConfig(steps=20, micro_batch_size=1, global_batch_size=16),
    )


def llama_tiny() -> RunConfig:
    """Return `tiny` as a Llama: RoPE, RMSNorm, SwiGLU, 4 key/value for 8 query heads, no bias, untied output."""
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
    """Return GPT-2 small (124 million parameters) in bf16.

    Its vocabulary of 50,257 needs a tokenizer file of that size in `data.tokenizer`. Batch size, rates and
    regularisation are the paper's (section 4.2).
    """
    config = _gpt2(layers=12, hidden=768, heads=12, tp=1, global_batch=512, padded_to=128)
    return replace(
        config,
        model=replace(config.model, recompute_granularity="none"),
        optim=replace(config.optim, precision="bf16"),
    )


def _gpt2(*, layers: int, hidden: int, heads: int, tp: int, global_batch: int, padded_to: int = 1024) -> RunConfig:
    """Return a GPT-2 trained as in the paper's section 4.2: fp16 with a dynamic loss scale, every layer recomputed."""
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
            recompute_granularity="full",
        ),
        parallel=ParallelConfig(tp=tp),
        optim=OptimConfig(
            lr=1.5e-4, min_lr=1e-5, lr_schedule="cosine", warmup_steps=3_000, beta2=0.999, precision="fp16"
        ),
        train=TrainConfig(
            steps=300_000, micro_batch_size=8, global_batch_size=global_batch, log_interval=100, record_events=False
        ),
    )


def tiny_moe() -> RunConfig:
    """Return `tiny` with 8 experts in every second layer, from the first on; a token visits 2, and none is ever full.

    Expert parallelism up to 8 divides it. Load-balancing loss and z-loss have the weights of the Switch Transformer
    (arXiv 2101.03961) and ST-MoE (arXiv 2202.08906), so that parity covers both.
    """
    moe = MoEConfig(num_experts=8, ffn_hidden=128, layer_freq=(1, 0), top_k=2, aux_loss_coeff=1e-2, z_loss_coeff=1e-3)
    return replace(tiny(), moe=moe)


def mixtral_tiny() -> RunConfig:
    """Return `llama_tiny` with Mixtral's experts (arXiv 2401.04088): 8 in every layer, of which a token visits 2."""
    return replace(llama_tiny(), moe=_mixtral_experts())


def mixtral_8x7b() -> RunConfig:
    """Return Mixtral 8x7B (46.7 billion parameters, of which a token uses 12.9 billion) in bf16, for 32 GPUs or more.

    Its vocabulary needs a tokenizer file in `data.tokenizer`. Sequences have 4,096 tokens, whereas the released model
    takes 32,768.
    """
    model = ModelConfig(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn_hidden=14336,
        vocab_size=32000,
        seq_length=4096,
        position="rope",
        rope_theta=1e6,
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=True,
    )
    return _large_moe(model, _mixtral_experts(), ParallelConfig(pp=4, ep=8))


def _mixtral_experts() -> MoEConfig:
    return MoEConfig(num_experts=8, top_k=2, aux_loss_coeff=2e-2)


def deepseek_tiny() -> RunConfig:
    """Return `llama_tiny` with DeepSeek-V3's experts (arXiv 2412.19437), but not its attention.

    The first layer is dense. The others have 16 narrow experts in 4 groups, and a shared expert for all tokens. A token
    visits 4 experts in 2 groups, chosen by sigmoid scores with a bias that evens the load.
    """
    moe = MoEConfig(
        num_experts=16,
        ffn_hidden=32,
        layer_freq=(0, *[1] * 7),
        top_k=4,
        score_function="sigmoid",
        num_groups=4,
        group_topk=2,
        topk_scaling_factor=2.5,
        load_balancing="seq_aux_loss",
        aux_loss_coeff=1e-4,
        expert_bias=True,
        shared_expert_ffn_hidden=64,
    )
    return replace(llama_tiny(), moe=moe)


def deepseek_moe_16b() -> RunConfig:
    """Return DeepSeekMoE 16B (arXiv 2401.06066) in bf16, for 8 GPUs or more.

    It has 16.4 billion parameters, of which a token uses 2.8 billion. The first layer is dense. The others have 64
    narrow experts, of which a token visits 6, and two shared experts, built as one of twice the width. The vocabulary
    needs a tokenizer file in `data.tokenizer`.
    """
    model = ModelConfig(
        layers=28,
        hidden=2048,
        heads=16,
        ffn_hidden=10944,
        vocab_size=102400,
        seq_length=4096,
        position="rope",
        norm="rmsnorm",
        norm_eps=1e-6,
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=True,
    )
    moe = MoEConfig(
        num_experts=64,
        ffn_hidden=1408,
        layer_freq=(0, *[1] * 27),
        top_k=6,
        pre_softmax=True,
        load_balancing="seq_aux_loss",
        aux_loss_coeff=1e-3,
        shared_expert_ffn_hidden=2 * 1408,
    )
    return _large_moe(model, moe, ParallelConfig(ep=8))


def _large_moe(model: ModelConfig, moe: MoEConfig, parallel: ParallelConfig) -> RunConfig:
    """Return a run with the batch, warm-up, peak rate and steps of DeepSeekMoE 16B; the decay is a cosine."""
    return RunConfig(
        model=model,
        parallel=parallel,
        moe=moe,
        optim=OptimConfig(lr=4.2e-4, warmup_steps=2_000, weight_decay=0.1, precision="bf16"),
        train=TrainConfig(
            steps=106_449, micro_batch_size=1, global_batch_size=4608, log_interval=100, record_events=False
        ),
    )


def gpt3_175b() -> RunConfig:
    """Return GPT-3 with 175 billion parameters (arXiv 2005.14165, tables 2.1 and D.1) in bf16: 300 billion tokens.

    A batch has 1,536 sequences, 3.1 million tokens, from the first step on; the paper lets it grow. Every second layer
    of the released model attends to a band of tokens, here all layers attend to all. The vocabulary of 50,257 needs a
    tokenizer file in `data.tokenizer`.
    """
    return RunConfig(
        model=ModelConfig(layers=96, hidden=12288, heads=96, vocab_size=50257, seq_length=2048),
        optim=OptimConfig(
            lr=6e-5, min_lr=6e-6, lr_schedule="cosine", warmup_steps=119, weight_decay=0.1, precision="bf16"
        ),
        train=TrainConfig(
            steps=95_367, micro_batch_size=1, global_batch_size=1536, log_interval=100, record_events=False
        ),
    )


def llama3_8b() -> RunConfig:
    """Return Llama 3 8B (arXiv 2407.21783, table 3) in bf16, for 15 trillion tokens.

    A batch has 512 sequences, 4.2 million tokens, which the paper states for the first steps of its largest model. The
    vocabulary of 128,256 needs a tokenizer file in `data.tokenizer`.
    """
    return _llama3(layers=32, hidden=4096, heads=32, ffn_hidden=14336, lr=3e-4)


def llama3_70b() -> RunConfig:
    """Return Llama 3 70B (arXiv 2407.21783, table 3); batch, tokens and vocabulary as in `llama3_8b`."""
    return _llama3(layers=80, hidden=8192, heads=64, ffn_hidden=28672, lr=1.5e-4)


def llama3_405b() -> RunConfig:
    """Return Llama 3 405B (arXiv 2407.21783, table 3); batch, tokens and vocabulary as in `llama3_8b`.

    The paper's batch grows to 2,048 sequences, 16.8 million tokens, which most of its training has.
    """
    return _llama3(layers=126, hidden=16384, heads=128, ffn_hidden=53248, lr=8e-5)


def _llama3(*, layers: int, hidden: int, heads: int, ffn_hidden: int, lr: float) -> RunConfig:
    """Return a model of the herd; the peak rate falls to a hundredth."""
    model = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        ffn_hidden=ffn_hidden,
        vocab_size=128256,
        seq_length=8192,
        position="rope",
        rope_theta=5e5,
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        untie_embeddings_and_output_weights=True,
    )
    return RunConfig(
        model=model,
        optim=OptimConfig(
            lr=lr, min_lr=lr / 100, lr_schedule="cosine", warmup_steps=8_000, weight_decay=0.1, precision="bf16"
        ),
        train=TrainConfig(
            steps=3_576_279, micro_batch_size=1, global_batch_size=512, log_interval=100, record_events=False
        ),
    )


def bert_tiny() -> RunConfig:
    """Return a BERT of 0.5 million parameters for parity and lessons, with norms as in figure 7b of Megatron's paper.

    Its vocabulary has room for the bundled tokenizer's 1,024 tokens and BERT's own, and needs no padding up to tp 8.
    """
    config, vocabulary = tiny(), {"vocab_size": 1152, "make_vocab_size_divisible_by": 16}
    return replace(config, model=replace(config.model, family="bert", activation="gelu", **vocabulary))


def mamba_tiny() -> RunConfig:
    """Return a hybrid of Mamba-2, attention and MLP layers with 0.3 million parameters, for parity and lessons.

    The attention layers see the order of tokens through what the Mamba layers before them write, so there are no
    positions. Every layout up to tp 4, pp 4 divides it.
    """
    config = tiny()
    model = replace(
        config.model,
        family="mamba",
        hybrid_override_pattern="MM*-MM*-",
        mamba_state_dim=16,
        mamba_head_dim=16,
        mamba_num_groups=4,
        position="none",
        norm="rmsnorm",
        bias=False,
    )
    return replace(config, model=model)


def t5_tiny() -> RunConfig:
    """Return a T5 of 0.3 million parameters in Megatron's form: learned positions, LayerNorm, biases.

    Its vocabulary has room for the bundled tokenizer's 1,024 tokens and T5's own, and needs no padding up to tp 8.
    """
    config, vocabulary = tiny(), {"vocab_size": 1152, "make_vocab_size_divisible_by": 16}
    shape = {"layers": 2, "seq_length": 64, "decoder_seq_length": 32, "activation": "gelu"}
    return replace(config, model=replace(config.model, family="t5", **shape, **vocabulary))


class Row(NamedTuple):
    """One model of the paper's tables."""

    layers: int
    hidden: int
    heads: int
    tp: int
    """GPUs of one model-parallel group."""
    gpus: int
    """GPUs when data parallelism is added."""


TABLE_1: dict[str, Row] = {
    "1.2B": Row(40, 1536, 16, 1, 64),
    "2.5B": Row(54, 1920, 20, 2, 128),
    "4.2B": Row(64, 2304, 24, 4, 256),
    "8.3B": Row(72, 3072, 32, 8, 512),
}
"""The scaling study: 96 features per head, vocabulary padded to a multiple of 1,024."""

TABLE_2: dict[str, Row] = {
    "355M": Row(24, 1024, 16, 1, 64),
    "2.5B": Row(54, 1920, 20, 2, 128),
    "8.3B": Row(72, 3072, 24, 8, 512),
}
"""Models that were trained; their model-parallel sizes are those of Table 1."""


TABLE_4: dict[str, Row] = {
    "336M": Row(24, 1024, 16, 1, 128),
    "1.3B": Row(24, 2048, 32, 2, 256),
    "3.9B": Row(48, 2560, 40, 4, 512),
}
"""BERT models that were trained. The paper gives no model-parallel sizes for them; these sizes leave 128 replicas."""

FIGURE_7 = Row(36, 1280, 20, 1, 128)
"""BERT with 752 million parameters; the paper gives only that number. The sizes are GPT-2 large's: no others with
dozens of layers and heads of 64 features, as in Table 4, make it (the vocabulary is padded to 30,592)."""


def table1(row: str, *, data_parallel: bool = False) -> RunConfig:
    """Return a row of Table 1 (`1.2B`, `2.5B`, `4.2B`, `8.3B`): batch 8 on `tp` GPUs, or 512 on 64 times as many."""
    r = _row(TABLE_1, row, "Table 1")
    batch = 512 if data_parallel else 8
    return _gpt2(layers=r.layers, hidden=r.hidden, heads=r.heads, tp=r.tp, global_batch=batch)


def table2(row: str) -> RunConfig:
    """Return a row of Table 2 (`355M`, `2.5B`, `8.3B`): batch 512, 300,000 steps."""
    r = _row(TABLE_2, row, "Table 2")
    return _gpt2(layers=r.layers, hidden=r.hidden, heads=r.heads, tp=r.tp, global_batch=512)


def table4(row: str) -> RunConfig:
    """Return a row of Table 4 (`336M`, `1.3B`, `3.9B`), with the training of sections 4, 4.2 and 5.3.

    It has fp16 with a dynamic loss scale, every layer recomputed, batch 1,024, and linear decay over two million steps.
    3% of the data are held out for validation. Its vocabulary of 30,522 needs a tokenizer file of that size in
    `data.tokenizer`. The paper trained the largest row for only 1.5 million steps.
    """
    return _bert(_row(TABLE_4, row, "Table 4"))


def figure7() -> RunConfig:
    """Return the BERT with 752 million parameters of figure 7, trained like the rows of Table 4.

    Its norms are those of figure 7b. With those of 7a, `model.norm_placement` = post, training was not stable.
    """
    return _bert(FIGURE_7)


def _bert(r: Row) -> RunConfig:
    return RunConfig(
        model=ModelConfig(
            family="bert",
            layers=r.layers,
            hidden=r.hidden,
            heads=r.heads,
            vocab_size=30522,
            seq_length=512,
            activation="gelu",
            embedding_dropout=0.1,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            recompute_granularity="full",
        ),
        parallel=ParallelConfig(tp=r.tp),
        data=DataConfig(split="97,3,0"),
        optim=OptimConfig(lr=1e-4, lr_schedule="linear", warmup_steps=10_000, beta2=0.999, precision="fp16"),
        train=TrainConfig(
            steps=2_000_000, micro_batch_size=8, global_batch_size=1024, log_interval=100, record_events=False
        ),
    )


def _row(table: dict[str, Row], row: str, name: str) -> Row:
    if row not in table:
        raise ConfigError([f"{name} has no row {row!r}; choose from {', '.join(table)}"], source="the preset")
    return table[row]


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "tiny": tiny,
    "llama_tiny": llama_tiny,
    "gpt2_124m": gpt2_124m,
    "tiny_moe": tiny_moe,
    "mixtral_tiny": mixtral_tiny,
    "mixtral_8x7b": mixtral_8x7b,
    "gpt3_175b": gpt3_175b,
    "llama3_8b": llama3_8b,
    "llama3_70b": llama3_70b,
    "llama3_405b": llama3_405b,
    "bert_tiny": bert_tiny,
    "mamba_tiny": mamba_tiny,
    "t5_tiny": t5_tiny,
    "deepseek_tiny": deepseek_tiny,
    "deepseek_moe_16b": deepseek_moe_16b,
    **{f"table1_{row.lower().replace('.', '_')}": partial(table1, row) for row in TABLE_1},
    **{f"table2_{row.lower().replace('.', '_')}": partial(table2, row) for row in TABLE_2},
    **{f"table4_{row.lower().replace('.', '_')}": partial(table4, row) for row in TABLE_4},
    "figure7_752m": figure7,
}
"""Every preset by its name on the command line."""


def names() -> list[str]:
    """Return the names that `get` knows."""
    return list(PRESETS)


def get(name: str) -> RunConfig:
    """Return the preset called `name`. Raises ConfigError, which lists the names, if there is none."""
    key = name.replace("-", "_").replace(".", "_").lower()
    if key not in PRESETS:
        hint = nearest(key, PRESETS)
        raise ConfigError([f"no preset {name!r}; choose from {', '.join(PRESETS)}{hint}"], source="the preset")
    return PRESETS[key]()
