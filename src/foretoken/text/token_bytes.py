"""The bytes that each token stands for: a character may be spread over several tokens.

Found from the parts of a tokenizer, since the text of such a token alone is U+FFFD. What a decoder
does at the beginning of a text, such as leaving out a space, is not looked at: bytes are those of a
token wherever it stands. Knows no requests.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_tokens(description: Mapping[str, Any]) -> Callable[[str], bytes] | None:
    """What makes bytes of a token as the vocabulary has it; None for decoders of other kinds.

    Args:
        description: the content of tokenizer.json.
    """
    parts = list(_parts(description.get("decoder")))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _by_letters
    if not kinds or kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None
    spaces = [part.get("replacement", "\u2581") for part in parts if part["type"] == "Metaspace"]
    pairs = [(space, " ") for space in spaces] + [
        (part["pattern"]["String"], part["content"])
        for part in parts
        if part["type"] == "Replace" and "String" in part["pattern"]
    ]
    fallback = "ByteFallback" in kinds

    def made(token: str) -> bytes:
        byte = _BYTE.fullmatch(token) if fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for old, new in pairs:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    return made


def _parts(part: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """A decoder as the list of those that it is a sequence of."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part["decoders"]:
            yield from _parts(one)
    else:
        yield part


def _by_letters(token: str) -> bytes:
    letters = _letters()
    return b"".join(letters.get(letter) or letter.encode("utf-8", "replace") for letter in token)


@cache
def _letters() -> dict[str, bytes]:
    """The letter that GPT-2's byte-level BPE writes each byte as: printable ones as themselves, the
    others, in their order, as the characters from 256 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    letters = {chr(byte): bytes([byte]) for byte in kept}
    return letters | {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
