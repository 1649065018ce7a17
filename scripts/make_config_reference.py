"""Write docs/config.md, the reference of every configuration field, from the table of fields.

`tests/unit/test_config.py` runs this where the page is out of date, so nobody has to remember it.
"""

from __future__ import annotations

from pathlib import Path

from labkit.config import presets
from labkit.config.fields import SPECS
from labkit.config.findings import as_yaml
from labkit.config.sections import SECTIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

_HEAD = """\
# Configuration

<!-- Written by scripts/make_config_reference.py (which the tests run) from labkit/config/sections.py; edit that. -->

A run takes its fields from a YAML file with these sections, or from a preset, or from both. Options on the command line
change single fields:

```
labkit train --preset tiny --print_config > runs/mine.yaml
labkit train --config runs/mine.yaml --nproc 4 --parallel.tp 2 --lr 5e-4
```

Write a field as `section.field`, or by its name in Megatron-LM. The last part alone is enough if only one section has
it. `-` and `_` are the same.

- In YAML a value has the field's own type. `1e-4` is a number. A quoted `"8"` is text, and a numeric field refuses it.
  Only `true` and `false` are truth values. Tags and anchors are refused.
- On the command line every value is text, and labkit reads it as the field's type. `null` is none; `a,b` is a list.
- A `~` at the start of a path is your home folder. A path is never empty.

labkit reports all mistakes of a configuration together, before any process starts.

The launch gives the number of ranks (`--nproc`, or torchrun's). Data parallelism takes the rest:
dp = ranks / (tp cp pp).

"""


def page() -> str:
    """The whole page."""
    lines = [_HEAD + f"Presets: {', '.join(f'`{name}`' for name in presets.names())}.\n"]
    for section, cls in SECTIONS.items():
        specs = [spec for spec in SPECS.values() if spec.section == section]
        lines.append(f"\n## {section}\n\n{cls.__doc__}")
        lines += ["\n| field | type | default | meaning |", "|---|---|---|---|"] if specs else []
        for spec in specs:
            text = spec.doc + (f" Values: {spec.limits}." if spec.limits else "")
            if spec.aliases:
                text += f" Megatron-LM: {', '.join(f'`{alias}`' for alias in spec.aliases)}."
            kind = f"{spec.kind} | None" if spec.optional else spec.kind
            cells = (f"`{spec.dotted}`", kind, f"`{as_yaml(spec.default)}`", text)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
