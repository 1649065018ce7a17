"""Texts, tokenizers and token ids: files of the user, or by default the Jargon File, which is in the public domain.

`bundled/PROVENANCE.md` names the source of the text; `scripts/make_bundled_data.py` and `scripts/make_vocabularies.py`
make the files, byte for byte. The token ids are bundled, too, because tokenising 1.4 MB would cost every rank of every
launch half a second. The bundled tokenizer is a byte-level BPE of 1,024 tokens in the JSON format of `tokenizers`.
This size is a multiple of 128 x 8, so the embedding table needs no padding at tp 1, 2, 4 or 8. Other tokenizers come
from a file: GPT-2's, BERT's, or JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config.errors import no_file, shown

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
    "sample.jsonl": "6675bb1f858a3c4f5fa081561f40cd0f357dc203f1aeac192d49be587906f71b",
}
"""SHA-256 of each file, the same on every machine; a test compares them."""


def bundled_text() -> str:
    """Return the Jargon File 4.4.7, 1.4 MB of English, with its entries in alphabetical order."""
    return (BUNDLED / TEXT_NAME).read_bytes().decode("utf-8")


def bundled_tokens() -> np.ndarray:
    """Return the bundled text in the bundled tokenizer's ids, uint16, ending in the end-of-text token."""
    import numpy as np

    return np.load(BUNDLED / TOKENS_NAME, allow_pickle=False)


def decode_utf8(data: bytes) -> str:
    """Return the UTF-8 text without its byte order mark, if it has one; no other byte changes.

    Raises UnicodeDecodeError, also if one of the first four bytes is zero, because UTF-16 without a mark can be valid
    UTF-8.
    """
    if (zero := data[:4].find(0)) >= 0:
        raise UnicodeDecodeError("utf-8", data, zero, zero + 1, "a zero byte, as in UTF-16")
    return data.decode("utf-8").removeprefix("\ufeff")


def read_text(path: str | Path, field: str = "data.path") -> str:
    """Read a UTF-8 text file, with or without a byte order mark, and keep every other byte (line ends included).

    field: the field or option that names the file, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8; the message names the first wrong byte and its position.
    """
    path = Path(path)
    if not path.is_file():
        name = shown(str(path), 200)
        raise FileNotFoundError(f"{field} {name}: {no_file(path)}; leave it out to use the bundled text")
    try:
        return decode_utf8(path.read_bytes())
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise ValueError(
            f"{field}: {str(path)!r} is not UTF-8 (byte 0x{bad:02x} at position {error.start}); "
            "convert it, for example with `iconv -t utf-8`"
        ) from None


def read_lines(path: str | Path, field: str) -> list[str]:
    r"""Return the lines of a UTF-8 file, without their ends `\n` or `\r\n`. Raises as `read_text` does.

    `str.splitlines` would also cut at characters such as U+2028, form feed and U+0085, which a line may contain.
    """
    lines = read_text(path, field).split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def whole_characters(text: str) -> str:
    r"""Return `text`. Raises ValueError for half a surrogate pair, which JSON can write (`\ud800`) but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair, U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"has {half}, which is not a character; correct the text") from None
    return text


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises what `json.loads` does, and ValueError if an object has a name twice with
    different values, because `json` would silently drop the first."""
    return json.loads(text, object_pairs_hook=_said_once)


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found and found[name] != value:
            twice = f"twice, as {shown(found[name])} and as {shown(value)}"
            raise ValueError(f"has the field {shown(name)} {twice}; remove one")
        found[name] = value
    return found


# ---- tokenizers ----

BUNDLED_SIZE = 1024
"""Tokens of the bundled tokenizer, so that training on the bundled ids needs neither its file nor the library."""
END_OF_TEXT = "<|endoftext|>"
"""The token that closes a document, as in GPT-2; id 0 of the bundled tokenizer."""
END_TOKENS = (
    END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "<|end|>", "[EOS]",
)  # fmt: skip
"""Names of tokens that end a text, where no file says which one does. The first that a vocabulary has closes documents;
if it has none of them, BERT's `[SEP]` does."""
RARE = "\U0002a6a5"
"""A character that hardly any vocabulary has: four dragons, among the ideographs of Unicode."""
SPECIAL_TOKENS = ("[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]")
"""BERT's tokens that stand for no text."""


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """Return the tokenizer of a file; None is the bundled tokenizer. The file's name says of which kind it is.

    `vocab.json`: GPT-2's byte-level BPE, with `merges.txt` next to it (`gpt2-vocab.json` has `gpt2-merges.txt`).
    `vocab.txt`: BERT's WordPiece, one token per line, `##` before parts that continue a word. It lowercases the text if
    `tokenizer_config.json` next to it says so, or, where that says nothing, if no token has a capital. Any other name:
    a JSON file of the library `tokenizers`.

    Every text must become all of its own tokens, and the same ones each time. So truncation, padding, BPE-dropout and
    the template of added tokens are switched off, whatever the file stores.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer, has no token or two with the same id, or cannot encode unknown text.
        ModuleNotFoundError: the library is not installed.
    """
    try:
        from tokenizers import Tokenizer, models
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a tokenizer needs the package `tokenizers` (pip install tokenizers); the bundled token ids do not",
            name="tokenizers",
        ) from None

    file = BUNDLED / TOKENIZER_NAME if path is None else Path(path)
    if not file.is_file():
        name = shown(str(path), 200)
        raise FileNotFoundError(f"data.tokenizer {name}: {no_file(file)}; leave it out to use the bundled tokenizer")
    if file.name.endswith("vocab.json"):
        tokenizer = _byte_level(file)
    elif file.name.endswith("vocab.txt"):
        tokenizer = _word_piece(file)
    else:
        try:
            parse_json(text := decode_utf8(file.read_bytes()))
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"data.tokenizer: {str(path)!r} is not a tokenizer in the JSON format of the `tokenizers` library: "
                f"{error}"
            ) from None
    if not 0 < (size := size_of(tokenizer)) <= 2**31:
        found = f"the id {size - 1:,}" if size else "no token"
        raise ValueError(f"data.tokenizer: {str(path)!r} has {found}; give a vocabulary with ids from 0 to 2^31 - 1")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    if fault := _fault(tokenizer):
        raise ValueError(f"data.tokenizer: {str(path)!r} {fault}")
    return tokenizer


def _fault(tokenizer: Tokenizer) -> str:
    """Return why a tokenizer cannot give every text its own tokens; an empty string if it can."""
    from tokenizers import models, pre_tokenizers

    vocabulary, model = tokenizer.get_vocab(), tokenizer.model
    [(number, times)] = Counter(vocabulary.values()).most_common(1)
    if times > 1:
        tokens = [shown(token) for token in sorted(vocabulary) if vocabulary[token] == number]
        return f"has {times} tokens with the id {number}, such as {' and '.join(tokens[:2])}; give each its own"
    try:
        lost = "" if tokenizer.encode(RARE).ids else "it leaves such text out"
    except Exception as error:  # the library raises bare Exception
        lost = str(error)
    if not lost and isinstance(model, models.BPE) and model.unk_token not in vocabulary:
        forms = pre_tokenizers.ByteLevel.alphabet(), [f"<0x{byte:02X}>" for byte in range(256)]
        lacks = [sorted({*form} - vocabulary.keys()) for form in forms[: 1 + model.byte_fallback]]
        if missing := min(lacks, key=len):
            lost = f"it lacks {len(missing)} of the 256 bytes, such as {shown(missing[0])}"
    advice = "add the token that it names for unknown text, or all bytes"
    return f"cannot encode what its vocabulary does not have ({lost}); {advice}" if lost else ""


def _byte_level(vocabulary: Path) -> Tokenizer:
    """Return GPT-2's tokenizer, made from `vocab.json` and `merges.txt`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = vocabulary.with_name(vocabulary.name.removesuffix("vocab.json") + "merges.txt")
    if not merges.is_file():
        raise FileNotFoundError(f"data.tokenizer: {str(vocabulary)!r} needs {merges.name} next to it, which is missing")
    try:
        ids = dict(parse_json(decode_utf8(vocabulary.read_bytes())))
        whole_characters("".join(ids))
        for token, number in ids.items():
            if type(number) is not int:
                raise ValueError(f"the token {shown(token)} has the id {shown(number)}, which is not an integer")
        lines = read_lines(merges, "data.tokenizer")
        parted = (line.split(" ") for line in lines if line and not line.startswith("#version"))
        pairs = [(first, second) for first, second in parted]
        tokenizer = Tokenizer(models.BPE(ids, pairs))
    except Exception as error:
        raise ValueError(
            f"data.tokenizer: {str(vocabulary)!r} and {merges.name} are not a vocabulary and merges of GPT-2: {error}"
        ) from None
    [prefix] = _beside(vocabulary, "tokenizer_config.json", bool, "add_prefix_space")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in END_TOKENS if tokenizer.token_to_id(token) is not None])
    return tokenizer


def _word_piece(vocabulary: Path) -> Tokenizer:
    """Return BERT's tokenizer, made from `vocab.txt`."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    lines = read_lines(vocabulary, "data.tokenizer")
    ids = {token: number for number, token in enumerate(lines)}
    special = [token for token in SPECIAL_TOKENS if token in ids]
    if "[UNK]" not in ids or len(ids) < len(lines):
        wrong = "has a token twice" if "[UNK]" in ids else "has no [UNK]"
        raise ValueError(f"data.tokenizer: {str(vocabulary)!r} {wrong}; a WordPiece vocabulary has one token per line")
    lowers = not any(token != token.lower() for token in lines if token not in special and token[:1] != "[")
    options = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
    told, strips, chinese = _beside(vocabulary, "tokenizer_config.json", bool, *options)
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowers if told is None else told, strip_accents=strips, handle_chinese_chars=chinese is not False
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _beside(file: Path, name: str, kind: type, *fields: str) -> list[Any]:
    """Return fields of the JSON object in the file `name` next to a tokenizer's file; None for one that is not there.

    kind: type of the values. Integers may come in a list, and a token's text in an object that says more about it.
    """
    path = file.with_name(name)
    if not path.is_file():
        return [None] * len(fields)
    words = {bool: "true or false", str: "text", int: "an integer or a list of integers"}
    try:
        read = dict(parse_json(decode_utf8(path.read_bytes())))
        found = [read.get(field) for field in fields]
        if kind is str:
            found = [each["content"] if isinstance(each, dict) and "content" in each else each for each in found]
        for field, value in zip(fields, found):
            values: list[Any] = value if kind is int and isinstance(value, list) else [value]
            if value is not None and not all(type(each) is kind for each in values):
                raise ValueError(f"{field} is {shown(value)}, and must be {words[kind]}")
            if isinstance(value, str):
                whole_characters(value)
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"data.tokenizer: {str(path)!r} cannot be read ({error}); repair or remove it") from None


def size_of(tokenizer: Tokenizer) -> int:
    """Return the rows that a tokenizer's ids need: the largest id plus 1, more than the tokens if the ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def vocabulary_size(path: str | Path | None = None) -> int:
    """Return `size_of` the tokenizer of a file, by default the bundled one; raises as `load_tokenizer` does."""
    return BUNDLED_SIZE if path is None else size_of(load_tokenizer(path))


def end_tokens(tokenizer: Tokenizer, path: str | Path | None = None) -> list[int]:
    """Return the ids of the tokens that end a text, of which the first closes documents; empty if there are none.

    path: the tokenizer's file; None is the bundled one. Hugging Face's files next to it decide if they name an end. The
    `eos_token` of `tokenizer_config.json`, or else `special_tokens_map.json`, is the first. Each `eos_token_id` of
    `generation_config.json`, or else `config.json`, follows. Without them all names of `END_TOKENS` count.

    Raises ValueError for an `eos_token` or `eos_token_id` that the tokenizer does not have, or of another type.
    """
    file, found = BUNDLED / TOKENIZER_NAME if path is None else Path(path), list[int]()
    for kind, field, names in (
        (str, "eos_token", ("tokenizer_config.json", "special_tokens_map.json")),
        (int, "eos_token_id", ("generation_config.json", "config.json")),
    ):
        given = ((name, *_beside(file, name, kind, field)) for name in names)
        for source, ends in [each for each in given if each[1] is not None][:1]:
            for end in ends if isinstance(ends, list) else [ends]:
                number = tokenizer.token_to_id(end) if kind is str else end
                if number is None or not 0 <= number < 2**32 or tokenizer.id_to_token(number) is None:
                    raise ValueError(
                        f"data.tokenizer: {source} next to {str(file)!r} names the end token {shown(end)}, which the "
                        "tokenizer does not have; give the tokenizer.json that belongs to it, or correct one of the two"
                    )
                found.append(number)
    return list(dict.fromkeys(found)) or _ids(tokenizer, END_TOKENS) or _ids(tokenizer, ["[SEP]"])


def _ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """Return the ids of those names that the vocabulary has."""
    return [number for name in names if (number := tokenizer.token_to_id(name)) is not None]


def end_token(tokenizer: Tokenizer, path: str | Path | None = None) -> int | None:
    """Return the id of the token that closes a document, the first of `end_tokens`; None if there is none."""
    return next(iter(end_tokens(tokenizer, path)), None)


def encode(tokenizer: Tokenizer, text: str, path: str | Path | None = None) -> np.ndarray:
    """Return the token ids of one document, int64, the end token last if there is one; `path` as in `end_tokens`."""
    import numpy as np

    ids, end = tokenizer.encode(text).ids, end_token(tokenizer, path)
    return np.array(ids if end is None else [*ids, end], dtype=np.int64)


def located_tokens(path: str | Path | None, tokenizer: str | Path | None) -> tuple[str, np.ndarray, np.ndarray]:
    """Return a text, its token ids without an end token, and the character of the text at which each token begins.

    path: None is the bundled text. tokenizer: None is the bundled tokenizer. Both together need no library, because
    each character of a byte-level vocabulary stands for a byte of the text.

    Raises:
        FileNotFoundError, ValueError, ModuleNotFoundError: see `read_text` and `load_tokenizer`.
    """
    import numpy as np

    text = bundled_text() if path is None else read_text(path)
    if path is not None or tokenizer is not None:
        encoding = load_tokenizer(tokenizer).encode(text)
        return text, np.array(encoding.ids, dtype=np.int64), np.array([begin for begin, _ in encoding.offsets])
    vocabulary = json.loads((BUNDLED / TOKENIZER_NAME).read_bytes())["model"]["vocab"]
    lengths = np.zeros(BUNDLED_SIZE, dtype=np.int64)
    lengths[list(vocabulary.values())] = list(map(len, vocabulary))
    tokens = bundled_tokens()[:-1]
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    first_byte = np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000))  # of the next character
    return text, tokens, np.searchsorted(first_byte, np.cumsum(lengths[tokens]) - lengths[tokens], side="right")
