"""Exercise of chapter 00: which layouts can train a model on so many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labkit.check.scoring import Outcome, compare, exercise
from labkit.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig

_CASES = (
    {"ranks": 4, "layers": 4, "heads": 4, "batch": 4},
    {"ranks": 8, "layers": 8, "heads": 2, "batch": 8},
    {"ranks": 8, "layers": 2, "heads": 8, "batch": 2},
    {"ranks": 6, "layers": 3, "heads": 4, "batch": 6},
    {"ranks": 12, "layers": 4, "heads": 12, "batch": 9},
    {"ranks": 5, "layers": 4, "heads": 4, "batch": 4},
    {"ranks": 1, "layers": 3, "heads": 1, "batch": 1},
)


@exercise("00.tour", "Write layouts(ranks, layers, heads, batch) -> the set of (tp, pp, dp) that can train the model.")
def tour(answer: Any) -> Iterator[Outcome]:
    """Seven worlds, held against what labkit's own configuration accepts."""
    for case in _CASES:
        words = ", ".join(f"{name} {value}" for name, value in case.items())
        yield compare(words, sorted(_accepted(**case)), lambda c=case: sorted(map(tuple, answer(**c))))


def _accepted(*, ranks: int, layers: int, heads: int, batch: int) -> set[tuple[int, int, int]]:
    """Every (tp, pp, dp) that fills the world and breaks no rule of `RunConfig`."""
    found = set()
    for tp in range(1, ranks + 1):
        for pp in range(1, ranks // tp + 1):
            config = RunConfig(
                model=ModelConfig(layers=layers, heads=heads, hidden=8 * heads, ffn_hidden=24 * heads),
                parallel=ParallelConfig(tp=tp, pp=pp),
                train=TrainConfig(micro_batch_size=1, global_batch_size=batch),
            )
            if not config.problems(ranks):
                found.add((tp, pp, ranks // (tp * pp)))
    return found
