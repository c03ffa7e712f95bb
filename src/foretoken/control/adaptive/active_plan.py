"""A plan that was made, and what becomes of it while requests come and go.

Planning looks at everything and takes long; carrying a plan over to a batch that is a little
different takes little. Whoever joins does what its class does. Knows no models.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, final

from foretoken.control.adaptive.allocation import DraftOption
from foretoken.control.adaptive.allocation_inputs import AllocationInputs
from foretoken.control.adaptive.plan_assembly import CATCHING_UP, Waiting
from foretoken.control.adaptive.step_times import PlainTimes
from foretoken.control.plan import (
    DecodingSequence,
    DraftPlan,
    Feed,
    StepForecast,
    StepLoad,
)
from foretoken.control.report.explain import Outlook


class PlannedDrafts(NamedTuple):
    """What one sequence does in each step of a plan."""

    length: int
    """Drafts by `drafter`, whose passes are part of the plan."""
    drafter: str
    budget: int
    """Most drafts, those without a pass included."""
    surplus: float
    """Tokens that `length` is expected to bring beyond what it costs."""


PLAIN = PlannedDrafts(0, "", 0, 0.0)
"""Of a sequence that decodes plainly."""
_FAR = 1.5
"""Times its forecast that a step with drafts counts for at most: beyond that it is the machine."""


@final
@dataclass(slots=True, kw_only=True)
class ActivePlan:
    """A plan, what it was made of, and what it says of each request."""

    plan: DraftPlan
    """Of the latest step."""
    held: dict[str, PlannedDrafts]
    """Of each request, those that joined later included."""
    class_of: dict[str, str]
    """The class of each request that the plan was made for."""
    gained_s: dict[str, float]
    """What each request had gained before, in seconds; of one that joined, less `spare_s` then."""
    context: float
    """Tokens of a sequence, on average."""
    row_takes_s: float = 0.0
    """Seconds of the step that each draft adds, passes included, on average."""
    row_brings: float = 0.0
    """Tokens that each draft adds, on average."""
    trial: str = ""
    """The drafter on trial, the name of the trial without drafts, or nothing."""
    lasts: int = 0
    """Steps that it is kept for, if it is there to find something out; 0: for as long as it
    holds."""
    trial_lost_s: float = 0.0
    """What a drafter's trial cost so far beyond the plain steps that its tokens took."""
    begun: frozenset[str] = frozenset()
    """Requests that draft from the first step on."""
    reading: dict[str, Waiting] = field(default_factory=dict)
    """For whom a drafter has to read more before it drafts."""
    missing: Counter[str] = field(default_factory=Counter)
    """Tokens that each drafter reads in the latest step."""
    chance_of_none: float = 1.0
    """That no draft of a step is accepted."""
    spare_s: float = 0.0
    """Seconds that plain steps would have taken beyond those that were measured."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Accepted drafts of each request."""
    has_free: bool = False
    """Whether there were drafts without a pass to make room for."""
    below_floor: frozenset[str] = frozenset()
    """Drafters that were no choice, since too little of them was accepted."""
    unguarded: float = 0.0
    """Tokens per second of the best plan that lets some wait for others."""
    weighed: tuple[AllocationInputs, list[DraftOption]] | None = None
    """What the plan was chosen from, drafters that have yet to wake included."""
    _classes: dict[str, PlannedDrafts] | None = None

    @property
    def forecast(self) -> StepForecast:
        """What is expected of the latest step."""
        assert self.plan.forecast is not None, "a plan that was made has a forecast"
        return self.plan.forecast

    @property
    def drafts(self) -> bool:
        """Whether anybody may draft."""
        return any(self.plan.budgets)

    def outlook(self, drafter: str) -> Outlook | None:
        """What the best length of a drafter would come to, if all sequences had it; None where
        nobody may have its drafts."""
        if self.weighed is None:
            return None
        inputs, options = self.weighed
        return next((inputs.outlook(one) for one in options if one.name == drafter), None)

    def usual(self, class_key: str) -> PlannedDrafts:
        """What most requests of a class do."""
        if self._classes is None:
            by_class: dict[str, list[PlannedDrafts]] = {}
            for request_id, key in self.class_of.items():
                by_class.setdefault(key, []).append(self.held[request_id])
            self._classes = {key: _most_common(held) for key, held in by_class.items()}
        return self._classes.get(class_key, PLAIN)

    def book(self, forecast: StepForecast, took_s: float | None, deciding_s: float) -> None:
        """A step of this forecast with drafts is over. It took so long, deciding aside; None: what
        it took says nothing of drafts."""
        if took_s is None:
            took_s = forecast.seconds
        self.spare_s += forecast.plain_s - min(took_s, _FAR * forecast.seconds) - deciding_s

    def gained(self, request_id: str) -> float:
        """What a request had gained before and has in the steps of this plan, in seconds."""
        token_s = self.forecast.token_s
        return self.gained_s[request_id] + self.spare_s + token_s * self.accepted[request_id]

    def join(
        self,
        request_id: str,
        held: PlannedDrafts,
        missing: int,
        *,
        gained_s: float,
    ) -> None:
        """A request that the plan was not made for takes part. Its drafter has not read `missing`
        tokens of it. It has gained so much before."""
        self.held[request_id] = held
        self.gained_s[request_id] = gained_s - self.spare_s
        if not held.length:
            return
        if missing < CATCHING_UP:
            self.missing[held.drafter] += missing
        else:
            self.reading[request_id] = Waiting(held.drafter, missing)

    def read_on(self, sequences: Seq[DecodingSequence], left: int) -> list[Feed]:
        """What drafters read in the next step of those that they cannot draft for yet: at most
        `left` tokens."""
        feeds = []
        for place, sequence in enumerate(sequences):
            request_id = sequence.request.request_id
            if request_id not in self.reading:
                continue
            drafter, missing = self.reading[request_id]
            rows = min(missing, left)
            if not rows:
                continue
            left -= rows
            feeds.append(Feed(place, drafter, rows, None))
            if rows == missing:
                del self.reading[request_id]
            else:
                self.reading[request_id] = Waiting(drafter, missing - rows)
        return feeds

    def _waiting(self, ids: Seq[str]) -> set[str]:
        """Who does not draft yet: those that are still to be read, and whoever would draft with
        less than half of those that are to. A pass for a few takes nearly as long as for all."""
        drafting = {i for i in ids if self.held[i].length}
        ready = drafting - self.reading.keys()
        if 2 * len(ready) < len(drafting):
            return drafting - self.begun
        return drafting - ready

    def carried(
        self,
        sequences: Seq[DecodingSequence],
        load: StepLoad,
        times: PlainTimes,
        feeds: Seq[Feed],
    ) -> DraftPlan:
        """The same plan for these sequences, all of which have joined."""
        for feed in feeds:
            self.missing[feed.drafter] += feed.rows
        before = self.forecast
        held, ids = self.held, [sequence.request.request_id for sequence in sequences]
        done = [held[request_id] for request_id in ids]
        waiting = self._waiting(ids) if self.reading else ()
        for place, request_id in enumerate(ids):
            if request_id in waiting:
                done[place] = PlannedDrafts(0, "", done[place].budget - done[place].length, 0.0)
        lengths, drafters, budgets, surplus = zip(*done, strict=True)
        rows = sum(lengths)
        self.plan = DraftPlan(
            load=load,
            budgets=budgets,
            lengths=lengths,
            drafters=drafters,
            surplus=surplus,
            feeds=tuple(feeds),
            resting=self.plan.resting,
            forecast=StepForecast(
                seconds=times.plain_s + times.prompt_s + rows * self.row_takes_s,
                plain_s=times.plain_s + times.prompt_s,
                prompt_s=times.prompt_s,
                tokens=len(lengths) + rows * self.row_brings,
                row_s=before.row_s,
                free_rows=before.free_rows,
            ),
            wanted=self.plan.wanted,
        )
        return self.plan


def _most_common(held: list[PlannedDrafts]) -> PlannedDrafts:
    (length, drafter), _ = Counter((one.length, one.drafter) for one in held).most_common(1)[0]
    return next(one for one in held if (one.length, one.drafter) == (length, drafter))
