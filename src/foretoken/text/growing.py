"""Text of ids that come one by one, whatever the tokenizer: what was given out stays given out.

Owns the few newest ids, whose text may depend on each other; knows no stop strings and no requests.
Invariants: no sequence of ids makes it raise; the pieces together are the text that the tokenizer
gives for all ids at once, unless it takes back a part that was given out. Byte tokens do that: a
newline is one, and a tokenizer with byte fallback turns it into a replacement character if the
bytes after it are no UTF-8. Then the given part stays and the rest is decoded without it.
"""

from collections.abc import Callable, Sequence
from typing import final

_UNREADABLE = "\ufffd"
"""The replacement character: bytes that are no character, or not yet."""
_CONTEXT = 4
"""Ids that are kept, at least one piece of text: dropping some takes a second decoding."""
_LONGEST = 64
"""Ids without a readable text that are decoded again with every new one."""
_HEAD, _TAIL = 8, 24
"""How many of those are enough to know that they are unreadable, and how the text goes on."""
_INCOMPLETE = 3
"""Most replacement characters that later bytes can turn into a character."""


@final
class GrowingText:
    """Turns ids into pieces of text, at most one behind."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode` gives the text of any ids."""
        self._decode = decode
        self._ids: list[int] = []
        self._num_given = 0
        """Of `_ids`, how many were there when text was last given out."""
        self._given = ""
        """Of the text of `_ids`, what was given out."""

    def add(self, token: int) -> str:
        """The text that became readable with one more id; perhaps nothing."""
        self._ids.append(token)
        text = self._decode(self._ids)
        piece = self._new(text)
        if not piece.strip(_UNREADABLE) and len(self._ids) - self._num_given > _LONGEST:
            return self._shorten(piece)
        if not piece or text.endswith(_UNREADABLE):
            return ""
        self._given = text
        if len(self._ids) > _CONTEXT:
            self._ids = self._ids[self._num_given :]
            self._given = self._decode(self._ids)
        self._num_given = len(self._ids)
        return piece

    def rest(self) -> str:
        """Text of the ids that were held back."""
        return self._new(self._decode(self._ids))

    def _new(self, text: str) -> str:
        """Of `text`, that of `_ids`, what was not given out."""
        if text.startswith(self._given):
            return text[len(self._given) :]
        return self._decode(self._ids[self._num_given :])

    def _shorten(self, piece: str) -> str:
        """Give out the part of an unreadable text that will stay so, and forget its middle.

        Without this, every step over a long run of stray bytes, or of special tokens that make no
        text, would decode all of it.
        """
        held = min(_INCOMPLETE, len(piece))
        given, waiting = self._ids[: self._num_given], self._ids[self._num_given :]
        self._ids = [*given, *waiting[:_HEAD], *waiting[-_TAIL:]]
        text = self._decode(self._ids)
        self._given = text[: len(text) - held]
        return piece[: len(piece) - held]
