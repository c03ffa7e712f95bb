"""Matching: a draft stays if it is the token that the target chooses there itself.

The output is what plain decoding gives, token by token, whatever was drafted.
"""

from collections.abc import Sequence as Seq
from typing import final

from torch import Tensor

from foretoken.ops.rejection import agreeing
from foretoken.runtime.rules.base import ChainRule, Check


@final
class MatchingRule(ChainRule):
    """The target's own tokens, as far as the drafts agree and one further."""

    name = "matching"

    def decide(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Choose the target's own tokens; distributions of drafts do not matter."""
        # The target's token is chosen at every row, as if all drafts before it were right. Up to
        # the first draft that is not the target's own token they are, and rows are those of plain
        # decoding. What was chosen behind it means nothing and is dropped.
        rows = [check.rows for check in checks]
        targets: list[int] = self._sampler.choose(logits_PV, rows).tolist()
        found, start = [], 0
        for check in checks:
            end = start + check.rows.num_rows
            found.append(matched(check, targets[start:end]))
            start = end
        return found


def matched(check: Check, own: list[int]) -> tuple[int, ...]:
    """The target's own tokens of a check's rows, as far as they are those after its drafts."""
    return tuple(own[: agreeing(check.drafts, own) + 1])
