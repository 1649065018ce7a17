"""What is checked between a sound configuration and its launch: the files that it names and the devices that it needs.

The ranks check all of it again; here it costs one process's time, and a mistake becomes one message.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from labkit.cli.arguments import Arguments, Command
from labkit.config import RunConfig

MOST_READ_TWICE = 1_000_000
"""Bytes of a text of one's own that is tokenised here as well as in the ranks; a longer one is not too short."""


def prepared(command: Command, arguments: Arguments, found: Iterable[str]) -> RunConfig:
    """The configuration, read by jsonargparse and held equal to what our own pass read.

    found: what speaks against the launch; sentences that are empty or repeated count for nothing.
    Raises ConfigError with all of it.
    """
    config = arguments.config
    arguments.refuse(list(dict.fromkeys(problem for problem in found if problem)))
    from labkit.cli.help_text import checked_config

    again = checked_config(command, arguments)
    if again != config:
        raise AssertionError(f"jsonargparse reads another configuration:\n{again.to_yaml()}\nthan\n{config.to_yaml()}")
    return again


def data_problem(config: RunConfig) -> str:
    """Why there would be nothing to train on, or an empty string."""
    from labkit.data.gpt_data import build_gpt_datasets, check_vocabulary

    data = config.data
    try:
        if data.path is not None and os.path.getsize(data.path) > MOST_READ_TWICE:
            check_vocabulary(data, config.model.vocab_size)
        else:
            build_gpt_datasets(config)
    except (ValueError, OSError) as error:
        return str(error)
    return ""
