"""Rules of a sound configuration; each broken one becomes a sentence with the field, its value, the rule and a way out.

`Findings` checks single fields first. Below are tables of rules that have one form, and the rules that every run has:
model, layout, batch. The rules of a topic have a module of their own, which `problems` calls only if the configuration
uses the topic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from labkit.config.choices import SCHEDULES
from labkit.config.errors import nearest, shown
from labkit.config.field_spec import SIZE
from labkit.config.fields import SPECS
from labkit.config.findings import Findings, divisors, up
from labkit.config.graph_rules import graph_rules
from labkit.config.layer_rules import mamba_rules, moe_rules
from labkit.config.pipeline_rules import pipeline_rules
from labkit.config.sections import ParallelConfig, Sections
from labkit.config.training_rules import data_rules, logger_rules, optimizer_rules, profile_rules, training_rules

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes that an order string may name."""
TOPICS: dict[Callable[[Findings], None], tuple[str, ...]] = {
    pipeline_rules: ("parallel.pp", "parallel.vpp", "parallel.pipeline", "parallel.standalone", "schedule."),
    moe_rules: ("moe.num_experts", "parallel.ep", "parallel.etp", "model.recompute"),
    mamba_rules: ("model.family",),
    training_rules: ("model.recompute",),  # before graphs, which look up what is recomputed
    graph_rules: ("graph.",),
    optimizer_rules: ("optim.warmup_steps", "optim.lr_schedule"),
    logger_rules: ("train.loggers",),
    profile_rules: ("train.profile",),
    data_rules: ("data.",),
}
"""Rules of a topic -> starts of the fields that use it. If all these have their defaults, no such rule is broken."""
# fmt: off
MULTIPLES = (
    ("model.hidden", "model.heads"),
    ("model.heads", "parallel.tp", ", which splits it over ranks"),
    ("model.ffn_hidden", "parallel.tp", ", which splits it over ranks"),
    ("moe.shared_expert_ffn_hidden", "parallel.tp", ", which splits it over ranks"),
    ("train.global_batch_size", "train.micro_batch_size"),
)
"""A size, another that must divide it, and the reason. The MLP's usual width, 4 x hidden, follows from the heads."""
AT_MOST = (
    ("optim.min_lr", "optim.lr", ", from which the rate decays; lower it"),
    ("optim.min_loss_scale", "optim.initial_loss_scale", "; lower it"),
    ("model.decoder_seq_length", "model.seq_length", "; lower it, or raise that"),
    ("model.relative_buckets", "model.relative_max_distance", "; lower it"),
    ("model.recompute_num_layers", "model.layers", "; recompute fewer"),
    ("moe.group_topk", "moe.num_groups", "; choose fewer"),
)
"""A number, another that it must not exceed, and the advice."""
_ONE_CHUNK = [name for name, row in SCHEDULES.items() if row.chunks == 1]
_SPLIT = "|".join(name for name, row in SCHEDULES.items() if row.splits_backward)
_SEVERAL_CHUNKS = [name for name in SCHEDULES if name not in _ONE_CHUNK]
_MERGES = "schedule.overlap_moe_expert_parallel_comm=true"
_MERGED = [name for name, row in SCHEDULES.items() if row.merged is not None]
_UNMERGED = [name for name in SCHEDULES if name not in _MERGED]
EXCLUSIONS = (
    ("optim.fp8=e4m3|hybrid", "optim.precision=fp16",
     "fp8 goes with optim.precision bf16, fp32 or (for parity) fp64, not fp16"),
    ("optim.fp8=e4m3|hybrid", "moe.num_experts moe.grouped_gemm=false",
     "experts one after the other do not compute in fp8; set moe.grouped_gemm to true, or this to none"),
    ("optim.fp8=e4m3|hybrid", "moe.num_experts model.transformer_impl=transformer_engine",
     ("Transformer Engine's experts want a multiple of 16 rows each for fp8, and labkit gives them as many as are "
      "routed; set model.transformer_impl to local, or this to none")),
    ("optim.average_in_collective=true", "optim.calculate_per_token_loss=true",
     "excludes optim.calculate_per_token_loss, which divides once by tokens; set one of them to false"),
    ("model.attention_dropout", "parallel.cp",
     ("must be 0 with parallel.cp above 1: blocks of a ring are joined by log-sum-exps, and the kernels that return "
      "them have no dropout; set it to 0, or parallel.cp = 1")),
    ("model.transformer_impl=transformer_engine", "optim.precision=fp64",
     "Transformer Engine has no fp64; set optim.precision, or local layers"),
    ("model.attention_backend=flash|cudnn|efficient|math|unfused", "model.transformer_impl=transformer_engine",
     "Transformer Engine chooses its kernels; set it to fused, or local layers"),
    ("model.attention_backend=cudnn|efficient|math", "parallel.cp",
     "with parallel.cp above 1 only flash gives the log-sum-exps that join blocks; set it to fused, flash or unfused"),
    ("model.attention_backend=cudnn", "optim.precision=fp32|fp64",
     "cuDNN's kernel takes 16-bit types; set optim.precision to bf16 or fp16, or choose fused"),
    ("model.attention_backend=efficient", "optim.precision=fp64",
     "the memory-efficient kernel takes no 64-bit type; choose fused, or set optim.precision"),
    ("parallel.rank_offset", "", "a run's first rank is rank 0; leave it out"),
    ("parallel.split_rank", "model.model_type=encoder_or_decoder",
     "only a T5 has an encoder to split off; leave it out"),
    ("model.model_type=encoder_or_decoder", "model.family=t5", "a T5 is an encoder and a decoder; leave it out"),
    ("model.position=none", "model.family=gpt|bert|t5", "attention does not see the order of tokens; choose learned"),
    ("model.activation=swiglu", "model.family=bert", "BERT's masked-LM head has no gate; choose gelu or gelu_tanh"),
    ("model.activation=relu|geglu", "model.family=gpt|bert|mamba", "only a T5 has it; choose gelu, gelu_tanh, swiglu"),
    ("model.position=relative", "model.family=gpt|bert|mamba", "only a T5 has it; choose learned, or none for a Mamba"),
    ("model.position=rope", "model.family=t5", "a T5 has learned or relative positions; choose one of these"),
    ("model.kv_heads", "model.family=t5", "a T5 has as many key/value heads as query heads; leave it out"),
    ("model.transformer_impl=transformer_engine", "model.family=bert|t5", "BERT and T5 run local layers; set it so"),
    ("optim.fp8=e4m3|hybrid", "model.family=t5", "a T5 computes only in optim.precision; set it to none"),
    ("parallel.cp", "model.family=bert|t5", "ring attention has no padding mask, which BERT and T5 need; set it to 1"),
    ("parallel.vpp", "model.model_type=encoder_and_decoder parallel.split_rank=null",
     "an encoder-decoder is not interleaved; set it to 1"),
    ("moe.num_experts", "model.family=bert|t5", "the layers of BERT and T5 are dense; set it to 0"),
    ("graph.cuda_graph_impl", "model.family=bert|t5",
     "graphs of layers take no padding mask, which BERT and T5 need; set it to none"),
    (f"schedule.name={'|'.join(_SEVERAL_CHUNKS)}", "model.model_type=encoder_and_decoder",
     f"an encoder-decoder has one stage on each rank; choose one of auto, {', '.join(_ONE_CHUNK)}"),
    ("parallel.standalone_embedding_stage=true", "model.model_type=encoder_and_decoder",
     "both halves of a T5 embed tokens; leave it false"),
    ("parallel.pipeline_layout", "model.model_type=encoder_and_decoder",
     "parallel.split_rank shares the layers of a T5; leave it out"),
    ("optim.calculate_per_token_loss=true", "model.family=bert",
     "BERT's loss has a mean over masked words and one over samples, and no number divides both; set it to false"),
    ("parallel.standalone_embedding_stage=true", "parallel.pipeline_layout",
     "the text of parallel.pipeline_layout says where the embedding is; leave this false"),
    ("schedule.use_ring_exchange_p2p=true", "",
     "torch has no ring exchange (it was a patched build of NVIDIA's); use batch_p2p_comm"),
    ("schedule.overlap_p2p_comm=true", "schedule.batch_p2p_comm=true",
     "a batch is waited for as a whole, so it cannot overlap; set this or schedule.batch_p2p_comm to false"),
    (_MERGES, f"schedule.path=null schedule.name={'|'.join(_UNMERGED)}",
     f"this schedule has no form with merged pairs; set schedule.name to one of auto, {', '.join(_MERGED)}"),
    (_MERGES, "schedule.all_warmup=true", "with schedule.all_warmup no forward follows a backward; leave one out"),
    (_MERGES, "schedule.batch_p2p_comm=true|false",
     "a merged pair receives for two actions at once, over posted transfers; leave schedule.batch_p2p_comm out"),
    (_MERGES, "moe.shared_expert_overlap=true",
     "the other side of a pair hides the all-to-alls, shared experts need not; set moe.shared_expert_overlap to false"),
    (_MERGES, "model.recompute_granularity=full",
     "a whole layer cannot be recomputed part by part; set model.recompute_granularity to selective or none"),
    (_MERGES, "model.num_microbatches_with_partial_activation_checkpoints",
     "parts of pairs recompute in every microbatch alike; leave that out"),
    (_MERGES, "model.transformer_impl=transformer_engine", "merged pairs run local layers; set model.transformer_impl"),
    ("moe.load_balancing=seq_aux_loss|global_aux_loss", "moe.aux_loss_coeff=0|0.0|-0.0",
     "has no weight; set moe.aux_loss_coeff above 0, as in 0.01"),
    ("moe.capacity_factor", "moe.dispatcher=allgather",
     ("needs a dispatcher that drops before it sends, and allgather gives every rank all tokens; set moe.dispatcher to "
      "alltoall, or leave this out")),
    ("model.compile=layers", "model.family=bert|t5|mamba", "only the layers of a GPT compile; set it to none"),
    ("model.compile=layers", "model.transformer_impl=transformer_engine",
     "the compiler cannot look into Transformer Engine's layers; set it to none, or use local layers"),
    ("model.compile=layers", "optim.fp8=e4m3|hybrid",
     "fp8 products keep scales and packed operands, which a compiled region does not hold; set one of them to none"),
    ("model.compile=layers", "graph.cuda_graph_impl",
     "a layer is captured or compiled, not both; set one of them to none"),
    ("model.compile=layers", _MERGES,
     "merged pairs run a layer part by part, and a compiled layer is one piece; set one of them off"),
    ("model.compile=layers", f"schedule.name={_SPLIT}",
     ("a compiled backward computes weight gradients together with input gradients, and this schedule splits them; set "
      "it to none, or choose a schedule with whole backwards (auto, 1f1b, gpipe)")),
    ("model.compile=layers", "schedule.variable_seq_lengths=true",
     "every new length of a sequence would compile anew; set one of them off"),
    ("model.compile=layers", "model.attention_backend=flash|cudnn|efficient|math",
     "whether a demanded kernel can run shows only outside a compiled region; choose fused or unfused, or none here"),
    ("model.compile=layers", "model.attention_dropout",
     "attention dropout draws from a random state that a compiled region cannot set; set it to none, or that to 0"),
    ("model.compile=layers", "model.hidden_dropout parallel.sequence_parallel=true",
     ("with parallel.sequence_parallel dropout draws from a random state that a compiled region cannot switch to; set "
      "it to none, or model.hidden_dropout to 0")),
    ("graph.cuda_graph_warmup_steps=0", "graph.cuda_graph_impl optim.fp8=e4m3|hybrid optim.fp8_recipe=delayed",
     "must be at least 1 with optim.fp8_recipe = delayed: the first step has no history yet to scale by"),
)
"""A field's values, the values of other fields that they exclude, and the rule that the error gives."""
# fmt: on


def problems(config: Sections, world_size: int | None = None) -> list[str]:
    """Return a sentence for every broken rule of `config`, for `world_size` ranks if that is given."""
    found = Findings(config, world_size)
    for form, table in ((found.multiple_of, MULTIPLES), (found.at_most, AT_MOST), (found.excludes, EXCLUSIONS)):
        for entry in table:
            form(*entry)
    found.check(_heads, _sequence, *_LAYOUT, _batch)
    changed = [name for name in SPECS if found.changed(name)]
    for rules, starts in TOPICS.items():
        if any(name.startswith(starts) for name in changed):
            found.check(rules)
    return found.problems


def layout_problems(parallel: ParallelConfig, world_size: int | None = None) -> list[str]:
    """Return a sentence for every broken rule of a layout on its own, without a model."""
    found = Findings(Sections(parallel=parallel), world_size)
    found.check(*_LAYOUT)
    return found.problems


def _heads(found: Findings) -> None:
    """Check heads: rotary encoding turns pairs, and tp splits key/value heads or copies them evenly."""
    m, tp = found.config.model, found.config.parallel.tp
    found.divisor("model.kv_heads", m.heads, "model.heads")
    if m.position == "rope" and (width := m.hidden // m.heads) % 2:
        rule = f"rotary position encoding rotates pairs of features, so hidden / heads = {width} must be even"
        found.add("model.position", f"{rule}; change model.heads or model.hidden")
    if m.kv_heads is not None and m.kv_heads % tp and tp % m.kv_heads:
        rule = f"must be a multiple or a divisor of parallel.tp = {tp}: each rank has whole key/value heads, its own or"
        advice = f"choose kv_heads from {divisors(tp)}, or tp from {divisors(m.kv_heads)}"
        found.add("model.kv_heads", f"{rule} a copy of one; {advice}")


def _sequence(found: Findings) -> None:
    """Require that context parallelism and sequence parallelism cut a sequence evenly."""
    p = found.config.parallel
    if p.sequence_parallel and found.config.model.decoder_seq_length:
        found.multiple("model.decoder_seq_length", p.tp, "parallel.tp", why=" with parallel.sequence_parallel")
    if p.cp > 1:
        why = ": context parallelism cuts a sequence into 2 x cp chunks"
        found.multiple("model.seq_length", 2 * p.cp, "2 x cp", why=why)
    length = found.config.model.seq_length
    if p.sequence_parallel and length // p.cp % p.tp:
        part = f"seq_length / cp = {length // p.cp}" if p.cp > 1 else "it"
        rule = f"with parallel.sequence_parallel {part} must be a multiple of parallel.tp = {p.tp}"
        step = math.lcm(2 * p.cp, p.cp * p.tp) if p.cp > 1 else p.tp
        found.add("model.seq_length", f"{rule}; try {up(length, step)}")


def order_problem(order: str, sizes: Mapping[str, int]) -> str:
    """Return the rule that an order string breaks for these axis sizes (1 for an unused axis), or an empty string."""
    axes = order.lower().split("-")
    allowed = f"name each of {', '.join(AXES)} at most once, joined by -, as in tp-cp-ep-dp-pp"
    for axis in axes:
        if axis not in AXES:
            reason = f"{shown(axis)} is not an axis" if axis else "an axis is empty"
            return f"{reason}; {allowed}{nearest(axis, AXES)}"
        if axes.count(axis) > 1:
            return f"{axis} is named {axes.count(axis)} times; {allowed}"
    missing = [axis for axis, size in sizes.items() if size > 1 and axis not in axes]
    return f"{missing[0]} is missing although its size is {sizes[missing[0]]}; add it or make it 1" if missing else ""


def _world_size(found: Findings) -> None:
    """Require that the world size factors into the sizes of both generators."""
    world = found.values["world_size"]
    if world is None:
        return
    if rule := SIZE.broken(world):
        found.add("world_size", rule)
        return
    p = found.config.parallel
    products = {
        p.expert_tp * p.ep * p.pp: f"etp x ep x pp = {p.expert_tp} x {p.ep} x {p.pp}",
        p.tp * p.cp * p.pp: f"tp x cp x pp = {p.tp} x {p.cp} x {p.pp}",
    }
    for product, words in products.items():
        if world % product:
            step = p.smallest_world_size
            near = [str(size) for size in (world // step * step, up(world, step)) if size]
            rule = f"must be a multiple of {words} = {product}; launch {' or '.join(near)} ranks"
            found.add("world_size", rule)


def _replicas(found: Findings) -> tuple[int, int]:
    """Return dp and edp, or 1 and 1 if no sound world size is known."""
    world, p = found.values["world_size"], found.config.parallel
    if world is None or not found.sound("world_size"):
        return 1, 1
    return world // (p.tp * p.cp * p.pp), world // (p.expert_tp * p.ep * p.pp)


def _instances(found: Findings) -> None:
    """Require that the distributed optimizer's instances cut the replicas of every parameter into equal groups."""
    name, (dp, edp) = "optim.num_distributed_optimizer_instances", _replicas(found)
    if found.value("world_size") is not None:
        found.divisor(name, dp * found.config.parallel.cp, "dp x cp")
        if found.config.moe.num_experts:
            found.divisor(name, edp, "edp = world size / (etp x ep x pp)", why=", the replicas of an expert")


def _order(found: Findings) -> None:
    """Require that the order string names every axis in use, and that both generators give the same pipeline groups.

    For pp > 1 the groups are the same exactly if pp has one stride in both: rank and stride determine a rank's group.
    """
    p, (dp, edp) = found.config.parallel, _replicas(found)
    dense, expert = {"tp": p.tp, "cp": p.cp, "dp": dp}, {"tp": p.expert_tp, "ep": p.ep, "dp": edp}
    sizes = {axis: max(dense.get(axis, 1), expert.get(axis, 1)) for axis in AXES} | {"pp": p.pp}
    if problem := order_problem(p.order, sizes):
        found.add("parallel.order", problem)
    elif p.pp > 1 and found.value("world_size") is not None:
        faster = p.order.lower().partition("pp")[0].split("-")
        stride, other = (math.prod(size for axis, size in of.items() if axis in faster) for of in (dense, expert))
        if stride != other:
            rule = "the pipeline groups of dense and expert layers must be the same, but neighbouring stages are"
            advice = "end the order with pp, or choose etp x ep to match"
            found.add("parallel.order", f"{rule} {stride} ranks apart in one and {other} in the other; {advice}")


def _encoder_decoder(found: Findings) -> None:
    """Require that an encoder-decoder has stages in both halves, one chunk per rank, and equal stages within a half."""
    name, p, m = "parallel.split_rank", found.config.parallel, found.config.model
    if p.split_rank is None and m.has_two_halves and p.pp > 1:
        rule = f"with parallel.pp = {p.pp} a T5 needs it: ranks before it run the encoder, the others the decoder"
        found.add(name, f"{rule}; choose 1 to {p.pp - 1}")
    elif p.split_rank is not None and p.split_rank >= p.pp:
        advice = f"choose 1 to {p.pp - 1}" if p.pp > 1 else "leave it out, or set parallel.pp"
        found.add(name, f"must be below parallel.pp = {p.pp}, so that both halves have stages; {advice}")
    elif p.split_rank is not None and p.vpp > 1:
        rule = "an encoder-decoder is not interleaved: its halves exchange tensors of other shapes, and the encoder's"
        found.add(name, f"{rule} output would have to visit every chunk; set parallel.vpp = 1")
    elif p.split_rank is not None and m.has_two_halves:
        depth = "model.layers" if m.decoder_layers is None else "model.decoder_layers"
        for layers, ranks, half in (("model.layers", p.split_rank, "en"), (depth, p.pp - p.split_rank, "de")):
            found.multiple(layers, ranks, f"the {half}coder's ranks", why=" by parallel.split_rank")


_LAYOUT = (_world_size, _instances, _order, _encoder_decoder)


def _batch(found: Findings) -> None:
    """Require that micro batches, and data-parallel ranks, cut the global batch evenly."""
    t, name = found.config.train, "train.global_batch_size"
    if found.value("world_size") is not None:
        dp, _ = _replicas(found)
        step = t.micro_batch_size * dp
        found.multiple(name, step, f"micro_batch_size x dp = {t.micro_batch_size} x {dp}")
        found.microbatches = t.global_batch_size // step
