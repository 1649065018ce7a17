"""Chapter 18, exercise `18.boundary`: boundary(steps, captured) -> what a partial graph takes in and gives out."""


def wrong_1(steps, captured):
    """Everything that is computed in the graph comes out; its memory could then never be reused."""
    return _inside(steps[:captured])


def wrong_2(steps, captured):
    """Only the very next step reads what the graph has made; residual and shared experts are forgotten."""
    inputs, written = _inside(steps[:captured])
    following = steps[captured : captured + 1]
    wanted = set(following[0][1]) if following else set(steps[-1][2])
    return inputs, [name for name in written if name in wanted]


def wrong_3(steps, captured):
    """Whatever later steps read by name comes out, even if its value is another one by then."""
    inputs, written = _inside(steps[:captured])
    wanted = {name for _, reads, _ in steps[captured:] for name in reads} | set(steps[-1][2])
    return inputs, [name for name in written if name in wanted]
