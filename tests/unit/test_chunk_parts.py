"""A microbatch that runs part by part, in one process: the bits of the whole forward, and what recomputation keeps."""

import pytest
import torch

from labkit.config import ModelConfig, MoEConfig
from labkit.models.gpt import GPTModel
from labkit.parallel import WeightGradStore, single_process_groups

MOE = MoEConfig(num_experts=4, layer_freq=(0, 1), ffn_hidden=16, shared_expert_ffn_hidden=16)
TOKENS = torch.arange(32).view(2, 16) % 64


def model(modules: tuple[str, ...]) -> GPTModel:
    again = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    shape = ModelConfig(layers=2, hidden=16, heads=2, seq_length=16, vocab_size=64, **again)
    return GPTModel(shape, single_process_groups(), layers=range(2), moe=MOE, seed=1)


def by_parts(chunk: GPTModel, *, delay: bool) -> list[int]:
    """Run a microbatch forward and backward; return the bytes of the norms' outputs in between."""
    norms, store = [], WeightGradStore()
    for layer in chunk.layers.values():
        layer.mlp.norm.register_forward_hook(lambda module, given, made: norms.append(made))
    run = chunk.in_parts(TOKENS, labels_BS=TOKENS)
    run.begin()
    order = [(number, part) for number, parts in enumerate(run.layers) for part in parts]
    for number, part in order:
        run.forward(number, part)
    loss = run.finish().sum()
    sizes = [made.untyped_storage().nbytes() for made in norms]
    loss.backward()
    run.begin_backward(run.last_input.grad)
    for number, part in reversed(order):
        if not delay or part == "combine":
            run.backward(number, part)
            continue
        with store.collecting((number, part)):
            run.backward(number, part)
        store.run((number, part))
    run.finish_backward()
    return sizes


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("modules", [(), ("layernorm",), ("core_attn", "layernorm", "mlp", "shared_experts")], ids=str)
def test_parts_give_the_bits_of_the_whole_and_keep_no_norm_that_is_recomputed(modules, delay):
    whole, cut = model(modules), model(modules)
    whole(TOKENS, labels_BS=TOKENS).sum().backward()
    sizes = by_parts(cut, delay=delay)
    for (name, one), other in zip(whole.named_parameters(), cut.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name
    kept = 2 * 16 * 16 * 4
    assert sizes == ([0, 0] if "layernorm" in modules else [kept, kept])
