"""T5 under every layout against one process, in both forms: loss, gradients, parameters over steps."""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.config import ConfigError, RunConfig, presets
from labkit.launch import run
from labkit.models import ChunkSpec
from labkit.train import compare, pretrain
from labkit.train.forward_step import masked_loss

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
ZERO, SP, FULL, MEGATRON = (MATRIX[name] for name in ("ZERO", "SEQUENCE_PARALLEL", "FULL", "MEGATRON"))
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
SUBSET = {
    "learned": [
        {"tp": 2, "pp": 2, "split_rank": 1, "world_size": 8, **SP, **MEGATRON},
        {"pp": 4, "split_rank": 2, **FULL},
        {"tp": 4, **SELECTIVE},
    ],
    "relative": [
        {"tp": 2, "pp": 4, "split_rank": 2, **SP, **FULL},
        {"pp": 3, "split_rank": 1, "world_size": 6, **ZERO},
        {"pp": 2, "split_rank": 1, "schedule.name": "zero_bubble_h1", **SELECTIVE},
        {"tp": 2, "optim.data_parallel": "naive", "world_size": 4},
    ],
}
"""Every axis and every option, in few layouts."""


def small(form: str) -> RunConfig:
    return MATRIX["encoder_decoder"](form)


def check(config, layouts, steps):
    report = compare(config, layouts, steps=steps, dtype="float64")
    assert report.ok, f"\n{report}"
    assert max(row.largest for row in report.rows) <= 1e-10


@pytest.mark.parametrize("form", [pytest.param("learned", marks=pytest.mark.sweep), "relative"])
def test_float64(form):
    check(small(form), SUBSET[form], steps=2)


def test_an_output_of_its_own_and_more_layers_in_the_decoder():
    """Last stage and decoder's first are two ranks, and only the second holds a copy of the words."""
    changes = {"untie_embeddings_and_output_weights": True, "decoder_layers": 4, "label_smoothing": 0.1}
    check(small("relative").override(changes), [{"pp": 3, "split_rank": 1}], steps=2)


def test_rounding_that_large_weights_amplify_is_no_fault_in_float64():
    """At init_std 0.5 tp2 pp2 differs by 7e-10, one process with its sums in other orders by as much."""
    report = compare(small("relative").override({"init_std": 0.5}), [{"tp": 2, "pp": 2, "split_rank": 1}], steps=3)
    assert report.ok, f"\n{report}"


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["learned", "relative"])
def test_every_layout(form):
    check(small(form), MATRIX["T5_LAYOUTS"], steps=MATRIX["T5_STEPS"])


class OwnHalves(nn.Module):
    """An encoder-decoder that is nobody's: tanh(x W), and in the decoder tanh(x W + the encoder's output)."""

    def __init__(self, config: RunConfig, *, pre_process: bool, post_process: bool, chunk: ChunkSpec) -> None:
        super().__init__()
        model, self.last, self.received = config.model, post_process, None
        held = {"head": (model.hidden, model.vocab_size)} if post_process else {}
        held |= {f"layer{index}": (model.hidden, model.hidden) for index in chunk.layers}
        encodes, decodes = chunk.layers.start < model.layers, chunk.layers.stop > model.layers
        self.starts = {half: pre_process and here for half, here in (("encoder", encodes), ("decoder", decodes))}
        held |= {half: (model.vocab_size, model.hidden) for half, here in self.starts.items() if here}
        for name, shape in held.items():
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(0.3 * drawn))
        self.halves = [[i for i in chunk.layers if i < model.layers], [i for i in chunk.layers if i >= model.layers]]

    def set_input_tensor(self, received: Any) -> None:
        self.received = received

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Any:
        encoded = self.encoder[tokens_BS.t()] if self.starts["encoder"] else self.received
        for index in self.halves[0]:
            encoded = torch.tanh(encoded @ getattr(self, f"layer{index}"))
        if not self.halves[1]:
            return encoded
        x, encoded = (self.decoder[tokens_BS.t()], encoded) if self.starts["decoder"] else encoded
        for index in self.halves[1]:
            x = torch.tanh(x @ getattr(self, f"layer{index}") + encoded)
        return (
            cross_entropy((x @ self.head).permute(1, 2, 0), labels_BS, reduction="none") if self.last else (x, encoded)
        )


def own_losses(config: RunConfig) -> list[float]:
    def step(data_iterator: Any, model: nn.Module) -> Any:
        batch = next(data_iterator)
        return model(batch["tokens_BS"], batch["labels_BS"]), partial(masked_loss, batch["loss_mask_BS"])

    provider = lambda config, groups, **stage: OwnHalves(config, **stage)  # noqa: E731
    given = {"model_provider": provider, "model_type": "encoder_and_decoder", "forward_step": step}
    return pretrain(config, **given).losses


def test_an_encoder_decoder_of_ones_own_trains_alike_on_any_split():
    """Of the family gpt: `model_type` alone gives it the stages of a T5."""
    fits = {"model.layers": 2, "decoder_layers": 4, "precision": "fp64", "global_batch_size": 4, "train.steps": 3}
    config = presets.tiny().override({**fits, "untie_embeddings_and_output_weights": True, "position": "rope"})
    alone = own_losses(config)
    assert alone[0] > alone[-1]
    for pp, split in ((2, 1), (3, 1)):
        losses = run(own_losses, pp, config.override({"pp": pp, "split_rank": split}))
        assert losses == [pytest.approx(alone, rel=1e-12)] * pp
    with pytest.raises(ConfigError, match=r"model_type = 'encoder_and_decoder': model\.family = gpt has no decoder"):
        run(partial(pretrain, model_type="encoder_and_decoder"), 1, config)


FAULTS = [
    ({"operation": "all_reduce", "group": "pos_embd"}, "embedding.position.weight gradient"),
    ({"operation": "all_reduce", "group": "pp_half"}, "decoder.relative_bias.weight gradient"),
]


@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=["positions", "relative biases"])
def test_a_sum_over_copies_left_out_is_found(fault, named):
    form = "learned" if fault["group"] == "pos_embd" else "relative"
    report = compare(small(form), [{"pp": 4, "split_rank": 2}], steps=1, fault=fault)
    assert not report.ok and report.rows[0].first_difference.startswith(named), f"\n{report}"
