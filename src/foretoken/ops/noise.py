"""Keyed noise: every random number is a pure function of (seed, sample index, position, stream).

Knows nothing of requests or sequences. A 64-bit key per row comes from splitmix64 (Steele, Lea
and Flood 2014); the noise of one token id comes from an exact integer hash of key and id, so it
is the same for any number of rows, in any order, next to any neighbours, on any device.
Invariant: uniforms are never 0 or 1, so exponentials are finite and positive.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ROUND_1 = -2048144789
_ROUND_2 = -1028477387
_ROUND_3 = 739982445
_UNIT = (1.0 - 2.0**-24) * 2.0**-31
"""Takes 31-bit integers (rounded to float32, plus a half) into [2**-32, 1 - 2**-24]."""
CACHED_NOISE = 1 << 16
"""Elements per pass on a CPU, so that three buffers stay in the second-level cache."""


class Stream(IntEnum):
    """What a random number is for. Streams never share a key."""

    TARGET = 0
    """The target's token at a position; drafts under matching share it."""
    ACCEPT = 1
    """Whether the draft at a position is accepted (rejection rule)."""
    RECOVER = 2
    """The token in place of a rejected draft (rejection rule)."""
    DRAFT = 3
    """The draft at a position (rejection rule)."""


def _mix(word: int) -> int:
    """The finaliser of splitmix64."""
    word ^= word >> 30
    word = (word * 0xBF58476D1CE4E5B9) & _WORD
    word ^= word >> 27
    word = (word * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def request_key(seed: int, sample_index: int) -> int:
    """64-bit key of one request, from which all its row keys come; any integer is a fine seed."""
    return _mix((_mix((seed + _GAMMA) & _WORD) + (sample_index + 1) * _GAMMA) & _WORD)


def row_key(key: int, position: int, stream: Stream, anchor: int = 0) -> int:
    """64-bit key of one token's noise.

    Args:
        key: `request_key` of the request.
        position: index of the token in its sequence, prompt included.
        stream: what the noise is for.
        anchor: a second index, 0 for none. Drafts pass the number of committed tokens, so that a
            position that is drafted again after a rejection gets fresh noise: how far to draft may
            then depend on earlier, discarded drafts without touching the output's distribution.
    """
    word = _mix((key + (8 * position + stream + 1) * _GAMMA) & _WORD)
    return _mix((word + anchor * _GAMMA) & _WORD) if anchor else word


def uniform(key: int) -> float:
    """One float64 uniform in (0, 1) with 52 bits, for an acceptance test."""
    return ((key >> 12) + 0.5) * 2.0**-52


def pack_keys(keys: Sequence[int], device: torch.device) -> Tensor:
    """Row keys as int32 [R, 2], as `KeyedNoise` wants them."""
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    packed = torch.tensor(signed, dtype=torch.int64).view(torch.int32).view(-1, 2)
    return packed.to(device)


class KeyedNoise:
    """Exponential noise per (row key, token id), computed in kept buffers."""

    def __init__(self, vocab_size: int, device: torch.device, at_once: int = CACHED_NOISE) -> None:
        """Prepare for rows of `vocab_size` token ids on `device`, `at_once` numbers per pass."""
        self.vocab_size = vocab_size
        self._device = device
        self.rows_at_once = max(1, at_once // vocab_size)
        """Most rows that `exponential` takes in one call."""
        with torch.inference_mode(False):
            self._ids_V = torch.arange(vocab_size, dtype=torch.int32, device=device)
            self._hash = torch.empty(0, dtype=torch.int32, device=device)
            self._shifted = torch.empty(0, dtype=torch.int32, device=device)
            self._noise = torch.empty(0, dtype=torch.float32, device=device)

    def exponential(self, keys_R2: Tensor) -> Tensor:
        """Exponential(1) noise of every id, float32 [R, V]; valid until the next call."""
        rows = keys_R2.shape[0]
        assert rows <= self.rows_at_once, (rows, self.rows_at_once)
        return self._exponential(keys_R2, self._ids_V, (rows, self.vocab_size))

    def exponential_at(self, keys_R2: Tensor, ids_RC: Tensor) -> Tensor:
        """What `exponential` gives at chosen int64 ids only, float32 [R, C].

        Valid until the next call."""
        return self._exponential(keys_R2, ids_RC.to(torch.int32), tuple(ids_RC.shape))

    def _exponential(self, keys_R2: Tensor, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = shape[0] * shape[1]
        if count > self._hash.numel():
            self._grow(count)
        hash_RV = self._hash[:count].view(shape)
        torch.add(ids, keys_R2[:, :1], out=hash_RV)
        _scramble(hash_RV, self._shifted[:count].view(shape), keys_R2[:, 1:])
        noise_RV = self._noise[:count].view(shape)
        noise_RV.copy_(hash_RV)
        noise_RV.add_(0.5).mul_(-_UNIT)
        return noise_RV.log1p_().neg_()

    def _grow(self, count: int) -> None:
        with torch.inference_mode(False):
            self._hash = torch.empty(count, dtype=torch.int32, device=self._device)
            self._shifted = torch.empty(count, dtype=torch.int32, device=self._device)
            self._noise = torch.empty(count, dtype=torch.float32, device=self._device)


def _scramble(hash_RV: Tensor, shifted_RV: Tensor, key_R1: Tensor) -> None:
    """Hash int32 words in place to 31 random bits; three xor-shift-multiply rounds."""

    def fold(by: int) -> None:
        torch.bitwise_right_shift(hash_RV, by, out=shifted_RV)
        shifted_RV.bitwise_and_((1 << (32 - by)) - 1)
        hash_RV.bitwise_xor_(shifted_RV)

    fold(16)
    hash_RV.mul_(_ROUND_1).bitwise_xor_(key_R1)
    fold(13)
    hash_RV.mul_(_ROUND_2)
    fold(16)
    hash_RV.mul_(_ROUND_3)
    fold(15)
    hash_RV.bitwise_and_(0x7FFFFFFF)
