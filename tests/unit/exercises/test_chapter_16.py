"""Wrong answers to the exercises of chapter 16, with what each believes and words of its score."""

import pytest
import torch

from labkit.check import score
from labkit.check.chapter_16 import _foreign
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


def moved(captures, replays):
    order = list(captures)
    return [i for i, name in enumerate(replays) if name != order[i % len(order)]]


STALE = {
    # Takes every other order for a wrong one: two graphs that share no address may change places.
    "moved": (moved, "another order can be harmless"),
    # Asks only whether anybody has written there, and not who wrote last.
    "nobody wrote": (
        lambda captures, replays: sorted({i for i, _, writer in _foreign(captures, replays) if writer is None}),
        "the same graph as at capture",
    ),
    # Believes that each graph has a pool of its own, so that no replay disturbs another.
    "nothing": (lambda captures, replays: [], "may write one address"),
}

TABLES = {"16.launches": LAUNCHES, "16.clipped": CLIPS, "16.stale": STALE}
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


def test_a_stale_read_is_named_with_its_place_and_writer() -> None:
    found = score("16.stale", lambda captures, replays: [])
    assert "(position 1: B0 reads address 0, wants F0, finds None)" in repr(found)
    assert "captures F0 (writes 0), F1 (writes 1), B0 (reads 0, writes 2), F2 (writes 0)" in repr(found)
    harmless = score("16.stale", lambda captures, replays: list(range(len(replays))))
    assert "(every read finds its own writer here)" in repr(harmless)
