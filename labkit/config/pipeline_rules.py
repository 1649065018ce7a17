"""Rules between the fields of the pipeline: how many stages there are, what they hold, what moves between them.

What a CSV file at `schedule.path` says is not read here; `labkit.train.preflight` holds it against the run.
"""

from __future__ import annotations

from labkit.config.findings import Findings, up
from labkit.config.limits import CHUNKS
from labkit.config.pipeline_layout import LayoutError, parse_layout


def pipeline_rules(found: Findings) -> None:
    """Model chunks, stages and transfers."""
    chunks = _chunks(found)
    layout = _layout(found)
    if (got := found.get("model.layers", "parallel.pp", "parallel.standalone_embedding_stage")) is not None:
        layers, pp, standalone = got
        if standalone and found.values["parallel.pipeline_layout"] is not None:
            rule = "the text of parallel.pipeline_layout says where the embedding is; leave this false"
            found.add("parallel.standalone_embedding_stage", rule)
        elif layout is not None:
            _layout_fits(found, layout, layers, pp, chunks)
        elif chunks is not None and found.sound("parallel.pipeline_layout"):
            _equal_shares(found, layers, pp, chunks, standalone)
    _transfers(found)


def interleaves(found: Findings) -> bool:
    """Whether the interleaved schedule runs: several chunks a rank, by its name or by `auto`."""
    got = found.get("schedule.name", "schedule.path", "parallel.vpp")
    return got is not None and got[0] in ("auto", "interleaved") and got[1] is None and got[2] > 1


def _chunks(found: Findings) -> int | None:
    """Model chunks on each rank; None where a file says it or a field is bad."""
    got = found.get("schedule.name", "schedule.path", "parallel.pp", "parallel.vpp")
    if got is None:
        return None
    name, path, pp, vpp = got
    if vpp > 1 and pp == 1:
        rule = "model chunks are interleaved over pipeline stages, so it needs parallel.pp above 1"
        found.add("parallel.vpp", f"{rule}; set pp, or vpp = 1")
        return None
    if path is not None:
        return None
    fixed = CHUNKS.get(name, vpp)
    if vpp not in (1, fixed):
        how_many = "one model chunk" if fixed == 1 else f"{fixed} model chunks"
        advice = "use auto, or vpp = 1" if fixed == 1 else "leave it at 1"
        found.add("schedule.name", f"runs {how_many} a rank, but parallel.vpp = {vpp}; {advice}")
        return None
    if name == "interleaved" and vpp == 1 and pp > 1:
        found.add("schedule.name", "interleaves several model chunks a rank; set parallel.vpp above 1, or use 1f1b")
        return None
    return fixed


def _layout(found: Findings) -> list[str] | None:
    """The stages that `parallel.pipeline_layout` names; None where it is not given or cannot be read."""
    got = found.get("parallel.pipeline_layout")
    if got is None or got[0] is None:
        return None
    try:
        return parse_layout(got[0])
    except LayoutError as rule:
        found.add("parallel.pipeline_layout", str(rule))
        return None


def _layout_fits(found: Findings, stages: list[str], layers: int, pp: int, chunks: int | None) -> None:
    """As many stages as the schedule has, and as many layers as the model."""
    name = "parallel.pipeline_layout"
    held = sum(stage.count("t") for stage in stages)
    if chunks is not None and len(stages) != pp * chunks:
        words = f"pp x {chunks} model chunks a rank = {pp} x {chunks} = {pp * chunks}" if chunks > 1 else f"pp = {pp}"
        per_rank, rest = divmod(len(stages), pp)
        free = found.values["schedule.name"] not in CHUNKS
        advice = f", or set parallel.vpp = {per_rank}" if free and not rest and per_rank and pp > 1 else ""
        found.add(name, f"has {len(stages)} stages, but there must be {words}; change the | in it{advice}")
    if held != layers:
        found.add(name, f"has {held} layers (t), but model.layers = {layers}; make them equal")


def _equal_shares(found: Findings, layers: int, pp: int, chunks: int, standalone: bool) -> None:
    """Every stage holds as many layers as every other, without the first where the embedding stands alone."""
    stages = pp * chunks
    per_rank = "vpp" if found.values["parallel.vpp"] > 1 else f"chunks of {found.values['schedule.name']}"
    words = f"pp x {per_rank} = {pp} x {chunks}" if chunks > 1 else "parallel.pp" if not standalone else "pp"
    hint = "; or name the layers of each stage in parallel.pipeline_layout"
    if standalone and stages == 1:
        rule = "a first stage without layers needs a second one; set parallel.pp above 1, or this to false"
        found.add("parallel.standalone_embedding_stage", rule)
    elif standalone and layers % (stages - 1):
        counted = f"{words} - 1 = {stages - 1}"
        rule = f"must be a multiple of {counted}: the standalone embedding stage holds no layer"
        found.add("model.layers", f"{rule}; try {up(layers, stages - 1)}{hint}")
    elif not standalone and layers % stages:
        found.add("model.layers", f"must be a multiple of {words} = {stages}; try {up(layers, stages)}{hint}")


def _transfers(found: Findings) -> None:
    got = found.get("schedule.overlap_p2p_comm", "schedule.batch_p2p_comm", "schedule.name", "schedule.path")
    if got and got[0]:
        if got[1]:
            rule = (
                "a batch is waited for as a whole, so it cannot overlap; set this or schedule.batch_p2p_comm to false"
            )
            found.add("schedule.overlap_p2p_comm", rule)
        elif not interleaves(found) and found.sound("parallel.vpp"):
            rule = "only the interleaved schedule takes it"
            advice = "set parallel.vpp above 1, or this to false (batch_p2p_comm = null overlaps in every schedule)"
            found.add("schedule.overlap_p2p_comm", f"{rule}; {advice}")
    got = found.get("schedule.microbatch_group_size", "schedule.name", "schedule.path", "parallel.vpp")
    if got and got[0] is not None and not interleaves(found):
        rule = "has no effect: only the interleaved schedule, with parallel.vpp above 1, runs microbatches in groups"
        found.add("schedule.microbatch_group_size", f"{rule}; leave it out")
    got = found.get("schedule.all_warmup", "schedule.name", "schedule.path", "parallel.vpp")
    if got and got[0] and not interleaves(found):
        rule = "has no effect: only the interleaved schedule, with parallel.vpp above 1, has this rule"
        found.add("schedule.all_warmup", f"{rule}; leave it out")
    if found.values["schedule.use_ring_exchange_p2p"] is True:
        rule = "torch has no ring exchange (it was a patched build of NVIDIA's); use batch_p2p_comm"
        found.add("schedule.use_ring_exchange_p2p", rule)


def split_rules(found: Findings, pp: int) -> None:
    """An encoder-decoder pipeline has stages in both halves and one chunk a rank."""
    got = found.get("parallel.split_rank")
    if got is None or got[0] is None:
        return
    if got[0] >= pp:
        advice = f"choose 1 to {pp - 1}" if pp > 1 else "leave it out, or set parallel.pp"
        name = "parallel.split_rank"
        found.add(name, f"must be below parallel.pp = {pp}, so that both halves have stages; {advice}")
    elif found.sound("parallel.vpp") and found.values["parallel.vpp"] > 1:
        rule = "an encoder-decoder is not interleaved: its halves exchange tensors of other shapes, and the encoder's"
        advice = "output would have to visit every chunk; set parallel.vpp = 1"
        found.add("parallel.split_rank", f"{rule} {advice}")


def microbatch_rules(found: Findings, microbatches: int) -> None:
    """What schedules ask of the number of microbatches of a step."""
    got = found.get("parallel.pp", "parallel.vpp", "schedule.name", "schedule.path")
    if got is None:
        return
    pp, _, name, path = got
    if interleaves(found):
        if group := found.get("schedule.microbatch_group_size"):
            _interleaving(found, pp, microbatches, group[0])
        if (early := found.get("schedule.all_warmup")) and early[0] and microbatches != pp:
            rule = f"needs as many microbatches a step as parallel.pp = {pp}, and there are {microbatches}"
            found.add("schedule.all_warmup", f"{rule}; leave it out, or change train.global_batch_size")
    elif path is None and name == "dualpipe_v" and microbatches < 2 * pp:
        rule = f"needs at least 2 x pp = {2 * pp} microbatches a step, and there are {microbatches}"
        found.add("schedule.name", f"{rule}; raise train.global_batch_size, or use zbv")


def _interleaving(found: Findings, pp: int, microbatches: int, group: int | None) -> None:
    """Group size N of the interleaved schedule: pp <= N <= M, and M mod N is 0 or at least pp."""
    size, rule = group or pp, ""
    if size < pp:
        rule = f"must be at least parallel.pp = {pp}, or a stage waits for a microbatch that is behind it"
    elif size > microbatches:
        rule = f"must be at most the {microbatches} microbatches of a step; raise train.global_batch_size"
    elif 0 < microbatches % size < pp:
        left = microbatches % size
        rule = f"leaves a last group of {left} of {microbatches} microbatches, which must be none or at least pp = {pp}"
    if rule:
        found.add("schedule.microbatch_group_size", f"{rule} (None means pp = {pp})", value=group)
