"""Token ids of a captured iteration: compared with the vocabulary around each replay, since nothing inside can be.

An embedding cut over ranks looks up zeros for an id that nobody has, and training goes on with a plausible loss. An
eager model looks first. A graph cannot stop, so what the model would have looked at is noted at capture:

| the ids are ..                        | and are looked at     |
|---------------------------------------|-----------------------|
| a slot of the data, or a part of one  | ahead of every replay |
| computed inside, as by `roll`         | after it              |

Either way no weight has changed. The error is that of `check_token_ids`, to the letter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.parallel.vocab import check_token_ids


class _Ids(NamedTuple):
    """Where ids lie, and the other arguments of `check_token_ids`."""

    memory: Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    vocab_size: int
    what: str

    @property
    def values(self) -> Tensor:
        """What lies there now."""
        return self.memory.as_strided(self.shape, self.stride, self.offset)


class IdChecks:
    """What one captured iteration has to look at, in the order in which it uses it."""

    def __init__(self, slots: Iterable[Iterable[Any]] = ()) -> None:
        """slots: values of the static batches; tensors among them keep their addresses."""
        self._slots = [x for values in slots for x in values if isinstance(x, Tensor)]
        self._given: dict[tuple[Any, ...], _Ids] = {}
        self._computed: dict[tuple[Any, ...], _Ids] = {}

    def note(self, ids: Tensor, vocab_size: int, what: str) -> None:
        """At capture: `ids` are about to be used. One look at the same values is enough."""
        slot = next((slot for slot in self._slots if _lies_in(ids, slot)), None)
        found, memory, offset = self._computed, ids.detach(), int(ids.storage_offset())  # held: the memory stays theirs
        if slot is not None:
            found, memory = self._given, slot
            offset = int(slot.storage_offset()) + (ids.data_ptr() - slot.data_ptr()) // slot.element_size()
        key = ids.data_ptr(), ids.numel(), vocab_size, what
        found.setdefault(key, _Ids(memory, tuple(ids.shape), ids.stride(), offset, vocab_size, what))

    def before_replay(self) -> None:
        """Raises TokenIdError for the first id of the new data that is outside its vocabulary."""
        _check(self._given.values())

    def after_replay(self) -> None:
        """The same for ids that the replay computed."""
        _check(self._computed.values())


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    start = part.data_ptr() - whole.data_ptr()
    return part.dtype == whole.dtype and 0 <= start < whole.untyped_storage().nbytes()


def _check(found: Collection[_Ids]) -> None:
    """On a GPU one synchronisation for all."""
    if not found:
        return
    ranges = torch.stack([torch.stack(torch.aminmax(ids.values)).to(torch.int64) for ids in found])
    for ids, (lowest, highest) in zip(found, ranges.tolist(), strict=True):
        if lowest < 0 or highest >= ids.vocab_size:
            check_token_ids(ids.values, ids.vocab_size, ids.what)
