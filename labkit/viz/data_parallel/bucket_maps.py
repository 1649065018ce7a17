"""Gradient buckets with their owners, and the bytes that each ZeRO stage keeps on a rank.

`bucket_map` shows the place of every parameter in the buffer and the owner of each part of a bucket. `zero_stages`
shows the bytes of a parameter by stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from labkit.config.errors import counted
from labkit.parallel.data_parallel.bucket_layout import (
    PARAMETER_ALIGNMENT,
    Bucket,
    BucketLayout,
    Piece,
    shard_map,
    shard_range,
)
from labkit.plan.zero_stages import STAGES, BytesPerParameter, bytes_per_parameter, formula
from labkit.viz.figure import Figure
from labkit.viz.style import INK, PADDING, SEQUENCE, box, counted_mark, handle, name_rows, new_figure, nth_style, styled

MAX_BUCKETS = 8
"""Buckets that are drawn, a row each; if there are more, the first and the last ones."""
MAX_OWNERS = 64
"""Most ranks whose slices differ by colour; with more ranks the picture shows only borders."""
_WIDTH = 9.0
_GAP = 0.45
"""Height of the space that stands for the buckets left out; a row has height 1."""
_GAPS = {"facecolor": "#FFFFFF", "hatch": "....", "edgecolor": "#666666", "linewidth": 0.0}
_SHADES = ("#D9D9D9", "#BFBFBF")
"""Shades that neighbouring parameters have in turn, so that a reader sees where the next parameter starts."""


def bucket_map(plan: BucketLayout, dp: int = 1) -> Figure:
    """Draw a row per bucket: above, the parameters in the order of the buffer; below, the rank that owns each element.

    plan: result of `plan_buckets`.

    dp: ranks that share each bucket under the distributed optimizer. With 1 it draws only parameters, as for the
    all-reduce, after which every rank has all gradients.

    Raises ValueError if dp does not divide a bucket, and for a plan without a parameter.
    """
    if not plan.buckets:
        raise ValueError("the plan has no bucket: there is no parameter to draw")
    pieces = shard_map(plan, dp) if dp > 1 else []
    rows = _rows(len(plan.buckets))
    with styled():
        fig = new_figure(_WIDTH, 0.62 * (max(rows.values()) + 1) + 1.05)
        axes = fig.add_subplot()
        longest = max(bucket.numel for bucket in plan.buckets)
        for number, row in rows.items():
            _draw_parameters(axes, plan, plan.buckets[number], row, longest, alone=dp == 1)
            if dp > 1:
                _draw_owners(axes, plan.buckets[number], dp, row, longest)
        axes.set_yticks([row + 0.5 for row in rows.values()], [f"bucket {number}" for number in rows])
        axes.set(xlim=(0, longest), ylim=(max(rows.values()) + 1, 0), xlabel="elements from the bucket's start")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(axis="y", length=0)
        axes.spines[["left"]].set_visible(False)
        if len(plan.buckets) > len(rows):
            axes.text(0, MAX_BUCKETS / 2 + _GAP / 2, f"{counted(len(plan.buckets) - len(rows), 'bucket')} not drawn",
                      va="center", fontsize=8, color="#444444")  # fmt: skip
        legend = _legend(plan, dp, longest)
        fig.legend(legend.values(), legend.keys(), loc="outside upper right", ncols=len(legend),
                   handler_map={tuple: HandlerTuple(ndivide=None, pad=0)})  # fmt: skip
    return Figure(fig, _map_sentence(plan, dp, pieces))


def _rows(count: int) -> dict[int, float]:
    """Return the numbers of the buckets that are drawn, and their places: a gap stands for those that are not."""
    if count <= MAX_BUCKETS:
        return {number: number for number in range(count)}
    half = MAX_BUCKETS // 2
    first, last = range(half), range(count - half, count)
    return {n: n for n in first} | {n: half + _GAP + place for place, n in enumerate(last)}


def _draw_parameters(axes: Any, plan: BucketLayout, bucket: Bucket, row: float, longest: int, *, alone: bool) -> None:
    low, height = row + 0.08, 0.84 if alone else 0.40
    length = bucket.unpadded_end - bucket.start
    axes.add_patch(Rectangle((0, low), length, height, **_GAPS))  # elements without a parameter stay visible
    axes.add_patch(Rectangle((length, low), bucket.end - bucket.unpadded_end, height, **PADDING))
    shades = _shades(plan, longest)
    for name in bucket.names:
        start, end = (at - bucket.start for at in plan.ranges[name])
        short = _fitting(name, 900 * (end - start) / longest)  # about the pixels that the bar is wide
        look = {"edgecolor": "#666666", "linewidth": 0.4}
        box(axes, (start, low), end - start, height, shades[name], short, **look)


def _shades(plan: BucketLayout, longest: int) -> dict[str, str]:
    """Return name -> shade. Neighbours that are wide enough to be seen differ, also from one bucket to the next."""
    found, wide = {}, 0
    for name, (start, end) in plan.ranges.items():
        found[name] = _SHADES[wide % 2]
        wide += _is_wide(end - start, longest)
    return found


def _is_wide(elements: int, longest: int) -> bool:
    return elements > longest / 200


def _fitting(name: str, width: float) -> str:
    """Return as much of the name as fits `width` pixels: `layers.3.mlp.fc1.weight`, `3.mlp.fc1`, `fc1`, nothing."""
    brief = name.removeprefix("layers.").removesuffix(".weight")
    return next((text for text in (name, brief, brief.rsplit(".", 1)[-1]) if 7.2 * len(text) < width), "")


def _draw_owners(axes: Any, bucket: Bucket, dp: int, row: float, longest: int) -> None:
    for rank in range(dp):
        low, high = (at - bucket.start for at in shard_range(bucket.start, bucket.end, dp=dp, rank=rank))
        fill, pattern = _owner_style(rank, dp)
        edge = {"edgecolor": "#FFFFFF", "linewidth": 0.8 if dp <= MAX_OWNERS else 0.2}
        fits = 600 * (high - low) / longest > 9 * len(str(rank))
        text = str(rank) if fits else ""
        box(axes, (low, row + 0.50), high - low, 0.42, fill, text, hatch=pattern, **edge)


def _owner_style(rank: int, dp: int) -> tuple[str, str]:
    if dp > MAX_OWNERS:
        return SEQUENCE[rank % 2], ""
    return nth_style(rank)


def _legend(plan: BucketLayout, dp: int, longest: int) -> dict[str, Any]:
    """Return label -> handle for what is in the picture."""
    shades = tuple(Patch(facecolor=shade, edgecolor="#666666", linewidth=0.4) for shade in _SHADES)
    wide = [_is_wide(end - start, longest) for start, end in plan.ranges.values()]
    handles: dict[str, Any] = {"parameters, two shades in turn": shades} if sum(wide) > 1 else {"parameter": shades[0]}
    if not all(wide):
        handles["small parameter"] = Line2D([], [], color="#666666", lw=1.0, ls="", marker="|", ms=9)
    at_ends = sum(bucket.end - bucket.unpadded_end for bucket in plan.buckets)
    if plan.padding > at_ends:
        handles[f"gap to a multiple of {PARAMETER_ALIGNMENT}"] = Patch(**{**_GAPS, "linewidth": 0.4})
    if at_ends:
        handles["padding at the end"] = Patch(**{**PADDING, "linewidth": 0.4})
    if dp > 1:
        handles["below: the rank that owns it"] = Patch(facecolor=_owner_style(0, dp)[0])
    return handles


def _map_sentence(plan: BucketLayout, dp: int, pieces: Sequence[Piece]) -> str:
    elements = plan.numel - plan.padding
    sizes = sorted({bucket.numel for bucket in plan.buckets})
    cut = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    count = len(plan.buckets)
    parts = [
        f"{counted(len(plan.ranges), 'parameter')} of {elements:,} elements in {counted(count, 'bucket')} of {cut}",
        f"{plan.padding:,} of padding ({_percent(plan.padding / elements)})" if plan.padding else "no padding",
    ]
    if dp > 1:
        owners = Counter(piece.name for piece in pieces)
        name, most = owners.most_common(1)[0]
        several = sum(number > 1 for number in owners.values())
        parts.append(f"each of {dp} ranks owns {plan.numel // dp:,}")
        if several > 1:
            parts.append(f"{several} parameters have several owners, at most {most}")
        else:
            parts.append(f"{name} alone has several owners: {most}" if several else "every parameter has one owner")
    return "; ".join(parts) + "."


def _percent(share: float) -> str:
    """Format with one decimal, or with one significant digit if one decimal would read 0.0."""
    return f"{share:.1%}" if share >= 0.0995 / 100 else f"{100 * share:.1g}%"


# ---- bytes by stage ----

_PARTS = (
    ("weight", "weight", SEQUENCE[0], ""),
    ("gradient", "gradient", SEQUENCE[1], ""),
    ("master", "master weight", SEQUENCE[2], ""),
    ("moments", "Adam's moments", SEQUENCE[3], ""),
    ("update_gradient", "gradient, widened for the update", SEQUENCE[1], "//"),
)
"""Field of `BytesPerParameter` -> label, colour, hatch."""
_WHAT = {0: "replicated", 1: "optimizer sharded", 2: "gradients too", 3: "weights too"}


def zero_stages(
    *,
    param_dtype: str = "bf16",
    grad_dtype: str = "fp32",
    dp: int = 8,
    parameters: float | None = None,
    counted: Mapping[int, float] | None = None,
) -> Figure:
    """Draw the bytes per parameter on each of `dp` ranks, a bar per ZeRO stage (arXiv 1910.02054), with its formula.

    parameters: how many the model (or the rank's part of it) has; then the sentence also says how many GB that makes.
    counted: stage -> bytes per parameter that a program counted on its ranks, drawn as diamonds on the bars.

    Raises ValueError as `bytes_per_parameter` does.
    """
    kinds = {"param_dtype": param_dtype, "grad_dtype": grad_dtype}
    rows = [bytes_per_parameter(**kinds, dp=dp, stage=stage) for stage in STAGES]
    with styled():
        fig = new_figure(7.2, 2.6)
        axes = fig.add_subplot()
        for y, row in enumerate(rows):
            _stage_bar(axes, y, row)
            text = f"{_number(row.total)} = {formula(**kinds, stage=STAGES[y])}" if y else _number(row.total)
            axes.annotate(text, (float(row.total), y), (8, 0), textcoords="offset points", va="center", fontsize=8)
        for stage, found in (counted or {}).items():
            axes.plot(found, stage, "D", ms=6, color="#FFFFFF", markeredgecolor="#000000", zorder=3)
        name_rows(axes, [f"stage {stage}: {_WHAT[stage]}" for stage in STAGES], bars=True)
        axes.set(xlabel=f"bytes per parameter on each of d = {dp} ranks", xlim=(0, 1.25 * float(rows[0].total)))
        used = [part for part in _PARTS if any(getattr(row, part[0]) for row in rows)]
        handles: list[Any] = [handle(*look) for _, *look in used]
        if counted:
            handles.append(counted_mark())
        fig.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return Figure(fig, _stages_sentence(param_dtype, grad_dtype, dp, parameters, counted or {}))


def _stage_bar(axes: Any, y: int, row: BytesPerParameter) -> None:
    left = 0.0
    for field, _, fill, pattern in _PARTS:
        width = float(getattr(row, field))
        axes.barh(y, width, 0.7, left=left, color=fill, hatch=pattern, edgecolor=INK, linewidth=0.5)
        left += width


def _stages_sentence(
    param_dtype: str, grad_dtype: str, dp: int, parameters: float | None, counted: Mapping[int, float]
) -> str:
    kinds = {"param_dtype": param_dtype, "grad_dtype": grad_dtype}
    totals = [bytes_per_parameter(**kinds, dp=dp, stage=stage).total for stage in STAGES]
    words = [f"stage {stage}: {_number(totals[stage])} ({formula(**kinds, stage=stage)})" for stage in STAGES[1:]]
    text = (
        f"{param_dtype} weights with {grad_dtype} gradients on d = {dp} ranks: {_number(totals[0])} bytes per "
        f"parameter replicated; {'; '.join(words)}"
    )
    if parameters is not None:
        gigabytes = ", ".join(f"{float(total) * parameters / 1e9:.1f}" for total in totals)
        text += f"; {parameters / 1e9:g} billion parameters: {gigabytes} GB"
    if counted:
        text += f"; counted: {', '.join(f'stage {stage} {found:g}' for stage, found in counted.items())}"
    return text + "."


def _number(value: Fraction) -> str:
    """Format with at most two decimals, without trailing zeros."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")
