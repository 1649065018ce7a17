"""The model card of a checkpoint: what the model is, how it was trained, how to load it, and what nobody has tried."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import RunConfig, yaml_text
from labkit.config.errors import counted
from labkit.plan import model_parameters
from labkit.train.checkpoint.exchange import Export
from labkit.train.checkpoint.manifest import Manifest

_TASKS = {"bert": "fill-mask", "t5": "text2text-generation"}
"""Family -> task in the Hub's words; every other one generates text."""

_CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags: [labkit, megatron]
---

# {name}

A {kind} of {parameters:,} parameters, {layers} layers of width {hidden}. It was trained with
[labkit](https://pypi.org/project/labkit/), a workbench for Megatron-style parallel training, for {steps} on
{ranks}, and has seen {samples:,} samples of {length:,} tokens{data}.

Nobody has evaluated it for any use. It says what its text says, and has no license until you add one here.

## Load it

```python
from transformers import {loader}

model = {loader}.from_pretrained("{name}")
```

```
labkit checkpoint pull runs/mine {name} > mine.yaml
labkit train --config mine.yaml --checkpoint.load runs/mine
```

{tokenizer}

## How it was trained

These are the settings that differ from labkit's defaults, after {steps}; layout and batch included.

```yaml
{settings}
```

Versions: {versions}.
"""


def model_card(export: Export, manifest: Manifest, name: str, tokenizer: Sequence[str]) -> str:
    """Return the text of README.md for the repository `name`, which has these files of a tokenizer."""
    model = export.model
    task = _TASKS.get(export.family, "text-generation")
    config = manifest.config
    samples = int(manifest.training.get("consumed_samples", 0))
    path = config.get("data", {}).get("path")
    return _CARD.format(
        task=task,
        name=name,
        kind=export.family,
        parameters=model_parameters(model, export.moe),
        layers=model.layers,
        hidden=model.hidden,
        steps=counted(manifest.step, "step"),
        ranks=counted(manifest.world_size, "rank"),
        samples=samples,
        length=model.seq_length,
        data=f" from `{path}`" if path else " from the Jargon File, the text that labkit carries",
        loader={"bert": "BertForPreTraining", "t5": "T5ForConditionalGeneration"}.get(
            export.family, "AutoModelForCausalLM"
        ),
        tokenizer=f"Its tokenizer is in {', '.join(f'`{file}`' for file in tokenizer)}.",
        settings=yaml_text.dump(_changed(config)).strip(),
        versions=", ".join(f"{what} {version}" for what, version in manifest.versions.items()),
    )


def _changed(config: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return the fields that differ from the defaults, without paths, which belong to one machine."""
    default = RunConfig().to_dict()
    found: dict[str, dict[str, object]] = {}
    for section, fields in config.items():
        kept = {
            name: value
            for name, value in fields.items()
            if section != "checkpoint" and value != default.get(section, {}).get(name) and "/" not in str(value)
        }
        if kept:
            found[section] = kept
    return found
