"""What each token of a tokenizer stands for, as bytes, so that two tokenizers can be compared.

Reads the tokenizer's own description: byte-level alphabets (GPT-2 and later), and pieces with a
marker for spaces and bytes spelled <0xNN> (SentencePiece). Knows no model.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

from foretoken.tokenizer import Tokenizer

_SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


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
