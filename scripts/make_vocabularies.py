"""Make the vocabularies and the sample under labkit/data/bundled from the bundled text: GPT-2's two files, BERT's one.

    python scripts/make_vocabularies.py [--output FOLDER]

`vocab.json` and `merges.txt` are the bundled byte-level BPE in the form of GPT-2's files, so both give the same ids.
`vocab.txt` is a WordPiece vocabulary of 1,024 tokens for lower-case text, trained on the bundled text. Both are small:
they are for tests, examples and the formats. `sample.jsonl` has the first entries of the text, an entry a line, as
documents for `labkit data prepare`. A test compares their digests with those in labkit/data/text.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from labkit.data.documents import borders_of
from labkit.data.text import BUNDLED, BUNDLED_SHA256, TOKENIZER_NAME, bundled_text

VOCAB_SIZE, ENTRIES = 1024, 200
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""The first tokens of BERT's own vocabularies, in their order."""


def byte_level_files() -> dict[str, str]:
    """`vocab.json` and `merges.txt` of the bundled tokenizer."""
    model = json.loads((BUNDLED / TOKENIZER_NAME).read_text())["model"]
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    vocabulary = json.dumps(model["vocab"], ensure_ascii=False, separators=(",", ":"))
    return {"vocab.json": vocabulary + "\n", "merges.txt": "\n".join(["#version: 0.2", *pairs, ""])}


def word_pieces(text: str) -> str:
    """A `vocab.txt`: one token a line, special ones first.

    Letters have fixed ids: by default the library orders them as its hash table does, and equal counts follow the ids.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    letters = sorted(set(tokenizer.normalizer.normalize_str(text)) - set(" \n"))
    first = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters if letter.isalnum() or ord(letter) > 127)]
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=first, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    ids = tokenizer.get_vocab()
    return "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__))


def sample(text: str) -> str:
    """The first entries of the text as JSON lines."""
    ends = borders_of(text)[1][:ENTRIES]
    entries = (text[start:end].strip() for start, end in pairwise([0, *ends]))
    return "".join(json.dumps({"text": entry}, ensure_ascii=False) + "\n" for entry in entries)


def files() -> dict[str, str]:
    """Name -> content of all files."""
    text = bundled_text()
    return {**byte_level_files(), "vocab.txt": word_pieces(text), "sample.jsonl": sample(text)}


def main() -> None:
    """Write the four files and print the digests that labkit/data/text.py must name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=BUNDLED, help="folder for the four files")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content.encode())
        digest = hashlib.sha256(content.encode()).hexdigest()
        print(f"{digest}  {name}  {'as expected' if digest == BUNDLED_SHA256.get(name) else 'DIFFERS from text.py'}")


if __name__ == "__main__":
    main()
