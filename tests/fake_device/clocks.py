"""What each stream and the host have seen done: vector clocks, and the races between accesses that they leave.

A stream does its operations in order. Two streams have no order but by events: what stream a did before it recorded an
event comes before what b does after it waits for that event. The host is one more place: a stream starts an operation
after all that the host did before it launched the operation, and the host knows what a stream did once it has waited.

Two accesses to the same bytes race if they are of two places, one of them writes, and no such chain orders them. Which
comes first in a real run is then chance (Lamport 1978; Mattern 1989).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

HOST = -1
"""The place of the host; streams are numbered from 0."""

Clock = dict[int, int]
"""For each place the number of its operations that are known to be done."""


class Clocks:
    """The clock of every place."""

    def __init__(self) -> None:
        self._met: Clock = {}
        self._of: defaultdict[int, Clock] = defaultdict(lambda: dict(self._met))
        self.events: dict[int, Clock] = {}
        """Of autograd's events, by their number."""

    def everything(self) -> Clock:
        """All that any place has begun."""
        return {place: clock[place] for place, clock in self._of.items() if place in clock}

    def meet(self) -> None:
        """Every place waits for all that was begun anywhere; so do those that come later."""
        self._met = self.everything()
        for place in list(self._of):
            self.join(place, self._met)

    def tick(self, place: int) -> int:
        """Begin an operation; returns its number. A stream learns what the host knows, which has launched it."""
        if place != HOST:
            self.join(place, self._of[HOST])
        clock = self._of[place]
        clock[place] = clock.get(place, 0) + 1
        return clock[place]

    def now(self, place: int) -> Clock:
        """What an event notes that is recorded there now."""
        return dict(self._of[place])

    def join(self, place: int, clock: Clock) -> None:
        """The place waits for what `clock` noted."""
        own = self._of[place]
        for other, time in clock.items():
            if time > own.get(other, 0):
                own[other] = time

    def knows(self, place: int, other: int, time: int) -> bool:
        """Whether operation `time` of `other` comes before what the place does next."""
        return self._of[place].get(other, 0) >= time

    def record(self, event: int, stream: int) -> None:
        """Autograd records an event."""
        self.events[event] = self.now(stream)

    def block(self, event: int, stream: int) -> None:
        """Autograd has a stream wait for an event."""
        self.join(stream, self.events[event])


@dataclass(frozen=True, slots=True)
class Access:
    """One operation's use of a range of bytes of a storage."""

    low: int
    high: int
    writes: bool
    place: int
    time: int
    what: str
    """The operation and where it was called."""

    def __str__(self) -> str:
        place = "the host" if self.place == HOST else f"stream {self.place}"
        return f"{'write' if self.writes else 'read'} by {self.what} on {place}"


class Accesses:
    """All accesses that a later one could race with, by storage."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._of: defaultdict[int, list[Access]] = defaultdict(list)
        self._freed: defaultdict[int, list[Access]] = defaultdict(list)
        """Accesses by other streams to memory that has been freed since; the key is the stream that allocated it."""
        self.recorded: list[tuple[int, Access]] | None = None
        """Storages and accesses of the capture that is under way."""
        self.races: dict[tuple[str, str], str] = {}
        """By the two operations, each pair once."""

    def add(self, storage: int, new: Access) -> None:
        """Note an access and the races in which it is."""
        if self.recorded is not None:
            self.recorded.append((storage, new))
        earlier = self._of[storage]
        for old in earlier:
            if (
                old.place != new.place
                and (old.writes or new.writes)
                and old.low < new.high
                and new.low < old.high
                and not self._clocks.knows(new.place, old.place, old.time)
            ):
                self.races.setdefault((old.what, new.what), f"{old}; {new}")
        # An older access of the same place that the new one covers can go: what races with it races with the new one.
        earlier[:] = [
            old
            for old in earlier
            if not (old.place == new.place and old.writes <= new.writes and new.low <= old.low and old.high <= new.high)
        ]
        earlier.append(new)

    def end(self, storage: int, home: int, spared: set[int]) -> None:
        """A storage is freed whose memory was allocated on stream `home`. Before `home` gets that memory again, the
        allocator waits only for the streams in `spared` (`record_stream`)."""
        ended = (old for old in self._of.pop(storage, ()) if old.place not in (home, HOST) and old.place not in spared)
        self._freed[home] += ended

    def allocated(self, home: int) -> None:
        """Stream `home` gets memory: perhaps what was freed last, which others may still use."""
        for old in self._freed.pop(home, ()):
            if not any(self._clocks.knows(place, old.place, old.time) for place in (home, HOST)):
                what = f"{old}; freed, and taken again by stream {home}, which did not wait for it"
                self.races.setdefault((old.what, "freed"), what)


def united(recorded: list[tuple[int, Access]]) -> list[tuple[int, Access]]:
    """The accesses of a capture as a replay does them, in no order: ranges of bytes that overlap or meet become one,
    reads and writes apart."""
    found: list[tuple[int, Access]] = []
    for storage, access in sorted(recorded, key=lambda each: (each[0], each[1].writes, each[1].low)):
        if found:
            last_storage, last = found[-1]
            if (last_storage, last.writes) == (storage, access.writes) and access.low <= last.high:
                found[-1] = storage, replace(last, high=max(last.high, access.high))
                continue
        found.append((storage, access))
    return found
