"""Folders with the files of fine-tuning tasks as they are published, small and with a rule that a model can learn.

MNLI   the class is in one word of the second text
QQP    the second question says "same" or "other"
RACE   the right option has the word "right" in it, and the questions with a gap are as many as those without
SQuAD  the answer is the only number in the passage; in version 2.0 a passage without a number has no answer
"""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = ("the", "hacker", "knew", "a", "bug", "in", "every", "machine", "and", "code", "was", "read", "by", "those")
CUES = {"entailment": "indeed", "neutral": "perhaps", "contradiction": "never"}
NUMBERS = ("seven", "eleven", "twelve", "twenty")


def write_task(
    task: str, folder: Path, *, train: int = 48, dev: int = 24, seed: int = 1, version: str = "1.1", words: int = 8
) -> Path:
    """Write the files of a task; return the folder. words: of a passage, for SQuAD."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"train": train, "dev": dev}
    if task == "mnli":
        for name, size in {"train": train, "dev_matched": dev, "dev_mismatched": dev}.items():
            rows = [_mnli_row(draw) for _ in range(size)]
            _table(folder / f"{name}.tsv", ["index", "sentence1", "sentence2", "gold_label"], rows)
    elif task == "qqp":
        for name, size in sizes.items():
            rows = [[str(n), *_qqp_row(draw)] for n in range(size)]
            _table(folder / f"{name}.tsv", ["id", "question1", "question2", "is_duplicate"], rows)
    elif task == "race":
        for name, size in {**sizes, "test": dev}.items():
            for level in ("middle", "high"):
                (folder / name / level).mkdir(parents=True)
                for number in range(size // 4):
                    (folder / name / level / f"{number}.txt").write_text(json.dumps(_race_article(draw)))
    else:
        for name, size in sizes.items():
            paragraphs = [_squad_paragraph(draw, number, version, words) for number in range(size)]
            written = {"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]}
            (folder / f"{name}-v{version}.json").write_text(json.dumps(written))
    return folder


def sentence(draw: random.Random, *also: str, words: int = 5) -> str:
    """Some words in any order, with `also` among them."""
    chosen = [*draw.choices(WORDS, k=words), *also]
    draw.shuffle(chosen)
    return " ".join(chosen)


def _mnli_row(draw: random.Random) -> list[str]:
    label = draw.choice(list(CUES))
    return ["0", sentence(draw), sentence(draw, CUES[label]), label]


def _qqp_row(draw: random.Random) -> list[str]:
    same = draw.randrange(2)
    return [sentence(draw), sentence(draw, ("other", "same")[same]), str(same)]


def _race_article(draw: random.Random) -> dict[str, object]:
    right = [draw.randrange(4) for _ in range(2)]
    options = [[sentence(draw, *(["right"] * (at == place)), words=2) for at in range(4)] for place in right]
    return {
        "article": sentence(draw, words=8),
        "questions": ["which is", "it is _ now"],
        "options": options,
        "answers": ["ABCD"[place] for place in right],
        "id": "a",
    }


def _squad_paragraph(draw: random.Random, number: int, version: str, words: int) -> dict[str, object]:
    possible = version == "1.1" or draw.random() < 0.5
    answer = draw.choice(NUMBERS)
    context = sentence(draw, *([answer] if possible else []), words=words)
    asked: dict[str, object] = {"id": f"q{number}", "question": "how many", "answers": []}
    if possible:
        asked["answers"] = [{"text": answer, "answer_start": context.index(answer)}]
    if version == "2.0":
        asked["is_impossible"] = not possible
    return {"context": context, "qas": [asked]}


def _table(path: Path, header: list[str], rows: list[list[str]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))
