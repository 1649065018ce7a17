"""BERT in one process: what a position sees, both layouts, the heads, the loss, the samples, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import ModelConfig, presets
from labkit.data.datasets import build_datasets
from labkit.data.masked.bert_samples import build_bert_datasets
from labkit.data.masked.masking import MASKED
from labkit.models import BertModel, GPTModel
from labkit.models.core_attention import CoreAttention
from labkit.parallel import single_process_groups
from labkit.parallel.parameters.parameter_record import name_of
from labkit.parallel.vocab.token_ids import TokenIdError
from labkit.train import pretrain
from labkit.train.bert_step import bert_forward_step, bert_loss

GROUPS = single_process_groups()
SMALL = ModelConfig(family="bert", layers=2, hidden=32, heads=4, vocab_size=99, seq_length=16, activation="gelu")
LAYOUTS = pytest.mark.parametrize("placement", ["pre", "post"])


def built(config: ModelConfig = SMALL, **options: Any) -> BertModel:
    """With weights large enough that every term matters; norms and biases are no ones and zeros."""
    model = BertModel(config, GROUPS, layers=range(config.layers), seed=1, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batch(seed: int = 3) -> dict[str, Tensor]:
    """Two samples; the second ends in five positions of padding."""
    generator = torch.Generator().manual_seed(seed)
    padding = torch.ones(2, 16, dtype=torch.int64)
    padding[1, 11:] = 0
    return {
        "tokens_BS": torch.randint(0, 99, (2, 16), generator=generator),
        "types_BS": torch.randint(0, 2, (2, 16), generator=generator),
        "padding_mask_BS": padding,
    }


# ---- what a position sees ----


@LAYOUTS
def test_every_position_sees_every_other_but_padding(placement: str) -> None:
    model, given = built(replace(SMALL, norm_placement=placement)), batch()
    logits, order = model(**given)
    changed = {**given, "tokens_BS": given["tokens_BS"].clone()}
    changed["tokens_BS"][:, -1] = (changed["tokens_BS"][:, -1] + 1) % 99
    others, other_order = model(**changed)
    assert not torch.allclose(logits[0, 0], others[0, 0]), "the first position sees the last"
    torch.testing.assert_close(logits[:11, 1], others[:11, 1], rtol=0, atol=0)
    assert not torch.equal(order[0], other_order[0]) and torch.equal(order[1], other_order[1])


@LAYOUTS
@pytest.mark.parametrize("backend", ["flash", "math", "unfused"])
def test_padding_is_as_if_it_were_not_there(placement: str, backend: str) -> None:
    model, given = built(replace(SMALL, norm_placement=placement, attention_backend=backend)), batch()
    logits, order = model(**given)
    short, short_order = model(given["tokens_BS"][1:, :11], given["types_BS"][1:, :11])
    torch.testing.assert_close(logits[:11, 1:], short)
    torch.testing.assert_close(order[1:], short_order)


def test_a_sample_of_padding_alone_gives_no_nan() -> None:
    given = batch() | {"padding_mask_BS": torch.zeros(2, 16, dtype=torch.int64)}
    for backend in ("fused", "math", "unfused"):
        logits, order = built(replace(SMALL, attention_backend=backend))(**given)
        assert logits.isfinite().all() and order.isfinite().all()


# ---- layouts ----


def test_both_layouts_have_the_same_layers_and_other_ends() -> None:
    names = {
        placement: {name_of(p): p.shape for p in built(replace(SMALL, norm_placement=placement)).parameters()}
        for placement in ("pre", "post")
    }
    only = {
        placement: set(names[placement]) - set(names[other]) for placement, other in (("pre", "post"), ("post", "pre"))
    }
    assert only["pre"] == {"final_norm.weight", "final_norm.bias"}
    assert only["post"] == {"embedding.norm.weight", "embedding.norm.bias"}


def test_post_normalises_the_residual_stream_and_pre_does_not() -> None:
    seen: dict[str, list[Tensor]] = {"pre": [], "post": []}
    for placement, outputs in seen.items():
        model = BertModel(replace(SMALL, norm_placement=placement), GROUPS, layers=range(2), seed=1)
        for layer in model.layers.values():
            layer.register_forward_hook(lambda _m, _i, output, outputs=outputs: outputs.append(output))
        model(**batch())
    for output in seen["post"]:  # norms start with weight 1 and bias 0
        torch.testing.assert_close(output.var(-1, unbiased=False), torch.ones(16, 2), rtol=1e-2, atol=0)
    assert all((output.var(-1) < 0.1).all() for output in seen["pre"]), "N(0, 0.02) stays small"


@LAYOUTS
def test_a_layer_is_what_its_figure_says(placement: str) -> None:
    """One layer of the last stage, against the formula of figure 7 written out with torch's own functions."""
    config = replace(SMALL, norm_placement=placement, layers=1)
    model, given = built(config), batch()
    found: dict[str, Tensor] = {}
    model.embedding.register_forward_hook(lambda _m, _i, output: found.update(x=output))
    model.layers["0"].register_forward_hook(lambda _m, _i, output: found.update(y=output))
    model(given["tokens_BS"], given["types_BS"])
    w = {name_of(p).removeprefix("layers.0."): p for p in model.parameters()}
    norm = lambda x, of: F.layer_norm(x, (32,), w[f"{of}.norm.weight"], w[f"{of}.norm.bias"], 1e-5)  # noqa: E731

    def attention(x: Tensor) -> Tensor:
        mixed = F.linear(x, w["attention.qkv.weight"], w["attention.qkv.bias"]).unflatten(-1, (4, 3, 8))
        q, k, v = (mixed[:, :, :, i].permute(1, 2, 0, 3) for i in range(3))
        made = ((q @ k.transpose(-1, -2)) / 8**0.5).softmax(-1) @ v
        return F.linear(made.permute(2, 0, 1, 3).flatten(2), w["attention.proj.weight"], w["attention.proj.bias"])

    def mlp(x: Tensor) -> Tensor:
        inner = F.gelu(F.linear(x, w["mlp.fc1.weight"], w["mlp.fc1.bias"]))
        return F.linear(inner, w["mlp.fc2.weight"], w["mlp.fc2.bias"])

    x = found["x"]
    if placement == "pre":
        x = x + attention(norm(x, "attention"))
        x = x + mlp(norm(x, "mlp"))
    else:
        x = norm(x + attention(x), "attention")
        x = norm(x + mlp(x), "mlp")
    torch.testing.assert_close(found["y"], x)


# ---- heads and loss ----


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, given = built(), batch()
    labels = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(4))
    logits, order = model(**given)
    loss, same_order = model(**given, labels_BS=labels)
    expected = F.cross_entropy(logits[..., :99].permute(1, 2, 0), labels, reduction="none")
    torch.testing.assert_close(loss, expected)
    assert torch.equal(order, same_order)


def test_the_output_bias_and_every_weight_get_the_gradients_of_the_logits() -> None:
    """The fused loss against torch's cross-entropy of the logits: all parameters, the bias of the vocabulary among
    them."""
    labels = torch.randint(0, 99, (2, 16), generator=torch.Generator().manual_seed(4))
    fused, plain = built(), built()
    fused(**batch(), labels_BS=labels)[0].sum().backward()
    F.cross_entropy(plain(**batch())[0][..., :99].permute(1, 2, 0), labels, reduction="sum").backward()
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        if other.grad is None:
            assert "binary_head" in name_of(one) and one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad, msg=lambda m, one=one: f"{name_of(one)}: {m}")
    assert fused.lm_head is not None and fused.lm_head.bias.grad[:99].abs().min() > 0


def test_a_bias_that_alone_trains_gets_its_gradient() -> None:
    model = built()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.bias)
    model(**batch(), labels_BS=batch()["tokens_BS"])[0].sum().backward()
    assert model.lm_head.bias.grad.abs().max() > 0


def test_the_order_head_reads_the_first_position() -> None:
    model, given = built(), batch()
    found: dict[str, Tensor] = {}
    model.final_norm.register_forward_hook(lambda _m, _i, output: found.update(x=output))
    _, order = model(**given)
    w = {name_of(p): p for p in model.parameters()}
    pooled = F.linear(found["x"][0], w["binary_head.pooler.weight"], w["binary_head.pooler.bias"]).tanh()
    torch.testing.assert_close(order, F.linear(pooled, w["binary_head.dense.weight"], w["binary_head.dense.bias"]))


def test_without_the_order_head_there_are_no_token_types_either() -> None:
    model, given = built(replace(SMALL, bert_binary_head=False)), batch()
    _, order = model(**given)
    assert order is None
    assert not [name_of(p) for p in model.parameters() if "tokentype" in name_of(p) or "binary" in name_of(p)]


def test_the_loss_is_the_mean_over_masked_words_and_the_mean_over_samples() -> None:
    loss_BS = torch.arange(8.0).view(2, 4)
    mask = torch.tensor([[1.0, 0, 0, 1], [0, 0, 1, 0]])
    logits = torch.tensor([[2.0, 0], [0, 3]])
    loss, report = bert_loss(mask, torch.tensor([0, 0]), (loss_BS, logits))
    words = (0 + 3 + 6) / 3
    order = (np.log1p(np.exp(-2.0)) + np.log1p(np.exp(3.0))) / 2
    assert loss.item() == pytest.approx(words + order, rel=1e-6)
    assert report["lm_loss"].item() == pytest.approx(words) and report["sop_loss"].item() == pytest.approx(
        order, rel=1e-6
    )
    assert (report["loss_sum"].item(), report["tokens"].item()) == (loss.item(), 1)
    alone, _ = bert_loss(mask, torch.tensor([0, 0]), (loss_BS, None))
    assert alone.item() == pytest.approx(words)
    nothing, _ = bert_loss(0 * mask, torch.tensor([0, 0]), (loss_BS, None))
    assert nothing.item() == 0
    assert set(bert_loss(mask, torch.tensor([0, 0]), (loss_BS, logits), non_loss_data=True)) == {
        "loss_BS", "loss_mask_BS", "is_random_B", "order_B2"
    }  # fmt: skip


def test_ids_outside_their_tables_are_refused() -> None:
    model, given = built(), batch()
    with pytest.raises(TokenIdError, match="token type id 2 "):
        model(**{**given, "types_BS": given["types_BS"] + 1})
    with pytest.raises(TokenIdError, match="label id 99 "):
        model(**given, labels_BS=torch.full((2, 16), 99))
    with pytest.raises(ValueError, match=r"longer than model\.seq_length = 16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


# ---- samples ----


def test_shares_of_masks_swaps_and_short_samples() -> None:
    """Within four standard deviations of what they are drawn with."""
    dataset = build_bert_datasets(presets.bert_tiny())[0]
    drawn = [dataset[number] for number in range(3000)]
    places = [sample["loss_mask_BS"] == 1 for sample in drawn]
    tokens, labels = (
        np.concatenate([sample[name][place] for sample, place in zip(drawn, places)])
        for name in ("tokens_BS", "labels_BS")
    )
    text = sum(int(sample["padding_mask_BS"].sum()) - 3 for sample in drawn)
    near = lambda found, share, count: abs(found / count - share) < 4 * (share * (1 - share) / count) ** 0.5  # noqa: E731
    assert len(tokens) / text == pytest.approx(MASKED, abs=0.01)  # rounded in each sample
    assert near((tokens == dataset.maker.special.mask).sum(), 0.8, len(tokens))
    same = 0.1 + 0.1 / 1024  # kept, or by chance the same
    assert near((tokens == labels).sum(), same, len(tokens))
    assert near(sum(int(sample["is_random_B"]) for sample in drawn), 0.5, len(drawn))


def test_a_sample_depends_on_seed_and_position_alone() -> None:
    config = presets.bert_tiny()
    again = build_bert_datasets(config)[0].ordered(7)
    for name, value in build_bert_datasets(config)[0].ordered(7).items():
        np.testing.assert_array_equal(value, again[name])
    other = build_bert_datasets(config.override({"train.seed": 1}))[0].ordered(7)
    assert not np.array_equal(other["tokens_BS"], again["tokens_BS"])


def test_a_vocabulary_without_room_and_too_short_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size = 1024: .* ids 1024, 1025 and 1026; set it to 1027"):
        build_datasets(presets.bert_tiny().override({"vocab_size": 1024}))
    with pytest.raises(ValueError, match=r"model\.seq_length = 4: .* give 5 or more"):
        build_datasets(presets.bert_tiny().override({"seq_length": 4}))
    with pytest.raises(ValueError, match=r"data\.tokenizer = None: indexed datasets hold only ids"):
        build_datasets(presets.bert_tiny().override({"data.blend": ["1", "prefix"]}))
    shortest = build_datasets(presets.bert_tiny().override({"seq_length": 5}))[0].ordered(0)
    assert shortest["padding_mask_BS"].sum() == 5


# ---- runs ----


@LAYOUTS
def test_training_learns(placement: str) -> None:
    changes = {"model.norm_placement": placement, "layers": 2, "steps": 30, "lr": 3e-3, "eval_steps": 1}
    result = pretrain(presets.bert_tiny().override(changes))
    assert np.mean(result.losses[-5:]) < np.mean(result.losses[:5]) - 0.5
    assert result.series("validation_loss")[-1][1] < result.losses[0]
    for line in result.metrics:
        for split in ("", "validation_", "test_"):
            if f"{split}loss" in line:
                parts = line[f"{split}lm_loss"] + line[f"{split}sop_loss"]
                assert line[f"{split}loss"] == pytest.approx(parts, rel=1e-6)
                assert not split or line[f"{split}perplexity"] == np.exp(line[f"{split}lm_loss"])
    assert len(result.series("lm_loss")) == 30 and len(result.series("test_perplexity")) == 1


def test_parts_of_the_loss_are_those_that_are_reported() -> None:
    """Without the head of the order there is one part; a loss of one's own may report none."""
    small = {"layers": 1, "steps": 1, "global_batch_size": 2, "eval_steps": 1}
    (line, *_) = pretrain(presets.bert_tiny().override({**small, "bert_binary_head": False})).metrics
    assert line["lm_loss"] == pytest.approx(line["loss"], rel=1e-6) and "sop_loss" not in line

    def own(batches: Iterator[dict[str, Tensor]], model: Any) -> Any:
        output, loss = bert_forward_step(batches, model)

        def without_parts(output: Any) -> Any:
            value, report = loss(output)
            return value, {name: report[name] for name in ("loss_sum", "tokens")}

        return output, without_parts

    lines = pretrain(presets.bert_tiny().override(small), forward_step=own).metrics
    assert all(not name.endswith(("lm_loss", "perplexity")) for line in lines for name in line)


def test_the_papers_rows_are_as_section_4_trains_them() -> None:
    for name in ("table4_336m", "table4_1_3b", "table4_3_9b", "figure7_752m"):
        config = presets.get(name)
        assert config.problems() == [] and config.model.hidden // config.model.heads == 64
        assert (config.optim.precision, config.optim.loss_scale, config.optim.lr) == ("fp16", None, 1e-4)
        assert config.data.split == "97,3,0"  # section 5.3: perplexity on a 3% held-out set; it reports no test set
        assert (config.optim.warmup_steps, config.train.steps, config.train.global_batch_size) == (
            10_000,
            2_000_000,
            1024,
        )
        assert config.model.recompute_granularity == "full" and config.model.vocab_size == 30522


REFUSED = {
    "parallel.cp = 2": {"cp": 2},
    "moe.num_experts = 4": {"num_experts": 4},
    "graph.cuda_graph_impl = 'emulated'": {"cuda_graph_impl": "emulated"},
    "model.transformer_impl = 'transformer_engine'": {"transformer_impl": "transformer_engine"},
    "optim.calculate_per_token_loss = True": {"calculate_per_token_loss": True},
    "model.activation = 'swiglu'": {"activation": "swiglu"},
    "model.recompute_modules": {
        "model.norm_placement": "post", "recompute_granularity": "selective", "recompute_modules": ["layernorm"],
    },
}  # fmt: skip


@pytest.mark.parametrize("start", REFUSED)
def test_options_that_a_bert_does_not_have_are_refused_by_name(start: str) -> None:
    found = presets.bert_tiny().override(REFUSED[start]).problems()
    assert len(found) == 1 and found[0].startswith(start)


def test_options_of_a_bert_are_refused_for_a_gpt() -> None:
    for field, value in (("model.norm_placement", "post"), ("model.bert_binary_head", False)):
        (found,) = presets.tiny().override({field: value}).problems()
        assert found.startswith(field) and "has no effect with model.family = gpt" in found
    with pytest.raises(ValueError, match="GPTModel has no family 'bert'"):
        GPTModel(SMALL, GROUPS, layers=range(2), seed=1)
    with pytest.raises(ValueError, match="BertModel has no family 'gpt'"):
        BertModel(replace(SMALL, family="gpt"), GROUPS, layers=range(2), seed=1)
    with pytest.raises(ValueError, match="no context parallelism"):
        CoreAttention(SMALL, None, replace(GROUPS.cp, ranks=(0, 1)))


def test_fp8_layers_and_dropout_run() -> None:
    drops = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}
    for changes in (drops, {"optim.fp8": "hybrid"}, {"precision": "fp16"}, {"precision": "bf16"}):
        result = pretrain(presets.bert_tiny().override({"layers": 2, "steps": 3, "global_batch_size": 4, **changes}))
        assert all(np.isfinite(result.losses)) and abs(result.losses[0] - 7.7) < 0.4


def test_the_forward_step_takes_any_batch_of_the_documented_form() -> None:
    labels = torch.zeros(2, 16, dtype=torch.int64)
    given = batch() | {"labels_BS": labels, "loss_mask_BS": torch.ones(2, 16), "is_random_B": torch.tensor([0, 1])}
    output, loss = bert_forward_step(iter([given]), built())
    assert loss(output)[0].item() > 0
