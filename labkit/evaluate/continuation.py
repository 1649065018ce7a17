"""The text that new tokens add to a prompt, as it grows.

The texts of single tokens do not add up to the text of all of them, because a Llama's tokenizer drops the blank before
the first token that it decodes, and several tokens can hold the bytes of one character. So a continuation is the text
of all tokens without the text of the prompt's tokens. A token whose text ends inside a character waits for the next
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Continuation:
    """The text after one prompt. `"".join` of everything that `add` and `rest` return is the whole of it."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        """decode: returns the text of token ids, such as `tokenizer.decode`. prompt: ids of the prompt."""
        self._decode, self._ids, self._waiting = decode, list(prompt), list[int]()
        self._text = decode(self._ids)

    def add(self, token: int) -> str:
        """Return the text that this token completes, empty while the bytes of a character are not all there."""
        self._waiting.append(token)
        return "" if self._decode(self._ids + self._waiting).endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """Return the text of the tokens that wait, complete or not."""
        whole = self._decode(self._ids + self._waiting)
        # with byte fallback a wrong byte also changes the characters before it, which are out already
        new = whole[len(self._text) :] if whole.startswith(self._text) else self._decode(self._waiting)
        self._ids, self._waiting, self._text = self._ids + self._waiting, [], whole
        return new
