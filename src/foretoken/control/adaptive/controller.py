"""How far each sequence drafts, and with whom, decided by what steps take and what is accepted.

One question per step (`plan`), one answer to learn from (`observe`). The models of time and of
acceptance are asked for numbers, `allocate` chooses, the ledger keeps anyone from losing, the
account pays for trials. A plan is kept for some steps while the batch stays the same, so that
deciding costs a small share of a step, and made anew as soon as something surprising happens.
Invariant: what decides is known before any draft of the step is drawn.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, final

from foretoken.control.adaptive.active_plan import ActivePlan
from foretoken.control.adaptive.exploring import PLAIN
from foretoken.control.adaptive.planner import Planner
from foretoken.control.adaptive.step_times import PastStep, SeenStep
from foretoken.control.adaptive.tracked import class_of
from foretoken.control.learned.regression import LEAST_BATCH
from foretoken.control.plan import (
    DecodingSequence,
    DraftOutcome,
    DraftPlan,
    StepForecast,
    StepLoad,
    plan_no_drafts,
)
from foretoken.control.report.explain import Outlook
from foretoken.types import StepStats

_DECIDING, _DECIDING_LEAST = 0.012, 0.003
"""Share of the time that planning may take for one sequence, and for many: the fewer there are, the
more depends on each, and the more there is to gain."""
_DECIDING_AGAIN = 0.01
"""The same where the number of sequences changes much, or a class is new."""
_FEW = 2
"""Sequences up to which one that is new is planned for as soon as its first token is out: what one
accepts tells little of the next, and what is lost meanwhile is lost for all."""
_MUCH, _TOO_MUCH = 1.5, 4.0
"""Times as many sequences as planned for, or that part of them, from which on the plan is made
again: when that costs no more than its share, or at once."""
_KEPT_LEAST, _KEPT_MOST = 4, 256
"""Steps that a plan is kept for."""
_LEARNS_EVERY_S = 0.03
"""Seconds of steps that are learnt from at once."""
_SURPRISING = 0.01
"""Chance of a run of steps without any accepted draft at which a plan is made anew."""


@final
class AdaptiveControl:
    """Plans steps by models that learn. `plan` is a `foretoken.control.plan.DraftPlanner`."""

    def __init__(self, planner: Planner, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Ask `planner` from time to time; what deciding takes is read from `clock`."""
        self._planner, self._clock = planner, clock
        self._operator = planner.operator
        self._active: ActivePlan | None = None
        self._told: ActivePlan | None = None
        """The last plan by which somebody might have drafts: what `outlook` tells of."""
        self._sequences: list[DecodingSequence] = []
        self._repeated: DraftPlan | None = None
        """The plan of the last step, if it is that of the next one too while nothing changes."""
        self._batch: list[DecodingSequence] = []
        """Whom it is for."""
        self._seen: list[SeenStep] = []
        """Steps that are over and not looked at yet."""
        self._num_planned = self._steps_left = self._steps_done = 0
        self._in_vain = 1.0
        self._is_closed = True
        """Whether the batch has nobody that the plan was not made for, as far as is known."""
        self._times = planner.times
        self._waiting: list[PastStep] = []
        self._unplanned: DraftPlan | None = None
        self._unplanned_s = 0.0
        self._deciding_s = self._step_s = self._since_made_s = 0.0
        self._aside_s = 0.0
        """What deciding took of the step that is under way."""
        self._begins = False
        """Whether that step is the first after the prompts of who decodes."""
        self._has_drafted = False
        """Whether drafters ran in the last step."""

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """How far the decoding sequences of the next step draft."""
        self._aside_s, self._begins, last = 0.0, False, self._repeated
        if (
            last is not None
            and self._steps_left > 0
            and self._batch == sequences
            and last.load == load
            and self._planner.operator is self._operator
        ):
            self._steps_left -= 1
            self._steps_done += 1
            return last
        self._look_back()
        self._repeated = None
        plan = self._decide(sequences, load)
        active = self._active
        if active is not None and not active.trial and not active.reading and not plan.feeds:
            self._batch = list(sequences)
            self._repeated = plan
        return plan

    def _decide(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """The same, where something is different from the last step, or some steps went by."""
        if not self._planner.operator.enabled:
            return self._nobody(sequences, load)
        active = self._active
        if not sequences:
            return self._plain((), load)
        if active is None:
            return self._make_anew(sequences, load)
        # A first token is on its way to whoever waits for it: computing in Python holds that up.
        begins = sequences[-1].num_output == 1
        if begins and len(sequences) <= _FEW:
            self._begins, found = True, None
            if len(sequences) == 1:
                found = self._planner.look_up_only(active, sequences[0], load)
            self._steps_left, self._unplanned = 0, found or self._plain(sequences, load)
            return self._unplanned
        if self._is_due(active) and not begins:
            began = self._clock()
            self._catch_up(active)
            self._aside_s += self._clock() - began
        if not self._is_kept(active, sequences) or self._is_unsure(active, sequences):
            return self._make_anew(sequences, load)
        self._steps_left -= 1
        self._steps_done += 1
        if not active.drafts and not active.reading:
            # Nobody drafts before the next plan, which somebody new brings closer.
            if self._is_closed and sequences[-1].request.request_id not in active.held:
                self._is_closed = False
                self._steps_left //= 2
            self._unplanned = self._plain(sequences, load)
            return self._unplanned
        if not self._still_holds(active, sequences, load):
            began = self._clock()
            self._sequences = list(sequences)
            self._planner.carry_over(active, self._sequences, load)
            self._aside_s += self._clock() - began
        return active.plan

    def _make_anew(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """A new plan, after everything was learnt from the steps of the last one."""
        began = self._clock()
        if self._active is not None:
            self._catch_up(self._active)
            self._end_trial(self._active)
            self._planner.put_away(self._active, self._steps_done)
            self._learn_times(self._active)
        self._sequences = list(sequences)
        active = self._planner.make(self._sequences, load)
        self._active, self._operator = active, self._planner.operator
        if active.plan.wanted and active.weighed is not None:
            self._told = active
        self._num_planned, self._steps_done, self._is_closed = len(sequences), 1, True
        self._since_made_s, self._in_vain = 0.0, 1.0
        took_s = self._clock() - began
        self._aside_s += took_s
        self._deciding_s += 0.2 * (took_s - self._deciding_s)
        self._steps_left = self._steps_to_keep(active)
        return active.plan

    def observe(self, plan: DraftPlan, outcomes: Seq[DraftOutcome], stats: StepStats) -> None:
        """Note what became of a planned step. It is learnt from when another is planned: whoever
        waits for the tokens of this one does not wait for that."""
        self._seen.append(SeenStep(plan, outcomes, stats, self._aside_s, self._begins))
        if (len(self._seen) + len(self._waiting)) * stats.busy_s >= _LEARNS_EVERY_S:
            self._repeated = None

    def _look_back(self) -> None:
        """Go through the steps that are over: all but learning from them."""
        active = self._active
        for seen in self._seen:
            plan, _, stats, aside_s, begins = seen
            had_drafted, self._has_drafted = self._has_drafted, bool(stats.drafters)
            if active is None:
                continue
            self._step_s = stats.busy_s
            self._since_made_s += stats.busy_s
            if plan is active.plan:
                is_usual = had_drafted == self._has_drafted
                self._waiting.append(PastStep(seen, active.missing, is_usual))
                # What was missing was read in this step.
                active.missing = Counter()
            elif plan is self._unplanned:
                # Nothing was planned for this step: all that it tells is what it took. The first
                # after a prompt takes longer, for the change.
                self._unplanned_s += stats.busy_s
                if not stats.num_prefilled and not stats.num_draft_tokens and not begins:
                    self._times.add(plan.load, stats, {}, aside_s, is_usual=True)
        self._seen.clear()

    def _is_due(self, active: ActivePlan) -> bool:
        """Whether to learn now: not from each step where steps are short, since code that runs
        once in a while is slower than what it works on."""
        if active.trial:
            return bool(self._waiting)
        return len(self._waiting) * self._step_s >= _LEARNS_EVERY_S

    def _catch_up(self, active: ActivePlan) -> None:
        """Learn from the steps that wait."""
        account = self._planner.account
        for (plan, outcomes, stats, aside_s, _), missing, is_usual in self._waiting:
            forecast = plan.forecast
            assert forecast is not None, "a plan that was made has a forecast"
            drafted, accepted = self._learn_acceptance(active, outcomes)
            # Where nothing was drafted or read nobody gained or lost, however wrong the forecast.
            # Of a step with prompts one does not know what it would have taken without drafts: how
            # many tokens of them are computed is settled after the plan.
            if drafted or missing.total():
                told = not stats.num_prefilled and not forecast.prompt_s
                active.book(forecast, stats.busy_s - aside_s if told else None, aside_s)
            account.earn(stats.busy_s, forecast.token_s)
            account.steps_since_plain = account.steps_since_plain + 1 if drafted else 0
            if active.trial:
                self._charge(active, forecast, min(stats.busy_s, forecast.seconds), accepted)
            self._times.add(plan.load, stats, missing, aside_s, is_usual=is_usual)
        self._waiting.clear()
        if active.below_floor != self._planner.below_floor:
            self._steps_left = 0
        if self._times.count >= LEAST_BATCH:
            self._learn_times(active)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ones are fine."""
        self._look_back()
        self._repeated = None
        self._planner.release(request_id)

    def outlook(self, drafter: str) -> Outlook | None:
        """What the best length of a drafter would come to, if all had it, in the last planned step
        in which somebody might have drafts; None where nobody might have its. From any thread."""
        told = self._told
        return None if told is None else told.outlook(drafter)

    def facts(self) -> dict[str, Any]:
        """What trials may still cost and cost so far, in seconds, tokens that were not written so
        that nobody is made slower, seconds that a plan takes, how far predictions are off, and what
        a pass of each drafter takes in the batch of the last plan. From any thread."""
        planner, active = self._planner, self._active
        sequences, context = (
            (1, 0.0) if active is None else (len(active.plan.budgets), active.context)
        )
        return {
            "prediction_error": self._times.error(),
            "pass_s": self._times.passes(sequences, context),
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
        return self._times.by_rows(0.0 if self._active is None else self._active.context)

    def _nobody(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """The operator wants no drafts: nothing is planned, and nothing learnt."""
        self._active = self._told = None
        self._waiting.clear()
        self._times.clear()
        return self._plain(sequences, load)

    def _plain(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """Nobody drafts, and who rested goes on resting."""
        resting, wanted = frozenset(self._planner.drafters), True
        if self._planner.operator.enabled:
            wanted = self._planner.may_draft(sequences)
            resting = frozenset() if self._active is None else self._active.plan.resting
        last = self._unplanned
        if (
            last is not None
            and last.forecast is None
            and last.load == load
            and last.resting == resting
            and last.wanted == wanted
        ):
            return last
        return plan_no_drafts(sequences, load, resting, wanted=wanted)

    def _is_kept(self, active: ActivePlan, sequences: Seq[DecodingSequence]) -> bool:
        """Whether the plan goes on for this batch."""
        if self._steps_left <= 0 or self._planner.operator is not self._operator:
            return False
        if active.trial:
            # It was priced for these sequences.
            return self._sequences == sequences
        count = len(sequences)
        times = max(count / self._num_planned, self._num_planned / count)
        if times >= _TOO_MUCH:
            return False
        return times < _MUCH or self._has_to_earn

    def _is_unsure(self, active: ActivePlan, sequences: Seq[DecodingSequence]) -> bool:
        """Whether the plan has no good answer for the newest sequence, and a new one pays."""
        request = sequences[-1].request
        if request.request_id in active.held:
            return False
        if len(sequences) <= _FEW or (request.brings_drafts and not active.has_free):
            return True
        if self._has_to_earn:
            return False
        return class_of(request) not in active.class_of.values()

    @property
    def _has_to_earn(self) -> bool:
        """Whether one more plan would take more than its share of the time since the last."""
        return self._deciding_s > _DECIDING_AGAIN * self._since_made_s

    def _still_holds(
        self, active: ActivePlan, sequences: Seq[DecodingSequence], load: StepLoad
    ) -> bool:
        """Whether the plan of the last step is that of this one."""
        prompts = (active.plan.load.num_prompt_tokens > 0) == (load.num_prompt_tokens > 0)
        reads = active.plan.feeds or active.reading
        return prompts and not reads and self._sequences == sequences

    def _steps_to_keep(self, active: ActivePlan) -> int:
        """Steps after which a new plan has cost its share of the time, or a trial is due."""
        if active.lasts:
            return active.lasts - 1
        if not self._step_s:
            return _KEPT_LEAST
        share = max(_DECIDING / math.sqrt(len(active.held)), _DECIDING_LEAST)
        steps = math.ceil(self._deciding_s / (share * self._step_s))
        drafters = self._planner.drafters.values()
        unused = [d for d in drafters if d.facts.name not in active.plan.drafters]
        due = (d.spacing - d.since_trial for d in unused if not d.facts.looks_up)
        # A trial that is due and cannot be paid yet is no reason to plan more often.
        steps = min((max(each, steps // 2) for each in due if each < steps), default=steps)
        return min(max(steps, _KEPT_LEAST), _KEPT_MOST) - 1

    def _learn_acceptance(self, active: ActivePlan, outcomes: Seq[DraftOutcome]) -> tuple[int, int]:
        """How many drafts were checked, and how many accepted."""
        planner = self._planner
        drafted = kept = 0
        for request_id, drafter, num_drafted, num_accepted, _ in outcomes:
            drafted += num_drafted
            kept += num_accepted
            active.accepted[request_id] += num_accepted
            if drafter not in planner.drafters:
                continue
            if drafter == active.trial:
                planner.acceptance.observe_trial(request_id, drafter, num_drafted, num_accepted)
            else:
                planner.acceptance.observe(request_id, drafter, num_drafted, num_accepted)
        if drafted:
            # A run without any accepted draft that was not to be expected.
            self._in_vain = 1.0 if kept else self._in_vain * active.chance_of_none
            if self._in_vain < _SURPRISING:
                self._steps_left = 0
        return drafted, kept

    def _learn_times(self, active: ActivePlan) -> None:
        account = self._planner.account
        self._times.learn(active.context)
        if self._unplanned_s:
            account.earn(self._unplanned_s, active.forecast.token_s)
            account.steps_since_plain, self._unplanned_s = 0, 0.0

    def _charge(
        self, active: ActivePlan, forecast: StepForecast, seconds: float, accepted: int
    ) -> None:
        """What a step of a trial cost beyond the plain steps that its tokens would have taken."""
        plain_s, account = forecast.plain_s, self._planner.account
        if active.trial == PLAIN:
            account.charge(max(plain_s - forecast.seconds, 0.0))
            return
        lost_s = seconds - plain_s - forecast.token_s * accepted / len(active.held)
        account.charge(lost_s)
        active.trial_lost_s += lost_s

    def _end_trial(self, active: ActivePlan) -> None:
        """What a drafter's trial cost, deciding on it included, says when the next is due."""
        if active.trial and active.trial != PLAIN:
            deciding_s = 2.0 * self._deciding_s
            self._planner.account.charge(deciding_s)
            lost_s = active.trial_lost_s + deciding_s
            self._planner.learn_trial(active, lost_s / active.forecast.plain_s)


_MOST_CLASSES = 16
"""Of a drafter's classes those are told that showed most."""


def describe_models(planner: Planner) -> dict[str, Any]:
    """Everything that plans are made of, as plain JSON, times in seconds. From any thread.

    A class is named without the salt of its requests, which may be somebody's secret.
    """
    account, ledger = planner.account, planner.ledger
    return {
        **planner.times.describe(),
        "acceptance": _acceptance(planner),
        "account": {"balance_s": account.balance_s, "spent_s": account.spent_s},
        "ledger": ledger.describe(),
    }


def _acceptance(planner: Planner) -> dict[str, Any]:
    """By drafter and class, those with most trials first."""
    told = {}
    for name, classes in planner.acceptance.describe().items():
        most = sorted(classes.items(), key=lambda item: -sum(item[1]["trials"]))[:_MOST_CLASSES]
        told[name] = {_public(key): one for key, one in most}
    return told


def _public(class_key: str) -> str:
    """A class key with eight digits in place of its salt, the same ones for the same salt."""
    temperature, _, rest = class_key.partition("/")
    salt, _, grammar = rest.rpartition("/")
    shown = hashlib.sha256(salt.encode()).hexdigest()[:8] if salt else ""
    return f"{temperature}/{shown}/{grammar}"
