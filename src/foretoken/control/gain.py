"""Whether one more draft pays: the time it is expected to save against the time it takes.

Works on chances, counts and seconds of the past; knows neither tokens nor logits. Invariant: what
it is told about drafts is known before the draft that it judges is drawn.
"""

from collections.abc import Sequence
from typing import final

from foretoken.control.acceptance import ConfidenceAcceptance
from foretoken.control.cost import PassCost, RelativeCost, RowCost, StepShape
from foretoken.control.plan import DraftOutcome, DraftPrice
from foretoken.types import StepStats


@final
class Gain:
    """What drafts of one drafter save and take, in seconds."""

    def __init__(self) -> None:
        """Nothing measured yet: drafts are taken to be cheap, so that they will be."""
        self._step = RowCost()
        self._pass = PassCost()
        self._relative = RelativeCost()
        self._acceptance = ConfidenceAcceptance()
        self._token_s = self._row_s = 0.0

    def begin(self, num_spans: int) -> None:
        """A step begins to draft for so many sequences."""
        self._row_s = self._step.row_seconds()
        # A token is worth what it takes now, not what it would take in a plain step: where drafts
        # already make tokens cheap, one more of them saves less.
        self._token_s = self._plain_token_s(num_spans) * self._relative.share
        self._token_s *= self._acceptance.trust

    @property
    def price(self) -> DraftPrice:
        """The numbers by which the drafts of this step end."""
        usual = self._acceptance.usual_chance
        return DraftPrice(self._token_s, self._row_s, usual, self._pass.seconds)

    def saw(self, chances: Sequence[float]) -> None:
        """Best next tokens had these chances."""
        self._acceptance.saw(chances)

    def doubt(self) -> None:
        """No pass was worth it."""
        self._pass.doubt()

    def add_pass(self, seconds: float) -> None:
        """A pass of the drafter took so long."""
        self._pass.observe(seconds)

    def observe(self, outcomes: Sequence[DraftOutcome], stats: StepStats, drafter: str) -> None:
        """Learn what became of a step, in which `drafter` is the name of this one."""
        own = [outcome for outcome in outcomes if outcome.drafter == drafter]
        promised = sum(outcome.promise or 0.0 for outcome in own)
        self._acceptance.observe(promised, sum(outcome.num_accepted for outcome in own))
        if stats.num_prefilled or not stats.num_sampled:
            return
        self._step.observe(StepShape(rows=stats.num_tokens), stats.busy_s - stats.drafting_s)
        plain_s = self._plain_token_s(stats.num_sampled) * stats.num_output_tokens
        self._relative.observe(stats.busy_s, plain_s)

    def _plain_token_s(self, num_sequences: int) -> float:
        """Seconds that a plain step of so many sequences takes for each."""
        return self._step.seconds(StepShape(rows=num_sequences)).seconds / num_sequences
