"""A schedule in a file: the rows of a CSV, or the text that a Schedule prints."""

from __future__ import annotations

from pathlib import Path

from labkit.schedules.ir import RANK_LINE, Schedule


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in the UTF-8 file at `path`, with or without a byte order mark and with any line ends.

    Where no line begins with `rank R:` it is CSV, and the schedule bears the name of the file without its suffix.

    Raises:
        ValueError: a file that cannot be read, in one sentence without its name.
        ScheduleError: what is in the file is no schedule (`Schedule.from_csv`, `Schedule.from_text`).
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except IsADirectoryError:
        raise ValueError("is a directory; give a file") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text: save it as CSV UTF-8") from None
    is_text = any(RANK_LINE.match(line.strip()) for line in text.splitlines())
    return Schedule.from_text(text) if is_text else Schedule.from_csv(text, name=path.stem)
