"""Scores of the chapters on CUDA graphs: each misunderstanding gets a sentence of its own, told once."""

import sys
from pathlib import Path

import pytest
import torch

from labkit.check import chapter_18, check
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


LAUNCHES = {
    "one by one the host launches each operation": lambda works, launch, graph: launch + sum(works),
    "the device can be further behind": lambda works, launch, graph: (
        launch + sum(works) if graph else launch * len(works) + works[-1]
    ),
    "the host can be many operations ahead": lambda works, launch, graph: (
        launch + sum(works if graph else [max(launch, work) for work in works])
    ),
}


@pytest.mark.parametrize("words", LAUNCHES)
def test_a_wrong_model_of_time_is_named_by_the_misunderstanding_that_fits_every_case(words: str) -> None:
    told = repr(check("16.launches", LAUNCHES[words]))
    assert told.count(words) == 1 and "beside the one before" not in told


def clip(counted, bad=lambda finite: finite.all()):
    """A clip that counts by `counted(norm, limit, finite)` and keeps entries by `bad(finite)`."""

    def clipped(x, limit, count):
        finite = x.isfinite()
        kept = torch.where(bad(finite), x, 0.0)
        count.add_(counted(x.norm(), limit, ~finite.all()))
        return torch.where(kept.norm() > limit, kept * (limit / kept.norm()), kept)

    return clipped


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("False where the norm is NaN", clip(lambda norm, limit, bad: norm > limit)),
        ("equal to the limit does not count", clip(lambda norm, limit, bad: (norm >= limit) | bad)),
        ("inf counts once", clip(lambda norm, limit, bad: (norm > limit).int() + bad.int())),
        ("makes all entries zero", clip(lambda norm, limit, bad: (norm > limit) | bad, lambda finite: finite)),
    ],
)
def test_a_clip_hears_which_case_it_missed(words: str, answer) -> None:
    assert words in repr(check("16.clipped", answer))
    assert check("16.clipped", clip(lambda norm, limit, bad: (norm > limit) | bad)).passed


def test_a_norm_of_zero_is_told_from_an_infinite_entry() -> None:
    def always_scaled(x, limit, count):
        finite = x.isfinite().all()
        count.add_(~finite | (x.norm() > limit))
        return torch.where(finite, x * limit / x.norm(), 0.0)

    assert "the norm is 0" in repr(check("16.clipped", always_scaled))


def test_a_name_too_much_at_a_boundary_has_its_reason() -> None:
    def names(steps, captured):
        read, written = ([name for step in steps[:captured] for name in step[which]] for which in (1, 2))
        return read, written

    assert "(t is too much: a captured step writes it before it is read)" in repr(check("18.boundary", names))
    both = lambda steps, captured: (["x"], ["x", "y"])  # noqa: E731
    assert "(x is too much: no captured step writes it, so the caller has it)" in repr(check("18.boundary", both))


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
    assert "captures F0 (writes 0), F1 (writes 1), B0 (reads 0, writes 2), F2 (writes 0)" in repr(score)
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
    named = [name for name, _ in chapter_18._CASES[0][1].items()]
    assert "(unsafe: attention.norm would compute with" in repr(check("18.hooks", lambda modules, scope: []))
    told = repr(check("18.hooks", lambda modules, scope: named))
    assert "(safe, but attention waits for nothing)" in told and "unsafe: mlp.shared_experts" in told


@pytest.mark.parametrize("scope", [("attn",), ("moe_router",), ("attn", "moe_router", "moe_preprocess")])
def test_hooks_are_asked_for_the_modules_that_labkit_hooks(scope: tuple[str, ...]) -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden=16, shared_expert_ffn_hidden=16)
    gpt = GPTModel(presets.tiny().model, single_process_groups(), layers=range(1), moe=moe, seed=0)
    (wrapper,) = wrap_layers(gpt, GraphConfig(cuda_graph_impl="emulated", cuda_graph_modules=scope))
    called: list[torch.nn.Module] = []
    wrapper.setup_manual_hooks(lambda: called.append)
    names = {module: name for name, module in gpt.layers["0"].named_modules()}
    hooks = [names[module] for _, (module,) in wrapper.cuda_graph_manual_hooks]
    modules = {name: len(list(module.parameters(recurse=False))) for module, name in names.items() if name}
    assert sorted(hooks) == sorted(chapter_18._hooked(modules, scope))
