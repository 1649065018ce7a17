"""`labkit doctor`: check that this machine can launch ranks, and name missing parts."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict

from labkit.cli.arguments import Arguments, Command, Option

_MARKS = {"good": "ok", "note": "note", "bad": "BAD"}


def execute(arguments: Arguments) -> int:
    """Print the findings; the exit code is 1 if one of them will break a launch."""
    arguments.refuse()
    from labkit.launch.doctor import examine

    findings = examine(launch=arguments.options["launch"])
    if arguments.options["json"]:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            text = finding.text + (f"; {finding.advice}" if finding.advice else "")
            head = f"{_MARKS[finding.level]:<5} {finding.topic:<{width}}  "
            print(textwrap.fill(text, 118, initial_indent=head, subsequent_indent=" " * len(head)))
    return 1 if any(finding.level == "bad" for finding in findings) else 0


COMMAND = Command(
    name="doctor",
    summary="Check that this machine can launch ranks, and name missing parts.",
    options=(
        Option("launch", "bool", "also start two ranks that send each other messages", False),
        Option("json", "bool", "print JSON", False),
    ),
    execute=execute,
    example="labkit doctor --launch",
)
