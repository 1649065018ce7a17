"""Rules of `graph.cuda_graph_modules`: which parts can be captured, and which exclude each other.

Python does not run inside a captured part: shapes and addresses are fixed, and the host reads no number. So every part
that waits for a count, resizes memory, or draws forward's random numbers again in backward stays outside. The messages
below give the reason of each rule.
"""

from __future__ import annotations

from collections.abc import Collection

from labkit.config.choices import CAPTURED_PARTS, RECOMPUTED_PARTS, named_schedule
from labkit.config.errors import nearest, shown
from labkit.config.findings import Findings

MODULES = "graph.cuda_graph_modules"


def graph_rules(found: Findings) -> None:
    """Apply all rules of the section. Only the first one that the modules break is reported."""
    graph = found.config.graph
    if rule := _words_rule(graph.cuda_graph_modules):
        found.add(MODULES, rule)
    elif graph.cuda_graph_impl == "full_iteration" and graph.cuda_graph_modules:
        found.add(MODULES, "graph.cuda_graph_impl = full_iteration captures all parts of all layers; leave this out")
    elif graph.cuda_graph_impl != "none":
        merges = found.config.schedule.overlap_moe_expert_parallel_comm
        layers = (_merged_pairs, _experts) if merges else (_experts, _split_backwards)
        found.check(_full_iteration, _parts_there, *layers, _recompute, _constant_loss_scale)
    elif graph.cuda_graph_modules:
        found.add(MODULES, "nothing is captured with graph.cuda_graph_impl = none; set that, or leave this out")


def _scope(found: Findings) -> frozenset[str]:
    """Return the parts to capture, or `full_iteration` alone if a graph contains the whole step."""
    graph = found.config.graph
    return frozenset(["full_iteration"] if graph.is_full_iteration else graph.cuda_graph_modules)


def _refuse(found: Findings, rule: str) -> None:
    """Note that what is captured breaks `rule`, at the field that says what is captured."""
    found.add("graph.cuda_graph_impl" if found.config.graph.cuda_graph_impl == "full_iteration" else MODULES, rule)


def _words_rule(scope: tuple[str, ...]) -> str:
    """Return the rule that the words themselves break, or an empty string."""
    if unknown := [part for part in scope if part not in (*CAPTURED_PARTS, "full_iteration")]:
        known = ", ".join(CAPTURED_PARTS)
        return f"{shown(unknown[0])} is not a part of a layer; choose from {known}{nearest(unknown[0], CAPTURED_PARTS)}"
    if len(set(scope)) < len(scope):
        return "names a part twice; name it once"
    if "full_iteration" in scope and len(scope) > 1:
        return "full_iteration captures everything, so it must be the only name"
    if {"moe", "moe_router"} <= set(scope):
        return "moe contains moe_router; name one of them"
    if "moe_preprocess" in scope and "moe_router" not in scope:
        return "moe_preprocess works on the router's output; add moe_router"
    return ""


def _full_iteration(found: Findings) -> None:
    """Reject a single graph for all microbatches of a step where it cannot be captured."""
    pp = found.config.parallel.pp
    if "full_iteration" not in _scope(found):
        return
    if found.config.graph.cuda_graph_impl == "transformer_engine":
        rule = "Transformer Engine cannot do full_iteration, because it captures layer by layer"
        found.add(MODULES, f"{rule}; set graph.cuda_graph_impl to full_iteration, and leave this out")
    elif pp > 1:
        rule = f"full_iteration would contain messages between parallel.pp = {pp} stages, which wait for other ranks"
        _refuse(found, f"{rule}; capture parts of layers, as in attn,mlp, or set pp = 1")


def _parts_there(found: Findings) -> None:
    """Reject a named part that is in no layer."""
    moe, scope, held = found.config.moe, _scope(found), _captured_by_part(found)
    if absent := sorted((scope & {"mamba", "attn", "mlp"}) - held):
        rule = f"{absent[0]} is not a part of any layer of this model"
        _refuse(found, f"{rule}; choose from {', '.join(sorted(held))}")
        return
    with_experts = sorted(scope & {"moe", "moe_router"})
    if with_experts and not moe.num_experts:
        rule = f"{with_experts[0]} is a part of layers with experts, but moe.num_experts = 0"
        _refuse(found, f"{rule}; set the number of experts, or name attn and mlp")
    elif "mlp" in scope and moe.num_experts and 0 not in moe.layer_freq:
        rule = "mlp is the MLP of a dense layer, and moe.layer_freq has no dense layer"
        _refuse(found, f"{rule}; name moe_router and moe_preprocess")


def _captured_by_part(found: Findings) -> set[str]:
    """Return the words of the scope for the parts of this model's layers, except for experts."""
    m = found.config.model
    if m.family != "mamba":
        return {"attn", "mlp"}
    words = {"M": "mamba", "*": "attn", "-": "mlp"}
    return {words[letter] for letter in m.hybrid_override_pattern or "M" if letter in words}


def _experts(found: Findings) -> None:
    """Reject layers with experts whose shapes are known only after routing."""
    moe, scope = found.config.moe, _scope(found)
    if not moe.num_experts:
        return
    whole, padded = _holds(scope, "moe"), moe.capacity_factor is not None and moe.pad_to_capacity
    if whole and not padded:
        part = "moe" if "moe" in scope else "full_iteration" if scope else "the whole layer (no module named)"
        rule = f"{part} contains the experts, and how many rows each of them gets is known only after routing"
        advice = "set moe.capacity_factor and moe.pad_to_capacity, or capture attn, moe_router and moe_preprocess"
        _refuse(found, f"{rule}; {advice}")
    elif "moe_preprocess" in scope and moe.dispatcher != "allgather" and moe.capacity_factor is not None and not padded:
        rule = "moe_preprocess would count on the host how many rows moe.capacity_factor keeps"
        _refuse(found, f"{rule}; set moe.pad_to_capacity, or leave moe_preprocess out")
    elif (whole or "moe_router" in scope) and moe.load_balancing == "sinkhorn":
        rule = "moe.load_balancing = sinkhorn checks on the host whether its factors have converged"
        _refuse(found, f"{rule}; choose another, or leave {'moe' if whole else 'moe_router'} out")


def _split_backwards(found: Findings) -> None:
    """Reject delayed weight gradients that would read tensors which graphs have handed to eager code."""
    moe, s, scope = found.config.moe, found.config.schedule, _scope(found)
    if "full_iteration" in scope or s.path is not None:
        return
    if not named_schedule(s.name, found.config.parallel.vpp).splits_backward:
        return
    needed = _captured_by_part(found)
    if moe.num_experts:
        needed = {"attn", *(part for kind, part in ((0, "mlp"), (1, "moe")) if kind in moe.layer_freq)}
    advice = "choose a schedule with whole backwards (auto, 1f1b, gpipe)"
    if found.config.graph.cuda_graph_impl == "transformer_engine":
        rule = f"schedule.name = {s.name} splits backwards into input and weight gradients, which the engine computes"
        found.add("graph.cuda_graph_impl", f"{rule} together; {advice}, or set this to local")
    elif scope and not needed <= scope:
        rule = f"schedule.name = {s.name} splits backwards, and a part of these layers stays eager"
        why = "by then other replays have overwritten the graph outputs that its weight gradients read"
        _refuse(found, f"{rule}: {why}; capture whole layers (no module named), or {advice}")


def _merged_pairs(found: Findings) -> None:
    """Reject graphs that reach beyond the first part of a layer, and backwards of both kinds."""
    graph, s, scope = found.config.graph, found.config.schedule, _scope(found)
    beyond = next((part for part in ("full_iteration", "moe", "mlp") if part in scope), "")
    if beyond or not scope:
        part = beyond or "the whole layer (no module named)"
        rule = "with schedule.overlap_moe_expert_parallel_comm another microbatch runs after the first part of a layer"
        _refuse(found, f"{rule}, and {part} reaches beyond it; name attn, moe_router and moe_preprocess")
    elif defers_weight_gradients(scope, found.config.moe.shared_expert_ffn_hidden):
        splits = s.path is None and named_schedule(s.name, found.config.parallel.vpp).splits_backward
        engine = graph.cuda_graph_impl == "transformer_engine"
        if engine and (splits or s.delay_wgrad_compute):
            apart = (
                f"schedule.name = {s.name} splits backwards" if splits else "schedule.delay_wgrad_compute splits them"
            )
            rule = f"Transformer Engine captures weight gradients together with input gradients, but {apart}"
            advice = "choose schedule.name 1f1b" if splits else "leave that out"
            found.add("graph.cuda_graph_impl", f"{rule}; {advice}, or set this to local")
        elif splits and not s.delay_wgrad_compute:
            rule = f"schedule.name = {s.name} splits some backwards and merges others whole, and graphs need all alike"
            _refuse(found, f"{rule}; set schedule.delay_wgrad_compute, which splits merged ones as well")


def defers_weight_gradients(scope: Collection[str], shared_expert_ffn_hidden: int | None) -> bool:
    """Return True if graphs of this scope within merged pairs hold linear layers: backwards can leave their weight
    gradients out (Megatron's `wgrad_in_graph_scope`)."""
    return "attn" in scope or ("moe_router" in scope and shared_expert_ffn_hidden is not None)


def _recompute(found: Findings) -> None:
    """Reject a recomputed part that is only partly in a graph, or that draws random numbers in one."""
    m, scope = found.config.model, _scope(found)
    modules = m.recompute_modules if m.recompute_granularity == "selective" else ()
    if m.recompute_granularity == "full" and "full_iteration" not in scope:
        rule = "model.recompute_granularity = full recomputes across layers, each of which would be a graph"
        _refuse(found, f"{rule}; set it to selective, or graph.cuda_graph_impl to full_iteration")
    elif m.recompute_granularity == "full":
        _draws(found, "the layers are", ["model.hidden_dropout", "model.attention_dropout", "moe.input_jitter"])
    elif "moe" in modules and "moe_router" in scope:
        rule = "model.recompute_modules has moe: that part would begin in the graph, with the router, and end outside"
        _refuse(found, f"{rule}; recompute shared_experts, or leave moe_router out")
    elif "layernorm" in modules:
        rule = "model.recompute_modules has layernorm, which frees the norm's output and fills it again elsewhere"
        _refuse(found, f"{rule}, but a graph has fixed its address; leave layernorm out")
    elif captured := [name for name in modules if _holds(scope, RECOMPUTED_PARTS[name].captured_in)]:
        if "core_attn" in captured:
            _draws(found, "core_attn is", ["model.attention_dropout"], ", or leave attn out")
        if "moe" in captured:
            _draws(found, "moe is", ["moe.input_jitter"])
        name = "model.num_microbatches_with_partial_activation_checkpoints"
        if "full_iteration" not in scope and found.changed(name):
            rule = f"{captured[0]} is recomputed inside graphs of layers, in every microbatch, but {name} ="
            advice = "leave that out, or capture other parts"
            _refuse(found, f"{rule} {found.values[name]} keeps some whole; {advice}")


def _draws(found: Findings, subject: str, names: list[str], advice: str = "") -> None:
    """Reject `names` that are not 0, because a graph that recomputes a part cannot draw forward's numbers again."""
    if drawing := [name for name in names if found.value(name)]:
        numbers = " and ".join(f"{name} = {found.values[name]:g}" for name in drawing)
        rule = f"{subject} recomputed in a graph and would draw random numbers ({numbers})"
        _refuse(found, f"{rule}: a graph cannot draw the same numbers again; set them to 0, or recompute less{advice}")


def _constant_loss_scale(found: Findings) -> None:
    """Reject a loss scale that changes, because a number that Python keeps has its value of the capture in a graph."""
    o = found.config.optim
    if "full_iteration" in _scope(found) and o.precision == "fp16" and o.loss_scale is None:
        rule = "the graph of full_iteration keeps the loss scale of its capture, but fp16's adaptive scale changes"
        _refuse(found, f"{rule}; set optim.loss_scale to a constant, or optim.precision to bf16")


def _holds(scope: frozenset[str], part: str | None) -> bool:
    """Return True if `part` is captured: by its name, in the whole layer (no module named), or in the whole step."""
    return not scope or not scope.isdisjoint({part, "full_iteration"})
