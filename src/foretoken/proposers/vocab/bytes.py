"""What each token of a tokenizer stands for, as bytes, and a growing text cut into its tokens.

What tokens stand for is read from the tokenizer's own description: byte-level alphabets (GPT-2 and
later), and pieces with a marker for spaces and bytes spelled <0xNN> (SentencePiece). So two
tokenizers can be compared, and the bytes of one's tokens can be cut into the other's. Where a text
grows, only its end is cut anew: a few tokens back to the first border that the old and the new
cutting share. Knows no model and no KV.
"""

import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Self, final

from foretoken.text.tokenizer import Tokenizer

_SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
_BACK = 8
"""Tokens at the end that may be cut anew."""
_CONTEXT = 3
"""Tokens before them that are only there to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """The bytes of every id of one tokenizer."""

    bytes_V: list[bytes]
    """By id; empty for ids without a token. Special tokens stand for their names."""
    special: frozenset[int]
    """Ids that stand for no text of their own."""
    bos_token_id: int | None
    eos_token_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """Read a tokenizer."""
        described = tokenizer.describe()
        vocabulary = tokenizer.vocabulary()
        bytes_V = [b""] * (max(vocabulary.values(), default=-1) + 1)
        byte_level = "ByteLevel" in _types(described.get("decoder"))
        for token, index in vocabulary.items():
            bytes_V[index] = _byte_level(token) if byte_level else _pieces(token)
        special = set()
        for added in described.get("added_tokens") or ():
            bytes_V[added["id"]] = str(added["content"]).encode()
            if added["special"]:
                special.add(int(added["id"]))
        return cls(
            bytes_V=bytes_V,
            special=frozenset(special),
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )

    def meaning(self, index: int) -> tuple[str, bytes] | None:
        """What an id means, equal for equal tokens of two tokenizers; None: nothing."""
        if index == self.eos_token_id:
            return "eos", b""
        if index == self.bos_token_id:
            return "bos", b""
        found = self.bytes_V[index]
        if not found:
            return None
        return ("special" if index in self.special else "text"), found

    def join(self, ids: list[int]) -> bytes:
        """The bytes of a sequence; ids beyond the tokenizer (padding) have none."""
        known = len(self.bytes_V)
        return b"".join(self.bytes_V[i] for i in ids if i < known)


def _types(node: Any) -> set[str]:
    """Every "type" in a tokenizer's description, at any depth."""
    if isinstance(node, dict):
        inner = set().union(*(_types(value) for value in node.values()))
        return inner | ({str(node["type"])} if "type" in node else set())
    if isinstance(node, list):
        return set().union(*(_types(value) for value in node))
    return set()


@cache
def _alphabet() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte, and back."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return letters


def _byte_level(token: str) -> bytes:
    letters = _alphabet()
    if all(letter in letters for letter in token):
        return bytes(letters[letter] for letter in token)
    return token.encode()


def _pieces(token: str) -> bytes:
    spelled = _SPELLED_BYTE.fullmatch(token)
    if spelled is not None:
        return bytes([int(spelled.group(1), 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def complete(data: bytes) -> bytes:
    """`data` without an incomplete UTF-8 character at its end; other errors stay."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if width > back else data
        if byte < 0x80:
            break
    return data


@final
class ByteEncoder:
    """Cuts bytes into tokens, and vouches for the result."""

    def __init__(self, tokenizer: Tokenizer, table: TokenBytes) -> None:
        """Encode with `tokenizer`, whose tokens' bytes are `table`."""
        self._tokenizer = tokenizer
        self.table = table
        self.start_ids = tokenizer.encode("")
        """What the tokenizer puts before every text."""

    def encode(self, data: bytes, *, at_start: bool) -> list[int] | None:
        """Tokens with exactly these bytes; None if the tokenizer changes them.

        `at_start` allows the tokenizer to put a space before the text.
        """
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            return None
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        found = self.table.join(ids)
        return ids if found == data or (at_start and found == b" " + data) else None

    def encode_after(self, context: bytes, data: bytes) -> list[int]:
        """Tokens of `data` where it follows `context`; empty if there are none to be had."""
        together = self.encode(context + data, at_start=True)
        if together is not None:
            extra = len(self.table.join(together)) - len(context) - len(data)
            border = len(context) + extra
            for count, end in enumerate(self.ends(together), start=1):
                if end == border:
                    return together[count:]
                if end > border:
                    break
        return self.encode(data, at_start=False) or []

    def ends(self, ids: list[int]) -> list[int]:
        """Number of bytes up to and including each token."""
        return list(accumulate(len(self.table.bytes_V[i]) for i in ids))


@final
class ByteText:
    """One growing text in the draft's tokens.

    Invariant: the bytes of `ids` are the text, less a possibly incomplete last character.
    """

    def __init__(self, encoder: ByteEncoder) -> None:
        self._encoder = encoder
        self.ids: list[int] = list(encoder.start_ids)
        self.is_whole = False
        """Whether `ids` are all of the text: it can be continued."""
        self._ends = [0] * len(self.ids)
        self._data = b""

    def extend(self, data: bytes) -> int:
        """Add text; from which token on `ids` have changed."""
        self._data += data
        text = complete(self._data)
        self.is_whole = len(text) == len(self._data)
        kept = self._cut_anew(text)
        if kept is None:
            kept = self._cut_all(text)
        return kept

    def _cut_anew(self, text: bytes) -> int | None:
        """Replace the end of `ids`; None if old and new share no border there."""
        first = len(self.ids) - _BACK - _CONTEXT
        while first > len(self._encoder.start_ids) and not self._starts_character(first):
            first -= 1
        if first <= len(self._encoder.start_ids):
            return None
        base = self._ends[first - 1]
        ids = self._encoder.encode(text[base:], at_start=True)
        if ids is None:
            return None
        extra = len(self._encoder.table.join(ids)) - len(text) + base
        ends = [base + end - extra for end in self._encoder.ends(ids)]
        places = {end: count for count, end in enumerate(ends, start=1)}
        for kept in range(first + _CONTEXT, len(self.ids) + 1):
            count = places.get(self._ends[kept - 1])
            if count is not None:
                self.ids[kept:] = ids[count:]
                self._ends[kept:] = ends[count:]
                return kept
        return None

    def _cut_all(self, text: bytes) -> int:
        ids = self._encoder.encode(text, at_start=True)
        if ids is None:
            self.is_whole = False
            return len(self.ids)
        start = self._encoder.start_ids
        extra = len(self._encoder.table.join(ids)) - len(text)
        old, self.ids = self.ids, [*start, *ids]
        self._ends = [0] * len(start) + [end - extra for end in self._encoder.ends(ids)]
        same = (i for i, (a, b) in enumerate(zip(old, self.ids, strict=False)) if a != b)
        return next(same, min(len(old), len(self.ids)))

    def _starts_character(self, index: int) -> bool:
        at = self._ends[index - 1]
        return at >= len(self._data) or self._data[at] & 0xC0 != 0x80
