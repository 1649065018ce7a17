"""Chapter 13, exercise `13.lost`: lost(gradients, scale) -> positions that fp16 turns into 0 or infinity."""


def wrong_1(gradients, scale):
    """Takes fp16's smallest normal number for its smallest number, and forgets the subnormal ones below."""
    return [i for i, g in enumerate(gradients) if 0 < abs(g * scale) < 2.0**-14 or abs(g * scale) > 65504]


def wrong_2(gradients, scale):
    """Looks at small gradients only: a scale that is too large makes the others infinite."""
    return [i for i, g in enumerate(gradients) if g != 0 and _rounded(g * scale) == 0]


def wrong_3(gradients, scale):
    """Rounds first and multiplies afterwards: that scales numbers which fp16 has lost already."""
    left = [_rounded(gradient) * scale for gradient in gradients]
    return [i for i, (g, h) in enumerate(zip(gradients, left)) if g != 0 and (h == 0 or abs(h) == float("inf"))]
