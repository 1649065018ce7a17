"""A finished step as one line of text: its values with their units, the most important first.

    step 12 of 100: loss 5.8054  0.420 s/step  ETA 0:37  1,234 tokens/s  model 12.3 GFLOP/s/rank
      hardware 16.4 GFLOP/s/rank  lr 3.00e-04  grad norm 1.23  memory 0.41 GiB

The values have their names from metrics.jsonl, so a line of that file can be shown unchanged. The rate of model FLOPs
is Megatron's TFLOP/s/GPU; that of hardware FLOPs counts recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def duration(seconds: float) -> str:
    """Return `0:37`, `12:05` or `1:02:03`: minutes and seconds, with hours if there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def digits(value: float) -> str:
    """Return three significant digits below a thousand, and a whole number with commas above."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def teraflops(rate: float) -> str:
    """Return `412 TFLOP/s`, or `12.3 GFLOP/s` for a slow device."""
    return f"{digits(rate)} TFLOP/s" if rate >= 0.1 else f"{digits(1000 * rate)} GFLOP/s"


FIELDS: dict[str, Callable[[Any], str]] = {
    "loss": lambda loss: f"loss {loss:.4f}",
    "lm_loss": lambda loss: f"words {loss:.4f}",
    "sop_loss": lambda loss: f"order {loss:.4f}",
    "validation_loss": lambda loss: f"validation loss {loss:.4f}",
    "validation_lm_loss": lambda loss: f"words {loss:.4f}",
    "validation_sop_loss": lambda loss: f"order {loss:.4f}",
    "validation_perplexity": lambda perplexity: f"perplexity {digits(perplexity)}",
    "slow_ranks": "; ".join,
    "test_loss": lambda loss: f"test loss {loss:.4f}",
    "test_lm_loss": lambda loss: f"words {loss:.4f}",
    "test_sop_loss": lambda loss: f"order {loss:.4f}",
    "test_perplexity": lambda perplexity: f"perplexity {digits(perplexity)}",
    "skipped_steps": lambda count: f"skipped {count:,}" if count else "",
    "step_time": lambda seconds: f"{digits(seconds)} s/step",
    "eta": lambda seconds: f"ETA {duration(seconds)}",
    "tokens_per_second": lambda rate: f"{digits(rate)} tokens/s",
    "tflops_per_rank": lambda rate: f"model {teraflops(rate)}/rank",
    "mfu": lambda share: f"MFU {share:.1%}",
    "hardware_tflops_per_rank": lambda rate: f"hardware {teraflops(rate)}/rank",
    "hfu": lambda share: f"HFU {share:.1%}",
    "learning_rate": lambda rate: f"lr {rate:.2e}",
    "grad_norm": lambda norm: f"grad norm {digits(norm)}",
    "peak_memory_bytes": lambda size: f"memory {size / 2**30:.2f} GiB",
}
"""Name in metrics.jsonl -> its text, the most important first. `eta` (seconds to the end) is in no file."""


def step_words(values: Mapping[str, Any]) -> list[str]:
    """Return `step 12 of 100:` and the words of each field in `values`; without `steps` the total is left out.

    A number that was not finite is None in metrics.jsonl, so its field is left out. So is the rate of hardware FLOPs if
    nothing is recomputed, since it then equals that of model FLOPs.
    """
    total = f" of {values['steps']:,}" if "steps" in values else ""
    same = values.get("hardware_tflops_per_rank") == values.get("tflops_per_rank") and values.get("hfu") == values.get(
        "mfu"
    )
    said = {name: value for name, value in values.items() if not (same and name in ("hardware_tflops_per_rank", "hfu"))}
    shown = (say(said[name]) for name, say in FIELDS.items() if said.get(name) is not None)
    return [f"step {values['step']:,}{total}:", *filter(None, shown)]


def one_line(values: Mapping[str, Any], width: int) -> str:
    """Return a line of as many fields as fit into `width` columns, by importance; step and first field always stay."""
    head, *fields = step_words(values)
    line = " ".join([head, *fields[:1]])
    for field in fields[1:]:
        if len(line) + 2 + len(field) > width:
            break
        line += f"  {field}"
    return line


def all_lines(values: Mapping[str, Any], width: int | None = None) -> list[str]:
    """Return all fields, on as many lines of `width` columns as they need; without a width on one line.

    Later lines are indented by two. A field wider than the terminal stays whole.
    """
    head, *fields = step_words(values)
    if width is None:
        return [f"{head} {'  '.join(fields)}"]
    return _wrapped([head, *fields], width)


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    lines = [words[0]]
    for place, word in enumerate(words[1:]):
        longer = f"{lines[-1]}{'  ' if place else ' '}{word}"
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {word}")
    return lines
