"""Comparing the newest tokens with the tokens before many other places, without a loop over them.

A window of tokens is read as one big integer, the newest token most significant; the highest bit
in which two windows differ tells how many newest tokens they share.
"""

from array import array

TOKEN_BITS = 32
TOKEN_BYTES = 4


class Window:
    """The newest tokens of a text."""

    __slots__ = ("_number", "data", "last", "size")

    def __init__(self, tokens: list[int]) -> None:
        """Hold `tokens`, oldest first; at least one."""
        self.data = array("I", tokens).tobytes()
        self.size = len(tokens)
        self.last = tokens[-1]
        self._number = int.from_bytes(self.data, "little")

    def match(self, text: "array[int]", at: int) -> int:
        """How many of the newest tokens stand in `text` right before position `at`."""
        size = min(self.size, at)
        other = int.from_bytes(text[at - size : at].tobytes(), "little")
        differing = (self._number >> (TOKEN_BITS * (self.size - size))) ^ other
        return size - (differing.bit_length() + TOKEN_BITS - 1) // TOKEN_BITS

    def newest(self, count: int) -> bytes:
        """The newest `count` tokens as a key."""
        return self.data[len(self.data) - TOKEN_BYTES * count :]
