"""Where the newest tokens of a sequence stood before: in its own text, and in other outputs.

For n-grams of a few lengths both kinds of text know the latest place, and for each place the one
before: chains as in Deflate (RFC 1951), extended by the committed tokens of each step. A look-up
walks the chain of the longest n-gram that has been seen, and reads off how much further each place
matches. All work of a step is bounded, whatever the text is like. A suffix automaton would have
steps that copy long lists, and a trie thirty times the memory.

The outputs of all requests share one hash table of fixed size, 28 bytes a token and the tables;
the output that finished first is forgotten first. Invariants: a place is returned only to requests
of the same salt, and only after its tokens were compared.
"""

from array import array
from collections import deque
from typing import NamedTuple

from foretoken.proposers.lookup.suffix.path import TOKEN_BYTES, Place, RecentTokens

OWN_LENGTHS = (1, 3, 8)
"""Lengths of the n-grams that lead into the sequence's own text."""
PAST_LENGTHS = (3, 6, 12)
"""Lengths of the n-grams that lead into other outputs."""
_MOST_OWN_PLACES = 16
_MOST_PAST_PLACES = 12
_MOST_STEPS = 24
TOKENS_EACH = 1024
"""Tokens per cached output, on average over all, that there is room for."""
_BITS = 20
"""Bits of a place that hold the position in its text; the rest numbers the text."""
_MASK = (1 << _BITS) - 1
_OVERHEAD = 600
"""Bytes of a text beside its tokens, about."""


class LocalText:
    """The tokens of one sequence and their n-gram chains."""

    __slots__ = ("_latest", "_previous", "tokens")

    def __init__(self) -> None:
        self.tokens = array("I")
        self._latest: tuple[dict[bytes, int], ...] = tuple({} for _ in OWN_LENGTHS)
        self._previous = tuple(array("i", [0]) for _ in OWN_LENGTHS)

    def extend(self, tokens: list[int]) -> None:
        """Append committed tokens: every n-gram before one of them has a place there."""
        first = max(len(self.tokens), 1)
        self.tokens.extend(tokens)
        # N-grams are slices of one bytes object: a key is one copy of a few bytes, not a tuple of
        # integers.
        start = max(first - OWN_LENGTHS[-1], 0)
        data = self.tokens[start:].tobytes()
        for at in range(first, len(self.tokens)):
            end = TOKEN_BYTES * (at - start)
            for length, latest, previous in zip(
                OWN_LENGTHS, self._latest, self._previous, strict=True
            ):
                if length > at:
                    previous.append(0)
                    continue
                key = data[end - TOKEN_BYTES * length : end]
                previous.append(latest.get(key, 0))
                latest[key] = at

    def places(self, window: RecentTokens) -> list[Place]:
        """Earlier places of the newest tokens, the latest first."""
        for index in range(len(OWN_LENGTHS) - 1, -1, -1):
            length = OWN_LENGTHS[index]
            if length > window.size:
                continue
            # Place 0 is never one: no n-gram stands before the first token. So 0 ends a chain.
            at = self._latest[index].get(window.newest(length), 0)
            found = []
            for _ in range(_MOST_OWN_PLACES):
                if at == 0:
                    break
                found.append(Place(window.match(self.tokens, at), self.tokens, at, True))
                at = self._previous[index][at]
            if found:
                return found
        return []

    @property
    def num_bytes(self) -> int:
        """Memory, about: the keys of the n-grams weigh most."""
        entries = sum(len(latest) for latest in self._latest)
        return 120 * entries + (4 + 4 * len(OWN_LENGTHS)) * len(self.tokens)


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
        self._latest = tuple(array("q", bytes(8 << bits)) for _ in PAST_LENGTHS)
        self._texts: dict[int, CachedText] = {}
        self._finished: deque[int] = deque()
        self._num_opened = 0
        self._num_tokens = 0
        self._num_pinned = 0

    @property
    def num_tokens(self) -> int:
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
            previous=tuple(array("q", [0]) for _ in PAST_LENGTHS),
        )
        self._texts[text.number] = text
        return text

    def __contains__(self, text: CachedText) -> bool:
        """Whether a text has not been forgotten."""
        return text.number in self._texts

    def extend(self, text: CachedText, tokens: list[int]) -> None:
        """Append committed output tokens; what is beyond a million is not kept."""
        tokens = tokens[: _MASK - len(text.tokens)]
        first = max(len(text.tokens), 1)
        text.tokens.extend(tokens)
        self._num_tokens += len(tokens)
        start = max(first - PAST_LENGTHS[-1], 0)
        data = text.tokens[start:].tobytes()
        mask, salt, base = self._table_mask, text.salt_hash, text.number << _BITS
        for at in range(first, len(text.tokens)):
            end = TOKEN_BYTES * (at - start)
            for length, latest, previous in zip(
                PAST_LENGTHS, self._latest, text.previous, strict=True
            ):
                if length > at:
                    previous.append(0)
                    continue
                # Texts and places share one integer, and n-grams that collide share a chain: the
                # table has a fixed size, and a look-up compares tokens before it believes a place.
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
        if len(text.tokens) < PAST_LENGTHS[0]:
            self._forget(text.number)
            return
        self._finished.append(text.number)
        most = self._max_requests * TOKENS_EACH
        while len(self._finished) > self._max_requests or (
            self._num_tokens > most and len(self._finished) > 1
        ):
            self._forget(self._finished.popleft())

    def places(self, window: RecentTokens, own: CachedText) -> list[Place]:
        """Places of the newest tokens in other outputs of the same salt, the latest first.

        They are those of the longest n-gram that is known.
        """
        for index in range(len(PAST_LENGTHS) - 1, -1, -1):
            if PAST_LENGTHS[index] <= window.size:
                found = self._walk(index, window, own)
                if found:
                    return found
        return []

    def _walk(self, index: int, window: RecentTokens, own: CachedText) -> list[Place]:
        length, last, found = PAST_LENGTHS[index], window.last, []
        slot = (hash(window.newest(length)) ^ own.salt_hash) & self._table_mask
        place = self._latest[index][slot]
        for _ in range(_MOST_STEPS):
            # A text that was forgotten took its links with it: the chain ends there.
            text = self._texts.get(place >> _BITS)
            if text is None:
                break
            at = place & _MASK
            # One token is compared before all: most places of a collision end here.
            if text.tokens[at - 1] == last and text.salt == own.salt and text is not own:
                match = window.match(text.tokens, at)
                if match >= length:
                    found.append(Place(match, text.tokens, at, False))
                    if len(found) == _MOST_PAST_PLACES:
                        break
            place = text.previous[index][at]
        return found

    def _forget(self, number: int) -> None:
        self._num_tokens -= len(self._texts.pop(number).tokens)

    def _memory(self, texts: int, tokens: int) -> int:
        table = sum(len(latest) * latest.itemsize for latest in self._latest)
        return table + _OVERHEAD * texts + (4 + 8 * len(PAST_LENGTHS)) * tokens
