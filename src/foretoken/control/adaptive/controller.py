"""How far each sequence drafts, and with whom, decided by what steps take and what is accepted.

One question per step (`plan`), one answer to learn from (`observe`). The models of time and of
acceptance are asked for numbers, `allocate` chooses, the ledger keeps anyone from losing, the
account pays for trials. A plan is kept for some steps while the batch stays the same, so that
deciding costs a small share of a step, and made anew as soon as something surprising happens.
Invariant: what decides is known before any draft of the step is drawn.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, final

from foretoken.control.adaptive.exploring import PLAIN
from foretoken.control.adaptive.planner import MadePlan, Planner
from foretoken.control.adaptive.step_times import RecentTimes
from foretoken.control.cost import StepShape
from foretoken.control.plan import (
    DecodingSequence,
    DraftOutcome,
    DraftPlan,
    StepForecast,
    StepLoad,
    plan_no_drafts,
)
from foretoken.control.report.explain import Outlook
from foretoken.control.report.known import describe_models, pass_seconds, prediction_error
from foretoken.types import StepStats

_DECIDING = 0.004
"""Share of the time that deciding may take."""
_DECIDING_AGAIN = 0.01
"""The same where sequences come and go."""
_MANY = 4
"""Sequences from which on a newcomer waits for the next plan."""
_KEPT_LEAST, _KEPT_MOST = 4, 64
"""Steps that a plan is kept for."""
_SURPRISING = 0.01
"""Chance of a run of steps without any accepted draft at which a plan is made anew."""
_LEARNS_EVERY_S = 0.008
"""Seconds of steps that are learnt from at once."""
_APART = 512
"""Steps that are learnt from one by one."""
_TOGETHER = 16
"""Steps whose times are learnt together, those of a shape by their median."""


@final
class AdaptiveControl:
    """Plans steps by models that learn. `plan` is a `foretoken.control.plan.DraftPlanner`."""

    def __init__(self, planner: Planner, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Ask `planner` from time to time; what deciding takes is read from `clock`."""
        self._planner, self._clock = planner, clock
        self._operator = planner.operator
        self._made: MadePlan | None = None
        self._sequences: list[DecodingSequence] = []
        self._steps_left = self._steps_done = 0
        self._in_vain = 1.0
        self._is_first = True
        self._times = RecentTimes()
        self._waiting: list[tuple[Seq[DraftOutcome], StepStats]] = []
        self._deciding_s = self._step_s = self._since_made_s = 0.0

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """How far the decoding sequences of the next step draft."""
        made = self._made
        if made is not None and self._steps_left > 0 and self._still_holds(made, sequences, load):
            self._steps_left -= 1
            self._steps_done += 1
            return made.plan
        if not self._planner.operator.enabled:
            return self._nobody(sequences, load)
        if made is None:
            return self._make_anew(sequences, load, self._clock())
        carries = self._carries_over(made, sequences)
        if carries and not any(made.plan.lengths):
            # Nobody drafted, and nobody will before the next plan.
            self._since_made_s += self._step_s
            return plan_no_drafts(sequences, load, made.plan.resting)
        began = self._clock()
        if made.plan.forecast is not None:
            self._catch_up(made, made.plan.forecast)
        self._learn_times(made)
        self._planner.put_away(made, self._steps_done)
        if not carries:
            return self._make_anew(sequences, load, began)
        self._since_made_s += self._steps_done * self._step_s
        carried = self._planner.carry_over(made, list(sequences), load)
        self._begin(carried, sequences)
        self._steps_left = max(self._steps_left - 1, 0)
        return carried.plan

    def _make_anew(
        self, sequences: Seq[DecodingSequence], load: StepLoad, began: float
    ) -> DraftPlan:
        """A new plan, the time of which counts from `began`."""
        made = self._planner.make(list(sequences), load)
        self._begin(made, sequences)
        self._since_made_s, self._in_vain = 0.0, 1.0
        self._deciding_s += 0.2 * (self._clock() - began - self._deciding_s)
        self._steps_left = self._steps_to_keep(made)
        return made.plan

    def _begin(self, made: MadePlan, sequences: Seq[DecodingSequence]) -> None:
        """This plan holds from now on."""
        self._made, self._sequences = made, list(sequences)
        self._operator = self._planner.operator
        self._steps_done, self._is_first = 1, True

    def observe(self, plan: DraftPlan, outcomes: Seq[DraftOutcome], stats: StepStats) -> None:
        """Learn what became of a planned step: not at once where steps are short, since code that
        runs once in a while is slower than what it works on."""
        made = self._made
        if made is None or made.plan is not plan or plan.forecast is None:
            return
        self._waiting.append((outcomes, stats))
        step_s = self._step_s = stats.total_s
        if made.trial or len(self._waiting) * step_s >= _LEARNS_EVERY_S:
            self._catch_up(made, plan.forecast)

    def _catch_up(self, made: MadePlan, forecast: StepForecast) -> None:
        """Learn from the steps that wait."""
        account = self._planner.account
        for outcomes, stats in self._waiting:
            drafted, accepted = self._learn_acceptance(made, outcomes)
            # Of a step with prompts one does not know what it would have taken without drafts: how
            # many tokens of them are computed is settled after the plan.
            prompts = stats.num_prefilled or forecast.prompt_s
            made.spare_s += forecast.plain_s - (forecast.seconds if prompts else stats.total_s)
            account.earn(stats.total_s, forecast.token_s)
            account.steps_since_plain = account.steps_since_plain + 1 if drafted else 0
            if made.trial:
                self._charge(made, forecast, accepted)
            self._times.add(made, stats, first=self._is_first)
            self._is_first = False
        self._waiting.clear()
        if made.below_floor != self._planner.below_floor:
            self._steps_left = 0
        if self._times.count >= _TOGETHER:
            self._learn_times(made)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ones are fine."""
        self._planner.release(request_id)

    def outlook(self, drafter: str) -> Outlook | None:
        """What the best length of a drafter would come to in the last planned step, if all had it;
        None where nobody may have its drafts. From any thread."""
        return None if self._made is None else self._made.outlook(drafter)

    def facts(self) -> dict[str, Any]:
        """What trials may still cost and cost so far, in seconds, tokens that were not written so
        that nobody is made slower, seconds that a plan takes, how far predictions are off, and what
        a pass of each drafter takes in the batch of the last plan. From any thread."""
        planner, made = self._planner, self._made
        sequences, context = (1, 0.0) if made is None else (len(made.ids), made.shape.context)
        return {
            "prediction_error": prediction_error(planner),
            "pass_s": pass_seconds(planner, sequences, context),
            "account_s": planner.account.balance_s,
            "trials_s": planner.account.spent_s,
            "forgone_tokens": planner.forgone_tokens,
            "deciding_s": self._deciding_s,
        }

    def models(self) -> dict[str, Any]:
        """All that was learnt. From any thread."""
        return describe_models(self._planner)

    def step_by_rows(self) -> list[dict[str, float]]:
        """Predicted seconds of plain steps of 1, 2, 4, ... sequences."""
        context = 0.0 if self._made is None else self._made.shape.context
        shapes = [StepShape(1 << power, 1 << power, context) for power in range(7)]
        return [
            {"rows": shape.rows, "seconds": self._planner.target.seconds(shape).seconds}
            for shape in shapes
        ]

    def _nobody(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """The operator wants no drafts: nothing is planned, and nothing learnt."""
        self._made = None
        self._waiting.clear()
        self._times.clear()
        return plan_no_drafts(sequences, load, frozenset(self._planner.drafters))

    def _carries_over(self, made: MadePlan, sequences: Seq[DecodingSequence]) -> bool:
        """Whether a plan for a batch that changed would come too soon after the last one."""
        soon = self._since_made_s * _DECIDING_AGAIN < self._deciding_s
        simple = not made.trial and not made.plan.feeds and made.plan.forecast is not None
        simple = simple and made.below_floor == self._planner.below_floor
        changed = self._sequences != sequences and self._planner.operator is self._operator
        return soon and simple and changed and len(sequences) >= _MANY

    def _still_holds(
        self, made: MadePlan, sequences: Seq[DecodingSequence], load: StepLoad
    ) -> bool:
        prompts = (made.plan.load.num_prompt_tokens > 0) == (load.num_prompt_tokens > 0)
        return prompts and self._sequences == sequences and self._planner.operator is self._operator

    def _steps_to_keep(self, made: MadePlan) -> int:
        """Steps after which a new plan has cost its share of the time, or a trial is due."""
        if made.trial or made.plan.feeds or not made.ids:
            return 0
        if not self._step_s:
            return _KEPT_LEAST
        steps = math.ceil(self._deciding_s / (_DECIDING * self._step_s))
        drafters = self._planner.drafters.values()
        unused = [d for d in drafters if d.facts.name not in made.plan.drafters]
        due = (d.spacing - d.since_trial for d in unused if not d.facts.looks_up)
        # A trial that is due and cannot be paid yet is no reason to plan more often.
        steps = min((max(each, steps // 2) for each in due if each < steps), default=steps)
        return min(max(steps, _KEPT_LEAST), _KEPT_MOST) - 1

    def _learn_acceptance(self, made: MadePlan, outcomes: Seq[DraftOutcome]) -> tuple[int, int]:
        """How many drafts were checked, and how many accepted."""
        planner = self._planner
        drafted = kept = 0
        for request_id, drafter, num_drafted, num_accepted, _ in outcomes:
            drafted += num_drafted
            kept += num_accepted
            made.accepted[request_id] = made.accepted.get(request_id, 0) + num_accepted
            if drafter == made.trial:
                planner.acceptance.observe_trial(request_id, drafter, num_drafted, num_accepted)
            elif drafter in planner.drafters:
                planner.acceptance.observe(request_id, drafter, num_drafted, num_accepted)
        if drafted:
            # A run without any accepted draft that was not to be expected.
            self._in_vain = 1.0 if kept else self._in_vain * made.chance_of_none
            if self._in_vain < _SURPRISING:
                self._steps_left = 0
        return drafted, kept

    def _learn_times(self, made: MadePlan) -> None:
        planner, shape = self._planner, made.shape
        # At first every step counts: so much depends on what the first ones take.
        apart = planner.target.steps < _APART
        for (prompt, drafted), seconds, steps in self._times.target(apart=apart):
            # What the step really computed of prompts may differ from what was foreseen.
            rows = shape.rows - shape.prompt_rows + prompt + drafted
            planner.target.observe(shape._replace(rows=rows, prompt_rows=prompt), seconds)
            if not prompt and not shape.prompt_rows and drafted < len(made.rows_s):
                ratio = seconds / float(made.rows_s[drafted])
                planner.missed.observe(shape.sequences, ratio, steps, drafted=drafted > 0)
        for drafting, seconds in self._times.drafters(apart=apart):
            drafter = planner.drafters.get(drafting.name)
            if drafter is not None and drafting.sequences:
                drafter.cost.observe(drafting.shape(shape.context), seconds)
        self._times.clear()

    def _charge(self, made: MadePlan, forecast: StepForecast, accepted: int) -> None:
        """What a trial cost beyond the plain steps that its tokens would have taken."""
        plain_s, count, account = forecast.plain_s, len(made.ids), self._planner.account
        if made.trial == PLAIN:
            account.charge(max(plain_s - forecast.seconds, 0.0))
            return
        lost_s = forecast.seconds - plain_s - forecast.token_s * accepted / count
        lost_s += 2.0 * self._deciding_s
        account.charge(lost_s)
        self._planner.learn_trial(made, lost_s / plain_s)
