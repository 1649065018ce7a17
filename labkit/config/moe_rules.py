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
    _fp8(found)


def expert_instance_rule(found: Findings, edp: int) -> None:
    """The replicas of experts are cut into as many equal groups as those of the dense parameters."""
    name = "optim.num_distributed_optimizer_instances"
    if found.values["moe.num_experts"] and found.sound(name) and edp % found.values[name]:
        rule = f"must divide edp = world size / (etp x ep x pp) = {edp}, the replicas of an expert"
        found.add(name, f"{rule}; choose {divisors(edp)}")


def _dense(found: Findings) -> None:
    """Without experts nothing of the section is read."""
    if found.sound("parallel.ep") and found.values["parallel.ep"] > 1:
        found.add("parallel.ep", "splits experts, but moe.num_experts = 0; set the number of experts, or ep = 1")
    if (got := found.get("parallel.etp", "parallel.tp")) and got[0] not in (None, got[1]):
        found.add("parallel.etp", "splits experts, but moe.num_experts = 0; set the number of experts, or leave it out")
    names = [name for name in SPECS if name.startswith("moe.") and name != "moe.num_experts"]
    found.no_effect(names, "with moe.num_experts = 0; set the number of experts")
    if _selective(found) and (experts := {"moe", "shared_experts"} & set(found.values["model.recompute_modules"])):
        rule = f"names {sorted(experts)[0]}, but moe.num_experts = 0"
        found.add("model.recompute_modules", f"{rule}; set the number of experts, or leave it out")


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
    _expert_width(found, tp if etp is None else etp)


def _expert_width(found: Findings, etp: int) -> None:
    """The width of one expert is moe.ffn_hidden, else model.ffn_hidden, else 4 x hidden; etp cuts it."""
    for name in ("moe.ffn_hidden", "model.ffn_hidden"):
        width = found.values[name]
        if width is not None:
            if found.sound(name) and width % etp:
                found.add(name, f"must be a multiple of parallel.etp = {etp}, which cuts experts; try {up(width, etp)}")
            return
    if (got := found.get("model.hidden")) and (4 * got[0]) % etp:
        rule = f"must divide the width of an expert, 4 x model.hidden = {4 * got[0]}"
        found.add("parallel.etp", f"{rule}; set another, or moe.ffn_hidden = {up(4 * got[0], etp)}", value=etp)


def _pattern(found: Findings) -> None:
    """Which layers have experts."""
    got = found.get("moe.layer_freq", "model.layers")
    if got is None:
        return
    pattern, layers = got
    name = "moe.layer_freq"
    if len(pattern) == 1 and pattern[0] > 1:
        as_list = ",".join("1" + "0" * (min(pattern[0], 8) - 1)) + (",.." if pattern[0] > 8 else "")
        rule = "must be a list of 1 (a layer with experts) and 0 (a dense one)"
        found.add(name, f"{rule}; one layer with experts in {pattern[0]}, as Megatron's integer has it, is {as_list}")
    elif not pattern or set(pattern) - {0, 1}:
        found.add(name, "must be a list of 1 (a layer with experts) and 0 (a dense one), as in 1,0")
    elif layers % len(pattern):
        rule = f"has {len(pattern)} entries, and as it is repeated that must divide model.layers = {layers}"
        found.add(name, f"{rule}; give {divisors(layers)} entries")
    elif 1 not in pattern:
        found.add(name, "makes every layer dense; give at least one 1, or set moe.num_experts = 0")


def _routing(found: Findings) -> None:
    """Which experts a token goes to, and with which weights."""
    experts = found.values["moe.num_experts"]
    if (got := found.get("moe.top_k")) and got[0] > experts:
        found.add("moe.top_k", f"must be at most moe.num_experts = {experts}; choose 1 to {experts}")
    got = found.get("moe.score_function", "moe.pre_softmax", "moe.top_k", "moe.load_balancing")
    if got and got[3] != "sinkhorn":
        score, pre_softmax, top_k, _ = got
        if score == "sigmoid":
            found.no_effect(["moe.pre_softmax"], "with moe.score_function = sigmoid; set that to softmax")
        elif top_k == 1 and experts > 1 and not pre_softmax:
            rule = "must be true with moe.top_k = 1: a softmax over one chosen expert is 1 whatever its logit, and the"
            found.add("moe.pre_softmax", f"{rule} router would learn nothing; set it, or moe.score_function = sigmoid")
    _group_limits(found, experts)


def _group_limits(found: Findings, experts: int) -> None:
    """A token takes top_k / group_topk experts or more from each of group_topk groups."""
    got = found.get("moe.num_groups", "moe.group_topk", "moe.top_k")
    if got is None:
        return
    groups, chosen, top_k = got
    if (groups is None) != (chosen is None):
        missing = "moe.num_groups" if groups is None else "moe.group_topk"
        given = "moe.group_topk" if groups is None else "moe.num_groups"
        found.add(missing, f"must be given together with {given}; set both, or none")
    elif groups is None:
        return
    elif experts % groups:
        found.add("moe.num_groups", f"must divide moe.num_experts = {experts}; choose {divisors(experts)}")
    elif chosen > groups:
        found.add("moe.group_topk", f"must be at most moe.num_groups = {groups}; choose 1 to {groups}")
    elif top_k % chosen:
        rule = f"must divide moe.top_k = {top_k}, as a group is judged by its best top_k / group_topk experts"
        found.add("moe.group_topk", f"{rule}; choose {divisors(top_k)}")
    elif top_k > chosen * (experts // groups):
        rule = f"so many groups of {experts // groups} experts hold {chosen * (experts // groups)}"
        found.add("moe.group_topk", f"{rule}, and moe.top_k = {top_k}; raise it, or lower moe.num_groups")


def _balance(found: Findings) -> None:
    """What evens the load, and what that leaves without a reader."""
    if found.values["moe.expert_bias"] is False:
        found.no_effect(["moe.expert_bias_update_rate"], "with moe.expert_bias = false; set that to true")
    if not found.sound("moe.load_balancing"):
        return
    kind, coefficient = found.values["moe.load_balancing"], found.values["moe.aux_loss_coeff"]
    if kind in ("sinkhorn", "none"):
        found.no_effect(["moe.aux_loss_coeff"], f"with moe.load_balancing = {kind}; set that to aux_loss")
    elif kind != "aux_loss" and found.sound("moe.aux_loss_coeff") and coefficient == 0:
        found.add("moe.load_balancing", "has no weight; set moe.aux_loss_coeff above 0, as in 0.01")
    if kind == "sinkhorn":
        names = ("score_function", "pre_softmax", "topk_scaling_factor", "num_groups", "group_topk", "expert_bias",
                 "capacity_factor")  # fmt: skip
        why = "with moe.load_balancing = sinkhorn, which assigns by itself; choose another"
        found.no_effect([f"moe.{name}" for name in names], why)
    elif found.values["moe.expert_bias"] is True and found.values["moe.score_function"] == "softmax":
        found.add("moe.expert_bias", "moves sigmoid scores; set moe.score_function to sigmoid, or this to false")


def _capacity(found: Findings) -> None:
    """Who drops tokens, and what that leaves without a reader."""
    if found.values["moe.capacity_factor"] is None:
        why = "without moe.capacity_factor; set that"
        found.no_effect(["moe.drop_policy", "moe.pad_to_capacity"], why)
    elif found.sound("moe.capacity_factor") and found.values["moe.dispatcher"] == "allgather":
        rule = "needs a dispatcher that drops before it sends, and allgather gives every rank all tokens"
        found.add("moe.capacity_factor", f"{rule}; set moe.dispatcher to alltoall, or leave this out")


def _dispatch(found: Findings) -> None:
    got = found.get("moe.dispatcher", "parallel.ep", "parallel.etp", "parallel.tp")
    if got and got[0] == "local":
        etp = got[3] if got[2] is None else got[2]
        if got[1] > 1 or etp > 1:
            rule = f"needs all experts whole on each rank, but parallel.ep = {got[1]} and etp = {etp}"
            found.add("moe.dispatcher", f"{rule}; set it to alltoall or allgather")


def _shared_experts(found: Findings) -> None:
    width = "moe.shared_expert_ffn_hidden"
    if found.values[width] is None:
        found.no_effect(["moe.shared_expert_gate", "moe.shared_expert_overlap"], f"without {width}; set that")
        return
    if (got := found.get(width, "parallel.tp")) and got[0] % got[1]:
        rule = f"must be a multiple of parallel.tp = {got[1]}, which splits it over ranks"
        found.add(width, f"{rule}; try {up(got[0], got[1])}")
    if found.values["moe.shared_expert_overlap"] is True and found.values["moe.dispatcher"] != "alltoall":
        rule = "hides the all-to-all; set moe.dispatcher to alltoall, or this to false"
        found.add("moe.shared_expert_overlap", rule)


def _selective(found: Findings) -> bool:
    """Whether `model.recompute_modules` is read and names parts that there are."""
    granularity, name = found.values["model.recompute_granularity"], "model.recompute_modules"
    return granularity == "selective" and found.sound(name)


def _recompute(found: Findings) -> None:
    """Which parts of a layer with experts can be computed again."""
    if not _selective(found):
        return
    name, modules = "model.recompute_modules", found.values["model.recompute_modules"]
    pattern = found.get("moe.layer_freq")
    if "shared_experts" in modules and found.values["moe.shared_expert_ffn_hidden"] is None:
        rule = "names shared_experts, and there are none"
        found.add(name, f"{rule}; set moe.shared_expert_ffn_hidden, or leave it out")
    elif "moe" in modules and "shared_experts" in modules:
        found.add(name, "moe contains shared_experts; name one of them")
    elif "shared_experts" in modules and found.values["moe.shared_expert_overlap"] is True:
        rule = "shared_experts cannot be recomputed while they are spread over the steps of the dispatch"
        found.add(name, f"{rule}; set moe.shared_expert_overlap to false, or leave it out")
    elif "mlp" in modules and pattern and 0 not in pattern[0]:
        found.add(name, "mlp is that of a dense layer, and moe.layer_freq has none; name moe instead")


def _fp8(found: Findings) -> None:
    if (got := found.get("optim.fp8")) and got[0] != "none":
        rule = "experts do not compute in fp8: their products take as many rows as are routed to them"
        found.add("optim.fp8", f"{rule}; set it to none, or moe.num_experts to 0")
