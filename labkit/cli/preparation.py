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


def prepared(command: Command, arguments: Arguments, world_sizes: Iterable[int]) -> RunConfig:
    """The configuration, read by jsonargparse and held equal to what our own pass read.

    world_sizes: of every launch that uses `arguments.config` as it stands.
    Raises ConfigError with what is wrong with the files that it names.
    """
    config, device = arguments.config, arguments.options["device"]
    arguments.refuse(list(dict.fromkeys(p for size in world_sizes for p in input_problems(config, size, device))))
    from labkit.cli.help_text import checked_config

    again = checked_config(command, arguments)
    if again != config:
        raise AssertionError(f"jsonargparse reads another configuration:\n{again.to_yaml()}\nthan\n{config.to_yaml()}")
    return again


def input_problems(config: RunConfig, world_size: int, device: str) -> list[str]:
    """What is wrong with schedule, tokenizer, text or machine for a configuration whose rules all hold."""
    from labkit.train.schedule_fit import schedule_problem

    found = (
        device_problem(device, config.parallel.distributed_backend, world_size),
        schedule_problem(config, world_size),
        data_problem(config),
        layer_problem(config),
    )
    return [problem for problem in found if problem]


def device_problem(device: str, backend: str, world_size: int) -> str:
    """Why ranks of this machine could not have the GPUs that are asked for by name, or an empty string.

    Ranks of torchrun exist already, and those of one machine are not all: each of them says it for itself.
    """
    from labkit.launch import info, torchrun

    if (device != "cuda" and backend != "nccl") or torchrun.started_us():
        return ""
    try:
        info.choose_backend(backend, info.choose_device(device, 0, 0), world_size)
    except ValueError as error:
        return str(error)
    return ""


def layer_problem(config: RunConfig) -> str:
    """Why the chosen layers cannot run here, or an empty string."""
    if config.model.transformer_impl == "local":
        return ""
    from labkit.launch.transformer_engine import why_no_transformer_engine

    missing = why_no_transformer_engine()
    return f"model.transformer_impl = 'transformer_engine': {missing}; or set it to local" if missing else ""


def data_problem(config: RunConfig) -> str:
    """Why there would be nothing to train on, or an empty string."""
    from labkit.data.gpt_data import build_gpt_datasets, check_vocabulary
    from labkit.data.tokenizer import load_tokenizer

    data = config.data
    try:
        if data.path is not None and os.path.getsize(data.path) > MOST_READ_TWICE:
            check_vocabulary(load_tokenizer(data.tokenizer), data, config.model.vocab_size)
        else:
            build_gpt_datasets(config)
    except (ValueError, OSError) as error:
        return str(error)
    return ""
