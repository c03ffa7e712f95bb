"""Text of one growing output, and the stop strings in it. Knows ids and text, no requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import tokenizers

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
    """Turns ids into pieces of text, at most one behind, whatever the tokenizer.

    Owns the few newest ids, whose text may depend on each other. No sequence of ids makes it raise;
    the pieces together are the text that the tokenizer gives for all ids at once, unless it takes
    back a part that was given out. Byte tokens do that: a newline is one, and a tokenizer with byte
    fallback turns it into a replacement character if the bytes after it are no UTF-8. Then the
    given part stays and the rest is decoded without it.
    """

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


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found: keep `num_keep` of the newest tokens."""

    num_keep: int
    stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How one output becomes text."""

    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    min_tokens: int = 0
    """Text of the first min_tokens tokens is not searched for stop strings."""


class Detokenizer:
    """Text of one growing output; never gives out half a character or part of a stop string."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, options: TextOptions) -> None:
        self._tokenizer = tokenizer
        self.options = options
        self._growing = GrowingText(self._decode)
        self._ids: list[int] = []
        self._hold = max((len(s) for s in options.stop), default=1) - 1
        self._unsearched = 0
        self.text = ""
        """All text so far, a found stop string cut off unless it is to be included."""
        self.finished = False
        self._stable: list[int] = []
        """`stable_length` after each token whose text was not taken yet."""
        self._num_taken = 0

    def feed(self, ids: Sequence[int]) -> StopMatch | None:
        """Add output tokens; stop at the first stop string.

        Returns:
            The match, and how many of `ids` belong to the output (the last one completes the
            stop string); None if there is none.
        """
        assert not self.finished, "a finished output cannot grow"
        for count, token in enumerate(ids, start=1):
            self._ids.append(token)
            stop = self._grow(self._growing.add(token))
            self._stable.append(self.stable_length())
            if stop is not None:
                return StopMatch(count, stop)
        return None

    def skip(self, length: int) -> None:
        """Text up to here was given out elsewhere, and that of all tokens so far with it."""
        self._num_taken, self._stable = length, []

    def take_pieces(self, num_tokens: int) -> tuple[str, ...]:
        """The text that became final with each of the newest tokens; the last one's takes what
        the end of the output set free."""
        end = self.stable_length()
        lengths, self._stable = self._stable[:num_tokens], []
        lengths += [end] * (max(num_tokens, 1) - len(lengths))
        lengths[-1] = end
        pieces = []
        for length in lengths:
            pieces.append(self.text[self._num_taken : length])
            self._num_taken = max(length, self._num_taken)
        return tuple(pieces)

    def _grow(self, piece: str) -> str | None:
        """Add the text of one token; the stop string it completes, if any."""
        if not piece:
            return None
        searched_from = max(self._unsearched, len(self.text) - self._hold)
        self.text += piece
        if len(self._ids) <= self.options.min_tokens:
            self._unsearched = len(self.text)
            return None
        stop = self._find_stop(searched_from)
        self.finished = stop is not None
        return stop

    def finish(self) -> None:
        """No more tokens: add the text of an incomplete last character, if there is one."""
        if self.finished:
            return
        self.finished = True
        whole = self._decode(self._ids)
        self.text = whole if whole.startswith(self.text) else self.text + self._growing.rest()

    def stable_length(self) -> int:
        """Characters that later tokens cannot take back: all once finished."""
        return len(self.text) if self.finished else max(0, len(self.text) - self._hold)

    def _decode(self, ids: Sequence[int]) -> str:
        skip = self.options.skip_special_tokens
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip)

    def _find_stop(self, start: int) -> str | None:
        hits = [(self.text.find(s, start), s) for s in self.options.stop]
        hits = [(at, s) for at, s in hits if at >= 0]
        if not hits:
            return None
        at, stop = min(hits, key=lambda hit: hit[0])
        self.text = self.text[: at + (len(stop) if self.options.include_stop_str else 0)]
        return stop
