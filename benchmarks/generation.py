"""Greedy generation beside `transformers.generate`: the same weights, one process, one thread, a cache on both sides.

    python benchmarks/generation.py            # writes results/generation.json

GPT-2's shape with 8 layers of 512 and a vocabulary of 8,192, random weights. A repetition continues prompts of 64
tokens by 64. Both sides give the same tokens before anything is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from harness import Comparison, interleave, report

from labkit.evaluate import CheckpointModel, generate
from labkit.train.checkpoint.exchange import Import, import_weights

PROMPT, NEW = 64, 64


def models(folder: Path) -> tuple[CheckpointModel, object]:
    """Ours and theirs with the same random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=8192, n_positions=PROMPT + NEW, n_embd=512, n_layer=8, n_head=8, initializer_range=0.1,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder / "theirs")
    import_weights(Import(folder / "theirs"), folder / "ours")
    return CheckpointModel(folder / "ours"), theirs


def measure(batch: int, repetitions: int) -> Comparison:
    """One batch size."""
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = models(Path(name))
    prompts = torch.randint(1, 8192, (batch, PROMPT), generator=torch.Generator().manual_seed(1))

    def labkit() -> list[list[int]]:
        return generate(ours, prompts.tolist(), max_new_tokens=NEW)

    def peer() -> list[list[int]]:
        made = theirs.generate(  # type: ignore[attr-defined]
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
            eos_token_id=None,
        )  # fmt: skip
        return made[:, PROMPT:].tolist()

    if labkit() != peer():
        raise AssertionError("the texts differ, so the two do not compute the same")
    found = interleave(
        f"batch {batch}, {PROMPT} + {NEW} tokens", {"labkit": labkit, "transformers": peer}, repetitions=repetitions
    )
    medians = {name: sorted(times)[len(times) // 2] for name, times in found.seconds.items()}
    rates = {name: round(batch * NEW / median) for name, median in medians.items()}
    return replace(found, facts={"tokens_per_s": rates})


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(
        "generation",
        [measure(batch, options.repetitions) for batch in (1, 8)],
        title="Greedy generation on one process",
        notes=["8 layers of 512, 8,192 tokens, fp32, one thread; times cover prompt and new tokens together."],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
