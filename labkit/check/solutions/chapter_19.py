"""Solutions of chapter 19, BERT and where LayerNorm goes."""

from labkit.check.solution_source import solves


@solves("19.norms")
def stack(x, sublayers, norms, placement):
    """In pre the norms are on the branches, and one comes after all; in post on the stream."""
    x = norms[0](x) if placement == "post" else x
    for sublayer, before, after in zip(sublayers, norms, norms[1:]):
        x = after(x + sublayer(x)) if placement == "post" else x + sublayer(before(x))
    return x if placement == "post" else norms[-1](x)


@solves("19.backward")
def norm_backward(x, dy):
    """What adds the same number everywhere, and what points along y, is lost; the rest is divided by std."""
    std = x.std(-1, keepdims=True)
    y = (x - x.mean(-1, keepdims=True)) / std
    return (dy - dy.mean(-1, keepdims=True) - y * (dy * y).mean(-1, keepdims=True)) / std


@solves("19.branch")
def branch(layers):
    """The squares of 2 L independent sublayers add up, so each has 1 / (2 L) of the square."""
    return (2 * layers) ** -0.5
