"""Rules between the fields of the pipeline: the number of stages, their layers, the transfers between them.

Nothing here reads the CSV file at `schedule.path`; `labkit.train.preflight` holds that schedule against the run.
"""

from __future__ import annotations

from labkit.config.findings import Findings
from labkit.config.pipeline_layout import LayoutError, parse_layout

CHUNKS: dict[str, int] = {"gpipe": 1, "1f1b": 1, "zero_bubble_h1": 1, "zbv": 2, "dualpipe_v": 2}
"""Model chunks a rank of the schedules that fix their number; the others run `parallel.vpp`."""
SPLIT_BACKWARDS = ("zero_bubble_h1", "zbv", "dualpipe_v")
"""Schedules that run input and weight gradients apart."""


def pipeline_rules(found: Findings) -> None:
    """Model chunks, stages and transfers."""
    chunks = _chunks(found)
    layout = _layout(found)
    p, standalone = found.config.parallel, "parallel.standalone_embedding_stage"
    if found.sound("model.layers", "parallel.pp", standalone):
        if p.standalone_embedding_stage and p.pipeline_layout is not None:
            found.add(standalone, "the text of parallel.pipeline_layout says where the embedding is; leave this false")
        elif layout is not None:
            _layout_fits(found, layout, chunks)
        elif chunks is not None and found.sound("parallel.pipeline_layout"):
            _equal_shares(found, p.pp * chunks, chunks)
    _transfers(found)
    if found.microbatches is not None:
        _microbatches(found, found.microbatches)


def _interleaves(found: Findings) -> bool:
    """True where the interleaved schedule runs: several chunks a rank, by its name or by `auto`."""
    s = found.config.schedule
    sound = found.sound("schedule.name", "schedule.path", "parallel.vpp")
    return sound and s.name in ("auto", "interleaved") and s.path is None and found.config.parallel.vpp > 1


def _chunks(found: Findings) -> int | None:
    """Model chunks on each rank; None where a file says it or a field is bad."""
    p, s = found.config.parallel, found.config.schedule
    if not found.sound("schedule.name", "schedule.path", "parallel.pp", "parallel.vpp"):
        return None
    fixed = CHUNKS.get(s.name, p.vpp)
    if p.vpp > 1 and p.pp == 1:
        rule = "model chunks are interleaved over pipeline stages, so it needs parallel.pp above 1"
        found.add("parallel.vpp", f"{rule}; set pp, or vpp = 1")
    elif s.path is not None:
        return None
    elif p.vpp not in (1, fixed):
        number, advice = ("one model chunk", "use auto, or vpp = 1")
        if fixed > 1:
            number, advice = f"{fixed} model chunks", "leave it at 1"
        found.add("schedule.name", f"runs {number} a rank, but parallel.vpp = {p.vpp}; {advice}")
    elif s.name == "interleaved" and p.vpp == 1 and p.pp > 1:
        found.add("schedule.name", "interleaves several model chunks a rank; set parallel.vpp above 1, or use 1f1b")
    return fixed if found.sound("parallel.vpp", "schedule.name") else None


def _layout(found: Findings) -> list[str] | None:
    """The stages that `parallel.pipeline_layout` names; None where it is not given or cannot be read."""
    text = found.config.parallel.pipeline_layout
    if text is None or not found.sound("parallel.pipeline_layout"):
        return None
    try:
        return parse_layout(text)
    except LayoutError as rule:
        found.add("parallel.pipeline_layout", str(rule))
        return None


def _layout_fits(found: Findings, stages: list[str], chunks: int | None) -> None:
    """As many stages as the schedule has, and as many layers as the model."""
    name, pp, layers = "parallel.pipeline_layout", found.config.parallel.pp, found.config.model.layers
    held = sum(stage.count("t") for stage in stages)
    if chunks is not None and len(stages) != pp * chunks:
        words = f"pp x {chunks} model chunks a rank = {pp} x {chunks} = {pp * chunks}" if chunks > 1 else f"pp = {pp}"
        per_rank, rest = divmod(len(stages), pp)
        free = found.config.schedule.name not in CHUNKS
        advice = f", or set parallel.vpp = {per_rank}" if free and not rest and per_rank and pp > 1 else ""
        found.add(name, f"has {len(stages)} stages, but there must be {words}; change the | in it{advice}")
    if held != layers:
        found.add(name, f"has {held} layers (t), but model.layers = {layers}; make them equal")


def _equal_shares(found: Findings, stages: int, chunks: int) -> None:
    """Every stage holds as many layers as every other, without the first where the embedding stands alone."""
    p, hint = found.config.parallel, "try {up}; or name the layers of each stage in parallel.pipeline_layout"
    standalone = p.standalone_embedding_stage
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


def _transfers(found: Findings) -> None:
    """Options of transfers, and those that only the interleaved schedule reads."""
    s, overlap, batch = found.config.schedule, "schedule.overlap_p2p_comm", "schedule.batch_p2p_comm"
    readable = found.sound("schedule.name", "schedule.path", "parallel.vpp")
    if s.overlap_p2p_comm is True and found.sound(batch) and s.batch_p2p_comm:
        rule = "a batch is waited for as a whole, so it cannot overlap; set this or schedule.batch_p2p_comm to false"
        found.add(overlap, rule)
    elif s.overlap_p2p_comm is True and found.sound(batch) and readable and not _interleaves(found):
        rule = "only the interleaved schedule takes it; set parallel.vpp above 1, or this to false"
        found.add(overlap, f"{rule} (batch_p2p_comm = null overlaps in every schedule)")
    only = {"microbatch_group_size": "runs microbatches in groups", "all_warmup": "has this rule"}
    for name, reader in only.items():
        if found.changed(f"schedule.{name}") and readable and not _interleaves(found):
            rule = f"has no effect: only the interleaved schedule, with parallel.vpp above 1, {reader}"
            found.add(f"schedule.{name}", f"{rule}; leave it out")
    if s.use_ring_exchange_p2p is True:
        rule = "torch has no ring exchange (it was a patched build of NVIDIA's); use batch_p2p_comm"
        found.add("schedule.use_ring_exchange_p2p", rule)


def split_rules(found: Findings) -> None:
    """An encoder-decoder pipeline has stages in both halves and one chunk a rank."""
    name, split, pp = "parallel.split_rank", found.values["parallel.split_rank"], found.config.parallel.pp
    if split >= pp:
        advice = f"choose 1 to {pp - 1}" if pp > 1 else "leave it out, or set parallel.pp"
        found.add(name, f"must be below parallel.pp = {pp}, so that both halves have stages; {advice}")
    elif found.sound("parallel.vpp") and found.config.parallel.vpp > 1:
        rule = "an encoder-decoder is not interleaved: its halves exchange tensors of other shapes, and the encoder's"
        found.add(name, f"{rule} output would have to visit every chunk; set parallel.vpp = 1")


def _microbatches(found: Findings, microbatches: int) -> None:
    """Rules of schedules on the number of microbatches of a step."""
    s, pp, group = found.config.schedule, found.config.parallel.pp, "schedule.microbatch_group_size"
    if _interleaves(found):
        if found.sound(group) and (rule := _group_rule(s.microbatch_group_size or pp, pp, microbatches)):
            found.add(group, f"{rule} (None means pp = {pp})")
        if found.sound("schedule.all_warmup") and s.all_warmup and microbatches != pp:
            rule = f"needs as many microbatches a step as parallel.pp = {pp}, and there are {microbatches}"
            found.add("schedule.all_warmup", f"{rule}; leave it out, or change train.global_batch_size")
    elif (
        found.sound("schedule.name", "parallel.vpp") and not s.path and s.name == "dualpipe_v" and microbatches < 2 * pp
    ):
        rule = f"needs at least 2 x pp = {2 * pp} microbatches a step, and there are {microbatches}"
        found.add("schedule.name", f"{rule}; raise train.global_batch_size, or use zbv")


def _group_rule(size: int, pp: int, microbatches: int) -> str:
    """Group size N of the interleaved schedule: pp <= N <= M, and M mod N is 0 or at least pp."""
    left = microbatches % size
    if size < pp:
        return f"must be at least parallel.pp = {pp}, or a stage waits for a microbatch that is behind it"
    if size > microbatches:
        return f"must be at most the {microbatches} microbatches of a step; raise train.global_batch_size"
    if 0 < left < pp:
        return f"leaves a last group of {left} of {microbatches} microbatches, which must be none or at least pp = {pp}"
    return ""
