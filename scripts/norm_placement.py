"""Train a BERT in both layouts of Figure 7 of the Megatron-LM paper, shallow and deep, and keep the losses.

    OMP_NUM_THREADS=1 python scripts/norm_placement.py               eight runs, six minutes on one core
    OMP_NUM_THREADS=1 python scripts/norm_placement.py --layers 24 --lr 3e-3 --seed 1235

The paper (arXiv 1909.08053) shows the training loss of BERTs of 336 million parameters and more. These BERTs have a
width of 32. Initial weights are as large, relative to the width, as in BERT-Large: 0.02 x sqrt(1024 / 32) = 0.11. Both
layouts start from the same weights and read the same samples. The result, `labkit/data/bundled/norm_placement.json`,
has a row for each run, with commit and machine. A run replaces its own row and keeps the others. Chapter 19 draws the
rows and repeats first steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from labkit.config import RunConfig, presets
from labkit.data.text import BUNDLED
from labkit.train import pretrain

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import provenance  # noqa: E402  # pyright: ignore[reportMissingImports]

TARGET = BUNDLED / "norm_placement.json"
NOUNS = ("hacker", "machine", "keyboard", "software", "terminal", "compiler")
NOUNS += ("network", "language", "mainframe", "filesystem", "problem", "bug")
VERBS = ("wrote", "read", "called", "found", "moved", "used")
STORIES = 4000
SETTINGS: dict[str, Any] = {
    "hidden": 32,
    "heads": 4,
    "vocab_size": 1024,
    "seq_length": 32,
    "init_std": 0.11,
    "global_batch_size": 8,
    "micro_batch_size": 8,
    "lr_schedule": "constant",
    "warmup_steps": 10,
    "record_events": False,
}
"""Overrides of `bert_tiny` that all runs share."""


def stories(count: int) -> str:
    """Documents of 3 to 6 sentences; the noun at the end of a sentence begins the next, and tells its own verb."""
    draw, told = random.Random(19), []
    for _ in range(count):
        chain = [draw.choice(NOUNS)]
        for _ in range(draw.randint(3, 6)):
            chain.append(draw.choice([noun for noun in NOUNS if noun != chain[-1]]))
        pairs = pairwise(chain)
        told.append(" ".join(f"The {a} {VERBS[NOUNS.index(a) % len(VERBS)]} the {b}." for a, b in pairs))
    return "\n\n".join(told) + "\n"


def config(text: Path, layers: int, placement: str, lr: float, seed: int, steps: int) -> RunConfig:
    """One run; `text` is the file of the stories."""
    own = {"layers": layers, "model.norm_placement": placement, "lr": lr, "train.seed": seed, "steps": steps}
    files = {"data.path": str(text), "data.tokenizer": str(BUNDLED / "vocab.txt")}
    return presets.bert_tiny().override(SETTINGS | files | own)


def measured(run: RunConfig) -> dict[str, Any]:
    """Losses of the masked words and gradient norms before clipping, by step."""
    start, result = time.monotonic(), pretrain(run)
    return {
        "layers": run.model.layers,
        "placement": run.model.norm_placement,
        "lr": run.optim.lr,
        "seed": run.train.seed,
        "lm_loss": [round(loss, 4) for _, loss in result.series("lm_loss")],
        "grad_norm": [round(norm, 3) for _, norm in result.series("grad_norm")],
        "seconds": round(time.monotonic() - start),
        "commit": provenance.origin()["commit"],
        "changed": provenance.origin()["changed"],
        "machine": provenance.machine_in_words(provenance.machine()),
    }


def key(row: dict[str, Any]) -> tuple[int, float, int, str]:
    """The order of the rows, and what makes two rows runs of one configuration."""
    return row["layers"], -row["lr"], row["seed"], row["placement"]


def keep(row: dict[str, Any], out: Path, text: str) -> None:
    """Add a row to the file, in the place of an earlier one of the same configuration."""
    head = {"settings": SETTINGS, "text_sha256": hashlib.sha256(text.encode()).hexdigest()}
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    others = [other for other in rows if key(other) != key(row)]
    out.write_text(json.dumps({**head, "rows": sorted([*others, row], key=key)}) + "\n")


def main() -> None:
    """Run all, and write the file after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 24])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seed", type=int, nargs="+", default=[1234])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=TARGET)
    given, text = parser.parse_args(), stories(STORIES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stories.txt"
        path.write_text(text)
        for layers, lr, seed, placement in product(given.layers, given.lr, given.seed, ("post", "pre")):
            row = measured(config(path, layers, placement, lr, seed, given.steps))
            keep(row, given.out, text)
            last, most = row["lm_loss"][-100:], max(row["grad_norm"][100:], default=0)
            words = f"{layers} layers, lr {lr:g}, seed {seed}, {placement}"
            print(f"{words}: loss {sum(last) / len(last):.3f}, gradient norm at most {most:g}", flush=True)


if __name__ == "__main__":
    main()
