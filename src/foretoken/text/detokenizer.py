"""Text of one growing output, and the stop strings in it. Knows ids and text, no requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

from foretoken.text.growing import GrowingText


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
        """Start with an empty output."""
        self._tokenizer = tokenizer
        self._options = options
        self._growing = GrowingText(self._decode)
        self._ids: list[int] = []
        self._hold = max((len(s) for s in options.stop), default=1) - 1
        self._unsearched = 0
        self.text = ""
        """All text so far, a found stop string cut off unless it is to be included."""
        self.finished = False
        self._stable: list[int] = []

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

    def take_lengths(self) -> list[int]:
        """`stable_length` after each token fed since the last call."""
        taken, self._stable = self._stable, []
        return taken

    def _grow(self, piece: str) -> str | None:
        """Add the text of one token; the stop string it completes, if any."""
        if not piece:
            return None
        searched_from = max(self._unsearched, len(self.text) - self._hold)
        self.text += piece
        if len(self._ids) <= self._options.min_tokens:
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
        skip = self._options.skip_special_tokens
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip)

    def _find_stop(self, start: int) -> str | None:
        hits = [(self.text.find(s, start), s) for s in self._options.stop]
        hits = [(at, s) for at, s in hits if at >= 0]
        if not hits:
            return None
        at, stop = min(hits, key=lambda hit: hit[0])
        self.text = self.text[: at + (len(stop) if self._options.include_stop_str else 0)]
        return stop
