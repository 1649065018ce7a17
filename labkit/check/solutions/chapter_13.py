"""Solutions of chapter 13, mixed precision."""

import torch

from labkit.check.solution_source import solves


@solves("13.pack")
def pack(main):
    """Round every middle up, in the bits: then what is left fits into 16 of them."""
    bits = main.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    rest = bits - (upper << 16)  # from -32768 to 32767
    return upper.to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def _rounded(gradient):
    return torch.tensor(gradient, dtype=torch.float64).half().item()


@solves("13.lost")
def lost(gradients, scale):
    """Scale as the backward does, round to fp16, and look at what is left."""
    left = [_rounded(gradient * scale) for gradient in gradients]
    return [i for i, (g, h) in enumerate(zip(gradients, left)) if g != 0 and (h == 0 or abs(h) == float("inf"))]


@solves("13.scale")
def next_scale(scale, good, overflow, window):
    """Halve at once, double after a window of good steps in a row."""
    if overflow:
        return max(1.0, scale / 2), 0
    if good + 1 == window:
        return 2 * scale, 0
    return scale, good + 1
