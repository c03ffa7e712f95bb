"""Names of pages of tokens: equal names mean equal tokens from the beginning, under one salt.

A page's name is a hash over the name of the page before it and its own token ids; the first one's
parent is a hash of the page size and the salt. Where the salt is a secret,
a name does not even show whether a guess at the tokens is right. Engine and router use these
functions, so that a page has the same name in both.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def root_name(page_size: int, salt: str | None) -> bytes:
    """The parent of a first page, 16 bytes."""
    return _digest(repr((page_size, salt)).encode())


def page_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the page of these tokens that follows `parent`, 16 bytes."""
    return _digest(parent + array("q", token_ids).tobytes())


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
