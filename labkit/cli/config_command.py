"""`labkit config convert`: the configuration of another training stack as one of ours."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from labkit.cli.arguments import Action, Arguments, Command, Option
from labkit.cli.output import show
from labkit.cli.written_files import output_problems
from labkit.config.foreign.stacks import STACKS, convert
from labkit.output_files import appearing


def execute(arguments: Arguments) -> int:
    """Check the words and options of the action, and perform it."""
    action, words = arguments.action(COMMAND)
    return action.do(arguments, words)


def _convert(arguments: Arguments, words: Sequence[str]) -> int:
    """Print another stack's configuration as YAML for `labkit train --config`, and what it cannot carry over."""
    out = arguments.options["out"]
    arguments.refuse(output_problems("--out", out))
    converted = convert(words, arguments.options["from"])
    if out is None:
        print(converted.text, end="", flush=True)
    else:
        with appearing(out) as draft:
            Path(draft).write_text(converted.text, encoding="utf-8")
        show(
            f"{out}: train with it: labkit train --config {quote(out)}; add --print-config to see every field explained"
        )
    if converted.report:
        show(f"\nnot in the configuration\n{converted.report}", stream=sys.stderr)
    return 0


COMMAND = Command(
    name="config",
    summary="Configurations of other stacks: `convert FILE...` turns Megatron-LM's flags (a script, a list or YAML), a "
    "torchtitan TOML, a nanotron YAML, a DeepSpeed JSON or a Hugging Face config.json into YAML for `labkit train "
    "--config`. A comment next to each field names the key that it comes from. Keys that could not be carried over are "
    "listed on standard error, with the reason. Several files, such as a config.json and a DeepSpeed JSON, become one.",
    options=(
        Option("from", "str", "the stack", choices=tuple(STACKS), unset="default: recognised by its keys"),
        Option("out", "str", "file for the YAML", path="any", unset="default: standard output"),
    ),
    execute=execute,
    example="labkit config convert pretrain_gpt.sh --out run.yaml",
    words="convert FILE...",
    paths=True,
    actions={"convert": Action(_convert, "FILE...", ("from", "out"))},
)
