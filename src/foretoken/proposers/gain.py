"""Whether one more draft pays: the time it is expected to save against the time it takes.

Works on chances, counts and seconds of the past; knows neither tokens nor logits. Invariant: what
it is told about drafts is known before the draft that it judges is drawn.
"""

from collections.abc import Sequence
from typing import final

from foretoken.proposers.worth import Ratio, Spent, StepCost, StepOutcome

_SURE = 0.7
"""Before it is known: the chance of a drafter's best next token."""
_LEAST_TRUST, _MOST_TRUST = 0.1, 1.5
"""Accepted drafts per promised one, at the least and at the most."""
_LEARN = 0.1
"""Share of a new pass in what a pass takes."""
_SLOWLY = 0.01
"""The same for the mean chance of a best next token."""
_DOUBT = 0.99
"""What the time of a pass is multiplied by whenever none is worth it, so that one is timed again
some day."""


@final
class Gain:
    """What drafts of one drafter save and take, in seconds."""

    def __init__(self) -> None:
        """Nothing measured yet: drafts are taken to be cheap, so that they will be."""
        self._cost = StepCost()
        self._spent = Spent()
        self._trust = Ratio()
        self._pass_s: float | None = None
        self._sure = _SURE
        self._promised = 0.0
        self._token_s = self._row_s = 0.0

    def begin(self, num_spans: int) -> None:
        """A step begins to draft for so many sequences."""
        self._promised = 0.0
        trust = min(max(self._trust.value(1.0), _LEAST_TRUST), _MOST_TRUST)
        self._row_s = self._cost.of_row()
        plain_s = self._cost.of_step(num_spans) / num_spans
        self._token_s = plain_s * self._spent.share * trust

    def judges(self, sure: float, reach: float) -> bool:
        """Whether checking a draft pays that has the chance `sure`, with all before it `reach`."""
        self.saw([sure])
        return reach * self._token_s > self._row_s

    def of_next(self, reach: float) -> float:
        """What checking one more draft saves after one that is reached and accepted with the
        chance `reach`, before its own chance is known."""
        return reach * self._sure * self._token_s - self._row_s

    def allows_pass(self, saved: float) -> bool:
        """Whether drafts that save so much are worth a pass of the drafter."""
        if saved > (self._pass_s or 0.0):
            return True
        self.doubt()
        return False

    def rule(self) -> tuple[float, float, float, float]:
        """As in `StopRule`: token, row, usual, another."""
        return self._token_s, self._row_s, self._sure, self._pass_s or 0.0

    def saw(self, chances: Sequence[float]) -> None:
        """Best next tokens had these chances."""
        for sure in chances:
            self._sure += _SLOWLY * (sure - self._sure)

    def doubt(self) -> None:
        """No pass was worth it."""
        if self._pass_s is not None:
            self._pass_s *= _DOUBT

    def promise(self, reach: float) -> None:
        """A draft will be checked; it and all before it are accepted with this chance."""
        self._promised += reach

    def add_pass(self, seconds: float) -> None:
        """A pass of the drafter took so long; an outlier counts as three usual ones at most."""
        before = self._pass_s
        if before is None:
            self._pass_s = seconds
        else:
            self._pass_s = before + _LEARN * (min(seconds, 3.0 * before) - before)

    def observe(self, outcome: StepOutcome, drafter: str) -> None:
        """Learn what became of the step, of which `drafter` is the name of this one."""
        accepted = sum(count for _, name, count in outcome.drafts if name == drafter)
        self._trust.add(self._promised, accepted)
        self._promised = 0.0
        if outcome.num_prefilled or not outcome.num_sampled:
            return
        self._cost.add(outcome.num_rows, outcome.seconds)
        plain_s = self._cost.of_step(outcome.num_sampled) / outcome.num_sampled
        self._spent.add(outcome.seconds + outcome.drafting_s, plain_s * outcome.num_output)
