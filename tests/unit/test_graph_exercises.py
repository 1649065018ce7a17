"""Scores of the chapters on CUDA graphs: each misunderstanding gets a sentence of its own, told once."""

import sys
from pathlib import Path

import pytest
import torch

from labkit.check import check
from labkit.check.graphs import partial_replays
from labkit.config import GraphConfig, MoEConfig, presets
from labkit.graphs import wrap_layers
from labkit.models import GPTModel
from labkit.parallel import single_process_groups

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebooks"))

SAID = {
    "16.launches": ("the host launches on", "before its own launch", "a graph is launched once"),
    "16.clipped": ("an `if` on a tensor asks", "makes another tensor", "torch.where chooses"),
    "16.stale": ("another order can be harmless", "the same graph as at capture", "may write one address"),
    "17.held": ("a backward gives one back", "later more can be in flight", "the chunks of a rank wait together"),
    "17.buffers": ("a backward names its chunk", "can be taken", "beside the warm-up"),
    "17.unsafe": (
        "a backward names its chunk",
        "after the backward a second use is safe",
        "the plan overwrites an input",
    ),
    "18.runs": (
        "their results lie in the store",
        "the signal ends the forward there",
        "the signal comes when its work is done",
    ),
    "18.hooks": ("their own hooks run", "parameters lie in the modules inside", "there is nothing to wait for"),
    "18.boundary": ("could be used again", "others read later", "has another value"),
}
"""Exercise -> words for wrong_1, wrong_2 and wrong_3."""


@pytest.mark.parametrize("name", SAID)
def test_each_wrong_answer_is_named_once(name: str) -> None:
    from test_exercises import wrong_answers

    for words, (wrong, answer) in zip(SAID[name], wrong_answers(name).items(), strict=True):
        assert repr(check(name, answer)).count(words) == 1, f"{name} {wrong}"


def test_a_clip_has_one_denominator_and_says_what_was_refused() -> None:
    """An answer that cannot be captured loses its replays, and hears about them once."""

    def asks(x, limit, count):
        return x * min(1.0, limit.item() / x.norm().item()) if x.isfinite().all() else torch.zeros_like(x)

    for answer in (asks, lambda x, limit, count: None, lambda x, limit, count: x):
        score = check("16.clipped", answer)
        assert score.total == 12
        told = [str(outcome) for outcome in score.outcomes if outcome.told and not outcome.passed]
        assert len({text.split("got ")[1] for text in told}) == len(told)


def test_a_stale_read_is_named_with_its_place_and_writer() -> None:
    score = check("16.stale", lambda captures, replays: [])
    assert "(position 1: B0 reads address 0, wants F0, finds None)" in repr(score)
    harmless = check("16.stale", lambda captures, replays: list(range(len(replays))))
    assert "(every read finds its own writer here)" in repr(harmless)


def test_a_safe_plan_is_told_from_one_that_overwrites() -> None:
    own = repr(check("17.buffers", lambda order: list(range(sum(step > 0 for step in order)))))
    assert "safe, but forward 2 takes buffer 2 instead of 0, and takes 1 more buffer" in own
    assert "overwritten" not in own
    one = repr(check("17.buffers", lambda order: [0 for step in order if step > 0]))
    assert "buffer 0 is overwritten by the forward at position 1, and the backward at position 2" in one
    assert "safe, but" not in one


def test_a_hook_too_few_is_unsafe_and_one_too_many_is_not() -> None:
    named = [name for name, _ in partial_replays._CASES[0][1].items()]
    assert "(unsafe: attention.norm would compute with" in repr(check("18.hooks", lambda modules, scope: []))
    told = repr(check("18.hooks", lambda modules, scope: named))
    assert "(safe, but attention waits for nothing)" in told and "unsafe: mlp.shared_experts" in told


@pytest.mark.parametrize("scope", [("attn",), ("moe_router",), ("attn", "moe_router", "moe_preprocess")])
def test_hooks_are_asked_for_the_modules_that_labkit_hooks(scope: tuple[str, ...]) -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden=16, shared_expert_ffn_hidden=16)
    gpt = GPTModel(presets.tiny().model, single_process_groups(), layers=range(1), moe=moe, seed=0)
    (wrapper,) = wrap_layers(gpt, GraphConfig(cuda_graph_impl="emulated", cuda_graph_scope=scope))
    called: list[torch.nn.Module] = []
    wrapper.setup_manual_hooks(lambda: called.append)
    names = {module: name for name, module in gpt.layers["0"].named_modules()}
    hooks = [names[module] for _, (module,) in wrapper.cuda_graph_manual_hooks]
    modules = {name: len(list(module.parameters(recurse=False))) for module, name in names.items() if name}
    assert sorted(hooks) == sorted(partial_replays._hooked(modules, scope))
