"""What `labkit COMMAND --help` prints: usage, examples, options, presets and the fields that people change most.

`--help-all` has every field in place of these few. Lines fit the terminal, and a pipe gets lines of 100 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from labkit.cli.arguments import Command, Option
from labkit.cli.output import folded, room
from labkit.config import megatron_flags, presets
from labkit.config.field_spec import FieldSpec
from labkit.config.fields import SPECS, extra_specs, resolve
from labkit.config.sections import SECTIONS

COMMON = """\
model
  --family: architecture
  --layers, --num-layers: Transformer layers
  --hidden, --hidden-size: width of the residual stream
  --heads, --num-attention-heads: attention heads
  --kv-heads, --num-query-groups: key/value heads | as many as --heads
  --ffn-hidden-size: width of the MLP | 4 x hidden
  --seq-length: tokens of a sample
  --vocab-size: size of the vocabulary
  --position, --position-embedding-type: kind of positions
  --norm, --normalization: kind of norm
  --activation: activation of the MLP
  --recompute-granularity: what backward computes again
layout: data parallelism takes the ranks that the sizes below leave
  --tp, --tensor-model-parallel-size: tensor parallel size
  --pp, --pipeline-model-parallel-size: pipeline parallel size
  --vpp, --num-virtual-stages-per-pipeline-rank: model chunks on each rank
  --cp, --context-parallel-size: context parallel size
  --ep, --expert-model-parallel-size: expert parallel size
  --sequence-parallel: split norms and dropout over tp, too
  --distributed-optimizer, --use-distributed-optimizer: shard optimizer states over dp ranks
  --schedule.name: pipeline schedule
  --cuda-graph-impl: CUDA graphs
mixture of experts
  --num-experts: experts of a layer; 0 for a dense model
  --top-k, --moe-router-topk: experts that a token is sent to
  --dispatcher, --moe-token-dispatcher-type: how tokens reach their experts
optimizer
  --lr: peak learning rate
  --min-lr: learning rate at the end of the decay
  --lr-schedule, --lr-decay-style: decay after the warm-up
  --warmup-steps, --lr-warmup-iters: steps of linear warm-up
  --weight-decay: decoupled weight decay
  --clip-grad: largest gradient norm; 0 does not clip
  --precision: type of weights and activations
  --fp8, --fp8-format: formats of the products of linear layers and experts
run
  --steps, --train-iters: optimizer steps
  --micro-batch-size: samples of a forward pass on one rank
  --global-batch-size: samples of an optimizer step
  --seed: seed of weights, dropout and data order
  --data-path: a text file, or the prefix of an indexed dataset | the bundled text
  --tokenizer, --tokenizer-model: the tokenizer's file | the bundled BPE
  --eval-interval: steps between validations
  --eval-steps, --eval-iters: global batches of one validation
  --output-dir: folder for all that the run writes
  --save, --checkpoint.dir: folder for checkpoints | in --output-dir, with --save-interval
  --save-interval: steps between checkpoints | 100 with --save
  --load: a run to continue from | this run's checkpoints
"""
"""The fields that `--help` shows: names, a text and, if the default is None, what this means."""
_WIDEST, _COLUMN, _WIDE_COLUMN = 118, 26, 44
"""Most columns of a line, and the columns in which a text begins: of an option, and of a common field."""


def help_text(command: Command, given: Sequence[str] = ()) -> str:
    """Return the text of `labkit COMMAND --help`, or of `--help-all` if that is among the words of the command line.

    given: these words. If one of them names an action, the text is about that action alone.
    """
    width = min(_WIDEST, room() or 100)
    for name in [word for word in given if word in command.actions][:1]:
        command = _of_action(command, name)
    words = f" {command.words}" if command.words else ""
    takes = " [options]" if command.all_options else ""
    examples = command.example.split("\n") if command.example else []
    lines = [f"usage: {command.called}{words}{takes}", "", *textwrap.wrap(command.summary, width)]
    if len(examples) == 1:
        lines += ["", *folded(examples[0], "example: ", width)]
    elif examples:
        lines += ["", "examples:", *(line for each in examples for line in folded(each, "  ", width))]
    lines += ["", "options:"] if command.all_options else []
    for option in command.all_options:
        lines += _option_lines(option, width)
    if command.configurable:
        lines += ["", *_preset_lines(width), ""]
        lines += _every_field(command, width) if "--help-all" in given else _common_fields(command, width)
    return "\n".join(lines)


def _of_action(command: Command, name: str) -> Command:
    """Return the command with the words and options of one of its actions."""
    action = command.actions[name]
    return replace(
        command,
        name=f"{command.name} {name}",
        words=action.words,
        summary=(action.do.__doc__ or "").partition("\n")[0],
        options=tuple(option for option in command.options if option.key in action.options),
        example=command.example if f" {name} " in command.example else "",
    )


def _option_lines(option: Option, width: int) -> list[str]:
    unset = option.unset or f"default: {option.default_words}"
    names = f"-p, --{option.name} NAME VALUE" if option.pairs else f"--{option.name}{_value(option)}"
    return _row(names, option.doc, f"({unset})", option.limits, _COLUMN, width)


def _preset_lines(width: int) -> list[str]:
    """Return the names of all presets by kind of model, each with its number of parameters."""
    from labkit.plan.parameters import model_parameters

    kinds: dict[str, list[str]] = {}
    for name, make in presets.PRESETS.items():
        config = make()
        size = model_parameters(config.model, config.moe) / 1e6
        words = f"{size / 1000:.1f}B" if size >= 1000 else f"{size:.0f}M" if size >= 10 else f"{size:.1f}M"
        kind = "experts" if config.moe.num_experts else config.model.family
        kinds.setdefault(kind, []).append(f"{name}\0{words}")
    lines = ["presets and their parameters"]
    for kind, entries in kinds.items():
        lines += [line.replace("\0", " ") for line in folded(", ".join(entries), f"  {kind:<9}", width)]
    return lines


def _every_field(command: Command, width: int) -> list[str]:
    """Return all fields by section, with the whole text of each."""
    lines = []
    for section, cls in SECTIONS.items():
        rows = [_full_row(spec, width) for spec in _specs(command).values() if spec.section == section]
        lines += ["", *textwrap.wrap(f"{section}: {cls.__doc__}", width)] if rows else []
        lines += [line for row in rows for line in row]
    return lines[1:]


def _full_row(spec: FieldSpec, width: int) -> list[str]:
    others = ", ".join(f"--{alias.replace('_', '-')}" for alias in spec.aliases)
    default = f"(default: {spec.default_words}{f'; Megatron-LM: {others}' if others else ''})"
    return _row(f"--{spec.dotted}{_value(spec)}", spec.doc, default, spec.limits, _COLUMN, width)


def _common_fields(command: Command, width: int) -> list[str]:
    """Return the fields that are changed most, those of a script, and where the others are."""
    lines = ["the fields that are set most often, with Megatron-LM's names"]
    taken = {f"--{option.name}" for option in command.options}
    for line in COMMON.splitlines():
        listed, _, text = line.strip().partition(": ")
        if not line.startswith(" "):
            lines.append(line)
            continue
        spec = SPECS[str(resolve(listed.split(", ")[0].lstrip("-"))[0])]
        names = ", ".join(name for name in listed.split(", ") if name not in taken)
        text, _, default = text.partition(" | ")
        default = f"(default: {default or spec.default_words})"
        lines += _row(names + _value(spec), text, default, ", ".join(spec.choices), _WIDE_COLUMN, width)
    own = [spec for spec in _specs(command).values() if spec.section == "extra"]
    lines += ["of this script", *(line for spec in own for line in _full_row(spec, width))] if own else []
    flags = [f"--{name.replace('_', '-')}" for name in (*megatron_flags.SWITCHES, *megatron_flags.NUMBERS)]
    others = f"more of Megatron-LM's flags: {', '.join(flags)}"
    more = (
        f"All {len(_specs(command))} fields: {command.called} --help-all, or docs/config.md. A field is written as "
        "`--model.layers`, or `--layers` where only one section has it; `-` and `_` mean the same."
    )
    lines += textwrap.wrap(others, width, subsequent_indent="  ", break_on_hyphens=False)
    return [*lines, "", *textwrap.wrap(more, width)]


def _specs(command: Command) -> dict[str, FieldSpec]:
    return SPECS | extra_specs(command.extra_args_provider)


def _value(spec: FieldSpec) -> str:
    """Return the word for the value that follows a name; empty for a switch."""
    kinds = {"bool": "", "tuple[str, ...]": " A,B", "tuple[int, ...]": " 1,0"}
    return kinds.get(spec.kind, " PATH" if spec.path else f" {spec.kind.upper()}")


def _row(names: str, text: str, default: str, limits: str, column: int, width: int) -> list[str]:
    """Return the lines `  --option INT   its text (default) [limits]`; default and limits are not broken if they fit.

    After long names the text begins on a line of its own.
    """
    parts = [default, f"[{limits}]" if limits else ""]
    whole = [part.replace(" ", "\0") if len(part) <= width - column else part for part in parts]
    wrapped = textwrap.wrap(" ".join([text, *whole]), width - column, break_long_words=False, break_on_hyphens=False)
    first, *more = [f"{'':{column}}{line}".replace("\0", " ") for line in wrapped]
    word = f"  {names}"
    return [f"{word:<{column}}{first[column:]}", *more] if len(word) < column else [word, first, *more]
