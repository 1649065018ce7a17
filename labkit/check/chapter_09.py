"""Exercises and bets of chapter 09: owners of slices, an order for a sharded model, the stage of ZeRO that fits.

Wrong answers are compared with those of known misunderstandings. For slices the score shows the first rank that
differs; an order of a sharded model is played by the clock of `played`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.check.bets import ask
from labkit.check.scoring import Diagnosis, Finding, Misreadings, Outcome, asked, exercise, holds, plain, shown
from labkit.check.sharded_rank import BACKWARD, FORWARD, MESSAGE, Run, played
from labkit.parallel.data_parallel.bucket_layout import ParameterSpec, pieces_of_rank, plan_buckets
from labkit.plan.zero_stages import STAGES, bytes_per_parameter

if TYPE_CHECKING:
    from labkit.viz.figure import Figure

# ---- bets ----

ask(
    "09.bytes",
    "Weights are bf16, gradients are summed in fp32. If d ranks keep the optimizer's state once between them, how many "
    "bytes leave a rank in a step, compared with chapter 08's all-reduce?",
    choices={
        "25 % more": "The all-reduce as before and then an all-gather of weights would be 4 + 4 + 2 bytes instead of "
        "4 + 4. But the second half of the all-reduce hands gradients to ranks that don't update with them.",
        "the same": "A reduce-scatter and an all-gather are the two halves of an all-reduce, so with one type for "
        "everything this is right. But the second half carries weights now, and a weight has two bytes.",
        "25 % fewer": "The first half carries gradients of four bytes, as before. The second carries weights in place "
        "of gradients, and these have two bytes: 4 + 2 instead of 4 + 4.",
    },
)
ask(
    "09.exposed",
    "Six layers; each one's gather takes link_ms on the link, each one's forward layer_ms. A hook before a layer's "
    "forward waits for that layer's weights, and starts the gather of the next layer. How many milliseconds of the six "
    "gathers does the forward wait for?",
    misread=lambda layer, link: {
        "That is all of them, one after another. While a layer computes, the next one's weights travel.": 6 * link,
        "Something has to wait: when the forward begins, nobody has the first layer's weights yet.": 0,
        "Five gathers have a layer to hide beside, not six.": 6 * max(0.0, link - layer),
    },
    unit="ms",
    because="The first gather has no layer before it, so all of it is waited for. Each later one has a layer to hide "
    "beside, and only what it takes longer than that layer is waited for.",
)
ask(
    "09.sharded",
    "Now the weights are sharded as well, and everything has one type. How many bytes leave a rank in a step with one "
    "microbatch, compared with an all-reduce of the gradients?",
    choices={
        "as many": "That is what stage 1 sends, a reduce-scatter and one all-gather. But weights that were dropped "
        "after the forward have to come back for the backward.",
        "1.5 times": "Weights are gathered for the forward and once more for the backward, and gradients are "
        "scattered: three halves where the all-reduce has two.",
        "twice": "Two gathers of the weights and a whole all-reduce of the gradients would be four halves. But no rank "
        "needs the whole sum: a reduce-scatter is enough.",
    },
)
ask(
    "09.gigabytes",
    "8.03 billion parameters, stage 1: weights in bf16, gradients, masters and both moments in fp32. On 8 GPUs that's "
    "60.2 GB per GPU. How many GB per GPU on 512?",
    misread=lambda: {
        "That divides everything by 64. Stage 1 divides master and moments; weight and gradient stay whole.": 0.9,
        "That is stage 3, with weights and gradients sharded too.": 0.3,
        "That is the part that is sharded over 8 GPUs. Weight and gradient, 6 bytes, are on every GPU.": 12.0,
        "That leaves out the gradient, which is whole as well: 4 bytes.": 16.2,
    },
    unit="GB per GPU",
    because="6 + 12/512 bytes per parameter. The 12 have nearly vanished and the 6 haven't moved, however many GPUs "
    "you buy.",
)

# ---- owners of slices ----

_BUFFERS = (
    ((100, 300, 50), 1_000, 4, "alignment and padding"),
    ((128, 64), 1_000, 2, "what is where"),
    ((100, 300, 50), 256, 4, "two buckets"),
    ((1_000,), 1_000, 3, "one parameter, three owners"),
    ((64, 64, 64, 64), 64, 2, "a bucket for each, half of it padding"),
)
"""(sizes, bucket_size, dp, tested idea)."""
_MANY = (tuple(37 * i % 501 + 1 for i in range(40)), 2_000, 6)
Owners = list[list[tuple[int, int, int]]]
Placed = tuple[int, int, int]
"""(parameter, its first element in the buffer, one after its last)."""
Stretch = tuple[int, int, list[Placed]]
"""(start of a bucket, its end with padding, its parameters)."""


def owners(sizes: Sequence[int], bucket_size: int, dp: int) -> Owners:
    """Return the right answer by rank: (parameter, first element, one after the last) in the order of the buffer."""
    specs = [ParameterSpec(str(number), size) for number, size in enumerate(sizes)]
    plan = plan_buckets(specs, dp=dp, bucket_size=bucket_size, distributed_optimizer=True)
    return [
        [
            (int(piece.name), piece.offset_in_parameter, piece.offset_in_parameter + piece.numel)
            for piece in pieces_of_rank(plan, dp, rank)
        ]
        for rank in range(dp)
    ]


def _laid_out(sizes: Sequence[int], bucket_size: int, dp: int) -> list[Stretch]:
    """Return the library's buckets, with the parameters in each."""
    specs = [ParameterSpec(str(number), size) for number, size in enumerate(sizes)]
    plan = plan_buckets(specs, dp=dp, bucket_size=bucket_size, distributed_optimizer=True)
    return [
        (bucket.start, bucket.end, [(int(name), *plan.ranges[name]) for name in bucket.names])
        for bucket in plan.buckets
    ]


def _cut(buckets: Sequence[Stretch], dp: int, *, within: bool = True) -> Owners:
    """Return each rank's part of every bucket; `within` counts elements within the parameter, else in the buffer."""
    found: Owners = [[] for _ in range(dp)]
    for start, end, placed in buckets:
        share = (end - start) // dp
        for rank in range(dp):
            low, high = start + rank * share, start + (rank + 1) * share
            for parameter, first, last in placed:
                mine = max(first, low), min(last, high)
                if mine[0] < mine[1]:
                    begin = first if within else 0
                    found[rank].append((parameter, mine[0] - begin, mine[1] - begin))
    return found


def _misread_owners(buckets: Sequence[Stretch], dp: int) -> dict[str, Owners]:
    everything = [each for _, _, placed in buckets for each in placed]
    turns = [(parameter, 0, last - first) for parameter, first, last in everything]
    within = [(start, placed[-1][2], placed) for start, _, placed in buckets]
    return {
        "whole parameters are dealt out in turn; a rank owns a part of each bucket, wherever parameters end": [
            turns[rank::dp] for rank in range(dp)
        ],
        "the buffer is cut as a whole; cut each bucket, so that all ranks share it": _cut(
            [(0, buckets[-1][1], everything)], dp
        ),
        "the part that is cut ends with the last parameter; the padding after it belongs to the bucket, too": _cut(
            within, dp
        ),
        "every bucket is cut as if it began at 0; add its start": _cut(
            [(0, end - start, placed) for start, end, placed in buckets], dp
        ),
        "elements are counted in the buffer; count them within the parameter": _cut(buckets, dp, within=False),
        "pieces are listed by parameter; list them in the order of the buffer": [
            sorted(own) for own in _cut(buckets, dp)
        ],
    }


@exercise("09.shards", "Write shards(buckets, dp) -> by rank, the (parameter, first, last) that it owns.")
def shards(answer: Any) -> Iterator[Outcome]:
    """Judge five small buffers, then forty parameters: each element must have exactly its right owner."""
    diagnosis = Diagnosis()
    for sizes, bucket_size, dp, what in _BUFFERS:
        buckets = _laid_out(sizes, bucket_size, dp)
        yield _judged(f"buckets {shown(buckets)} and dp {dp} ({what})", answer, (sizes, bucket_size, dp), diagnosis)
    sizes, bucket_size, dp = _MANY
    yield holds(
        f"{len(sizes)} parameters over {dp} ranks in buckets of {bucket_size}",
        f"that each of their {sum(sizes):,} elements has one owner, the one it has in the library",
        lambda: _each_once(answer(_laid_out(*_MANY), dp), owners(*_MANY)),
    )


def _judged(given: str, answer: Any, case: tuple[Sequence[int], int, int], diagnosis: Diagnosis) -> Outcome:
    """Judge one buffer: name the first rank that differs, and the misunderstanding that gives the same slices."""
    right, rank, dp = plain(owners(*case)), 0, case[2]

    def tried() -> Finding:
        nonlocal rank
        value = plain(answer(_laid_out(*case), dp))
        if value == right:
            return True
        if not isinstance(value, list) or len(value) != len(right):
            return "form", f"{shown(value)}: give a list with one list of pieces for each of the {len(right)} ranks"
        rank = next(r for r in range(len(right)) if value[r] != right[r])
        fitting = [words for words, other in _misread_owners(_laid_out(*case), dp).items() if plain(other) == value]
        reason = diagnosis.meant(fitting)
        return reason, f"{shown(value[rank])} on rank {rank}{f': {reason}' if reason else ''}"

    outcome = holds(given, "", tried)
    return replace(outcome, expected=f"{shown(right[rank])} on rank {rank}")


def _each_once(answer: Any, expected: Owners) -> bool | str:
    """Return True, or the first element with no owner, two owners or a wrong owner."""
    if not isinstance(answer, (list, tuple)) or len(answer) != len(expected):
        return f"{shown(answer)}: give a list with one list of pieces for each of the {len(expected)} ranks"
    owner: dict[tuple[int, int], int] = {}
    for rank, pieces in enumerate(plain(answer)):
        for parameter, first, last in pieces:
            for element in range(first, last):
                if (parameter, element) in owner:
                    other = owner[parameter, element]
                    return f"element {element} of parameter {parameter} owned twice, by ranks {other} and {rank}"
                owner[parameter, element] = rank
    for rank, pieces in enumerate(expected):
        for parameter, first, last in pieces:
            for element in range(first, last):
                found = owner.pop((parameter, element), None)
                if found is None:
                    return f"element {element} of parameter {parameter} without an owner"
                if found != rank:
                    return f"element {element} of parameter {parameter} on rank {found}, which belongs to rank {rank}"
    if owner:
        parameter, element = min(owner)
        return f"an element {element} of parameter {parameter}, which has no such element"
    return True


# ---- an order for sharded layers ----

_SIZES = ((4, 2), (6, 2), (6, 3), (3, 3))
"""(layers, most layers that are whole at a time)."""
_OPERATIONS = ("gather", "forward", "backward", "free", "scatter")


def _shortest(layers: int) -> float:
    """All computation, the first gather, and the last scatter."""
    return MESSAGE + layers * (FORWARD + BACKWARD) + MESSAGE


def _tried_order(answer: Any, layers: int, room: int) -> Run | str:
    found = plain(answer(layers, room))
    form = "give a list of pairs (operation, layer), with operations " + ", ".join(_OPERATIONS)
    if not isinstance(found, list):
        return f"{shown(found)}: {form}"
    for each in found:
        if not isinstance(each, list) or len(each) != 2 or each[0] not in _OPERATIONS or each[1] not in range(layers):
            return f"{shown(each)}: {form}"
    return played([(what, i) for what, i in found], layers, room)


def draw_order(answer: Any) -> Figure | None:
    """Draw the answer's order for four layers and room for two, under its targets; None for one that cannot run."""
    from labkit.viz.data_parallel.layer_gathers import layer_gathers  # matplotlib, which a score does without

    layers, room = _SIZES[0]
    run = _tried_order(answer, layers, room)
    if isinstance(run, str):
        return None
    name = f"{layers} layers, room for {room}: {run.seconds:g} units and {run.gathers} gathers"
    enough = f"{_shortest(layers):g} and {2 * layers - room} are enough"
    # A unit is drawn as a millisecond.
    events = [replace(event, start=event.start / 1e3, end=event.end / 1e3) for event in run.events]
    return layer_gathers({f"{name} ({enough})": events})


@exercise(
    "09.order",
    "Write order(layers, room) -> a list of pairs such as ('gather', 0), one forward and one backward.",
    draw=draw_order,
    ladder=True,
)
def order(answer: Any) -> Iterator[Outcome]:
    """Judge three targets: faster than the hooks, as short as it can be, and no gather too many."""
    runs = {}
    for size in _SIZES:
        try:
            runs[size] = _tried_order(answer, *size)
        except (Exception, SystemExit):
            break
    yield holds(
        "every size that is tried",
        "an order that runs, in less time than the hooks",
        lambda: next(filter(None, map(_refused(answer), _SIZES)), True),
    )
    for layers, room in _SIZES:
        run, given = runs.get((layers, room)), f"{layers} layers, room for {room}"
        yield holds(given, f"at most {_shortest(layers):g} units", lambda r=run, n=layers: _in_time(r, n))
        most = 2 * layers - room
        yield holds(given, f"at most {most} gathers", lambda r=run, n=layers, m=most, k=room: _few(r, n, m, k))


def _refused(answer: Any) -> Callable[[tuple[int, int]], Finding | None]:
    """Return what is wrong with the order for a size; None if it runs and is faster than the hooks."""

    def why(size: tuple[int, int]) -> Finding | None:
        layers, room = size
        found = _tried_order(answer, layers, room)
        if isinstance(found, str):
            return found.partition(": ")[2] or found, f"with {layers} layers and room for {room}: {found}"
        hooks = _shortest(layers) + (3 * layers - 2) * MESSAGE
        return None if found.seconds < hooks else (_LATE, f"{found.seconds:g} units, as the hooks: {_LATE}")

    return why


_LATE = "a gather that starts when its layer is due has nothing to hide beside; start it one computation earlier"
_CANNOT = "an order that cannot run"


def _in_time(run: Run | str | None, layers: int) -> Finding:
    if not isinstance(run, Run):
        return _CANNOT, _CANNOT
    if run.seconds <= _shortest(layers) + 1e-9:
        return True
    return _LATE, f"{run.seconds:g} units: {_LATE}"


def _few(run: Run | str | None, layers: int, most: int, room: int) -> Finding:
    if not isinstance(run, Run):
        return _CANNOT, _CANNOT
    if run.gathers <= most:
        return True
    if run.gathers >= 2 * layers:
        reason = "layers are freed with which the backward begins; there is room to keep the last ones"
    else:
        reason = "some of the last layers stay, but there is room for more"
    return reason, f"{run.gathers} gathers: {reason}"


# ---- the stage that fits ----

_FITS = (
    (8 * 10**9, 8, 64 * 10**9, 4),
    (8 * 10**9, 8, 40 * 10**9, 4),
    (8 * 10**9, 8, 20 * 10**9, 4),
    (10**9, 1, 20 * 10**9, 2),
    (10**9, 4, 19 * 10**9, 1),
    (8 * 10**9, 512, 48_200_000_000, 1),
)
"""(parameters, ranks, bytes of room, microbatches)."""
Stage = tuple[int, float] | None


def _kept(dp: int, stage: int) -> float:
    return float(bytes_per_parameter(param_dtype="bf16", grad_dtype="fp32", dp=dp, stage=stage).total)


def _sent(m: int, stage: int) -> float:
    """Bytes for each parameter, as if every byte of a tensor left the rank once in each half."""
    return (8, 4 + 2, 4 * m + 2, (2 + 2 + 4) * m)[stage]


def _chosen(
    parameters: int, d: int, room: float, m: int, *, kept: Callable[[int, int], float] = _kept,
    sent: Callable[[int, int], float] = _sent, stages: Sequence[int] = STAGES, ring: bool = True, least: bool = True,
) -> Stage:  # fmt: skip
    """Return the right answer, or that of a misunderstanding."""
    share = (d - 1) / d if ring else float(d > 1)
    fitting = [stage for stage in stages if kept(d, stage) * parameters <= room]
    options = [(stage, parameters * share * sent(m, stage)) for stage in fitting]
    if not options:
        return None
    return min(options, key=lambda option: (option[1], option[0])) if least else options[0]


def _misread_stages(parameters: int, d: int, room: float, m: int) -> Misreadings:
    case = parameters, d, room, m
    return {
        "every stage divides everything; only stage 3 does that": _chosen(
            *case, kept=lambda d, s: 18 / (d if s else 1)
        ),
        "the first stage that fits is not always the one that sends least: with bf16 weights stage 1 sends less than "
        "stage 0": _chosen(*case, least=False),
        "this always shards everything; that fits most often, and sends most": _chosen(*case, stages=(3,)),
        "stages 2 and 3 reduce the gradients of each microbatch, and stage 3 gathers for each": _chosen(
            *case, sent=lambda m, s: _sent(1, s)
        ),
        "stage 3 gathers twice for each microbatch: once for the forward and once for the backward": _chosen(
            *case, sent=lambda m, s: _sent(m, s) - 2 * m * (s == 3)
        ),
        "stage 1 keeps the whole gradient, so it reduces once per step": _chosen(
            *case, sent=lambda m, s: _sent(m, s) if s != 1 else 4 * m + 2
        ),
        "a ring sends (d - 1)/d of a tensor in each half": _chosen(*case, ring=False),
        "the second half carries weights, of 2 bytes": _chosen(*case, sent=lambda m, s: (8, 8, 4 * m + 4, 12 * m)[s]),
    }


@exercise(
    "09.stage",
    "Write stage_for(parameters, d, room, microbatches) -> (stage, bytes that a rank sends).",
)
def stage_for(answer: Any) -> Iterator[Outcome]:
    """Judge six machines and models."""
    return asked(
        _FITS,
        given="{:,} parameters, d {}, {:,} bytes of room and {} microbatches".format,
        right=_chosen,
        tried=answer,
        misread=_misread_stages,
        equal=_alike,
    )


def _alike(value: Any, other: Any) -> bool:
    mine, right = plain(value), plain(other)
    if right is None:  # a misunderstanding by which nothing fits
        return mine is None
    if not isinstance(mine, list) or len(mine) != 2 or isinstance(mine[0], str):
        return False
    return mine[0] == right[0] and math.isclose(mine[1], right[1], rel_tol=1e-9)
