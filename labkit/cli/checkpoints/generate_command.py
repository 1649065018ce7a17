"""`labkit generate`: continue prompts with the model of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.cli.arguments import Arguments, Command, Option
from labkit.cli.checkpoints.model_options import (
    MODEL_OPTIONS,
    broken_options,
    checkpoint_of,
    launch,
    layout_of,
    refusing,
    tokenizer_of,
)
from labkit.cli.train_command import first_rank

SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty", "seed")


def execute(arguments: Arguments) -> int:
    """Check words and options, generate, print each text. One prompt alone is printed while it grows."""
    options = arguments.options
    problems = broken_options(arguments, COMMAND)
    prompts = list(arguments.words)
    if options["prompts"] is not None and not problems:
        prompts += Path(options["prompts"]).read_text(encoding="utf-8").splitlines()
    arguments.refuse(problems)
    checkpoint = checkpoint_of(arguments)
    tokenizer = tokenizer_of(arguments, checkpoint)
    sampling = {name: options[name] for name in SAMPLING}
    prompts = prompts or [""]
    streams = len(prompts) == 1 and not options["json"] and first_rank()
    stream = _Stream(tokenizer, prompts[0]) if streams else None
    results = launch(
        generate_on_rank, arguments, str(checkpoint), layout_of(arguments), options["precision"], tokenizer, prompts,
        options["max_new_tokens"], sampling, progress=stream.update if stream else lambda _: None,
    )  # fmt: skip
    if stream is not None:
        stream.end()
    elif first_rank():
        for result in results:
            print(json.dumps(result) if options["json"] else f"{result['prompt']}{result['text']}", flush=True)
    return 0


def generate_on_rank(
    checkpoint: str, layout: dict[str, int], precision: str, tokenizer: str | None, prompts: list[str], new: int,
    sampling: dict[str, Any],
) -> Any:  # fmt: skip
    """Runs inside a rank: `prompt`, `text`, `tokens` and `ended` (by the model) for each prompt; or a `Refused`."""
    from labkit.data.text import END_OF_TEXT, load_tokenizer
    from labkit.evaluate.generation import generate
    from labkit.evaluate.model import CheckpointModel
    from labkit.evaluate.sampling import Sampling
    from labkit.evaluate.tasks import encoder
    from labkit.launch import info

    def work() -> list[dict[str, Any]]:
        chosen = Sampling(**sampling)
        model = CheckpointModel(checkpoint, layout, precision=precision)
        encode, loaded = encoder(model, tokenizer), load_tokenizer(tokenizer)
        end = loaded.token_to_id(END_OF_TEXT)
        start = [] if end is None else [end]
        ids = [encode(prompt) or start for prompt in prompts]
        made = generate(
            model, ids, max_new_tokens=new, sampling=chosen, end=end,
            on_tokens=lambda tokens: info.report_progress({"tokens": tokens}),
        )  # fmt: skip
        texts = (loaded.decode(new_ids) for new_ids in made)
        return [
            {"prompt": prompt, "text": text, "tokens": new_ids, "ended": new_ids[-1] == end}
            for prompt, text, new_ids in zip(prompts, texts, made, strict=True)
        ]

    return refusing(work)


class _Stream:
    """Prints one text while it grows. A character whose bytes are not all there waits."""

    def __init__(self, tokenizer: str | None, prompt: str) -> None:
        from labkit.data.text import load_tokenizer

        self._decode: Callable[[list[int]], str] = load_tokenizer(tokenizer).decode
        self._ids, self._shown = list[int](), ""
        print(prompt, end="", flush=True)

    def update(self, values: dict[str, Any]) -> None:
        """Print what the new token adds."""
        self._ids += [token for token in values.get("tokens", []) if token is not None]
        self._show(self._decode(self._ids).rstrip("\ufffd"))

    def _show(self, text: str) -> None:
        print(text[len(self._shown) :], end="", flush=True)
        self._shown = text

    def end(self) -> None:
        """Print the rest and end the line."""
        self._show(self._decode(self._ids))
        print(flush=True)


COMMAND = Command(
    name="generate",
    summary="Continue prompts with the model of a checkpoint; without a prompt, begin a text.",
    options=(
        Option("prompts", "str", "a file with more prompts, one a line", file=True),
        *MODEL_OPTIONS,
        Option("max-new-tokens", "int", "most tokens to add to a prompt", 64, ge=1),
        Option("temperature", "float", "0 takes the most likely token; above, tokens are drawn", 0.0, ge=0),
        Option("top-k", "int", "draw from so many of the most likely tokens; 0 from all", 0, ge=0),
        Option("top-p", "float", "draw from the most likely tokens that add up to this probability", 1.0, gt=0, le=1),
        Option("repetition-penalty", "float", "above 1: tokens that occurred are less likely", 1.0, gt=0),
        Option("seed", "int", "of the draws", 1234, ge=0),
    ),
    execute=execute,
    example='labkit generate --checkpoint runs/a "The hacker said" --max-new-tokens 40 --temperature 0.8 --top-p 0.9',
    words="PROMPT",
)
