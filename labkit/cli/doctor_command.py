"""`labkit doctor`: check that this machine can launch ranks, and name missing parts."""

from __future__ import annotations

import json
from dataclasses import asdict

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.output import show

_MARKS = {"good": "ok", "note": "note", "bad": "BAD"}


def execute(arguments: Arguments) -> int:
    """Print the findings; the exit code is 1 if one of them will break a launch."""
    arguments.refuse()
    from labkit.launch.doctor import examine
    from labkit.launch.workshop import examine_for_workshop, one_line

    workshop = arguments.options["workshop"]
    findings = examine_for_workshop() if workshop else examine(launch=arguments.options["launch"])
    if arguments.options["json"]:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            text = finding.text + (f"; {finding.advice}" if finding.advice else "")
            show(text, f"{_MARKS[finding.level]:<5} {finding.topic:<{width}}  ")
        if workshop:
            print(f"\nsend this line to your teacher:\n{one_line(findings)}")
    return 1 if any(finding.level == "bad" for finding in findings) else 0


COMMAND = Command(
    name="doctor",
    summary="Check that this machine can launch ranks, and name missing parts.",
    options=(
        Option("launch", "bool", "also start two ranks that send each other messages", False),
        Option("workshop", "bool", "say in one line to paste whether this laptop is ready for a workshop", False),
        Option("json", "bool", "print JSON", False),
    ),
    execute=execute,
    example="labkit doctor --launch",
)
