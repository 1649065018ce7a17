"""Rules between the fields of a mixture of experts."""

from __future__ import annotations

from labkit.config.findings import Findings, divisors, up

MODULES = "model.recompute_modules"


def moe_rules(found: Findings) -> None:
    """Rules that need no world size."""
    if not found.sound("moe.num_experts"):
        return
    if found.config.moe.num_experts == 0:
        _dense(found)
        return
    for rules in (_cut, _expert_width, _pattern, _routing, _group_limits, _balance, _dispatch, _shared_experts):
        rules(found)
    if found.config.model.recompute_granularity == "selective" and found.sound(MODULES):
        _recompute(found)
    if found.sound("optim.fp8") and found.config.optim.fp8 != "none":
        rule = "experts do not compute in fp8: their products take as many rows as are routed to them"
        found.add("optim.fp8", f"{rule}; set it to none, or moe.num_experts to 0")


def _dense(found: Findings) -> None:
    """Options elsewhere that only a mixture of experts reads."""
    p, m, rule = found.config.parallel, found.config.model, "splits experts, but moe.num_experts = 0"
    if found.sound("parallel.ep") and p.ep > 1:
        found.add("parallel.ep", f"{rule}; set the number of experts, or ep = 1")
    if found.sound("parallel.etp", "parallel.tp") and p.expert_tp != p.tp:
        found.add("parallel.etp", f"{rule}; set the number of experts, or leave it out")
    selected = m.recompute_modules if found.sound(MODULES) and m.recompute_granularity == "selective" else ()
    if parts := sorted({"moe", "shared_experts"} & set(selected)):
        found.add(MODULES, f"names {parts[0]}, but moe.num_experts = 0; set the number of experts, or leave it out")


def _cut(found: Findings) -> None:
    """Expert parallelism shares experts out; tensor parallelism cuts them and the tokens."""
    p, experts = found.config.parallel, found.config.moe.num_experts
    if found.sound("parallel.ep"):
        advice = f"choose ep from {divisors(experts)}"
        found.multiple("moe.num_experts", p.ep, "parallel.ep", why=", which shares the experts out", advice=advice)
    if found.sound("parallel.tp", "parallel.sequence_parallel") and p.tp > 1 and not p.sequence_parallel:
        rule = f"must be true with experts and parallel.tp = {p.tp}: otherwise each of these ranks would send every"
        found.add("parallel.sequence_parallel", f"{rule} token; set it, or tp = 1")


def _expert_width(found: Findings) -> None:
    """The width of one expert is moe.ffn_hidden, else model.ffn_hidden, else 4 x hidden; etp cuts it."""
    if not found.sound("parallel.tp", "parallel.etp"):
        return
    etp, model = found.config.parallel.expert_tp, found.config.model
    given = [name for name in ("moe.ffn_hidden", "model.ffn_hidden") if found.values[name] is not None]
    if given:
        found.multiple(given[0], etp, "parallel.etp", why=", which cuts experts")
    elif found.sound("model.hidden") and 4 * model.hidden % etp:
        rule = f"must divide the width of an expert, 4 x model.hidden = {4 * model.hidden}"
        advice = f"set another, or moe.ffn_hidden = {up(4 * model.hidden, etp)}"
        found.add("parallel.etp", f"{rule}; {advice}", value=etp)


def _pattern(found: Findings) -> None:
    """Layers with experts and dense ones, repeated."""
    name, pattern, layers = "moe.layer_freq", found.config.moe.layer_freq, found.config.model.layers
    if not found.sound(name, "model.layers"):
        return
    rule = "must be a list of 1 (a layer with experts) and 0 (a dense one)"
    if len(pattern) == 1 and pattern[0] > 1:
        as_list = ",".join("1" + "0" * (min(pattern[0], 8) - 1)) + (",.." if pattern[0] > 8 else "")
        found.add(name, f"{rule}; one layer with experts in {pattern[0]}, as Megatron's integer has it, is {as_list}")
    elif not pattern or set(pattern) - {0, 1}:
        found.add(name, f"{rule}, as in 1,0")
    elif layers % len(pattern):
        rule = f"has {len(pattern)} entries, and as it is repeated that must divide model.layers = {layers}"
        found.add(name, f"{rule}; give {divisors(layers)} entries")
    elif 1 not in pattern:
        found.add(name, "makes every layer dense; give at least one 1, or set moe.num_experts = 0")


def _routing(found: Findings) -> None:
    """The number of experts of a token, and the weights that they get."""
    moe = found.config.moe
    found.at_most("moe.top_k", "moe.num_experts", f"; choose 1 to {moe.num_experts}")
    names = ("moe.score_function", "moe.pre_softmax", "moe.top_k", "moe.load_balancing")
    if not found.sound(*names) or moe.load_balancing == "sinkhorn":
        return
    if moe.score_function == "sigmoid" and moe.pre_softmax:
        found.no_effect("moe.pre_softmax", "with moe.score_function = sigmoid; set that to softmax")
    elif moe.score_function == "softmax" and moe.top_k == 1 and moe.num_experts > 1 and not moe.pre_softmax:
        rule = "must be true with moe.top_k = 1: a softmax over one chosen expert is 1 whatever its logit, and the"
        found.add("moe.pre_softmax", f"{rule} router would learn nothing; set it, or moe.score_function = sigmoid")


def _group_limits(found: Findings) -> None:
    """A token takes top_k / group_topk experts or more from each of group_topk groups."""
    moe = found.config.moe
    experts, groups, chosen, top_k = moe.num_experts, moe.num_groups, moe.group_topk, moe.top_k
    if not found.sound("moe.num_groups", "moe.group_topk", "moe.top_k"):
        return
    if groups is None or chosen is None:
        if groups is not chosen:
            names = ("moe.num_groups", "moe.group_topk")
            missing, given = names if groups is None else names[::-1]
            found.add(missing, f"must be given together with {given}; set both, or none")
        return
    found.divisor("moe.num_groups", experts, "moe.num_experts")
    found.at_most("moe.group_topk", "moe.num_groups", f"; choose 1 to {groups}")
    if found.sound("moe.num_groups", "moe.group_topk"):
        why = ", as a group is judged by its best top_k / group_topk experts"
        found.divisor("moe.group_topk", top_k, "moe.top_k", why=why)
    if found.sound("moe.num_groups", "moe.group_topk") and top_k > chosen * (experts // groups):
        rule = f"so many groups of {experts // groups} experts hold {chosen * (experts // groups)}"
        found.add("moe.group_topk", f"{rule}, and moe.top_k = {top_k}; raise it, or lower moe.num_groups")


def _balance(found: Findings) -> None:
    """Ways to even the load, and the fields that they leave without a reader."""
    moe = found.config.moe
    if not found.sound("moe.load_balancing"):
        return
    if moe.load_balancing == "sinkhorn":
        names = ("score_function", "pre_softmax", "topk_scaling_factor", "num_groups", "group_topk", "expert_bias",
                 "capacity_factor")  # fmt: skip
        for name in (f"moe.{name}" for name in names):
            if found.changed(name):
                found.no_effect(name, "with moe.load_balancing = sinkhorn, which assigns by itself; choose another")
        return
    if moe.load_balancing in ("seq_aux_loss", "global_aux_loss") and moe.aux_loss_coeff == 0:
        found.add("moe.load_balancing", "has no weight; set moe.aux_loss_coeff above 0, as in 0.01")
    if found.sound("moe.expert_bias") and moe.expert_bias and moe.score_function == "softmax":
        found.add("moe.expert_bias", "moves sigmoid scores; set moe.score_function to sigmoid, or this to false")


def _dispatch(found: Findings) -> None:
    """The dispatchers that drop tokens, and the one that moves none."""
    moe, p = found.config.moe, found.config.parallel
    if found.changed("moe.capacity_factor") and moe.dispatcher == "allgather":
        rule = "needs a dispatcher that drops before it sends, and allgather gives every rank all tokens"
        found.add("moe.capacity_factor", f"{rule}; set moe.dispatcher to alltoall, or leave this out")
    sound = found.sound("moe.dispatcher", "parallel.ep", "parallel.etp", "parallel.tp")
    if sound and moe.dispatcher == "local" and (p.ep > 1 or p.expert_tp > 1):
        rule = f"needs all experts whole on each rank, but parallel.ep = {p.ep} and etp = {p.expert_tp}"
        found.add("moe.dispatcher", f"{rule}; set it to alltoall or allgather")


def _shared_experts(found: Findings) -> None:
    """Tensor parallelism splits the shared experts."""
    if found.sound("parallel.tp"):
        why = ", which splits it over ranks"
        found.multiple("moe.shared_expert_ffn_hidden", found.config.parallel.tp, "parallel.tp", why=why)


def _recompute(found: Findings) -> None:
    """Parts of a layer with experts that can be computed again."""
    modules, moe = found.config.model.recompute_modules, found.config.moe
    if "shared_experts" in modules and moe.shared_expert_ffn_hidden is None:
        rule = "names shared_experts, and there are none"
        found.add(MODULES, f"{rule}; set moe.shared_expert_ffn_hidden, or leave it out")
    elif "moe" in modules and "shared_experts" in modules:
        found.add(MODULES, "moe contains shared_experts; name one of them")
    elif "shared_experts" in modules and moe.shared_expert_overlap is True:
        rule = "shared_experts cannot be recomputed while they are spread over the steps of the dispatch"
        found.add(MODULES, f"{rule}; set moe.shared_expert_overlap to false, or leave it out")
    elif "mlp" in modules and found.sound("moe.layer_freq") and 0 not in moe.layer_freq:
        found.add(MODULES, "mlp is that of a dense layer, and moe.layer_freq has none; name moe instead")
