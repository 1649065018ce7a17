"""The text that labkit trains on where nobody names another: the Jargon File, in the public domain.

`bundled/PROVENANCE.md` says where it comes from; `scripts/make_bundled_data.py` makes it, byte for byte. The token ids
are bundled too, because tokenising 1.4 MB takes half a second, and every rank of every launch would spend it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

BUNDLED = Path(__file__).parent / "bundled"
TEXT_NAME = "jargon.txt"
TOKENIZER_NAME = "tokenizer.json"
TOKENS_NAME = "jargon_tokens.npy"

BUNDLED_SHA256 = {
    TEXT_NAME: "474386a96eee23444ae3791468bbf32bbd7f869464957a3bf10722d4b01ceb6b",
    TOKENIZER_NAME: "2aaa4cc46e4b29aa5c5381a42737cc3e2f05e8832865469f6475185c2078ea53",
    TOKENS_NAME: "c7d49c79d21353b49796caac57f5d3f30bb85b2cd41f2e86b39eaf8ee084bfa4",
}
"""What the files are on every machine; a test holds them against it."""


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
        ValueError: it is not UTF-8; names the first offending byte and its position.
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
