"""Chapter 18, exercise `18.boundary`: boundary(steps, captured) -> what a partial graph takes in and gives out."""

from collections.abc import Sequence

Step = tuple[str, tuple[str, ...], tuple[str, ...]]


def _inside(steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """What captured steps read and have not written, and what they write, in the order of the last time."""
    inputs: list[str] = []
    written: list[str] = []
    for _, reads, writes in steps:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, written


def solution(steps: list[Step], captured: int) -> tuple[list[str], list[str]]:
    """A value comes out if somebody behind the graph reads it before it is written again, or if it is the result."""
    inputs, written = _inside(steps[:captured])
    wanted = set(steps[-1][2])
    for _, reads, writes in reversed(steps[captured:]):
        wanted = wanted - set(writes) | set(reads)
    return inputs, [name for name in written if name in wanted]


def wrong_1(steps: list[Step], captured: int) -> tuple[list[str], list[str]]:
    """Everything that is computed in the graph comes out; its memory could then never be reused."""
    return _inside(steps[:captured])


def wrong_2(steps: list[Step], captured: int) -> tuple[list[str], list[str]]:
    """Only the very next step reads what the graph has made; residual and shared experts are forgotten."""
    inputs, written = _inside(steps[:captured])
    following = steps[captured : captured + 1]
    wanted = set(following[0][1]) if following else set(steps[-1][2])
    return inputs, [name for name in written if name in wanted]


def wrong_3(steps: list[Step], captured: int) -> tuple[list[str], list[str]]:
    """Whatever later steps read by name comes out, even if its value is another one by then."""
    inputs, written = _inside(steps[:captured])
    wanted = {name for _, reads, _ in steps[captured:] for name in reads} | set(steps[-1][2])
    return inputs, [name for name in written if name in wanted]
