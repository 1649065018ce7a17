"""Texts, tokenizers and token ids: files of the user, or by default the Jargon File, which is in the public domain.

`bundled/PROVENANCE.md` names the source of the text; `scripts/make_bundled_data.py` and `scripts/make_vocabularies.py`
make the files, byte for byte. The token ids are bundled too: to tokenise 1.4 MB would cost every rank of every launch
half a second. The bundled tokenizer is a byte-level BPE of 1,024 tokens, as a JSON file of the `tokenizers` library.
This size is a multiple of 128 x 8, so the embedding table needs no padding at tp 1, 2, 4 or 8. Other tokenizers come
from a file: GPT-2's, BERT's, or JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer


# ---- texts ----

BUNDLED = Path(__file__).parent / "bundled"
TEXT_NAME = "jargon.txt"
TOKENIZER_NAME = "tokenizer.json"
TOKENS_NAME = "jargon_tokens.npy"

BUNDLED_SHA256 = {
    TEXT_NAME: "474386a96eee23444ae3791468bbf32bbd7f869464957a3bf10722d4b01ceb6b",
    TOKENIZER_NAME: "2aaa4cc46e4b29aa5c5381a42737cc3e2f05e8832865469f6475185c2078ea53",
    TOKENS_NAME: "c7d49c79d21353b49796caac57f5d3f30bb85b2cd41f2e86b39eaf8ee084bfa4",
    "vocab.json": "f5d97ca459cc5686115756d50d994f108e1a16d5396f125d08e6ce6c2410cf7b",
    "merges.txt": "7c02859b1c074df1fe84f3094c8c58e91ab2fa44e1111b707c34e503975c56a6",
    "vocab.txt": "2631768767c5bb2d4f0e297f55f926fd5cf06ea9c651ebfdeae1fe4abf21c406",
}
"""SHA-256 of each file, the same on every machine; a test compares them."""


def bundled_text() -> str:
    """The Jargon File 4.4.7, 1.4 MB of English, entries in alphabetical order."""
    return (BUNDLED / TEXT_NAME).read_bytes().decode("utf-8")


def bundled_tokens() -> np.ndarray:
    """The bundled text in the bundled tokenizer's ids, uint16, ending in the end-of-text token."""
    import numpy as np

    return np.load(BUNDLED / TOKENS_NAME, allow_pickle=False)


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file without changing a byte of it (line ends included).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8; the message names the first wrong byte and its position.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"data.path: no text file at {str(path)!r}; leave it out to use the bundled text")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise ValueError(
            f"data.path: {str(path)!r} is not UTF-8 (byte 0x{bad:02x} at position {error.start}); "
            "convert it, for example with `iconv -t utf-8`"
        ) from None


# ---- tokenizers ----

BUNDLED_SIZE = 1024
"""Tokens of the bundled tokenizer; training on the bundled ids then needs neither its file nor the library."""
END_OF_TEXT = "<|endoftext|>"
"""The token that closes a document, as in GPT-2; id 0 of the bundled tokenizer."""


END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names of the token that closes a document, the first that a vocabulary has counts."""
SPECIAL_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
"""BERT's tokens that stand for no text."""


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """Return the tokenizer of a file; None is the bundled tokenizer. The ending of its name says what it is.

    `vocab.json`: GPT-2's byte-level BPE, with `merges.txt` beside it (`gpt2-vocab.json` has `gpt2-merges.txt`).
    `vocab.txt`: BERT's WordPiece, a token a line, `##` before parts that continue a word. It lowers the text if no
    token has a capital. Any other name: a JSON file of the library `tokenizers`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer.
        ModuleNotFoundError: the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a tokenizer needs the package `tokenizers` (pip install tokenizers); the bundled token ids do not",
            name="tokenizers",
        ) from None

    file = BUNDLED / TOKENIZER_NAME if path is None else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"data.tokenizer: no file at {str(path)!r}; leave it out to use the bundled tokenizer")
    if file.name.endswith("vocab.json"):
        return _byte_level(file)
    if file.name.endswith("vocab.txt"):
        return _word_piece(file)
    try:
        return Tokenizer.from_str(file.read_bytes().decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"data.tokenizer: {str(path)!r} is not a tokenizer in the JSON format of the `tokenizers` library: {error}"
        ) from None


def _byte_level(vocabulary: Path) -> Tokenizer:
    """GPT-2's tokenizer from `vocab.json` and `merges.txt`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = vocabulary.with_name(vocabulary.name.removesuffix("vocab.json") + "merges.txt")
    if not merges.is_file():
        raise FileNotFoundError(
            f"data.tokenizer: {str(vocabulary)!r} needs {merges.name} beside it, which is not there"
        )
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:
        raise ValueError(
            f"data.tokenizer: {str(vocabulary)!r} and {merges.name} are no vocabulary and merges of GPT-2: {error}"
        ) from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in END_TOKENS if tokenizer.token_to_id(token) is not None])
    return tokenizer


def _word_piece(vocabulary: Path) -> Tokenizer:
    """BERT's tokenizer from `vocab.txt`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    try:
        lines = vocabulary.read_bytes().decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"data.tokenizer: {str(vocabulary)!r} is not UTF-8: {error.reason}") from None
    ids = {token: number for number, token in enumerate(lines)}
    special = [token for token in SPECIAL_TOKENS if token in ids]
    if "[UNK]" not in ids or len(ids) < len(lines):
        wrong = "has a token twice" if "[UNK]" in ids else "has no [UNK]"
        raise ValueError(f"data.tokenizer: {str(vocabulary)!r} {wrong}; a WordPiece vocabulary has one token a line")
    lowers = not any(token != token.lower() for token in lines if token not in special and token[:1] != "[")
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def vocabulary_size(path: str | Path | None = None) -> int:
    """Number of tokens of a tokenizer, by default the bundled one; raises as `load_tokenizer` does."""
    return BUNDLED_SIZE if path is None else load_tokenizer(path).get_vocab_size()


def end_token(tokenizer: Tokenizer) -> int | None:
    """Id of the token that closes a document; None where the vocabulary has none of `END_TOKENS`."""
    return next((end for name in END_TOKENS if (end := tokenizer.token_to_id(name)) is not None), None)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of one document, int64, with the end-of-text token last if the vocabulary has one."""
    import numpy as np

    ids, end = tokenizer.encode(text, add_special_tokens=False).ids, end_token(tokenizer)
    return np.array(ids if end is None else [*ids, end], dtype=np.int64)


def located_tokens(path: str | Path | None, tokenizer: str | Path | None) -> tuple[str, np.ndarray, np.ndarray]:
    """A text, its token ids without an end token, and the character of the text at which each token begins.

    None reads the bundled text, and takes the bundled tokenizer. Both together need no library: each character of a
    byte-level vocabulary stands for a byte of the text.

    Raises:
        FileNotFoundError, ValueError, ModuleNotFoundError: see `read_text` and `load_tokenizer`.
    """
    import numpy as np

    text = bundled_text() if path is None else read_text(path)
    if path is not None or tokenizer is not None:
        encoding = load_tokenizer(tokenizer).encode(text, add_special_tokens=False)
        return text, np.array(encoding.ids, dtype=np.int64), np.array([begin for begin, _ in encoding.offsets])
    vocabulary = json.loads((BUNDLED / TOKENIZER_NAME).read_bytes())["model"]["vocab"]
    lengths = np.zeros(BUNDLED_SIZE, dtype=np.int64)
    lengths[list(vocabulary.values())] = list(map(len, vocabulary))
    tokens = bundled_tokens()[:-1]
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    first_byte = np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000))  # of the next character
    return text, tokens, np.searchsorted(first_byte, np.cumsum(lengths[tokens]) - lengths[tokens], side="right")
