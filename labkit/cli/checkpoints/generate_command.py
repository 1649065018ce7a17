"""`labkit generate`: continue prompts with the model of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.checkpoints.model_options import (
    MODEL_OPTIONS,
    checkpoint_of,
    launch,
    layout_of,
    option_problems,
    refusing,
    tokenizer_of,
)
from labkit.cli.rank_options import first_rank
from labkit.config.errors import shown
from labkit.data.text import read_lines, whole_characters

SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")


def execute(arguments: Arguments) -> int:
    """Check words and options, generate, and print each text; that of a single prompt is printed as it grows."""
    options = arguments.options
    problems = option_problems(arguments)
    prompts = list(arguments.words)
    if options["prompts"] is not None and not problems and not arguments.problems:
        lines = _refusing(arguments, lambda: read_lines(options["prompts"], "--prompts"))
        problems += [] if lines else [f"--prompts {options['prompts']}: is empty; write one prompt per line"]
        prompts += lines
    arguments.refuse(problems)
    prompts = [_refusing(arguments, partial(_whole, prompt)) for prompt in prompts] or [""]
    checkpoint = checkpoint_of(arguments)
    tokenizer = tokenizer_of(arguments, checkpoint)
    sampling = {name: options[name] for name in SAMPLING}
    stream = _Stream(prompts[0]) if len(prompts) == 1 and not options["json"] and first_rank() else None
    results = launch(
        generate_on_rank, arguments, str(checkpoint), layout_of(arguments), options["precision"], tokenizer, prompts,
        options["max_new_tokens"], sampling, progress=stream.update if stream else lambda _: None,
    )  # fmt: skip
    if stream is not None:
        stream.end(results[0]["text"])
    elif first_rank():
        for result in results:
            print(json.dumps(result) if options["json"] else f"{result['prompt']}{result['text']}", flush=True)
    return 0


def _whole(prompt: str) -> str:
    """Return the prompt. Raises ValueError for half a surrogate pair, which is how Python represents a byte that is not
    UTF-8."""
    if byte := re.search("[\udc80-\udcff]", prompt):
        number = ord(byte[0]) - 0xDC00
        raise ValueError(f"{shown(prompt)}: a prompt is UTF-8 text, and this has the byte 0x{number:02x}; convert it")
    return whole_characters(prompt)


def _refusing(arguments: Arguments, read: Callable[[], Any]) -> Any:
    """Return the result of `read`. Its ValueError becomes a ConfigError, as a problem of the command line."""
    try:
        return read()
    except ValueError as error:
        arguments.refuse([str(error)])
        raise


def generate_on_rank(
    checkpoint: str, layout: dict[str, int], precision: str, tokenizer: str | None, prompts: list[str],
    new: int | None, sampling: dict[str, Any],
) -> Any:  # fmt: skip
    """Generate on a rank: return `prompt`, `text`, `tokens` and `ended` (by the model) per prompt, or a `Refused`."""
    from labkit.data.text import end_tokens
    from labkit.evaluate.continuation import Continuation
    from labkit.evaluate.generation import generate
    from labkit.evaluate.model import CheckpointModel
    from labkit.evaluate.sampling import Sampling
    from labkit.evaluate.tasks import tokenizer_for
    from labkit.launch import info

    def work() -> list[dict[str, Any]]:
        chosen = Sampling(**sampling)
        model = CheckpointModel(checkpoint, layout, precision=precision)
        loaded = tokenizer_for(model, tokenizer)
        ends = end_tokens(loaded, tokenizer)
        ids = [loaded.encode(prompt).ids or ends[:1] for prompt in prompts]
        growing, texts = [Continuation(loaded.decode, each) for each in ids], [""] * len(ids)

        def grow(tokens: list[int | None]) -> None:
            added = ["" if token is None or token in ends else text.add(token) for text, token in zip(growing, tokens)]
            texts[:] = map(str.__add__, texts, added)
            info.report_progress({"text": added[0]})

        made = generate(model, ids, max_new_tokens=new, sampling=chosen, end=ends, on_tokens=grow)
        return [
            {"prompt": prompt, "text": text + last.rest(), "tokens": new_ids, "ended": new_ids[-1] in ends}
            for prompt, text, last, new_ids in zip(prompts, texts, growing, made, strict=True)
        ]

    return refusing(work)


class _Stream:
    """Prints one text as it grows. Its prompt comes with the first token, so that a rejected request prints nothing."""

    def __init__(self, prompt: str) -> None:
        self._waiting, self._text = prompt, ""

    def update(self, values: dict[str, Any]) -> None:
        """Print the text that the new token adds."""
        if (added := values.get("text")) is not None:
            print(self._waiting + added, end="", flush=True)
            self._waiting, self._text = "", self._text + added

    def end(self, text: str) -> None:
        """Print the rest of the whole text and end the line."""
        print(self._waiting + text[len(self._text) :], flush=True)


COMMAND = Command(
    name="generate",
    summary="Continue prompts with the model of a checkpoint; without a prompt, begin a text.",
    options=(
        Option("prompts", "str", "a file with more prompts, one per line", path="file"),
        *MODEL_OPTIONS,
        Option("max-new-tokens", "int", "most tokens to add to a prompt", ge=1, unset="default: 64, or as many as fit"),
        Option("temperature", "float", "0 takes the most likely token; above 0, tokens are drawn", 0.0, ge=0),
        Option("top-k", "int", "draw from this many of the most likely tokens; 0 draws from all", 0, ge=0),
        Option("top-p", "float", "draw from the most likely tokens that add up to this probability", 1.0, gt=0, le=1),
        Option("repetition-penalty", "float", "above 1: tokens that occurred are less likely", 1.0, gt=0),
        Option("seed", "int", "seed of the draws", 1234, ge=0),
    ),
    execute=execute,
    example='labkit generate --checkpoint runs/a "The hacker said" --max-new-tokens 40 --temperature 0.8 --top-p 0.9',
    words="PROMPT",
)
