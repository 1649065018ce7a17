"""Token ids outside the vocabulary: rejected where a model reads them, or on a GPU when the step ends.

An embedding cut over ranks looks up zeros for an id that nobody has, and training goes on with a plausible loss. So a
model compares its ids with the vocabulary. On the host that takes one pass and is done at once. On a GPU the host would
wait for the device, twice per microbatch, and the device would idle meanwhile. Inside a CUDA graph nobody can look.

So there the device looks: it notes the first bad id and its position, and goes on with ids clamped to the vocabulary,
so that no lookup leaves its table. The host reads the notes where it waits anyway:

    with token_ids_checked_late(device) as ids:
        ...                    # forward and backward of all microbatches: no wait for ids
    ids.look()                 # raises the TokenIdError of an immediate check, word for word; before weights change

`train_step` and `evaluate` do so. Whoever calls a model outside such a block gets the error at once, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from labkit.comm.capturing import is_graph_capturing
from labkit.comm.collectives import gather_objects
from labkit.comm.groups import Group
from labkit.events import EventRecorder, watchers

LATE_DEVICES = {"cuda"}
"""Types of devices for which `token_ids_checked_late` postpones the look; elsewhere looking costs no wait."""


class TokenIdError(ValueError):
    """A token id outside the vocabulary. Without a check it would be looked up as zeros wherever tp > 1."""


@dataclass(frozen=True)
class _Note:
    """The first bad id among ids that were used, if any. The numbers are on the ids' device, and a replay of the graph
    that made them writes them again."""

    numbers: tuple[Tensor, Tensor, Tensor]
    """A flag that an id is bad, the position of the first bad one in the flattened ids, and the id that is there."""
    shape: tuple[int, ...]
    vocab_size: int
    what: str

    def error(self, position: int, token_id: int) -> TokenIdError:
        place = tuple(int(i) for i in np.unravel_index(position, self.shape))
        return TokenIdError(
            f"{self.what} id {token_id} at position {place} of {self.shape} is outside the vocabulary "
            f"0..{self.vocab_size - 1}; check that the tokenizer and the model have the same vocabulary"
        )


class TokenIdChecks:
    """Ids that the device has compared with the vocabulary, and whose result the host has yet to read."""

    def __init__(self, *, late: bool = True, captured: bool = False) -> None:
        """late: whether ids are noted at all; if they are not, bad ones raise where they are used.

        captured: for the ids that a CUDA graph uses, noted while it is captured; `replayed` follows each replay.
        """
        self.late, self.captured = late, captured
        self._notes: list[_Note] = []

    def note(self, ids: Tensor, vocab_size: int, what: str) -> Tensor:
        """Let the device look at `ids`; return them clamped to the vocabulary. Takes four small kernels and no wait."""
        safe = ids.clamp(0, vocab_size - 1)
        bad, position = (safe != ids).reshape(-1).max(dim=0)  # the first of several
        self._notes.append(_Note((bad, position, ids.take(position)), tuple(ids.shape), vocab_size, what))
        return safe

    def alarm(self) -> list[Tensor]:
        """Return one float64 number on the device, NaN if an id is bad and else 0, for an exchange of numbers that must
        be finite; [] if nothing was noted."""
        if not self._notes:
            return []
        bad = torch.stack([note.numbers[0] for note in self._notes]).any()
        return [torch.zeros((), dtype=torch.float64, device=bad.device).masked_fill(bad, float("nan"))]

    def error(self) -> TokenIdError | None:
        """Return the error of the first bad id that this rank used, or None. The host waits once for all notes."""
        if not self._notes:
            return None
        for note, (bad, position, token_id) in zip(self._notes, self._numbers().tolist(), strict=True):
            if bad:
                return note.error(position, token_id)
        return None

    def look(self) -> None:
        """Raise TokenIdError for the first bad id that this rank used, and forget what was noted."""
        error = self.error()
        self._notes.clear()
        if error is not None:
            raise error

    def look_together(self, group: Group) -> None:
        """Call `look` on all ranks of `group`. All call this and raise the error of the first rank that has one."""
        found = gather_objects(self.error(), group)
        self._notes.clear()
        for error in found:
            if error is not None:
                raise error

    def replayed(self) -> None:
        """After a replay of the graph that writes these notes, hand a copy to the enclosing block, or look at once."""
        outer = _Active.checks
        if outer is None or outer.captured:
            if (error := self.error()) is not None:
                raise error
        elif self._notes:
            rows = self._numbers().unbind()
            outer._notes += [replace(note, numbers=row.unbind()) for note, row in zip(self._notes, rows, strict=True)]

    def _numbers(self) -> Tensor:
        """Return the numbers of all notes, [notes, 3] in int64, in memory of their own."""
        columns = zip(*(note.numbers for note in self._notes), strict=True)
        return torch.stack([torch.stack(column).to(torch.int64) for column in columns], dim=1)


class _Active:
    """The checks of this process, not of a thread, because on CUDA a recomputed forward runs on autograd's thread."""

    checks: TokenIdChecks | None = None


@contextmanager
def token_ids_checked_late(device: torch.device | str, *, captured: bool = False) -> Iterator[TokenIdChecks]:
    """Inside the block a GPU notes bad ids and the host does not wait for them; `look` at the result after it.

    On a device outside `LATE_DEVICES` nothing changes: bad ids raise inside the block, and the result is empty.

    captured: the block is the capture of a CUDA graph, in which ids are noted on any device.
    """
    checks = TokenIdChecks(late=captured or torch.device(device).type in LATE_DEVICES, captured=captured)
    outer = _Active.checks
    if checks.late:
        _Active.checks = checks
    try:
        yield checks
    finally:
        _Active.checks = outer


def check_token_ids(ids: Tensor, vocab_size: int, what: str = "token") -> Tensor:
    """Reject ids outside 0..vocab_size-1, with the same error at every tp and on every rank of a group.

    Inside `token_ids_checked_late` the error comes later. While a CUDA graph is captured whose ids nobody asks for,
    such as a graph of single layers, they go unchecked.

    Returns:
        Ids that may be looked up: the given ones, or where the error comes later, these clamped to the vocabulary.

    Raises:
        TokenIdError: names the first such id, its position and the range.
    """
    if ids.numel() == 0:
        return ids
    # On a CPU a capture is a watcher, but most trainings are watched by a recorder alone; on a GPU anybody may capture.
    may_capture = ids.is_cuda or any(not isinstance(watcher, EventRecorder) for watcher in watchers)
    capturing, checks = may_capture and is_graph_capturing(), _Active.checks
    if checks is not None and checks.captured == capturing:
        return checks.note(ids, vocab_size, what)
    if not capturing:
        lowest, highest = torch.stack(torch.aminmax(ids)).tolist()
        if lowest < 0 or highest >= vocab_size:
            found = TokenIdChecks()
            found.note(ids, vocab_size, what)
            found.look()
    return ids
