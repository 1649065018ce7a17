"""Rules between the fields of a mixture of experts."""

from __future__ import annotations

from labkit.config.fields import SPECS
from labkit.config.findings import Findings, divisors, up


def moe_rules(found: Findings) -> None:
    """Those that need no world size."""
    if not found.sound("moe.num_experts"):
        return
    if found.values["moe.num_experts"] == 0:
        _dense(found)
        return
    _cut(found)
    _pattern(found)
    _routing(found)
    _balance(found)
    _capacity(found)
    _dispatch(found)
    _shared_experts(found)
    _recompute(found)


def _dense(found: Findings) -> None:
    """Without experts nothing of the section is read."""
    if found.sound("parallel.ep") and found.values["parallel.ep"] > 1:
        found.add("parallel.ep", "splits experts, but moe.num_experts = 0; set the number of experts, or ep = 1")
    if (got := found.get("parallel.etp", "parallel.tp")) and got[0] not in (None, got[1]):
        found.add("parallel.etp", "splits experts, but moe.num_experts = 0; set the number of experts, or leave it out")
    names = [name for name in SPECS if name.startswith("moe.") and name != "moe.num_experts"]
    found.no_effect(names, "with moe.num_experts = 0; set the number of experts")


def _cut(found: Findings) -> None:
    """What expert and tensor parallelism divide."""
    experts = found.values["moe.num_experts"]
    if (got := found.get("parallel.ep")) and experts % got[0]:
        rule = f"must be a multiple of parallel.ep = {got[0]}, which shares the experts out"
        found.add("moe.num_experts", f"{rule}; choose ep from {divisors(experts)}")
    got = found.get("parallel.tp", "parallel.etp", "parallel.sequence_parallel")
    if got is None:
        return
    tp, etp, sequence_parallel = got
    if tp > 1 and not sequence_parallel:
        rule = f"must be true with experts and parallel.tp = {tp}: otherwise each of these ranks would send every token"
        found.add("parallel.sequence_parallel", f"{rule}; set it, or tp = 1")
    etp = tp if etp is None else etp
    for name in ("moe.ffn_hidden", "model.ffn_hidden"):
        width = found.values[name]
        if width is not None and found.sound(name):
            if width % etp:
                found.add(name, f"must be a multiple of parallel.etp = {etp}, which cuts experts; try {up(width, etp)}")
            break


def _pattern(found: Findings) -> None:
    """Which layers have experts."""
    got = found.get("moe.layer_freq", "model.layers")
    if got is None:
        return
    pattern, layers = got
    name = "moe.layer_freq"
    if not pattern or set(pattern) - {0, 1}:
        found.add(name, "must be a list of 1 (a layer with experts) and 0 (a dense one), as in 1,0")
    elif layers % len(pattern):
        found.add(name, f"has {len(pattern)} entries, which do not divide model.layers = {layers}; it is repeated")
    elif 1 not in pattern:
        found.add(name, "makes every layer dense; give at least one 1, or set moe.num_experts = 0")


def _routing(found: Findings) -> None:
    experts = found.values["moe.num_experts"]
    if (got := found.get("moe.top_k")) and got[0] > experts:
        found.add("moe.top_k", f"must be at most moe.num_experts = {experts}; choose 1 to {experts}")
    if found.values["moe.score_function"] == "sigmoid":
        found.no_effect(["moe.pre_softmax"], "with moe.score_function = sigmoid; set that to softmax")
    _group_limits(found, experts)


def _group_limits(found: Findings, experts: int) -> None:
    got = found.get("moe.num_groups", "moe.group_topk", "moe.top_k")
    if got is None:
        return
    groups, chosen, top_k = got
    if (groups is None) != (chosen is None):
        missing = "moe.num_groups" if groups is None else "moe.group_topk"
        given = "moe.group_topk" if groups is None else "moe.num_groups"
        found.add(missing, f"must be given together with {given}")
    elif groups is not None and experts % groups:
        found.add("moe.num_groups", f"must divide moe.num_experts = {experts}; choose {divisors(experts)}")
    elif groups is not None and chosen > groups:
        found.add("moe.group_topk", f"must be at most moe.num_groups = {groups}")
    elif groups is not None and top_k % chosen:
        found.add("moe.group_topk", f"must divide moe.top_k = {top_k}: a group is judged by its best top_k / group_topk")
    elif groups is not None and top_k // chosen > experts // groups:
        rule = f"a group has {experts // groups} experts, and a token would take {top_k // chosen} from each"
        found.add("moe.group_topk", f"{rule}; choose more groups of a token, or fewer groups")


def _balance(found: Findings) -> None:
    kind, coefficient = found.values["moe.load_balancing"], found.values["moe.aux_loss_coeff"]
    if kind in ("sinkhorn", "none"):
        found.no_effect(["moe.aux_loss_coeff"], f"with moe.load_balancing = {kind}; set that to aux_loss")
    elif kind != "aux_loss" and found.sound("moe.aux_loss_coeff") and coefficient == 0:
        found.add("moe.load_balancing", "has no weight; set moe.aux_loss_coeff above 0, as in 0.01")
    if found.values["moe.expert_bias"] is True and found.values["moe.score_function"] != "sigmoid":
        found.add("moe.expert_bias", "moves sigmoid scores; set moe.score_function to sigmoid")
    if found.values["moe.expert_bias"] is False:
        found.no_effect(["moe.expert_bias_update_rate"], "with moe.expert_bias = false; set that to true")
    if kind == "sinkhorn":
        names = ("moe.num_groups", "moe.group_topk", "moe.expert_bias", "moe.capacity_factor")
        found.no_effect(names, "with moe.load_balancing = sinkhorn, which assigns by itself; choose another")


def _capacity(found: Findings) -> None:
    if found.values["moe.capacity_factor"] is None:
        why = "without moe.capacity_factor; set that"
        found.no_effect(["moe.drop_policy", "moe.pad_to_capacity"], why)
    elif found.sound("moe.capacity_factor") and found.values["moe.dispatcher"] == "allgather":
        rule = "needs a dispatcher that drops before it sends, and allgather gives every rank all tokens"
        found.add("moe.capacity_factor", f"{rule}; set moe.dispatcher to alltoall")


def _dispatch(found: Findings) -> None:
    got = found.get("moe.dispatcher", "parallel.ep", "parallel.etp", "parallel.tp")
    if got and got[0] == "local":
        etp = got[3] if got[2] is None else got[2]
        if got[1] > 1 or etp > 1:
            rule = f"needs all experts on one rank, and parallel.ep = {got[1]}, etp = {etp}"
            found.add("moe.dispatcher", f"{rule}; set it to alltoall or allgather")


def _shared_experts(found: Findings) -> None:
    width = "moe.shared_expert_ffn_hidden"
    if found.values[width] is None:
        found.no_effect(["moe.shared_expert_gate", "moe.shared_expert_overlap"], f"without {width}; set that")
        return
    if (got := found.get(width, "parallel.tp")) and got[0] % got[1]:
        found.add(width, f"must be a multiple of parallel.tp = {got[1]}; try {up(got[0], got[1])}")
    if found.values["moe.shared_expert_overlap"] is True and found.values["moe.dispatcher"] != "alltoall":
        found.add("moe.shared_expert_overlap", "hides the all-to-all; set moe.dispatcher to alltoall")


def _recompute(found: Findings) -> None:
    modules = found.values["model.recompute_modules"] or ()
    if found.values["model.recompute_granularity"] != "selective" or not found.sound("model.recompute_modules"):
        return
    if "shared_experts" in modules and found.values["moe.shared_expert_ffn_hidden"] is None:
        found.add("model.recompute_modules", "names shared_experts, and moe.shared_expert_ffn_hidden is not set")
    elif "shared_experts" in modules and found.values["moe.shared_expert_overlap"] is True:
        rule = "shared_experts cannot be recomputed while they are spread over the steps of the dispatch"
        found.add("model.recompute_modules", f"{rule}; set moe.shared_expert_overlap to false, or leave it out")
    elif "moe" in modules and "shared_experts" in modules:
        found.add("model.recompute_modules", "moe contains shared_experts; name one of them")
