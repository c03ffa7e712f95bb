"""What control did, and why: counts of the last steps, states of drafters, and a list of changes.

Watches steps from outside, whatever plans them, and decides nothing. Knows neither text nor
tokens. What it keeps per step is a handful of numbers, and sentences are made when somebody asks or
something changes. Invariant: `describe` says nothing of single requests or of their tenants, so
that the page may show it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any, final

from foretoken.control.plan import DraftOutcome, DraftPlan
from foretoken.control.report.explain import change
from foretoken.control.report.reasons import Why
from foretoken.types import StepStats

logger = logging.getLogger("foretoken")

LOOK_EVERY = 16
"""Steps after which states are looked at."""
_DRAFTS_FROM = 4
"""Of these, steps with drafts from which on a drafter drafts. It rests up to one of them, and in
between nothing changes, so that single trials and rare matches are no change."""
MOST_CHANGES = 32
"""Changes that are remembered, the last ones."""
_GONE_THROUGH_EVERY_S = 0.008
"""Seconds of steps that are counted at once."""
_HALVED_AT = 512
"""Verifications after which all that was counted so far counts half."""
_LEARNS = 0.05
"""Share of a new draft in the usual length."""
_LOG_EVERY_S = 1.0
"""Of one drafter, at most one line in this time."""


@final
class _DrafterRecord:
    """What one drafter did of late."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.rests = True
        self.said = 0
        """Usual length that the last change told."""
        self.last = -1
        """The last step in which a draft of it was checked."""
        self.plan: DraftPlan | None = None
        """Of that step."""
        self.looked = 0
        """Its steps with drafts at the last look."""
        self.rested_s = 0.0
        """Time of its rests that are over."""
        self.since_s = 0.0
        """Time that had gone by when this rest, or this drafting, began."""
        self.steps = self.drafts = self.accepted = 0
        self.checks = 0.0
        self.drafted_K = [0.0] * (max_drafts + 1)
        self.accepted_K = [0.0] * (max_drafts + 1)
        """Recent verifications with 0, 1, ... drafts, and that accepted so many."""
        self.usual = 0.0
        """Faded mean of its draft lengths."""
        self.logged_at = -_LOG_EVERY_S

    def add(self, drafted: int, accepted: int) -> None:
        """A verification of one of its drafts."""
        self.drafts += drafted
        self.accepted += accepted
        drafted = min(drafted, self.max_drafts)
        self.drafted_K[drafted] += 1.0
        self.accepted_K[min(accepted, drafted)] += 1.0
        self.usual += (drafted - self.usual) * (_LEARNS if self.checks > 1 / _LEARNS else 0.5)
        self.checks += 1.0
        if self.checks >= _HALVED_AT:
            self.checks *= 0.5
            self.drafted_K = [0.5 * count for count in self.drafted_K]
            self.accepted_K = [0.5 * count for count in self.accepted_K]

    @property
    def length(self) -> float:
        """Usual draft tokens of a verification; 0 while it rests."""
        return 0.0 if self.rests else self.usual

    def chances(self) -> list[float]:
        """Share of the recent drafts that reached each position and were accepted up to it."""
        reached = list(accumulate(reversed(self.drafted_K[1:])))[::-1]
        kept = list(accumulate(reversed(self.accepted_K[1:])))[::-1]
        pairs = zip(kept, reached, strict=True)
        return [round(one / of, 3) for one, of in pairs if of >= 0.5]


@final
class ControlJournal:
    """Is told of every step; says what is going on and why."""

    def __init__(
        self,
        mode: str,
        drafters: Mapping[str, int],
        why: Why,
        *,
        facts: Callable[[], Mapping[str, Any]] = dict,
        step_by_rows: Callable[[], list[dict[str, float]]] = list,
    ) -> None:
        """Nothing happened yet.

        Args:
            mode: `adaptive` or `fixed`; what decides.
            drafters: most drafts of each, by name.
            why: explains the present state of a drafter.
            facts: what models and books know: `account_s`, `trials_s`, `forgone_tokens`,
                `prediction_error`, and by drafter `pass_s`; read from any thread.
            step_by_rows: seconds of steps by rows as predicted; asked in the engine's thread.
        """
        self.mode = mode
        self.facts, self.step_by_rows = facts, step_by_rows
        self._why = why
        self._drafters = {name: _DrafterRecord(max_drafts) for name, max_drafts in drafters.items()}
        self._changes: deque[dict[str, Any]] = deque(maxlen=MOST_CHANGES)
        self._num_changes = 0
        self._waiting: list[tuple[DraftPlan, Seq[DraftOutcome], StepStats]] = []
        self._steps = 0
        self._num_wanted = 0
        """Steps in which somebody might have had drafts."""
        self._seconds = 0.0
        self._wasted_s: float | None = None
        """Time of checking drafts that were refused; None: no plan said what that takes."""
        self._last: tuple[DraftPlan, StepStats] | None = None
        self._failure = ""

    def observe(self, plan: DraftPlan, outcomes: Seq[DraftOutcome], stats: StepStats) -> None:
        """Add a step. Short steps are gone through some at a time."""
        if not stats.num_sampled:
            return
        self._waiting.append((plan, outcomes, stats))
        if len(self._waiting) * stats.busy_s >= _GONE_THROUGH_EVERY_S:
            self._go_through()

    def fail(self, why: str) -> None:
        """Control failed: every step is plain from now on, and no more steps are added."""
        self._failure = why
        for name, drafter in self._drafters.items():
            if not drafter.rests:
                drafter.rests = True
                self._say(name, drafter)

    def _go_through(self) -> None:
        """Count the steps that wait."""
        waiting, self._waiting = self._waiting, []
        for plan, outcomes, stats in waiting:
            self._count(plan, outcomes, stats)

    def _count(self, plan: DraftPlan, outcomes: Seq[DraftOutcome], stats: StepStats) -> None:
        self._steps += 1
        self._seconds += stats.busy_s
        forecast = plan.forecast
        if not plan.wanted or not plan.load.num_decoding:
            return  # it says nothing of whoever decides
        self._num_wanted += 1
        self._last = plan, stats
        if forecast is not None:
            refused = stats.num_draft_tokens - stats.num_accepted_tokens
            self._wasted_s = (self._wasted_s or 0.0) + refused * forecast.row_s
        for outcome in outcomes:
            drafter = self._drafters.get(outcome.drafter)
            if drafter is None:  # a prediction or a grammar: nobody chose it
                continue
            drafter.add(outcome.num_drafted, outcome.num_accepted)
            if drafter.last != self._num_wanted:
                drafter.last, drafter.plan = self._num_wanted, plan
                drafter.steps += 1
        if self._num_wanted % LOOK_EVERY == 0:
            self._look()

    def _look(self) -> None:
        """Find whose state, or usual length, is another than it was."""
        for name, drafter in self._drafters.items():
            drafted, drafter.looked = drafter.steps - drafter.looked, drafter.steps
            if drafted >= _DRAFTS_FROM if drafter.rests else drafted <= 1:
                if drafter.rests:
                    drafter.rested_s += self._seconds - drafter.since_s
                drafter.rests, drafter.since_s = not drafter.rests, self._seconds
                self._say(name, drafter)
            elif not drafter.rests and abs(drafter.length - drafter.said) >= 2.0:
                self._say(name, drafter)

    def why_plain(self, drafter: str | None = None) -> str:
        """Why steps are plain now, where they are; of the first drafter unless one is named."""
        for name, one in self._drafters.items():
            if one.rests and drafter in (None, name):
                return self._explained(name, one)
        return ""

    def describe(self) -> dict[str, Any]:
        """Everything that is shown, as plain JSON; durations in seconds. From any thread."""
        facts = self.facts()
        passes = facts.get("pass_s", {})
        return {
            "mode": self.mode,
            "failed": self._failure or None,
            "steps": self._steps,
            "drafters": {
                name: {**self._drafter(name, one), "pass_s": passes.get(name)}
                for name, one in self._drafters.items()
            },
            "step": self._step(),
            "prediction_error": facts.get("prediction_error"),
            "account_s": facts.get("account_s"),
            "exploring_s": facts.get("trials_s"),
            "forgone_tokens": facts.get("forgone_tokens"),
            "wasted_s": self._wasted_s,
            "num_changes": self._num_changes,
            "changes": list(self._changes),
        }

    def _drafter(self, name: str, drafter: _DrafterRecord) -> dict[str, Any]:
        return {
            "state": "resting" if drafter.rests else "drafting",
            "why": self._explained(name, drafter),
            "draft_length": round(drafter.length, 2),
            "most": drafter.max_drafts,
            "chances": drafter.chances(),
            "share_of_steps": drafter.steps / max(self._num_wanted, 1),
            "resting_s": drafter.rested_s
            + (self._seconds - drafter.since_s if drafter.rests else 0.0),
            "draft_tokens": drafter.drafts,
            "accepted_tokens": drafter.accepted,
        }

    def _explained(self, name: str, drafter: _DrafterRecord) -> str:
        if self._failure:
            return self._failure
        if self._last is None:
            return "no step yet"
        # Now and then a drafter that drafts is left out; why it drafts stands in its own plan.
        plan = self._last[0] if drafter.rests or drafter.plan is None else drafter.plan
        return self._why(name, not drafter.rests, plan)

    def _step(self) -> dict[str, Any] | None:
        """The last step; None before the first."""
        if self._last is None:
            return None
        plan, stats = self._last
        forecast = plan.forecast
        return {
            "running": plan.load.num_running,
            "measured_s": stats.busy_s,
            "output_tokens": stats.num_output_tokens,
            "predicted_s": None if forecast is None else forecast.seconds,
            "plain_s": None if forecast is None else forecast.plain_s,
            "expected_tokens": None if forecast is None else forecast.tokens,
        }

    def _say(self, name: str, drafter: _DrafterRecord) -> None:
        """Write down that a drafter's state or usual length changed, and log it."""
        now = round(drafter.length)
        sentence = change(name, drafter.said, now, self._explained(name, drafter))
        drafter.said = now
        self._num_changes += 1
        self._changes.append({"at": time.time(), "drafter": name, "sentence": sentence})
        clock = time.monotonic()
        if clock - drafter.logged_at >= _LOG_EVERY_S:
            drafter.logged_at = clock
            logger.info("control: %s", sentence)
