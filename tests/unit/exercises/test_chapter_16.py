"""Wrong answers to the exercises of chapter 16, with what each believes and words of its score."""

import pytest
import torch

from labkit.check import score
from labkit.check.chapter_16 import _REQUESTS, _held_after, _size, draw_pool
from labkit.graphs.study.free_ranges import best_fit
from labkit.graphs.study.launches import predict_launches

LAUNCHES = {
    # Lets the host wait for each operation, so that launches and operations add up.
    "wait": (
        lambda works, launch, graph: (launch if graph else launch * len(works)) + sum(works),
        "the host launches on",
    ),
    # Takes the larger of both sums, and forgets the last operation, which runs after the last launch.
    "larger": (
        lambda works, launch, graph: max(launch if graph else launch * len(works), sum(works)),
        "before its own launch",
    ),
    # Pays for every launch of a graph, as if a graph only removed Python.
    "each": (lambda works, launch, graph: int(predict_launches(works, launch).end), "a graph is launched once"),
    "one": (lambda works, launch, graph: launch + sum(works), "one by one the host launches each operation"),
    "last": (
        lambda works, launch, graph: launch + sum(works) if graph else launch * len(works) + works[-1],
        "the device may have more work left",
    ),
    "in step": (
        lambda works, launch, graph: launch + sum(works if graph else [max(launch, work) for work in works]),
        "the host can be many operations ahead",
    ),
}


def clip(counted, bad=lambda finite: finite.all()):
    """A clip that counts by `counted(norm, limit, finite)` and keeps entries by `bad(finite)`."""

    def clipped(x, limit, count):
        finite = x.isfinite()
        kept = torch.where(bad(finite), x, 0.0)
        count.add_(counted(x.norm(), limit, ~finite.all()))
        return torch.where(kept.norm() > limit, kept * (limit / kept.norm()), kept)

    return clipped


def right_clip(x, limit, count):
    return clip(lambda norm, limit, bad: (norm > limit) | bad)(x, limit, count)


def asking(x, limit, count):
    finite = x.isfinite().all()
    kept = torch.where(finite, x, 0.0)
    norm = kept.norm()
    if norm > limit or not finite:
        count.add_(1)
        return kept * (limit / norm).clamp(max=1.0)
    return kept


def rebinding(x, limit, count):
    return right_clip(x, limit, count + 0)


def masking(x, limit, count):
    right_clip(x, limit, count)
    kept = x * x.isfinite().all()
    return torch.where(kept.norm() > limit, kept * (limit / kept.norm()), kept)


CLIPS = {
    # Believes that only `.item()` asks the host: an `if` on a tensor asks it, too.
    "if": (asking, "an `if` on a tensor asks"),
    # Believes that `count = count + 1` changes the caller's tensor: it makes another one, at another address.
    "another tensor": (rebinding, "makes another tensor"),
    # Believes that zero times anything is zero: a mask that multiplies leaves inf and NaN as NaN.
    "mask": (masking, "torch.where chooses"),
    "NaN": (clip(lambda norm, limit, bad: norm > limit), "False where the norm is NaN"),
    "on the limit": (clip(lambda norm, limit, bad: (norm >= limit) | bad), "equal to the limit does not count"),
    "twice": (clip(lambda norm, limit, bad: (norm > limit).int() + bad.int()), "inf counts once"),
    "entries": (
        clip(lambda norm, limit, bad: (norm > limit) | bad, lambda finite: finite),
        "makes all entries zero",
    ),
}


def fitting(free, nbytes):
    return [(start, length) for start, length in free if length >= nbytes]


POOLS = {
    # Believes that a pool only grows: what is given back is lost.
    "behind": (lambda free, nbytes: free[-1][0], "what was given back can be taken"),
    # Believes that any hole is as good as another.
    "first": (lambda free, nbytes: fitting(free, nbytes)[0][0], "takes the first hole"),
    "largest": (
        lambda free, nbytes: max(fitting(free, nbytes)[:-1] or free[-1:], key=lambda hole: hole[1])[0],
        "takes the largest hole",
    ),
    # Believes that a hole must have the very size.
    "exact": (
        lambda free, nbytes: next((start for start, length in free if length == nbytes), free[-1][0]),
        "the rest of a larger one stays free",
    ),
    # Forgets to ask if the hole is large enough.
    "too small": (lambda free, nbytes: free[0][0], "are not all free"),
}

TABLES = {"16.launches": LAUNCHES, "16.clipped": CLIPS, "16.pool": POOLS}
RIGHT = {"16.clipped": right_clip}


@pytest.mark.parametrize("row", ["one", "last", "in step"])
def test_a_wrong_model_of_time_is_named_by_the_misunderstanding_that_fits_every_case(row: str) -> None:
    assert "during the one before" not in repr(score("16.launches", LAUNCHES[row][0]))


def test_a_norm_of_zero_is_told_from_an_infinite_entry() -> None:
    def always_scaled(x, limit, count):
        finite = x.isfinite().all()
        count.add_(~finite | (x.norm() > limit))
        return torch.where(finite, x * limit / x.norm(), 0.0)

    assert "the norm is 0" in repr(score("16.clipped", always_scaled))


def test_a_clip_has_one_denominator_and_says_what_was_refused() -> None:
    """An answer that cannot be captured loses its replays, and hears about them once."""

    def asks(x, limit, count):
        return x * min(1.0, limit.item() / x.norm().item()) if x.isfinite().all() else torch.zeros_like(x)

    for answer in (asks, lambda x, limit, count: None, lambda x, limit, count: x):
        found = score("16.clipped", answer)
        assert found.total == 12
        told = [str(outcome) for outcome in found.told]
        assert len({text.split("got ")[1] for text in told}) == len(told)


def test_a_pool_is_drawn_where_the_answer_first_wastes_memory() -> None:
    figure = draw_pool(POOLS["first"][0])
    assert figure.sentence == "holes of 4 and 2, take 2 and 4: yours 12 bytes, as small as it can be 8 bytes."


def test_no_choice_makes_a_smaller_pool_than_best_fit() -> None:
    """A pool is at least as large as the most bytes that are held at once, and best fit needs no more."""
    for requests in _REQUESTS.values():
        held, most, taken = set(), 0, []
        for request in requests:
            if request > 0:
                taken.append(request)
                held.add(len(taken))
            else:
                held.remove(-request)
            most = max(most, sum(taken[number - 1] for number in held))
        assert _size(_held_after(best_fit, requests)) == most
