"""Chapter 13, exercise `13.lost`: lost(gradients, scale) -> positions that fp16 turns into 0 or infinity."""

import torch


def _rounded(gradient: float) -> float:
    return torch.tensor(gradient, dtype=torch.float64).half().item()


def solution(gradients: list[float], scale: float) -> list[int]:
    """Scale as the backward does, round to fp16, and look at what is left."""
    left = [_rounded(gradient * scale) for gradient in gradients]
    return [i for i, (g, h) in enumerate(zip(gradients, left)) if g != 0 and (h == 0 or abs(h) == float("inf"))]


def wrong_1(gradients: list[float], scale: float) -> list[int]:
    """Takes fp16's smallest normal number for its smallest number, and forgets the subnormal ones below."""
    return [i for i, g in enumerate(gradients) if 0 < abs(g * scale) < 2.0**-14 or abs(g * scale) > 65504]


def wrong_2(gradients: list[float], scale: float) -> list[int]:
    """Looks at small gradients only: a scale that is too large makes the others infinite."""
    return [i for i, g in enumerate(gradients) if g != 0 and _rounded(g * scale) == 0]


def wrong_3(gradients: list[float], scale: float) -> list[int]:
    """Rounds first and multiplies afterwards: that scales numbers which fp16 has lost already."""
    left = [_rounded(gradient) * scale for gradient in gradients]
    return [i for i, (g, h) in enumerate(zip(gradients, left)) if g != 0 and (h == 0 or abs(h) == float("inf"))]
