"""An all-reduce together with its record: what each rank has, and then what all of them have."""

from __future__ import annotations

from torch import Tensor

from labkit.comm.collectives import all_reduce
from labkit.comm.groups import Group
from labkit.comm.motion import Held, Motion


def all_reduce_in_motion(x: Tensor, group: Group) -> tuple[Tensor, Motion]:
    """Add up x over the group, in place. Return the sum, and the record that `viz.in_motion` draws.

    First each rank holds a term of the sum, in the color of the rank; then each holds the sum, with all colors.
    """
    term = Held(f"half {group.rank}" if group.size == 2 else f"term {group.rank}", [group.rank], x, partial=True)
    with Motion() as motion:
        motion.holds({"x": term}, "own half" if group.size == 2 else "own term")
        total = all_reduce(x, group)
        motion.holds({"x": Held("sum", range(group.size), total)}, "all-reduce")
    return total, motion
