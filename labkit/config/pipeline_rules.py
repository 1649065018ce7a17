"""Rules between the fields of the pipeline: how many stages there are, their layers, the transfers between them.

Nothing here reads the CSV file at `schedule.path`; `labkit.train.run_schedule` checks that schedule against the run.
"""

from __future__ import annotations

from labkit.config.choices import SCHEDULES, named_schedule
from labkit.config.findings import Findings
from labkit.config.pipeline_layout import LayoutError, parse_layout


def pipeline_rules(found: Findings) -> None:
    """Check model chunks, stages and transfers."""
    found.check(_number_of_chunks, _stages, _overlap, _microbatches, _merged_pairs)


def _interleaves(found: Findings) -> bool:
    """Return True if the interleaved schedule runs: a rank has several chunks, and its name or `auto` selects it."""
    s, vpp = found.config.schedule, found.config.parallel.vpp
    return s.path is None and vpp > 1 and named_schedule(s.name, vpp).chunks is None


def _chunks(found: Findings) -> int | None:
    """Return the number of model chunks on each rank, or None if a file decides it."""
    s, vpp = found.config.schedule, found.config.parallel.vpp
    return (named_schedule(s.name, vpp).chunks or vpp) if s.path is None else None


def _number_of_chunks(found: Findings) -> None:
    """Require the number of chunks that the schedule runs on a rank: a fixed one, or `parallel.vpp`."""
    s, p, chunks = found.config.schedule, found.config.parallel, _chunks(found)
    if p.vpp > 1 and p.pp == 1:
        rule = "model chunks are interleaved over pipeline stages, so it needs parallel.pp above 1"
        found.add("parallel.vpp", f"{rule}; set pp, or vpp = 1")
    elif chunks is not None and p.vpp not in (1, chunks):
        runs, advice = ("one model chunk", "use auto, or vpp = 1")
        if chunks > 1:
            runs, advice = f"{chunks} model chunks", "leave it at 1"
        found.add("schedule.name", f"runs {runs} per rank, but parallel.vpp = {p.vpp}; {advice}")
    elif s.path is None and named_schedule(s.name, p.vpp).chunks is None and p.vpp == 1 and p.pp > 1:
        found.add("schedule.name", "interleaves several model chunks per rank; set parallel.vpp above 1, or use 1f1b")


def _stages(found: Findings) -> None:
    """Require that the stages of `parallel.pipeline_layout` hold the model's layers; without it, equally many each."""
    text, chunks = found.config.parallel.pipeline_layout, _chunks(found)
    if text is None and chunks is not None and not found.config.model.has_two_halves:  # that one has its own rule
        _equal_shares(found, chunks)
    elif text is not None:
        try:
            stages = parse_layout(text)
        except LayoutError as rule:
            found.add("parallel.pipeline_layout", str(rule))
        else:
            _layout_fits(found, stages, chunks)


def _layout_fits(found: Findings, stages: list[str], chunks: int | None) -> None:
    """Require as many stages as the schedule has, and as many layers as the model has."""
    name, pp, layers = "parallel.pipeline_layout", found.config.parallel.pp, found.config.model.layers
    held = sum(stage.count("t") for stage in stages)
    if chunks is not None and len(stages) != pp * chunks:
        words = f"pp x {chunks} model chunks per rank = {pp} x {chunks} = {pp * chunks}" if chunks > 1 else f"pp = {pp}"
        per_rank, rest = divmod(len(stages), pp)
        schedule = found.config.schedule.name
        free = schedule == "auto" or SCHEDULES[schedule].chunks is None
        advice = f", or set parallel.vpp = {per_rank}" if free and not rest and per_rank and pp > 1 else ""
        found.add(name, f"has {len(stages)} stages, but there must be {words}; change the | in it{advice}")
    if held != layers:
        found.add(name, f"has {held} layers (t), but model.layers = {layers}; make them equal")


def _equal_shares(found: Findings, chunks: int) -> None:
    """Require equally many layers on every stage, apart from the first if the embedding has a stage of its own."""
    p, hint = found.config.parallel, "try {up}; or name the layers of each stage in parallel.pipeline_layout"
    stages, standalone = p.pp * chunks, p.standalone_embedding_stage
    per_rank = "vpp" if p.vpp > 1 else f"chunks of {found.config.schedule.name}"
    words = f"pp x {per_rank} = {p.pp} x {chunks}" if chunks > 1 else "pp" if standalone else "parallel.pp"
    if standalone and stages == 1:
        rule = "a first stage without layers needs a second one; set parallel.pp above 1, or this to false"
        found.add("parallel.standalone_embedding_stage", rule)
    elif standalone:
        why = ": the standalone embedding stage holds no layer"
        found.multiple("model.layers", stages - 1, f"{words} - 1", why=why, advice=hint)
    else:
        found.multiple("model.layers", stages, words, advice=hint)


def _overlap(found: Findings) -> None:
    """Reject overlapped transfers for all but the interleaved schedule, which alone has this option."""
    if found.config.schedule.overlap_p2p_comm and not _interleaves(found):
        rule = "only the interleaved schedule has it; set parallel.vpp above 1, or this to false"
        found.add("schedule.overlap_p2p_comm", f"{rule} (batch_p2p_comm = null overlaps in every schedule)")


def _microbatches(found: Findings) -> None:
    """Apply the rules of schedules on the number of microbatches in a step."""
    s, p, there = found.config.schedule, found.config.parallel, found.microbatches
    if there is None:
        return
    if _interleaves(found):
        if rule := group_size_rule(s.microbatch_group_size or p.pp, p.pp, there):
            found.add("schedule.microbatch_group_size", f"{rule} (None means pp = {p.pp})")
        if s.all_warmup and there != p.pp:
            rule = f"needs as many microbatches per step as parallel.pp = {p.pp}, but a step has {there}"
            found.add("schedule.all_warmup", f"{rule}; leave it out, or change train.global_batch_size")
    elif s.path is None and there < (least := named_schedule(s.name, p.vpp).least_microbatches) * p.pp:
        rule = f"needs at least {least} x pp = {least * p.pp} microbatches per step, but a step has {there}"
        found.add("schedule.name", f"{rule}; raise train.global_batch_size, or choose another")


def _merged_pairs(found: Findings) -> None:
    """Reject merged pairs where there are none, and where a part of a layer would be recomputed across parts."""
    name, m = "schedule.overlap_moe_expert_parallel_comm", found.config.model
    if not found.config.schedule.overlap_moe_expert_parallel_comm:
        return
    if m.recompute_granularity == "selective" and "moe" in m.recompute_modules:
        rule = "cuts layers where model.recompute_modules recomputes moe, whose all-to-alls would run again in backward"
        found.add(
            name, f"{rule}; leave that out of it (core_attn, layernorm, mlp and shared_experts may be recomputed)"
        )
    elif found.microbatches == 1:
        rule = "merges a forward with the backward of another microbatch, but a step has 1"
        found.add(name, f"{rule}; raise train.global_batch_size, or leave this out")


def group_size_rule(size: int, pp: int, microbatches: int) -> str:
    """Return the rule that a group size N of the interleaved schedule breaks, with legal sizes, or an empty string.

    The rule is pp <= N <= M, and M mod N is 0 or at least pp. A rank runs N microbatches on one chunk before the next
    chunk. With N < pp the second chunk needs the first microbatch before it is back from the last rank, and the same
    happens if the last group is too short.
    """

    def is_legal(n: int) -> bool:
        return microbatches % n == 0 or microbatches % n >= pp

    if pp <= size <= microbatches and is_legal(size):
        return ""
    legal = [str(n) for n in range(pp, microbatches + 1) if is_legal(n)]
    choices = ", ".join(legal[:8]) + (", .." if len(legal) > 8 else "")
    choices = f"choose one of {choices}" if len(legal) > 1 else f"choose {choices}"
    if size < pp:
        rule = f"must be at least pp = {pp}, or a stage waits for a microbatch that is not back yet"
    elif size > microbatches:
        rule = f"must be at most the {microbatches} microbatches of a step"
    else:
        left = microbatches % size
        rule = f"leaves a last group of {left} of {microbatches} microbatches, shorter than pp = {pp}"
        choices += f", or take {microbatches - left + size} microbatches"
    return f"{rule}; {choices}" if legal else f"{rule}; raise train.global_batch_size"
