"""A pipeline schedule as data: the actions of each rank, in order.

Notable:
- An `Action` is one piece of work and prints as `2F0`: stage 2, forward, microbatch 0. The text parses back.
- A `Schedule` holds one row of actions for each rank, as three numpy columns over all ranks. Millions of actions cost
  megabytes; `Action` objects appear only on access. A schedule lists no messages: they follow from the rows
  (`lowering.py`).
- Two actions of a rank may be *merged*: a forward, and the full backward after it, whose layers alternate
  (`merging.py`). They are one cell, `2F5&2B3`: both start when both can, and end together.
- A rank has any number of stages. Looped placement puts stage s on rank s mod pp. A V goes down the ranks and up again.
- A schedule may be wrong, and still be built, printed and drawn. `simulate` rejects it.

Legend: A = actions of the whole schedule, P = ranks, S = stages, M = microbatches.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from labkit.config.errors import counted, no_file

T = TypeVar("T")

KINDS = "FBIW"
"""Forward; full backward; gradient of the input alone; gradient of the weights alone."""

EVENT_KINDS = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
"""The `kind` of the `Event` that an action leaves."""

ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
"""Spelling of an action; its numbers fit 32 bits."""


RANK_LINE = re.compile(r"rank +([0-9]{1,9}) *[:|]")
"""Beginning of a rank's line."""

_SEPARATORS = ";\t \"'"
"""Characters in the cells of a table that was not saved with commas."""


class ScheduleError(ValueError):
    """A schedule that cannot be read or cannot run. The message draws the grid where there is one."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One microbatch through one stage in one direction; `str` gives `2F0`."""

    stage: int
    """Stage, 0 first, over all ranks."""
    kind: str
    """One letter of KINDS."""
    microbatch: int
    """Microbatch, 0 first."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` writes. Raises ScheduleError on anything else."""
        match = ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text[:40]!r} is not an action: write stage, one of F B I W, microbatch, "
                "as in 2F0 (stage 2, forward, microbatch 0)"
            )
        return cls(int(match[1]), match[2], int(match[3]))


class Schedule:
    """One row of actions per rank.

    `rows` holds, for each rank, Actions or the text of cells; `from_columns` takes numpy columns instead. `num_stages`
    and `num_microbatches` are the stages and microbatches that the schedule should cover. Raises ScheduleError for a
    rank without actions, for a stage or microbatch outside these numbers, and for merged actions that are not a forward
    and a full backward, with rank and position.
    """

    def __init__(
        self, name: str, num_stages: int, num_microbatches: int, rows: Sequence[Iterable[Action | str]]
    ) -> None:
        cells = [[_cell(cell) if isinstance(cell, str) else (cell,) for cell in row] for row in rows]
        parsed = [[action for cell in row for action in cell] for row in cells]
        flat = [action for row in parsed for action in row]
        self._set(
            name,
            num_stages,
            num_microbatches,
            np.array([action.stage for action in flat], dtype=np.int32),
            np.array([KINDS.index(action.kind) for action in flat], dtype=np.int8),
            np.array([action.microbatch for action in flat], dtype=np.int32),
            np.cumsum([0, *map(len, parsed)], dtype=np.intp),
            np.array([second for row in cells for cell in row for second in range(len(cell))], dtype=bool),
        )

    @classmethod
    def from_columns(
        cls,
        name: str,
        num_stages: int,
        num_microbatches: int,
        *,
        stages: np.ndarray,
        kinds: np.ndarray,
        microbatches: np.ndarray,
        offsets: np.ndarray,
        merged: np.ndarray | None = None,
    ) -> Schedule:
        """Make a schedule of columns of length A. Rank r owns `offsets[r]:offsets[r + 1]`; `kinds` indexes KINDS.

        merged: True for a backward that is merged with the forward before it; None merges nothing.
        """
        schedule = cls.__new__(cls)
        schedule._set(
            name,
            num_stages,
            num_microbatches,
            np.asarray(stages, dtype=np.int32),
            np.asarray(kinds, dtype=np.int8),
            np.asarray(microbatches, dtype=np.int32),
            np.asarray(offsets, dtype=np.intp),
            np.zeros(len(stages), dtype=bool) if merged is None else np.asarray(merged, dtype=bool),
        )
        return schedule

    def _set(self, name: str, num_stages: int, num_microbatches: int, stages: np.ndarray, kinds: np.ndarray,
             microbatches: np.ndarray, offsets: np.ndarray, merged: np.ndarray) -> None:  # fmt: skip
        self.name = name
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.stages, self.kinds, self.microbatches, self.offsets, self.merged = map(
            _read_only, (stages, kinds, microbatches, offsets, merged)
        )
        self.has_pairs = bool(merged.any())
        """True where some actions are merged."""
        if num_stages < 1 or num_microbatches < 1 or len(offsets) < 2:
            raise ScheduleError(
                f"a schedule needs at least one rank, stage and microbatch; given {len(offsets) - 1} ranks, "
                f"{num_stages} stages, {num_microbatches} microbatches"
            )
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty):
            raise ScheduleError(f"rank {empty[0]} has no action: give every rank at least one stage to run")
        inside = [column.min() >= 0 and column.max() < size for column, size in self._sized_columns()]
        if not all(inside):
            wrong = [(column < 0) | (column >= size) for column, size in self._sized_columns()]
            index = int(np.flatnonzero(wrong[0] | wrong[1])[0])
            rank, position = self.locate(index)
            raise ScheduleError(
                f"rank {rank}, position {position}: {self.action(index)} is outside {num_stages} stages and "
                f"{num_microbatches} microbatches (both count from 0)"
            )
        if self.has_pairs:
            self._require_pairs()
        self.ranks = _read_only(np.repeat(np.arange(self.pp, dtype=np.int32), np.diff(offsets)))
        self.placement_of_stages = _read_only(_majority_rank(stages, offsets, num_stages))
        """Rank of each stage (S,)."""
        self._derived: dict[str, Any] = {}

    def _require_pairs(self) -> None:
        """Check that each merged action is a full backward with a forward before it in its row."""
        backwards = np.flatnonzero(self.merged)
        begins = np.isin(backwards, self.offsets)
        wrong = begins | (self.kinds[backwards] != KINDS.index("B")) | (self.kinds[backwards - 1] != KINDS.index("F"))
        if wrong.any():
            index = int(backwards[wrong][0])
            rank, position = self.locate(index)
            before = "nothing" if position == 0 else self.action(index - 1)
            raise ScheduleError(
                f"rank {rank}, position {position}: {self.action(index)} is merged with {before}; merged are a forward "
                "and a full backward, in this order, as in 2F5&2B3"
            )

    def _sized_columns(self) -> tuple[tuple[np.ndarray, int], tuple[np.ndarray, int]]:
        return (self.stages, self.num_stages), (self.microbatches, self.num_microbatches)

    @property
    def pp(self) -> int:
        """Number of ranks."""
        return len(self.offsets) - 1

    def check_pp(self, pp: int) -> None:
        """Raise ValueError unless the schedule is for a pipeline of `pp` ranks."""
        if self.pp != pp:
            ranks = counted(self.pp, "pipeline rank")
            raise ValueError(f"{self.name} is for {ranks}, but parallel.pp is {pp}: set pp to {self.pp}")

    @property
    def forward_only(self) -> bool:
        """True where no action is a backward."""
        return not bool(self.kinds.any())

    def __len__(self) -> int:
        return len(self.stages)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        columns = ("offsets", "stages", "kinds", "microbatches", "merged")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in columns)

    __hash__ = None  # type: ignore[assignment]  # equal by content, which is too long to hash

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, {self.pp} ranks, {self.num_stages} stages, {self.num_microbatches} microbatches, "
            f"{len(self)} actions)"
        )

    def __str__(self) -> str:
        return self.to_text()

    def actions(self, rank: int) -> list[Action]:
        """Return the row of `rank`, in the order it runs."""
        self._require_rank(rank)
        return list(self._iterate(rank))

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self.pp:
            raise ValueError(f"rank {rank} is not in this schedule: it has ranks 0 to {self.pp - 1}")

    def action(self, index: int) -> Action:
        """Return the action at `index` of the columns."""
        return Action(int(self.stages[index]), KINDS[self.kinds[index]], int(self.microbatches[index]))

    def span(self, rank: int) -> slice:
        """Return where the row of `rank` is in the columns."""
        return slice(self.offsets[rank], self.offsets[rank + 1])

    def _iterate(self, rank: int) -> Iterator[Action]:
        part = self.span(rank)
        columns = (self.stages[part].tolist(), self.kinds[part].tolist(), self.microbatches[part].tolist())
        return (Action(stage, KINDS[kind], microbatch) for stage, kind, microbatch in zip(*columns, strict=True))

    def cells(self, rank: int) -> list[tuple[Action, ...]]:
        """Return the row of `rank` by cells: two merged actions together, every other action alone."""
        cells: list[tuple[Action, ...]] = []
        merged = self.merged[self.span(rank)].tolist()
        for action, joins in zip(self._iterate(rank), merged, strict=True):
            cells[-1:] = [(*cells[-1], action)] if joins else [*cells[-1:], (action,)]
        return cells

    def texts(self, rank: int) -> Iterator[str]:
        """Return the cells of the row as text."""
        return map(_cell_text, self.cells(rank)) if self.has_pairs else map(str, self._iterate(rank))

    def derived(self, what: str, compute: Callable[[Schedule], T]) -> T:
        """Return `compute(self)`, kept under the name `what`. The columns never change, so the value stays true."""
        if what not in self._derived:
            self._derived[what] = compute(self)
        return self._derived[what]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_derived": {}}  # a schedule travels to ranks without what they can compute

    def locate(self, index: int) -> tuple[int, int]:
        """Return (rank, position in its row) of the action at `index` of the columns."""
        rank = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return rank, index - int(self.offsets[rank])

    def placement(self, stage: int) -> int:
        """Return the rank that runs `stage`. If a broken schedule has it on several, the rank with most of its
        actions."""
        return int(self.placement_of_stages[stage])

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages on `rank` in ascending order; a stage's position here is its model chunk."""
        return np.flatnonzero(self.placement_of_stages == rank).tolist()

    def chunk(self, stage: int) -> int:
        """Return the model chunk of `stage` on its rank."""
        return self.stages_of(self.placement(stage)).index(stage)

    def order(self, rank: int) -> list[int | float]:
        """Return the row as signed chunk numbers, as Transformer Engine's `_order`: c + 1 forward, -(c + 1) backward.

        The weight gradient of a split backward is its input gradient's number minus one half.
        """
        self._require_rank(rank)
        part = self.span(rank)
        weights = self.kinds[part] == KINDS.index("W")
        numbers = zip(self.signed_chunks[part].tolist(), weights.tolist(), strict=True)
        return [number - 0.5 if weight else number for number, weight in numbers]

    @property
    def checksum(self) -> int:
        """CRC of the rows, to compare the schedules of two ranks."""
        columns = (self.stages, self.kinds, self.microbatches, self.offsets, *([self.merged] if self.has_pairs else []))
        return zlib.crc32(b"".join(column.tobytes() for column in columns))

    @property
    def signed_chunks(self) -> np.ndarray:
        """The orders of all ranks as one column (A,): c + 1 forward, -(c + 1) for B, I and W."""
        return self.derived("signed_chunks", _signed_chunks)

    def to_text(self) -> str:
        """Return the name, then one line per rank: `rank 0: 0F0 0F1 0B0 0B1`."""
        return "\n".join([self.name, *(f"rank {r}: " + " ".join(self.texts(r)) for r in range(self.pp))])

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read `to_text`'s form; the line with the name may be left out, ranks may be aligned with blanks.

        The cells give the numbers of stages and microbatches. Raises ScheduleError for a cell that is not an action,
        with rank, position and text, and for a line that is not the next rank's.
        """
        lines = [line.strip() for line in _lines(text.strip())]
        name = "text" if not lines or RANK_LINE.match(lines[0]) else lines.pop(0)
        rows = []
        for rank, line in enumerate(lines):
            match = RANK_LINE.match(line)
            if match is None or int(match[1]) != rank:
                raise ScheduleError(
                    f"{line[:40]!r} is where the line of rank {rank} must be: write rank {rank}: 0F0 0F1 ..."
                )
            cells = enumerate(line[match.end() :].split())
            rows.append([_parse_cell(cell, f"rank {rank}, position {position}") for position, cell in cells])
        return cls(name, *_counted(rows), rows)

    def to_csv(self) -> str:
        """Return one row per rank, cells are actions: no header, no rank column, no blank cells."""
        return "".join(",".join(self.texts(rank)) + "\n" for rank in range(self.pp))

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read `to_csv`'s form. The cells give the numbers of stages and microbatches.

        Raises ScheduleError with rank, position (counted from 0, as in every error) and text of the first cell that is
        no action.
        """
        lines = _lines(text.strip("\r\n"))
        if not any(line.strip() for line in lines):
            raise ScheduleError("the text has no rows: write one line per rank, such as 0F0,0F1,0B0,0B1")
        rows = []
        for rank, line in enumerate(lines):
            if not line.strip():
                raise ScheduleError(f"rank {rank} has an empty line: every rank needs its line of actions")
            places = ((f"rank {rank}, position {position}", cell) for position, cell in enumerate(line.split(",")))
            rows.append([_parse_cell(cell, where, _SEPARATORS) for where, cell in places])
        return cls(name, *_counted(rows), rows)


def read_schedule(path: str | Path) -> Schedule:
    """Return the schedule in the UTF-8 file at `path`, with or without a byte order mark and with any line ends.

    A file in which no line begins with `rank R:` is CSV. Its schedule has the name of the file, without the suffix.

    Raises:
        ValueError: a file that cannot be read, in one sentence without its name.
        ScheduleError: the file holds no schedule (`Schedule.from_csv`, `Schedule.from_text`).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(no_file(path)) from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text: save it as CSV UTF-8") from None
    is_text = any(RANK_LINE.match(line.strip()) for line in _lines(text))
    return Schedule.from_text(text) if is_text else Schedule.from_csv(text, name=path.stem)


def _lines(text: str) -> list[str]:
    """Return the lines of a file; `splitlines` would also end one at U+2028 or a form feed, inside a name."""
    return re.split(r"\r\n?|\n", text)


def _signed_chunks(schedule: Schedule) -> np.ndarray:
    chunks = np.empty(schedule.num_stages, dtype=np.int32)
    for rank in range(schedule.pp):
        stages = schedule.stages_of(rank)
        chunks[stages] = np.arange(1, len(stages) + 1)
    sign = 1 - 2 * (schedule.kinds != KINDS.index("F")).astype(np.int8)
    return _read_only(chunks.take(schedule.stages) * sign)


def _cell(text: str) -> tuple[Action, ...]:
    """Return the action in a cell, or the two merged ones."""
    parts = text.split("&")
    if len(parts) > 2:
        raise ScheduleError(f"{text[:40]!r} merges {len(parts)} actions: merge two, as in 2F5&2B3")
    return tuple(map(Action.parse, parts))


def _cell_text(cell: Iterable[Action]) -> str:
    return "&".join(map(str, cell))


def _parse_cell(cell: str, where: str, separators: str = "") -> str:
    """Return the text of `cell`, which can be read. The error for a cell that holds one of `separators` says that
    commas separate actions."""
    if not cell.strip():
        raise ScheduleError(f"{where} is blank: remove the cell, idle time is not written down")
    try:
        return _cell_text(_cell(cell))
    except ScheduleError as error:
        hint = "; separate actions by commas, without quotes" if set(separators) & set(cell.strip()) else ""
        raise ScheduleError(f"{where}: {error}{hint}") from None


def _counted(rows: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Return the numbers of stages and microbatches, from the highest of each. Rejects a number that must be a typing
    mistake."""
    flat = [action for row in rows for cell in row for action in _cell(cell)]
    stages, microbatches = (1 + max((getattr(a, of) for a in flat), default=-1) for of in ("stage", "microbatch"))
    if stages * microbatches > 1000 * len(flat):
        most = max(flat, key=lambda action: max(action.stage, action.microbatch))
        raise ScheduleError(
            f"{most} makes {stages} stages x {microbatches} microbatches of {len(flat)} actions: is it mistyped?"
        )
    return stages, microbatches


def _majority_rank(stages: np.ndarray, offsets: np.ndarray, num_stages: int) -> np.ndarray:
    """Return the rank of each stage (S,): the rank with most of its actions, and of several such ranks the last.

    A stage that no rank runs goes to rank stage mod pp. The function counts rank by rank and needs no table of stages
    and ranks.
    """
    most = np.ones(num_stages, dtype=np.int64)
    rank_of = np.arange(num_stages, dtype=np.int32) % np.int32(len(offsets) - 1)
    for rank, (start, stop) in enumerate(pairwise(offsets.tolist())):
        row = stages[start:stop]
        low = row.min()
        counts = np.bincount(row - low)
        here = slice(low, low + len(counts))
        rank_of[here][counts >= most[here]] = rank
        np.maximum(most[here], counts, out=most[here])
    return rank_of


def _read_only(column: np.ndarray) -> np.ndarray:
    """Return a read-only view of the same memory, so that `derived` values stay true."""
    column = column.view()
    column.flags.writeable = False
    return column


def grid(schedule: Schedule, marks: dict[tuple[int, int], str] | None = None, *, limit: int = 24) -> str:
    """Return the rows as text, one line per rank.

    `marks` puts brackets round the cell with the action at (rank, position) and its sentence under the grid. Each row
    shows `limit` cells round the first marked cell, and `..` in place of the others.
    """
    marks = marks or {}
    rows = [_marked_cells(schedule, rank, marks) for rank in range(schedule.pp)]
    first = min((i for row in rows for i, cell in enumerate(row) if cell.startswith("[")), default=0)
    start = max(0, first - limit // 2)
    lines = []
    for row in rows:
        shown = row[start : start + limit]
        lines.append([*([".."] if start else []), *shown, *([".."] if len(row) > start + limit else [])])
    width = max(len(cell) for line in lines for cell in line)
    label = len(f"rank {schedule.pp - 1}")
    picture = [f"{f'rank {r}':<{label}} |" + "".join(f"{c:^{width}}" for c in line) for r, line in enumerate(lines)]
    notes = [f"rank {rank}, position {position}: {sentence}" for (rank, position), sentence in sorted(marks.items())]
    return "\n".join(line.rstrip() for line in [*picture, *notes])


def _marked_cells(schedule: Schedule, rank: int, marks: dict[tuple[int, int], str]) -> list[str]:
    """Return the cells of a row, those with a marked action in brackets."""
    texts, position = [], 0
    for cell in schedule.cells(rank):
        text, marked = _cell_text(cell), any((rank, position + i) in marks for i in range(len(cell)))
        texts.append(f"[{text}]" if marked else f" {text} ")
        position += len(cell)
    return texts
