"""Wrong answers to the exercises of chapter 18, with what each believes and words of its score."""

import pytest
import torch

from labkit.check import chapter_18, score
from labkit.check.chapter_18 import _PARTS, STEPS, _computed, _inside, _read_and_written
from labkit.config import GraphConfig, MoEConfig, presets
from labkit.graphs import wrap_layers
from labkit.models import GPTModel
from labkit.parallel import single_process_groups


def at(call, wrong):
    """An answer that is right for every other call."""
    return lambda scope, other: wrong(_computed(scope, call)) if other == call else _computed(scope, other)


RUNS = {
    # Believes that the whole forward runs again at a replay, as if no step found its result in the store.
    "again": (at("replay", lambda right: STEPS), "their results are in the store"),
    # Believes that the capture goes on after the graph's last step, as if nobody raised a signal.
    "goes on": (at("capture", lambda right: STEPS[STEPS.index(right[0]) :]), "the signal ends the forward there"),
    # Believes that the signal comes before the last captured step, so that neither the graph nor a capture has its
    # work.
    "early": (at("capture", lambda right: right[:-1]), "the signal comes when its work is done"),
}


def parts(scope):
    return [part for word in scope for part in _PARTS[word]]


HOOKS = {
    # Takes every module with parameters, the experts too, although Python calls these and their own hooks run.
    "all": (lambda modules, scope: [name for name, own in modules.items() if own], "their own hooks run"),
    # Takes only the parts that the scope names, although their parameters belong to the modules inside.
    "parts": (
        lambda modules, scope: [name for name in modules if name in parts(scope)],
        "parameters are in the modules inside",
    ),
    # Takes every module inside a captured part, also those that own no parameter to wait for.
    "no parameters": (lambda modules, scope: _inside(modules, parts(scope)), "there is nothing to wait for"),
}


def coming_out(wanted):
    """An answer whose outputs are the captured names in `wanted(names, steps behind the graph, result)`."""

    def boundary(steps, captured):
        inputs, written = _read_and_written(steps[:captured])
        kept = wanted(written, steps[captured:], steps[-1][2])
        return inputs, [name for name in written if name in kept]

    return boundary


BOUNDARIES = {
    # Lets everything come out that is computed in the graph; its memory could then never be reused.
    "all": (coming_out(lambda written, after, result: written), "could be used again"),
    # Asks only what the very next step reads, and forgets the residual and the shared experts.
    "next step": (coming_out(lambda _, after, result: after[0][1] if after else result), "others read later"),
    # Lets whatever later steps read by name come out, even if its value is another one by then.
    "by name": (
        coming_out(lambda _, after, result: {name for _, reads, _ in after for name in reads} | set(result)),
        "has another value",
    ),
}

TABLES = {"18.runs": RUNS, "18.hooks": HOOKS, "18.boundary": BOUNDARIES}


def test_a_name_too_much_at_a_boundary_has_its_reason() -> None:
    def names(steps, captured):
        read, written = ([name for step in steps[:captured] for name in step[which]] for which in (1, 2))
        return read, written

    assert "(t is too much: a captured step writes it before it is read)" in repr(score("18.boundary", names))
    both = lambda steps, captured: (["x"], ["x", "y"])  # noqa: E731
    assert "(x is too much: no captured step writes it, so the caller has it)" in repr(score("18.boundary", both))


def test_a_hook_too_few_is_unsafe_and_one_too_many_is_not() -> None:
    named = [name for name, _ in chapter_18._CASES[0][1].items()]
    assert "(unsafe: attention.norm would compute with" in repr(score("18.hooks", lambda modules, scope: []))
    told = repr(score("18.hooks", lambda modules, scope: named))
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
