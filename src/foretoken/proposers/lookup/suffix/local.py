"""Where the newest tokens of one sequence stood before in it, prompt and output.

For n-grams of a few lengths it knows the latest place, and for each place the one before: chains
as in Deflate (RFC 1951), extended by the committed tokens of each step. A look-up walks the chain
of the longest n-gram that has been seen, and reads off how much further each place matches. All
work per step is bounded, whatever the text is like; a suffix automaton would have steps that copy
long lists, and a trie thirty times the memory.
"""

from array import array

from foretoken.proposers.lookup.suffix.path import Place
from foretoken.proposers.lookup.suffix.window import TOKEN_BYTES, Window

LENGTHS = (1, 3, 8)
MOST_PLACES = 16


class LocalText:
    """The tokens of one sequence and their n-gram chains."""

    __slots__ = ("_latest", "_previous", "tokens")

    def __init__(self) -> None:
        """Nothing yet."""
        self.tokens = array("I")
        self._latest: tuple[dict[bytes, int], ...] = tuple({} for _ in LENGTHS)
        self._previous = tuple(array("i", [0]) for _ in LENGTHS)

    def extend(self, tokens: list[int]) -> None:
        """Append committed tokens: every n-gram before one of them has a place there."""
        first = max(len(self.tokens), 1)
        self.tokens.extend(tokens)
        start = max(first - LENGTHS[-1], 0)
        data = self.tokens[start:].tobytes()
        for at in range(first, len(self.tokens)):
            end = TOKEN_BYTES * (at - start)
            for length, latest, previous in zip(LENGTHS, self._latest, self._previous, strict=True):
                if length > at:
                    previous.append(0)
                    continue
                key = data[end - TOKEN_BYTES * length : end]
                previous.append(latest.get(key, 0))
                latest[key] = at

    def places(self, window: Window) -> list[Place]:
        """Earlier places of the newest tokens, the latest first."""
        for index in range(len(LENGTHS) - 1, -1, -1):
            length = LENGTHS[index]
            if length > window.size:
                continue
            at = self._latest[index].get(window.newest(length), 0)
            found = []
            for _ in range(MOST_PLACES):
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
        return 120 * entries + (4 + 4 * len(LENGTHS)) * len(self.tokens)
