"""jsonargparse's part: the parser of one command, for its help and as a second check of what was read."""

from __future__ import annotations

import builtins
from typing import Any

from labkit.cli.arguments import CONFIG_OPTIONS, Arguments, Command, Option
from labkit.config import RunConfig
from labkit.config.field_docs import field_docs, section_docs
from labkit.config.fields import SPECS
from labkit.config.sections import SECTIONS

_TYPES: dict[str, Any] = {"tuple[str, ...]": tuple[str, ...], "tuple[int, ...]": tuple[int, ...]}
_LISTS = {"TUPLE[STR, ...]": "A,B", "TUPLE[INT, ...]": "1,0"}
"""How a list is written, in place of its type."""


def _type(kind: str) -> Any:
    """The plain type, also where None is a value: jsonargparse would read a text such as `#` as None otherwise."""
    return _TYPES.get(kind) or getattr(builtins, kind)


def parser_of(command: Command) -> Any:
    """The ArgumentParser of one command; no other command's parser is built."""
    from jsonargparse import ArgumentParser

    usage = " ".join(["labkit", command.name, *([command.words] if command.words else []), "[options]"])
    parser = ArgumentParser(
        prog=f"labkit {command.name}", usage=usage, description=command.summary, epilog=f"example: {command.example}",
        allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    options = (*CONFIG_OPTIONS, *command.options) if command.configurable else command.options
    for option in options:
        _add(parser, option)
    if command.configurable:
        docs = field_docs()
        for section in SECTIONS:
            group = parser.add_argument_group(f"{section}: {section_docs()[section]}")
            for spec in (s for s in SPECS.values() if s.section == section):
                doc = docs[spec.dotted]
                group.add_argument(
                    f"--{spec.dotted}",
                    type=_type(spec.kind),
                    default=spec.default,
                    metavar=_metavar(doc.kind),
                    help=doc.help.replace("%", "%%"),
                )
    return parser


def _add(parser: Any, option: Option) -> None:
    if option.pairs:
        parser.add_argument("-p", f"--{option.name}", nargs=2, metavar=("NAME", "VALUE"), help=option.help)
    elif option.kind == "bool":
        parser.add_argument(f"--{option.name}", action="store_true", help=option.help)
    else:
        kind, metavar = _type(option.kind), _metavar(option.kind)
        parser.add_argument(f"--{option.name}", type=kind, default=option.default, metavar=metavar, help=option.help)


def _metavar(kind: str) -> str:
    """`INT`, `A,B`: what stands for a value in the help."""
    word = kind.upper().replace(" | NONE", "")
    return _LISTS.get(word, word)


def checked_config(command: Command, arguments: Arguments) -> RunConfig:
    """The configuration as jsonargparse reads it from the typed values; equal to `arguments.config`."""
    given = {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in arguments.config.to_dict().items()
    }
    namespace = parser_of(command).parse_object(given)
    return RunConfig(**{name: cls(**vars(namespace[name])) for name, cls in SECTIONS.items()})
