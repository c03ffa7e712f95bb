"""Synthetic acceptance: keeps drafts at given rates, whatever they are. The output is INVALID.

For measuring an engine apart from the quality of its drafts. Reproducible: how many drafts stay
is a pure function of the request's key and the position.
"""

from collections.abc import Sequence as Seq
from typing import final

from torch import Tensor

from foretoken.ops.noise import Stream, row_key, uniform
from foretoken.runtime.rules.base import ChainRule, Check, with_last


def num_kept(drafts: Seq[int], rates: Seq[float], key: int, position: int) -> int:
    """How many drafts stay: one uniform decides, those whose rate is above it do."""
    bar = uniform(row_key(key, position, Stream.ACCEPT))
    count = 0
    for token, rate in zip(drafts, rates, strict=False):
        if bar >= rate or token < 0:
            break
        count += 1
    return count


@final
class SyntheticRule(ChainRule):
    """Keeps draft i in a share rates[i] of the verifications, always with those before it."""

    name = "synthetic"

    def decide(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Decide by the rates alone: neither what was drafted nor its distribution matters."""
        rows, rates = [check.rows for check in checks], self._settings.synthetic_rates
        targets: list[int] = self._sampler.choose(logits_PV, rows).tolist()
        kept, last, start = [], [], 0
        for check in checks:
            # The number that stays is drawn from the request's key and the position, so that a run
            # can be repeated.
            key = self._sampler.profile(check.rows.sequence.request).key
            kept.append(num_kept(check.drafts, rates, key, check.rows.position))
            last.append(targets[start + kept[-1]])
            start += check.rows.num_rows
        return with_last(checks, kept, last)
