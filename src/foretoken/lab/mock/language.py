"""A language of 32 words for the mock server: next-word probabilities from a hash, no weights.

The same prompt and history give the same logits, so that greedy and seeded texts can be compared;
`skew` changes the distribution a little, as a lossy server would.
"""

import hashlib
import struct

import numpy as np

from foretoken.lab.stats.intervals import Floats

WORDS = tuple(
    " the of and to in is it you that he was for on are with as his they be at one have this from"
    " or had by hot but some what there".split()
)


def _hash(*parts: object) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int(struct.unpack("<Q", hashlib.blake2b(text, digest_size=8).digest())[0])


CONTEXTS = 8
"""Prompts fall into so many kinds, so that tables can be kept."""


class MockModel:
    """Logits of the next word after the last one."""

    def __init__(self, seed: int = 0, skew: float = 0.0) -> None:
        """With `skew` above 0, what is sampled is not what logprobs say."""
        self.seed, self.skew = seed, skew
        self._tables: dict[tuple[int, int], Floats] = {}

    def logits(self, prompt: str, last: int) -> Floats:
        """Logits (32) after word `last` (-1 at the start)."""
        return self._logits(_hash(prompt) % CONTEXTS, last)

    def _logits(self, context: int, last: int) -> Floats:
        found = self._tables.get((context, last))
        if found is None:
            rng = np.random.default_rng(_hash(self.seed, context, last))
            found = self._tables[context, last] = rng.normal(0.0, 2.0, len(WORDS))
        return found

    def _next_word(self, context: int, last: int, temperature: float, noise: float) -> int:
        """By inverse transform from `noise` in [0, 1); the likeliest at temperature 0."""
        logits = self._logits(context, last)
        if temperature == 0.0:
            best = np.argsort(-logits)
            return int(best[1 if noise < self.skew else 0])
        chances = np.exp((logits - logits.max()) / (temperature * (1.0 - 0.5 * self.skew)))
        sums = np.cumsum(chances)
        return int(np.searchsorted(sums, noise * sums[-1]))

    def write(self, prompt: str, count: int, temperature: float, seed: int) -> list[int]:
        """`count` words; equal seeds write equal texts."""
        rng = np.random.default_rng(_hash("noise", seed))
        words: list[int] = []
        context = _hash(prompt) % CONTEXTS
        last = -1
        for noise in rng.random(count):
            last = self._next_word(context, last, temperature, float(noise))
            words.append(last)
        return words

    def top(self, prompt: str, last: int, count: int) -> dict[str, float]:
        """The `count` likeliest words with their log-probabilities."""
        logits = self.logits(prompt, last)
        logs = logits - logits.max()
        logs = logs - np.log(np.exp(logs).sum())
        return {" " + WORDS[i]: float(logs[i]) for i in np.argsort(-logs)[:count]}
