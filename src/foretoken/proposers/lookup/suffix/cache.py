"""Past and present outputs of all requests, to draft from where a context stood in one of them.

N-grams of a few lengths lead, through a hash table of fixed size, to the latest place where one
stood, and every place to the one before: chains as in Deflate (RFC 1951). Memory is 28 bytes a
token and the tables, and bounded; the output that finished first is forgotten first. Invariants:
a place is returned only to requests of the same salt, and only after its tokens were compared; a
look-up takes a bounded number of steps whatever is stored.
"""

from array import array
from collections import deque
from typing import NamedTuple

from foretoken.proposers.lookup.suffix.path import Place
from foretoken.proposers.lookup.suffix.window import TOKEN_BYTES, Window

LENGTHS = (3, 6, 12)
MOST_PLACES = 12
MOST_STEPS = 24
TOKENS_EACH = 1024
"""Tokens per cached output, on average over all, that there is room for."""
_BITS = 20
"""Of a place, for the position in its text; the rest numbers the text."""
_MASK = (1 << _BITS) - 1
_OVERHEAD = 600
"""Bytes of a text beside its tokens, about."""


class CachedText(NamedTuple):
    """One output and, per n-gram length, where the n-gram before each position stood last."""

    number: int
    salt: str | None
    salt_hash: int
    tokens: "array[int]"
    previous: "tuple[array[int], ...]"


class SuffixCache:
    """Outputs by salt, found by their n-grams."""

    def __init__(self, max_requests: int) -> None:
        """Keep at most `max_requests` finished outputs, and TOKENS_EACH tokens for each."""
        assert max_requests >= 1, max_requests
        self._max_requests = max_requests
        bits = min(max((64 * max_requests - 1).bit_length(), 10), 20)
        self._table_mask = (1 << bits) - 1
        self._latest = tuple(array("q", bytes(8 << bits)) for _ in LENGTHS)
        self._texts: dict[int, CachedText] = {}
        self._finished: deque[int] = deque()
        self._num_opened = 0
        self._num_tokens = 0
        self._num_pinned = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory, about."""
        return self._memory(len(self._texts), self._num_tokens + self._num_pinned)

    @property
    def most_bytes(self) -> int:
        """What it can grow to, running outputs aside."""
        return self._memory(self._max_requests, self._max_requests * TOKENS_EACH)

    def open(self, salt: str | None) -> CachedText:
        """Room for the output of a new request."""
        self._num_opened += 1
        text = CachedText(
            number=self._num_opened,
            salt=salt,
            salt_hash=hash((salt,)),
            tokens=array("I"),
            previous=tuple(array("q", [0]) for _ in LENGTHS),
        )
        self._texts[text.number] = text
        return text

    def extend(self, text: CachedText, tokens: list[int]) -> None:
        """Append committed output tokens; what is beyond a million is not kept."""
        tokens = tokens[: _MASK - len(text.tokens)]
        first = max(len(text.tokens), 1)
        text.tokens.extend(tokens)
        self._num_tokens += len(tokens)
        start = max(first - LENGTHS[-1], 0)
        data = text.tokens[start:].tobytes()
        mask, salt, base = self._table_mask, text.salt_hash, text.number << _BITS
        for at in range(first, len(text.tokens)):
            end = TOKEN_BYTES * (at - start)
            for length, latest, previous in zip(LENGTHS, self._latest, text.previous, strict=True):
                if length > at:
                    previous.append(0)
                    continue
                slot = (hash(data[end - TOKEN_BYTES * length : end]) ^ salt) & mask
                previous.append(latest[slot])
                latest[slot] = base | at

    def pin(self, text: CachedText, tokens: list[int]) -> None:
        """Append to a text that stays until `unpin`, beside the room for outputs."""
        before = self._num_tokens
        self.extend(text, tokens)
        self._num_pinned += self._num_tokens - before
        self._num_tokens = before

    def unpin(self, text: CachedText) -> None:
        """Forget a text that was pinned."""
        self._num_pinned -= len(self._texts.pop(text.number).tokens)

    def finish(self, text: CachedText) -> None:
        """The output is complete: from now on it counts, and is forgotten in its turn."""
        if len(text.tokens) < LENGTHS[0]:
            self._forget(text.number)
            return
        self._finished.append(text.number)
        most = self._max_requests * TOKENS_EACH
        while len(self._finished) > self._max_requests or (
            self._num_tokens > most and len(self._finished) > 1
        ):
            self._forget(self._finished.popleft())

    def places(self, window: Window, own: CachedText) -> list[Place]:
        """Places of the newest tokens in other outputs of the same salt, the latest first.

        Those of the longest n-gram that is known.
        """
        for index in range(len(LENGTHS) - 1, -1, -1):
            if LENGTHS[index] <= window.size:
                found = self._walk(index, window, own)
                if found:
                    return found
        return []

    def _walk(self, index: int, window: Window, own: CachedText) -> list[Place]:
        length, last, found = LENGTHS[index], window.last, []
        slot = (hash(window.newest(length)) ^ own.salt_hash) & self._table_mask
        place = self._latest[index][slot]
        for _ in range(MOST_STEPS):
            text = self._texts.get(place >> _BITS)
            if text is None:
                break
            at = place & _MASK
            if text.tokens[at - 1] == last and text.salt == own.salt and text is not own:
                match = window.match(text.tokens, at)
                if match >= length:
                    found.append(Place(match, text.tokens, at, False))
                    if len(found) == MOST_PLACES:
                        break
            place = text.previous[index][at]
        return found

    def _forget(self, number: int) -> None:
        self._num_tokens -= len(self._texts.pop(number).tokens)

    def _memory(self, texts: int, tokens: int) -> int:
        table = sum(len(latest) * latest.itemsize for latest in self._latest)
        return table + _OVERHEAD * texts + (4 + 8 * len(LENGTHS)) * tokens
