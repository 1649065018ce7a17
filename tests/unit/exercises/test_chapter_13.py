"""Wrong answers to the exercises of chapter 13, with what each believes and words of its score."""

import math

import pytest

from labkit.check.chapter_13 import SMALLEST, SMALLEST_NORMAL

# ---- 13.pack ----


def bits(x):
    import torch

    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).int()


def right_pack(main):
    import torch

    upper = (bits(main) + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits(main) - (upper << 16)).to(torch.int16)


def even(main):
    import torch

    return main.bfloat16(), (bits(main) - (bits(main.bfloat16()) << 16)).to(torch.int16)


def cut(main):
    import torch

    return (bits(main) >> 16).to(torch.int16).view(torch.bfloat16), (bits(main) & 0xFFFF).to(torch.int16)


def other_weight(main):
    """Rounds the weight, and counts the rest from the number that was cut off."""
    import torch

    return right_pack(main)[0], ((bits(main) & 0xFFFF) >> 1).to(torch.int16)


PACKED = {
    "nothing": (lambda main: (main.bfloat16(), 0 * bits(main).short()), "nothing is kept"),
    # Takes bfloat16() for any rounding, and forgets the middle.
    "even": (even, "only numbers in the middle"),
    "cut off": (cut, "rounds every weight towards 0"),
    # Keeps the difference of the numbers, which has up to 16 significant bits, in 8.
    "difference": (lambda main: (main.bfloat16(), (main - main.bfloat16()).bfloat16()), "give the rest as int16"),
    "32 bits": (lambda main: (main.bfloat16(), main - main.bfloat16()), "may have 16 bits"),
    "main": (lambda main: (main, 0 * bits(main).short()), "has to be bf16"),
    "other weight": (other_weight, "counted from another number"),
    "one": (lambda main: main.bfloat16(), "give a pair"),
}

# ---- 13.lost ----


def half(value):
    """A number as fp16 rounds it."""
    import torch

    return torch.tensor(value, dtype=torch.float64).half().item()


def places(condition):
    """An answer to 13.lost from a condition on (gradient, scale)."""
    return lambda gradients, scale: [i for i, g in enumerate(gradients) if condition(g, scale)]


def is_lost(gradient, scale):
    return gradient != 0 and half(gradient * scale) in (0, math.inf, -math.inf)


LOST = {
    # Takes fp16's smallest normal number for its smallest number, and forgets the subnormal ones below.
    "smallest number": (
        places(lambda g, s: 0 < abs(g * s) < SMALLEST_NORMAL or abs(g * s) > 65504),
        "subnormal numbers reach down to 6e-08",
    ),
    "half of the smallest": (places(lambda g, s: 0 < abs(g * s) < SMALLEST or abs(g * s) >= 65520), "rounds up to it"),
    # Looks at small gradients only: a scale that is too large makes the others infinite.
    "no overflow": (places(lambda g, s: g != 0 and half(g * s) == 0), "forgets the other end"),
    # Rounds first and multiplies afterwards: that scales numbers which fp16 has lost already.
    "no scale": (places(lambda g, s: is_lost(g, 1.0)), "leaves the scale out"),
    "zeros": (places(lambda g, s: g == 0 or is_lost(g, s)), "that were 0 from the start"),
    "sign": (places(lambda g, s: g != 0 and (half(g * s) == 0 or g * s > 65504)), "without the sign"),
}

# ---- 13.scale ----


def moving(*, anew=0, keeps=False, late=0, least=1.0, always=False, grows=True, falls=True):
    """An answer to 13.scale; `anew` is the count after a growth, `keeps` leaves the count at an overflow."""

    def next_scale(scale, good, overflow, window):
        if overflow:
            return (max(least, scale / 2) if falls else scale), (good if keeps else 0)
        good += 1
        if grows and (good >= window if always else good == window + late):
            return 2 * scale, (good if always else anew)
        return scale, good

    return next_scale


SCALES = {
    "still": (lambda scale, good, overflow, window: (scale, good), "nothing happens"),
    "keeps": (moving(keeps=True), "only good steps in a row"),
    # Never sets the count back, so that from the window on every good step is one too many.
    "always": (moving(always=True), "grows in every good step"),
    "late": (moving(late=1), "one step too late"),
    "early": (moving(late=-1), "one step too early"),
    "below 1": (moving(least=0.0), "falls below 1"),
    "never grows": (moving(grows=False), "never grows"),
    "never falls": (moving(falls=False), "never falls"),
}

TABLES = {"13.pack": PACKED, "13.lost": LOST, "13.scale": SCALES}
RIGHT = {"13.pack": right_pack, "13.lost": places(is_lost), "13.scale": moving()}


@pytest.mark.parametrize(
    ("gradient", "lost"), [(SMALLEST / 2, True), (SMALLEST / 2 * 1.01, False), (65519.0, False), (65520.0, True)]
)
def test_the_limits_are_those_of_fp16(gradient, lost):
    from labkit.check import chapter_13

    assert chapter_13._lost([gradient, -gradient], 1.0) == ([0, 1] if lost else [])
    assert is_lost(gradient, 1.0) == lost


def test_every_bf16_number_has_as_many_fp32_numbers_as_int16_has():
    import torch

    near_one = torch.arange(0x3F7F0000, 0x3F830000, dtype=torch.int32).view(torch.float32)
    weights, rests = right_pack(near_one)
    for weight in (1.0, 1.0078125):
        assert sorted(rests[weights == weight].tolist()) == list(range(-32768, 32768))


def test_the_drawing_has_both_scales():
    from labkit.check import chapter_13

    assert "yours 6 at 1, 3 at 20" in chapter_13.draw_scale(lambda scale, *_: (max(8.0, scale / 2), 0)).sentence
