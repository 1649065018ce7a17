"""Chapter 19, exercise `19.norms`: stack(x, halves, norms, placement) -> the output of a stack of halves."""


def wrong_1(x, halves, norms, placement):
    """Knows where a layer has its norms, and forgets the one outside of all layers."""
    if placement == "pre":
        for half, norm in zip(halves, norms):
            x = x + half(norm(x))
        return x
    for half, norm in zip(halves, norms[1:]):
        x = norm(x + half(x))
    return x


def wrong_2(x, halves, norms, placement):
    """Normalises the stream before each half in pre, so that the half adds to normalised numbers: that is post."""
    if placement == "post":
        return solution(x, halves, norms, placement)
    for half, norm in zip(halves, norms):
        x = norm(x)
        x = x + half(x)
    return norms[-1](x)


def wrong_3(x, halves, norms, placement):
    """Takes post as `normalise what the half makes`, and leaves the sum as it is; pre is right."""
    if placement == "pre":
        return solution(x, halves, norms, placement)
    x = norms[0](x)
    for half, norm in zip(halves, norms[1:]):
        x = x + norm(half(x))
    return x
