"""Do two arms draw from the same distribution? A permutation test on counts of whole texts. Pure.

Labels are shuffled within prompts, so that the p-value holds whatever the distribution is (Good
2005); several tests are corrected together by Holm's procedure (1979).
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from foretoken.lab.stats.ratios import Ints

PERMUTATIONS = 2000


def compare_samples(
    samples: Sequence[Sequence[Sequence[str]]], *, seed: int = 0
) -> tuple[float, float, float]:
    """Total variation between two arms' texts, what chance gives, and the permutation p-value.
    `samples[prompt][arm]` are texts."""
    rng = np.random.default_rng(seed)
    tables = []
    for pair in samples:  # texts as numbers, the arm of each, and how many different ones there are
        names = {text: i for i, text in enumerate(Counter(pair[0]) | Counter(pair[1]))}
        codes = np.array([names[text] for arm in pair for text in arm])
        tables.append((codes, np.repeat([0, 1], [len(pair[0]), len(pair[1])]), len(names)))
    real = float(np.mean([_distance(codes, arms, size) for codes, arms, size in tables]))
    shuffled = np.array([
        np.mean([_distance(codes, rng.permutation(arms), size) for codes, arms, size in tables])
        for _ in range(PERMUTATIONS)
    ])  # fmt: skip
    p_value = (1 + int((shuffled >= real - 1e-12).sum())) / (1 + PERMUTATIONS)
    return real, float(shuffled.mean()), p_value


def _distance(codes: Ints, arms: Ints, size: int) -> float:
    one = np.bincount(codes[arms == 0], minlength=size)
    other = np.bincount(codes[arms == 1], minlength=size)
    return float(np.abs(one / max(one.sum(), 1) - other / max(other.sum(), 1)).sum() / 2)


def holm_rejects(p_values: Sequence[float], error: float) -> list[bool]:
    """Per test whether it is rejected, with chance `error` of a false one over all of them."""
    order = sorted(range(len(p_values)), key=lambda n: p_values[n])
    rejected = [False] * len(p_values)
    for place, n in enumerate(order):
        if p_values[n] > error / (len(p_values) - place):
            break
        rejected[n] = True
    return rejected
