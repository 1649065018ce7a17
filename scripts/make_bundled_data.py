"""Make everything under labkit/data/bundled from Debian's dict-jargon package. Same bytes on every machine.

    python scripts/make_bundled_data.py dict-jargon_4.4.7-3.1_all.deb

Three files: the text, a byte-level BPE tokenizer trained on it, and the text's token ids (so that a rank starts
without tokenising 1.4 MB). The package is at https://deb.debian.org/debian/pool/main/d/dict-jargon/ and, for good, at
https://snapshot.debian.org/package/dict-jargon/4.4.7-3.1/. Needs only Python, numpy and `tokenizers`: a .deb is an `ar`
archive, so dpkg is not required.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from labkit.data.text import BUNDLED, BUNDLED_SHA256, END_OF_TEXT, TEXT_NAME, TOKENIZER_NAME, TOKENS_NAME, encode

PACKAGE_SHA256 = "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1"
DICTIONARY = "./usr/share/dictd/jargon.dict.dz"
FIRST_ENTRY = "(TM)\n //\n"
ALPHABET_LINE = "\n !$&'()*+,-./"
VOCAB_SIZE = 1024


def read_ar(archive: bytes) -> dict[str, bytes]:
    """Members of a Unix `ar` archive: 60-byte headers (name 16, ..., size 10 from byte 48), data on even offsets."""
    assert archive.startswith(b"!<arch>\n"), "not an ar archive"
    members, at = {}, 8
    while at < len(archive):
        name, size = archive[at : at + 16].decode().strip().rstrip("/"), int(archive[at + 48 : at + 58])
        members[name] = archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return members


def text_of_package(package: bytes) -> str:
    """The dictionary's entries, without the header and the alphabet line that dictfmt put around them."""
    digest = hashlib.sha256(package).hexdigest()
    if digest != PACKAGE_SHA256:
        raise SystemExit(f"this package has SHA-256 {digest}, not {PACKAGE_SHA256} (dict-jargon 4.4.7-3.1)")
    with tarfile.open(fileobj=io.BytesIO(read_ar(package)["data.tar.xz"])) as data:
        member = data.extractfile(DICTIONARY)
        assert member is not None
        text = gzip.decompress(member.read()).decode("utf-8")
    return text[text.index(FIRST_ENTRY) : text.rindex(ALPHABET_LINE)]


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are in the alphabet, so any text encodes and decodes without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def main() -> None:
    """Write the three files and print the digests that labkit/data/text.py must name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="dict-jargon_4.4.7-3.1_all.deb")
    parser.add_argument("--output", type=Path, default=BUNDLED, help="folder for the three files")
    arguments = parser.parse_args()

    text = text_of_package(arguments.package.read_bytes())
    tokenizer = train_tokenizer(text)
    tokens = io.BytesIO()
    np.save(tokens, encode(tokenizer, text).astype("<u2"))

    arguments.output.mkdir(parents=True, exist_ok=True)
    files = {TEXT_NAME: text.encode(), TOKENIZER_NAME: tokenizer.to_str().encode(), TOKENS_NAME: tokens.getvalue()}
    for name, content in files.items():
        (arguments.output / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        print(f"{digest}  {name}  {'as expected' if digest == BUNDLED_SHA256[name] else 'DIFFERS from corpus.py'}")


if __name__ == "__main__":
    main()
