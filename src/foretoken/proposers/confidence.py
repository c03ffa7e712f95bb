"""When a chain drafter stops before its budget: where it is unsure of the next token, or where one
more draft is expected to take more time than it saves.

Knows logits, counts and seconds only. Invariant: decided on the distribution before its token is
drawn, and a token that was drawn is always checked; what is dropped is never dropped for what it
turned out to be.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.control.gain import Gain
from foretoken.control.plan import DraftPrice
from foretoken.models.tensors import RolloutPlan, Stopped, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure of its next token a drafter must be to go on."""

    threshold: float = 0.0
    """Stop where the best next token has less probability than this, filters and temperature
    aside; 0: never."""
    least: int = 0
    """Never stop before this many drafts."""
    gain: Gain | None = None
    """Stop where no gain is expected, by what is measured here where the plan of a step has no
    price; None: nobody asked for it."""

    @classmethod
    def of(cls, config: DrafterConfig) -> Self:
        """What a drafter's settings say."""
        return cls(
            threshold=config.stop.draft_confidence_threshold,
            least=config.stop.min_speculative_tokens,
            gain=Gain() if config.stop.draft_expected_gain else None,
        )

    def begin(self, num_spans: int, price: DraftPrice | None = None) -> "Stopping | None":
        """One step's drafts of so many spans, stopped at the `price` of its plan, or by the gain
        that was measured here; None: no reason to stop will be found."""
        gain = self.gain if price is None else None
        if gain is not None:
            gain.begin(num_spans)
            price = gain.price
        if price is None and not self.threshold:
            return None
        return Stopping(self, num_spans, price, gain)


def best_chances(logits_BV: Tensor) -> list[float]:
    """The probability of each row's best token."""
    chances: list[float] = (logits_BV.amax(dim=-1) - logits_BV.logsumexp(dim=-1)).exp().tolist()
    return chances


@final
class Stopping:
    """Which spans of a step draft on. Asked before each draft and before each pass."""

    def __init__(
        self, how: Confidence, num_spans: int, price: DraftPrice | None, gain: Gain | None
    ) -> None:
        """Nothing drafted yet; `Confidence.begin` makes it.

        Args:
            how: the settings.
            num_spans: of the step.
            price: of a draft and of a pass; None: only the threshold counts.
            gain: learns from this step; None: the price is the plan's.
        """
        self._how, self._price, self._gain = how, price, gain
        self._reach = [1.0] * num_spans
        self._expected = [0.0] * num_spans
        self._since: float | None = None

    @property
    def promises(self) -> list[float] | None:
        """How many drafts of each span are expected to be accepted, to learn from: the sum of their
        chances, each with all before it. None: drafts have no price."""
        return None if self._price is None else self._expected

    def keeps(
        self,
        logits_BV: Tensor,
        active: Sequence[int],
        counts: Sequence[int],
        sure: Sequence[float] | None = None,
    ) -> list[int]:
        """Rows whose next token is to be drafted: before the first one, this may be none.

        Args:
            logits_BV: float32, of that token.
            active: the span of each row.
            counts: the drafts that each has.
            sure: the chance of each row's draft, if something better is known than that of its best
                token.
        """
        how, gain, price, now = self._how, self._gain, self._price, time.perf_counter()
        best_B = sure or best_chances(logits_BV)
        if gain is not None:
            gain.saw(best_B)
            if self._since is not None:
                gain.add_pass(now - self._since)
        kept = []
        for row, (span, count, chance) in enumerate(zip(active, counts, best_B, strict=True)):
            reach = self._reach[span] * chance
            goes_on = chance >= how.threshold and (price is None or price.pays(reach))
            if goes_on or count < how.least:
                kept.append(row)
                self._reach[span] = reach
                self._expected[span] += reach
        self._since = time.perf_counter()
        return kept

    def on(
        self, plan: RolloutPlan, active: Sequence[int], count: int, *, at_once: bool = False
    ) -> RolloutPlan:
        """The rollout `plan`, made to end where this says.

        Args:
            plan: of the spans `active`.
            count: the drafts that each of them has.
            at_once: whether one pass gives them all.
        """
        price = self._price or DraftPrice(1.0, 0.0, 1.0, -1.0)
        rule = StopRule(
            least_sure=self._how.threshold,
            token=price.token_s,
            row=price.row_s,
            usual=price.usual,
            another=-1.0 if at_once else price.pass_s,
            least=max(self._how.least - count, 0),
            reach=[self._reach[span] for span in active],
        )
        self._since = None if at_once else time.perf_counter()
        return replace(plan, stop=rule)

    def took(self, active: Sequence[int], stopped: Stopped) -> None:
        """Learn of what became of such a rollout."""
        gain, count = self._gain, len(active)
        for row, span in enumerate(active):
            for sure in stopped.sure[row::count][: stopped.lengths[row]]:
                self._reach[span] *= sure
                self._expected[span] += self._reach[span]
        passes = len(stopped.sure) // count
        if gain is not None:
            gain.saw(stopped.sure)
            if self._since is not None and passes:
                gain.add_pass((time.perf_counter() - self._since) / passes)
                if not stopped.going:
                    gain.doubt()
        self._since = None

    def goes_on(self, active: list[int], counts: Sequence[int]) -> list[int]:
        """Spans that are worth another pass of the drafter, given how many drafts each has."""
        price = self._price
        if price is None or not active:
            return active
        saved = {i: price.of_next(self._reach[i]) for i in active}
        must = {i for i, count in zip(active, counts, strict=True) if count < self._how.least}
        if not must and sum(saved.values()) <= price.pass_s:
            if self._gain is not None:
                self._gain.doubt()
            return []
        return [i for i in active if i in must or saved[i] > 0.0]
