"""Write docs/config.md, the reference of every configuration field, from the table of fields.

`tests/unit/test_config.py` runs this where the page is out of date, so nobody has to remember it.
"""

from __future__ import annotations

from pathlib import Path

from labkit.config import presets
from labkit.config.fields import SPECS
from labkit.config.findings import as_yaml
from labkit.config.megatron_flags import SWITCHES
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

- In YAML a value has the field's own type. `1e-4` is a number. A quoted `"8"` is text, and a numeric field rejects it.
  Only `true` and `false` are truth values. Tags and anchors are rejected.
- On the command line every value is text, and labkit reads it as the field's type. `null` is none; `a,b` is a list.
- A `~` at the start of a path is your home folder. A path is never empty.

labkit reports all mistakes of a configuration together, before any process starts.

The launch gives the number of ranks (`--nproc`, or torchrun's). Data parallelism takes the rest:
dp = ranks / (tp cp pp).

"""

_FLAGS = """
## Flags of Megatron-LM

On the command line every name after "Megatron-LM:" above is a flag, as in `--tensor-model-parallel-size 2`. These flags
set fields, too. `--num-layers-per-virtual-pipeline-stage N` sets `parallel.vpp` to layers / (pp x N). A list may have
blanks in place of commas, as in `--recompute-modules core_attn mlp`, and several words after `--data-path` are a blend.
A flag that labkit lacks, or that says the same in another way, is an error that tells what to write.

| flag | sets |
|---|---|"""


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
    lines += [_FLAGS, *(f"| `--{name.replace('_', '-')}` | {_sets(name)} |" for name in SWITCHES)]
    return "\n".join(lines) + "\n"


def _sets(name: str) -> str:
    """What a flag of Megatron-LM sets, in a cell."""
    more = {
        "swiglu": "without `--ffn-hidden-size`, `model.ffn_hidden` = two thirds of 4 x hidden, in multiples of 64",
        "group_query_attention": "without `--num-query-groups`, `model.kv_heads` = 1",
    }
    sets = [f"`{field}` = {value}" for field, value in SWITCHES[name].items()]
    return "; ".join([*sets, *([more[name]] if name in more else [])])


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
