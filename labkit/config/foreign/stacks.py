"""Recognise another stack's configuration and convert it: `convert([path])` returns our YAML and what is not in it.

To add a stack, write a module with a `Stack`, and one row here.
"""

from __future__ import annotations

import json
import os
import pkgutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from labkit.config import yaml_text
from labkit.config.choices import FAMILIES
from labkit.config.errors import ConfigError, shown
from labkit.config.foreign.conversion import YOURS, Conversion, Stack, as_yaml
from labkit.config.sections import DataConfig, ModelConfig

STACKS = {
    "huggingface": "labkit.models.hugging_face_run:STACK",
    "deepspeed": "labkit.config.foreign.deepspeed:STACK",
    "nanotron": "labkit.config.foreign.nanotron:STACK",
    "torchtitan": "labkit.config.foreign.torchtitan:STACK",
    "megatron": "labkit.config.foreign.megatron:STACK",
}
"""Word of `--from` -> the stack, in the order in which they are tried on a file; `config` imports nothing above it."""
_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": yaml_text.plain,
    ".yml": yaml_text.plain,
}
"""Ending of a file -> the function that reads its text; any other file is a script or a list of flags."""


class Converted(NamedTuple):
    """A configuration in our form."""

    text: str
    """YAML for `labkit train --config`."""
    report: str
    """The keys that are not in it, by reason; empty if there is none."""


def convert(paths: Sequence[str | os.PathLike[str]], stack: str | None = None) -> Converted:
    """Convert a configuration that is in one file, or in several, of which a later one overrides those before it.

    stack: a word of `STACKS`; None recognises it. Raises ConfigError for a file that cannot be read or recognised, and
    with every value that labkit rejects.
    """
    found = Conversion({})
    names = [os.fspath(path) for path in paths]
    for name in names:
        found.join(_read(name, stack))
    for section, words in (("model", "a model: add --preset NAME"), ("train", "a training: that is labkit's default")):
        if not any(name.startswith(f"{section}.") for name in found.values):
            found.head.append(f"No file describes {words}, or convert several files at once.")
    found.head.append("Fields that have labkit's default are left out.")
    config = found.config(", ".join(names))
    size, bundled = config.model.vocab_size, ModelConfig().vocab_size
    smallest = bundled if FAMILIES[config.model.family].reads_windows else bundled + 128  # their own tokens
    if config.data == DataConfig(split=config.data.split) and size > 2 * bundled:
        advice = f"or an indexed dataset in data.path, or try the run with --vocab-size {smallest}"
        why = f"the bundled text has {bundled} tokens; name the file of a tokenizer with {size}, {advice}"
        found.note(YOURS, "data.tokenizer", why)
    return Converted(as_yaml(config, found), found.report())


def keys_of(path: str | os.PathLike[str], stack: str) -> Mapping[str, Any]:
    """Return the keys of a file of a stack that `convert` reads, as the stack names them, with their values."""
    return _stack(stack).keys(_contents(os.fspath(path)))


def _read(path: str, stack: str | None) -> Conversion:
    """Return the values and notes of one file."""
    contents = _contents(path)
    chosen = _recognised(contents, path) if stack is None else _stack(stack)
    if not chosen.recognises(contents):
        raise ConfigError([f"has no key of {chosen.name}; leave --from out, or name another stack"], source=path)
    try:
        found = Conversion(chosen.keys(contents))
    except (ValueError, RecursionError) as error:  # such as quotes of a script that do not match
        raise ConfigError([f"cannot be read: {error}"], source=path) from None
    found.head.append(f"Converted from {shown(os.path.basename(path), 200)[1:-1]}, a configuration of {chosen.name}.")
    chosen.derive(found)
    found.read(chosen.table)
    return found


def _contents(path: str) -> Any:
    """Return the values in a file by its ending, or the text of a script."""
    text = yaml_text.text_of(path, "configuration")
    parser = _PARSERS.get(os.path.splitext(path)[1].lower())
    try:
        return parser(text) if parser else text
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError([f"cannot be read: {' '.join(str(error).split())}"], source=path) from None


def _stack(word: str) -> Stack:
    return pkgutil.resolve_name(STACKS[word])


def _recognised(contents: Any, path: str) -> Stack:
    """Return the first stack whose configuration this is."""
    for stack in map(_stack, STACKS):
        if stack.recognises(contents):
            return stack
    raise ConfigError([f"no configuration of {', '.join(STACKS)} was recognised in this file"], source=path)
