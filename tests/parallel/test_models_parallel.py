"""GPT over tensor-parallel ranks: the same logits, loss, gradients and weights as on one process, and what it sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit import plan
from labkit.comm.collectives import all_gather
from labkit.config import ModelConfig, ParallelConfig
from labkit.launch import RankError, run
from labkit.models import GPTModel
from labkit.parallel import CommLedger, finalize_model_grads, initialize_model_parallel, single_process_groups
from labkit.parallel.parameters.weights import gather_parameter

GPT2 = ModelConfig(layers=2, hidden=32, heads=4, vocab_size=333, make_vocab_size_divisible_by=8, seq_length=12)
LLAMA = replace(
    GPT2,
    kv_heads=2,
    ffn_hidden=48,
    position="rope",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    untie_embeddings_and_output_weights=True,
)
GROUPED = replace(LLAMA, kv_heads=None, bias=True, norm="layernorm")
BATCH = 3


def data(config: ModelConfig) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, config.vocab_size, (BATCH, config.seq_length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def step(config: ModelConfig, groups: Any) -> dict[str, Any]:
    """One forward and backward; everything gathered to its full, unpadded form."""
    model = GPTModel(config, groups, layers=range(config.layers), seed=7, dtype=torch.float64)
    tokens, labels = data(config)
    with torch.no_grad():
        logits = all_gather(model(tokens), groups.tp, dim=2)[..., : config.vocab_size]
    loss = model(tokens, labels_BS=labels)
    loss.mean().backward()
    found: dict[str, Any] = {"logits": logits, "loss": loss.detach().clone()}
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.main_grad = parameter.grad  # type: ignore[attr-defined]
    finalize_model_grads([model], groups)
    for name, parameter in model.named_parameters():
        found[f"weight {name}"] = gather_parameter(parameter, parameter, groups.tp).clone()
        found[f"gradient {name}"] = gather_parameter(parameter.main_grad, parameter, groups.tp).clone()  # type: ignore
    return found


def step_on_a_rank(config: ModelConfig, tp: int) -> dict[str, Any]:
    return step(config, initialize_model_parallel(ParallelConfig(tp=tp)))


@pytest.mark.parametrize(
    ("config", "tp"),
    [(GPT2, 2), (GPT2, 4), (LLAMA, 2), (GROUPED, 4), (replace(GROUPED, kv_heads=2), 4)],
    ids=["gpt2-tp2", "gpt2-tp4", "llama-tp2", "rope-bias-tp4", "two-kv-heads-tp4"],
)
def test_equals_one_process(config: ModelConfig, tp: int) -> None:
    alone = step(config, single_process_groups())
    for found in run(step_on_a_rank, tp, config, tp):
        assert found.keys() == alone.keys()
        for name, expected in alone.items():
            if name.startswith("weight"):
                assert torch.equal(found[name], expected), name
            else:
                torch.testing.assert_close(
                    found[name], expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )


def twice(config: ModelConfig) -> bool:
    groups = initialize_model_parallel(ParallelConfig(tp=2))
    first, second = step(config, groups), step(config, groups)
    return all(torch.equal(first[name], second[name]) for name in first)


def test_repeats_bit_for_bit() -> None:
    dropping = replace(GPT2, embedding_dropout=0.1, attention_dropout=0.1, hidden_dropout=0.1)
    assert run(twice, 2, dropping) == [True, True]


def dropped_masks() -> tuple[Tensor, Tensor]:
    """Output of a layer after its residual dropout, and this rank's attention under dropout of equal inputs."""
    config = replace(GPT2, attention_dropout=0.5, hidden_dropout=0.5)
    groups = initialize_model_parallel(ParallelConfig(tp=2))
    model = GPTModel(config, groups, layers=range(1), seed=7, dtype=torch.float64)
    layer = model.layers["0"]
    outside = layer.dropout(torch.ones(4, 2, 32, dtype=torch.float64))
    inside = layer.attention.attend(torch.ones(12, 1, 48, dtype=torch.float64))
    return outside, inside.detach()


def test_ranks_drop_alike_outside_and_each_its_own_inside_attention() -> None:
    (outside_0, inside_0), (outside_1, inside_1) = run(dropped_masks, 2)
    assert torch.equal(outside_0, outside_1)
    assert not torch.equal(inside_0, inside_1)


def ledger_of(config: ModelConfig) -> dict[str, Any]:
    groups = initialize_model_parallel(ParallelConfig(tp=2))
    model = GPTModel(config, groups, layers=range(config.layers), seed=7)
    tokens, labels = data(config)
    with CommLedger() as ledger:
        model(tokens, labels_BS=labels).mean().backward()
    per_layer = [
        (ledger.count(operation="all_reduce", group="tp", phase=phase, layer=f"layers.{i}.{part}"), phase, part)
        for i in range(config.layers)
        for phase in ("forward", "backward")
        for part in ("attention", "mlp")
    ]
    layer_bytes = ledger.bytes(layer="layers.0")
    ends = {name: ledger.bytes(layer=name) for name in ("embedding", "loss")}
    return {"per layer": per_layer, "bytes": layer_bytes, "ends": ends, "calls": len(ledger.records)}


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_two_all_reduces_forward_and_two_backward_per_layer(config: ModelConfig) -> None:
    hidden_bytes = config.seq_length * BATCH * config.hidden * 4
    token_bytes = config.seq_length * BATCH * 4
    for found in run(ledger_of, 2, config):
        assert {count for count, _, _ in found["per layer"]} == {1}
        assert found["bytes"] == 4 * hidden_bytes == plan.layer_communication_bytes(config, samples=BATCH, tp=2)
        # The embedding's sum; of the loss MAX, two SUMs per token and the input gradient: no logits.
        assert found["ends"] == {"embedding": hidden_bytes, "loss": 3 * token_bytes + hidden_bytes}
        assert found["calls"] == 4 * config.layers + 1 + 3


def bad_token() -> None:
    groups = initialize_model_parallel(ParallelConfig(tp=2))
    GPTModel(GPT2, groups, layers=range(2), seed=7)(torch.tensor([[0, 333]]))


def test_a_token_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(RankError, match=r"token id 333 at position \(0, 1\)"):
        run(bad_token, 2)
