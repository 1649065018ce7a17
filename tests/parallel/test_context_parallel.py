"""Training under context parallelism: the loss of samples whose ranks count unequal tokens, positions, determinism."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from labkit.config import RunConfig, presets
from labkit.data import build_gpt_datasets
from labkit.data.batches import data_iterator as microbatches
from labkit.launch import run
from labkit.models import build_model_chunks, core_attention, gpt
from labkit.parallel import Group, initialize_model_parallel, zigzag_positions
from labkit.parallel.context.zigzag import sequence_positions
from labkit.train import compare, pretrain
from labkit.train.forward_step import masked_loss


def small(**changes: Any) -> RunConfig:
    shape = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 4, "steps": 3}
    return presets.tiny().override(shape | {"optim.eps": 1e-5, "precision": "fp64"} | changes)


LLAMA = {"position": "rope", "kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "bias": False}


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["gpt2", "llama"])
def test_layouts_train_as_one_process_does(shape):
    both = {"cp": 2, "tp": 2, "pp": 2, "sequence_parallel": True, "attention_backend": "flash"}
    gathered = {"cp": 4, "cp_comm_type": "all_gather", "attention_backend": "unfused"}
    report = compare(small(**shape), [both, gathered] if shape else [both], steps=2)
    assert report.ok, f"\n{report}"


def unequal_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Of each sample the first quarter and the middle token count: ranks of cp hold unequal numbers of them."""
    batch, cp = next(data_iterator), model.cp
    mask = torch.zeros_like(batch["loss_mask_BS"])
    length = mask.shape[1] * cp.size
    positions = zigzag_positions(length, cp.size, cp.rank)
    mask[:, (positions < length // 4) | (positions == length // 2)] = 1.0
    return model(batch["tokens_BS"], labels_BS=batch["labels_BS"]), partial(masked_loss, mask)


def train_on_few(config: RunConfig) -> tuple[list[float], list[float]]:
    result = pretrain(config, forward_step=unequal_step)
    return result.losses, [norm for _, norm in result.series("grad_norm")]


@pytest.mark.parametrize(
    "layout", [{"cp": 2, "pp": 2}, {"cp": 4}, {"cp": 2, "world_size": 4, "calculate_per_token_loss": True}], ids=str
)
def test_ranks_may_count_unequal_numbers_of_tokens(layout):
    """Of 16 positions 0 to 3 and 8 count: with cp 4 ranks 0 and 1 have two of them, rank 3 has one, rank 2 none."""
    per_token = layout.get("calculate_per_token_loss", False)
    config = small(calculate_per_token_loss=per_token)
    losses, norms = train_on_few(config)
    ranks = layout.get("world_size", layout["cp"] * layout.get("pp", 1))
    layout = {name: size for name, size in layout.items() if name != "world_size"}
    for found in run(train_on_few, ranks, config.override(layout)):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(norms, rel=1e-10)


def test_the_same_layout_twice_is_bit_equal_with_dropout():
    config = small(cp=2, hidden_dropout=0.1, embedding_dropout=0.1, precision="fp32")
    first, second = (run(pretrain, 2, config) for _ in range(2))
    assert [r.losses for r in first] == [r.losses for r in second]
    assert first[0].losses == first[1].losses


def loss_with_positions(config: RunConfig) -> list[torch.Tensor]:
    """The loss per token with no positions given, the right ones, a row of them for each sample, the plain cut's."""
    groups = initialize_model_parallel(config.parallel)
    [model] = build_model_chunks(config, groups)
    batch = next(microbatches(build_gpt_datasets(config)[0], config, groups))
    length, cp = config.model.seq_length, groups.cp
    right = zigzag_positions(length, cp.size, cp.rank)[None]
    wrong = sequence_positions(length, cp.size, cp.rank, "contiguous")[None]
    rows = right.expand(batch["tokens_BS"].shape[0], -1)
    given = (None, right, rows, wrong)
    return [model(batch["tokens_BS"], ids, batch["labels_BS"]).detach() for ids in given]


@pytest.mark.parametrize("shape", [{}, LLAMA], ids=["learned", "rope"])
def test_the_model_knows_which_positions_it_holds(shape):
    config = small(cp=2, micro_batch_size=2, **shape)
    [whole] = run(loss_with_positions, 1, config.override({"cp": 1}))
    for rank, (own, right, rows, wrong) in enumerate(run(loss_with_positions, 2, config)):
        expected = whole[0][:, zigzag_positions(16, 2, rank)]
        for found in (own, right, rows):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert (wrong - expected).abs().max() > 1e-6, "the plain cut's positions are other ones"


def with_the_plain_cuts_positions(config: RunConfig, **how: Any) -> Any:
    gpt.zigzag_positions = partial(sequence_positions, layout="contiguous")
    return pretrain(config, **how)


def test_wrong_positions_are_found_at_the_embedding():
    report = compare(small(), [{"cp": 2}], steps=1, pretrain=with_the_plain_cuts_positions)
    assert report.rows[0].first_difference == "embedding output"


def test_flash_is_demanded_of_the_blocks_of_a_ring(monkeypatch):
    """As of float32 on a GPU: `fused` computes blocks operation by operation, `flash` is an error."""
    monkeypatch.setattr(core_attention, "has_kernel", lambda _: False)
    cp = Group("cp", (0, 1), 0, None)
    core = core_attention.CoreAttention(small(attention_backend="flash").model, None, cp)
    q, k = torch.randn(1, 8, 8, 8), torch.randn(1, 8, 8, 8)
    with pytest.raises(
        ValueError, match=r"attention_backend is flash.*q \[1, 8, 8, 8\].*on cpu.*multiple of 8 up to 256"
    ):
        core(q, k, k)


def test_dropout_of_attention_is_refused():
    with pytest.raises(ValueError, match=r"attention_dropout.*must be 0 with parallel.cp above 1"):
        small(cp=2, attention_dropout=0.1).validate(2)
