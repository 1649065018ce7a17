"""Rules of `graph.cuda_graph_scope`: which parts can be captured, and what excludes what.

A captured part runs without Python: fixed shapes, no number read on the host, fixed addresses. So what waits for a
count, or resizes memory, or draws again in backward what it drew in forward, stays outside.

| rule                                    | reason                                                                     |
|-----------------------------------------|----------------------------------------------------------------------------|
| `full_iteration` alone, not by TE       | it holds every other part; Transformer Engine captures layers              |
| `moe_preprocess` with `moe_router`      | it works on the router's output                                            |
| `moe` without `moe_router`              | it holds the router                                                        |
| `moe` by drop-and-pad only              | else the number of rows of an expert is known only after routing           |
| no `moe_preprocess` with bare capacity  | rows that a capacity drops must be counted on the host first               |
| no sinkhorn in a graph                  | it iterates until the host sees that its factors have settled              |
| full recomputation by `full_iteration`  | it recomputes across the borders of layers                                 |
| no recomputed `moe` with `moe_router`   | the recomputed part would begin inside the graph and end outside           |
| recomputed parts without dropout, jitter| backward must draw the masks of forward again, from a state Python restores|
| layers recompute for all microbatches   | which microbatches keep everything is Python, which a graph has frozen     |
| whole layers where backwards are split  | W of eager parts would read outputs of graphs that others have overwritten |
| full_iteration: constant loss scale     | a captured step multiplies by the number that the scale was at capture     |
| fp8 with delayed scales after a step    | the first step has no history yet, and scales differently                  |
| no recomputed norm in a graph           | it frees and refills its output, whose address the graph has fixed         |
"""

from __future__ import annotations

from labkit.config.errors import nearest, shown
from labkit.config.findings import Findings
from labkit.config.limits import GRAPH_SCOPES, SPLIT_BACKWARDS

SCOPE = "graph.cuda_graph_scope"


def graph_rules(found: Findings) -> None:
    """All rules of the section."""
    got = found.get("graph.cuda_graph_impl", SCOPE)
    if got is None:
        return
    impl, scope = got
    if rule := _scope_rule(scope):
        found.add(SCOPE, rule)
    elif impl == "none":
        if scope:
            found.add(SCOPE, "nothing is captured with graph.cuda_graph_impl = none; set it, or drop this")
    else:
        for check in (_full_iteration, _parts_there, _experts, _split_backwards, _recompute, _precision):
            if found.sound(SCOPE):
                check(found, impl, frozenset(scope))


def _scope_rule(scope: tuple[str, ...]) -> str:
    """What is wrong with the words themselves."""
    for part in scope:
        if part not in GRAPH_SCOPES:
            known = ", ".join(GRAPH_SCOPES)
            return f"{shown(part)} is no part of a layer; choose from {known}{nearest(part, GRAPH_SCOPES)}"
    if len(set(scope)) < len(scope):
        return "names a part twice"
    if "full_iteration" in scope and len(scope) > 1:
        return "full_iteration captures everything, so it stands alone"
    if {"moe", "moe_router"} <= set(scope):
        return "moe contains moe_router; name one of them"
    if "moe_preprocess" in scope and "moe_router" not in scope:
        return "moe_preprocess works on the router's output; add moe_router"
    return ""


def _full_iteration(found: Findings, impl: str, scope: frozenset[str]) -> None:
    """One graph of all microbatches of a step."""
    if "full_iteration" not in scope:
        return
    if impl == "transformer_engine":
        rule = "full_iteration is not to be had from Transformer Engine, which captures layer by layer"
        found.add(SCOPE, f"{rule}; set graph.cuda_graph_impl to local or emulated")
    elif (got := found.get("parallel.pp")) and got[0] > 1:
        rule = f"full_iteration would hold messages between parallel.pp = {got[0]} stages, which wait for other ranks"
        found.add(SCOPE, f"{rule}; capture parts of layers, as in attn,mlp, or set pp = 1")


def _parts_there(found: Findings, _: str, scope: frozenset[str]) -> None:
    """A named part must be in some layer."""
    got = found.get("moe.num_experts", "moe.layer_freq")
    if got is None:
        return
    experts, pattern = got
    with_experts = sorted(scope & {"moe", "moe_router"})
    if with_experts and not experts:
        rule = f"{with_experts[0]} is a part of layers with experts, but moe.num_experts = 0"
        found.add(SCOPE, f"{rule}; set the number of experts, or name attn and mlp")
    elif "mlp" in scope and experts and 0 not in pattern:
        rule = "mlp is that of a dense layer, and moe.layer_freq has none"
        found.add(SCOPE, f"{rule}; name moe_router and moe_preprocess")


def _experts(found: Findings, _: str, scope: frozenset[str]) -> None:
    """What of a layer with experts has shapes that are known before routing."""
    names = ("num_experts", "capacity_factor", "pad_to_capacity", "dispatcher", "load_balancing")
    got = found.get(*(f"moe.{name}" for name in names))
    if got is None or not got[0]:
        return
    _, capacity, padded, dispatcher, balancing = got
    whole = _holds(scope, "moe")
    if whole and not (capacity is not None and padded):
        what = "moe" if "moe" in scope else "full_iteration" if scope else "the whole layer (an empty scope)"
        rule = f"{what} holds the experts, and how many rows each of them gets is known only after routing"
        advice = "set moe.capacity_factor and moe.pad_to_capacity, or capture attn, moe_router and moe_preprocess"
        found.add(SCOPE, f"{rule}; {advice}")
    elif "moe_preprocess" in scope and dispatcher != "allgather" and capacity is not None and not padded:
        rule = "moe_preprocess would count on the host what moe.capacity_factor leaves of the rows"
        found.add(SCOPE, f"{rule}; set moe.pad_to_capacity, or leave moe_preprocess out")
    elif (whole or "moe_router" in scope) and balancing == "sinkhorn":
        rule = "moe.load_balancing = sinkhorn looks at its factors on the host until they have settled"
        found.add(SCOPE, f"{rule}; choose another, or leave {'moe' if whole else 'moe_router'} out")


def _split_backwards(found: Findings, impl: str, scope: frozenset[str]) -> None:
    """Weight gradients that are put off read what graphs have handed to eager code."""
    got = found.get("schedule.name", "schedule.path", "moe.num_experts", "moe.layer_freq")
    if got is None or "full_iteration" in scope or got[1] is not None or got[0] not in SPLIT_BACKWARDS:
        return
    name, _, experts, pattern = got
    needed = {"attn", *(["moe"] if experts and any(pattern) else []), *(["mlp"] if not experts or 0 in pattern else [])}
    advice = "choose a schedule with whole backwards (auto, 1f1b, gpipe)"
    if impl == "transformer_engine":
        rule = f"schedule.name = {name} splits backwards into input and weight gradients, which the engine computes"
        found.add("graph.cuda_graph_impl", f"{rule} together; {advice}, or set this to local")
    elif scope and not needed <= scope:
        rule = f"schedule.name = {name} splits backwards, and of these layers a part stays eager: its weight gradients"
        rule += " would read outputs of graphs that others have overwritten by then"
        found.add(SCOPE, f"{rule}; capture whole layers (an empty scope), or {advice}")


_RECOMPUTED_WITH = {"core_attn": "attn", "mlp": "mlp", "moe": "moe", "shared_experts": "moe_router"}
"""The captured part in which a recomputed one lies."""


def _recompute(found: Findings, impl: str, scope: frozenset[str]) -> None:
    """Recomputed parts lie in a graph or outside; and what they draw in a graph cannot be drawn again."""
    got = found.get("model.recompute_granularity", "model.recompute_modules")
    if got is None or got[0] == "none":
        return
    granularity, modules = got
    if granularity == "full" and "full_iteration" not in scope:
        rule = "model.recompute_granularity = full recomputes across layers, each of which would be a graph"
        found.add(SCOPE, f"{rule}; set it to selective, or the scope to full_iteration")
    elif granularity == "full":
        _draws(found, "the layers are", ["model.hidden_dropout", "model.attention_dropout", "moe.input_jitter"], "")
    elif "moe" in modules and "moe_router" in scope:
        rule = "model.recompute_modules has moe: that part would begin in the graph, with the router, and end outside"
        found.add(SCOPE, f"{rule}; recompute shared_experts, or leave moe_router out")
    elif "layernorm" in modules:
        rule = "model.recompute_modules has layernorm, which frees the norm's output and fills it again elsewhere"
        found.add(SCOPE, f"{rule}, but a graph has fixed its address; leave layernorm out")
    else:
        if "core_attn" in modules and _holds(scope, "attn"):
            _draws(found, "core_attn is", ["model.attention_dropout"], ", or leave attn out")
        if "moe" in modules and _holds(scope, "moe"):
            _draws(found, "moe is", ["moe.input_jitter"], "")
        _partial_checkpoints(found, [name for name in modules if _holds(scope, _RECOMPUTED_WITH[name])], scope)


def _draws(found: Findings, what: str, names: list[str], advice: str) -> None:
    """Nothing inside a recomputed part of a graph draws: `names` are all 0."""
    experts = found.values["moe.num_experts"]
    drawing = [name for name in names if found.values[name] and (experts or not name.startswith("moe."))]
    if drawing and found.get(*names, "moe.num_experts"):
        numbers = " and ".join(f"{name} = {found.values[name]:g}" for name in drawing)
        rule = f"{what} recomputed in a graph and would draw random numbers ({numbers})"
        found.add(SCOPE, f"{rule}: a graph cannot draw the same again; set them to 0, or recompute less{advice}")


def _partial_checkpoints(found: Findings, captured: list[str], scope: frozenset[str]) -> None:
    """Graphs of layers recompute always or never."""
    name = "model.num_microbatches_with_partial_activation_checkpoints"
    if captured and "full_iteration" not in scope and found.values[name] is not None and found.sound(name):
        rule = f"{captured[0]} is recomputed inside graphs of layers, for all microbatches alike, but {name}"
        found.add(SCOPE, f"{rule} = {found.values[name]} is to keep some whole; leave that out, or capture other parts")


def _precision(found: Findings, _: str, scope: frozenset[str]) -> None:
    """Numbers that Python keeps are what they were at capture."""
    got = found.get("optim.precision", "optim.loss_scale")
    if got and "full_iteration" in scope and got[0] == "fp16" and got[1] is None:
        rule = "full_iteration multiplies the loss inside the graph, by the loss scale at capture, and fp16's adapts"
        found.add(SCOPE, f"{rule}; set optim.loss_scale to a constant, or optim.precision to bf16")
    got = found.get("optim.fp8", "optim.fp8_recipe", "graph.cuda_graph_warmup_steps")
    if got and got[0] != "none" and got[1] == "delayed" and got[2] == 0:
        rule = "must be at least 1 with optim.fp8_recipe = delayed: the first step has no history yet to scale by"
        found.add("graph.cuda_graph_warmup_steps", rule)


def _holds(scope: frozenset[str], part: str) -> bool:
    """Whether `part` is captured: named, or in the whole layer (an empty scope), or in the whole iteration."""
    return not scope or not scope.isdisjoint({part, "full_iteration"})
