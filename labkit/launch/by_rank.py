"""Texts of ranks, of which equal ones are shown once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def labelled(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each different text of the ranks once, after a label: `[rank 1]`, `[ranks 0, 2]` or `[all 4 ranks]`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    for text, ranks in ranks_of.items():
        if len(ranks) == 1:
            yield f"[rank {ranks[0]}]", text
        elif len(ranks) == len(texts):
            yield "[both ranks]" if len(texts) == 2 else f"[all {len(texts)} ranks]", text
        else:
            yield f"[ranks {', '.join(map(str, ranks))}]", text


class RankValues(list[Any]):
    """Values by rank. Their repr has a line for each rank, or one line for ranks whose values look the same."""

    def __repr__(self) -> str:
        return "\n".join(
            f"{label} {text}" if "\n" not in text else f"{label}\n{text}"
            for label, text in labelled([repr(value) for value in self])
        )
