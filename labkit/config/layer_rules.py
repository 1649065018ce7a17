"""Rules between the fields of layers: those of a mixture of experts, and those of a Mamba model."""

from __future__ import annotations

from labkit.config.errors import shown
from labkit.config.findings import Findings, divisors, up

MODULES = "model.recompute_modules"
# fmt: off
NOT_WITH_MAMBA = (
    ("parallel.cp", "a Mamba scan reads its sequence in order, so ranks cannot split it; set it to 1"),
    ("moe.num_experts", "a Mamba model has no layers of experts; set it to 0"),
    ("optim.fp8=e4m3|hybrid", "Mamba models do not compute in fp8; set it to none"),
    ("model.transformer_impl=transformer_engine", "Mamba models run local layers; set it to local"),
    ("graph.cuda_graph_impl=transformer_engine", "Transformer Engine captures no Mamba layers; set it to local"),
    ("parallel.split_rank", "a Mamba model has no encoder to split off; leave it out"),
    ("model.recompute_granularity=selective", "it recomputes parts of transformer layers; set it to full or none"),
)
"""A field's values that a Mamba model does not take, and the reason."""
# fmt: on
READ_BY = {
    "*": ("model.kv_heads", "model.position", "model.attention_dropout", "model.attention_backend"),
    "-": ("model.ffn_hidden", "model.activation"),
}
"""Letter of a Mamba model's pattern -> fields that only such layers read; `model.position` only if it is `rope`."""


def moe_rules(found: Findings) -> None:
    """Apply the rules of experts that need no world size."""
    if found.config.moe.num_experts == 0:
        found.check(_dense)
    else:
        found.check(_ranks, _expert_width, _pattern, _routing, _groups, _recompute)
        found.multiple_of("moe.num_experts", "parallel.ep", ", which distributes the experts")


def _dense(found: Findings) -> None:
    """Reject options elsewhere that only a mixture of experts reads."""
    p, rule = found.config.parallel, "splits experts, but moe.num_experts = 0"
    if found.changed("parallel.ep"):
        found.add("parallel.ep", f"{rule}; set the number of experts, or ep = 1")
    if found.sound("parallel.etp", "parallel.tp") and p.expert_tp != p.tp:
        found.add("parallel.etp", f"{rule}; set the number of experts, or leave it out")
    if parts := sorted({"moe", "shared_experts"} & set(_recomputed(found))):
        found.add(MODULES, f"names {parts[0]}, but moe.num_experts = 0; set the number of experts, or leave it out")


def _recomputed(found: Findings) -> tuple[str, ...]:
    """Return the parts of layers that are recomputed by name."""
    m = found.config.model
    return m.recompute_modules if m.recompute_granularity == "selective" else ()


def _ranks(found: Findings) -> None:
    """Require that tensor parallelism cuts the tokens too, and that `local` sends none to another rank."""
    p = found.config.parallel
    if p.tp > 1 and not p.sequence_parallel:
        rule = f"must be true with experts and parallel.tp = {p.tp}: otherwise each of these ranks would send every"
        found.add("parallel.sequence_parallel", f"{rule} token; set it, or tp = 1")
    if found.config.moe.dispatcher == "local" and (p.ep > 1 or p.expert_tp > 1):
        rule = f"needs all experts whole on each rank, but parallel.ep = {p.ep} and etp = {p.expert_tp}"
        found.add("moe.dispatcher", f"{rule}; set it to alltoall or allgather")


def _expert_width(found: Findings) -> None:
    """Require that etp cuts the width of an expert: moe.ffn_hidden, else model.ffn_hidden, else 4 x hidden."""
    etp = found.config.parallel.expert_tp
    given = [name for name in ("moe.ffn_hidden", "model.ffn_hidden") if found.values[name] is not None]
    if given:
        found.multiple(given[0], etp, "parallel.etp", why=", which cuts experts")
    elif (usual := 4 * found.config.model.hidden) % etp:
        rule = f"must divide the width of an expert, 4 x model.hidden = {usual}"
        found.add("parallel.etp", f"{rule}; set another, or moe.ffn_hidden = {up(usual, etp)}", value=etp)


def _pattern(found: Findings) -> None:
    """Require a pattern of layers with experts and dense ones that can be repeated over the model."""
    name, pattern, layers = "moe.layer_freq", found.config.moe.layer_freq, found.config.model.layers
    rule = "must be a list of 1 (a layer with experts) and 0 (a dense one)"
    if len(pattern) == 1 and pattern[0] > 1:
        as_list = ",".join("1" + "0" * (min(pattern[0], 8) - 1)) + (",.." if pattern[0] > 8 else "")
        found.add(
            name, f"{rule}; Megatron's integer {pattern[0]}, one layer with experts in {pattern[0]}, is {as_list}"
        )
    elif not pattern or set(pattern) - {0, 1}:
        found.add(name, f"{rule}, as in 1,0")
    elif layers % len(pattern):
        rule = f"has {len(pattern)} entries, but it is repeated, so their number must divide model.layers = {layers}"
        found.add(name, f"{rule}; give {divisors(layers)} entries")
    elif 1 not in pattern:
        found.add(name, "makes every layer dense; give at least one 1, or set moe.num_experts = 0")


def _routing(found: Findings) -> None:
    """Check the number of experts per token, and the weights that these experts get."""
    moe = found.config.moe
    found.at_most("moe.top_k", "moe.num_experts", f"; choose 1 to {moe.num_experts}")
    of_one = moe.top_k == 1 < moe.num_experts and moe.score_function == "softmax" and not moe.pre_softmax
    if of_one and moe.load_balancing != "sinkhorn":
        rule = "must be true with moe.top_k = 1: a softmax over one chosen expert is 1 whatever its logit, and the"
        found.add("moe.pre_softmax", f"{rule} router would learn nothing; set it, or moe.score_function = sigmoid")


def _groups(found: Findings) -> None:
    """Require that a token takes at least top_k / group_topk experts from each of group_topk groups."""
    moe, names = found.config.moe, ("moe.num_groups", "moe.group_topk")
    groups, chosen, top_k = moe.num_groups, moe.group_topk, moe.top_k
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        missing, given = names if groups is None else names[::-1]
        found.add(missing, f"must be given together with {given}; set both, or none")
        return
    found.divisor("moe.num_groups", moe.num_experts, "moe.num_experts")
    if found.sound(*names):
        why = ", as a group is judged by its best top_k / group_topk experts"
        found.divisor("moe.group_topk", top_k, "moe.top_k", why=why)
    each = moe.num_experts // groups
    if found.sound(*names) and top_k > chosen * each:
        rule = f"this many groups of {each} experts have only {chosen * each}"
        found.add("moe.group_topk", f"{rule}, and moe.top_k = {top_k}; raise it, or lower moe.num_groups")


def _recompute(found: Findings) -> None:
    """Reject parts of a layer with experts that cannot be recomputed."""
    modules, moe = _recomputed(found), found.config.moe
    if "shared_experts" in modules and moe.shared_expert_ffn_hidden is None:
        rule = "names shared_experts, but the model has none"
        found.add(MODULES, f"{rule}; set moe.shared_expert_ffn_hidden, or leave it out")
    elif "moe" in modules and "shared_experts" in modules:
        found.add(MODULES, "moe contains shared_experts; name one of them")
    elif "shared_experts" in modules and moe.shared_expert_overlap:
        rule = "shared_experts cannot be recomputed while they are spread over the steps of the dispatch"
        found.add(MODULES, f"{rule}; set moe.shared_expert_overlap to false, or leave it out")
    elif "mlp" in modules and 0 not in moe.layer_freq:
        found.add(MODULES, "mlp is the MLP of a dense layer, and moe.layer_freq has no dense layer; name moe instead")


def mamba_rules(found: Findings) -> None:
    """Apply the rules of `model.family = mamba`."""
    if found.config.model.family == "mamba":
        for condition, rule in NOT_WITH_MAMBA:
            found.excludes(condition, "", rule)
        found.check(_letters, _parts_there, _mamba_heads)


def _letters(found: Findings) -> None:
    """Require a letter for each layer in the pattern, and a Mamba layer among them."""
    name, layers = "model.hybrid_override_pattern", found.config.model.layers
    pattern = found.config.model.hybrid_override_pattern or "M" * layers
    if unknown := set(pattern) - set("M*-"):
        found.add(
            name, f"{shown(min(unknown))} is not a part of a layer; choose from M (Mamba), * (attention), - (MLP)"
        )
    elif len(pattern) != layers:
        found.add(name, f"has {len(pattern)} letters, but model.layers = {layers}; give a letter for each layer")
    elif "M" not in pattern:
        found.add(name, "has no Mamba layer (M); add one, or set model.family = gpt")


def _parts_there(found: Findings) -> None:
    """Reject fields of a part that no layer has, because they have no effect."""
    pattern = found.config.model.hybrid_override_pattern or "M"
    for part, names in READ_BY.items():
        for name in filter(found.changed, names if part not in pattern else ()):
            if name != "model.position" or found.values[name] == "rope":
                found.add(name, f"has no effect: {part} is in no layer of model.hybrid_override_pattern; leave it out")


def _mamba_heads(found: Findings) -> None:
    """Require heads of one width that fill twice the hidden width, unless they are counted, and groups that tp cuts."""
    m = found.config.model
    if m.mamba_num_heads is None:
        found.divisor("model.mamba_head_dim", 2 * m.hidden, "2 x model.hidden")
        found.value("model.mamba_head_dim")
    found.divisor("model.mamba_num_groups", m.mamba_heads, "the heads of a Mamba layer")
    found.multiple(
        "model.mamba_num_groups", found.config.parallel.tp, "parallel.tp", why=", which splits it over ranks"
    )
