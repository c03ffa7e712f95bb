"""How far each sequence drafts, and with whom, decided by what steps take and what is accepted.

One question per step (`plan`), one answer to learn from (`observe`). The models of time and of
acceptance are asked for numbers, `allocate` chooses, the ledger keeps anyone from losing, the
account pays for trials. A plan is kept for some steps while the batch stays the same, so that
deciding costs a small share of a step, and made anew as soon as something surprising happens.
Invariant: what decides is known before any draft of the step is drawn.
"""

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, final

from foretoken.control.budget import RequestBudget
from foretoken.control.drafter import DrafterFacts
from foretoken.control.exploring import PLAIN
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.cost import DrafterCost, DraftShape, LearnedCost
from foretoken.control.plan import (
    DecodingSequence,
    DraftOutcome,
    DraftPlan,
    StepForecast,
    StepLoad,
)
from foretoken.control.planner import MadePlan, Planner
from foretoken.types import DraftingTime, StepStats

_DECIDING = 0.004
"""Share of the time that deciding may take."""
_KEPT_LEAST, _KEPT_MOST = 4, 64
"""Steps that a plan is kept for."""
_SURPRISES = 3
"""Steps in turn without any accepted draft after which a plan is made anew."""


@final
class AdaptiveControl:
    """Plans steps by models that learn. `plan` is a `foretoken.control.plan.DraftPlanner`."""

    def __init__(
        self,
        caps: RequestBudget,
        drafters: Seq[DrafterFacts],
        target: LearnedCost,
        costs: Mapping[str, DrafterCost],
        acceptance: LearnedAcceptance,
    ) -> None:
        """Nothing learnt yet beside what the models know.

        Args:
            caps: what users and operators allow.
            drafters: whom to choose from, in the order of the settings.
            target: seconds of the target's steps.
            costs: seconds of each drafter, by name.
            acceptance: of their drafts.
        """
        self._planner = Planner(caps, drafters, target, costs, acceptance)
        self._caps, self._operator = caps, caps.operator
        self._made: MadePlan | None = None
        self._sequences: list[DecodingSequence] = []
        self._steps_left = self._steps_done = self._in_vain = 0
        self._deciding_s = self._step_s = 0.0

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """How far the decoding sequences of the next step draft."""
        made = self._made
        if made is not None and self._steps_left > 0 and self._still_holds(made, sequences, load):
            self._steps_left -= 1
            self._steps_done += 1
            return made.plan
        began = time.perf_counter()
        if made is not None:
            self._planner.put_away(made, self._steps_done)
        self._operator, self._sequences = self._caps.operator, list(sequences)
        made = self._made = self._planner.make(self._sequences, load)
        self._steps_done, self._in_vain = 1, 0
        self._deciding_s += 0.2 * (time.perf_counter() - began - self._deciding_s)
        self._steps_left = self._steps_to_keep(made)
        return made.plan

    def observe(self, plan: DraftPlan, outcomes: Seq[DraftOutcome], stats: StepStats) -> None:
        """Learn what became of a planned step."""
        made, forecast = self._made, plan.forecast
        if made is None or made.plan is not plan or forecast is None:
            return
        self._step_s = stats.total_s
        self._learn_times(made, stats)
        self._learn_acceptance(outcomes)
        self._book(made, outcomes, stats, forecast)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ones are fine."""
        self._planner.release(request_id)

    def describe(self) -> dict[str, Any]:
        """What is known and what is done now, for people."""
        planner, made = self._planner, self._made
        forecast = None if made is None else made.plan.forecast
        acceptance = planner.acceptance.describe()
        return {
            "drafters": {
                name: {
                    "state": "resting" if one.rests else "drafting",
                    "acceptance": acceptance.get(name, {}),
                    "cost": one.cost.describe(),
                }
                for name, one in planner.drafters.items()
            },
            "target": planner.target.describe(),
            "step": None
            if forecast is None
            else {
                "predicted_s": forecast.seconds,
                "plain_s": forecast.plain_s,
                "tokens": forecast.tokens,
            },
            "account_s": planner.account.balance_s,
            "trials_s": planner.account.spent_s,
            "deciding_s": self._deciding_s,
            "worst_loss_s": -planner.ledger.worst_s,
        }

    def _still_holds(
        self, made: MadePlan, sequences: Seq[DecodingSequence], load: StepLoad
    ) -> bool:
        prompts = (made.plan.load.num_prompt_tokens > 0) == (load.num_prompt_tokens > 0)
        return prompts and self._sequences == sequences and self._caps.operator is self._operator

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
        return min(max(min(steps, *due, _KEPT_MOST), _KEPT_LEAST), _KEPT_MOST) - 1

    def _learn_times(self, made: MadePlan, stats: StepStats) -> None:
        planner, prompt, drafted = self._planner, stats.num_prefilled, stats.num_draft_tokens
        # What the step really computed of prompts may differ from what was foreseen.
        rows = made.shape.rows - made.shape.prompt_rows + prompt + drafted
        shape = made.shape._replace(rows=rows, prompt_rows=prompt)
        seconds = stats.total_s - stats.drafting_s
        planner.target.observe(shape, seconds)
        for drafting in stats.drafters:
            self._learn_drafting(made, drafting)
        if not prompt and not made.shape.prompt_rows and drafted < len(made.rows_s):
            ratio = seconds / float(made.rows_s[drafted])
            planner.missed.observe(shape.sequences, drafted=drafted > 0, ratio=ratio)

    def _learn_drafting(self, made: MadePlan, drafting: DraftingTime) -> None:
        drafter = self._planner.drafters.get(drafting.name)
        if drafter is None or not drafting.sequences:
            return
        # What was missed is read in the first step of a plan.
        fed_rows = made.missing.get(drafting.name, 0) if self._steps_done == 1 else 0
        shape = DraftShape(
            sequences=drafting.sequences,
            passes=drafting.depth,
            rows=drafting.num_drafts,
            context=made.shape.context,
            fed_rows=fed_rows,
        )
        drafter.cost.observe(shape, drafting.seconds)

    def _learn_acceptance(self, outcomes: Seq[DraftOutcome]) -> None:
        accepted = 0
        for request_id, drafter, num_drafted, num_accepted, _ in outcomes:
            accepted += num_accepted
            if drafter in self._planner.drafters:
                self._planner.acceptance.observe(request_id, drafter, num_drafted, num_accepted)
        if outcomes:
            self._in_vain = 0 if accepted else self._in_vain + 1
            if self._in_vain >= _SURPRISES:
                self._steps_left = 0

    def _book(
        self, made: MadePlan, outcomes: Seq[DraftOutcome], stats: StepStats, forecast: StepForecast
    ) -> None:
        """Who gained, what was earned for trials, and what a trial cost."""
        plain_s, count, account = forecast.plain_s, len(made.ids), self._planner.account
        account.earn(stats.total_s, plain_s)
        made.gained_s += plain_s - stats.total_s
        drafted = accepted = 0
        if outcomes:
            place = {request_id: i for i, request_id in enumerate(made.ids)}
            for outcome in outcomes:
                drafted += outcome.num_drafted
                accepted += outcome.num_accepted
                at = place.get(outcome.request_id)
                if at is not None:
                    made.gained_s[at] += plain_s * outcome.num_accepted
        account.steps_since_plain = account.steps_since_plain + 1 if outcomes else 0
        if made.trial == PLAIN:
            account.charge(max(plain_s - forecast.seconds, 0.0))
        elif made.trial:
            account.charge(forecast.seconds - plain_s * (1.0 + accepted / count))
            tried = self._planner.drafters[made.trial]
            tried.learn_trial(drafted, accepted, all_tried=len(outcomes) == count > 1)
