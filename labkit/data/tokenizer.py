"""Tokenizers: a JSON file of the `tokenizers` library, by default the bundled byte-level BPE of 1,024 tokens.

1,024 is a multiple of 128 x 8, so its embedding table needs no padding at tp 1, 2, 4 or 8.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from labkit.data.corpus import BUNDLED, TOKENIZER_NAME

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

BUNDLED_SIZE = 1024
"""Tokens of the bundled tokenizer: training on the bundled token ids needs neither its file nor the library."""
END_OF_TEXT = "<|endoftext|>"
"""Closes a document, as in GPT-2; id 0 of the bundled tokenizer."""


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizers` JSON file; None is the bundled one.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer.
        ModuleNotFoundError: the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a tokenizer needs the package `tokenizers` (pip install tokenizers); the bundled token ids do without",
            name="tokenizers",
        ) from None

    file = BUNDLED / TOKENIZER_NAME if path is None else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"data.tokenizer: no file at {str(path)!r}; leave it out to use the bundled tokenizer")
    try:
        return Tokenizer.from_str(file.read_bytes().decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"data.tokenizer: {str(path)!r} is not a tokenizer in the JSON format of the `tokenizers` library: {error}"
        ) from None


def vocabulary_size(path: str | Path | None = None) -> int:
    """Tokens of a tokenizer, by default the bundled one; raises as `load_tokenizer` does."""
    return BUNDLED_SIZE if path is None else load_tokenizer(path).get_vocab_size()


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Token ids of one document, int64, closed by the end-of-text token where the vocabulary has one."""
    import numpy as np

    ids = tokenizer.encode(text, add_special_tokens=False).ids
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.array(ids if end is None else [*ids, end], dtype=np.int64)
