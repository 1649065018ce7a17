"""What commands that start ranks share: options, errors of the launch, and which rank prints under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from labkit.cli.arguments import Option
from labkit.cli.output import show
from labkit.config import ConfigError

DEVICE = Option(
    "device",
    "str",
    "where tensors live",
    "auto",
    choices=("auto", "cpu", "cuda"),
    synonyms={"gpu": "cuda"},
)
"""The option of every command that starts ranks."""
WEEK = 7 * 24 * 3600
TIMEOUT = Option(
    "timeout",
    "float",
    "longest wait for other ranks, in seconds, before the run is ended as hung",
    gt=0,
    le=WEEK,
    unset="default: parallel.distributed_timeout_minutes",
)
"""The option of `labkit train` and `labkit parity`."""


@contextmanager
def refusing_arguments() -> Iterator[None]:
    """In the block, turn a ValueError of the launcher into a ConfigError, because it is about the user's arguments.

    Under torchrun it may come from the ranks' code as well, so there it keeps its traceback."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        if started_by_torchrun():
            raise
        raise ConfigError([str(error)], source="the launch") from error


def started_by_torchrun() -> bool:
    """Return True if this process is one of the ranks that torchrun started."""
    from labkit.launch.info import under_torchrun

    return under_torchrun()


def first_rank() -> bool:
    """Return True if this process prints for the run; under torchrun every rank executes the command."""
    return not started_by_torchrun() or os.environ["RANK"] == "0"


def on_first_rank(line: str) -> None:
    """Print a line once, however many ranks execute the command."""
    if first_rank():
        show(line)
