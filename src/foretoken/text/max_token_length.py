"""How many characters of a text one token covers at most, proven from a tokenizer's own parts.

With such a bound a text that cannot fit is refused before it is encoded, which may take seconds.
Every part of the tokenizer must be one that is known to neither drop nor merge characters without
bound; with any other there is no bound, and the text has to be encoded to be counted.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_COMPOSED = 4
"""Characters that NFC or NFKC makes one of, at most: Unicode's longest canonical decomposition."""
_NORMALIZERS = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1,
                "Prepend": 1, "ByteLevel": 1}  # fmt: skip
"""Normalizers, and how many characters of the text one of theirs stands for at most."""
_PRE_TOKENIZERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation")
"""What cuts a text into words and keeps all of it, unless its behavior is to remove."""


def max_token_length(
    description: Mapping[str, Any], known: Callable[[str], bool], longest: int
) -> int | None:
    """Most characters of a text that one token can cover; None if there is no proof of a bound.

    Args:
        description: the content of tokenizer.json; of its model the vocabulary is not needed.
        known: whether a token, as it is written there, is in the vocabulary.
        longest: characters of the longest token, added tokens included.
    """
    factor, changed = 1, list(parts_of(description.get("normalizer"), "normalizers"))
    for part in changed:
        found = _normalizer_factor(part)
        if found is None:
            return None
        factor *= found
    cutters = list(parts_of(description.get("pre_tokenizer"), "pretokenizers"))
    if not all(_keeps_all(part) for part in cutters) or description.get("truncation") is not None:
        return None
    if any(added.get("lstrip") or added.get("rstrip") for added in description["added_tokens"]):
        return None  # such a token takes any number of spaces with it
    in_bytes = any(part["type"] == "ByteLevel" for part in (*cutters, *changed))
    if not longest or not _spells_everything(description["model"], known, in_bytes):
        return None
    return factor * longest


def parts_of(part: Mapping[str, Any] | None, inner: str) -> Iterable[Mapping[str, Any]]:
    """A part of a tokenizer as the list of those that it is a sequence of."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[inner]:
            yield from parts_of(one, inner)
    else:
        yield part


def _normalizer_factor(part: Mapping[str, Any]) -> int | None:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return 1 if pattern and len(part["content"]) >= len(pattern) else None
    return _NORMALIZERS.get(part["type"])


def _keeps_all(part: Mapping[str, Any]) -> bool:
    return part["type"] in _PRE_TOKENIZERS and part.get("behavior") != "Removed"


def _spells_everything(
    model: Mapping[str, Any], known: Callable[[str], bool], in_bytes: bool
) -> bool:
    """Whether every character is in some token: none is dropped, or merged with others unknown."""
    if model.get("type") not in ("BPE", "Unigram"):
        return False
    if model.get("byte_fallback") and all(known(f"<0x{byte:02X}>") for byte in range(256)):
        return True
    if in_bytes and model["type"] == "BPE":
        from tokenizers.pre_tokenizers import ByteLevel

        return all(known(letter) for letter in ByteLevel.alphabet())
    return bool(model["type"] == "BPE" and model.get("unk_token") and not model.get("fuse_unk"))
